"""What the driver costs: nodes kept busy, seconds per trial beside Ray Tune's, and whether that grows with the study.

Three parts, each by itself with ``--only``; the last line is JSON with one figure each:

* busy: 8 Ray nodes on this machine under stub servers at real speed (start 20 s, bench about 20 s). Share of the time
  from a node's first start to its last end that it spent on its trials' own phases; the rest is the driver's.
* driver_vs_ray_tune: seconds per trial that the driver of a study over 4 Ray nodes is at work (ask, dispatch, record,
  tell; all its threads), over those that `tune.Tuner` takes with OptunaSearch, random sampler, trivial trainable, 4
  at once; median of 5 alternating runs. What it takes with its trials, of some milliseconds each, is printed, too.
  Results are kept in memory (/dev/shm), here and below: a disk is as fast as its other users let it be.
* late_vs_early: processor seconds per trial around trial 2,000 over those around trial 60, nodes simulated, random
  sampler.

    python benchmarks/orchestration.py [--only busy] [--quick] [--nodes 8]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "fakes"), str(TESTS)]

import yaml  # noqa: E402
from made import completed, surface  # noqa: E402

from raytune_eagle import specfile  # noqa: E402
from raytune_eagle.cluster import local_ray_of  # noqa: E402
from raytune_eagle.model.measurement import Vitals  # noqa: E402
from raytune_eagle.model.trial import Job, NodeFacts, ServerFacts, TrialRecord  # noqa: E402
from raytune_eagle.model.workload import Prompt, Workload  # noqa: E402
from raytune_eagle.nodes import local_ray  # noqa: E402
from raytune_eagle.nodes.owner import Setup  # noqa: E402
from raytune_eagle.nodes.simulated import Answer, SimulatedFleet  # noqa: E402
from raytune_eagle.ports import Fleet, Pending, Progress  # noqa: E402
from raytune_eagle.space import Space  # noqa: E402
from raytune_eagle.store import ParquetStore  # noqa: E402
from raytune_eagle.study import Study  # noqa: E402

MEMORY = "/dev/shm"
START_S, ROUND_MS = 20.0, 75.0
"""4 prompts of 32 tokens, 3 passes, some 270 rounds."""
SPEC = """
name: s
engine: {model: builtin:tiny, draft: builtin:tiny}
node: {gpus: 0}
space:
  speculative: {num_steps: {int: [1, 10]}, eagle_topk: [1, 2, 4, 8], num_draft_tokens: {int: [2, 60]}}
  args: {mem-fraction-static: [0.5, 0.6, 0.7, 0.8]}
search: {sampler: random}
baseline: {every: 1000000}
confirm: {top: 0}
"""


class StubServer:
    """A server in this process: the tests' fake one, its HTTP alone."""

    headers: dict[str, str] = {}
    facts, launch_s, ready_s = ServerFacts(), START_S, 0.0

    def __init__(self, url: str) -> None:
        self.url = url

    def check(self) -> None:
        """It lives."""

    def vitals(self) -> Vitals:
        """Nobody can tell."""
        return Vitals()

    def log(self) -> bytes:
        """Nothing."""
        return b""


class StubEngine:
    """Waits as a start would, then answers at `round_ms` per verify round."""

    def __init__(self, start_s: float, round_ms: float, _name: str) -> None:
        self.start_s, self.round_ms = start_s, round_ms
        self.url = ""

    @contextmanager
    def serve(self, job: Job, progress: Progress) -> Iterator[StubServer]:
        """See `raytune_eagle.ports.Engine`."""
        time.sleep(self.start_s)
        progress("ready", job.study)
        yield StubServer(self.url or self._listen())

    def describe(self) -> NodeFacts:
        """Nothing to tell."""
        return NodeFacts(hardware="stub")

    def _listen(self) -> str:
        sys.path[:0] = [str(TESTS / "fakes")]
        import launch_server  # noqa: PLC0415 - found in the actor only after the line above

        launch_server.say = lambda _: None
        words = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "2"]
        arguments = launch_server.arguments([*words, "--speculative-eagle-topk", "8"])
        arguments.speculative_num_draft_tokens = 3
        launch_server.Handler.model = launch_server.Model(arguments, {"round_ms": self.round_ms}, None)
        server = ThreadingHTTPServer(("127.0.0.1", 0), launch_server.Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        return self.url


@cache
def space_of(trials: int) -> Space:
    """The space of SPEC with a budget; to judge its points takes seconds, and is no part of any figure."""
    return Space(specfile.parse(yaml.safe_load(SPEC) | {"budget": {"trials": trials}}))


def store_in(folder: str, space: Space) -> ParquetStore:
    """Results of a study, declared as `run` does."""
    store = ParquetStore(folder)
    store.declare(space.spec.name, {dimension.column: dimension.kind for dimension in space.dimensions})
    return store


def workload(prompts: int, tokens: int, passes: int) -> Workload:
    """So many prompts."""
    texts = tuple(Prompt(id=str(i), category="code", text=f"def f{i}(x):") for i in range(prompts))
    return Workload(prompts=texts, max_new_tokens=tokens, min_passes=passes, max_passes=passes)


@contextmanager
def ray_of(nodes: int) -> Iterator[str]:
    """Address of a Ray of so many nodes on this machine."""
    os.environ.update(local_ray.ENVIRONMENT)
    with local_ray_of(specfile.parse(yaml.safe_load(SPEC)), nodes) as (address, _):
        yield address


class Clocked:
    """A fleet, and the seconds in which its driver had nothing to do but wait for trials."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.idle_s = fleet, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fleet, name)

    def wait_any(self, pending: Collection[Pending], timeout_s: float) -> set[Pending]:
        """See `raytune_eagle.ports.Fleet`. What threads work meanwhile is not waiting."""
        began, worked = time.monotonic(), time.process_time()
        done = self.fleet.wait_any(pending, timeout_s)
        self.idle_s += max(0.0, time.monotonic() - began - (time.process_time() - worked))
        return done


def run_on_ray(
    place: tuple[str, int], trials: int, engine: partial[StubEngine], work: Workload
) -> tuple[list[TrialRecord], float]:
    """A study over the Ray at an address with so many nodes; its records, and the seconds that its driver worked."""
    from raytune_eagle.nodes.ray import RayFleet  # noqa: PLC0415 - after the environment of that Ray

    (address, nodes), space = place, space_of(trials)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        study = Study(space, work, store_in(folder, space))
        fleet = RayFleet(address, Setup(space.spec.name, engine), 0, study.note)
        try:
            while len(fleet.nodes()) < nodes:
                time.sleep(0.1)
            began, clocked = time.monotonic(), Clocked(fleet)
            study.run(clocked)
            worked = time.monotonic() - began - clocked.idle_s
        finally:
            fleet.close()
        return study.records, worked


def busy(nodes: int, each: int, faster: float = 1.0) -> float:
    """Share of their time that nodes spend on trials; of `faster` ones the driver's own time is a larger share."""
    engine = partial(StubEngine, START_S / faster, ROUND_MS / faster)
    with ray_of(nodes) as address:
        records, _ = run_on_ray((address, nodes), nodes * each, engine, workload(4, 32, 2))
    by_node: dict[str, list[TrialRecord]] = defaultdict(list)
    for record in records:
        by_node[record.node].append(record)
    worked = spent = 0.0
    for mine in by_node.values():
        spent += max(r.ended_at for r in mine) - min(r.started_at for r in mine)
        worked += sum(sum(filter(None, r.outcome.phases.model_dump().values())) for r in mine)
    print(f"busy: {len(records)} trials on {nodes} nodes, {worked:.1f} of {spent:.1f} node-seconds")
    return worked / spent


def ours(address: str, trials: int) -> tuple[float, float]:
    """Seconds per trial of a trivial study over the 4 nodes of a Ray: of its driver, and with the trials."""
    records, worked = run_on_ray((address, 4), trials, partial(StubEngine, 0.0, 0.001), workload(1, 1, 1))
    mine = [record for record in records if record.kind == "trial"]
    return worked / len(records), (max(r.ended_at for r in mine) - min(r.started_at for r in mine)) / len(mine)


def ray_tune(address: str, trials: int) -> float:
    """Seconds per trial of a trivial trainable under Ray Tune, there."""
    import optuna  # noqa: PLC0415 - of this part alone
    import ray  # noqa: PLC0415
    from ray import tune  # noqa: PLC0415
    from ray.tune.search import ConcurrencyLimiter  # noqa: PLC0415
    from ray.tune.search.optuna import OptunaSearch  # noqa: PLC0415

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        try:
            search = ConcurrencyLimiter(OptunaSearch(sampler=optuna.samplers.RandomSampler(0)), 4)
            config = tune.TuneConfig(metric="v", mode="max", search_alg=search, num_samples=trials)
            space = {"a": tune.randint(1, 11), "b": tune.choice([1, 2, 4, 8]), "c": tune.randint(2, 61)}
            trainable = tune.with_resources(lambda config: {"v": float(config["a"])}, {"cpu": 0.25})
            began = time.monotonic()
            tune.Tuner(
                trainable,
                tune_config=config,
                param_space=space,
                run_config=tune.RunConfig(storage_path=folder, verbose=0),
            ).fit()
            return (time.monotonic() - began) / trials
        finally:
            ray.shutdown()


def driver_vs_ray_tune(rounds: int, trials: int) -> float:
    """Ours over Ray Tune's, medians of alternating runs."""
    seen: dict[str, list[float]] = {"ours": [], "with its trials": [], "ray_tune": []}
    with ray_of(4) as address:
        for _ in range(rounds):
            driver, whole = ours(address, trials * 5)
            seen["ours"].append(driver)
            seen["with its trials"].append(whole)
            seen["ray_tune"].append(ray_tune(address, trials))
            print({name: [round(1000 * one, 1) for one in figures] for name, figures in seen.items()}, "ms", flush=True)
    return statistics.median(seen["ours"]) / statistics.median(seen["ray_tune"])


def late_vs_early(trials: int, window: int) -> float:
    """How the driver's own seconds per trial grow."""
    stamps: list[float] = []
    space = space_of(trials)

    def respond(_node: str, job: Job) -> Answer:
        stamps.append(time.process_time())
        return Answer(completed(surface(job.config) if job.config.speculative else 90.0), 40.0)

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        fleet = SimulatedFleet([f"n{i}" for i in range(8)], respond)
        Study(space, workload(3, 8, 2), store_in(folder, space)).run(fleet)
    steps = [b - a for a, b in pairwise(stamps)]
    # lower quartiles: what else the machine does only adds
    early, late = (statistics.quantiles(part)[0] for part in (steps[10 : 10 + window], steps[-window:]))
    print(f"late_vs_early: {1000 * early:.2f} ms of processor a trial at first, {1000 * late:.2f} ms at trial {trials}")
    return late / early


def main() -> None:
    """Run what was asked for; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["busy", "driver_vs_ray_tune", "late_vs_early"])
    parser.add_argument("--nodes", type=int, default=8, help="for busy")
    parser.add_argument("--quick", action="store_true", help="rough figures")
    asked = parser.parse_args()
    quick = asked.quick
    parts = {
        "late_vs_early": partial(late_vs_early, 500 if quick else 2000, 50 if quick else 100),
        "driver_vs_ray_tune": partial(driver_vs_ray_tune, 1 if quick else 5, 20 if quick else 40),
        "busy": partial(busy, 4, 2, 10.0) if quick else partial(busy, asked.nodes, 5),
    }
    print(json.dumps({name: round(part(), 4) for name, part in parts.items() if asked.only in (None, name)}))


if __name__ == "__main__":
    main()
