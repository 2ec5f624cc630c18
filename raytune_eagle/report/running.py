"""What a terminal shows of a bench of a running server."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raytune_eagle.figures import CategorySummary
from raytune_eagle.model.measurement import Gate, Measurement

_COLOURS = {"failed": "bold red", "warning": "yellow"}


def show_bench(
    title: str,
    figures: tuple[Sequence[Measurement], Sequence[CategorySummary]],
    gates: Sequence[Gate],
    console: Console,
) -> None:
    """Figures by concurrency and by category, then what was seen of the server."""
    measurements, categories = figures
    console.print(_table(title, measurements))
    console.print(_categories(categories))
    for gate in gates:
        if gate.verdict in _COLOURS:
            console.print(f"[{_COLOURS[gate.verdict]}]{escape(gate.line)}[/]", soft_wrap=True, highlight=False)


def _table(title: str, measurements: Sequence[Measurement]) -> Table:
    table = Table(title=title)
    names = ("streams", "tok/s", "95 % interval", "passes", "accept_len", "cycle ms", "burst tok/s")
    for name in (*names, "ttft ms p50", "p95", "itl ms p50", "p95"):
        table.add_column(name, justify="right", overflow="fold")
    for m in measurements:
        table.add_row(
            str(m.concurrency),
            f"{m.output_throughput:.1f}",
            f"{m.ci_low:.1f}–{m.ci_high:.1f}",
            str(m.passes),
            "" if m.accept_len is None else f"{m.accept_len:.2f}",
            f"{m.cycle_ms:.1f}",
            f"{m.burst_throughput:.1f}",
            *(f"{ms:.1f}" for ms in (m.ttft_p50_ms, m.ttft_p95_ms, m.itl_p50_ms, m.itl_p95_ms)),
        )
    return table


def _categories(categories: Sequence[CategorySummary]) -> Table:
    table = Table(title="by category of prompts")
    table.add_column("category", overflow="fold")
    for name in ("streams", "requests", "tokens", "tok/s", "accept_len"):
        table.add_column(name, justify="right", overflow="fold")
    for each in categories:
        length = "" if each.accept_len is None else f"{each.accept_len:.2f}"
        counts = (each.concurrency, each.requests, each.completion_tokens)
        table.add_row(escape(each.category), *map(str, counts), f"{each.output_throughput:.1f}", length)
    return table
