"""What to launch next: ``start_from`` first, then an Optuna sampler, and never the same point twice.

The Optuna study lives in memory and is rebuilt from the records, so there is no second truth to disagree with.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import optuna
from optuna.trial import TrialState, create_trial

from raytune_eagle.errors import SpecError
from raytune_eagle.model import Config, TrialRecord
from raytune_eagle.outcomes import objective_value, violation
from raytune_eagle.reference import Reference
from raytune_eagle.space import Params, Space
from raytune_eagle.spec import Spec

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
    """

    def __init__(self, space: Space, records: Iterable[TrialRecord], reference: Reference) -> None:
        self._space, self._objective, self._reference = space, space.spec.objective, reference
        self._settings = space.spec.search
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(direction="maximize", sampler=_sampler(space.spec))
        self._seen: set[str] = set()
        self._grid = space.points() if self._settings.sampler == "grid" else iter(())
        for record in records:
            if record.kind == "trial":
                self._seen |= {record.key, space.key(record.config)}  # two where more is known of the nodes by now
                self._replay(record)
        starts = [Proposal(s.config, space.key(s.config), s.params) for s in space.starts]
        self._starts = deque({p.key: p for p in starts if p.key not in self._seen}.values())

    def ask(self) -> Proposal | None:
        """The next point, marked as seen; None when every valid point has been launched."""
        proposal = self._starts.popleft() if self._starts else self._choose()
        if proposal is not None:
            self._seen.add(proposal.key)
        return proposal

    def tell(self, proposal: Proposal, record: TrialRecord) -> None:
        """Let the sampler learn from a finished launch."""
        if proposal.trial is None:
            self._replay(record)
            return
        state, value = self._verdict(record)
        for name, excess in self._constraints(record).items():
            proposal.trial.set_constraint(name, excess)
        self._study.tell(proposal.trial, value, state=state)

    def _choose(self) -> Proposal | None:
        if self._settings.sampler == "grid":
            return self._first_unseen(self._grid)
        for _ in range(_MOST_ASKS if len(self._seen) < self._space.size else 0):
            trial = self._study.ask()
            settled = self._space.settle(self._space.suggest(trial))
            if settled is not None and (key := self._space.key(settled[0])) not in self._seen:
                return Proposal(settled[0], key, settled[1], trial)
            # No launch is spent on it. TPE learns from PRUNED that there is nothing to gain here, and asks 65 times
            # for 40 launches of a small space; with FAIL, which it ignores, it asked 2,355 times.
            self._study.tell(trial, state=TrialState.PRUNED)
        return self._first_unseen(self._space.points(self._settings.seed))

    def _first_unseen(self, points: Iterator[Params]) -> Proposal | None:
        for params in points:
            config = self._space.config(params)
            key = self._space.key(config)
            if key not in self._seen:
                return Proposal(config, key, params)
        return None

    def _replay(self, record: TrialRecord) -> None:
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
            )
        )

    def _constraints(self, record: TrialRecord) -> dict[str, float]:
        """In Optuna's form: 0 or less is feasible."""
        return {_VIOLATION: violation(self._objective, record)} if self._objective.constraints else {}

    def _verdict(self, record: TrialRecord) -> tuple[TrialState, float | None]:
        """A failed launch in the form that the sampler sees: TPE learns from PRUNED and ignores FAIL, GP needs a value.

        (Optuna 4.5-5.0; 60 trials, 69 % infeasible: 47.7 launches wasted with FAIL against 23.8 with PRUNED.)
        """
        value = objective_value(self._objective, record, self._reference)
        if value is not None:
            return TrialState.COMPLETE, value
        if self._settings.sampler != "gp":
            return TrialState.PRUNED, None
        done = [t.value for t in self._study.get_trials(deepcopy=False, states=[TrialState.COMPLETE]) if t.value]
        return (TrialState.COMPLETE, min(done)) if done else (TrialState.FAIL, None)


def _sampler(spec: Spec) -> optuna.samplers.BaseSampler:
    settings = spec.search
    if settings.sampler == "tpe":
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # multivariate: so called since 2.0
        startup = max(3, min(10, spec.budget.trials // 5))  # of a short study not all may be spent on random points
        return optuna.samplers.TPESampler(
            seed=settings.seed, multivariate=True, group=True, constant_liar=True, n_startup_trials=startup
        )
    if settings.sampler == "gp":
        _require_gp()
        return optuna.samplers.GPSampler(seed=settings.seed)
    return optuna.samplers.RandomSampler(seed=settings.seed)


def _require_gp() -> None:
    from importlib.util import find_spec  # noqa: PLC0415 - asked only where it matters

    missing = [name for name in ("torch", "scipy") if find_spec(name) is None]
    if missing:
        raise SpecError(
            f"search.sampler: gp needs {' and '.join(missing)}: pip install 'raytune-eagle[gp]', or write tpe"
        )
