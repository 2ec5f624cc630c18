"""Charts of what the launches gave at one concurrency: who leads, how the search went, what it traded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from raytune_eagle.model.config import Speculative
from raytune_eagle.model.measurement import Measurement
from raytune_eagle.model.trial import Failed, TrialRecord
from raytune_eagle.ranking import Row, label, measurement
from raytune_eagle.report.facts import Facts, Standing
from raytune_eagle.report.page.chart import RAMP, Cell, Chart, Column, Trace, axis, dots, plain, scale

TOK_S = "tok/s"
_MOST_SHOWN = 15
_LONGEST = 26
_MOST_DRAWN = 1200
_ROW_COLUMNS = (
    Column("configuration"),
    Column("status"),
    Column("launches"),
    Column("throughput", TOK_S),
    Column("low", TOK_S),
    Column("high", TOK_S),
    Column("accept_len", "tokens"),
    Column("speedup", "x"),
)
Launch = tuple[TrialRecord, Measurement]
Launches = Sequence[Launch]


def launches(facts: Facts, level: int, *kinds: str) -> list[tuple[TrialRecord, Measurement]]:
    """Launches of these kinds that have figures at a concurrency."""
    return [(record, figures) for record, figures in facts.launches(level) if record.kind in kinds]


def thinned(found: list[Launch]) -> tuple[list[Launch], str]:
    """As many launches as a browser draws at ease, in order, and words for it: the fastest, and some of the rest."""
    if len(found) <= _MOST_DRAWN:
        return found, ""
    by_speed = sorted(found, key=lambda each: -each[1].output_throughput)
    half = _MOST_DRAWN // 2
    rest = by_speed[half :: max(1, (len(found) - half) // half)][:half]
    kept = sorted([*by_speed[:half], *rest], key=lambda each: each[0].number)
    return kept, f" Drawn are the fastest {half:,} and {len(rest):,} of the others; the table has all {len(found):,}."


def ranking(facts: Facts, standing: Standing) -> Chart | None:
    """The fastest configurations with their intervals, and plain decoding."""
    measured = [row for row in standing.rows if row.throughput is not None]
    shown = measured[:_MOST_SHOWN]
    shown += [row for row in measured[_MOST_SHOWN:] if row.kind == "baseline"][:1]
    if not shown:
        return None
    groups = {
        "searched": ("@accent", [r for r in shown if r.kind != "baseline" and r.status == "completed"]),
        "breaks a constraint": ("@warn", [r for r in shown if r.status == "infeasible"]),
        "ended early": ("@c4", [r for r in shown if r.kind != "baseline" and r.status == "hopeless"]),
        "plain decoding": ("@plain", [r for r in shown if r.kind == "baseline"]),
    }
    lead = shown[0]
    names = {"autorange": "reversed", "categoryorder": "array", "categoryarray": [_short(facts, row) for row in shown]}
    return Chart(
        key="ranking",
        title="Fastest configurations",
        about="Throughput with its 95 % interval, all launches of a configuration together. "
        "Where intervals overlap no difference is shown. They are over passes: launches of one configuration differ "
        "beside that, which the verdict counts in.",
        alt=f"{label(lead.config)} leads with {lead.throughput:.5g} tok/s; {len(shown)} configurations shown.",
        data=[_with_intervals(facts, name, colour, rows) for name, (colour, rows) in groups.items() if rows],
        layout={"xaxis": axis("output throughput, tok/s"), "yaxis": names, "showlegend": True},
        columns=_ROW_COLUMNS,
        rows=[_cells(facts, row) for row in measured],
        height=120 + 27 * len(shown),
        wide=True,
    )


def again(facts: Facts, standing: Standing) -> Chart | None:
    """What was launched again to confirm."""
    rows = [row for row in standing.again if row.throughput is not None]
    if not rows:
        return None
    names = {"autorange": "reversed", "categoryorder": "array", "categoryarray": [_short(facts, row) for row in rows]}
    return Chart(
        key="confirmed",
        title="Confirmed by other launches",
        about="The best of the search and plain decoding, launched again in turns on the same nodes, with prompts that "
        "the search never saw. The verdict is from these.",
        alt="; ".join(f"{label(row.config)}: {row.throughput:.5g} tok/s" for row in rows),
        data=[_with_intervals(facts, "confirmed", "@accent", rows)],
        layout={"xaxis": axis("output throughput, tok/s"), "yaxis": names},
        columns=_ROW_COLUMNS,
        rows=[_cells(facts, row) for row in rows],
        height=110 + 27 * len(rows),
        wide=True,
    )


def _cells(facts: Facts, row: Row) -> tuple[Cell, ...]:
    figures = (row.throughput, row.ci_low, row.ci_high, row.accept_len, row.speedup)
    return (facts.labels[row.numbers[0]], row.status, row.launches, *figures)


def _short(facts: Facts, row: Row) -> str:
    """Fits beside an axis; unique by the number of its first launch."""
    name = facts.labels[row.numbers[0]].removeprefix(f"{Speculative.ALGORITHM} ")
    return plain(f"{name if len(name) <= _LONGEST else name[: _LONGEST - 1] + '…'}  #{row.numbers[0]} ")


def _with_intervals(facts: Facts, name: str, colour: str, rows: Sequence[Row]) -> Trace:
    values = [(row.throughput or 0.0, row.ci_low or 0.0, row.ci_high or 0.0) for row in rows]
    over, under = [high - value for value, _, high in values], [value - low for value, low, _ in values]
    bar = {"type": "data", "symmetric": False, "color": colour, "thickness": 2, "width": 0}
    return dots(
        name,
        [value for value, _, _ in values],
        [_short(facts, row) for row in rows],
        {"color": colour, "size": 10},
        "%{y}<br>%{x:.5g} tok/s",
        error_x={**bar, "array": over, "arrayminus": under},
    )


def progress(facts: Facts, level: int) -> Chart:
    """Throughput of each launch in order, the best so far, plain decoding, and failures."""
    found = launches(facts, level, "trial")
    best, corners = 0.0, list[tuple[int, float]]()
    for record, figures in found:
        if record.status == "completed" and figures.output_throughput > best:
            best = figures.output_throughput
            corners.append((record.number, best))
    corners += [(found[-1][0].number, best)] if found else []
    failed = [record.number for record in facts.failed]
    drawn, words = thinned(found)
    plain_drawn, _ = thinned(launches(facts, level, "baseline"))
    cross = {"color": "@bad", "symbol": "x"}
    steps: Trace = {
        "type": "scatter",
        "mode": "lines",
        "name": "best so far",
        "x": [number for number, _ in corners],
        "y": [best for _, best in corners],
    }
    return Chart(
        key="progress",
        title="Best so far",
        about=f"Every launch in order; the line is the fastest until then, crosses are launches that failed.{words}",
        alt=f"After {len(found)} measured launches the best is {best:.5g} tok/s; {len(failed)} failed.",
        data=[
            _points("launch", drawn, {"color": "@accent", "opacity": 0.5, "size": 7}),
            steps | {"line": {"color": "@accent", "width": 3, "shape": "hv"}, "hoverinfo": "skip"},
            _points("plain decoding", plain_drawn, {"color": "@plain", "symbol": "diamond"}),
            dots(
                "failed", failed, [0] * len(failed), cross, "#%{x} %{text}: failed", launches=failed, cliponaxis=False
            ),
        ],
        layout={
            "xaxis": axis("launch", rangemode="tozero"),
            "yaxis": axis("output throughput, tok/s", rangemode="tozero"),
            "showlegend": True,
        },
        columns=(Column("launch", of_launch=True), *map(Column, ("kind", "status", "throughput, tok/s", "failure"))),
        rows=[_progress_row(record, level) for record in facts.records],
        height=440,
    )


def _progress_row(record: TrialRecord, level: int) -> tuple[Cell, ...]:
    figures = measurement(record, level)
    failure = record.outcome.failure_class if isinstance(record.outcome, Failed) else None
    throughput = figures.output_throughput if figures else None
    return record.number, record.kind, record.status, throughput, failure


def _points(name: str, found: Launches, marker: Trace) -> Trace:
    numbers = [record.number for record, _ in found]
    speeds = [figures.output_throughput for _, figures in found]
    return dots(name, numbers, speeds, marker, "#%{x} %{text}<br>%{y:.5g} tok/s", launches=numbers)


def trade(facts: Facts, level: int) -> Chart | None:
    """accept_len against cycle time: what a long tree wins and what it costs."""
    found = [(r, f) for r, f in launches(facts, level, "trial", "confirm") if f.accept_len]
    if not found:
        return None
    rows = [(r.number, f.accept_len, f.cycle_ms, f.output_throughput) for r, f in found]
    whole, (found, words) = len(found), thinned(found)
    cycles, lengths = [f.cycle_ms for _, f in found], [f.accept_len or 0.0 for _, f in found]
    speeds, numbers = [f.output_throughput for _, f in found], [r.number for r, _ in found]
    base = [f.cycle_ms for _, f in launches(facts, level, "baseline")]
    right, top = max([*cycles, *base]) * 1.08, max(lengths) * 1.1
    ring = {"color": "@surface", "width": 1}
    marker = {"color": speeds, "colorscale": RAMP, "showscale": True, "colorbar": scale(TOK_S), "line": ring, "size": 9}
    hover = "#%{text}<br>%{y:.3g} tokens in %{x:.4g} ms<br>%{marker.color:.5g} tok/s"
    star = {"color": "@plain", "symbol": "diamond", "size": 11}
    return Chart(
        key="trade",
        title="Accepted length against cycle time",
        about="Up is more tokens per verify round, left is quicker rounds; along a dotted line throughput is the same. "
        f"What lies below the line through plain decoding is slower than it, however much it accepts.{words}",
        alt=f"{whole} launches: accept_len {min(lengths):.3g} to {max(lengths):.3g} tokens, cycle "
        f"{min(cycles):.4g} to {max(cycles):.4g} ms.",
        data=[
            *_iso_lines(right, top, level, speeds),
            dots("launch", cycles, lengths, marker, hover, launches=numbers),
            dots("plain decoding", base, [1] * len(base), star, "plain decoding<br>%{x:.4g} ms per token"),
        ],
        layout={"xaxis": axis("cycle, ms", range=[0, right]), "yaxis": axis("accept_len, tokens", range=[0, top])},
        columns=(
            Column("launch", of_launch=True),
            Column("accept_len", "tokens"),
            Column("cycle", "ms"),
            Column("throughput", TOK_S),
        ),
        rows=rows,
        height=440,
        legend=(("@ramp1", "launch"), ("@plain", "plain decoding: one token a round")),
    )


def _iso_lines(right: float, top: float, level: int, speeds: Sequence[float]) -> Iterator[Trace]:
    """Rays of equal throughput, which is level × accept_len / cycle; `right` in ms, `top` in tokens."""
    look = {"color": "@iso", "width": 1, "dash": "dot"}
    for speed in round_values(min(speeds), max(speeds)):
        slope = speed / level / 1000  # tokens per millisecond and stream
        end = 0.96 * min(right, top / slope)
        ray: Trace = {"type": "scatter", "mode": "lines+text", "x": [0, end], "y": [0, end * slope], "line": look}
        side = "middle left" if end < 0.9 * right else "top left"
        name = {"text": ["", f"{speed:g}"], "textposition": side, "textfont": {"color": "@muted", "size": 11}}
        yield ray | name | {"hoverinfo": "skip", "showlegend": False}


def round_values(low: float, high: float) -> list[float]:
    """At most seven round values from `low` to `high`, both above 0."""
    step = 10 ** math.floor(math.log10(max(high - low, high * 0.05)))
    step = next(each for each in (step / 5, step / 2, step, step * 2) if (high - low) / each <= 6)  # noqa: PLR2004
    values = [round(step * place, 10) for place in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return values or [round((low + high) / 2, 1)]
