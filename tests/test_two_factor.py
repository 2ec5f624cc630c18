"""The two-factor sampler with `optuna.create_study` alone: what it learns, what it avoids, when it steps aside."""

import logging
import sys
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import search as benchmark
from surfaces import NCCL, SETTINGS, SHAPES, TOKENS, TOPK, surface

from raytune_eagle.samplers.candidates import Candidates, CannotPlaceError, from_distributions
from raytune_eagle.samplers.two_factor import TwoFactorSampler

SPACE = {
    "num_steps": IntDistribution(1, 10),
    "eagle_topk": CategoricalDistribution(TOPK),
    "num_draft_tokens": CategoricalDistribution(TOKENS),
    **{name: CategoricalDistribution(values) for name, values in NCCL.items()},
}


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def made_study(seed=0, space=None):
    return optuna.create_study(
        direction="maximize", sampler=TwoFactorSampler(space or benchmark.candidates(), seed=seed)
    )


def point(shape, setting):
    return {
        **dict(zip(("num_steps", "eagle_topk", "num_draft_tokens"), SHAPES[shape], strict=True)),
        **SETTINGS[setting],
    }


def add(study, truth, shape, setting, rng, **changes):
    """A launch that somebody else asked for."""
    launched, params = truth.launch(shape, setting, rng), point(shape, setting)
    if params["eagle_topk"] == 1:
        del params["num_draft_tokens"]
    figures = {"accept_len": launched.accept_len, "cycle_ms": launched.cycle_ms, "accept_histogram": launched.histogram}
    ended = {"state": TrialState.PRUNED} if launched.speed is None else {"value": launched.speed}
    attributes = {} if launched.speed is None else {"figures": [figures]}
    spaces = {name: SPACE[name] for name in params}
    study.add_trial(create_trial(params=params, distributions=spaces, user_attrs=attributes, **(ended | changes)))


def filled(count, seed=0, kind="plain"):
    study, truth, rng = made_study(), surface(seed, kind), np.random.default_rng(seed)
    for _ in range(count):
        add(study, truth, rng.integers(len(SHAPES)), rng.integers(len(SETTINGS)), rng)
    return study, truth, rng


def launches(method, kind="plain", nodes=1, seeds=(0, 1, 2), cap=60):
    return np.median([benchmark.run(benchmark.Task(method, kind, nodes, seed, cap))["launches"] for seed in seeds])


@pytest.mark.slow
def test_finds_the_best_in_a_third_of_tpes_launches():
    """On three surfaces: within 2 % of the optimum of 174,150 points in at most 20 launches, which TPE misses in 60."""
    assert launches("two-factor") <= 20
    assert launches("tpe conditional") > 3 * launches("two-factor")


@pytest.mark.slow
def test_sixteen_nodes_at_once():
    """Sixteen proposals before any result are all different, and three rounds of them are enough."""
    study = made_study()
    asked = [tuple(benchmark.conditional(study.ask())) for _ in range(16)]
    assert len(set(asked)) == 16
    assert launches("two-factor", nodes=16, cap=64) <= 48


@pytest.mark.slow
def test_learns_what_fails():
    """Where a fifth of the points fails it still arrives, and of its first 30 launches at most 12 fail."""
    study, truth, rng = made_study(), surface(4, "failing"), np.random.default_rng(0)
    failed = 0
    for _ in range(30):
        trial = study.ask()
        shape, setting = benchmark.conditional(trial)
        launched = truth.launch(shape, setting, rng)
        if launched.speed is None:
            failed += 1
            study.tell(trial, state=TrialState.PRUNED)
        else:
            trial.set_user_attr("figures", [{"accept_len": launched.accept_len, "cycle_ms": launched.cycle_ms}])
            study.tell(trial, launched.speed)
    assert failed <= 12
    assert max(trial.value or 0 for trial in study.trials) > 0.9 * truth.speed.max()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "kind"), [(15, "plain"), (30, "plain"), (80, "plain"), (80, "misspecified")])
def test_intervals_hold(count, kind):
    """90 % intervals cover 80 to 97 % of 1,800 points that were never launched, over six surfaces.

    Where every point is rough by itself, once enough launches have shown it.
    """
    covered = []
    for seed in range(6):
        study, truth, rng = filled(count, seed, kind)
        shapes, settings = rng.integers(len(SHAPES), size=300), rng.integers(len(SETTINGS), size=300)
        points = [point(*place) for place in zip(shapes, settings, strict=True)]
        mean, sd = study.sampler.predict(study, points)
        truths = np.log(truth.speed[shapes, settings] / 1000)
        covered.append(np.mean(np.abs(truths - mean) < 1.645 * sd))
    assert 0.80 <= np.mean(covered) <= 0.97


def error_of_shorter_chains(seed, *, histogram):
    """Largest relative error of accept_len over all chains below 8 steps, after one launch of 8."""
    truth, study, rng = surface(seed), made_study(), np.random.default_rng(0)
    chains = [place for place, shape in enumerate(SHAPES) if shape.topk == 1 and shape.steps < 8]
    add(study, truth, next(place for place, shape in enumerate(SHAPES) if shape == (8, 1, 9)), 0, rng)
    if not histogram:
        bare, study = study.trials[0], made_study()
        del bare.user_attrs["figures"][0]["accept_histogram"]
        study.add_trial(bare)
    belief = study.sampler.belief(study)
    first, rest = belief.halves([point(place, 0) for place in chains], [point(place, 0) for place in chains])
    mean, _ = belief.accept.at(first[0], rest[0])
    return np.abs(np.exp(mean) / truth.accept[chains] - 1).max()


def test_histogram_teaches_shorter_chains():
    """One chain of 8 steps tells what every shorter chain accepts to within 1 %; without its histogram it does not."""
    seeds = range(8)
    assert max(error_of_shorter_chains(seed, histogram=True) for seed in seeds) < 0.01
    assert np.median([error_of_shorter_chains(seed, histogram=False) for seed in seeds]) > 0.01


def test_constraints_are_kept():
    """With a limit that forbids trees of many tokens, the next choices stay below it although larger are faster."""
    study, truth, rng = made_study(), surface(1), np.random.default_rng(1)
    for _ in range(25):
        shape = rng.integers(len(SHAPES))
        over = {"constraints": {"itl": (SHAPES[shape].tokens - 8) / 8}}
        add(study, truth, shape, rng.integers(len(SETTINGS)), rng, **over)
    chosen = study.sampler.choices(study, 10)
    assert np.mean([choice.params["num_draft_tokens"] <= 11 for choice in chosen]) >= 0.8


def test_costly_launches_wait():
    """Between points of like promise the one whose launches take a quarter of the time comes first."""
    firsts = [{"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}]
    settings = [{"NCCL_PROTO": a, "NCCL_ALGO": b} for a in ("LL", "Simple") for b in range(30)]
    study = made_study(space=Candidates([(firsts, settings)]))
    for place in [*range(8), *range(30, 38)]:
        params = {"num_steps": 3, "eagle_topk": 1, **settings[place]}
        space = {
            "num_steps": IntDistribution(1, 10),
            "eagle_topk": CategoricalDistribution((1,)),
            "NCCL_PROTO": CategoricalDistribution(("LL", "Simple")),
            "NCCL_ALGO": CategoricalDistribution(tuple(range(30))),
        }
        seconds = 400.0 if params["NCCL_PROTO"] == "LL" else 100.0
        attributes = {"figures": [{"accept_len": 2.0, "cycle_ms": 20.0 + place % 3}], "seconds": seconds}
        study.add_trial(create_trial(params=params, distributions=space, value=100.0, user_attrs=attributes))
    assert {choice.params["NCCL_PROTO"] for choice in study.sampler.choices(study, 10)} == {"Simple"}


@pytest.mark.slow
def test_every_point_once():
    """A space of 12 points is launched whole, none twice, and then it has nothing to say."""
    space = {"num_steps": IntDistribution(1, 6), "eagle_topk": CategoricalDistribution((1,))}
    rest = [{"NCCL_PROTO": "LL"}, {"NCCL_PROTO": "Simple"}]
    firsts = [{"num_steps": steps, "eagle_topk": 1} for steps in range(1, 7)]
    study = made_study(space=Candidates([(firsts, rest)]))
    seen = set()
    for _ in range(12):
        trial = study.ask(space | {"NCCL_PROTO": CategoricalDistribution(("LL", "Simple"))})
        seen.add(tuple(trial.params.values()))
        trial.set_user_attr("figures", [{"accept_len": 2.0, "cycle_ms": 10.0}])
        study.tell(trial, 200.0)
    assert len(seen) == 12
    assert study.sampler.choices(study, 1) == []


@pytest.mark.slow
def test_alone_it_finds_the_space_itself():
    """Without candidates the first launch is random, the others come from what trials were asked for."""
    study = optuna.create_study(direction="maximize", sampler=TwoFactorSampler(seed=1))
    truth, rng = surface(3), np.random.default_rng(3)
    for _ in range(20):
        trial = study.ask()
        shape, setting = benchmark.conditional(trial)
        launched = truth.launch(shape, setting, rng)
        trial.set_user_attr("figures", [{"accept_len": launched.accept_len, "cycle_ms": launched.cycle_ms}])
        study.tell(trial, launched.speed)
    assert max(trial.value for trial in study.trials) > 0.9 * truth.speed.max()


@pytest.mark.parametrize(
    ("space", "why"),
    [
        ({"num_steps": IntDistribution(1, 5), "x": IntDistribution(1, 3)}, "x may change what is accepted"),
        ({"num_steps": IntDistribution(1, 5), "nccl_x": FloatDistribution(0, 1)}, "nccl_x is continuous"),
        ({"eagle_topk": IntDistribution(1, 5)}, "num_steps is not searched"),
    ],
)
def test_steps_aside_for_tpe(space, why, caplog):
    """Dimensions that belong to neither factor: TPE goes on, after one warning that names the dimension."""
    optuna.logging.enable_propagation()
    study = optuna.create_study(direction="maximize", sampler=TwoFactorSampler(seed=0))
    with caplog.at_level(logging.WARNING):
        for _ in range(15):
            trial = study.ask(space)
            study.tell(trial, float(sum(trial.params.values())))
    optuna.logging.disable_propagation()
    said = [record.getMessage() for record in caplog.records if "two-factor" in record.getMessage()]
    assert len(said) == 1
    assert why in said[0]
    assert "TPE chooses instead" in said[0]


def test_steps_aside_without_figures(caplog):
    """Trials that bring neither accept_len nor cycle_ms cannot be told apart: TPE, and said so once."""
    optuna.logging.enable_propagation()
    study = made_study()
    with caplog.at_level(logging.WARNING):
        for value in (1.0, 2.0, 3.0):
            trial = study.ask()
            benchmark.conditional(trial)
            study.tell(trial, value)
    optuna.logging.disable_propagation()
    assert [record.getMessage() for record in caplog.records] == [
        "two-factor: trials have no user attribute 'figures' with accept_len and cycle_ms; TPE chooses instead"
    ]


def test_points_of_distributions():
    """Chains have one number of tokens, trees only what they hold; too many points are refused with their number."""
    space = {"num_steps": IntDistribution(1, 2), "eagle_topk": CategoricalDistribution((1, 2))}
    points = from_distributions({**space, "num_draft_tokens": IntDistribution(2, 9)}).blocks[0].first
    trees = [tuple(one.values()) for one in points]
    assert sorted(trees) == [(1, 1, 2), (1, 2, 2), (1, 2, 3), (2, 1, 3), *[(2, 2, tokens) for tokens in range(3, 8)]]
    wide = {f"nccl_{name}": IntDistribution(1, 200) for name in "abc"}
    with pytest.raises(CannotPlaceError, match="8,000,000 points, more than 3,000,000"):
        from_distributions(wide)


@pytest.mark.slow
def test_ten_million_points():
    """Of a space too large for one look each ask sees another part, and repeats nothing."""
    trees = [(steps, topk, tokens) for steps in range(1, 11) for topk in (2, 4, 8) for tokens in range(11, 60)]
    firsts = [dict(zip(("num_steps", "eagle_topk", "num_draft_tokens"), tree, strict=True)) for tree in trees]
    rest = [{"NCCL_A": a, "NCCL_B": b, "NCCL_C": c} for a in range(20) for b in range(20) for c in range(20)]
    study, rng = made_study(space=Candidates([(firsts, rest)])), np.random.default_rng(0)
    space = {name: IntDistribution(1, 60) for name in firsts[0]} | {name: IntDistribution(0, 19) for name in rest[0]}
    seen = set()
    for _ in range(8):
        trial = study.ask(space)
        seen.add(tuple(trial.params.values()))
        trial.set_user_attr("figures", [{"accept_len": 2 + rng.random(), "cycle_ms": 20 + trial.params["NCCL_A"]}])
        study.tell(trial, 100.0)
    assert len(seen) == 8


def test_several_concurrencies_weigh_alike():
    """Figures of several concurrencies make one speed: the geometric mean, as the objective of a study."""
    study, truth, rng = made_study(), surface(0), np.random.default_rng(0)
    for place in range(12):
        add(study, truth, place * 17, place * 60, rng)
    twice = made_study()
    for trial in study.trials:
        one = trial.user_attrs["figures"][0]
        both = [one | {"cycle_ms": one["cycle_ms"] / 2}, one | {"cycle_ms": one["cycle_ms"] * 2}]
        twice.add_trial(
            create_trial(
                params=trial.params, distributions=trial.distributions, value=trial.value, user_attrs={"figures": both}
            )
        )
    ask = [point(5, 9), point(100, 500)]
    assert twice.sampler.predict(twice, ask)[0] == pytest.approx(study.sampler.predict(study, ask)[0])
