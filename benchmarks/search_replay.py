"""SpecBundle's published launches, replayed: how good the best of 2 and of 3 launches is, of 5 configurations."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import optuna

from raytune_eagle.samplers.candidates import Candidates
from raytune_eagle.samplers.two_factor import TwoFactorSampler

MOST = 3
"""Launches of a group."""
_NAMES = {"num_steps": "steps", "eagle_topk": "topk", "num_draft_tokens": "num_draft_tokens"}
Group = list[dict[str, str]]
Points = list[dict[str, int]]

SAMPLERS: dict[str, Callable[[int, Points], optuna.samplers.BaseSampler]] = {
    "random": lambda seed, _: optuna.samplers.RandomSampler(seed=seed),
    "tpe flat": lambda seed, _: optuna.samplers.TPESampler(seed=seed, n_startup_trials=2),
    "two-factor": lambda seed, points: TwoFactorSampler(Candidates([(points, [{}])]), seed=seed),
}


@cache
def groups(path: Path) -> list[Group]:
    """Launches of each model, benchmark and draft."""
    found: dict[tuple[str, ...], Group] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["draft"] != "baseline":
                found.setdefault((line["model"], line["benchmark"], line["draft"]), []).append(line)
    return list(found.values())


def regrets(path: Path, method: str, seed: int) -> list[float]:
    """Mean regret after 1, 2, … launches over all groups: 1 - best found / best of the group."""
    found = [_regrets(SAMPLERS[method], group, seed) for group in groups(path)]
    return [float(value) for value in np.mean(found, axis=0)]


def _regrets(make: Callable[[int, Points], optuna.samplers.BaseSampler], group: Group, seed: int) -> list[float]:
    order = np.random.default_rng(seed).permutation(len(group))
    points = [{ours: int(group[place][theirs]) for ours, theirs in _NAMES.items()} for place in order]
    speeds = [float(group[place]["output_throughput"]) for place in order]
    study = optuna.create_study(direction="maximize", sampler=make(seed, points))
    best, launched = [], dict[int, float]()
    while len(best) < MOST:
        trial = study.ask()
        place = _place(study, trial, points)
        if place in launched:
            study.tell(trial, launched[place])
            continue
        launched[place] = speeds[place]
        accept, streams = float(group[order[place]]["accept_length"]), int(group[order[place]]["batch_size"])
        trial.set_user_attr("figures", [{"accept_len": accept, "cycle_ms": 1000 * streams * accept / speeds[place]}])
        study.tell(trial, speeds[place])
        best.append(1 - max(launched.values()) / max(speeds))
    return best


def _place(study: optuna.Study, trial: optuna.Trial, points: Points) -> int:
    if isinstance(study.sampler, TwoFactorSampler):
        point = {name: trial.suggest_categorical(name, sorted({p[name] for p in points})) for name in _NAMES}
        return points.index(point)
    return int(trial.suggest_categorical("launch", list(range(len(points)))))
