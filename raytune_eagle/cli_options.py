"""Checks of options that several commands take."""

from __future__ import annotations

from collections.abc import Callable

import click

from raytune_eagle.nodes.address import HOST_PORT, SIMULATED, host_and_port

Check = Callable[[click.Context, click.Parameter, str | None], str | None]


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
