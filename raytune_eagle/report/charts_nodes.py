"""Charts of the machines and of what went wrong: the same for every concurrency."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from raytune_eagle.logs import RULES
from raytune_eagle.model import Failed, TrialRecord
from raytune_eagle.report.chart import Chart, Column, axis, plain
from raytune_eagle.report.facts import Facts

PHASES = {"launch": "@c1", "ready": "@c2", "warm-up": "@c3", "bench": "@accent", "teardown": "@c4", "failed": "@bad"}
_PHASE_FIELDS = {"launch": "launch_s", "ready": "ready_s", "warm-up": "warmup_s", "bench": "bench_s", "teardown": "teardown_s"}
_MOST_BINS = 720
"""Columns of the timeline: finer than a screen shows it is of no use."""
_SHOWN_DETAIL = 300


class Segment(NamedTuple):
    """A node in one phase of one launch; times in seconds since the epoch."""

    node: str
    phase: str
    number: int
    start: float
    end: float


def segments(records: Sequence[TrialRecord]) -> Iterator[Segment]:
    """Phases of every launch, end to end from its start; one that failed is of its own phase."""
    for record in records:
        if isinstance(record.outcome, Failed):
            yield Segment(record.node, "failed", record.number, record.started_at, record.ended_at)
            continue
        at = record.started_at
        for phase, name in _PHASE_FIELDS.items():
            seconds = getattr(record.outcome.phases, name) or 0.0
            yield Segment(record.node, phase, record.number, at, at + seconds)
            at += seconds


def busy_share(facts: Facts) -> dict[str, float]:
    """Share of the study's span that each node spent on launches."""
    start, end = facts.span
    busy = Counter[str]()
    for segment in segments(facts.records):
        busy[segment.node] += segment.end - segment.start  # type: ignore[assignment] # seconds are fractions
    return {node: min(1.0, busy[node] / (end - start)) if end > start else 0.0 for node in facts.nodes}


def timeline(facts: Facts) -> Chart:
    """What each node did when; each column shows the phase that took most of it."""
    start, end = facts.span
    width = max(1.0, (end - start) / _MOST_BINS)
    bins = max(1, math.ceil((end - start) / width))
    unit, per = ("hours", 3600) if end - start > 7200 else ("minutes", 60)  # noqa: PLR2004 - two hours
    names, places = list(PHASES), {node: row for row, node in enumerate(facts.nodes)}
    shares = [[Counter[tuple[int, int]]() for _ in range(bins)] for _ in facts.nodes]
    for each in segments(facts.records):
        for place in range(int((each.start - start) / width), min(bins, math.ceil((each.end - start) / width))):
            left, right = start + place * width, start + (place + 1) * width
            covered = max(0.0, min(each.end, right) - max(each.start, left))
            shares[places[each.node]][place][names.index(each.phase), each.number] += covered  # type: ignore[assignment]
    tops = [[cell.most_common(1)[0] if cell else None for cell in row] for row in shares]
    found = [[top[0] if top and top[1] > width / 2 else None for top in row] for row in tops]
    busy = busy_share(facts)
    whole = math.fsum(busy.values()) / len(busy)
    scale = [[(i + edge) / len(names), colour] for i, colour in enumerate(PHASES.values()) for edge in (0, 1)]
    trace = {
        "type": "heatmap",
        "x": [round((place + 0.5) * width / per, 4) for place in range(bins)],
        "y": [plain(node) for node in facts.nodes],
        "z": [[cell and cell[0] for cell in row] for row in found],
        "text": [[f"#{cell[1]} {names[cell[0]]}" if cell else "" for cell in row] for row in found],
        "zmin": -0.5,
        "zmax": len(names) - 0.5,
        "colorscale": scale,
        "showscale": False,
        "ygap": 6,
        "hoverongaps": False,
        "hovertemplate": f"%{{y}}, after %{{x:.2f}} {unit}<br>%{{text}}<extra></extra>",
    }
    return Chart(
        key="timeline",
        title="What the nodes did",
        about=f"Nodes were at work {whole:.0%} of the time. Gaps are waiting: for a machine, for a neighbour's turn, for a resume.",
        alt="; ".join(f"{node} busy {share:.0%}" for node, share in busy.items()),
        data=[trace],
        layout={"xaxis": axis(f"{unit} since the first launch", showgrid=False), "yaxis": {"automargin": True, "showgrid": False, "type": "category", "autorange": "reversed"}},
        columns=[Column("node"), Column("launches"), *(Column(name, "s") for name in PHASES), Column("busy", "share")],
        rows=[_node_row(facts, node, busy[node]) for node in facts.nodes],
        height=120 + 44 * len(facts.nodes),
        legend=[(colour, name) for name, colour in PHASES.items()],
    )


def _node_row(facts: Facts, node: str, busy: float) -> list[str | int | float | None]:
    seconds = dict.fromkeys(PHASES, 0.0)
    own = [record for record in facts.records if record.node == node]
    for each in segments(own):
        seconds[each.phase] += each.end - each.start
    return [node, len(own), *seconds.values(), busy]


class FailureClass(NamedTuple):
    """Launches that failed alike, with what to do about it and one of them to look at."""

    name: str
    count: int
    phases: str
    advice: str
    example: int
    label: str
    detail: str
    log_tail: str


def failure_classes(facts: Facts) -> list[FailureClass]:
    """Most frequent first."""
    groups: dict[str, list[tuple[TrialRecord, Failed]]] = {}
    for record in facts.failed:
        if isinstance(record.outcome, Failed):
            groups.setdefault(record.outcome.failure_class, []).append((record, record.outcome))
    return [_failure(facts, *group) for group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))]


def _failure(facts: Facts, name: str, found: list[tuple[TrialRecord, Failed]]) -> FailureClass:
    record, outcome = found[-1]
    advice = "; or ".join(dict.fromkeys(rule.advice for rule in RULES if rule.name == name))
    phases = ", ".join(dict.fromkeys(failed.failure_phase for _, failed in found))
    detail, tail = outcome.failure_detail[:_SHOWN_DETAIL], outcome.log_tail
    return FailureClass(name, len(found), phases, advice, record.number, facts.labels[record.number], detail, tail)


def failures(facts: Facts, found: Sequence[FailureClass]) -> Chart | None:
    """How often launches failed, by class."""
    if not found:
        return None
    share = len(facts.failed) / len(facts.records)
    return Chart(
        key="failures",
        title="Failures by class",
        about=f"{len(facts.failed)} of {len(facts.records)} launches failed ({share:.0%}).",
        alt="; ".join(f"{each.name}: {each.count}" for each in found),
        data=[{"type": "bar", "orientation": "h", "x": [f.count for f in found], "y": [plain(f.name) for f in found], "marker": {"color": "@bad"}, "texttemplate": "%{x}", "textposition": "auto", "hovertemplate": "%{y}: %{x}<extra></extra>"}],
        layout={"xaxis": axis("launches", rangemode="tozero"), "yaxis": {"autorange": "reversed", "automargin": True}},
        columns=[Column("class"), Column("launches"), Column("phase"), Column("what to do"), Column("for example", of_launch=True)],
        rows=[(f.name, f.count, f.phases, f.advice, f.example) for f in found],
        height=110 + 34 * len(found),
    )  # fmt: skip


class GateCount(NamedTuple):
    """How often a gate gave each verdict, and what it last said when it was not content."""

    name: str
    passed: int
    warning: int
    failed: int
    unknown: int
    detail: str


def gates(facts: Facts) -> list[GateCount]:
    """Gates of all launches; empty where none was asked."""
    counts: dict[str, Counter[str]] = {}
    said: dict[str, str] = {}
    for record in facts.records:
        for gate in getattr(record.outcome, "gates", ()):
            counts.setdefault(gate.name, Counter())[gate.verdict] += 1
            if gate.verdict != "passed":
                said[gate.name] = f"#{record.number}: {gate.detail}"
    order = ("passed", "warning", "failed", "unknown")
    return [GateCount(name, *(found[each] for each in order), said.get(name, "")) for name, found in sorted(counts.items())]
