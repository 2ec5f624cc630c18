"""What moves throughput and what a verify cycle is made of, told from the launches of a study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.measurement import Measurement
from raytune_eagle.model.trial import TrialRecord

_FEWEST = 8
"""Launches below which nothing is said: fewer say more of themselves than of the parameters."""
MOST = 500
"""Launches that importances are taken from, evenly out of more: Optuna copies each, a second for a thousand."""


class CycleFit(NamedTuple):
    """Milliseconds of a cycle: fixed, for each draft step, for each token verified; and how well that fits."""

    fixed: float
    per_step: float
    per_token: float
    launches: int
    r2: float

    def parts(self, chosen: Speculative) -> dict[str, float]:
        """Milliseconds of each part for these settings."""
        return {
            "verify, fixed": self.fixed,
            f"{chosen.num_steps} draft steps": self.per_step * chosen.num_steps,
            f"{chosen.num_draft_tokens} tokens to verify": self.per_token * chosen.num_draft_tokens,
        }


def cycle_parts(launches: Sequence[tuple[Config, Measurement]]) -> CycleFit | None:
    """Least squares over launches that differ in steps and tokens alone; None where that cannot be told.

    Launches with other flags or environment have cycles of their own kind: of all such groups the largest is taken. A
    negative part means that the launches do not follow this form, and nothing is said.
    """
    groups: dict[str, list[tuple[Speculative, float]]] = {}
    for config, figures in launches:
        if config.speculative:
            groups.setdefault(f"{config.env}{config.tuned_args}", []).append((config.speculative, figures.cycle_ms))
    rows = max(groups.values(), key=len, default=[])
    if len(rows) < _FEWEST:
        return None
    known = np.array([[1.0, chosen.num_steps, chosen.num_draft_tokens] for chosen, _ in rows])
    cycles = np.array([cycle for _, cycle in rows])
    found, _, rank, _ = np.linalg.lstsq(known, cycles, rcond=None)
    if rank < known.shape[1] or (found < 0).any() or not cycles.var():
        return None
    r2 = 1 - float((cycles - known @ found).var() / cycles.var())
    fixed, per_step, per_token = map(float, found)
    return CycleFit(fixed, per_step, per_token, len(rows), r2)


def importances(launches: Sequence[tuple[TrialRecord, float]]) -> dict[str, float]:
    """Share of each searched parameter in what moved the figure, largest first; empty for too few launches.

    Of more than `MOST` launches a sample is asked, every n-th by their order of speed.
    """
    if len(launches) > MOST:
        by_speed = sorted(launches, key=lambda each: (each[1], each[0].number))
        launches = [by_speed[place * len(launches) // MOST] for place in range(MOST)]
    names = sorted({name for record, _ in launches for name in record.params})
    choices = {name: _choices([record.params.get(name) for record, _ in launches]) for name in names}
    names = [name for name in names if len(choices[name]) > 1]
    if len(launches) < _FEWEST or not names:
        return {}
    found = _evaluated(names, choices, launches)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _choices(values: Sequence[Any]) -> list[str]:
    return sorted({_spelt(value) for value in values})


def _spelt(value: Any) -> str:
    return "unset" if value is None else str(value)


def _evaluated(
    names: Sequence[str], choices: dict[str, list[str]], launches: Sequence[tuple[TrialRecord, float]]
) -> dict[str, float]:
    import optuna  # noqa: PLC0415 - a quarter of a second that only this needs

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.CategoricalDistribution(choices[name]) for name in names
    }
    study = optuna.create_study(direction="maximize")
    spelt = [({name: _spelt(record.params.get(name)) for name in names}, value) for record, value in launches]
    study.add_trials([optuna.trial.create_trial(params=p, distributions=distributions, value=v) for p, v in spelt])
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
