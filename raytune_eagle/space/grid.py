"""The valid points of a space: how many of each part the rules leave, and the n-th of all."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from raytune_eagle import rules

Params = dict[str, Any]
"""Searched parameters by column name, for example ``{"num_steps": 3, "nccl_proto": None}``."""


@dataclass
class GroupSize:
    """How many combinations of one group were written down, what the rules took away, and what is left."""

    name: str
    raw: int = 0
    removed: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    left: list[Params] = field(default_factory=list)

    def count(self, judgement: rules.Judgement) -> None:
        """Take note of what was found."""
        for finding in judgement.findings:
            self.removed[finding.rule, finding.verdict] += 1
            self.examples.setdefault(finding.rule, finding.reason)

    def add(self, other: GroupSize) -> None:
        """Put the figures of the same settings beside another value of what they depend on to these."""
        self.raw += other.raw
        self.removed += other.removed
        self.examples = {**other.examples, **self.examples}
        self.left += other.left


@dataclass
class Parts:
    """The valid points: in each block every one of its speculative settings goes with every one of the others.

    Attributes:
        ends: number of points up to the end of each block.
    """

    speculative: GroupSize
    server: GroupSize
    blocks: list[tuple[list[Params], list[Params]]]
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = list(itertools.accumulate(len(first) * len(rest) for first, rest in self.blocks))

    def point(self, index: int) -> Params:
        """Point number `index`, from 0."""
        block = bisect_right(self.ends, index)
        first, rest = self.blocks[block]
        index -= self.ends[block - 1] if block else 0
        return {**first[index % len(first)], **rest[index // len(first)]}
