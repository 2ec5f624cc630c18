"""What a launch would cost and accept, from parts that can be told apart; numpy only.

Time per token is cycle time / accept_len. accept_len comes from the draft and the shape of its tree alone; the cycle is
one verify step of the target, the draft's steps, and what the host adds. NCCL's settings scale what all-reduces take.

The tree is SGLang's (`raytune_eagle.trees`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raytune_eagle import trees

Array = NDArray[np.float64]
_MOST_DEPTH = 64
_PLACES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(5)
"""Kinds of passages between easy and hard, as nodes of a Gauss-Hermite rule."""


class Shape(NamedTuple):
    """Settings of the speculation: ``--speculative-num-steps``, ``-eagle-topk`` and ``-num-draft-tokens``."""

    steps: int
    topk: int
    tokens: int


@dataclass(frozen=True)
class Draft:
    """How well a draft guesses.

    Attributes:
        accept: chance that its first choice at depth 1, 2, … is accepted, all before it being so; the last one repeats.
        ranks: share of what the better choices leave that each next choice takes, times the first choice's chance.
        spread: standard deviation, on the logit scale, between easy and hard passages of one text.
        step_ms, topk_ms: one of its steps takes step_ms + topk_ms × eagle_topk, before any NCCL setting.
        categories: shift on the logit scale for prompts of a category; 0 for those not named.
    """

    accept: tuple[float, ...]
    ranks: float = 0.3
    spread: float = 0.0
    step_ms: float = 0.2
    topk_ms: float = 0.0
    categories: Mapping[str, float] = field(default_factory=dict, hash=False)

    @classmethod
    def falling(cls, first: float, decay: float, **others: object) -> Draft:
        """A draft whose chance falls by the factor `decay` with each depth."""
        return cls(tuple(first * decay**depth for depth in range(16)), **others)  # type: ignore[arg-type]

    @classmethod
    def from_accept_lens(cls, lens: tuple[float, ...], **others: object) -> Draft:
        """The draft whose chains of 1, 2, … steps have just these accept_lens."""
        gains = np.diff([1.0, *lens])
        return cls(tuple(float(gain) for gain in gains / np.array([1.0, *gains[:-1]])), **others)  # type: ignore[arg-type]

    def reached(self, shape: Shape, category: str = "") -> Array:
        """Share of verify rounds that accept at least 1, 2, …, `steps` drafts.

        Raises:
            ValueError: the tree does not hold so many tokens.
        """
        return _reached(self, shape, self.categories.get(category, 0.0))

    def accept_len(self, shape: Shape, category: str = "") -> float:
        """Tokens per verify round, bonus token included."""
        return 1.0 + float(self.reached(shape, category).sum())

    def chances(self, depth: int, topk: int, shifts: Array) -> Array:
        """Chances of the first `topk` choices at a depth (from 0); a row per kind of passages, by its logit's shift."""
        mean = min(max(self.accept[min(depth, len(self.accept) - 1)], 1e-6), 1 - 1e-6)
        first = 1 / (1 + np.exp(-math.log(mean / (1 - mean)) - shifts))
        chances, left = [first], 1 - first
        for _ in range(topk - 1):
            chances.append(left * first * self.ranks)
            left = left - chances[-1]
        return np.stack(chances, axis=-1)


@lru_cache(maxsize=100_000)
def _reached(draft: Draft, shape: Shape, shift: float) -> Array:
    """Average over kinds of passages; the draft knows its own confidence, so each kind has its own tree."""
    places, weights = (_PLACES, _WEIGHTS) if draft.spread else (np.zeros(1), np.ones(1))
    shifts = shift + draft.spread * places
    grown = trees.candidates([draft.chances(depth, shape.topk, shifts) for depth in range(shape.steps)])
    return np.average(trees.reached(grown, shape.tokens), axis=0, weights=weights)


Levels = Mapping[str, Mapping[str | None, float]]
"""Factor on all-reduce time by variable and value; None is a variable left unset. What is not named changes nothing."""


@dataclass(frozen=True)
class Machine:
    """What one step takes, in milliseconds, before any NCCL setting.

    Attributes:
        decode_ms: plain decoding of one token at one stream.
        verify_ms, token_ms, token_power: a verify step of n tokens over all streams takes
            verify_ms + token_ms × n ** token_power.
        overhead_ms: of the host, per cycle.
        comm_share: share of a target step that is all-reduces.
        draft_comm_share: likewise of a draft step.
        eager_ms: added to each step of target and draft without CUDA graphs.
        ttft_ms: from a request to its first token.
        nccl: what settings do to all-reduces; `pairs` what two of them do together beyond that.
    """

    decode_ms: float
    verify_ms: float
    token_ms: float
    token_power: float = 0.8
    overhead_ms: float = 0.3
    comm_share: float = 0.3
    draft_comm_share: float = 0.5
    eager_ms: float = 3.0
    ttft_ms: float = 200.0
    nccl: Levels = field(default_factory=dict)
    pairs: Mapping[tuple[str, str | None, str, str | None], float] = field(default_factory=dict)

    def all_reduce(self, env: Mapping[str, str]) -> float:
        """Time of all-reduces under this environment over that without any setting."""
        factor = math.prod(values.get(env.get(name), 1.0) for name, values in self.nccl.items())
        for (one, first, other, second), extra in self.pairs.items():
            factor *= extra if env.get(one) == first and env.get(other) == second else 1.0
        return factor

    def plain_ms(self, env: Mapping[str, str], streams: int = 1, *, graphs: bool = True) -> float:
        """One step of plain decoding."""
        batch = self.token_ms * (streams**self.token_power - 1)
        return self._target(self.decode_ms + batch, env, graphs=graphs)

    def verify_step_ms(self, shape: Shape, env: Mapping[str, str], streams: int = 1, *, graphs: bool = True) -> float:
        """The target's part of a cycle."""
        work = self.verify_ms + self.token_ms * (shape.tokens * streams) ** self.token_power
        return self._target(work, env, graphs=graphs)

    def cycle_ms(
        self, draft: Draft, shape: Shape, env: Mapping[str, str], streams: int = 1, *, graphs: bool = True
    ) -> float:
        """One draft and verify round."""
        share, eager = self.draft_comm_share, 0.0 if graphs else self.eager_ms
        step = (draft.step_ms + draft.topk_ms * shape.topk) * (1 - share + share * self.all_reduce(env)) + eager
        return self.verify_step_ms(shape, env, streams, graphs=graphs) + shape.steps * step + self.overhead_ms

    def _target(self, work_ms: float, env: Mapping[str, str], *, graphs: bool) -> float:
        scaled = work_ms * (1 - self.comm_share + self.comm_share * self.all_reduce(env))
        return scaled + (0.0 if graphs else self.eager_ms)


@dataclass(frozen=True)
class Night:
    """What launches take and how they end.

    Attributes:
        launch_s, capture_s: from the start of a server to its port, and CUDA graph capture per draft token.
        teardown_s: until the node is free.
        cycle_noise: standard deviation, as a share, of the cycle time between launches of one configuration.
        request_noise: likewise between requests of one launch.
        most_tokens: draft tokens above which graph capture runs out of memory.
    """

    launch_s: float = 420.0
    capture_s: float = 1.5
    teardown_s: float = 30.0
    cycle_noise: float = 0.01
    request_noise: float = 0.01
    most_tokens: int = 60


@dataclass(frozen=True)
class CostModel:
    """A cluster of one kind of machine, and the drafts that may run there."""

    name: str
    machine: Machine
    drafts: Mapping[str, Draft]
    night: Night = Night()

    @cached_property
    def default(self) -> str:
        """Draft that stands for every path that names none."""
        return next(iter(self.drafts))

    def draft(self, path: str) -> Draft:
        """Draft that a path means: the one whose name is its last part, else the default one."""
        return self.drafts.get(path.rstrip("/").rsplit("/", 1)[-1], self.drafts[self.default])
