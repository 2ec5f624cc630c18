"""Every column of the results with its type, unit and meaning: the one table that files, queries and README share.

A file says in its metadata which version of this table it follows (`VERSION_KEY`) and which searched parameters its
study has (`PARAMETERS_KEY`); nothing else in it is particular to this package.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pyarrow as pa

from raytune_eagle.errors import StoreError
from raytune_eagle.model.config import FlagValue

SCHEMA_VERSION = 4
VERSION_KEY = b"raytune_eagle.schema"
PARAMETERS_KEY = b"raytune_eagle.parameters"

TEXT, INT, REAL, FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()
TIME = pa.timestamp("us", tz="UTC")  # not ns: Spark reads no nanoseconds
TEXT_MAP = pa.map_(TEXT, TEXT)


class Column(NamedTuple):
    """One column; an empty unit means a name, a text or a plain number.

    `since` is the first schema version that has it: in older files it is null.
    """

    name: str
    type: pa.DataType
    unit: str
    meaning: str
    since: int = 1


_NAMES = (
    Column("study", TEXT, "", "name of the study"),
    Column("number", INT, "", "number of the launch in its study, from 0, over all kinds; with study: one trial"),
    Column("uid", TEXT, "", "12 hex digits of the configuration exactly as launched"),
    Column("key", TEXT, "", "12 hex digits of its canonical form; launches with one key are the same point"),
    Column("kind", TEXT, "", "baseline (plain decoding), trial, or confirm (both again, on held-out prompts)"),
    Column("node", TEXT, "", "machine that ran it"),
    Column(
        "status",
        TEXT,
        "",
        "completed; infeasible: measured, breaks a constraint; hopeless: ended early, see gates; failed; lost",
    ),
    Column("failure_class", TEXT, "", "what a failure was, one word; null when there was none"),
    Column("failure_phase", TEXT, "", "launch, gate or bench; null when there was no failure"),
    Column("failure_detail", TEXT, "", "one line for people on the failure"),
    Column("log_tail", TEXT, "", "last lines of the server's log of a failed trial; the whole is in logs/"),
)
_LAUNCH = (
    Column("launch_command", TEXT, "", "the launch as one line for a POSIX shell, host and port left out"),
    Column("env", TEXT_MAP, "", "environment of the launch beside the inherited one"),
    Column("resolved_args", TEXT, "", "JSON: the running server's own arguments, {} when it could not be asked"),
    Column("sglang_version", TEXT, "", "version that the running server gave; null when unknown"),
    Column("versions", TEXT_MAP, "", "versions of what the node has installed"),
    Column("hardware", TEXT, "", "one line on the machine; null when unknown"),
    Column("gpu_ids", pa.list_(TEXT), "", "UUIDs of its GPUs, sorted; empty without GPUs", 3),
    Column("launch_s", REAL, "s", "from the start of the process until its HTTP port answered; null: not reached"),
    Column("ready_s", REAL, "s", "from then until a generation succeeded; null: not reached"),
    Column("warmup_s", REAL, "s", "of the warm-up pass; null: not reached"),
    Column("bench_s", REAL, "s", "of the measured passes; null: not reached"),
    Column("teardown_s", REAL, "s", "until its processes were gone and the node was free; null: not reached"),
)
_FIGURES = (
    Column("concurrency", INT, "streams", "simultaneous streams; null when it failed before any figure"),
    Column(
        "output_throughput",
        REAL,
        "tokens/s",
        "output tokens per second over all streams together; failed requests are time without tokens",
    ),
    Column("ci_low", REAL, "tokens/s", "lower end of the 95 % interval of output_throughput"),
    Column("ci_high", REAL, "tokens/s", "upper end of the 95 % interval of output_throughput"),
    Column("stable", FLAG, "", "the interval came within the asked precision before the passes ran out"),
    Column("passes", INT, "passes", "measured passes over the prompts, the warm-up not counted"),
    Column(
        "accept_len", REAL, "tokens", "completion tokens / verify rounds, bonus token included; null: plain decoding"
    ),
    Column("accept_rate", REAL, "share", "accepted / proposed draft tokens; null: plain decoding"),
    Column("verify_rounds", INT, "rounds", "verify rounds of all requests; null: plain decoding"),
    Column("cycle_ms", REAL, "ms", "per verify round and stream; plain decoding: per token and stream"),
    Column("ttft_p50_ms", REAL, "ms", "median time to the first token"),
    Column("ttft_p95_ms", REAL, "ms", "95th percentile of the time to the first token"),
    Column("itl_p50_ms", REAL, "ms", "median time between tokens"),
    Column("itl_p95_ms", REAL, "ms", "95th percentile of the time between tokens"),
    Column("burst_throughput", REAL, "tokens/s", "tokens in the best one-second window"),
    Column("completion_tokens", INT, "tokens", "output tokens of all measured requests"),
    Column("failed_share", REAL, "share", "failed requests / all requests"),
    Column("speedup", REAL, "ratio", "output_throughput / that of the same node's baseline; null: not compared"),
    Column("matches_baseline", REAL, "share", "prompts whose text equals the baseline's; null: not compared"),
    Column("violations", pa.list_(TEXT), "", "constraints of the objective that it breaks; empty: none"),
    Column(
        "gates", pa.list_(TEXT), "", "checks of the server: 'passed NAME', 'warning NAME: why', 'failed …', 'unknown …'"
    ),
    Column("started_at", TIME, "UTC", "when the trial began"),
    Column("ended_at", TIME, "UTC", "when the trial was over"),
    Column("started_unix_s", REAL, "s", "started_at to its last bit, since 1970"),
    Column("ended_unix_s", REAL, "s", "ended_at to its last bit, since 1970"),
    Column("request_count", INT, "requests", "rows in requests/ of this trial, over all concurrencies"),
    Column("config_json", TEXT, "", "JSON: the whole configuration, to launch it again"),
    Column("params_json", TEXT, "", "JSON: the searched parameters with their exact types"),
)
_REQUESTS = (
    Column("study", TEXT, "", "name of the study"),
    Column("trial", INT, "", "number of the trial"),
    Column("concurrency", INT, "streams", "simultaneous streams"),
    Column("repeat", INT, "", "the pass, from 0; the warm-up is -1"),
    Column("prompt_id", TEXT, "", "the prompt"),
    Column("category", TEXT, "", "group of the prompt: code, chat, …"),
    Column("started_s", REAL, "s", "when it was sent, after the first request of its concurrency"),
    Column("latency_s", REAL, "s", "from sending to the last byte"),
    Column("ttft_s", REAL, "s", "to the first token; null when none came"),
    Column("itl_p50_ms", REAL, "ms", "median time between tokens"),
    Column("itl_p95_ms", REAL, "ms", "95th percentile of the time between tokens"),
    Column("prompt_tokens", INT, "tokens", "tokens of the prompt"),
    Column("completion_tokens", INT, "tokens", "tokens of the answer, by the server's count"),
    Column("least_tokens", INT, "tokens", "that came for sure: ids, or else chunks with text; null: not known", 4),
    Column("verify_rounds", INT, "rounds", "verify rounds; null: plain decoding"),
    Column("accept_histogram", pa.list_(INT), "rounds", "verify rounds that accepted 0, 1, 2, … draft tokens"),
    Column("output_hash", TEXT, "", "16 hex digits of the text; equal hashes are equal answers"),
    Column("prefix_hashes", pa.list_(TEXT), "", "of its first 16, 64, 256, 1024 characters, where it is longer", 2),
    Column("compression", REAL, "ratio", "bytes of the text / of its zlib; above 5: it repeats itself; null: short", 2),
    Column("error", TEXT, "", "why it failed, else null"),
)
_EVENTS = (
    Column("study", TEXT, "", "name of the study"),
    Column("happened_at", TIME, "UTC", "when it happened"),
    Column("happened_unix_s", REAL, "s", "happened_at to its last bit, since 1970"),
    Column("name", TEXT, "", "study_started, launch, ready, pass, trial_done, node_lost, …"),
    Column("node", TEXT, "", "machine; null: of the whole study"),
    Column("number", INT, "", "number of the trial; null: of no trial"),
    Column("detail", TEXT, "", "free text, or JSON for study_started (the spec)"),
)
_PROBES = (
    Column("study", TEXT, "", "name of the study"),
    Column("measured_unix_s", REAL, "s", "when it was measured, since 1970"),
    Column("node", TEXT, "", "machine"),
    Column("step", TEXT, "", "verify, draft or decode (plain decoding): the step whose all-reduce was timed"),
    Column("tokens", INT, "tokens", "tokens of that step's forward pass, over all streams"),
    Column("env", TEXT_MAP, "", "NCCL environment"),
    Column("ranks", INT, "GPUs", "GPUs that took part"),
    Column("backend", TEXT, "", "nccl, in CUDA graphs as SGLang decodes; or gloo, where there is no GPU"),
    Column("message_bytes", INT, "bytes", "size of the reduced tensor"),
    Column("samples", INT, "", "timed all-reduces"),
    Column("p50_us", REAL, "us", "median time of one all-reduce; null: failed"),
    Column("p95_us", REAL, "us", "95th percentile of that time; null: failed"),
    Column("chosen", TEXT, "", "algorithm, protocol and channels that NCCL says it took; null: it did not say"),
    Column("error", TEXT, "", "class of the failure (hang, nccl_invalid_usage, …) and reason, else null"),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "trials": (*_NAMES, *_LAUNCH, *_FIGURES),
    "requests": _REQUESTS,
    "events": _EVENTS,
    "probes": _PROBES,
}
RESERVED_COLUMNS = frozenset(column.name for column in TABLES["trials"])
"""Names that no searched parameter may have, whatever its case (SQL knows no case)."""

KINDS: dict[str, pa.DataType] = {"int": INT, "float": REAL, "bool": FLAG, "str": TEXT, "mixed": TEXT}
"""Kinds of searched parameters and the types of their columns."""


def parameter_kind(values: Iterable[FlagValue]) -> str:
    """Kind of a parameter that takes these values; None (left unset) says nothing, and alone is ``str``."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return "float"
    names = {bool: "bool", int: "int", float: "float", str: "str"}
    return "str" if not kinds else names.get(kinds.pop(), "mixed") if len(kinds) == 1 else "mixed"


def check_parameters(parameters: Mapping[str, str]) -> None:
    """Raise `StoreError` for a parameter that cannot be a column."""
    seen: set[str] = set()
    for name, kind in parameters.items():
        if name.lower() in RESERVED_COLUMNS or name.lower() in seen or not name:
            raise StoreError(f"parameter {name!r}: the results have a column of that name already")
        if kind not in KINDS:
            raise StoreError(f"parameter {name!r}: {kind!r} is not one of {', '.join(KINDS)}")
        seen.add(name.lower())


def table_schema(table: str, parameters: Mapping[str, str] | None = None) -> pa.Schema:
    """Arrow schema of a file of `table`; searched parameters stand after what names the trial."""
    fields = [pa.field(column.name, column.type) for column in TABLES[table]]
    metadata: dict[bytes | str, bytes | str] = {VERSION_KEY: str(SCHEMA_VERSION).encode()}
    if table == "trials":
        chosen = dict(parameters or {})
        fields[len(_NAMES) : len(_NAMES)] = [pa.field(name, KINDS[kind]) for name, kind in chosen.items()]
        metadata[PARAMETERS_KEY] = json.dumps(chosen).encode()
    return pa.schema(fields, metadata=metadata)


def file_problem(table: str, schema: pa.Schema, path: str) -> str | None:
    """Say why a file is foreign, None when it is ours.

    Raises:
        StoreError: it was written by a newer version of this package.
    """
    version = (schema.metadata or {}).get(VERSION_KEY)
    if version is None or not version.isdigit():
        return f"{path}: not written by raytune_eagle (no raytune_eagle.schema in its metadata)"
    if int(version) > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: written with results schema {int(version)}, this raytune_eagle reads up to {SCHEMA_VERSION}: "
            "upgrade raytune_eagle to read it"
        )
    names = set(schema.names)  # a new list at each look
    missing = [column.name for column in TABLES[table] if column.since <= int(version) and column.name not in names]
    return f"{path}: not a file of {table}: no column {missing[0]}" if missing else None


def file_parameters(schema: pa.Schema) -> dict[str, str]:
    """Searched parameters and their kinds, as a trials file keeps them."""
    return dict(json.loads((schema.metadata or {}).get(PARAMETERS_KEY, b"{}")))
