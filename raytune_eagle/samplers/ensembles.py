"""What drafts and machines there might be: a few hundred of each, to be told apart by the launches.

A Gaussian process over shapes takes its mean and covariance from them, so that one launch of a tree says what other
trees of the same draft would accept, in so far as SGLang's way to grow trees decides it; what it does not decide is
left to the process's other parts. The ranges are wide: published EAGLE-3 drafts lie well inside.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from raytune_eagle import trees
from raytune_eagle.samplers.kernels import Array

_COUNT = 160
_MODES = np.array([-1.7, 0.0, 1.7])
"""Easy, middling and hard passages of one text, in standard deviations, …"""
_SHARES = np.array([0.17, 0.66, 0.17])
"""… and how much of it each is."""
_DEEPEST = 32
"""Steps from which on a chance stays as it is."""
_MOST_TOKENS = 257


def accept_features(shapes: Array) -> Array:
    """How log accept_len of each draft differs from `typical_accept`; their products are the covariance."""
    return _spread(_accepts(shapes))


def typical_accept(shapes: Array) -> Array:
    """Log accept_len, mean over all drafts; rows as those of `kernels.shapes`."""
    return np.asarray(_accepts(shapes).mean(1))


def cycle_features(shapes: Array) -> Array:
    """How log cycle time of each machine differs from `typical_cycle`, each over that of its own smallest launch."""
    return _spread(_cycles(shapes))


def typical_cycle(shapes: Array) -> Array:
    """Log cycle time, mean over all machines."""
    return np.asarray(_cycles(shapes).mean(1))


def _spread(values: Array) -> Array:
    return np.asarray((values - values.mean(1)[:, None]) / np.sqrt(_COUNT - 1))


# --------------------------------------------------------------------------------------------------------------- drafts
def _accepts(shapes: Array) -> Array:
    """Log accept_len of each shape by each draft."""
    whole = [tuple(int(value) for value in row) for row in shapes]
    return np.array([_accept(*row) for row in whole]).reshape(len(whole), _COUNT)


@lru_cache(maxsize=20_000)
def _accept(steps: int, topk: int, tokens: int, depth: int) -> Array:
    """Of the first `depth` steps of a tree."""
    totals = _totals(topk, steps)
    tokens = min(tokens, totals.shape[-1] + 1)
    if depth < steps:
        accepts = trees.reached(_grown(topk, steps), tokens)[..., :depth].sum(-1)
    else:
        accepts = totals[..., tokens - 2]
    return np.asarray(np.log1p(accepts @ _SHARES))


@lru_cache(maxsize=256)
def _totals(topk: int, steps: int) -> Array:
    return trees.accepted(_grown(topk, steps), _MOST_TOKENS)


@lru_cache(maxsize=256)
def _grown(topk: int, steps: int) -> tuple[Array, ...]:
    return tuple(trees.candidates(list(np.moveaxis(_chances(topk, steps), -2, 0))))


@lru_cache(maxsize=256)
def _chances(topk: int, steps: int) -> Array:
    """By draft, kind of passage, depth and choice."""
    rng = np.random.default_rng(1)
    first, fall = rng.uniform(0.3, 0.92, _COUNT), rng.uniform(0.82, 1.0, _COUNT)
    spread, share = rng.uniform(0.0, 1.5, _COUNT), rng.uniform(0.05, 0.6, _COUNT)
    power, by_power = rng.uniform(1.0, 3.0, _COUNT), rng.integers(2, size=_COUNT).astype(bool)
    uneven = rng.normal(0, 0.1, (_COUNT, _DEEPEST))
    at = np.minimum(np.arange(steps), _DEEPEST - 1)
    mean = np.minimum(first[:, None] * fall[:, None] ** at, 0.98)
    logits = np.log(mean / (1 - mean)) + uneven[:, at]
    best = 1 / (1 + np.exp(-(logits[:, None] + (spread[:, None] * _MODES)[..., None])))
    return _choices(best, topk, np.where(by_power, np.nan, share), power)


def _choices(best: Array, topk: int, share: Array, power: Array) -> Array:
    """Choices after the first: each a share of what the better ones left, or falling as a power of its rank."""
    found, left = [best], 1 - best
    for rank in range(2, topk + 1):
        shared = left * best * share[:, None, None]
        falling = np.minimum(best * rank ** -power[:, None, None], 0.9 * left)
        found.append(np.minimum(np.where(np.isnan(shared), falling, shared), found[-1]))
        left = left - found[-1]
    return np.stack(found, axis=-1)


# ------------------------------------------------------------------------------------------------------------- machines
def _cycles(shapes: Array) -> Array:
    """Log cycle time of each shape on each machine: a verify step, work for each token, and the draft's steps."""
    rng = np.random.default_rng(2)
    token, power = _between(rng, 0.004, 0.15), rng.uniform(0.5, 1.0, _COUNT)
    step, choice = _between(rng, 0.01, 0.5), _between(rng, 0.005, 0.3)
    steps, topk, tokens = shapes[:, :3].T[..., None]
    return np.asarray(np.log(1 + token * tokens**power + steps * step * (1 + choice * topk)))


def _between(rng: np.random.Generator, low: float, high: float) -> Array:
    return np.asarray(np.exp(rng.uniform(np.log(low), np.log(high), _COUNT)))
