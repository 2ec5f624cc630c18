"""Studies of any size for tests and benchmarks, kept through the real store: a cost model with a known winner.

Run as a program to make one by hand: ``python tests/made_results.py FOLDER TRIALS``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import sys

import pyarrow as pa
from pyarrow import fs

from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.measurement import Gate, Measurement, Request
from raytune_eagle.model.trial import Completed, Event, Failed, NodeFacts, Phases, ServerFacts, TrialRecord
from raytune_eagle.schema import table_schema
from raytune_eagle.store import ParquetStore
from raytune_eagle.store.files import open_files
from raytune_eagle.store.rows import _common, _figures, events_table

CATEGORIES = {"code": 1.25, "chat": 0.95, "arithmetic": 1.1, "summarising": 0.8}
"""How much faster than the mean each category is under speculation."""
WINNER = {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 16, "nccl_proto": "LL"}
"""The point that the cost model makes the fastest, at every concurrency."""
BEGUN = 1_795_900_000.0
"""When made studies begin, seconds since the epoch."""
FAILURES = (
    ("tree_too_small", "graph_capture", "more draft tokens than the tree has: selected index k out of range"),
    ("oom_graph_capture", "graph_capture", "no room for the CUDA graphs: CUDA out of memory"),
    ("nccl_timeout", "serving", "a collective never ended: Watchdog caught collective operation timeout"),
)


@dataclasses.dataclass(frozen=True)
class Made:
    """What to make.

    Attributes:
        requests: per trial, over all concurrencies; a multiple of passes × concurrencies.
        hostile: a text to put wherever a study holds free text.
        gain: of the winner over plain decoding.
    """

    study: str = "made"
    trials: int = 60
    nodes: int = 2
    concurrency: tuple[int, ...] = (1, 8)
    passes: int = 4
    requests: int = 64
    hostile: str = ""
    gain: float = 1.6
    seed: int = 0


def write(root: str, made: Made) -> list[TrialRecord]:
    """Keep the study under `root` and return its records (the requests of each go to the store only).

    Through pyarrow's file system nothing waits for the disk, which would be nine tenths of the time for thousands.
    """
    store, kept = ParquetStore(root, fs.LocalFileSystem()), []
    store.declare(made.study, {"num_steps": "int", "eagle_topk": "int", "num_draft_tokens": "int", "nccl_proto": "str"})
    events = [Event(at=BEGUN, study=made.study, name="study_started", detail=json.dumps(_spec(made)))]
    for record in _records(made):
        store.append(record)
        kept.append(record.model_copy(update={"outcome": record.outcome.model_copy(update={"requests": ()})}))
        events += _events(record)
    events.append(Event(at=events[-1].at + 1, study=made.study, name="study_done", detail=f"{made.trials} trials"))
    store.append_events(made.study, events)
    return kept


def write_compacted(root: str, made: Made) -> None:
    """As `write` and then `compact` would leave it, in a tenth of the time: for studies of thousands."""
    files, folder = open_files(root), f"study={made.study}"
    parameters = {"num_steps": "int", "eagle_topk": "int", "num_draft_tokens": "int", "nccl_proto": "str"}
    events = [Event(at=BEGUN, study=made.study, name="study_started", detail=json.dumps(_spec(made)))]
    trials, requests, number = [], [], 0
    for record in _records(made):
        common, names = _common(record, parameters), {"study": made.study, "trial": record.number}
        trials += [common | row for row in _figures(record)]
        requests += [names | vars(request) for request in record.outcome.requests]
        events += _events(record)
        number = record.number
    name = f"compact-00000-{number:05d}.parquet"
    schema = table_schema("trials", parameters)
    files.write_table(f"{folder}/trials", name, pa.Table.from_pylist(trials, schema=schema))
    files.write_table(f"{folder}/requests", name, pa.Table.from_pylist(requests, schema=table_schema("requests")))
    files.write_table(f"{folder}/events", "00000000000000000001-00000000.parquet", events_table(events))


def _spec(made: Made) -> dict[str, object]:
    return {
        "name": made.study,
        "engine": {"model": "/shared/kimi-k2.5-int4", "draft": ["/data/eagle3/epoch4"]},
        "node": {"gpus": 8, "cost_per_hour": 98.0},
        "workload": {"concurrency": list(made.concurrency), "max_passes": made.passes},
        "budget": {"trials": made.trials, "hours": 12},
    }


def _records(made: Made):
    rng = random.Random(made.seed)
    clocks = {f"node-{index}": BEGUN + index * 7 for index in range(made.nodes)}
    done, points, numbers = dict.fromkeys(clocks, 0), _points(made), itertools.count()
    baselines: dict[str, TrialRecord] = {}
    for point in points:
        node = min(clocks, key=clocks.get)
        if done[node] % 10 == 0:
            baselines[node] = _record(made, next(numbers), node, clocks, None, rng, None)
            yield baselines[node]
        done[node] += 1
        yield _record(made, next(numbers), node, clocks, point, rng, baselines[node])


def _points(made: Made):
    """`trials` points, some launched again when there are more trials than points; the winner is among the first."""
    grid = itertools.product(range(1, 11), (2, 4, 8), (4, 8, 16, 24, 32, 48), (None, "Simple", "LL"))
    points = [dict(zip(WINNER, values, strict=True)) for values in grid]
    chains = itertools.product(range(1, 11), (None, "Simple", "LL"))  # with topk 1 a tree is a chain
    points += [dict(zip(WINNER, (steps, 1, steps + 1, proto), strict=True)) for steps, proto in chains]
    random.Random(made.seed).shuffle(points)
    points.insert(min(7, made.trials // 2), points.pop(points.index(WINNER)))
    return itertools.islice(itertools.cycle(points), made.trials)


def goodness(point: dict) -> float:
    """1 for the winner, less for every other point: how near it comes to the winner's gain."""
    away = abs(point["num_steps"] - 5) / 6 + abs(math.log2(point["eagle_topk"]) - 2) / 4
    away += abs(math.log2(point["num_draft_tokens"]) - 4) / 4 + 0.25 * (point["nccl_proto"] != "LL")
    return math.exp(-0.8 * away)


def _config(made: Made, point: dict | None) -> Config:
    draft = made.hostile or "/data/eagle3/epoch4"
    chosen = point and Speculative(draft=draft, **{name: point[name] for name in list(WINNER)[:3]})
    env = {"NCCL_PROTO": point["nccl_proto"]} if point and point["nccl_proto"] else {}
    args = {"tp-size": 8, "trust-remote-code": True, "mem-fraction-static": 0.85}
    return Config(model="/shared/kimi-k2.5-int4", args=args, speculative=chosen, env=env)


def _record(made, number, node, clocks, point, rng, baseline) -> TrialRecord:
    begin, config = clocks[node], _config(made, point)
    failure = rng.choice(FAILURES) if point not in (None, WINNER) and rng.random() < 0.08 else None
    speed = 90.0 * (1 - 0.02 * int(node.split("-")[1])) * (1 if point is None else made.gain * goodness(point))
    outcome = _failed(made, failure, rng) if failure else _completed(made, speed, point, rng)
    clocks[node] += math.fsum(value or 0 for value in outcome.phases.model_dump().values()) + rng.uniform(2, 20)
    plain = {m.concurrency: m.output_throughput for m in baseline.outcome.measurements} if baseline else {}
    measured = () if failure else outcome.measurements
    return TrialRecord(
        study=made.study,
        number=number,
        kind="trial" if point else "baseline",
        node=node,
        config=config,
        key=config.uid,
        params=dict(point or {}),
        started_at=begin,
        ended_at=clocks[node],
        facts=NodeFacts(hardware="8x NVIDIA H200", versions={"sglang": "0.5.20", "nccl": "2.29.1"}),
        outcome=outcome,
        speedup={m.concurrency: m.output_throughput / plain[m.concurrency] for m in measured if plain},
        matches_baseline={m.concurrency: rng.choice([1.0, 1.0, 1.0, 0.984]) for m in measured if plain},
        violations=_violations(number, point) if measured else (),
    )


def _violations(number: int, point: dict | None) -> tuple[str, ...]:
    """One launch in 25 is past a limit."""
    broken = point not in (None, WINNER) and number % 25 == 12
    return ("itl_p95_ms 48 > 40 at concurrency 8",) if broken else ()


def _failed(made: Made, failure, rng) -> Failed:
    name, phase, detail = failure
    tail = f"[2026-11-29 01:02:03 TP0] {detail}\nRuntimeError: {made.hostile or detail}"
    return Failed(
        failure_class=name,
        failure_phase=phase,
        failure_detail=f"{detail} {made.hostile}".strip(),
        log_tail=tail,
        phases=Phases(launch_s=rng.uniform(100, 300)),
    )


def _completed(made: Made, speed: float, point: dict | None, rng) -> Completed:
    requests, measurements = [], []
    length = 1.0 if point is None else 1 + min(point["num_steps"], 5) * 0.35 * (0.7 + 0.3 * goodness(point))
    for concurrency in made.concurrency:
        total = speed * concurrency**0.8
        rows = _requests(made, total / concurrency, length if point else None, concurrency, rng)
        requests += rows
        seen = concurrency * sum(r.completion_tokens for r in rows) / sum(r.latency_s for r in rows)
        half = abs(rng.gauss(0.012, 0.004)) + 0.004
        measurements.append(_measurement(made, seen, half, concurrency, length if point else None))
    return Completed(
        measurements=tuple(measurements),
        requests=tuple(requests),
        gates=(
            Gate(name="draft_class", verdict="passed"),
            Gate(name="graphs", verdict="warning", detail=f"2 % of batches ran without graphs {made.hostile}".strip()),
        ),
        server=ServerFacts(resolved_args='{"tp_size": 8}', version="0.5.20"),
        phases=Phases(
            launch_s=rng.uniform(90, 240),
            ready_s=rng.uniform(1, 9),
            warmup_s=rng.uniform(3, 12),
            bench_s=rng.uniform(60, 200),
            teardown_s=rng.uniform(2, 9),
        ),
        server_log=b"" if made.trials > 500 else b"[2026-11-29 01:02:03] The server is fired up\n",
    )


def _requests(made: Made, stream_speed: float, length: float | None, concurrency: int, rng) -> list[Request]:
    prompts = made.requests // (made.passes * len(made.concurrency))
    names = list(CATEGORIES)
    rows = []
    for repeat, prompt in itertools.product(range(made.passes), range(prompts)):
        category = names[prompt % len(names)]
        faster = CATEGORIES[category] / (sum(CATEGORIES.values()) / len(CATEGORIES)) if length else 1.0
        seconds = 256 / (stream_speed * faster * math.exp(rng.gauss(0, 0.02)))
        rows.append(
            Request.model_construct(
                concurrency=concurrency,
                repeat=repeat,
                prompt_id=f"{made.hostile or 'p'}{prompt}",
                category=f"{category}{made.hostile}",
                started_s=repeat * seconds,
                latency_s=seconds,
                ttft_s=0.05,
                itl_p50_ms=9.0,
                itl_p95_ms=15.0,
                prompt_tokens=100,
                completion_tokens=256,
                verify_rounds=round(256 / length) if length else None,
                accept_histogram=(10, 20, 30) if length else (),
                output_hash=f"{prompt:016x}",
                error=None,
            )
        )
    return rows


def _measurement(made: Made, seen: float, half: float, concurrency: int, length: float | None) -> Measurement:
    return Measurement(
        concurrency=concurrency,
        passes=made.passes,
        output_throughput=seen,
        ci_low=seen * (1 - half),
        ci_high=seen * (1 + half),
        stable=half < 0.02,
        completion_tokens=256 * made.requests // len(made.concurrency),
        accept_len=length,
        accept_rate=None if length is None else (length - 1) / 5,
        verify_rounds=None if length is None else round(256 * made.requests / length),
        cycle_ms=1000 * concurrency * (length or 1.0) / seen,
        burst_throughput=seen * 1.15,
        ttft_p50_ms=48.0,
        ttft_p95_ms=90.0,
        itl_p50_ms=1000 * concurrency / seen,
        itl_p95_ms=1600 * concurrency / seen,
        failed_share=0.0,
    )


def _events(record: TrialRecord) -> list[Event]:
    names = {"study": record.study, "node": record.node, "number": record.number}
    phases = record.outcome.phases
    events = [Event(at=record.started_at, name="trial_started", detail=record.config.command(), **names)]
    if phases.ready_s is not None:
        events.append(Event(at=record.started_at + phases.launch_s, name="ready", detail="ready", **names))
    events.append(Event(at=record.ended_at, name="trial_done", detail=record.status, **names))
    return events


if __name__ == "__main__":
    write(sys.argv[1], Made(trials=int(sys.argv[2])))
