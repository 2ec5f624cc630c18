"""A measured map of a small space, searched again and again: how soon intervals overlap the best's.

    python benchmarks/search_map.py results/study=tiny-cpu-map             # 50 seeds
    python benchmarks/search_map.py results/study=tiny-cpu-map --quick     # 5 seeds, under a minute

Each launch answers what the study measured there, its cycle times a draw of what passes and launches differ by, so
that seeds differ. A search stands on the fastest that it has seen. An interval is a point's own 95 % interval, widened
by what two launches of one configuration differ by in the study. Proposals launched before are free, 20 in a row; then
the launch is lost.

One noisy launch a point makes it luck which point is the fastest. So two more maps are searched, made from a fit of the
cycle times (linear in steps, tokens and steps x topk) and from how far launches lie from it. One is drawn anew for each
seed: there is another luck. The other is the fit itself as the truth, whose launches differ by as much: how much slower
than its best is, on average, the point that `run` would crown, the fastest of the three fastest in two more launches
of each. Needs numpy, scipy, optuna and pyarrow; torch for Optuna's GP. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import numpy as np
import optuna

sys.path.insert(0, str(Path(__file__).parent.parent))

from raytune_eagle.lessons import figures_of
from raytune_eagle.model.trial import Completed, TrialRecord
from raytune_eagle.ranking import measurement
from raytune_eagle.reference import Reference
from raytune_eagle.report.verdict import between_launches
from raytune_eagle.samplers.candidates import Candidates, Params
from raytune_eagle.samplers.kernels import Array
from raytune_eagle.samplers.two_factor import TwoFactorSampler
from raytune_eagle.statistics import log_variance, t_975
from raytune_eagle.store import ParquetStore

FREE = 20
BAR = 5
NEAR = 0.95
AFTER = (2, 4, 8, 12)
CONFIRMED, ROUNDS = 3, 2
"""Points that `run` confirms by default, and launches of each."""
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
        smooth, uneven: see the module.
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
        self.smooth, self.uneven = self._fit()

    def _fit(self) -> tuple[Array, Array]:
        """Speeds by a fit of the cycle times that is smooth in the shape, and how far the log of each lies from it."""
        steps, topk, tokens = np.array([[point[name] for name in SHAPE] for point in self.points], dtype=float).T
        terms = np.column_stack([np.ones_like(steps), steps, tokens, steps * topk])
        cycles = np.log([one["cycle_ms"] for (one,) in self.figures])
        left = cycles - terms @ np.linalg.lstsq(terms, cycles)[0]
        return self.speeds * np.exp(left), left * math.sqrt(len(cycles) / (len(cycles) - terms.shape[1]))

    def evened(self) -> Map:
        """The smooth fit as the truth, launches of which differ by as much as those of the map from it."""
        found = self._at(self.smooth)
        found.noise = np.full(len(self.points), self.uneven.std())
        return found

    def resampled(self, rng: np.random.Generator) -> Map:
        """One launch of each point of the smooth fit."""
        return self._at(self.smooth * np.exp(rng.choice(self.uneven, len(self.points))))

    def _at(self, speeds: Array) -> Map:
        """The same points at other speeds."""
        found = copy(self)
        slower = self.speeds / speeds
        found.figures = [[{**f, "cycle_ms": f["cycle_ms"] * by}] for (f,), by in zip(self.figures, slower, strict=True)]
        found.speeds, found.near = speeds, speeds >= NEAR * speeds.max()
        return found

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


def launched(known: Map, method: str, seed: int) -> Iterator[tuple[int, float]]:
    """Place and measured speed of each launch; of one that was lost to repeats, the last repeat's again."""
    rng = np.random.default_rng([seed, 17])
    study = optuna.create_study(direction="maximize", sampler=SAMPLERS[method](seed, known.points))
    told: dict[int, tuple[float, list[dict[str, Any]]]] = {}
    repeats = 0
    while True:
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
            yield place, told[place][0]


def search(known: Map, method: str, seed: int) -> list[int]:
    """Where a search stands after each launch, until it is near the best or as many launches as points were made."""
    told, stands = dict[int, float](), list[int]()
    for place, speed in itertools.islice(launched(known, method, seed), len(known.points)):
        told[place] = speed
        stands.append(max(told, key=lambda each: told[each]))
        if known.near[stands[-1]]:
            break
    return stands


def regrets(known: Map, method: str, seed: int) -> list[float]:
    """How much slower than the best the point is that `run` would crown after `AFTER` launches."""
    order = list(itertools.islice(launched(known, method, seed), max(AFTER)))
    found = []
    for count in AFTER:
        told = dict(order[:count])
        top = sorted(told, key=lambda place: -told[place])[:CONFIRMED]
        again = known.noise[top] / math.sqrt(ROUNDS) * np.random.default_rng(seed).normal(size=(1000, len(top)))
        winners = np.argmax(np.log(known.speeds[top]) + again, axis=1)
        found.append(1 - float(known.speeds[top][winners].mean() / known.speeds.max()))
    return found


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
    print(f"{known.half_width:.0%} in the median) overlap the best's, {known.near.sum()} points are within 5 % of it;")
    even = known.evened()
    print(f"they lie {known.uneven.std():.1%} from a smooth fit, by which {even.near.sum()} are within 5 % of its best")
    print(f"{'launches, median and 90 %:':25} {'overlap':>14} {'within 5 %':>14} {'of another luck':>15}", end=" ")
    print(f"   crowned after {', '.join(map(str, AFTER))} is slower by")
    found = {method: _searched(known, method, seeds) for method in SAMPLERS}
    median = found["two-factor"]["overlaps"][0]
    print(json.dumps({"map_launches": median, "bar": BAR, "met": median <= BAR, "seeds": seeds, "samplers": found}))


def _searched(known: Map, method: str, seeds: int) -> dict[str, list[float]]:
    """Median and 90th percentile of the launches by each measure, and the regrets; printed too."""
    counts: dict[str, list[int]] = {"overlaps": [], "within_5": [], "within_5_resampled": []}
    for seed in range(seeds):
        stands, other = search(known, method, seed), known.resampled(np.random.default_rng([seed, 23]))
        counts["overlaps"].append(launches(stands, known.overlaps))
        counts["within_5"].append(launches(stands, known.near))
        counts["within_5_resampled"].append(launches(search(other, method, seed), other.near))
    found = {name: [float(np.median(each)), float(np.percentile(each, 90))] for name, each in counts.items()}
    slower = np.mean([regrets(known.evened(), method, seed) for seed in range(seeds)], axis=0)
    print(f"{method:26}", *(f"{middle:9.1f} {most:4.0f}" for middle, most in found.values()), end=" ")
    print("   ", *(f"{value:6.1%}" for value in slower), flush=True)
    return {**found, "regrets": [round(float(value), 4) for value in slower]}


if __name__ == "__main__":
    main()
