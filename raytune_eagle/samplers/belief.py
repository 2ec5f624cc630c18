"""What the launches so far say of every point: how fast it is, whether it runs and keeps the constraints, its cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from raytune_eagle.samplers import observed
from raytune_eagle.samplers.candidates import SHAPE, Candidates, Params, among
from raytune_eagle.samplers.ensembles import accept_features, cycle_features, typical_accept, typical_cycle
from raytune_eagle.samplers.kernels import Array, Encoder, Half
from raytune_eagle.samplers.observed import Launch
from raytune_eagle.samplers.parts import accept_parts, any_parts, cycle_parts, is_nccl
from raytune_eagle.samplers.probed import Probed
from raytune_eagle.samplers.process import Data, Part, Process

_EXPLORED = 4
"""Measured launches before improvement is asked for; until then the least known point that is not hopeless."""
_POINTS_PER_LAUNCH = 10
"""A space of fewer points than ten for each launch of exploring is explored less."""
_HOPE = 1.0
"""Power of its expected speed that a point's uncertainty counts with while exploring."""
_PATIENCE = 0.7
"""What an improvement at the launch after the next is worth against one at the next."""
_OUTCOMES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(9)
"""How a launch may come out, in standard deviations, and the chances of these."""
_LIKELY = 100
"""Launches, the fastest as measured, among which the best is looked for."""
_LATEST = 250
"""Launches that failures, costs and constraints are learned from."""
_NOISE = 1e-4
"""Prior variance between launches of one point, of both logarithms."""

_UNKNOWN = 0.5
"""Variance of either logarithm before any launch."""

Pair = tuple[Half, Half]
"""Coordinates for accept_len and for all else."""


class Encoders(NamedTuple):
    """Coordinates for each factor, and for what has no typical value."""

    accept: Encoder
    cycle: Encoder
    other: Encoder

    @classmethod
    def of(cls, candidates: Candidates, probed: Probed | None = None) -> Encoders:
        """Those of a space."""
        return cls(
            Encoder(candidates, accept_features, typical_accept),
            Encoder(candidates, cycle_features, typical_cycle, probed.slowness if probed else None),
            Encoder(candidates, cycle_features),
        )


def take(pair: Pair, places: NDArray[np.intp]) -> Pair:
    """Some rows."""
    return pair[0].rows(places), pair[1].rows(places)


class Belief:
    """See the module.

    Args:
        encoders: of the candidates.
        candidates: the space.
        launches: all of this study, and of earlier ones what they know of one factor.
        variances: learned before, by process; empty learns them now.
    """

    def __init__(
        self,
        encoders: Encoders,
        candidates: Candidates,
        launches: Sequence[Launch],
        variances: Mapping[str, Array],
    ) -> None:
        launches = [known for launch in launches if (known := _placed(launch, candidates))]
        self.done = [launch for launch in launches if launch.measured]
        self.enough = min(_EXPLORED, max(1, len(candidates) // _POINTS_PER_LAUNCH))
        self._known = sum(launch.cycle is not None for launch in launches)
        self._ended = [launch for launch in launches if launch.measured or launch.failed]
        self._pending = [launch.params for launch in launches if launch.running]
        self._encoders, self._columns = encoders, candidates.columns
        self._accept_parts = accept_parts(*self._columns)
        self._cycle_parts = cycle_parts(*self._columns, probed=encoders.cycle.expected is not None)
        explored = len(self.done) >= _EXPLORED
        self.variances: dict[str, Array] = dict(variances) if explored else self._priors()
        telling = [*SHAPE, *self._columns[0], *(name for name in self._columns[1] if not is_nccl(name))]
        self.accept = self._process("accept", self._accept_parts, observed.accept_data(launches, telling))
        self.cycle = self._process("cycle", self._cycle_parts, observed.cycle_data(launches))
        self.incumbent, self.best = self._best()

    def _priors(self) -> dict[str, Array]:
        parts = {"accept": self._accept_parts, "cycle": self._cycle_parts}
        return {name: np.array([*(part.variance for part in found), _NOISE]) for name, found in parts.items()}

    def _process(self, name: str, parts: Sequence[Part], data: Data) -> Process | None:
        """Learn from `data`, then take the launches under way as if they had come out as expected."""
        encoder: Encoder = getattr(self._encoders, name)
        halves = [encoder.encode(self._pending, half) for half in (0, 1)]
        if not len(data.values):
            if not self._pending:
                return None
            guess = observed.with_pending(data, self._pending, halves[0].typical + halves[1].typical)
            return Process(encoder, parts, _NOISE, guess, self.variances.get(name))
        process = Process(encoder, parts, _NOISE, data, self.variances.get(name))
        self.variances[name] = process.variances
        if not self._pending:
            return process
        data = observed.with_pending(data, self._pending, process.at(halves[0], halves[1])[0])
        return Process(encoder, parts, _NOISE, data, process.variances)

    def _best(self) -> tuple[float, Params | None]:
        """Figure and point of the best feasible launch, as believed; of the worst launch while none is feasible."""
        if not self.done:
            return -np.inf, None
        quick = sorted(self.done, key=lambda launch: (launch.cycle or 0.0) - (launch.accept or 0.0))
        feasible = [launch.params for launch in quick if (launch.violation or 0.0) <= 0][:_LIKELY]
        points = feasible or [launch.params for launch in self.done]
        first, rest = self.halves(points, points)
        means = _expected(self.accept, first[0], rest[0]) - _expected(self.cycle, first[1], rest[1])
        if not feasible:
            return float(means.min()), None
        return float(means.max()), feasible[int(np.argmax(means))]

    # ------------------------------------------------------------------------------------------------------ predictions
    def halves(self, first: Sequence[Params], rest: Sequence[Params]) -> tuple[Pair, Pair]:
        """Coordinates of first halves, and of second halves."""
        accept, cycle, _ = self._encoders
        return (accept.encode(first, 0), cycle.encode(first, 0)), (accept.encode(rest, 1), cycle.encode(rest, 1))

    def speed(self, first: Pair, rest: Pair) -> tuple[Array, Array]:
        """Mean and variance of log tokens per millisecond, a value for each row."""
        accept, accept_variance = _at(self.accept, first[0], rest[0])
        cycle, cycle_variance = _at(self.cycle, first[1], rest[1])
        return accept - cycle, accept_variance + cycle_variance

    def calibrated(self, first: Pair, rest: Pair) -> tuple[Array, Array]:
        """As `speed`, with a standard deviation that the launches so far bear out: for people, not for the search.

        The search does better with what the model says: where a model is wrong, larger variances everywhere make it
        wander, not learn.
        """
        accept, accept_variance = _at(self.accept, first[0], rest[0])
        cycle, cycle_variance = _at(self.cycle, first[1], rest[1])
        surprise = self.cycle.surprise if self.cycle else 1.0
        return accept - cycle, np.sqrt(accept_variance + cycle_variance * surprise + self._unexplained)

    @property
    def _unexplained(self) -> float:
        """Variance that the fit calls noise beyond what launches of one point differ by: each point's own, then."""
        return max(0.0, float(self.cycle.variances[-1]) - _NOISE) if self.cycle else 0.0

    def difference(self, point: Params, other: Params) -> tuple[float, float]:
        """Mean and variance of the log speed of a point over another's."""
        if self.accept is None or self.cycle is None:
            return 0.0, 1.0
        first, rest = self.halves([point, other], [point, other])
        accept, accept_variance = self.accept.difference(first[0], rest[0])
        cycle, cycle_variance = self.cycle.difference(first[1], rest[1])
        own = 0.0 if point == other else 2 * self._unexplained
        return accept - cycle, accept_variance + cycle_variance * self.cycle.surprise + own

    def grid(self, first: Pair, rest: Pair) -> tuple[Array, Array]:
        """Mean of every first half with every second, and about its variance: that along each half, added up."""
        rows, places = len(first[0].codes), len(rest[0].codes)
        known = [*([self.best] if self.best else []), *self._pending, *(launch.params for launch in self.done)]
        nil = np.zeros(1, dtype=np.intp)
        base_first, base_rest = self.halves(known[:1], known[:1]) if known else (take(first, nil), take(rest, nil))
        along_first = self.speed(first, take(base_rest, np.zeros(rows, dtype=np.intp)))[1]
        along_rest = self.speed(take(base_first, np.zeros(places, dtype=np.intp)), rest)[1]
        means = _mean(self.accept, first[0], rest[0]) - _mean(self.cycle, first[1], rest[1])
        return means, along_first[:, None] + along_rest[None]

    @property
    def exploring(self) -> bool:
        """Whether there is little yet to improve on."""
        return not self.done or self._known < self.enough

    def score(self, mean: Array, variance: Array) -> Array:
        """Expected relative improvement; while exploring how little is known of what is not hopeless."""
        sd = np.sqrt(variance)
        if self.exploring:
            return np.asarray(sd * np.exp(_HOPE * (mean - np.max(mean))))
        z = (mean - self.incumbent) / sd
        return np.asarray(sd * (z * ndtr(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)))

    def judged(self, first: Pair, rest: Pair) -> tuple[Array, Array, Array]:
        """As `speed`, and the expected relative improvement by a launch of each point and by the best launch after it.

        What a launch teaches about the others counts: one that settles which of many points is best is worth more than
        one that is slightly better itself.
        """
        if self.exploring or self.accept is None or self.cycle is None or self.best is None:
            mean, variance = self.speed(first, rest)
            return mean, variance, self.score(mean, variance)
        own = self.halves([self.best], [self.best])
        first, rest = ((_after(a, c), _after(b, d)) for (a, b), (c, d) in zip((first, rest), own, strict=True))
        accept, accept_covariance = self.accept.joint(first[0], rest[0])
        cycle, cycle_covariance = self.cycle.joint(first[1], rest[1])
        covariance = accept_covariance + cycle_covariance
        noise = float(self.accept.variances[-1] + self.cycle.variances[-1])
        means, variances = accept - cycle, np.maximum(np.diag(covariance), 1e-12)
        slopes = (covariance / np.sqrt(variances + noise)[:, None])[:-1]
        return means[:-1], variances[:-1], _worth(means, slopes)

    def runs(self, first: Pair, rest: Pair) -> Array:
        """Chance that a launch does not fail, of every first half with every second."""
        if self._failing is None:
            return np.ones((len(first[1].codes), len(rest[1].codes)))
        return np.clip(1 - self._failing.mean(first[1].plain(), rest[1].plain()), 0.02, 1.0)

    def keeps(self, first: Pair, rest: Pair) -> Array:
        """Chance that a launch keeps the constraints, a value for each row."""
        data = observed.violation_data(self.done[-_LATEST:])
        if not len(data.values):
            return np.ones(len(first[1].codes))
        mean, variance = self._fixed(data, 1.0, 1e-3).at(first[1].plain(), rest[1].plain())
        return np.asarray(ndtr(-mean / np.sqrt(variance)))

    def cost(self, first: Pair, rest: Pair) -> Array:
        """Node-seconds of a launch over the average, of every first half with every second."""
        data = observed.cost_data(self._ended[-_LATEST:])
        if len(data.values) < _EXPLORED:
            return np.ones((len(first[1].codes), len(rest[1].codes)))
        mean = self._fixed(data, 1.0, 0.02).mean(first[1].plain(), rest[1].plain())
        return np.asarray(np.exp(np.clip(mean - data.values.mean(), -1.0, 1.0)))

    @cached_property
    def _failing(self) -> Process | None:
        if not any(launch.failed for launch in self._ended[-_LATEST:]):
            return None
        return self._fixed(observed.failure_data(self._ended[-_LATEST:]), 5.0, 0.05)

    def _fixed(self, data: Data, scale: float, noise: float) -> Process:
        parts = any_parts(*self._columns, scale, 0.03)
        variances = np.array([*(part.variance for part in parts), noise])
        return Process(self._encoders.other, parts, noise, data, variances)


def _worth(means: Array, slopes: Array) -> Array:
    """By point: expected value of the best launched, and with less weight of the best known, over the last point's.

    Args:
        means: of all points; the last one is the best launch so far.
        slopes: how much the mean of each point (a column) changes by one standard deviation of a launch of each but the
            last (a row).
    """
    total, here = np.zeros(len(slopes)), np.arange(len(slopes))
    for outcome, weight in zip(_OUTCOMES, _WEIGHTS / _WEIGHTS.sum(), strict=True):
        after = means + slopes * outcome
        launched = np.maximum(after[:, -1], after[here, here])
        total += weight * (launched + _PATIENCE * (after.max(1) - launched))
    return np.asarray(total - means[-1] - _PATIENCE * (means.max() - means[-1]))


def _after(one: Half, other: Half) -> Half:
    return Half(*(np.concatenate(pair) for pair in zip(one, other, strict=True)))


def _at(process: Process | None, first: Half, rest: Half) -> tuple[Array, Array]:
    """What a process says of points, or what is typical before there is any launch."""
    return process.at(first, rest) if process else (first.typical + rest.typical, np.full(len(first.codes), _UNKNOWN))


def _expected(process: Process | None, first: Half, rest: Half) -> Array:
    return process.expected(first, rest) if process else first.typical + rest.typical


def _mean(process: Process | None, first: Half, rest: Half) -> Array:
    return process.mean(first, rest) if process else first.typical[:, None] + rest.typical[None]


def _placed(launch: Launch, candidates: Candidates) -> Launch | None:
    """An earlier study's launch without the factors that depend on a value which is not searched here."""
    if not launch.earlier:
        return launch
    strange = [name for name, values in candidates.levels.items() if not among(launch.params.get(name), values)]
    accept = None if any(not is_nccl(name) for name in strange) else launch.accept
    return replace(launch, accept=accept, cycle=None if strange else launch.cycle)
