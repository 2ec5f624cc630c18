"""Plain decoding by node and time: what a figure is held against, so that neither a fast machine nor a warm hour wins.

Every node measures plain decoding first, again every ``baseline.every`` trials, and last. What those launches differ
by beyond noise is the node's effect and its drift; both are taken out of every comparison across nodes and hours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from raytune_eagle.model.measurement import Measurement
from raytune_eagle.model.trial import Completed, TrialRecord
from raytune_eagle.statistics import LAUNCH_NOISE, log_variance

_BEYOND = 3.0
"""Standard errors from which a difference of baselines counts as one: with a few of them on each of a few nodes, 2
would be passed by chance in every other study."""


class _Point(NamedTuple):
    """One launch of plain decoding: log of tokens per second, its variance, and when (seconds since the epoch)."""

    at: float
    log: float
    variance: float


class Drift(NamedTuple):
    """Plain decoding that changed on a node, beyond noise: fastest and slowest launch, tokens per second."""

    node: str
    concurrency: int
    low: float
    high: float


class Reference:
    """What plain decoding gives, by node, concurrency and time.

    Args:
        records: of one study; its completed baselines count.
    """

    def __init__(self, records: Iterable[TrialRecord]) -> None:
        self._points: dict[tuple[int, str], list[_Point]] = {}
        self._usual: dict[tuple[int, str], tuple[float, float | None]] = {}
        for record in records:
            if record.kind == "baseline":
                self.add(record)

    def add(self, record: TrialRecord) -> None:
        """Take one more baseline; one without figures says nothing."""
        for figures in record.outcome.measurements if isinstance(record.outcome, Completed) else ():
            point = _Point(record.started_at, math.log(figures.output_throughput), _variance(figures))
            points = self._points.setdefault((figures.concurrency, record.node), [])
            points.append(point)
            points.sort()
            self._usual.clear()

    def at(self, node: str, concurrency: int, when: float) -> float | None:
        """Tokens per second of plain decoding on a node at a time; None where it was never measured.

        The mean of the node's launches where they agree within their noise; between two of them, by time, where they
        do not.
        """
        points = self._points.get((concurrency, node))
        return math.exp(_level(points, when)) if points else None

    def factor(self, node: str, concurrency: int, when: float) -> float:
        """What a figure is multiplied by to be that of an average node of an average hour; 1 within noise."""
        points = self._points.get((concurrency, node))
        if not points:
            return 1.0
        if (concurrency, node) not in self._usual:  # asked for each of thousands of launches, and the same for all
            usual = self._grand(concurrency) if self._nodes_differ(concurrency) else _mean(points)
            self._usual[concurrency, node] = (usual, None if _drifted(points) else _mean(points))
        usual, steady = self._usual[concurrency, node]
        return math.exp(usual - (_level(points, when) if steady is None else steady))

    def drifts(self) -> list[Drift]:
        """Nodes on which plain decoding changed beyond noise."""
        found = []
        for (concurrency, node), points in sorted(self._points.items()):
            if _drifted(points):
                speeds = [math.exp(point.log) for point in points]
                found.append(Drift(node, concurrency, min(speeds), max(speeds)))
        return found

    def effects(self, concurrency: int) -> dict[str, float]:
        """Plain decoding of each node over that of the average node; empty where they agree within noise."""
        if not self._nodes_differ(concurrency):
            return {}
        grand = self._grand(concurrency)
        return {node: math.exp(_mean(points) - grand) for node, points in self._nodes(concurrency).items()}

    def _nodes(self, concurrency: int) -> dict[str, list[_Point]]:
        return {node: points for (level, node), points in sorted(self._points.items()) if level == concurrency}

    def _grand(self, concurrency: int) -> float:
        means = [_mean(points) for points in self._nodes(concurrency).values()]
        return math.fsum(means) / len(means)

    def _nodes_differ(self, concurrency: int) -> bool:
        nodes = [(_mean(points), _variance_of_mean(points)) for points in self._nodes(concurrency).values()]
        return any(
            abs(one - other) > _BEYOND * math.sqrt(first + second)
            for place, (one, first) in enumerate(nodes)
            for other, second in nodes[place + 1 :]
        )


def _variance(figures: Measurement) -> float:
    return log_variance(figures) + LAUNCH_NOISE**2


def _mean(points: Sequence[_Point]) -> float:
    """Weighted by how well each is known."""
    weights = [1 / point.variance for point in points]
    return math.fsum(w * point.log for w, point in zip(weights, points, strict=True)) / math.fsum(weights)


def _variance_of_mean(points: Sequence[_Point]) -> float:
    return 1 / math.fsum(1 / point.variance for point in points)


def _drifted(points: Sequence[_Point]) -> bool:
    """Whether any launch lies farther from the others than noise explains."""
    if len(points) == 1:
        return False
    mean, of_mean = _mean(points), _variance_of_mean(points)
    return any(abs(point.log - mean) > _BEYOND * math.sqrt(point.variance - of_mean) for point in points)


def _level(points: Sequence[_Point], when: float) -> float:
    if not _drifted(points):
        return _mean(points)
    if when <= points[0].at:
        return points[0].log
    for before, after in pairwise(points):
        if when <= after.at:
            share = (when - before.at) / (after.at - before.at)
            return before.log + share * (after.log - before.log)
    return points[-1].log
