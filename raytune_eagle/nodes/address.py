"""Addresses of clusters, as ``--cluster`` takes them; without Ray, which takes a second to import."""

from __future__ import annotations

import re
from collections.abc import Sequence

from raytune_eagle.errors import SpecError

SIMULATED = "simulated:"
"""In front of what is simulated (`raytune_eagle.simulation`)."""
HOST_PORT = "HOST:PORT"
_ADDRESS = re.compile(r"(\[[^\s/\[\]]+\]|[^\s/\[\]:]+):([0-9]{1,5})")
_PORTS = range(1, 65536)


def host_and_port(
    where: str, choices: Sequence[str] = ("`auto`", HOST_PORT), given_as: str = "--cluster"
) -> tuple[str, int]:
    """Take ``HOST:PORT`` apart; an IPv6 address has brackets around it.

    Raises:
        SpecError: it is none; the line names `given_as`, and `choices`, all that may stand in its place.
    """
    found = _ADDRESS.fullmatch(where)
    if not found or int(found[2]) not in _PORTS:
        given = where or '""'
        raise SpecError(f"{given_as} {given}: give {', '.join(choices[:-1])} or {choices[-1]}")
    return found[1].strip("[]"), int(found[2])
