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
    """Coordinates of halves of points: the tree's shape in logarithms, its features; the typical value; levels.

    A first half has a shape, a second none; the typical value of a point is the sum of those of its halves.
    """

    logs: Array
    features: Array
    typical: Array
    codes: NDArray[np.intp]

    def rows(self, places: NDArray[np.intp]) -> Half:
        """Some of the points."""
        return Half(self.logs[places], self.features[places], self.typical[places], self.codes[places])

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
        self._codes = {
            name: {(type(value).__name__, value): code for code, value in enumerate(values)}
            for name, values in candidates.levels.items()
        }
        self._likeness = {name: _likeness(values) for name, values in candidates.levels.items()}

    def encode(self, points: Sequence[Mapping[str, Any]], half: int) -> Half:
        """Coordinates of the first (0) or second (1) half of whole or half points."""
        codes = [
            [self._codes[name].get((type(p.get(name)).__name__, p.get(name)), 0) for name in self._columns[half]]
            for p in points
        ]
        levels = np.array(codes, dtype=np.intp).reshape(len(points), len(self._columns[half]))
        if half:
            none = np.zeros((len(points), 0))
            return Half(none, none, self.expected(points) if self.expected else np.zeros(len(points)), levels)
        trees = shapes(points)
        return Half(np.log2(_alone(trees)), self._features(trees), self._typical(trees), levels)

    def grams(self, one: Half, other: Half, half: int) -> Grams:
        """Covariances between points, by the name of what they share."""
        return Grams(one, other, {name: self._likeness[name] for name in self._columns[half]})


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
        if name in {"wide", "narrow"}:
            return np.asarray(np.exp(self._distance / (-2 * {"wide": _WIDE, "narrow": _NARROW}[name] ** 2)))
        if name in {"trend", "expected"}:
            one, other = (h.features if name == "trend" else h.typical[:, None] for h in (self._one, self._other))
            return one @ other.T
        if name.endswith(" by trend"):
            return np.asarray(self[name.removesuffix(" by trend")] * self["trend"])
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
