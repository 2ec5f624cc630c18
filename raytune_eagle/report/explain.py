"""What a study has learned: what a cycle is made of, what drafts accept, what each setting is worth, what to try next.

All of it from the two factors (`raytune_eagle.samplers.belief`), whatever sampler the study had. Intervals are of 95 %,
and hold what two launches of one configuration differ by, which no pass within a launch shows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from raytune_eagle.errors import SpecError
from raytune_eagle.lessons import figures_of
from raytune_eagle.model.measurement import Measurement
from raytune_eagle.model.trial import Completed, TrialRecord
from raytune_eagle.reference import Reference
from raytune_eagle.samplers.belief import Belief
from raytune_eagle.samplers.candidates import Params
from raytune_eagle.samplers.observed import Launch, measured, whole
from raytune_eagle.samplers.two_factor import Choice
from raytune_eagle.search import Search
from raytune_eagle.space import Space
from raytune_eagle.spec import Spec
from raytune_eagle.statistics import LaunchNoise, launch_noise, log_variance, t_975

_NEXT = 5
_NORMAL = 1.96
_SURE = 0.995
_LEAST = 5
"""Launches with figures below which nothing is said."""


class Share(NamedTuple):
    """One part of a cycle in milliseconds, with its interval."""

    name: str
    ms: float
    low: float
    high: float


class Explanation:
    """What the launches of a study say.

    Args:
        spec: of the study, as it ran.
        records: all of it.

    Raises:
        SpecError: fewer than five launches have figures.

    Attributes:
        launches: of the search, those with figures.
        again: those of points of the space that confirmed; their prompts were others, so only their cycles count.
        noise: what launches of one configuration differ by.
        best: the point of the space that is believed to be the fastest of those that were launched.
    """

    def __init__(self, spec: Spec, records: Sequence[TrialRecord]) -> None:
        search = spec.search.model_copy(update={"sampler": "two-factor", "stop_below": None})
        self._space = Space(spec.model_copy(update={"search": search}))
        self.noise, reference = relaunch_noise(records), Reference(records)
        self._search = Search(self._space, records, reference, self.noise.variance)
        self.again = list(_again(self._space, records, reference, self.noise.variance))
        self._search.learn_from(self.again)
        self._belief = self._search.belief()
        self.launches: list[Launch] = self._belief.done
        if len(self.launches) < _LEAST:
            raise SpecError(f"study {spec.name!r}: {len(self.launches)} launches have figures, fewer than {_LEAST}")
        self.best: Params = self._belief.best or self.launches[0].params

    def cycle(self) -> list[Share]:
        """A cycle's parts under the best launch's NCCL and server settings, by least squares over all launches.

        Time to first tokens is taken off before and told for itself (the middle launch and the spread of them). The
        fixed part is the verify step of one token and the host together: launches alone cannot tell these apart.
        """
        shapes = np.array([_shape(launch.params) for launch in self.launches], dtype=float)
        design = np.column_stack([np.ones(len(shapes)), shapes[:, 2], shapes[:, 0]])
        names = ["verify and host, fixed", "verify, per draft token", "draft, per step"]
        kept = [place for place in range(3) if place == 0 or np.ptp(design[:, place]) > 0]
        design, names = design[:, kept], [names[place] for place in kept]
        freedom = len(design) - len(kept)
        if freedom < 1 or np.linalg.matrix_rank(design) < len(kept):
            return []
        cycles = self._under_best_settings()
        firsts = np.array([launch.first for launch in self.launches]) * cycles
        cycles = cycles - firsts
        found = np.linalg.lstsq(design, cycles, rcond=None)[0]
        variance = ((cycles - design @ found) ** 2).sum() / freedom
        half = t_975(freedom) * np.sqrt(np.diag(np.linalg.inv(design.T @ design)) * variance)
        parts = [Share(*row) for row in zip(names, found, found - half, found + half, strict=True)]
        middle, low, high = np.quantile(firsts, (0.5, 0.025, 0.975))
        return [*parts, Share("first tokens, per round", middle, low, high)] if middle else parts

    def _under_best_settings(self) -> np.ndarray:
        """Measured cycles, each with what its settings are believed to cost over the best launch's taken off."""
        points = [launch.params for launch in self.launches]
        moved = [{**params, **{c: self.best.get(c) for c in self._others}} for params in points]
        (own, _), (there, _) = (self._cycle(points), self._cycle(moved))
        return np.asarray(np.exp(np.array([launch.cycle or 0.0 for launch in self.launches]) + there - own))

    @property
    def _others(self) -> list[str]:
        return [d.column for d in self._space.dimensions if d.group != "speculative"]

    def _cycle(self, points: Sequence[Params]) -> tuple[np.ndarray, np.ndarray]:
        first, rest = self._belief.halves(points, points)
        if self._belief.cycle is None:
            raise SpecError("no launch has figures")
        return self._belief.cycle.at(first[1], rest[1])

    def accept_lens(self) -> Iterator[tuple[int, float, float, float, float | None]]:
        """For chains of 1, 2, … steps: expected accept_len with its interval, and what was measured (mean)."""
        steps = next((d.values for d in self._space.dimensions if d.column == "num_steps"), ())
        topk = next((d.values for d in self._space.dimensions if d.column == "eagle_topk"), ())
        if not steps or 1 not in topk or self._belief.accept is None:
            return
        draft = {name: self.best[name] for name in ("draft",) if name in self.best}
        for count in steps:
            point = {**self.best, **draft, "num_steps": count, "eagle_topk": 1, "num_draft_tokens": count + 1}
            first, rest = self._belief.halves([point], [point])
            mean, variance = self._belief.accept.at(first[0], rest[0])
            half = _NORMAL * math.sqrt(float(variance[0]))
            value = float(mean[0])
            yield count, math.exp(value), math.exp(value - half), math.exp(value + half), self._measured(count)

    def _measured(self, steps: int) -> float | None:
        found = [one.accept for one in self.launches if _shape(one.params)[:2] == (steps, 1) and one.accept is not None]
        return math.exp(math.fsum(found) / len(found)) if found else None

    def worth(self) -> Iterator[tuple[str, Any, float, float, float]]:
        """For each value of each setting beside the tree: speed over the best launch's, all else as there."""
        for dimension in self._space.dimensions:
            if dimension.column not in self._others and dimension.column != "draft":
                continue
            for value in dimension.values:
                if value != self.best.get(dimension.column):
                    ratio = self._ratio({**self.best, dimension.column: value})
                    yield dimension.column, value, *ratio

    def _ratio(self, point: Params) -> tuple[float, float, float]:
        mean, variance = self._belief.difference(point, self.best)
        half = t_975(self.noise.freedom) * math.sqrt(variance)
        return math.exp(mean), math.exp(mean - half), math.exp(mean + half)

    def next_points(self) -> list[Choice]:
        """The most promising points that were never launched."""
        return self._search.choices(_NEXT)

    @property
    def belief(self) -> Belief:
        """What the launches say of every point."""
        return self._belief


def relaunch_noise(records: Sequence[TrialRecord]) -> LaunchNoise:
    """What the cycles of launches of one configuration on one node differ by, whatever they were launched for."""
    groups: dict[tuple[str, str], list[Sequence[Measurement]]] = defaultdict(list)
    for record in records:
        if isinstance(record.outcome, Completed) and record.outcome.measurements and not record.outcome.hopeless:
            groups[record.node, record.key].append(record.outcome.measurements)
    return launch_noise(_logs(several) for several in groups.values() if len(several) > 1)


def _logs(launches: Sequence[Sequence[Measurement]]) -> tuple[np.ndarray, np.ndarray]:
    """Logs of the cycle (mean over concurrencies) and their variances by the passes, of one configuration."""
    logs = [math.fsum(math.log(m.cycle_ms) for m in one) / len(one) for one in launches]
    variances = [math.fsum(map(log_variance, one)) / len(one) ** 2 for one in launches]
    return np.array([logs]), np.array([variances])


def _again(
    space: Space, records: Sequence[TrialRecord], reference: Reference, launch_variance: float
) -> Iterator[Launch]:
    """Cycles of points that were launched again to confirm."""
    for record in records:
        told = space.told(record.config) if record.kind == "confirm" and record.config.speculative else None
        figures = figures_of(record, reference, launch_variance)
        if told and figures:
            yield replace(measured(whole(told[0]), figures), accept=None, reached=())


def _shape(params: Params) -> tuple[int, int, int]:
    steps, topk = params.get("num_steps") or 1, params.get("eagle_topk") or 1
    return steps, topk, steps + 1 if topk == 1 else params.get("num_draft_tokens") or steps + 1


def lines(explanation: Explanation) -> Iterator[str]:
    """The explanation as plain text."""
    again = f" and {len(explanation.again)} that confirmed" if explanation.again else ""
    yield f"From {len(explanation.launches)} launches with figures{again}; the best: {spelled(explanation.best)}"
    yield (
        f"Launches of one configuration differ by {math.sqrt(explanation.noise.variance):.1%} (standard deviation); "
        "the intervals hold that."
    )
    yield from ("", "A cycle under the best launch's settings (least squares, 95 %):")
    shares = explanation.cycle()
    yield from (f"  {part.name:24} {part.ms:8.3f} ms  ({part.low:.3f} to {part.high:.3f})" for part in shares)
    if not shares:
        yield "  the launches are too alike to tell its parts apart"
    yield from ("", "accept_len of chains by steps: expected (95 %), measured:")
    for steps, value, low, high, seen in explanation.accept_lens():
        yield f"  {steps:3d}  {value:5.2f} ({low:.2f} to {high:.2f})  {f'{seen:.2f}' if seen else '-'}"
    yield from ("", "Speed with one setting changed, over the best launch's (95 %):")
    settings = list(explanation.worth())
    yield from () if settings else ("  no setting beside the tree was searched",)
    for column, value, ratio, low, high in settings:
        yield f"  {column + '=' + ('unset' if value is None else str(value)):44} {ratio:.3f}x ({low:.3f} to {high:.3f})"
    yield from (
        "",
        "Most promising points that were never launched, in the order in which the search would launch them",
    )
    yield "(gain, what a launch teaches of the others, its chance to run and keep the limits, and its time):"
    for place, choice in enumerate(explanation.next_points(), 1):
        fails = f", fails with one of {1 - choice.runs:.0%}" if choice.runs < _SURE else ""
        yield (
            f"  {place}. expected gain {choice.gain:5.1%}, faster than the best with a chance of {choice.better:.0%}"
            f"{fails}: {spelled(choice.params)}"
        )


def spelled(params: Params) -> str:
    """Parameters on one line; what is unset is left out."""
    return ", ".join(f"{name}={value}" for name, value in params.items() if value is not None)
