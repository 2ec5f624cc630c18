"""The practitioner's method: one parameter at a time, kept if it is better."""

import optuna
import pytest

from raytune_eagle.samplers.one_at_a_time import OneAtATimeSampler


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def run(count, value, start=None):
    study = optuna.create_study(direction="maximize", sampler=OneAtATimeSampler(start, seed=0))
    for _ in range(count):
        trial = study.ask()
        point = [
            trial.suggest_int("a", 0, 3),
            trial.suggest_categorical("b", ["x", "y", "z"]),
            trial.suggest_int("c", 0, 2),
        ]
        study.tell(trial, value(*point))
    return [tuple(trial.params.values()) for trial in study.trials]


def test_changes_one_thing_and_keeps_what_is_better():
    """From the start each launch differs from the best so far in one parameter, and the separable optimum is found."""

    def value(a, b, c):
        return {0: 0, 1: 3, 2: 1, 3: 2}[a] + 10 * "xyz".index(b) - c

    points = run(7, value, {"a": 0, "b": "x", "c": 1})
    assert points[0] == (0, "x", 1)
    best = points[0]
    for one in points[1:]:
        assert sum(x != y for x, y in zip(one, best, strict=True)) == 1
        best = max(best, one, key=lambda p: value(*p))
    assert best[:2] == (1, "z")


def test_no_point_twice_until_all_neighbours_are_known():
    """While a neighbour of the best is unknown no point comes twice; without a start the first values are the start."""
    points = run(8, lambda a, b, c: -a - c - "xyz".index(b))
    assert points[0] == (0, "x", 0)
    assert len(set(points)) == 8
