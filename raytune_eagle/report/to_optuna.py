"""Studies for optuna-dashboard and whatever else reads Optuna's storage; a copy, the records stay the only record."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from raytune_eagle.errors import SpecError
from raytune_eagle.model.trial import Failed, TrialRecord
from raytune_eagle.outcomes import objective_value
from raytune_eagle.reference import Reference
from raytune_eagle.spec import Objective


def to_optuna(records: Sequence[TrialRecord], url: str, name: str) -> int:
    """Write the searched launches of one study into an Optuna storage and return how many.

    What broke a constraint is PRUNED, with its figure as the intermediate value; failures are FAIL. Node, kind,
    launch command and failure are user attributes. Optuna takes most of a minute for a thousand in SQLite: about twenty
    statements and a commit for each.

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
        _write(optuna.create_study(storage=url, study_name=name, direction="maximize"), trials)
    except optuna.exceptions.DuplicatedStudyError as error:
        raise SpecError(f"{url}: holds a study {name!r} already: name another file") from error
    except (SQLAlchemyError, ValueError, ImportError) as error:
        line = " ".join(str(error).split("\n", maxsplit=1)[0].split())
        raise SpecError(f"{url}: cannot be written: {line}; give a URL as in sqlite:///study.db") from error
    return len(searched)


def _write(study: optuna.Study, trials: Sequence[FrozenTrial]) -> None:
    """All of them or nothing: a half copy would be in the way of the next one."""
    try:
        study.add_trials(trials)
    except BaseException:
        with contextlib.suppress(SQLAlchemyError):
            optuna.delete_study(study_name=study.study_name, storage=study._storage)  # noqa: SLF001 - it has no other way
        raise


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
