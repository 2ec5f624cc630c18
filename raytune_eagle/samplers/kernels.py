"""Coordinates of points, and how alike two points are in the shape of their trees and in each of their settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raytune_eagle.samplers.candidates import Candidates, shapes

Array = NDArray[np.float64]
_WIDE, _NARROW = 2.5, 0.9
"""Length scales over the logarithms (base 2) of steps, topk and tokens."""


class Half(NamedTuple):
    """Coordinates of halves of points: the tree's shape, its features; the typical value; levels.

    A first half has a shape, a second none; the typical value of a point is the sum of those of its halves.
    """

    trees: Array
    features: Array
    typical: Array
    codes: NDArray[np.intp]

    def rows(self, places: NDArray[np.intp]) -> Half:
        """Some of the points."""
        return Half(self.trees[places], self.features[places], self.typical[places], self.codes[places])

    def plain(self) -> Half:
        """Where nothing is typical."""
        return self._replace(typical=np.zeros_like(self.typical))


class Encoder:
    """Turns halves of points into coordinates, and those into covariances.

    Args:
        candidates: the space.
        features: of trees, from rows as `candidates.shapes` gives.
        typical: value to expect of a tree, likewise, but for a constant; the process learns what differs from it.
        expected: what to add to it for the settings of a second half.
    """

    def __init__(
        self,
        candidates: Candidates,
        features: Callable[[Array], Array],
        typical: Callable[[Array], Array] | None = None,
        expected: Callable[[Sequence[Mapping[str, Any]]], Array] | None = None,
    ) -> None:
        self._features, self._typical, self._columns = features, typical or _nothing, candidates.columns
        self.expected = expected
        self._codes = {name: _Codes(values) for name, values in candidates.levels.items()}
        self._likeness = {name: _likeness(values) for name, values in candidates.levels.items()}

    def encode(self, points: Sequence[Mapping[str, Any]], half: int) -> Half:
        """Coordinates of the first (0) or second (1) half of whole or half points."""
        levels = np.zeros((len(points), len(self._columns[half])), dtype=np.intp)
        for place, name in enumerate(self._columns[half]):
            levels[:, place] = self._codes[name].of([point.get(name) for point in points])
        if half:
            none = np.zeros((len(points), 0))
            return Half(none, none, self.expected(points) if self.expected else np.zeros(len(points)), levels)
        trees = shapes(points)
        return Half(trees, self._features(trees), self._typical(trees), levels)

    def grams(self, one: Half, other: Half, half: int) -> Grams:
        """Covariances between points, by the name of what they share."""
        return Grams(one, other, {name: self._likeness[name] for name in self._columns[half]})


class _Codes:
    """Places of a column's levels; 0 for what is none of them."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._typed = {(type(value), value): code for code, value in enumerate(values)}
        plain = {value: code for code, value in enumerate(values)}
        self._plain = plain if len(plain) == len(values) else None  # faster, but True is 1 there

    def of(self, values: Sequence[Any]) -> list[int]:
        if self._plain is not None:
            return [self._plain.get(value, 0) for value in values]
        return [self._typed.get((type(value), value), 0) for value in values]


class Grams:
    """Covariances between the halves of some points and others, each computed when it is first asked for.

    * ``one``: shared by all; the scalar 1.
    * ``trend``, ``wide``, ``narrow``: alike in the shape of their trees.
    * a column's name: alike in its value; ``NAME by shape``, ``NAME by trend``: and in shape.
    * ``columns``, ``pairs``: sums over the columns, and over pairs of them.
    * ``all``: alike in every column.
    * ``expected``: products of what is typical of the settings, so that its share may be another.
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
            by_level = self._likeness[name][:, self._other.codes[:, place]]  # then whole rows: faster than each cell
            return np.asarray(by_level[self._one.codes[:, place]])
        if name in {"wide", "narrow", "trend"}:
            return np.asarray(self._by_tree(name)[self._trees[1]])
        if name == "expected":
            return self._one.typical[:, None] * self._other.typical
        if name.endswith(" by trend"):
            return np.asarray(self[name.removesuffix(" by trend")] * self["trend"])
        if name.endswith(" by shape"):
            return np.asarray(self[name.removesuffix(" by shape")] * self["wide"])
        return self._over_columns(name)

    def _over_columns(self, name: str) -> Array | float:
        if not self._likeness:
            return 1.0 if name == "all" else 0.0
        if name == "columns":
            return self._summed(lambda _, likeness: likeness)
        if name == "pairs":
            return (self["columns"] ** 2 - self._summed(lambda _, likeness: likeness**2)) / 2
        return np.asarray(np.exp(self._summed(lambda _, likeness: np.log(0.2 + 0.8 * likeness))))

    def column(self, name: str) -> bool:
        """Whether there is such a column."""
        return name in self._likeness

    def weighted(self, weights: Mapping[str, float]) -> Array | float:
        """Sum over these columns, each with its weight."""
        return self._summed(lambda name, likeness: weights.get(name, 0.0) * likeness) if weights else 0.0

    def _summed(self, of: Callable[[str, Array], Array]) -> Array:
        """Sum over the columns of a function of how alike two levels are: one product of small matrices."""
        tables = [of(name, likeness) for name, likeness in self._likeness.items()]
        left = np.concatenate([t[self._one.codes[:, place]] for place, t in enumerate(tables)], axis=1)
        right = [np.eye(len(t))[self._other.codes[:, place]] for place, t in enumerate(tables)]
        return left @ np.concatenate(right, axis=1).T

    @cached_property
    def _trees(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Points of each distinct tree, and which of these each point has: few trees are in many points."""
        _, distinct, same = np.unique(self._one.trees, axis=0, return_index=True, return_inverse=True)
        return distinct, same.ravel()

    def _by_tree(self, name: str) -> Array:
        if name == "trend":
            return self._one.features[self._trees[0]] @ self._other.features.T
        return np.asarray(np.exp(self._distance / (-2 * {"wide": _WIDE, "narrow": _NARROW}[name] ** 2)))

    @cached_property
    def _distance(self) -> Array:
        """Squared, over the logarithms of steps, topk and tokens, of each distinct tree."""
        one, other = np.log2(_alone(self._one.trees[self._trees[0]])), np.log2(_alone(self._other.trees))
        lengths = (one**2).sum(1)[:, None] + (other**2).sum(1)[None]
        return np.asarray(np.maximum(lengths - 2 * one @ other.T, 0.0))


def _alone(trees: Array) -> Array:
    """Steps, topk and tokens of trees that are about their upper parts."""
    steps, topk, tokens, upper = trees.T
    return np.stack([upper, topk, np.maximum(upper + 1, 1 + (tokens - 1) * upper / steps)], axis=1)


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
