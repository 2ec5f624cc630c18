"""Studies for optuna-dashboard and whatever else reads Optuna's storage; a copy, the records stay the only record."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Iterator, Sequence
from typing import Any

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution, distribution_to_json
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from raytune_eagle.errors import SpecError
from raytune_eagle.model.trial import Failed, TrialRecord
from raytune_eagle.outcomes import objective_value
from raytune_eagle.reference import Reference
from raytune_eagle.spec import Objective


def to_optuna(records: Sequence[TrialRecord], url: str, name: str) -> int:
    """Write the searched launches of one study into an Optuna storage and return how many.

    What broke a constraint is PRUNED, with its figure as the intermediate value; failures are FAIL. Node, kind,
    launch command and failure are user attributes.

    Args:
        records: of one study.
        url: of SQLAlchemy, for example ``sqlite:///x.db``.
        name: of the study there.

    Raises:
        SpecError: the storage cannot be opened, or holds a study of this name.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    reference = Reference(records)
    searched = [record for record in records if record.kind == "trial"]
    distributions = _distributions(searched)
    trials = [_trial(record, distributions, reference) for record in searched]
    try:
        _write(RDBStorage(url), name, trials)
    except optuna.exceptions.DuplicatedStudyError as error:
        raise SpecError(f"{url}: holds a study {name!r} already: name another file") from error
    except (SQLAlchemyError, ValueError, ImportError) as error:
        line = " ".join(str(error).split("\n", maxsplit=1)[0].split())
        raise SpecError(f"{url}: cannot be written: {line}; give a URL as in sqlite:///study.db") from error
    return len(searched)


def _write(storage: RDBStorage, name: str, trials: Sequence[FrozenTrial]) -> None:
    """All of them or nothing: a half copy would be in the way of the next one.

    Into Optuna's own tables in one transaction: `Study.add_trials` asks some twenty times and commits for each trial,
    which takes a minute for a thousand.
    """
    study = storage.create_new_study([StudyDirection.MAXIMIZE], name)
    try:
        with Session(storage.engine) as session:
            _insert(session, study, trials)
            session.commit()
    except BaseException:
        with contextlib.suppress(SQLAlchemyError):
            storage.delete_study(study)
        raise


def _insert(session: Session, study: int, trials: Sequence[FrozenTrial]) -> None:
    rows = [models.TrialModel(study_id=study, number=place, state=each.state) for place, each in enumerate(trials)]
    for row, trial in zip(rows, trials, strict=True):
        row.datetime_start, row.datetime_complete = trial.datetime_start, trial.datetime_complete
    session.add_all(rows)
    session.flush()  # gives each its trial_id
    beside = [
        (table, {"trial_id": row.trial_id, **rest})
        for row, each in zip(rows, trials, strict=True)
        for table, rest in _beside(each)
    ]
    for table in dict.fromkeys(table for table, _ in beside):
        session.execute(sqlalchemy.insert(table), [values for each, values in beside if each is table])


def _beside(trial: FrozenTrial) -> Iterator[tuple[type, dict[str, Any]]]:
    """Rows of the tables beside that of the trials, as `RDBStorage` writes them; all figures are finite."""
    for name, value in trial.params.items():
        kind = trial.distributions[name]
        stored = {"param_value": kind.to_internal_repr(value), "distribution_json": distribution_to_json(kind)}
        yield models.TrialParamModel, {"param_name": name, **stored}
    for name, value in trial.user_attrs.items():
        yield models.TrialUserAttributeModel, {"key": name, "value_json": json.dumps(value)}
    if trial.value is not None:
        finite = models.TrialValueModel.TrialValueType.FINITE
        yield models.TrialValueModel, {"objective": 0, "value": trial.value, "value_type": finite}
    for step, value in trial.intermediate_values.items():
        known = models.TrialIntermediateValueModel.TrialIntermediateValueType.FINITE
        figure = {"intermediate_value": value, "intermediate_value_type": known}
        yield models.TrialIntermediateValueModel, {"step": step, **figure}


def _distributions(records: Sequence[TrialRecord]) -> dict[str, BaseDistribution]:
    """Ranges of the values that occur; what is not always a whole number is a choice."""
    found: dict[str, BaseDistribution] = {}
    for name in sorted({name for record in records for name in record.params}):
        values = [record.params.get(name) for record in records]
        if all(type(value) is int for value in values):
            numbers = [value for value in values if isinstance(value, int)]
            found[name] = IntDistribution(min(numbers), max(numbers))
        else:
            found[name] = CategoricalDistribution(sorted({_choice(value) for value in values}, key=str))
    return found


def _choice(value: Any) -> Any:
    return "unset" if value is None else json.dumps(value) if isinstance(value, list) else value


def _trial(record: TrialRecord, distributions: dict[str, BaseDistribution], reference: Reference) -> FrozenTrial:
    value = objective_value(Objective(), record, reference)
    state = TrialState.FAIL if value is None else TrialState.PRUNED if record.violations else TrialState.COMPLETE
    trial = create_trial(
        params={
            name: record.params[name] if isinstance(kind, IntDistribution) else _choice(record.params.get(name))
            for name, kind in distributions.items()
        },
        distributions=distributions,
        state=state,
        value=value if state == TrialState.COMPLETE else None,
        intermediate_values={0: value} if state == TrialState.PRUNED and value is not None else {},
        user_attrs=_attributes(record),
    )
    trial.datetime_start, trial.datetime_complete = _local(record.started_at), _local(record.ended_at)
    return trial


def _attributes(record: TrialRecord) -> dict[str, Any]:
    outcome = record.outcome
    failure = outcome.failure_class if isinstance(outcome, Failed) else None
    names = {"number": record.number, "node": record.node, "status": record.status, "failure_class": failure}
    return {**names, "violations": list(record.violations), "launch_command": record.config.command()}


def _local(seconds: float) -> dt.datetime:
    """Optuna keeps times of day of the machine, without a zone."""
    return dt.datetime.fromtimestamp(seconds, tz=dt.UTC).astimezone().replace(tzinfo=None)
