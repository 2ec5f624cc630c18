"""What the launches so far say of every point: how fast it is, whether it runs and keeps the constraints, its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from raytune_eagle.samplers import observed
from raytune_eagle.samplers.candidates import SHAPE, Candidates, Params, among
from raytune_eagle.samplers.kernels import Array, Encoder, Half
from raytune_eagle.samplers.observed import Launch
from raytune_eagle.samplers.process import Data, Part, Process

_EXPLORED = 4
"""Measured launches before improvement is asked for; until then the least known point that is not hopeless."""
_POINTS_PER_LAUNCH = 10
"""A space of fewer points than ten for each launch of exploring is explored less."""
_HOPE = 1.0
"""Power of its expected speed that a point's uncertainty counts with while exploring."""
_LATEST = 250
"""Launches that failures, costs and constraints are learned from."""
_NOISE = 1e-4
"""Prior variance between launches of one point, of both logarithms."""

_UNKNOWN = 0.5
"""Variance of either logarithm before any launch."""

Pair = tuple[Half, Half]
"""Coordinates for accept_len and for all else."""


def _accept_features(trees: Array) -> Array:
    """Saturating in depth, slowly growing with choices and tokens per step."""
    steps, topk, tokens = trees.T
    deep, wide = 1 - 0.55**steps, np.log2((tokens - 1) / steps)
    return np.stack([deep, 1 - 0.8**steps, deep * np.log2(topk) / 3, deep * np.minimum(wide, 3) / 3], axis=1)


def _cycle_features(trees: Array) -> Array:
    """Work that is proportional to something, as shares of a large launch."""
    steps, topk, tokens = trees.T
    return np.stack([steps / 10, tokens / 64, np.sqrt(tokens) / 8, steps * topk / 80, np.log2(topk) / 3], axis=1)


def _typical_accept(trees: Array) -> Array:
    """Log accept_len of a middling draft, to begin with: 0.6 a step, more with choices to fall back on."""
    steps, _, tokens = trees.T
    chance = 0.6 + 0.04 * np.minimum(np.log2((tokens - 1) / steps), 3)
    return np.asarray(np.log((1 - chance ** (steps + 1)) / (1 - chance)))


def _typical_cycle(trees: Array) -> Array:
    """Log cycle time over that of the smallest launch, to begin with."""
    steps, _, tokens = trees.T
    return np.asarray(np.log1p(0.05 * steps + 0.012 * tokens))


class Encoders(NamedTuple):
    """Coordinates for each factor, and for what has no typical value."""

    accept: Encoder
    cycle: Encoder
    other: Encoder

    @classmethod
    def of(cls, candidates: Candidates) -> Encoders:
        """Those of a space."""
        return cls(
            Encoder(candidates, _accept_features, _typical_accept),
            Encoder(candidates, _cycle_features, _typical_cycle),
            Encoder(candidates, _cycle_features),
        )


def _accept_parts(first: Sequence[str], rest: Sequence[str]) -> list[Part]:
    """NCCL changes nothing here; a server flag may."""
    return [
        Part("level", (("one", "one"),), 1.0),
        Part("trend", (("trend", "one"),), 0.1),
        Part("shape", (("wide", "one"),), 0.03),
        Part("detail", (("narrow", "one"),), 0.001),
        *(Part(name, ((name, "one"),), 0.05) for name in first),
        *(Part(f"{name} by shape", ((f"{name} by shape", "one"),), 0.01) for name in first),
        *(Part(name, (("one", name),), 0.002) for name in rest if not is_nccl(name)),
    ]


def _machine_parts(first: Sequence[str], rest: Sequence[str], scale: float = 1.0) -> list[Part]:
    return [
        Part("level", (("one", "one"),), 1.0),
        Part("trend", (("trend", "one"),), 0.05 * scale),
        Part("shape", (("wide", "one"),), 0.03 * scale),
        Part("detail", (("narrow", "one"),), 0.0005 * scale),
        *(Part(name, ((name, "one"),), 0.01 * scale) for name in first),
        *(Part(name, (("one", name),), 0.01 * scale) for name in rest),
        Part("pairs", (("one", "pairs"), ("columns", "columns"), ("pairs", "one")), 0.0002 * scale),
        Part("columns by shape", (("wide", "columns"),), 0.0003 * scale),
        Part("rough", (("narrow", "all"),), 0.0001 * scale),
    ]


def _few_parts(first: Sequence[str], rest: Sequence[str], scale: float) -> list[Part]:
    """Without roughness, which nothing could be concluded from."""
    return _machine_parts(first, rest, scale)[:-1]


def is_nccl(column: str) -> bool:
    """Whether a column is a variable of NCCL, which no token depends on."""
    return column.lower().startswith("nccl_")


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
        self._ended = [launch for launch in launches if launch.measured or launch.failed]
        self._pending = [launch.params for launch in launches if launch.running]
        self._encoders, self._columns = encoders, candidates.columns
        self._accept_parts, self._cycle_parts = _accept_parts(*self._columns), _machine_parts(*self._columns)
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
            guess = observed.with_pending(data, self._pending, halves[0].typical)
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
        feasible = [launch.params for launch in self.done if (launch.violation or 0.0) <= 0]
        points = feasible or [launch.params for launch in self.done]
        means = self.speed(*self.halves(points, points))[0]
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
        return accept - cycle, np.sqrt(accept_variance + cycle_variance * surprise)

    def difference(self, point: Params, other: Params) -> tuple[float, float]:
        """Mean and variance of the log speed of a point over another's."""
        if self.accept is None or self.cycle is None:
            return 0.0, 1.0
        first, rest = self.halves([point, other], [point, other])
        accept, accept_variance = self.accept.difference(first[0], rest[0])
        cycle, cycle_variance = self.cycle.difference(first[1], rest[1])
        return accept - cycle, accept_variance + cycle_variance * self.cycle.surprise

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
        return len(self.done) < self.enough

    def score(self, mean: Array, variance: Array) -> Array:
        """Expected relative improvement; while exploring how little is known of what is not hopeless."""
        sd = np.sqrt(variance)
        if self.exploring:
            return np.asarray(sd * np.exp(_HOPE * (mean - np.max(mean))))
        z = (mean - self.incumbent) / sd
        return np.asarray(sd * (z * norm.cdf(z) + norm.pdf(z)))

    def runs(self, first: Pair, rest: Pair) -> Array:
        """Chance that a launch does not fail, of every first half with every second."""
        if self._failing is None:
            return np.ones((len(first[1].codes), len(rest[1].codes)))
        return np.clip(1 - self._failing.mean(_plain(first[1]), rest[1]), 0.02, 1.0)

    def keeps(self, first: Pair, rest: Pair) -> Array:
        """Chance that a launch keeps the constraints, a value for each row."""
        data = observed.violation_data(self.done[-_LATEST:])
        if not len(data.values):
            return np.ones(len(first[1].codes))
        mean, variance = self._fixed(data, 1.0, 1e-3).at(_plain(first[1]), rest[1])
        return np.asarray(norm.cdf(-mean / np.sqrt(variance)))

    def cost(self, first: Pair, rest: Pair) -> Array:
        """Node-seconds of a launch over the average, of every first half with every second."""
        data = observed.cost_data(self._ended[-_LATEST:])
        if len(data.values) < _EXPLORED:
            return np.ones((len(first[1].codes), len(rest[1].codes)))
        mean = self._fixed(data, 1.0, 0.02).mean(_plain(first[1]), rest[1])
        return np.asarray(np.exp(np.clip(mean - data.values.mean(), -1.0, 1.0)))

    @cached_property
    def _failing(self) -> Process | None:
        if not any(launch.failed for launch in self._ended[-_LATEST:]):
            return None
        return self._fixed(observed.failure_data(self._ended[-_LATEST:]), 5.0, 0.05)

    def _fixed(self, data: Data, scale: float, noise: float) -> Process:
        parts = _few_parts(*self._columns, scale)
        variances = np.array([*(part.variance for part in parts), noise])
        return Process(self._encoders.other, parts, noise, data, variances)


def _at(process: Process | None, first: Half, rest: Half) -> tuple[Array, Array]:
    """What a process says of points, or what is typical before there is any launch."""
    return process.at(first, rest) if process else (first.typical, np.full(len(first.codes), _UNKNOWN))


def _mean(process: Process | None, first: Half, rest: Half) -> Array:
    return process.mean(first, rest) if process else np.repeat(first.typical[:, None], len(rest.codes), axis=1)


def _placed(launch: Launch, candidates: Candidates) -> Launch | None:
    """An earlier study's launch without the factors that depend on a value which is not searched here."""
    if not launch.earlier:
        return launch
    strange = [name for name, values in candidates.levels.items() if not among(launch.params.get(name), values)]
    accept = None if any(not is_nccl(name) for name in strange) else launch.accept
    return replace(launch, accept=accept, cycle=None if strange else launch.cycle)


def _plain(half: Half) -> Half:
    return half._replace(typical=np.zeros_like(half.typical))
