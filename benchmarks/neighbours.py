"""How much does a neighbour on the same machine shift a node's figures? An A/A run with the real CPU server.

Node A launches and measures one configuration again and again, in turn alone and beside node B, which launches,
measures and stops the same configuration all the while, as in a study with two local nodes. Each has its own half of
the cores, and they take turns (`raytune_eagle.nodes.turns`); with --free they do not, which shows what turns are for.
Printed: tokens per second of each launch of A, and the ratio of the medians, beside over alone. Last line: one JSON
object.

    python benchmarks/neighbours.py [--rounds 3] [--quick] [--free]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

from raytune_eagle import specfile
from raytune_eagle.cluster import make_engine
from raytune_eagle.engines.launch import Settings
from raytune_eagle.model.trial import Completed, Job
from raytune_eagle.model.workload import Workload
from raytune_eagle.nodes.local import LocalNode
from raytune_eagle.nodes.turns import FileTurns, FreeForAll
from raytune_eagle.space import Space
from raytune_eagle.workload import load_prompts

SPEC = Path(__file__).parent.parent / "search_spaces" / "tiny_cpu.yaml"


def nodes(folder: str, turns: FileTurns | FreeForAll) -> list[LocalNode]:
    """Two nodes with half of the cores each."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    settings = [Settings(work_dir=Path(folder), cores=tuple(part)) for part in (cores[:half], cores[half : 2 * half])]
    make = partial(make_engine, dict(zip("ab", settings, strict=True)), settings[0])
    return [LocalNode(name, make(name), lambda _: None, turns) for name in "ab"]


def throughput(node: LocalNode, job: Job) -> float:
    """Tokens per second of one launch."""
    outcome = node.submit(job).result()
    assert isinstance(outcome, Completed), outcome
    return outcome.measurements[0].output_throughput


def busy(node: LocalNode, job: Job, stop: threading.Event) -> None:
    """Launch again and again until told to stop; the last launch is waited for."""
    while not stop.is_set():
        with suppress(AssertionError):
            throughput(node, job)


def main() -> None:
    """Alternate alone and beside, print, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round over few prompts: a rough figure")
    parser.add_argument("--free", action="store_true", help="without turns")
    options = parser.parse_args()
    space = Space(specfile.load(SPEC))
    prompts = load_prompts(space.spec.workload.prompts)[: 6 if options.quick else None]
    workload = Workload(prompts=prompts, max_new_tokens=16 if options.quick else 32, ignore_eos=True, max_passes=2)
    job = Job(study="aa", number=0, kind="trial", config=space.starts[1].config, workload=workload)
    seen: dict[str, list[float]] = {"alone": [], "beside": []}
    with tempfile.TemporaryDirectory() as folder:
        a, b = nodes(folder, FreeForAll() if options.free else FileTurns(folder))
        for _ in range(1 if options.quick else options.rounds):
            seen["alone"].append(throughput(a, job))
            stop = threading.Event()
            neighbour = threading.Thread(target=busy, args=(b, job, stop))
            neighbour.start()
            seen["beside"].append(throughput(a, job))
            stop.set()
            neighbour.join()
            print({name: [round(one, 1) for one in figures] for name, figures in seen.items()}, flush=True)
    alone, beside = (statistics.median(seen[name]) for name in ("alone", "beside"))
    print(json.dumps({"beside_over_alone": round(beside / alone, 3), "launches": len(seen["alone"])}))


if __name__ == "__main__":
    main()
