"""What the machines did, and when: the same for every concurrency."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from raytune_eagle.model.trial import Failed, TrialRecord
from raytune_eagle.report.facts import Facts
from raytune_eagle.report.page.chart import Chart, Column, axis, plain

PHASES = {"launch": "@c1", "ready": "@c2", "warm-up": "@c3", "bench": "@accent", "teardown": "@c4", "failed": "@bad"}
_FIELDS = {name: f"{name.replace('-', '')}_s" for name in PHASES if name != "failed"}
_MOST_BINS = 720
"""Columns of the timeline: finer than a screen shows it is of no use."""
_HOURS_FROM_S = 7200


class Segment(NamedTuple):
    """A node in one phase of one launch; times in seconds since the epoch."""

    node: str
    phase: str
    number: int
    start: float
    end: float


def segments(records: Iterable[TrialRecord]) -> Iterator[Segment]:
    """Phases of every launch, end to end from its start; one that failed is of its own phase."""
    for record in records:
        if isinstance(record.outcome, Failed):
            yield Segment(record.node, "failed", record.number, record.started_at, record.ended_at)
            continue
        at = record.started_at
        for phase, name in _FIELDS.items():
            seconds = getattr(record.outcome.phases, name) or 0.0
            yield Segment(record.node, phase, record.number, at, at + seconds)
            at += seconds


def busy_share(facts: Facts) -> dict[str, float]:
    """Share of the study's span that each node spent on launches."""
    start, end = facts.span
    busy = dict.fromkeys(facts.nodes, 0.0)
    for segment in segments(facts.records):
        busy[segment.node] += segment.end - segment.start
    return {node: min(1.0, busy[node] / (end - start)) if end > start else 0.0 for node in facts.nodes}


def timeline(facts: Facts) -> Chart:
    """What each node did when; each column shows the phase that took most of it."""
    start, end = facts.span
    width = max(1.0, (end - start) / _MOST_BINS)
    unit, per = ("hours", 3600) if end - start > _HOURS_FROM_S else ("minutes", 60)
    names, rows = list(PHASES), [_row(facts, node, width) for node in facts.nodes]
    busy = busy_share(facts)
    whole = math.fsum(busy.values()) / len(busy)
    steps = [[(place + edge) / len(names), colour] for place, colour in enumerate(PHASES.values()) for edge in (0, 1)]
    trace = {
        "type": "heatmap",
        "x": [round((place + 0.5) * width / per, 4) for place in range(len(rows[0]))],
        "y": [plain(node) for node in facts.nodes],
        "z": [[cell and names.index(cell.phase) for cell in row] for row in rows],
        "text": [[f"#{cell.number} {cell.phase}" if cell else "" for cell in row] for row in rows],
        "zmin": -0.5,
        "zmax": len(names) - 0.5,
        "hovertemplate": f"%{{y}}, after %{{x:.2f}} {unit}<br>%{{text}}<extra></extra>",
    }
    rows_axis = {"showgrid": False, "type": "category", "autorange": "reversed"}
    return Chart(
        key="timeline",
        title="What the nodes did",
        about=f"Nodes were at work {whole:.0%} of the time. Gaps are waiting: for a machine, for a neighbour's turn, "
        "or for the study to be taken up again.",
        alt="; ".join(f"{node} busy {share:.0%}" for node, share in busy.items()),
        data=[trace | {"colorscale": steps, "showscale": False, "ygap": 6, "hoverongaps": False}],
        layout={"xaxis": axis(f"{unit} since the first launch", showgrid=False), "yaxis": rows_axis},
        columns=(Column("node"), Column("launches"), *(Column(name, "s") for name in PHASES), Column("busy", "share")),
        rows=[_node_row(facts, node, busy[node]) for node in facts.nodes],
        height=120 + 44 * len(facts.nodes),
        legend=[(colour, name) for name, colour in PHASES.items()],
        wide=True,
    )


def _row(facts: Facts, node: str, width: float) -> list[Segment | None]:
    """One node's columns of so many seconds: the segment that fills most of each, None where it mostly waited."""
    start, end = facts.span
    columns: list[dict[Segment, float]] = [{} for _ in range(max(1, math.ceil((end - start) / width)))]
    for each in segments(record for record in facts.records if record.node == node):
        first, last = int((each.start - start) / width), math.ceil((each.end - start) / width)
        for place in range(first, min(len(columns), last)):
            left = start + place * width
            columns[place][each] = min(each.end, left + width) - max(each.start, left)
    tops = [max(column, key=lambda each: column[each], default=None) for column in columns]
    waits = [math.fsum(column.values()) < width / 2 for column in columns]
    return [None if waited else top for top, waited in zip(tops, waits, strict=True)]


def _node_row(facts: Facts, node: str, busy: float) -> list[str | int | float | None]:
    seconds = dict.fromkeys(PHASES, 0.0)
    own = [record for record in facts.records if record.node == node]
    for each in segments(own):
        seconds[each.phase] += each.end - each.start
    return [node, len(own), *seconds.values(), busy]
