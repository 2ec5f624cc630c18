"""Options that several commands take, and their checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from raytune_eagle.errors import SpecError
from raytune_eagle.nodes.address import HOST_PORT, SIMULATED, host_and_port

CLUSTER = "`local` starts Ray on this machine, `auto` joins the running cluster, else HOST:PORT of one."
Check = Callable[[click.Context, click.Parameter, str | None], str | None]


class Finite(click.FloatRange):
    """A number within limits; click lets nan through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As click has it, and finite."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


def cluster_check(*words: str, simulated: bool = False) -> Check:
    """Make the check of a ``--cluster`` that takes these words, HOST:PORT and, if so, ``simulated:NAME``.

    It raises `SpecError` before anything is imported or asked.
    """
    choices = [*(f"`{word}`" for word in words), HOST_PORT, *([f"{SIMULATED}NAME"] if simulated else [])]

    def check(_context: click.Context, _option: click.Parameter, where: str | None) -> str | None:
        is_simulated = simulated and where is not None and where.startswith(SIMULATED)
        if where is not None and where not in words and not is_simulated:
            host_and_port(where, choices)
        return where

    return check


def nodes_option(text: str) -> Callable[[Any], Any]:
    """Make the ``--nodes`` of a command; what it gives is to go through `nodes_to_make`."""
    return click.option("--nodes", type=click.IntRange(min=1), help=f"{text}; default: 1.")


def nodes_to_make(nodes: int | None, where: str) -> int:
    """How many local or simulated ones; of a running cluster all nodes are used, so `SpecError` if it was told some."""
    if nodes is not None and where != "local" and not where.startswith(SIMULATED):
        raise SpecError(f"--nodes {nodes}: with --cluster {where} all nodes of the cluster are used; leave it out")
    return nodes or 1


def local_or_cluster(text: str) -> Callable[[Any], Any]:
    """Make the ``--cluster`` of a command that looks at nodes, this machine by default; `text` is its help."""
    return click.option(
        "--cluster",
        "where",
        default="local",
        show_default=True,
        metavar="local|auto|ADDRESS",
        callback=cluster_check("local", "auto"),
        help=text,
    )
