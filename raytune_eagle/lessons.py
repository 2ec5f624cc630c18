"""What a launch teaches beside its objective: its two factors, at every concurrency."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from raytune_eagle.model.measurement import Measurement, Request
from raytune_eagle.model.trial import Completed, TrialRecord
from raytune_eagle.reference import Reference
from raytune_eagle.samplers.kernels import Array
from raytune_eagle.statistics import log_variance

_UNMEASURED = 0.3
"""Standard deviation of the log of a cycle that is told from another concurrency's: a guess, wide beside noise (0.02)
and narrow beside what makes a launch hopeless (1.6 for the CUDA graphs that were off)."""

Figures = list[dict[str, Any]]
"""A mapping per concurrency, as `raytune_eagle.samplers.observed.FIGURES`."""


class Lessons:
    """Figures of launches, those that were ended early included.

    Such a launch was not measured at the later concurrencies. Were it left out, the same would be launched again; were
    its mean taken over fewer of them, it would be compared with others' means over all. So what is missing is taken to
    stand to what is known as in launches that were measured whole (the median of these), and as little known.

    Args:
        levels: concurrencies of the workload.
        records: launches so far; `learn` takes more.
        reference, launch_variance: as `figures_of`.
    """

    def __init__(
        self, levels: int, records: Iterable[TrialRecord], reference: Reference, launch_variance: float = 0.0
    ) -> None:
        self._levels, self._reference, self._launch_variance = levels, reference, launch_variance
        self._measured: dict[int, Figures] = {}  # by the number of the launch
        self._whole: list[Array] = []
        for record in records:
            self.learn(record)

    def learn(self, record: TrialRecord) -> None:
        """Take what a launch measured and, if it did at every concurrency, how its cycles differ between these."""
        found = self._measured[record.number] = figures_of(record, self._reference, self._launch_variance)
        if record.config.speculative and len(found) == self._levels:
            self._whole.append(_log_cycles(found))

    def of(self, record: TrialRecord) -> Figures:
        """Figures of a launch that was learnt, at every concurrency.

        Empty where it has none, or nothing tells those that are missing.
        """
        found = self._measured[record.number]
        if not found or len(found) >= self._levels:
            return found
        return [*found, *self._missing(found)] if self._whole else []

    def cut_short(self, record: TrialRecord) -> bool:
        """Whether it was ended before every concurrency had its figures."""
        outcome = record.outcome
        return isinstance(outcome, Completed) and bool(outcome.hopeless) and len(outcome.measurements) < self._levels

    def _missing(self, found: Figures) -> Figures:
        whole, count = np.array(self._whole), len(found)
        apart = whole[:, count:] - whole[:, :count].mean(axis=1, keepdims=True)
        cycles = np.exp(_log_cycles(found).mean() + np.median(apart, axis=0))
        variances = apart.var(axis=0) + _UNMEASURED**2
        accept = math.exp(math.fsum(math.log(one["accept_len"] or 1.0) for one in found) / count)
        return [
            {"accept_len": accept, "cycle_ms": cycle, "variance": variance}
            for cycle, variance in zip(cycles.tolist(), variances.tolist(), strict=True)
        ]


def _log_cycles(figures: Sequence[Mapping[str, Any]]) -> Array:
    return np.log([one["cycle_ms"] for one in figures])


def figures_of(record: TrialRecord, reference: Reference, launch_variance: float = 0.0) -> list[dict[str, Any]]:
    """accept_len, cycle time and accept histogram, a mapping per concurrency.

    The cycle is what the throughput implies, as an average node would give it, so that the two factors make up
    just what is searched for. With a `launch_variance` its variance is told: that, and what the passes differ by.
    """
    return [
        {
            "accept_len": m.accept_len,
            "cycle_ms": 1000 * m.concurrency * (m.accept_len or 1.0) / _normal_speed(m, record, reference),
            "accept_histogram": _histogram(record, m.concurrency),
            "first_ms": _first_ms(record, m.concurrency),
            "variance": launch_variance and launch_variance + log_variance(m),
        }
        for m in (record.outcome.measurements if isinstance(record.outcome, Completed) else ())
        if m.output_throughput > 0
    ]


def _normal_speed(figures: Measurement, record: TrialRecord, reference: Reference) -> float:
    return figures.output_throughput * reference.factor(record.node, figures.concurrency, record.started_at)


def _counted(record: TrialRecord, concurrency: int) -> list[Request]:
    return [row for row in record.outcome.requests if row.concurrency == concurrency and row.repeat >= 0]


def _histogram(record: TrialRecord, concurrency: int) -> list[int]:
    """Verify rounds that accepted 0, 1, 2, … drafts."""
    rows = [row.accept_histogram for row in _counted(record, concurrency)]
    return [sum(column) for column in itertools.zip_longest(*rows, fillvalue=0)]


def _first_ms(record: TrialRecord, concurrency: int) -> float:
    """Time to first token, spread over the verify rounds."""
    rows = [row for row in _counted(record, concurrency) if row.ttft_s is not None and row.verify_rounds]
    rounds = sum(row.verify_rounds or 0 for row in rows)
    return 1000 * sum(row.ttft_s or 0.0 for row in rows) / rounds if rounds else 0.0
