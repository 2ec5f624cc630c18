"""Everything a page says of a study, read from its records alone."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raytune_eagle.errors import SpecError
from raytune_eagle.identity import STARTED
from raytune_eagle.model.measurement import Measurement
from raytune_eagle.model.trial import Completed, Event, Failed, TrialRecord
from raytune_eagle.ranking import Row, confirmed, leaderboard, measurement, names_of
from raytune_eagle.report.verdict import Sides, fastest, in_words, sides
from raytune_eagle.store import ParquetStore


@dataclass(frozen=True)
class Standing:
    """What came out at one concurrency.

    Attributes:
        sentence: the verdict in words.
        rows: of the leaderboard, confirmations apart.
        again: points that were launched again to confirm.
        found: what the verdict is about; None when nothing that was searched has figures and keeps the limits.
        launch: what to launch, plain decoding included; None for nothing.
        plain: mean figures of plain decoding, of the launches that the verdict is about; None without any.
    """

    concurrency: int
    sentence: str
    rows: list[Row]
    again: list[Row]
    found: Sides | None
    launch: Row | None
    plain: dict[str, float] | None

    @property
    def best(self) -> Row | None:
        """The fastest point that was searched."""
        return self.found.best if self.found else None


class Facts:
    """One study, read once.

    Args:
        store: with a study of this name.
        study: its name.

    Raises:
        SpecError: it has no trial yet.

    Attributes:
        records: all launches by number, brief, but with requests where a verdict needs them.
        events: of the study and its nodes, by time; those of single launches are in the records.
        probes: timings of all-reduces, by time; none where nobody asked for them.
        problems: a line for each file that cannot be used.
    """

    def __init__(self, store: ParquetStore, study: str) -> None:
        self.study = study
        brief, self.problems = store.reading(study, brief=True)
        if not brief:
            raise SpecError(f"study {study!r} has no trial yet")
        levels = sorted({figures.concurrency for record in brief for figures in measurements(record)})
        self._launches: dict[int, list[tuple[TrialRecord, Measurement]]] = {}
        self._rows = {level: leaderboard(brief, level) for level in levels}  # seconds of thousands of launches
        chosen = _with_answers(brief, self._rows)
        answered = store.with_requests(r for r in brief if r.number in chosen)
        self.problems += answered.problems
        full = {record.number: record for record in answered.records}
        self.records: list[TrialRecord] = [full.get(record.number, record) for record in brief]
        self.events: list[Event] = [event for event in store.read_events(study) if event.name in _STUDY_EVENTS]
        self.probes: list[dict[str, Any]] = store.read_probes(study)

    @cached_property
    def spec(self) -> dict[str, Any]:
        """As of the latest run; empty when that is not known."""
        return written_spec(self.events)

    @cached_property
    def concurrencies(self) -> list[int]:
        """Numbers of streams that were measured."""
        return sorted({figures.concurrency for record in self.measured for figures in measurements(record)})

    @cached_property
    def measured(self) -> list[TrialRecord]:
        """Launches with figures."""
        return [record for record in self.records if isinstance(record.outcome, Completed)]

    @cached_property
    def failed(self) -> list[TrialRecord]:
        """Launches without."""
        return [record for record in self.records if isinstance(record.outcome, Failed)]

    @cached_property
    def nodes(self) -> list[str]:
        """Machines that ran something."""
        return sorted({record.node for record in self.records})

    @cached_property
    def span(self) -> tuple[float, float]:
        """First start and last end, seconds since the epoch."""
        return min(r.started_at for r in self.records), max(r.ended_at for r in self.records)

    @property
    def node_hours(self) -> float:
        """Hours that launches took, over all nodes."""
        return math.fsum(record.ended_at - record.started_at for record in self.records) / 3600

    @property
    def cost(self) -> float | None:
        """In the currency of ``node.cost_per_hour``; None where the spec has none."""
        price = (self.spec.get("node") or {}).get("cost_per_hour")
        return None if price is None else float(price) * self.node_hours

    @cached_property
    def labels(self) -> dict[int, str]:
        """Short name of each launch, with the environment that tells it from others."""
        name_of = names_of(record.config for record in self.records)
        return {record.number: name_of(record.config) for record in self.records}

    def launches(self, concurrency: int) -> list[tuple[TrialRecord, Measurement]]:
        """Launches that have figures at a concurrency, with these."""
        if concurrency not in self._launches:  # asked for by every chart
            found = ((record, measurement(record, concurrency)) for record in self.measured)
            self._launches[concurrency] = [(record, figures) for record, figures in found if figures]
        return self._launches[concurrency]

    def standing(self, concurrency: int) -> Standing:
        """What came out at a concurrency."""
        rows = self._rows.get(concurrency) or leaderboard(self.records, concurrency)
        chief = _chief(self.records, rows)
        found = sides(chief, concurrency)
        return Standing(
            concurrency=concurrency,
            sentence=in_words(found, chief, concurrency),
            rows=rows,
            again=confirmed(self.records, concurrency),
            found=found,
            launch=fastest(found) if found else None,
            plain=self._plain(found, concurrency),
        )

    def _plain(self, found: Sides | None, concurrency: int) -> dict[str, float] | None:
        """Of the launches that the verdict compares with; of all baselines where there is no verdict."""
        if found is not None and found.plain is not None:
            return self.figures_of(found.plain, concurrency)
        return _mean_figures([f for record, f in self.launches(concurrency) if record.kind == "baseline"])

    def figures_of(self, row: Row, concurrency: int) -> dict[str, float] | None:
        """Mean figures of all launches of a point."""
        return _mean_figures([f for record, f in self.launches(concurrency) if record.number in row.numbers])


_CHIEF = 50
_STUDY_EVENTS = {STARTED, "study_done", "node_quarantined", "node_lost"}


def written_spec(events: Iterable[Event]) -> dict[str, Any]:
    """The spec of a study's latest run, as plain JSON values; empty when that is not known."""
    started = [event.detail for event in events if event.name == STARTED]
    return dict(json.loads(started[-1])) if started else {}


def measurements(record: TrialRecord) -> Sequence[Measurement]:
    """Figures of a launch, none for one that failed."""
    return record.outcome.measurements if isinstance(record.outcome, Completed) else ()


def _with_answers(records: Sequence[TrialRecord], boards: Mapping[int, Sequence[Row]]) -> set[int]:
    """Launches whose requests a verdict compares: plain decoding, confirmations, and what is fastest anywhere."""
    found = [sides(_chief(records, rows), level) for level, rows in boards.items()]
    best = {row.key for each in found if each for row in (each.best, each.same) if row}
    return {r.number for r in records if r.kind != "trial" or r.key in best}


def _chief(records: Sequence[TrialRecord], rows: Sequence[Row]) -> list[TrialRecord]:
    """Records that a verdict can be about, in their order: of thousands of points only the fastest, and failures.

    A verdict is about the fastest point with speculation that failed in none of its launches, beside plain decoding.
    """
    sound = (row.key for row in rows if row.status == "completed" and row.config.speculative and not row.reason)
    keys = {row.key for row in rows[:_CHIEF]} | set(itertools.islice(sound, 1))
    keys |= {row.key for row in rows if row.config.speculative is None or row.status != "completed"}
    return [record for record in records if record.kind != "trial" or record.key in keys]


def _mean_figures(figures: Sequence[Measurement]) -> dict[str, float] | None:
    if not figures:
        return None
    means: dict[str, float] = {}
    for name in Measurement.model_fields:
        values = [getattr(one, name) for one in figures]
        if all(isinstance(value, int | float) for value in values):
            means[name] = math.fsum(values) / len(values)
    return means
