"""An Optuna sampler that knows what time per token is made of: cycle time / accept_len.

accept_len depends on the draft and the shape of its tree, not on NCCL or the machine; the cycle does not depend on how
well the draft guesses. Two Gaussian processes learn the two apart (`raytune_eagle.samplers.belief`), so that one launch
teaches about every launch that shares its tree or its variables. The next launch is the one with the largest expected
improvement per node-second, weighed with its chances to run and to keep the constraints.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from scipy.special import ndtr

from raytune_eagle.samplers import observed
from raytune_eagle.samplers.belief import Belief, Encoders, Pair, take
from raytune_eagle.samplers.candidates import (
    Block,
    Candidates,
    CannotPlaceError,
    Params,
    among,
    from_distributions,
)
from raytune_eagle.samplers.kernels import Array
from raytune_eagle.samplers.observed import Launch, Observed
from raytune_eagle.samplers.probed import Probed

_logger = optuna.logging.get_logger(__name__)
_SHORTLIST = 600
"""Points whose uncertainty is computed exactly in one ask."""
_MOST_REST, _MOST_POINTS = 4000, 2_000_000
"""Second halves, and points of a block, looked at in one ask; of more second halves a new random part each time."""
_JUDGED = 8
"""Measured launches before a gain is told that a study may be ended by."""
_OFTEN = 30
"""Measured launches up to which variances are learned again after each; later after each tenth more."""


class Choice(NamedTuple):
    """A point that could be launched next.

    Attributes:
        gain: expected relative improvement over the best launch, its chances to run and to be feasible weighed in;
            while exploring only a rank.
        score: gain per average launch's node-seconds; the largest is launched.
        mean, sd: of the logarithm of 1 / time per token, in tokens per millisecond.
        runs: chance that it does not fail.
        better: chance that it is faster than the best so far.
    """

    params: Params
    gain: float
    score: float
    mean: float
    sd: float
    runs: float
    better: float


class TwoFactorSampler(BaseSampler):
    """See the module. Trials carry the user attributes that `raytune_eagle.samplers.observed` names.

    Failed launches are told as PRUNED or FAIL. A study that it cannot place, or whose trials bring no such attributes,
    is sampled by TPE, with one warning that says why.

    Args:
        candidates: every point that may be launched; None takes them from the distributions of earlier trials (the
            first trial is then random), which works for SGLang's three numbers, ``draft`` and ``NCCL_…``.
        seed: of all that is random.
        earlier: launches of other studies that know one of the factors or both.
        probed: all-reduce times under NCCL's settings, measured apart; those that failed are not chosen.
    """

    def __init__(
        self,
        candidates: Candidates | None = None,
        seed: int | None = None,
        earlier: Sequence[Launch] = (),
        probed: Probed | None = None,
    ) -> None:
        self._given, self._rng, self._earlier = candidates, np.random.default_rng(seed), list(earlier)
        self._probed, self._observed = probed, Observed()
        self._random = RandomSampler(seed=seed)
        self._tpe = TPESampler(seed=seed, multivariate=True, constant_liar=True)
        self._found: dict[str, BaseDistribution] = {}
        self._derived: Candidates | None = None
        self._encoders: Encoders | None = None
        self._chosen: dict[int, Params] = {}
        self._variances: dict[str, Array] = {}
        self._halves: dict[int, tuple[Pair, Pair]] = {}
        self._fitted = 0
        self._fallen_back = False

    # ---------------------------------------------------------------------------------------------- Optuna's interface
    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Choose the whole point here, once for each trial; only the fallback has a relative space."""
        try:
            best = self.choices(study, 1)
        except CannotPlaceError as exc:
            if not self._fallen_back:
                _logger.warning("two-factor: %s; TPE chooses instead", exc)
                self._fallen_back = True
            return self._tpe.infer_relative_search_space(study, trial)
        if best:
            self._chosen[trial.number] = best[0].params
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Only the fallback's."""
        return self._tpe.sample_relative(study, trial, search_space) if search_space else {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The chosen point's value; without one (the first trial, say) a random one, or the fallback's."""
        point = self._chosen.get(trial.number, {})
        if param_name in point and _contains(param_distribution, point[param_name]):
            return point[param_name]
        chosen = self._tpe if self._fallen_back else self._random
        return chosen.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Hand on to the fallback."""
        self._tpe.before_trial(study, trial)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Forget its point; hand on to the fallback."""
        self._chosen.pop(trial.number, None)
        self._tpe.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        """See Optuna."""
        self._rng = np.random.default_rng()
        self._random.reseed_rng()
        self._tpe.reseed_rng()

    # --------------------------------------------------------------------------------------------------- what it knows
    def choices(self, study: optuna.Study, count: int) -> list[Choice]:
        """The `count` best points to launch next, best first; fewer when fewer are left, none while no space is known.

        Raises:
            CannotPlaceError: the space or its trials have nothing for two factors.
        """
        candidates = self._space(study)
        if candidates is None:
            return []
        belief = self.belief(study)
        ranked = [self._rank(block, belief, self._observed.seen(study, block), count) for block in candidates.blocks]
        found = itertools.chain.from_iterable(ranked)
        return sorted(found, key=lambda choice: -choice.score)[:count]

    def learn_from(self, launches: Iterable[Launch]) -> None:
        """Take launches of other studies, which know one factor or both; those of values not searched are left out."""
        self._earlier += [replace(launch, earlier=True) for launch in launches]

    def take_probed(self, probed: Probed) -> None:
        """Take all-reduce times under NCCL's settings; those that failed are not chosen."""
        self._probed, self._encoders, self._halves, self._fitted = probed, None, {}, 0

    def best_choice(self, study: optuna.Study) -> Choice | None:
        """The best point to launch next; None while there is too little to judge by, or nothing is left."""
        try:
            belief = self.belief(study)
            if belief.exploring or len(belief.done) < min(_JUDGED, len(self._space(study) or ())):
                return None
            return next(iter(self.choices(study, 1)), None)
        except CannotPlaceError:
            return None

    def predict(self, study: optuna.Study, points: Sequence[Params]) -> tuple[Array, Array]:
        """Mean and standard deviation of the logarithm of tokens per millisecond (1 / time per token) of points.

        Raises:
            CannotPlaceError: as `choices`.
        """
        belief = self.belief(study)
        return belief.calibrated(*belief.halves(points, points))

    def belief(self, study: optuna.Study) -> Belief:
        """All that the study's trials say.

        Raises:
            CannotPlaceError: as `choices`.
        """
        candidates = self._space(study)
        if candidates is None:
            raise CannotPlaceError("no trial has said yet what is searched")
        launches = self._observed.launches(study)
        done = sum(launch.measured for launch in launches)
        if not done and any(not launch.running and not launch.failed for launch in launches):
            raise CannotPlaceError(f"trials have no user attribute {observed.FIGURES!r} with accept_len and cycle_ms")
        self._encoders = self._encoders or Encoders.of(candidates, self._probed)
        learn = done > self._fitted if done < _OFTEN else done >= 1.1 * self._fitted
        belief = Belief(self._encoders, candidates, [*self._earlier, *launches], {} if learn else self._variances)
        if learn:
            self._fitted, self._variances = done, belief.variances
        return belief

    # --------------------------------------------------------------------------------------------------- how it does it
    def _space(self, study: optuna.Study) -> Candidates | None:
        """Given, or what trials have had so far; a chain leaves num_draft_tokens out, so not every trial has all."""
        if self._given is not None:
            return self._given
        found: dict[str, BaseDistribution] = {}
        for trial in study.get_trials(deepcopy=False):
            found |= trial.distributions
        if found and found != self._found:
            self._found, self._derived = found, from_distributions(found)
            self._encoders, self._halves, self._fitted, self._observed = None, {}, 0, Observed()
        return self._derived

    def _rank(self, block: Block, belief: Belief, seen: set[tuple[int, int]], count: int) -> list[Choice]:
        """Best of a block: a shortlist by the cheap estimate of all, then exactly."""
        chosen = self._some_rest(block, belief)
        rest = [block.rest[place] for place in chosen]
        first, other = self._coordinates(block, rest, belief)
        runs = belief.runs(first, other)
        chances = runs / belief.cost(first, other)
        scores = belief.score(*belief.grid(first, other)) * chances
        if self._probed:
            scores[:, [self._probed.failed(point) for point in rest]] = -np.inf
        rows, places = _shortlist(scores, chosen, seen)
        if not len(rows):
            return []
        picked = take(first, rows), take(other, places)
        mean, variance, worth = belief.judged(*picked)
        keeps = belief.keeps(*picked)
        gains, ranks = belief.score(mean, variance) * keeps, worth * keeps * chances[rows, places]
        found = []
        for i in np.argsort(-ranks, kind="stable")[:count]:
            chance, point = float(runs[rows[i], places[i]]), {**block.first[rows[i]], **rest[places[i]]}
            gain, sd = float(gains[i]) * chance, float(np.sqrt(variance[i]))
            better = float(ndtr((mean[i] - belief.incumbent) / sd))
            found.append(Choice(point, gain, float(ranks[i]), float(mean[i]), sd, chance, better))
        return found

    def _coordinates(self, block: Block, rest: Sequence[Params], belief: Belief) -> tuple[Pair, Pair]:
        """Of the block; kept where all of it is looked at each time."""
        if len(rest) < len(block.rest):
            return belief.halves(block.first, rest)
        if id(block) not in self._halves:
            self._halves[id(block)] = belief.halves(block.first, rest)
        return self._halves[id(block)]

    def _some_rest(self, block: Block, belief: Belief) -> NDArray[np.intp]:
        most = max(100, min(_MOST_REST, _MOST_POINTS // len(block.first)))
        if len(block.rest) <= most:
            return np.arange(len(block.rest))
        some = self._rng.choice(len(block.rest), most, replace=False)
        known = [place[1] for launch in belief.done if (place := block.find(launch.params))]
        return np.unique(np.append(some, np.array(known, dtype=np.intp)))


def _shortlist(
    scores: Array, chosen: NDArray[np.intp], seen: set[tuple[int, int]]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows and columns of the best scores that nobody has seen."""
    back = {int(place): column for column, place in enumerate(chosen)}
    for row, place in seen:
        if place in back:
            scores[row, back[place]] = -np.inf
    flat = scores.ravel()
    keep = np.argpartition(-flat, min(_SHORTLIST, len(flat) - 1))[:_SHORTLIST]
    rows, places = np.divmod(np.sort(keep[np.isfinite(flat[keep])]), scores.shape[1])
    return rows, places


def _contains(distribution: BaseDistribution, value: Any) -> bool:
    if isinstance(distribution, CategoricalDistribution):
        return among(value, distribution.choices)
    return isinstance(distribution, IntDistribution) and isinstance(value, int) and distribution._contains(value)  # noqa: SLF001 - as Optuna's samplers ask
