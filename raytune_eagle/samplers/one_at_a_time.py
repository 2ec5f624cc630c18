"""The practitioner's method as an Optuna sampler: change one thing, keep it if it is better, go on to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from raytune_eagle.samplers.candidates import among

Params = dict[str, Any]


class OneAtATimeSampler(BaseSampler):
    """Changes one parameter of the best launch so far at a time, all its values in turn, while any is left to change.

    Then, and for what has no values to go through (a continuous parameter), it is random.

    Args:
        start: values to begin with; parameters left out begin with the first of their values.
        seed: of the random rest.
    """

    def __init__(self, start: Mapping[str, Any] | None = None, seed: int | None = None) -> None:
        self._start, self._at = dict(start or {}), 0
        self._chosen: dict[int, Params | None] = {}
        self._random = RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Choose the whole point here, once for each trial."""
        trials = [one for one in study.get_trials(deepcopy=False) if one.params and one.number != trial.number]
        space: dict[str, BaseDistribution] = {}
        for one in trials:
            space |= one.distributions
        best = _best(trials, study.direction)
        if best is None:
            self._chosen[trial.number] = self._start
        else:
            self._chosen[trial.number] = self._next({**_firsts(space), **self._start, **best}, space, trials)
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Nothing: see `infer_relative_search_space`."""
        del study, trial, search_space
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The chosen point's value, else the first (before the first launch) or a random one."""
        point, values = self._chosen.get(trial.number), _values(param_distribution)
        if point is not None and param_name in point and among(point[param_name], values):
            return point[param_name]
        if point is not None and values and trial.number == 0:
            return values[0]
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Forget its point."""
        del study, state, values
        self._chosen.pop(trial.number, None)

    def reseed_rng(self) -> None:
        """See Optuna."""
        self._random.reseed_rng()

    def _next(self, best: Params, space: dict[str, BaseDistribution], trials: Sequence[FrozenTrial]) -> Params | None:
        seen = {_key(trial.params) for trial in trials}
        names = sorted(space)
        for _ in names:
            name = names[self._at % len(names)]
            for point in _neighbours(best, name, space[name]):
                if _key({one: point[one] for one in _asked(point)}) not in seen:
                    return point
            self._at += 1
        return None


def _neighbours(point: Params, name: str, distribution: BaseDistribution) -> Iterator[Params]:
    yield from ({**point, name: value} for value in _values(distribution) if value != point.get(name))


def _asked(point: Params) -> list[str]:
    """A chain is not asked for num_draft_tokens."""
    return [name for name in point if not (name == "num_draft_tokens" and point.get("eagle_topk") == 1)]


def _best(trials: Sequence[FrozenTrial], direction: StudyDirection) -> Params | None:
    done = [one for one in trials if one.state == TrialState.COMPLETE and one.value is not None and _feasible(one)]
    sign = -1 if direction == StudyDirection.MINIMIZE else 1
    return dict(max(done, key=lambda one: sign * (one.value or 0.0)).params) if done else None


def _feasible(trial: FrozenTrial) -> bool:
    return all(value <= 0 for value in trial.constraints.values())


def _firsts(space: Mapping[str, BaseDistribution]) -> Params:
    return {name: values[0] for name, one in space.items() if (values := _values(one))}


def _values(distribution: BaseDistribution) -> tuple[Any, ...]:
    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)
    if isinstance(distribution, IntDistribution):
        return tuple(range(distribution.low, distribution.high + 1, distribution.step))
    return ()


def _key(params: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((name, type(params[name]).__name__, params[name]) for name in sorted(params))
