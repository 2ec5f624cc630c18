"""The ways to search that benchmarks/search.py compares, each as two functions: ask for a point, tell what it gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import optuna
from surfaces import NAMES, NCCL, SETTINGS, SHAPES, STEPS, TOKENS, TOPK, Launched, Surface

from raytune_eagle.samplers.candidates import Candidates
from raytune_eagle.samplers.one_at_a_time import OneAtATimeSampler
from raytune_eagle.samplers.probed import Probed
from raytune_eagle.samplers.two_factor import TwoFactorSampler

_SHAPE = {tuple(shape): place for place, shape in enumerate(SHAPES)}
_SETTING = {tuple(setting.values()): place for place, setting in enumerate(SETTINGS)}


# ------------------------------------------------------------------------------------------------------------ encodings
def conditional(trial: optuna.Trial) -> tuple[int, int]:
    """A chain is not asked for its number of tokens."""
    steps = trial.suggest_int("num_steps", STEPS[0], STEPS[-1])
    topk = trial.suggest_categorical("eagle_topk", TOPK)
    tokens = steps + 1 if topk == 1 else trial.suggest_categorical("num_draft_tokens", TOKENS)
    return _nearest(steps, topk, tokens), _setting(trial)


def flat(trial: optuna.Trial) -> tuple[int, int]:
    """Everything is always asked for, tokens on a scale; what no tree holds becomes the nearest that one does."""
    steps = trial.suggest_int("num_steps", STEPS[0], STEPS[-1])
    topk = 2 ** trial.suggest_int("log2_topk", 0, 3)
    tokens = trial.suggest_int("num_draft_tokens", TOKENS[0], TOKENS[-1], log=True)
    return _nearest(steps, topk, tokens), _setting(trial)


def _nearest(steps: int, topk: int, tokens: int) -> int:
    """Place of the valid shape of these steps and topk whose tokens are nearest."""
    valid = [shape for shape in SHAPES if (shape.steps, shape.topk) == (steps, topk)]
    return _SHAPE[min(valid, key=lambda shape: abs(np.log(shape.tokens / tokens)))]


def _setting(trial: optuna.Trial) -> int:
    return _SETTING[tuple(trial.suggest_categorical(name, NCCL[name]) for name in NAMES)]


# -------------------------------------------------------------------------------------------------------------- methods
Ask = Callable[[], tuple[object, int, int]]
Tell = Callable[[object, int, int, Launched], None]


def _optuna(
    sampler: optuna.samplers.BaseSampler, encoding: Callable[[optuna.Trial], tuple[int, int]]
) -> tuple[Ask, Tell]:
    study = optuna.create_study(direction="maximize", sampler=sampler)
    needs_value = isinstance(sampler, optuna.samplers.GPSampler)

    def ask() -> tuple[object, int, int]:
        trial = study.ask()
        return (trial, *encoding(trial))

    def tell(trial: object, shape: int, setting: int, launched: Launched) -> None:
        del shape, setting
        assert isinstance(trial, optuna.Trial)
        if launched.speed is not None:
            figures = {"accept_len": launched.accept_len, "cycle_ms": launched.cycle_ms}
            trial.set_user_attr("figures", [{**figures, "accept_histogram": launched.histogram}])
            study.tell(trial, launched.speed)
        elif needs_value:  # it learns from finished trials only: the worst value seen
            done = [one.value for one in study.get_trials(deepcopy=False) if one.value is not None]
            study.tell(trial, min(done, default=1.0))
        else:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)

    return ask, tell


def _grid() -> tuple[Ask, Tell]:
    """As SGLang's bench_speculative.py goes: steps, then topk, then tokens, each ascending; settings as they stand."""
    order = sorted(range(len(SHAPES)), key=lambda place: SHAPES[place])
    points: Iterator[tuple[int, int]] = ((shape, setting) for setting in range(len(SETTINGS)) for shape in order)
    return lambda: (None, *next(points)), lambda *_: None


def _ray(seed: int) -> tuple[Ask, Tell]:
    """Ray Tune's searcher alone, without its trials, which would change nothing but the time it takes."""
    from ray.tune.search.optuna import OptunaSearch  # noqa: PLC0415 - an optional comparator

    points: dict[str, tuple[int, int]] = {}

    def space(trial: optuna.Trial) -> None:
        points["last"] = conditional(trial)

    searcher = OptunaSearch(space=space, metric="speed", mode="max", seed=seed)
    numbers = iter(range(10**6))

    def ask() -> tuple[object, int, int]:
        name = str(next(numbers))
        searcher.suggest(name)
        return (name, *points["last"])

    def tell(name: object, shape: int, setting: int, launched: Launched) -> None:
        del shape, setting
        result = None if launched.speed is None else {"speed": launched.speed}
        searcher.on_trial_complete(str(name), result=result, error=launched.speed is None)

    return ask, tell


def candidates() -> Candidates:
    """The whole space, for the two-factor sampler."""
    return Candidates([([shape._asdict() for shape in _named()], SETTINGS)])


def _named() -> list[_Named]:
    return [_Named(*shape) for shape in SHAPES]


class _Named(NamedTuple):
    num_steps: int
    eagle_topk: int
    num_draft_tokens: int


_START = {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 8}
"""SGLang's own choice for Llama; NCCL begins with the first of each variable's values."""


def _tpe(seed: int, *, group: bool) -> optuna.samplers.TPESampler:
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=group, constant_liar=True)


def _probed(truth: Surface, seed: int) -> Probed:
    """What `raytune-eagle probe` would have timed before: each setting, 5 % off; None where it hangs."""
    times = truth.all_reduce * np.exp(np.random.default_rng([seed, 29]).normal(0, 0.05, len(SETTINGS)))
    return Probed([(setting, None if np.isnan(t) else float(t)) for setting, t in zip(SETTINGS, times, strict=True)])


def _two_factor(seed: int, probed: Probed | None = None) -> tuple[Ask, Tell]:
    return _optuna(TwoFactorSampler(candidates(), seed=seed, probed=probed), conditional)


METHODS: dict[str, Callable[[int, Surface], tuple[Ask, Tell]]] = {
    "random": lambda seed, _: _optuna(optuna.samplers.RandomSampler(seed=seed), conditional),
    "grid": lambda _, __: _grid(),
    "one-at-a-time": lambda seed, _: _optuna(OneAtATimeSampler(_START, seed=seed), conditional),
    "tpe conditional": lambda seed, _: _optuna(_tpe(seed, group=True), conditional),
    "tpe flat": lambda seed, _: _optuna(_tpe(seed, group=False), flat),
    "gp conditional": lambda seed, _: _optuna(optuna.samplers.GPSampler(seed=seed), conditional),
    "gp flat": lambda seed, _: _optuna(optuna.samplers.GPSampler(seed=seed), flat),
    "ray optunasearch": lambda seed, _: _ray(seed),
    "two-factor": lambda seed, _: _two_factor(seed),
    "two-factor probed": lambda seed, truth: _two_factor(seed, _probed(truth, seed)),
}
NEEDS = {"gp conditional": ("torch",), "gp flat": ("torch",), "ray optunasearch": ("ray", "pandas", "pyarrow")}


def missing() -> dict[str, str]:
    """Methods that cannot run here, and what they would need."""
    found = {name: [need for need in needs if find_spec(need) is None] for name, needs in NEEDS.items()}
    return {name: ", ".join(lacks) for name, lacks in found.items() if lacks}
