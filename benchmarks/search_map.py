"""A measured map of a small space, searched again and again: how soon intervals overlap the best's.

    python benchmarks/search_map.py results/study=tiny-cpu-map             # 50 seeds
    python benchmarks/search_map.py results/study=tiny-cpu-map --quick     # 5 seeds, under a minute

Each launch answers what the study measured there, its cycle times a draw of what passes and launches differ by, so
that seeds differ. A search stands on the fastest that it has seen. An interval is a point's own 95 % interval, widened
by what two launches of one configuration differ by in the study. Proposals launched before are free, 20 in a row; then
the launch is lost. Needs numpy, scipy, optuna and pyarrow; torch for Optuna's GP. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import numpy as np
import optuna

sys.path.insert(0, str(Path(__file__).parent.parent))

from raytune_eagle.model.trial import Completed, TrialRecord
from raytune_eagle.ranking import measurement
from raytune_eagle.reference import Reference
from raytune_eagle.report.verdict import between_launches
from raytune_eagle.samplers.candidates import Candidates, Params
from raytune_eagle.samplers.two_factor import TwoFactorSampler
from raytune_eagle.search import figures_of
from raytune_eagle.statistics import log_variance, t_975
from raytune_eagle.store import ParquetStore

FREE = 20
BAR = 5
NEAR = 0.95
STARTUP = 4
"""Random launches that Optuna's samplers begin with: as many as two-factor explores with."""
SHAPE = ("num_steps", "eagle_topk", "num_draft_tokens")


class Map:
    """Every point that a study measured, at its only concurrency.

    Attributes:
        points: steps, topk and tokens of each.
        figures: what the search would have been told of each.
        speeds: tokens per second, freed from nodes and hours as the study's own leaderboard is.
        near: whether it was measured within 5 % of the fastest.
        overlaps: whether a point's interval reaches that of the fastest.
        half_width: of the intervals of log speed, the median.
        launch_noise: standard deviation of the log from launch to launch.
        noise: standard deviation of the log of the speed that a launch of each would measure.
    """

    def __init__(self, records: Sequence[TrialRecord]) -> None:
        mine = [record for record in records if record.kind == "trial" and record.status == "completed"]
        outcomes = [record.outcome for record in mine if isinstance(record.outcome, Completed)]
        (level,) = {figures.concurrency for outcome in outcomes for figures in outcome.measurements}
        reference, launches = Reference(records), between_launches(records, level)
        measured = [(record, found) for record in mine if (found := measurement(record, level))]
        self.points: list[Params] = [_shape(record) for record, _ in measured]
        self.figures = [figures_of(record, reference) for record, _ in measured]
        factors = [reference.factor(record.node, level, record.started_at) for record, _ in measured]
        self.speeds = np.array([m.output_throughput * by for (_, m), by in zip(measured, factors, strict=True)])
        own = np.array([math.log(m.ci_high / m.ci_low) / 2 for _, m in measured])
        half = np.hypot(own, t_975(launches.freedom) * math.sqrt(launches.variance))
        best = int(np.argmax(self.speeds))
        self.overlaps = np.log(self.speeds) + half >= math.log(self.speeds[best]) - half[best]
        self.near = self.speeds >= NEAR * self.speeds[best]
        self.noise = np.sqrt([launches.variance + log_variance(m) for _, m in measured])
        self.launch_noise = math.sqrt(launches.variance)
        self.half_width = float(np.median(half))

    def nearest(self, point: Params) -> int:
        """The point of the map that is nearest in the logarithms of steps, topk and tokens."""
        return min(range(len(self.points)), key=lambda place: _distance(self.points[place], point))


def _shape(record: TrialRecord) -> Params:
    chosen = record.config.speculative
    assert chosen is not None
    return {name: getattr(chosen, name) for name in SHAPE}


def _distance(one: Params, other: Params) -> float:
    return math.fsum(math.log(one[name] / other[name]) ** 2 for name in SHAPE)


SAMPLERS: dict[str, Callable[[int, list[Params]], optuna.samplers.BaseSampler]] = {
    "two-factor": lambda seed, points: TwoFactorSampler(Candidates([(points, [{}])]), seed=seed),
    "random": lambda seed, _: optuna.samplers.RandomSampler(seed=seed),
    "tpe": lambda seed, _: optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=STARTUP),
    "gp": lambda seed, _: optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP),
}


def _asked(study: optuna.Study, known: Map) -> tuple[optuna.Trial, int]:
    """A trial and its place: two-factor and random choose a point, the others a shape that is near one."""
    trial = study.ask()
    if isinstance(study.sampler, TwoFactorSampler):
        values = {name: sorted({point[name] for point in known.points}) for name in SHAPE}
        return trial, known.points.index({name: trial.suggest_categorical(name, values[name]) for name in SHAPE})
    if isinstance(study.sampler, optuna.samplers.RandomSampler):
        return trial, trial.suggest_int("place", 0, len(known.points) - 1)
    most = {name: max(point[name] for point in known.points) for name in SHAPE}
    shape = {name: trial.suggest_int(name, 1 + (name == SHAPE[2]), most[name], log=name != SHAPE[0]) for name in SHAPE}
    return trial, known.nearest(shape)


def search(known: Map, method: str, seed: int) -> list[int]:
    """Where a search stands after each launch, until it is near the best or as many launches as points were made."""
    rng = np.random.default_rng([seed, 17])
    study = optuna.create_study(direction="maximize", sampler=SAMPLERS[method](seed, known.points))
    told: dict[int, tuple[float, list[dict[str, Any]]]] = {}
    stands: list[int] = []
    repeats = 0
    while len(stands) < len(known.points) and not (stands and known.near[stands[-1]]):
        trial, place = _asked(study, known)
        fresh = place not in told
        if fresh:
            slower = float(np.exp(rng.normal(0.0, known.noise[place])))
            figures = [{**one, "cycle_ms": one["cycle_ms"] * slower} for one in known.figures[place]]
            told[place] = float(known.speeds[place]) / slower, figures
        trial.set_user_attr("figures", told[place][1])
        study.tell(trial, told[place][0])
        repeats = 0 if fresh else repeats + 1
        if fresh or repeats == FREE:
            repeats = 0
            stands.append(max(told, key=lambda each: told[each][0]))
    return stands


def launches(stands: Sequence[int], good: Sequence[bool]) -> int:
    """Number of the first launch after which the search stands on a good point; the last if it never does."""
    return next((number for number, place in enumerate(stands, 1) if good[place]), len(stands))


def main() -> None:
    """Search with each sampler and print the figures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("study", type=Path, help="folder results/study=NAME")
    options.add_argument("--seeds", type=int, default=50)
    options.add_argument("--quick", action="store_true", help="5 seeds")
    given = options.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    seeds = 5 if given.quick else given.seeds
    known = Map(list(ParquetStore(str(given.study.parent)).read(given.study.name.removeprefix("study="))))
    print(f"{len(known.points)} points of {given.study.name}, seeds 0 to {seeds - 1}; launches differ by")
    print(f"{known.launch_noise:.1%} beside their passes; {known.overlaps.sum()} intervals (half-width")
    print(f"{known.half_width:.0%} in the median) overlap the best's, {known.near.sum()} points are within 5 % of it")
    print(f"{'sampler':12} {'overlaps: median':>17} {'90 %':>5} {'within 5 %: median':>19} {'90 %':>5}")
    found: dict[str, dict[str, float]] = {}
    for method in SAMPLERS:
        all_stands = [search(known, method, seed) for seed in range(seeds)]
        counts = [[launches(stands, good) for stands in all_stands] for good in (known.overlaps, known.near)]
        own = [float(value) for each in counts for value in (np.median(each), np.percentile(each, 90))]
        found[method] = dict(zip(("overlaps", "overlaps_90", "within_5", "within_5_90"), own, strict=True))
        print(f"{method:12} {own[0]:17.1f} {own[1]:5.0f} {own[2]:19.1f} {own[3]:5.0f}", flush=True)
    median = found["two-factor"]["overlaps"]
    print(json.dumps({"map_launches": median, "bar": BAR, "met": median <= BAR, "seeds": seeds, "samplers": found}))


if __name__ == "__main__":
    main()
