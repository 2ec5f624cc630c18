"""How many launches each way to search needs to come within 2 % of the optimum, on truths drawn by seed.

    python benchmarks/search.py --quick                      # under a minute, a look
    python benchmarks/search.py --surfaces 30 --jobs 64      # the table of docs/search.md

Needs numpy, scipy and optuna; torch for Optuna's GP, ray[tune] for Ray's OptunaSearch (what is missing is named). Every
run is appended to --out as one line, and a second call goes on from there. The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # processes side by side: threads of their own would only get in the way

import numpy as np
import optuna

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from surfaces import NAMES, NCCL, SETTINGS, SHAPES, STEPS, TOKENS, TOPK, Launched, surface

from raytune_eagle.samplers.candidates import Candidates
from raytune_eagle.samplers.one_at_a_time import OneAtATimeSampler
from raytune_eagle.samplers.two_factor import TwoFactorSampler

CAP = 300
WITHIN = 0.98
FREE = 20
"""Proposals in a row of points launched before that cost nothing: they are told what is known already."""
NODES = 16
_SHAPE = {tuple(shape): place for place, shape in enumerate(SHAPES)}
_SETTING = {tuple(setting.values()): place for place, setting in enumerate(SETTINGS)}


class Task(NamedTuple):
    """One search of one surface."""

    method: str
    kind: str
    nodes: int
    seed: int
    cap: int = CAP


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


METHODS: dict[str, Callable[[int], tuple[Ask, Tell]]] = {
    "random": lambda seed: _optuna(optuna.samplers.RandomSampler(seed=seed), conditional),
    "grid": lambda _: _grid(),
    "one-at-a-time": lambda seed: _optuna(OneAtATimeSampler(_START, seed=seed), conditional),
    "tpe conditional": lambda seed: _optuna(_tpe(seed, group=True), conditional),
    "tpe flat": lambda seed: _optuna(_tpe(seed, group=False), flat),
    "gp conditional": lambda seed: _optuna(optuna.samplers.GPSampler(seed=seed), conditional),
    "gp flat": lambda seed: _optuna(optuna.samplers.GPSampler(seed=seed), flat),
    "ray optunasearch": _ray,
    "two-factor": lambda seed: _optuna(TwoFactorSampler(candidates(), seed=seed), conditional),
}
NEEDS = {"gp conditional": ("torch",), "gp flat": ("torch",), "ray optunasearch": ("ray", "pandas", "pyarrow")}


def missing() -> dict[str, str]:
    """Methods that cannot run here, and what they would need."""
    found = {name: [need for need in needs if find_spec(need) is None] for name, needs in NEEDS.items()}
    return {name: ", ".join(lacks) for name, lacks in found.items() if lacks}


# ------------------------------------------------------------------------------------------------------------- searches
class Search:
    """Launches on one surface until it is within reach of the optimum."""

    def __init__(self, task: Task) -> None:
        self._truth = surface(task.seed, task.kind)
        self._ask, self._tell = METHODS[task.method](task.seed)
        self._rng = np.random.default_rng([task.seed, 17])
        self._known: dict[tuple[int, int], Launched] = {}
        self._best: tuple[float, float] = (0.0, 0.0)
        self.launches = 0

    def round(self, nodes: int) -> bool:
        """Launch on every node at once; say whether the best found is within reach of the optimum."""
        under_way: dict[tuple[int, int], list[object]] = {}
        for _ in range(nodes):
            self._propose(under_way)
        for (shape, setting), handles in under_way.items():
            launched = self._truth.launch(shape, setting, self._rng)
            self._known[shape, setting] = launched
            self._best = max(self._best, (launched.speed or 0.0, float(self._truth.speed[shape, setting])))
            for handle in handles:
                self._tell(handle, shape, setting, launched)
        self.launches += nodes
        return self._best[1] >= WITHIN * float(self._truth.speed.max())

    def _propose(self, under_way: dict[tuple[int, int], list[object]]) -> None:
        """Put one more point under way; repeats are told what is known, and after many of them a node stays idle."""
        for _ in range(FREE):
            handle, shape, setting = self._ask()
            if (shape, setting) in self._known:
                self._tell(handle, shape, setting, self._known[shape, setting])
            elif (shape, setting) in under_way:
                under_way[shape, setting].append(handle)
            else:
                under_way[shape, setting] = [handle]
                return


def run(task: Task) -> dict[str, object]:
    """Search until within reach or at the cap; a search that never gets there counts as the cap."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    began, search = time.process_time(), Search(task)
    rounds = 0
    reached = False
    while not reached and rounds * task.nodes < task.cap:
        reached = search.round(task.nodes)
        rounds += 1
    most = -(-task.cap // task.nodes)
    spent = {"launches": search.launches if reached else task.cap, "rounds": rounds if reached else most}
    return {**task._asdict(), **spent, "reached": reached, "cpu_s": round(time.process_time() - began, 2)}


# --------------------------------------------------------------------------------------------------------------- replay
def replay(path: Path, seeds: int) -> dict[str, list[float]]:
    """Mean regret after 2 and 3 launches over SpecBundle's groups of five: 1 - best found / best of the group."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["draft"] != "baseline":
                groups.setdefault((line["model"], line["benchmark"], line["draft"]), []).append(line)
    makers: dict[str, Callable[[int, list[dict[str, int]]], optuna.samplers.BaseSampler]] = {
        "random": lambda seed, _: optuna.samplers.RandomSampler(seed=seed),
        "tpe": lambda seed, _: optuna.samplers.TPESampler(seed=seed, n_startup_trials=2),
        "two-factor": lambda seed, points: TwoFactorSampler(Candidates([(points, [{}])]), seed=seed),
    }
    found: dict[str, list[float]] = {}
    for name, make in makers.items():
        regrets = [_replay_one(make, group, seed) for group in groups.values() for seed in range(seeds)]
        found[name] = [float(value) for value in np.mean(regrets, axis=0)]
    return found


def _replay_one(
    make: Callable[..., optuna.samplers.BaseSampler], group: list[dict[str, str]], seed: int
) -> list[float]:
    order = np.random.default_rng(seed).permutation(len(group))
    names = {"num_steps": "steps", "eagle_topk": "topk", "num_draft_tokens": "num_draft_tokens"}
    points = [{ours: int(group[place][theirs]) for ours, theirs in names.items()} for place in order]
    speeds = [float(group[place]["output_throughput"]) for place in order]
    study = optuna.create_study(direction="maximize", sampler=make(seed, points))
    best, launched = [], dict[int, float]()
    while len(best) < 3:
        trial = study.ask()
        if isinstance(study.sampler, TwoFactorSampler):
            point = {name: trial.suggest_categorical(name, sorted({p[name] for p in points})) for name in names}
            place = points.index(point)
        else:
            place = trial.suggest_categorical("launch", list(range(len(points))))
        if place in launched:
            study.tell(trial, launched[place])
            continue
        launched[place] = speeds[place]
        accept, streams = float(group[order[place]]["accept_length"]), int(group[order[place]]["batch_size"])
        trial.set_user_attr("figures", [{"accept_len": accept, "cycle_ms": 1000 * streams * accept / speeds[place]}])
        study.tell(trial, speeds[place])
        best.append(1 - max(launched.values()) / max(speeds))
    return best[1:]


# ---------------------------------------------------------------------------------------------------------------- table
KINDS = (("plain", 1), ("plain", NODES), ("misspecified", 1), ("failing", 1))
"""Surfaces and nodes of the table."""


def tasks(methods: list[str], surfaces: int, cap: int, settings: Sequence[tuple[str, int]] = KINDS) -> list[Task]:
    """Every search of the table, long ones first."""
    found = [Task(m, kind, nodes, seed, cap) for kind, nodes in settings for m in methods for seed in range(surfaces)]
    return sorted(found, key=lambda task: (not task.method.startswith("gp"), task.seed))


def results(todo: list[Task], out: Path, jobs: int) -> list[dict[str, object]]:
    """All results, those of earlier calls included; each is kept as soon as it is there."""
    known = {}
    if out.exists():
        for line in out.read_text().splitlines():
            row = json.loads(line)
            known[Task(*(row[name] for name in Task._fields))] = row
    fresh = [task for task in todo if task not in known]
    print(f"{len(todo)} searches, {len(todo) - len(fresh)} known from {out}, {jobs} at a time", flush=True)
    with ProcessPoolExecutor(jobs) as pool, out.open("a") as file:
        for future in as_completed([pool.submit(run, task) for task in fresh]):
            row = future.result()
            known[Task(*(row[name] for name in Task._fields))] = row  # type: ignore[misc]
            file.write(json.dumps(row) + "\n")
            file.flush()
    return [known[task] for task in todo]


Rows = list[dict[str, object]]


def encodings(method: str) -> list[str]:
    """An Optuna sampler was run with several."""
    return [name for name in METHODS if name == method or name in {f"{method} conditional", f"{method} flat"}]


def ratio(rows: Rows, method: str, others: Sequence[str], kind: str, nodes: int) -> tuple[float, int]:
    """Median rounds of a method over those of the best other, and on how many surfaces that all of them have."""
    found: dict[str, dict[object, float]] = {}
    for row in rows:
        if (row["kind"], row["nodes"]) == (kind, nodes):
            found.setdefault(str(row["method"]), {})[row["seed"]] = float(str(row["rounds"]))
    names = [name for other in others for name in encodings(other) if name in found]
    if method not in found or not names:
        return float("nan"), 0
    seeds = set.intersection(*(set(found[name]) for name in [method, *names]))
    medians = {name: np.median([found[name][seed] for seed in seeds]) for name in [method, *names]}
    return float(medians[method] / min(medians[name] for name in names)), len(seeds)


def table(rows: Rows) -> Iterator[str]:
    """A line for each kind and method."""
    yield f"{'surfaces':14} {'nodes':>5}  {'method':18} {'median':>7} {'90 %':>6} {'rounds':>7} {'never':>6} {'cpu':>6}"
    keys = dict.fromkeys((str(r["kind"]), int(str(r["nodes"])), str(r["method"])) for r in rows)
    for kind, nodes, method in sorted(keys, key=lambda key: (key[0] != "plain", *key[:2], list(METHODS).index(key[2]))):
        mine = [r for r in rows if (r["kind"], r["nodes"], r["method"]) == (kind, nodes, method)]
        launches = [float(str(r["launches"])) for r in mine]
        rounds, cpu = (np.median([float(str(r[name])) for r in mine]) for name in ("rounds", "cpu_s"))
        never = sum(not r["reached"] for r in mine)
        yield (
            f"{kind:14} {nodes:5d}  {method:18} {np.median(launches):7.1f} {np.percentile(launches, 90):6.0f} "
            f"{rounds:7.1f} {never:3d}/{len(mine):<3d} {cpu:6.1f}"
        )


def summary(rows: Rows, regrets: dict[str, list[float]]) -> dict[str, object]:
    """The figures that the page is about."""
    asked = {
        "vs_best_optuna": ("two-factor", ("tpe", "gp"), "plain", 1),
        "vs_best_optuna_16_nodes": ("two-factor", ("tpe", "gp"), "plain", NODES),
        "misspecified_vs_tpe": ("two-factor", ("tpe",), "misspecified", 1),
    }
    found = {name: ratio(rows, *which) for name, which in asked.items()}
    return {
        **{name: round(value, 3) for name, (value, _) in found.items()},
        "replay_regret_3": round(regrets["two-factor"][1], 4) if regrets else None,
        "surfaces": {name: count for name, (_, count) in found.items()},
    }


def main() -> None:
    """Run what is not known yet, print the table and the figures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--surfaces", type=int, default=30, help="seeds 0 to N-1 of each kind")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options.add_argument("--out", type=Path, default=Path("search-benchmark.jsonl"))
    options.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    kinds = ",".join(f"{kind}:{nodes}" for kind, nodes in KINDS)
    options.add_argument("--kinds", default=kinds, help="KIND:NODES, comma-separated")
    options.add_argument("--table", type=Path, help="SpecBundle CSV for the replay")
    options.add_argument("--quick", action="store_true", help="2 surfaces, 30 launches, no Optuna GP: a look")
    given = options.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    lacking = missing()
    for name, needs in lacking.items():
        print(f"NOT RUN: {name} (not installed: {needs})")
    methods = [name for name in given.methods.split(",") if name not in lacking]
    surfaces, cap = given.surfaces, CAP
    if given.quick:
        surfaces, cap, methods = 2, 30, [name for name in methods if not name.startswith("gp")]
        given.out = Path(os.devnull)
        print("NOT RUN: gp (left out by --quick); 30 launches at most, so the figures below are no result")
    print(f"seeds 0 to {surfaces - 1} of each kind; {len(SHAPES)} shapes x {len(SETTINGS)} settings")
    settings = [(kind, int(nodes)) for kind, _, nodes in (word.partition(":") for word in given.kinds.split(","))]
    rows = results(tasks(methods, surfaces, cap, settings), given.out, given.jobs)
    print(*table(rows), sep="\n")
    regrets = replay(given.table, 3 if given.quick else 10) if given.table else {}
    for name, (two, three) in regrets.items():
        print(f"SpecBundle replay {name:12} mean regret after 2 launches {two:.2%}, after 3 {three:.2%}")
    if not given.table:
        print("NOT RUN: SpecBundle replay (--table FILE.csv)")
    print(json.dumps(summary(rows, regrets)))


if __name__ == "__main__":
    main()
