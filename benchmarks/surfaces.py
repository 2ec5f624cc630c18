"""Spaces of known truth to search: 215 shapes of speculation × 810 NCCL settings, drawn at random by seed.

Numpy and this package's numpy-only parts; no other dependency.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from raytune_eagle.nodes.cost_model import Draft, Machine, Shape

STEPS, TOPK = tuple(range(1, 11)), (1, 2, 4, 8)
TOKENS = (2, 3, 4, 5, 6, 8, 11, 12, 16, 24, 32, 48, 64)
NCCL = {
    "NCCL_PROTO": ("Simple", "LL", "LL128"),
    "NCCL_ALGO": ("Ring", "Tree"),
    "NCCL_MAX_NCHANNELS": (2, 4, 8, 16, 32),
    "NCCL_BUFFSIZE": (1, 4, 16),
    "NCCL_NTHREADS": (128, 256, 512),
    "NCCL_P2P_LEVEL": ("NVL", "PHB", "SYS"),
}
NAMES = tuple(NCCL)


def capacity(steps: int, topk: int) -> int:
    """Tokens that a tree holds at most."""
    return 1 + topk + (steps - 1) * topk**2


SHAPES = [Shape(s, 1, s + 1) for s in STEPS] + [
    Shape(s, k, n) for s in STEPS for k in TOPK[1:] for n in TOKENS if s < n <= capacity(s, k)
]
SETTINGS = [dict(zip(NAMES, values, strict=True)) for values in itertools.product(*NCCL.values())]


@dataclass(frozen=True)
class Launched:
    """What a launch measured; None in all where it failed."""

    speed: float | None
    accept_len: float | None = None
    cycle_ms: float | None = None
    histogram: tuple[int, ...] = ()


@dataclass
class Surface:
    """One truth.

    Attributes:
        accept: accept_len by shape.
        reached: share of rounds with at least 1, 2, … accepted drafts, by shape.
        cycle: milliseconds by shape and setting.
        fails: likewise, whether a launch fails.
        all_reduce: by setting, what all-reduces take under it over what they take under the first; NaN where they hang.
    """

    shapes: list[Shape]
    settings: list[dict[str, object]]
    accept: np.ndarray
    reached: list[np.ndarray]
    cycle: np.ndarray
    fails: np.ndarray
    all_reduce: np.ndarray
    accept_noise: float = 0.012
    cycle_noise: float = 0.010
    speed: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.speed = np.where(self.fails, 0.0, 1000 * self.accept[:, None] / self.cycle)

    def launch(self, shape: int, setting: int, rng: np.random.Generator) -> Launched:
        """Launch a point, with noise."""
        if self.fails[shape, setting]:
            return Launched(None)
        accepted = (self.accept[shape] - 1) * np.exp(rng.normal(0, self.accept_noise)) + 1
        cycle = self.cycle[shape, setting] * np.exp(rng.normal(0, self.cycle_noise))
        reached = np.clip(self.reached[shape] * (accepted - 1) / (self.accept[shape] - 1), 0, 1)
        rounds = rng.multinomial(20_000, np.clip(-np.diff([1.0, *reached, 0.0]), 0, None))
        return Launched(1000 * accepted / cycle, accepted, cycle, tuple(int(count) for count in rounds))


def surface(seed: int, kind: str = "plain") -> Surface:
    """Draw a truth: ``plain``, ``misspecified`` (interactions and roughness beyond any model) or ``failing`` (20 %)."""
    rng = np.random.default_rng([seed, 6])
    draft = _draft(rng)
    reached = [draft.reached(shape) for shape in SHAPES]
    machine, all_reduce = _machine(rng)
    cycle = _cycles(draft, machine, all_reduce)
    fails = np.zeros(cycle.shape, dtype=bool)
    if kind == "misspecified":
        cycle = cycle * _beyond(rng)
    if kind == "failing":
        fails, bad = _failing(rng)
        all_reduce = np.where(bad, np.nan, all_reduce)
    accept = np.array([1 + each.sum() for each in reached])
    return Surface(SHAPES, SETTINGS, accept, reached, cycle, fails, all_reduce)


def _draft(rng: np.random.Generator) -> Draft:
    return Draft.falling(
        rng.uniform(0.35, 0.75),
        rng.uniform(0.85, 0.99),
        ranks=rng.uniform(0.1, 0.5),
        spread=rng.uniform(0.0, 1.2),
        step_ms=rng.uniform(0.4, 1.2),
        topk_ms=rng.uniform(0.0, 0.08),
    )


def _machine(rng: np.random.Generator) -> tuple[Machine, np.ndarray]:
    """Machine without settings, and the factor on its all-reduces under each of `SETTINGS`."""
    machine = Machine(
        decode_ms=10.0,
        verify_ms=rng.uniform(8, 14),
        token_ms=rng.uniform(0.15, 0.6),
        comm_share=rng.uniform(0.15, 0.45),
        overhead_ms=1.0,
    )
    factors = {
        "NCCL_PROTO": rng.permutation([1.0, 0.6, 0.8]),
        "NCCL_ALGO": rng.permutation([1.0, 0.75]),
        "NCCL_MAX_NCHANNELS": 1 + 0.06 * (np.arange(5) - rng.integers(5)) ** 2,
        "NCCL_BUFFSIZE": 1 + rng.normal(0, 0.03, 3),
        "NCCL_NTHREADS": 1 + rng.normal(0, 0.04, 3),
        "NCCL_P2P_LEVEL": rng.permutation([1.0, 0.9, 0.8]),
    }
    codes = _codes()
    product = np.prod([factors[name][codes[:, place]] for place, name in enumerate(NAMES)], axis=0)
    pair = 1 + rng.normal(0, 0.08, (3, 2))
    return machine, product * pair[codes[:, 0], codes[:, 1]]


def _codes() -> np.ndarray:
    return np.array([[NCCL[name].index(setting[name]) for name in NAMES] for setting in SETTINGS])


def _cycles(draft: Draft, machine: Machine, factor: np.ndarray) -> np.ndarray:
    """A cycle is linear in the factor on its all-reduces, so two points of it say all."""
    half = Machine(**{**machine.__dict__, "nccl": {"X": {"1": 0.5}}})
    one = np.array([machine.cycle_ms(draft, shape, {}) for shape in SHAPES])
    other = np.array([half.cycle_ms(draft, shape, {"X": "1"}) for shape in SHAPES])
    return one[:, None] + 2 * (one - other)[:, None] * (factor - 1)[None]


def _beyond(rng: np.random.Generator) -> np.ndarray:
    """Factor with triples of variables, variables by shape, shapes that jump, and each point rough by itself."""
    codes, logs = _codes(), np.log2(np.array(SHAPES, dtype=float))
    settings = np.zeros(len(SETTINGS))
    for places in itertools.combinations(range(len(NAMES)), 3):
        settings += rng.normal(0, 0.02, (5, 5, 5))[tuple(codes[:, place] for place in places)]
    by_shape = rng.normal(0, 0.02, len(SHAPES))[:, None] + settings[None]
    for place in range(len(NAMES)):
        slopes = rng.normal(0, 0.01, (5, 3))[codes[:, place]]
        by_shape = by_shape + (logs - logs.mean(0)) @ slopes.T
    return np.exp(by_shape + rng.normal(0, 0.005, by_shape.shape))


def _failing(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """About 20 % of points: large trees, one pair of settings (given by itself), and 5 % without any pattern."""
    codes, tokens = _codes(), np.array([shape.tokens for shape in SHAPES])
    name = rng.integers(2, 6)
    bad = (codes[:, 0] == rng.integers(3)) & (codes[:, name] == rng.integers(2))
    large = tokens > 40
    return large[:, None] | bad[None] | (rng.random((len(tokens), len(bad))) < 0.05), bad
