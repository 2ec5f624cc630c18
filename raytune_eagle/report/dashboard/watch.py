"""What the live page shows, from the records and events of a study; it reads only what is new since the last look."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from raytune_eagle.live import Live, put_aside
from raytune_eagle.model.trial import Completed, Event, Failed, TrialRecord
from raytune_eagle.ranking import label
from raytune_eagle.report.facts import measurements, written_spec
from raytune_eagle.report.outlook import best_so_far, levels, node_hours, node_states, seconds_left
from raytune_eagle.store import ParquetStore

_MOST_TRIALS, _MOST_NOTES = 60, 12
_NOTES = (
    "study_started",
    "study_done",
    "node_quarantined",
    "node_lost",
    "node_put_aside",
    "node_back",
    "retry",
    "swept",
)


class Watch:
    """One study, looked at again and again.

    Args:
        results: folder of records.
        study: its name.
    """

    def __init__(self, results: str, study: str) -> None:
        self.study, self.live = study, Live(results, study)
        self._store = ParquetStore(results)
        self._records: list[TrialRecord] = []
        self._kept: list[Event] = []
        self._seen: tuple[object, ...] = ()
        self._of_records = self._summed()

    def look(self) -> dict[str, Any]:
        """Everything that the page shows, as plain JSON values; times are seconds since the epoch."""
        self._read()
        events, records, wishes = self._events(), self._records, self.live.wishes()
        spec, writer = written_spec(events), self.live.writer()
        states = node_states(events) if writer else []
        budget = int((spec.get("budget") or {}).get("trials") or 0)
        price, now = (spec.get("node") or {}).get("cost_per_hour"), time.time()
        trials = [record for record in records if record.kind == "trial"]
        hours = node_hours(records, states, now)
        return {
            "study": self.study,
            "now": now,
            "writer": writer,
            "stopping": "stop" in wishes and writer is not None,
            "trials": len(trials),
            "budget": budget,
            "failed": sum(isinstance(record.outcome, Failed) for record in records),
            "left_s": seconds_left(records, budget, len(states)) if writer else None,
            "node_hours": hours,
            "cost": None if price is None else hours * float(price),
            "nodes": [each._asdict() | {"aside": each.name in put_aside(wishes)} for each in states],
            **self._of_records,
            "notes": [_note(event) for event in events if event.name in _NOTES][-1 : -_MOST_NOTES - 1 : -1],
        }

    def _read(self) -> None:
        seen = self._store.listing(self.study)
        if seen != self._seen:
            self._records = sorted(
                self._store.reading(self.study, brief=True).records, key=lambda record: record.ended_at
            )
            self._kept, self._seen = self._store.read_events(self.study), seen
            self._of_records = self._summed()

    def _summed(self) -> dict[str, Any]:
        """What only another record changes: worked out once for each."""
        records = self._records
        best = best_so_far(records, levels(records, written_spec(self._kept)))
        return {
            "best": [each._asdict() for each in best],
            "launches": [_launch(record) for record in records[-1 : -_MOST_TRIALS - 1 : -1]],
            "course": _course(records),
            "failures": _failures(records),
        }

    def _events(self) -> list[Event]:
        """Kept ones, and of the run that goes on what it told since, which is kept within a minute."""
        told = self.live.events()
        return [event for event in self._kept if not told or event.at < told[0].at] + told


def _launch(record: TrialRecord) -> dict[str, Any]:
    outcome = record.outcome
    why = f"{outcome.failure_class}: {outcome.failure_detail}" if isinstance(outcome, Failed) else ""
    figures = outcome.measurements if isinstance(outcome, Completed) else ()
    return {
        "number": record.number,
        "kind": record.kind,
        "node": record.node,
        "status": record.status,
        "label": label(record.config),
        "command": record.config.command(),
        "ended": record.ended_at,
        "seconds": record.ended_at - record.started_at,
        "figures": [[m.concurrency, m.output_throughput, record.speedup.get(m.concurrency)] for m in figures],
        "why": why or "; ".join(record.violations),
        "log": f"{record.number:05d}-{record.config.uid}",
    }


def _course(records: list[TrialRecord]) -> dict[str, list[list[float]]]:
    """Throughput of each launch by concurrency, [number, tokens/s], for the small chart."""
    course: dict[str, list[list[float]]] = {}
    for record in records:
        for m in measurements(record) if record.kind == "trial" else ():
            course.setdefault(str(m.concurrency), []).append([record.number, m.output_throughput])
    return {level: sorted(points) for level, points in course.items()}


def _failures(records: list[TrialRecord]) -> list[dict[str, Any]]:
    failed = [(record, record.outcome) for record in records if isinstance(record.outcome, Failed)]
    counts = Counter(outcome.failure_class for _, outcome in failed)
    latest = {outcome.failure_class: (record.number, outcome.failure_detail) for record, outcome in failed}
    return [{"name": n, "count": c, "number": latest[n][0], "detail": latest[n][1]} for n, c in counts.most_common()]


def _note(event: Event) -> dict[str, Any]:
    detail = "" if event.name == "study_started" else event.detail
    return {"at": event.at, "name": event.name.replace("_", " "), "node": event.node or "", "detail": detail}
