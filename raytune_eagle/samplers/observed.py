"""What finished launches teach each factor, read from Optuna's trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from raytune_eagle.samplers.candidates import UPPER, Block, Params
from raytune_eagle.samplers.kernels import Array
from raytune_eagle.samplers.process import Data

FIGURES = "figures"
"""User attribute: what a launch measured, a mapping per concurrency with ``accept_len``, ``cycle_ms`` and, where known,
``accept_histogram`` (verify rounds that accepted 0, 1, 2, … drafts), ``first_ms`` (time to first token a round) and
``variance`` (of the log of the cycle, where more is known of it than the launches themselves tell)."""
SECONDS = "seconds"
"""User attribute: node-seconds that a launch took, failed or not."""
REFUSED = "refused"
"""User attribute, true: a proposal that was never launched, so it says nothing of failures."""

_CHAIN_NOISE, _TREE_NOISE = 0.003, 0.005
"""Standard deviations of what a histogram says of fewer steps, beside that of its launch."""
_MOST_SHORTER = 5
_MOST_ALIKE = 4
"""Launches of one tree that are kept apart; the latest of more."""
_MOST_ROWS = 400
"""Observations of accept_len, the latest launches first, then what they say of shorter trees."""


@dataclass(frozen=True)
class Launch:
    """One launch that was asked for.

    Attributes:
        params: its point.
        accept: log accept_len, mean over the concurrencies; None where it was not measured.
        cycle: log cycle time in milliseconds, likewise.
        noise: variance of `cycle` that is known beforehand; what launches differ by beyond it is learned.
        first: share of the cycle that is time to first tokens, spread over the rounds.
        reached: share of verify rounds that accepted at least 1, 2, … drafts; empty where unknown.
        violation: largest constraint value; 0 or less is feasible.
        failed, running: it ended without figures; it has not ended.
        earlier: it is of another study.
    """

    params: Params
    accept: float | None = None
    cycle: float | None = None
    noise: float = 0.0
    reached: tuple[float, ...] = ()
    first: float = 0.0
    seconds: float | None = None
    violation: float | None = None
    failed: bool = False
    running: bool = False
    earlier: bool = False

    @property
    def measured(self) -> bool:
        """Whether both factors are known, and from a launch of this study."""
        return self.accept is not None and self.cycle is not None and not self.earlier


class Observed:
    """What a study's trials are. Finished ones do not change, so each of them is read once."""

    def __init__(self) -> None:
        self._study: str | None = None
        self._known: dict[int, Launch | None] = {}
        self._places: dict[tuple[int, int], tuple[int, int] | None] = {}

    def launches(self, study: Study) -> list[Launch]:
        """Every trial that was or is a launch, in their order."""
        return [launch for trial in self._trials(study) if (launch := self._launch(trial))]

    def seen(self, study: Study, block: Block) -> set[tuple[int, int]]:
        """Every point of the block that a trial has had, launched or not."""
        return {place for trial in self._trials(study) if (place := self._place(trial, block))}

    def _trials(self, study: Study) -> list[FrozenTrial]:
        if study.study_name != self._study:
            self._study, self._known, self._places = study.study_name, {}, {}
        return [trial for trial in study.get_trials(deepcopy=False) if trial.params]

    def _launch(self, trial: FrozenTrial) -> Launch | None:
        if not trial.state.is_finished():
            return _launch(trial)
        if trial.number not in self._known:
            self._known[trial.number] = _launch(trial)
        return self._known[trial.number]

    def _place(self, trial: FrozenTrial, block: Block) -> tuple[int, int] | None:
        key = id(block), trial.number
        if not trial.state.is_finished():
            return block.find(whole(trial.params))
        if key not in self._places:
            self._places[key] = block.find(whole(trial.params))
        return self._places[key]


def _launch(trial: FrozenTrial) -> Launch | None:
    if trial.user_attrs.get(REFUSED):
        return None
    params = whole(trial.params)
    running = trial.state in {TrialState.RUNNING, TrialState.WAITING}
    figures = [one for one in trial.user_attrs.get(FIGURES) or () if one.get("cycle_ms")]
    if running or not figures:
        failed = not running and trial.state != TrialState.COMPLETE
        return Launch(params, running=running, failed=failed, seconds=trial.user_attrs.get(SECONDS))
    launch = measured(params, figures)
    return replace(
        launch, seconds=trial.user_attrs.get(SECONDS), violation=max(trial.constraints.values(), default=None)
    )


def measured(params: Params, figures: Sequence[Mapping[str, Any]]) -> Launch:
    """Build a launch from its figures, a mapping per concurrency as in `FIGURES`."""
    return Launch(
        params,
        accept=_mean_log(one.get("accept_len") or 1.0 for one in figures),
        cycle=_mean_log(one["cycle_ms"] for one in figures),
        noise=math.fsum(one.get("variance") or 0.0 for one in figures) / len(figures),
        first=math.fsum((one.get("first_ms") or 0.0) / one["cycle_ms"] for one in figures) / len(figures),
        reached=_reached([one.get("accept_histogram") or () for one in figures]),
    )


def whole(params: Mapping[str, Any]) -> Params:
    """With the number of draft tokens that a chain is not asked for."""
    chain = params.get("eagle_topk") == 1 and "num_steps" in params
    return {**params, "num_draft_tokens": params["num_steps"] + 1} if chain else dict(params)


def _mean_log(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.fsum(logs) / len(logs)


def _reached(histograms: Sequence[Sequence[int]]) -> tuple[float, ...]:
    longest = max(map(len, histograms), default=0)
    if not longest:
        return ()
    counts = np.sum([[*histogram, *[0] * (longest - len(histogram))] for histogram in histograms], axis=0)
    deeper = counts[::-1].cumsum()[::-1]
    return tuple((deeper[1:] / deeper[0]).tolist())


def accept_data(done: Sequence[Launch], columns: Sequence[str]) -> Data:
    """Log accept_len of the launched trees and, from their histograms, of shorter ones."""
    alike: dict[tuple[Any, ...], int] = {}
    rows: list[tuple[Params, float, float, int]] = []
    shorter: list[tuple[Params, float, float, int]] = []
    for number, launch in reversed(list(enumerate(done))):
        tree = tuple(launch.params.get(name) for name in columns)
        alike[tree] = alike.get(tree, 0) + 1
        if launch.accept is not None and alike[tree] <= _MOST_ALIKE:
            rows.append((launch.params, launch.accept, 0.0, number))
            shorter += [(*row, number) for row in _shorter(launch)] if alike[tree] == 1 else []
    rows = rows[:_MOST_ROWS]
    return _data([*rows, *shorter[: _MOST_ROWS - len(rows)]])


def _shorter(launch: Launch) -> list[tuple[Params, float, float]]:
    """What the first steps accepted: of a chain what a shorter chain would have, of a tree that of its upper part."""
    steps, topk = launch.params.get("num_steps") or 1, launch.params.get("eagle_topk") or 1
    if len(launch.reached) < steps or steps == 1:
        return []
    rows = []
    for fewer in sorted({round(at) for at in np.linspace(1, steps - 1, min(_MOST_SHORTER, steps - 1))}):
        chain = {"num_steps": fewer, "num_draft_tokens": fewer + 1}
        part = chain if topk == 1 else {UPPER: fewer}
        noise = (_CHAIN_NOISE if topk == 1 else _TREE_NOISE) ** 2
        rows.append((launch.params | part, math.log1p(math.fsum(launch.reached[:fewer])), noise))
    return rows


def cycle_data(done: Sequence[Launch]) -> Data:
    """Cycle times."""
    return _data([(one.params, one.cycle, one.noise, n) for n, one in enumerate(done) if one.cycle is not None])


def failure_data(ended: Sequence[Launch]) -> Data:
    """1 for a launch that failed, 0 for one that did not."""
    return _data([(one.params, float(one.failed), 0.0, n) for n, one in enumerate(ended)])


def cost_data(ended: Sequence[Launch]) -> Data:
    """Logarithms of node-seconds."""
    return _data([(one.params, math.log(one.seconds), 0.0, n) for n, one in enumerate(ended) if one.seconds])


def violation_data(done: Sequence[Launch]) -> Data:
    """Largest constraint values."""
    return _data([(one.params, one.violation, 0.0, n) for n, one in enumerate(done) if one.violation is not None])


def with_pending(data: Data, params: Sequence[Mapping[str, Any]], values: Sequence[float] | Array) -> Data:
    """`data`, and launches under way as if they had come out as expected."""
    first = int(data.launches.max(initial=-1)) + 1
    return Data(
        [*data.points, *map(dict, params)],
        np.append(data.values, values),
        np.append(data.noise, np.zeros(len(params))),
        np.append(data.launches, np.arange(first, first + len(params))),
    )


def _data(rows: Sequence[tuple[Params, float, float, int]]) -> Data:
    return Data(
        [params for params, *_ in rows],
        np.array([value for _, value, _, _ in rows], dtype=float),
        np.array([noise for _, _, noise, _ in rows], dtype=float),
        np.array([number for *_, number in rows], dtype=np.intp),
    )
