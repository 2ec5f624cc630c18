"""When a launch need not be measured to its end: on the prompts answered so far it cannot be the best any more.

The test is paired: the same prompts on the best launch so far, so that easy and hard prompts cancel, and it may be
asked again and again. It ends a launch only where the shortfall is beyond what answers and launches differ by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from raytune_eagle.figures import counted
from raytune_eagle.model.measurement import Request
from raytune_eagle.model.trial import Best
from raytune_eagle.statistics import LAUNCH_NOISE

_LEAST = 12
"""Answers before anything is concluded; more streams need twice their number."""
_SURE = 3.3
"""Standard deviations; one look errs once in 2,000."""
_MORE = 1.15
"""Looks are taken when there are so many times as many answers as at the last one: some 25 in the longest bench."""
_MOST_GAIN = math.log(2.0)
"""What a launch that is behind at one concurrency may be ahead at another."""


class Standing(NamedTuple):
    """Logarithm of a launch's speed over the best's, on the prompts answered so far, and its standard deviation."""

    ratio: float
    deviation: float

    @property
    def most(self) -> float:
        """What the ratio may be with luck."""
        return self.ratio + _SURE * math.hypot(self.deviation, math.sqrt(2) * LAUNCH_NOISE)


def standing(rows: Sequence[Request], best: Best) -> Standing | None:
    """How a launch stands beside the best at one concurrency; None while there are too few answers to say."""
    known = {prompt: (tokens, seconds) for prompt, tokens, seconds in best.prompts}
    shared = [row for row in counted(rows) if row.prompt_id in known and row.completion_tokens]
    if len(shared) < max(_LEAST, 2 * best.concurrency):
        return None
    ours = [(row.completion_tokens, row.latency_s) for row in shared]
    shares = np.array([[*one, *known[row.prompt_id]] for one, row in zip(ours, shared, strict=True)], dtype=float)
    totals = shares.sum(0)
    signs = np.array([1, -1, -1, 1])  # tokens up, seconds down, and the other way round for the best
    apart = (shares / totals) @ signs
    count = len(apart)
    variance = float((apart**2).sum()) * count / (count - 1)
    return Standing(float(np.log(totals) @ signs), math.sqrt(variance))


class Judge:
    """Says when a launch cannot win any more.

    Args:
        to_beat: the best launch so far, by concurrency; empty where there is none, and then nothing is ended.
    """

    def __init__(self, to_beat: Sequence[Best]) -> None:
        self._best = {best.concurrency: best for best in to_beat}
        self._known: dict[int, Standing] = {}
        self._looked: dict[int, int] = {}

    def __call__(self, rows: Sequence[Request]) -> str:
        """Why no more need be measured, after the answers so far at one concurrency; empty while it may win."""
        best = self._best.get(rows[0].concurrency) if rows else None
        if best is None or len(rows) < _MORE * self._looked.get(best.concurrency, 0):
            return ""
        now = standing(rows, best)
        if now is None:
            return ""
        self._looked[best.concurrency] = len(rows)
        self._known[best.concurrency] = now
        left = len(self._best) - len(self._known)
        if math.fsum(each.most for each in self._known.values()) + left * _MOST_GAIN >= 0:
            return ""
        return (
            f"ended early after {len(counted(rows))} answers at concurrency {best.concurrency}: "
            f"{math.exp(now.ratio):.2f} times the speed of the best launch so far ({best.output_throughput:.1f} tok/s) "
            f"on the same prompts, at most {math.exp(now.most):.2f}"
        )
