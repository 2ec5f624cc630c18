"""How many launches each way to search needs to come within 2 % of the optimum, on truths drawn by seed.

    python benchmarks/search.py --quick                      # under a minute, a look
    python benchmarks/search.py --surfaces 30 --jobs 64      # the table of docs/search.md
    python benchmarks/search.py --minutes 20 …               # as far as it comes in 20 minutes, important runs first

Needs numpy, scipy and optuna; torch for Optuna's GP, ray[tune] for Ray's OptunaSearch (what is missing is named). Every
run is appended to --out as one line, and a second call goes on from there. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # processes side by side: threads of their own would only get in the way

import numpy as np
import optuna

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import search_replay
from search_methods import METHODS, candidates, conditional, missing
from surfaces import SETTINGS, SHAPES, Launched, surface

__all__ = ["CAP", "METHODS", "Task", "candidates", "conditional", "run"]
CAP = 300
WITHIN = 0.98
FREE = 20
"""Proposals in a row of points launched before that cost nothing: they are told what is known already."""
NODES = 16
REPLAY = "replay"


class Task(NamedTuple):
    """One search of one surface; of kind `REPLAY` one replay of all groups."""

    method: str
    kind: str
    nodes: int
    seed: int
    cap: int = CAP


# ------------------------------------------------------------------------------------------------------------- searches
class Search:
    """Launches on one surface until it is within reach of the optimum."""

    def __init__(self, task: Task, until: float) -> None:
        self._truth, self._until = surface(task.seed, task.kind), until
        self._ask, self._tell = METHODS[task.method](task.seed, self._truth)
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
            if time.time() > self._until:
                raise TimeoutError
            handle, shape, setting = self._ask()
            if (shape, setting) in self._known:
                self._tell(handle, shape, setting, self._known[shape, setting])
            elif (shape, setting) in under_way:
                under_way[shape, setting].append(handle)
            else:
                under_way[shape, setting] = [handle]
                return


def run(task: Task, until: float = math.inf, table: Path | None = None) -> dict[str, object] | None:
    """Search until within reach or at the cap; a search that never gets there counts as the cap.

    Returns:
        What is kept of it: ``cut`` with the launches so far when the clock (`time.time`) passed `until` before its end,
        None when it had passed at the start.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    began = time.process_time()
    if time.time() > until:
        return None
    if task.kind == REPLAY:
        assert table is not None
        found: dict[str, object] = {"regrets": search_replay.regrets(table, task.method, task.seed)}
    else:
        found = _searched(task, until)
    return {**task._asdict(), **found, "cpu_s": round(time.process_time() - began, 2)}


def _searched(task: Task, until: float) -> dict[str, object]:
    search, rounds, reached = Search(task, until), 0, False
    while not reached and rounds * task.nodes < task.cap:
        try:
            reached = search.round(task.nodes)
        except TimeoutError:
            return {"launches": search.launches, "rounds": rounds, "reached": False, "cut": True}
        rounds += 1
    most = -(-task.cap // task.nodes)
    spent = {"launches": search.launches if reached else task.cap, "rounds": rounds if reached else most}
    return {**spent, "reached": reached}


# ---------------------------------------------------------------------------------------------------------------- table
KINDS = (("plain", 1), ("plain", NODES), ("misspecified", 1), ("failing", 1), (REPLAY, 1))
"""Surfaces and nodes of the table, the important ones first."""
_FIRST = ("two-factor", "two-factor probed", "tpe conditional", "tpe flat")
_GP = ("gp flat", "gp conditional")
_REST = ("random", "one-at-a-time", "grid", "ray optunasearch")
SLOW = (("failing", 1), ("misspecified", 1))
"""Where Optuna's GP takes by far the most time, and no figure of the last line needs it."""
REPLAYED = 10
"""Seeds of the replay."""


def tasks(methods: list[str], surfaces: int, cap: int, settings: Sequence[tuple[str, int]] = KINDS) -> list[Task]:
    """Every search of the table, the important ones first and within a kind by seed."""
    order = [(setting, _FIRST if setting in SLOW else _GP + _FIRST) for setting in settings]
    order += [(setting, _REST) for setting in settings]
    order += [(setting, _GP) for setting in SLOW if setting in settings]
    found = []
    for (kind, nodes), group in order:
        seeds = range(min(surfaces, REPLAYED) if kind == REPLAY else surfaces)
        mine = [m for m in group if m in methods and (kind != REPLAY or m in search_replay.SAMPLERS)]
        found += [
            Task(m, kind, nodes, seed, search_replay.MOST if kind == REPLAY else cap) for seed in seeds for m in mine
        ]
    return found


def known_rows(out: Path) -> dict[Task, dict[str, object]]:
    """Results of earlier calls."""
    lines = out.read_text().splitlines() if out.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {Task(*(row[name] for name in Task._fields)): row for row in rows}


def results(todo: list[Task], given: argparse.Namespace) -> list[dict[str, object]]:
    """All results, those of earlier calls included; each is kept as soon as it is there."""
    known = known_rows(given.out)
    fresh = [task for task in todo if task not in known or known[task].get("cut")]
    print(f"{len(todo)} searches, {len(todo) - len(fresh)} known from {given.out}, {given.jobs} at a time", flush=True)
    until = time.time() + 60 * given.minutes
    with ProcessPoolExecutor(given.jobs) as pool, given.out.open("a") as file:
        for future in as_completed([pool.submit(run, task, until, given.table) for task in fresh]):
            row = future.result()
            if row is not None:
                known[Task(*(row[name] for name in Task._fields))] = row  # type: ignore[misc]
                file.write(json.dumps(row) + "\n")
                file.flush()
    found = [known[task] for task in todo if task in known]
    if len(found) < len(todo):
        print(f"NOT RUN: {len(todo) - len(found)} of {len(todo)} searches, for which --minutes left no time")
    if any(row.get("cut") for row in found):
        print("Searches that --minutes cut short count as if the launches so far had been enough")
    return found


Rows = list[dict[str, object]]


def encodings(method: str) -> list[str]:
    """An Optuna sampler was run with several."""
    return [name for name in METHODS if name == method or name in {f"{method} conditional", f"{method} flat"}]


def ratio(rows: Rows, method: str, others: Sequence[str], kind: str, nodes: int) -> tuple[float, dict[str, int]]:
    """Median rounds of a method over those of the best other, and on how many surfaces each pair was compared.

    An encoding that was run on less than half of the surfaces does not count. Other searches that were cut short count
    as if the rounds so far had been enough; those of the method itself do not count.
    """
    found: dict[str, dict[object, float]] = {}
    for row in rows:
        if (row["kind"], row["nodes"]) == (kind, nodes) and not (row["method"] == method and row.get("cut")):
            found.setdefault(str(row["method"]), {})[row["seed"]] = float(str(row["rounds"]))
    mine = found.get(method, {})
    ratios, counts = [], {}
    for name in (name for other in others for name in encodings(other) if name in found):
        seeds = set(mine) & set(found[name])
        counts[name] = len(seeds)
        if seeds and 2 * len(seeds) >= len(mine):
            medians = [np.median([each[seed] for seed in seeds]) for each in (mine, found[name])]
            ratios.append(float(medians[0] / medians[1]))
    return max(ratios, default=math.nan), counts


def table(rows: Rows) -> Iterator[str]:
    """A line for each kind and method."""
    heads = f"{'median':>7} {'90 %':>6} {'rounds':>7} {'never':>6} {'cut':>4} {'cpu':>6}"
    yield f"{'surfaces':14} {'nodes':>5}  {'method':18} {heads}"
    keys = dict.fromkeys((str(r["kind"]), int(str(r["nodes"])), str(r["method"])) for r in rows)
    for kind, nodes, method in sorted(keys, key=lambda key: (key[0] != "plain", *key[:2], list(METHODS).index(key[2]))):
        mine = [r for r in rows if (r["kind"], r["nodes"], r["method"]) == (kind, nodes, method)]
        launches = [float(str(r["launches"])) for r in mine]
        rounds, cpu = (np.median([float(str(r[name])) for r in mine]) for name in ("rounds", "cpu_s"))
        cut = sum(bool(r.get("cut")) for r in mine)
        never = sum(not r["reached"] for r in mine) - cut
        yield (
            f"{kind:14} {nodes:5d}  {method:18} {np.median(launches):7.1f} {np.percentile(launches, 90):6.0f} "
            f"{rounds:7.1f} {never:3d}/{len(mine):<3d} {cut or '':>4} {cpu:6.1f}"
        )


def replayed(rows: Rows) -> dict[str, list[float]]:
    """Mean regrets after 1, 2 and 3 launches by method, over the seeds that were run."""
    found: dict[str, list[object]] = {}
    for row in rows:
        if row["kind"] == REPLAY:
            found.setdefault(str(row["method"]), []).append(row["regrets"])
    return {method: [float(value) for value in np.mean(all_, axis=0)] for method, all_ in found.items()}


def summary(rows: Rows) -> dict[str, object]:
    """The figures that the page is about."""
    asked = {
        "vs_best_optuna": ("two-factor", ("tpe", "gp"), "plain", 1),
        "vs_best_optuna_16_nodes": ("two-factor", ("tpe", "gp"), "plain", NODES),
        "misspecified_vs_tpe": ("two-factor", ("tpe",), "misspecified", 1),
        "probed_vs_best_optuna": ("two-factor probed", ("tpe", "gp"), "plain", 1),
    }
    searched = [row for row in rows if row["kind"] != REPLAY]
    found = {name: ratio(searched, *which) for name, which in asked.items()}
    regrets = replayed(rows).get("two-factor")
    return {
        **{name: None if math.isnan(value) else round(value, 3) for name, (value, _) in found.items()},
        "replay_regret_3": round(regrets[2], 4) if regrets else None,
        "surfaces": {name: counts for name, (_, counts) in found.items()},
        "seeds_replayed": sum(row["kind"] == REPLAY and row["method"] == "two-factor" for row in rows),
    }


def options() -> argparse.Namespace:
    """What was asked for."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--surfaces", type=int, default=30, help="seeds 0 to N-1 of each kind")
    found.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, of one thread each")
    found.add_argument("--minutes", type=float, default=math.inf, help="start nothing more and stop what runs then")
    found.add_argument("--out", type=Path, default=Path("search-benchmark.jsonl"))
    found.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    kinds = ",".join(f"{kind}:{nodes}" for kind, nodes in KINDS)
    found.add_argument("--kinds", default=kinds, help="KIND:NODES, comma-separated")
    found.add_argument("--table", type=Path, help="SpecBundle CSV for the replay")
    found.add_argument("--quick", action="store_true", help="2 surfaces, 30 launches, no Optuna GP: a look")
    return found.parse_args()


def main() -> None:
    """Run what is not known yet, print the table and the figures."""
    given = options()
    lacking = missing()
    for name, needs in lacking.items():
        print(f"NOT RUN: {name} (not installed: {needs})")
    methods = [name for name in given.methods.split(",") if name not in lacking]
    surfaces, cap = given.surfaces, CAP
    if given.quick:
        surfaces, cap, methods = 2, 30, [name for name in methods if not name.startswith("gp")]
        given.out = Path(os.devnull)
        print("NOT RUN: gp (left out by --quick); 30 launches at most, so the figures below are no result")
    if not given.table:
        print("NOT RUN: SpecBundle replay (--table FILE.csv)")
    print(f"seeds 0 to {surfaces - 1} of each kind; {len(SHAPES)} shapes x {len(SETTINGS)} settings")
    settings = [(kind, int(nodes)) for kind, _, nodes in (word.partition(":") for word in given.kinds.split(","))]
    settings = [(kind, nodes) for kind, nodes in settings if given.table or kind != REPLAY]
    rows = results(tasks(methods, surfaces, cap, settings), given)
    print(*table([row for row in rows if row["kind"] != REPLAY]), sep="\n")
    for name, (_, two, three) in replayed(rows).items():
        print(f"SpecBundle replay {name:12} mean regret after 2 launches {two:.2%}, after 3 {three:.2%}")
    print(json.dumps(summary(rows)))


if __name__ == "__main__":
    main()
