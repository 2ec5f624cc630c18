"""Gaussian processes whose covariance is a sum of parts with a meaning, each a product over the two halves of a point.

A part of the first half alone says what the tree's shape costs, a part of a column what a variable is worth, and so on;
their variances are learned, so the fit itself says what matters. On every-first-with-every-rest grids means are
products of small matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, solve_triangular
from scipy.optimize import minimize

from raytune_eagle.samplers.candidates import Params
from raytune_eagle.samplers.kernels import Array, Encoder, Grams, Half

_FIT_POINTS = 120
"""Observations that variances are learned from; more would change little and cost seconds."""
_TRUSTED = 5
_SPREAD = 1.5
"""Standard deviation of the logarithm of a variance around its prior."""


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
        parts: of its covariance; one named ``level`` says that the typical values lack a constant.
        noise: prior variance between launches.
        data: at least one observation.
        variances: those of the parts and, last, the noise; None learns them.
    """

    def __init__(
        self, encoder: Encoder, parts: Sequence[Part], noise: float, data: Data, variances: Array | None = None
    ) -> None:
        self._encoder, self.parts = encoder, tuple(parts)
        self._grams: dict[tuple[int, int], tuple[Half, Grams]] = {}  # with the half, so that its id stays its own
        self._halves = tuple(encoder.encode(data.points, half) for half in (0, 1))
        self._prior = np.log([*(part.variance for part in parts), noise])
        beyond = data.values - _typical(*self._halves)
        levelled = any(part.name == "level" for part in parts)
        self._mean = float(np.average(beyond, weights=1 / (data.noise + noise))) if levelled else 0.0
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
        total = self._mean + first.typical[:, None] + rest.typical[None]
        one = self._with_data(first, 0)
        other, count = self._with_data(rest, 1), len(self._weights)
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
        return self._mean + _typical(first, rest) + across @ self._weights, variance

    def expected(self, first: Half, rest: Half) -> Array:
        """Posterior mean of points given by their two halves, a row each."""
        return np.asarray(self._mean + _typical(first, rest) + self._covariance(first, rest) @ self._weights)

    def joint(self, first: Half, rest: Half) -> tuple[Array, Array]:
        """Posterior means of points, and the covariances between them."""
        across = self._covariance(first, rest)
        reduced = solve_triangular(self._root, across.T, lower=True, check_finite=False)
        one, other = self._encoder.grams(first, first, 0), self._encoder.grams(rest, rest, 1)
        prior = self._summed(one, other, (len(across), len(across)))
        return self._mean + _typical(first, rest) + across @ self._weights, prior - reduced.T @ reduced

    def difference(self, first: Half, rest: Half) -> tuple[float, float]:
        """Mean and variance of the first of two points less the second; what both share has no part in it."""
        means, left = self.joint(first, rest)
        return float(means[0] - means[1]), max(0.0, float(left[0, 0] + left[1, 1] - 2 * left[0, 1]))

    def _with_data(self, half: Half, which: int) -> Grams:
        """Kept, since a grid's mean and its variances ask for the same."""
        known = self._grams.get((which, id(half)))
        if known is None:
            known = self._grams[which, id(half)] = half, self._encoder.grams(half, self._halves[which], which)
        return known[1]

    def _covariance(self, first: Half, rest: Half) -> Array:
        """Of points given by their two halves with the data, a row for each point."""
        one = self._with_data(first, 0)
        other = self._with_data(rest, 1)
        return self._summed(one, other, (len(first.codes), len(self._halves[0].codes)))

    def _summed(self, one: Grams, other: Grams, shape: tuple[int, int]) -> Array:
        """Covariances of points given by both halves; the parts of single columns of one half in one go."""
        total = np.zeros(shape)
        columns: tuple[dict[str, float], dict[str, float]] = {}, {}
        for (a, b), variance in self._terms():
            if b == "one" and one.column(a):
                columns[0][a] = variance
            elif a == "one" and other.column(b):
                columns[1][b] = variance
            else:
                total += _product(variance, one[a], other[b])
        return total + one.weighted(columns[0]) + other.weighted(columns[1])

    def _own(self, first: Half, rest: Half) -> Array:
        """Prior variance: every likeness of a level with itself is 1, so little depends on the point."""
        counts = [half.codes.shape[1] for half in (first, rest)]
        trend, expected = (first.features**2).sum(1), rest.typical**2
        total = np.zeros(len(trend))
        for (a, b), variance in self._terms():
            total += variance * _self(a, counts[0], trend) * _self(b, counts[1], expected)
        return total

    def _learned(self, data: Data, same: Array, values: Array) -> Array:
        """Most probable variances given the data, over at most `_FIT_POINTS` of them, the latest among these."""
        chosen = _thinned(len(values))
        values, noise = values[chosen], data.noise[chosen]
        first, rest = (half.rows(chosen) for half in self._halves)
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


def _product(variance: float, one: Array | float, other: Array | float) -> Array | float:
    """Scalars first: a pass over all points less."""
    return variance * other * one if isinstance(other, float) else variance * one * other


def _thinned(count: int) -> NDArray[np.intp]:
    if count <= _FIT_POINTS:
        return np.arange(count)
    late = _FIT_POINTS // 2
    return np.concatenate(
        [np.linspace(0, count - late - 1, _FIT_POINTS - late).astype(int), np.arange(count - late, count)]
    )


def _typical(first: Half, rest: Half) -> Array:
    return first.typical + rest.typical


def _self(name: str, columns: int, own: Array) -> Array | float:
    if name in {"trend", "expected"} or name.endswith(" by trend"):
        return own
    return {"columns": float(columns), "pairs": columns * (columns - 1) / 2}.get(name, 1.0)
