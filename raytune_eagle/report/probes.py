"""What `raytune-eagle probe` shows: a line as each environment comes, then a table of all."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Row = dict[str, Any]
STEPS = ("decode", "draft", "verify")


class Probing:
    """Prints one line for each environment that has come, to stderr; `count` are expected."""

    def __init__(self, console: Console, count: int) -> None:
        self._console, self._count, self._done = console, count, 0
        self._began = time.monotonic()

    def __call__(self, rows: Sequence[Row]) -> None:
        """Take the rows of one environment."""
        self._done += 1
        clock = time.strftime("%M:%S", time.gmtime(time.monotonic() - self._began))
        largest = {row["step"]: row for row in rows}
        figures = ", ".join(f"{row['step']} {row['p50_us']:.1f} µs" for row in largest.values() if row["p50_us"])
        found = rows[0]["error"] or figures
        line = f"{clock} {self._done}/{self._count} {spelled(rows[0]['env'])}: {found}"
        self._console.print(escape(line), highlight=False, soft_wrap=True)


def probe_table(rows: Iterable[Row]) -> Table:
    """One line per node and environment, fastest first."""
    table = Table(title="all-reduce, µs (median) at the largest message of each step")
    table.add_column("node", overflow="fold")
    table.add_column("environment", overflow="fold")
    for step in STEPS:
        table.add_column(step, justify="right", overflow="fold")
    table.add_column("of default", justify="right", overflow="fold")
    table.add_column("NCCL took", overflow="fold")
    for each in compared(rows):
        times = ["" if each.get(step) is None else f"{each[step]:.1f}" for step in STEPS]
        share = "" if each["share"] is None else f"{each['share']:.2f}x"
        found = each["error"] or each["chosen"] or ""
        table.add_row(escape(each["node"]), escape(each["environment"]), *times, share, escape(found))
    return table


def spelled(env: dict[str, str]) -> str:
    """An environment in one line."""
    return " ".join(f"{name}={value}" for name, value in env.items()) or "default"


def compared(rows: Iterable[Row]) -> list[Row]:
    """One row per node and environment: p50 in µs at the largest message of each step, fastest first, failures last.

    ``share`` is the verify step's time (without speculation: the decode step's) over that under the first environment,
    which is NCCL's default.
    """
    found: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: int(row["message_bytes"])):
        key = (row["node"], spelled(row["env"]))
        each = found.setdefault(key, {"node": key[0], "environment": key[1], "error": row["error"], "chosen": None})
        each[row["step"]] = row["p50_us"]
        each["chosen"] = row["chosen"] or each["chosen"]
    firsts: dict[str, Row] = {}
    for each in found.values():
        firsts.setdefault(each["node"], each)
    for each in found.values():
        step = "verify" if "verify" in each else "decode"
        base, own = firsts[each["node"]][step], each[step]
        each["share"] = own / base if base and own else None
    return sorted(found.values(), key=lambda each: (each["node"], each["share"] is None, each["share"] or 0.0))
