"""What went wrong and what to do about it, and what was checked of the servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from raytune_eagle.failures.classes import RULES
from raytune_eagle.model.trial import Failed, TrialRecord
from raytune_eagle.report.facts import Facts
from raytune_eagle.report.page.chart import Chart, Column, axis, height, lying

_SHOWN_DETAIL = 300
_FEW = 10  # launches, below which an axis would have fractions of them


class FailureClass(NamedTuple):
    """Launches that failed alike, with what to do about it and one of them to look at."""

    name: str
    launches: int
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
    whole = {"dtick": 1} if found[0].launches < _FEW else {}
    columns = (*map(Column, ("class", "launches", "phase", "what to do")), Column("for example", of_launch=True))
    return Chart(
        key="failures",
        title="Failures by class",
        about=f"{len(facts.failed)} of {len(facts.records)} launches failed ({share:.0%}).",
        alt="; ".join(f"{each.name}: {each.launches}" for each in found),
        data=[lying([each.name for each in found], [each.launches for each in found], "@bad", "d")],
        layout={
            "xaxis": axis("launches", rangemode="tozero", **whole),
            "yaxis": {"autorange": "reversed"},
        },
        columns=columns,
        rows=[(each.name, each.launches, each.phases, each.advice, each.example) for each in found],
        height=height(len(found)),
    )


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
        for gate in record.outcome.gates:
            counts.setdefault(gate.name, Counter())[gate.verdict] += 1
            if gate.verdict != "passed":
                said[gate.name] = f"#{record.number}: {gate.detail}"
    return [
        GateCount(name, found["passed"], found["warning"], found["failed"], found["unknown"], said.get(name, ""))
        for name, found in sorted(counts.items())
    ]
