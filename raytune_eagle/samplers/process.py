"""Gaussian processes whose covariance is a sum of parts with a meaning, each a product over the two halves of a point.

A part of the first half alone says what the tree's shape costs, a part of a column what a variable is worth, and so on;
their variances are learned, so the fit itself says what matters. On every-first-with-every-rest grids means are
products of small matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, solve_triangular
from scipy.optimize import minimize

from raytune_eagle.samplers.candidates import Candidates, Params, shapes

Array = NDArray[np.float64]
_WIDE, _NARROW = 2.5, 0.9
"""Length scales over the logarithms (base 2) of steps, topk and tokens."""
_FIT_POINTS = 120
"""Observations that variances are learned from; more would change little and cost seconds."""
_TRUSTED = 5
_SPREAD = 1.5
"""Standard deviation of the logarithm of a variance around its prior."""


class Half(NamedTuple):
    """Coordinates of halves of points: the tree's shape in logarithms, its features, its typical value; levels."""

    logs: Array
    features: Array
    typical: Array
    codes: NDArray[np.intp]

    def rows(self, places: NDArray[np.intp]) -> Half:
        """Some of the points."""
        return Half(self.logs[places], self.features[places], self.typical[places], self.codes[places])


class Encoder:
    """Turns halves of points into coordinates, and those into covariances.

    Args:
        candidates: the space.
        features: of trees, from rows of steps, topk and tokens.
        typical: value to expect of a tree, likewise, but for a constant; the process learns what differs from it.
    """

    def __init__(
        self,
        candidates: Candidates,
        features: Callable[[Array], Array],
        typical: Callable[[Array], Array] | None = None,
    ) -> None:
        self._features, self._typical, self._columns = features, typical or _nothing, candidates.columns
        self._codes = {
            name: {(type(value).__name__, value): code for code, value in enumerate(values)}
            for name, values in candidates.levels.items()
        }
        self._likeness = {name: _likeness(values) for name, values in candidates.levels.items()}

    def encode(self, points: Sequence[Mapping[str, Any]], half: int) -> Half:
        """Coordinates of the first (0) or second (1) half of whole or half points."""
        trees = shapes(points)
        codes = [
            [self._codes[name].get((type(p.get(name)).__name__, p.get(name)), 0) for name in self._columns[half]]
            for p in points
        ]
        return Half(
            np.log2(trees),
            self._features(trees),
            self._typical(trees),
            np.array(codes, dtype=np.intp).reshape(len(points), len(self._columns[half])),
        )

    def grams(self, one: Half, other: Half, half: int) -> Grams:
        """Covariances between points, by the name of what they share."""
        likeness = {name: self._likeness[name] for name in self._columns[half]}
        return Grams(one, other, likeness)


class Grams:
    """Covariances between the halves of some points and others, each computed when it is first asked for.

    * ``one``: shared by all; the scalar 1.
    * ``trend``, ``wide``, ``narrow``: alike in the shape of their trees.
    * a column's name: alike in its value; ``NAME by shape``: and in shape.
    * ``columns``, ``pairs``: sums over the columns, and over pairs of them.
    * ``all``: alike in every column.
    """

    def __init__(self, one: Half, other: Half, likeness: Mapping[str, Array]) -> None:
        self._one, self._other, self._likeness = one, other, likeness
        self._known: dict[str, Array | float] = {"one": 1.0}

    def __getitem__(self, name: str) -> Array | float:
        if name not in self._known:
            self._known[name] = self._computed(name)
        return self._known[name]

    def _computed(self, name: str) -> Array | float:
        if name in self._likeness:
            place = list(self._likeness).index(name)
            return np.asarray(self._likeness[name][np.ix_(self._one.codes[:, place], self._other.codes[:, place])])
        if name in {"wide", "narrow"}:
            return np.asarray(np.exp(self._distance / (-2 * {"wide": _WIDE, "narrow": _NARROW}[name] ** 2)))
        if name == "trend":
            return self._one.features @ self._other.features.T
        if name.endswith(" by shape"):
            return np.asarray(self[name.removesuffix(" by shape")] * self["wide"])
        return self._over_columns(name)

    def _over_columns(self, name: str) -> Array | float:
        columns = [self[column] for column in self._likeness]
        if name == "columns":
            return sum(columns)
        if name == "pairs":
            squares = sum((column**2 for column in columns), 0.0)
            return (self["columns"] ** 2 - squares) / 2
        product: Array | float = 1.0
        for column in columns:
            product = product * (0.2 + 0.8 * column)
        return product

    @cached_property
    def _distance(self) -> Array:
        """Squared, over the logarithms of steps, topk and tokens."""
        one, other = self._one.logs, self._other.logs
        lengths = (one**2).sum(1)[:, None] + (other**2).sum(1)[None]
        return np.asarray(np.maximum(lengths - 2 * one @ other.T, 0.0))


def _nothing(trees: Array) -> Array:
    return np.zeros(len(trees))


def _likeness(values: Sequence[Any]) -> Array:
    """How alike the levels of a column are: neighbours among three or more numbers are, all else is not."""
    likeness = np.eye(len(values))
    places = [i for i, v in enumerate(values) if isinstance(v, int | float) and not isinstance(v, bool) and v > 0]
    if len(places) > 2:  # noqa: PLR2004 - two numbers have no neighbours between them
        logs = np.log2(np.array([values[place] for place in places], dtype=float))
        step = np.ptp(logs) / (len(places) - 1)
        near = np.exp(-(((logs[:, None] - logs[None]) / (1.5 * step)) ** 2) / 2)
        likeness[np.ix_(places, places)] = 0.3 * np.eye(len(places)) + 0.7 * near
    return likeness


@dataclass(frozen=True)
class Part:
    """One part of a covariance: terms of (name in the first half, name in the second), and its prior variance."""

    name: str
    terms: tuple[tuple[str, str], ...]
    variance: float


class Data(NamedTuple):
    """Observations: whole points, values, the variance of each value's own noise, and which launch each is from."""

    points: Sequence[Params]
    values: Array
    noise: Array
    launches: NDArray[np.intp]


class Process:
    """A process with data.

    Args:
        encoder: of its points.
        parts: of its covariance.
        noise: prior variance between launches.
        data: at least one observation.
        variances: those of the parts and, last, the noise; None learns them.
    """

    def __init__(
        self, encoder: Encoder, parts: Sequence[Part], noise: float, data: Data, variances: Array | None = None
    ) -> None:
        self._encoder, self.parts = encoder, tuple(parts)
        self._halves = tuple(encoder.encode(data.points, half) for half in (0, 1))
        self._prior = np.log([*(part.variance for part in parts), noise])
        beyond = data.values - self._halves[0].typical
        self._mean = float(np.average(beyond, weights=1 / (data.noise + noise)))
        same = (data.launches[:, None] == data.launches[None]).astype(float)
        values = beyond - self._mean
        self.variances = self._learned(data, same, values) if variances is None else variances
        covariance = self._covariance(*self._halves) + self.variances[-1] * same + np.diag(data.noise + 1e-9)
        self._root = np.linalg.cholesky(covariance)
        self._weights = cho_solve((self._root, True), values)

    @cached_property
    def surprise(self) -> float:
        """Mean square of how far each observation lies from what the others say of it, in their own uncertainty.

        Above 1 the covariance is not that of this space (interactions that it does not have, say), and true variances
        are that much larger. `_TRUSTED` observations as expected are counted in.
        """
        inverse = solve_triangular(self._root, np.eye(len(self._root)), lower=True, check_finite=False)
        squares = self._weights**2 / (inverse**2).sum(0)
        return max(1.0, float((squares.sum() + _TRUSTED) / (len(squares) + _TRUSTED)))

    def mean(self, first: Half, rest: Half) -> Array:
        """Posterior mean of every `first` with every `rest`: a row for each of `first`."""
        total = np.repeat(self._mean + first.typical[:, None], len(rest.codes), axis=1)
        one = self._encoder.grams(first, self._halves[0], 0)
        other, count = self._encoder.grams(rest, self._halves[1], 1), len(self._weights)
        alone: list[Array | float] = [0.0, 0.0]
        for (a, b), variance in self._terms():
            if b == "one":
                alone[0] = alone[0] + variance * one[a]
            elif a == "one":
                alone[1] = alone[1] + variance * other[b]
            else:
                total += (variance * one[a] * self._weights) @ np.broadcast_to(other[b], (len(rest.codes), count)).T
        total += (np.broadcast_to(alone[0], (len(first.codes), count)) @ self._weights)[:, None]
        total += (np.broadcast_to(alone[1], (len(rest.codes), count)) @ self._weights)[None]
        return total

    def _terms(self) -> Iterator[tuple[tuple[str, str], float]]:
        """Every term with the variance of its part."""
        for part, variance in zip(self.parts, self.variances, strict=False):
            yield from ((term, float(variance)) for term in part.terms)

    def at(self, first: Half, rest: Half) -> tuple[Array, Array]:
        """Posterior mean and variance of points given by their two halves, a row each."""
        across = self._covariance(first, rest)
        reduced = solve_triangular(self._root, across.T, lower=True, check_finite=False)
        variance = np.maximum(self._own(first, rest) - (reduced**2).sum(0), 1e-12)
        return self._mean + first.typical + across @ self._weights, variance

    def difference(self, first: Half, rest: Half) -> tuple[float, float]:
        """Mean and variance of the first of two points less the second; what both share has no part in it."""
        across = self._covariance(first, rest)
        reduced = solve_triangular(self._root, across.T, lower=True, check_finite=False)
        one, other = self._encoder.grams(first, first, 0), self._encoder.grams(rest, rest, 1)
        prior = np.zeros((2, 2))
        for (a, b), variance in self._terms():
            prior += variance * one[a] * other[b]
        means, left = first.typical + across @ self._weights, prior - reduced.T @ reduced
        return float(means[0] - means[1]), max(0.0, float(left[0, 0] + left[1, 1] - 2 * left[0, 1]))

    def _covariance(self, first: Half, rest: Half) -> Array:
        """Of points given by their two halves with the data, a row for each point."""
        one = self._encoder.grams(first, self._halves[0], 0)
        other = self._encoder.grams(rest, self._halves[1], 1)
        total = np.zeros((len(first.codes), len(self._halves[0].codes)))
        for (a, b), variance in self._terms():
            total += variance * one[a] * other[b]
        return total

    def _own(self, first: Half, rest: Half) -> Array:
        """Prior variance: every likeness of a level with itself is 1, so only the trend depends on the point."""
        counts = [half.codes.shape[1] for half in (first, rest)]
        trend = (first.features**2).sum(1)
        total = np.zeros(len(trend))
        for (a, b), variance in self._terms():
            total += variance * _self(a, counts[0], trend) * _self(b, counts[1], trend)
        return total

    def _learned(self, data: Data, same: Array, values: Array) -> Array:
        """Most probable variances given the data, over at most `_FIT_POINTS` of them, the latest among these."""
        chosen = _thinned(len(values))
        values, noise = values[chosen], data.noise[chosen]
        first, rest = (
            Half(h.logs[chosen], h.features[chosen], h.typical[chosen], h.codes[chosen]) for h in self._halves
        )
        one, other = self._encoder.grams(first, first, 0), self._encoder.grams(rest, rest, 1)
        whole = np.ones((len(values), len(values)))
        parts = [np.asarray(sum(one[a] * other[b] * whole for a, b in part.terms)) for part in self.parts]
        grams = np.stack([*parts, same[np.ix_(chosen, chosen)]])

        def loss(logs: Array) -> tuple[float, Array]:
            scales = np.exp(logs)
            covariance = np.tensordot(scales, grams, 1) + np.diag(noise + 1e-9)
            try:
                root = np.linalg.cholesky(covariance)
            except np.linalg.LinAlgError:
                return 1e10, np.zeros_like(logs)
            inverse = cho_solve((root, True), np.eye(len(values)))
            weights = inverse @ values
            slopes = ((inverse - np.outer(weights, weights)) * grams).sum((1, 2)) * scales / 2
            off = (logs - self._prior) / _SPREAD
            fit = values @ weights / 2 + np.log(np.diag(root)).sum() + (off**2).sum() / 2
            return float(fit), slopes + off / _SPREAD

        found = minimize(loss, self._prior, jac=True, method="L-BFGS-B", options={"maxiter": 40})
        return np.asarray(np.exp(found.x))


def _thinned(count: int) -> NDArray[np.intp]:
    if count <= _FIT_POINTS:
        return np.arange(count)
    late = _FIT_POINTS // 2
    return np.concatenate(
        [np.linspace(0, count - late - 1, _FIT_POINTS - late).astype(int), np.arange(count - late, count)]
    )


def _self(name: str, columns: int, trend: Array) -> Array | float:
    if name == "trend":
        return trend
    return {"columns": float(columns), "pairs": columns * (columns - 1) / 2}.get(name, 1.0)
