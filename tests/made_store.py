"""Trials to keep in a Parquet store, and what to do to its files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.measurement import Measurement, Request
from raytune_eagle.model.trial import Completed, Failed, TrialRecord
from raytune_eagle.store import ParquetStore

PARAMETERS = {"num_steps": "int", "nccl_proto": "str", "fast": "bool", "share": "float", "tp_size": "mixed"}

PARAMS = {"num_steps": 3, "nccl_proto": None, "fast": True, "share": 1, "tp_size": [1, "a"]}

REQUEST = Request(concurrency=1, repeat=0, prompt_id="p", category="code", started_s=0.0, latency_s=1.0)

CONCURRENCY = (1, 4)


def measured(concurrency: int) -> Measurement:
    """Figures that differ by concurrency."""
    names = "output_throughput ci_low ci_high cycle_ms burst_throughput ttft_p50_ms ttft_p95_ms itl_p50_ms itl_p95_ms"
    figures = {name: 10.0 * concurrency + place for place, name in enumerate(names.split())}
    counts = {"passes": 2, "stable": True, "completion_tokens": 9, "verify_rounds": 3, "failed_share": 0.0}
    return Measurement(concurrency=concurrency, accept_len=3.0, accept_rate=0.5, **figures, **counts)


def record(number: int = 0, study: str = "x", **changes: object) -> TrialRecord:
    """A completed trial with two concurrencies, a request and a log."""
    outcome = Completed(
        measurements=tuple(measured(c) for c in CONCURRENCY), requests=(REQUEST,), server_log=gzip.compress(b"log")
    )
    fields = {
        "study": study,
        "number": number,
        "kind": "trial",
        "node": "n1",
        "config": Config(
            model="m",
            speculative=Speculative(draft="d", num_steps=3, eagle_topk=4, num_draft_tokens=12),
            env={"NCCL_PROTO": "LL"},
        ),
        "key": "k",
        "params": PARAMS,
        "started_at": 1_700_000_000.125,
        "ended_at": 1_700_000_060.5,
        "facts": {"hardware": "8x H200", "versions": {"sglang": "0.5.20"}},
        "outcome": outcome,
        "speedup": {1: 1.5, 4: 1.25},
    }
    return TrialRecord.model_validate(fields | changes)


FAILURE = Failed(failure_class="oom", failure_phase="launch", failure_detail="no memory")

BASELINE = {"kind": "baseline", "params": {}, "config": Config(model="m"), "outcome": FAILURE, "speedup": {}}


def keep_two_studies() -> Path:
    """Studies x (three trials, the first a failed baseline) and y (other parameters) under ./results."""
    store = ParquetStore("results", fs.LocalFileSystem())  # as files, but nothing waits for the disk
    store.declare("x", PARAMETERS)
    store.append(record(0, **BASELINE))
    store.append(record(1))
    store.append(record(2))
    store.declare("y", {"eagle_topk": "int"})
    store.append(record(0, "y", params={"eagle_topk": 4}))
    return Path("results")


def trial_files(results: Path, study: str = "x") -> list[Path]:
    """Visible files of trials/."""
    return sorted((results / f"study={study}" / "trials").glob("*.parquet"))


def doctored(path: Path, table: pa.Table, **metadata: str | None) -> None:
    """Write a table over `path` with its metadata changed."""
    kept = dict(table.schema.metadata or {}) | {f"raytune_eagle.{key}".encode(): v for key, v in metadata.items()}
    pq.write_table(table.replace_schema_metadata({key: v for key, v in kept.items() if v is not None}), path)
