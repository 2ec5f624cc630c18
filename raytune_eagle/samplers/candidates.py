"""All points that a search may choose, as every one of some first halves with every one of some second halves.

The first half holds what shapes the speculation, the second NCCL's variables and server flags.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

Params = dict[str, Any]
SHAPE = ("num_steps", "eagle_topk", "num_draft_tokens")
"""Columns that shape a draft's tree."""
UPPER = "upper"
"""Beside the columns of a tree: only so many of its steps are meant."""
BOTH = ("draft",)
"""Columns that change what is accepted as well as how long a cycle takes."""
_MOST_POINTS = 3_000_000


class CannotPlaceError(ValueError):
    """A space that the two factors cannot be laid over; says why."""


@dataclass(frozen=True)
class Block:
    """Every one of `first` with every one of `rest`."""

    first: tuple[Params, ...]
    rest: tuple[Params, ...]

    @cached_property
    def places(self) -> tuple[dict[tuple[Any, ...], int], dict[tuple[Any, ...], int]]:
        """Index of each half by its values."""
        return (
            {_key(point): place for place, point in enumerate(self.first)},
            {_key(point): place for place, point in enumerate(self.rest)},
        )

    def find(self, params: Mapping[str, Any]) -> tuple[int, int] | None:
        """Place of a point; None when it is not of this block."""
        places, halves = self.places, (self.first[0], self.rest[0])
        found = [
            index.get(_key({name: params.get(name) for name in half}))
            for index, half in zip(places, halves, strict=True)
        ]
        return None if None in found else (found[0], found[1])  # type: ignore[return-value]


class Candidates:
    """Points of a space, and what their values are worth as coordinates.

    Args:
        blocks: halves that go together, as two sequences of parameters each.
    """

    def __init__(self, blocks: Iterable[tuple[Sequence[Params], Sequence[Params]]]) -> None:
        self.blocks = [Block(tuple(first), tuple(rest)) for first, rest in blocks if first and rest]
        if not self.blocks:
            raise CannotPlaceError("there is no point")

    def __len__(self) -> int:
        return sum(len(block.first) * len(block.rest) for block in self.blocks)

    @cached_property
    def columns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Columns of the first half, but for the tree's shape, and of the second."""
        first, rest = ({name: None for b in self.blocks for p in half(b) for name in p} for half in (_first, _rest))
        return tuple(name for name in first if name not in SHAPE), tuple(rest)

    @cached_property
    def levels(self) -> dict[str, tuple[Any, ...]]:
        """Values of each column but the tree's shape."""
        found: dict[str, dict[Any, None]] = {name: {} for half in self.columns for name in half}
        for block in self.blocks:
            for point in (*block.first, *block.rest):
                for name, value in point.items():
                    if name in found:
                        found[name][_typed(value)] = None
        return {name: tuple(value for _, value in values) for name, values in found.items()}


def _first(block: Block) -> tuple[Params, ...]:
    return block.first


def _rest(block: Block) -> tuple[Params, ...]:
    return block.rest


def _typed(value: Any) -> tuple[str, Any]:
    """So that True is not 1."""
    return type(value).__name__, value


def _key(point: Mapping[str, Any]) -> tuple[Any, ...]:
    """Values of a half; a chain's number of draft tokens follows from its steps."""
    chain = point.get("eagle_topk") == 1
    return tuple(_typed(point[name]) for name in sorted(point) if not (chain and name == "num_draft_tokens"))


def from_distributions(space: Mapping[str, BaseDistribution]) -> Candidates:
    """Every point of Optuna's distributions that a draft's tree can have.

    Raises:
        CannotPlaceError: a parameter has a name or a kind that belongs to neither factor, or there are too many points.
    """
    values = {name: _values(name, distribution) for name, distribution in space.items()}
    if "num_steps" not in values and any(name in values for name in SHAPE):
        raise CannotPlaceError("num_steps is not searched beside eagle_topk or num_draft_tokens")
    rest = {name: values[name] for name in values if name not in (*SHAPE, *BOTH)}
    strange = [name for name in rest if not name.lower().startswith("nccl_")]
    if strange:
        raise CannotPlaceError(f"{strange[0]} may change what is accepted or how long a cycle takes: give `candidates`")
    first = {name: values[name] for name in values if name not in rest}
    size = math.prod(len(found) for found in values.values())
    if size > _MOST_POINTS:
        raise CannotPlaceError(f"{size:,} points, more than {_MOST_POINTS:,}")
    trees = {_key(point): point for point in map(_whole, _product(first)) if _holds(point)}
    return Candidates([(list(trees.values()), _product(rest))])


def _values(name: str, distribution: BaseDistribution) -> tuple[Any, ...]:
    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)
    if isinstance(distribution, IntDistribution):
        return tuple(range(distribution.low, distribution.high + 1, distribution.step))
    raise CannotPlaceError(f"{name} is continuous")


def _product(values: Mapping[str, Sequence[Any]]) -> list[Params]:
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


def _whole(point: Params) -> Params:
    return {**point, "num_draft_tokens": point["num_steps"] + 1} if point.get("eagle_topk") == 1 else point


def _holds(point: Params) -> bool:
    """Whether a tree has so many tokens, and room for its longest path."""
    if any(name not in point for name in SHAPE):
        return True
    steps, topk, tokens = (point[name] for name in SHAPE)
    return bool(steps < tokens <= 1 + topk + (steps - 1) * topk**2)


def among(value: Any, values: Sequence[Any]) -> bool:
    """Membership that does not take True for 1."""
    return any(type(value) is type(one) and value == one for one in values)


def shapes(points: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """Steps, topk, tokens and how many of the steps are meant, a row each; what is not searched is 1, a chain."""
    return np.array([_shape(point) for point in points], dtype=float).reshape(-1, 4)


def _shape(point: Mapping[str, Any]) -> tuple[int, int, int, int]:
    steps, topk = point.get("num_steps") or 1, point.get("eagle_topk") or 1
    tokens = steps + 1 if topk == 1 else point.get("num_draft_tokens") or steps + 1
    return steps, topk, tokens, point.get(UPPER) or steps
