"""What to launch next: ``start_from`` first, then an Optuna sampler, and never the same point twice.

The Optuna study lives in memory and is rebuilt from the records, so there is no second truth to disagree with.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import TrialState, create_trial

from raytune_eagle.errors import SpecError
from raytune_eagle.lessons import Lessons
from raytune_eagle.model.config import Config
from raytune_eagle.model.trial import TrialRecord
from raytune_eagle.outcomes import objective_value, violation
from raytune_eagle.prior import Prior
from raytune_eagle.reference import Reference
from raytune_eagle.samplers import observed
from raytune_eagle.samplers.belief import Belief
from raytune_eagle.samplers.candidates import Candidates
from raytune_eagle.samplers.observed import Launch
from raytune_eagle.samplers.one_at_a_time import OneAtATimeSampler
from raytune_eagle.samplers.two_factor import Choice, TwoFactorSampler
from raytune_eagle.space import Params, Space

_MOST_ASKS = 200
"""Asks for one proposal, before the unseen points are enumerated: each stays in the study and slows the next."""
_VIOLATION = "violation"


@dataclass(frozen=True)
class Proposal:
    """One point to launch.

    Attributes:
        config: the launch, word for word.
        key: uid of its canonical form.
        params: the searched parameters as launched.
        trial: Optuna's, where Optuna chose the point.
    """

    config: Config
    key: str
    params: Params
    trial: optuna.Trial | None = None


class Search:
    """Asks and tells. Not thread-safe: one driver owns it.

    Args:
        space: where to look.
        records: all that the study has launched so far.
        reference: what plain decoding gives by node and time, so that no node or hour makes a point look good.
        launch_variance: what the logs of launches of one point are known to differ by, for the two-factor sampler.

    Attributes:
        size: points of the space that were or may be asked for.
    """

    def __init__(
        self, space: Space, records: Iterable[TrialRecord], reference: Reference, launch_variance: float = 0.0
    ) -> None:
        self._space, self._objective, self._reference = space, space.spec.objective, reference
        self._settings = space.spec.search
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(direction="maximize", sampler=_sampler(space))
        self._seen: set[str] = set()
        self._prior, self.size = Prior(), space.size
        self._before: dict[str, Config] = {}
        # what learns nothing has its order at once: every valid point, as written or shuffled
        orders = {"grid": None, "random": self._settings.seed}
        self._order = space.points(orders[self._settings.sampler]) if self._settings.sampler in orders else None
        trials = [record for record in records if record.kind == "trial"]
        self._lessons = Lessons(len(space.spec.workload.concurrency), trials, reference, launch_variance)
        for record in trials:
            self._seen |= {record.key, space.key(record.config)}  # two where more is known of the nodes by now
            self._before[space.key(record.config)] = record.config
            self._replay(record)
        starts = [Proposal(s.config, space.key(s.config), s.params) for s in space.starts]
        self._starts = deque({p.key: p for p in starts if p.key not in self._seen}.values())

    def ask(self) -> Proposal | None:
        """The next point, marked as seen; None when every valid point has been launched, or no launch is worth it."""
        if not self._starts and self.stopped():
            return None
        proposal = self._starts.popleft() if self._starts else self._choose()
        if proposal is not None:
            self._seen.add(proposal.key)
        return proposal

    def stopped(self) -> str:
        """Why no further launch is worth it (``search.stop_below``) and what is given up; empty while one is."""
        below, sampler = self._settings.stop_below, self._study.sampler
        if below is None or self._starts or not isinstance(sampler, TwoFactorSampler):
            return ""
        choice = sampler.best_choice(self._study)
        if choice is None or choice.gain >= below:
            return ""
        point = ", ".join(f"{name}={value}" for name, value in choice.params.items() if value is not None)
        return (
            f"the best next launch is expected to gain {choice.gain:.2%}, less than search.stop_below ({below:.2%}); "
            f"given up: {point}, which is faster than the best with a chance of {choice.better:.0%}"
        )

    def reachable(self) -> int:
        """Distinct points that can be launched: the space, and starts outside it."""
        space = self._space
        starts = [(s.config, space.key(s.config)) for s in space.starts]
        outside = {key for config, key in starts if space.told(config) is None or space.judge(config).canonical is None}
        return self.size + len(outside)

    def learn_from(self, launches: Iterable[Launch]) -> None:
        """Take what earlier studies know; only with the two-factor sampler."""
        self._two_factor.learn_from(launches)

    def take_prior(self, prior: Prior) -> None:
        """Ask for nothing that failed in the study's probe; the two-factor sampler begins with its times.

        Entries of ``start_from`` are launched all the same.
        """
        given = {self._space.key(start.config): start.config for start in self._space.starts}
        launched = {key for key, config in {**given, **self._before}.items() if prior.refuses(config)}
        self._prior, self.size = prior, self._space.size - self._space.count(prior.refuses) + len(launched)
        if prior.probed and isinstance(self._study.sampler, TwoFactorSampler):
            self._study.sampler.take_probed(prior.probed)

    def belief(self) -> Belief:
        """What all launches say of every point; only with the two-factor sampler."""
        return self._two_factor.belief(self._study)

    def choices(self, count: int) -> list[Choice]:
        """The most promising points that were never launched; only with the two-factor sampler."""
        return self._two_factor.choices(self._study, count)

    @property
    def _two_factor(self) -> TwoFactorSampler:
        if not isinstance(self._study.sampler, TwoFactorSampler):
            raise TypeError(f"the sampler is {self._settings.sampler}")
        return self._study.sampler

    def tell(self, proposal: Proposal, record: TrialRecord) -> None:
        """Let the sampler learn from a finished launch."""
        self._lessons.learn(record)
        if proposal.trial is None:
            self._replay(record)
            return
        state, value = self._verdict(record)
        for name, excess in self._constraints(record).items():
            proposal.trial.set_constraint(name, excess)
        for name, found in self._learned(record).items():
            proposal.trial.set_user_attr(name, found)
        self._study.tell(proposal.trial, value, state=state)

    def _choose(self) -> Proposal | None:
        if self._order is not None:
            return self._first_unseen(self._order)
        for _ in range(_MOST_ASKS if len(self._seen) < self.size else 0):
            trial = self._study.ask()
            settled = self._space.settle(self._space.suggest(trial))
            if settled is not None and (key := self._fresh(settled[0])):
                return Proposal(settled[0], key, settled[1], trial)
            # No launch is spent on it. TPE learns from PRUNED that there is nothing to gain here, and asks 65 times
            # for 40 launches of a small space; with FAIL, which it ignores, it asked 2,355 times.
            trial.set_user_attr(observed.REFUSED, value=True)
            self._study.tell(trial, state=TrialState.PRUNED)
        return self._first_unseen(self._space.points(self._settings.seed))

    def _first_unseen(self, points: Iterator[Params]) -> Proposal | None:
        for params in points:
            config = self._space.config(params)
            if key := self._fresh(config):
                return Proposal(config, key, params)
        return None

    def _fresh(self, config: Config) -> str | None:
        """Key of a point that was never launched and that the probe has not seen fail."""
        key = self._space.key(config)
        return None if key in self._seen or self._prior.refuses(config) else key

    def _replay(self, record: TrialRecord) -> None:
        if self._order is not None:  # nothing is learnt
            return
        told = self._space.told(record.config)
        if told is None:  # a start outside the space: kept and ranked, but no sampler could have asked for it
            return
        state, value = self._verdict(record)
        self._study.add_trial(
            create_trial(
                params=told[0],
                distributions=told[1],
                state=state,
                value=value,
                constraints=self._constraints(record),
                user_attrs=self._learned(record),
            )
        )

    def _constraints(self, record: TrialRecord) -> dict[str, float]:
        """In Optuna's form: 0 or less is feasible."""
        return {_VIOLATION: violation(self._objective, record)} if self._objective.constraints else {}

    def _learned(self, record: TrialRecord) -> dict[str, Any]:
        """What a launch teaches beside its objective, as `raytune_eagle.samplers.observed` reads it."""
        figures, short = self._lessons.of(record), self._lessons.cut_short(record)
        if record.status == "lost" or (short and not figures):  # a machine's doing; not comparable
            return {observed.REFUSED: True}
        seconds = {} if short else {observed.SECONDS: record.ended_at - record.started_at}
        return {**seconds, observed.FIGURES: figures} if figures else seconds

    def _verdict(self, record: TrialRecord) -> tuple[TrialState, float | None]:
        """A failed launch in the form that the sampler sees: TPE learns from PRUNED and ignores FAIL, GP needs a value.

        (Optuna 4.5-5.0; 60 trials, 69 % infeasible: 47.7 launches wasted with FAIL against 23.8 with PRUNED.)
        """
        value = objective_value(self._objective, record, self._reference)
        if value is not None and not self._lessons.cut_short(record):
            return TrialState.COMPLETE, value
        if self._settings.sampler != "gp":
            return TrialState.PRUNED, None
        done = [t.value for t in self._study.get_trials(deepcopy=False, states=[TrialState.COMPLETE]) if t.value]
        return (TrialState.COMPLETE, min(done)) if done else (TrialState.FAIL, None)


def _sampler(space: Space) -> optuna.samplers.BaseSampler:
    spec, settings = space.spec, space.spec.search
    if settings.sampler == "two-factor":
        return TwoFactorSampler(Candidates(space.blocks), seed=settings.seed)
    if settings.sampler == "one-at-a-time":
        return OneAtATimeSampler(seed=settings.seed)
    if settings.sampler == "tpe":
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # multivariate: so called since 2.0
        startup = max(3, min(10, spec.budget.trials // 5))  # of a short study not all may be spent on random points
        return optuna.samplers.TPESampler(
            seed=settings.seed, multivariate=True, group=True, constant_liar=True, n_startup_trials=startup
        )
    if settings.sampler == "gp":
        _require_gp()
        return optuna.samplers.GPSampler(seed=settings.seed)
    return optuna.samplers.RandomSampler(seed=settings.seed)  # not asked: the points have their order, see `Search`


def _require_gp() -> None:
    from importlib.util import find_spec  # noqa: PLC0415 - asked only where it matters

    if find_spec("torch") is None:
        raise SpecError("search.sampler: gp needs torch: pip install 'raytune-eagle[gp]', or write tpe")
