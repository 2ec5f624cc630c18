"""Records to rows and back, exactly: what `rows_of` writes, `record_of` rebuilds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from raytune_eagle.errors import StoreError
from raytune_eagle.model.config import FlagValue
from raytune_eagle.model.measurement import Gate, Measurement, Request
from raytune_eagle.model.trial import Completed, Event, Failed, Phases, TrialRecord
from raytune_eagle.schema import table_schema

Row = dict[str, Any]
_FAILURE = ("failure_class", "failure_phase", "failure_detail")
_NAMES = ("study", "number", "kind", "node", "key")
_REQUEST, _PHASES, _MEASUREMENT = (frozenset(each.model_fields) for each in (Request, Phases, Measurement))


def _microseconds(at: float) -> int:
    return round(at * 1e6)


def _cell(value: FlagValue, kind: str) -> FlagValue:
    """Value as its column holds it; what is no text in a text column is spelled as JSON."""
    if value is None or kind in {"int", "float", "bool"}:
        return value
    return value if isinstance(value, str) else json.dumps(value)


def _common(record: TrialRecord, parameters: Mapping[str, str]) -> Row:
    """Return what all rows of one trial share; empty texts that mean "unknown" become null."""
    outcome = record.outcome
    failure = outcome.model_dump(include={*_FAILURE, "log_tail"}) if isinstance(outcome, Failed) else {}
    return {
        **record.model_dump(include={"study", "number", "key", "kind", "node", "violations"}),
        **{name: _cell(record.params.get(name), kind) for name, kind in parameters.items()},
        **failure,
        **outcome.phases.model_dump(),
        "uid": record.config.uid,
        "status": record.status,
        "launch_command": record.config.command(),
        "env": record.config.env,
        "resolved_args": outcome.server.resolved_args,
        "sglang_version": outcome.server.version or None,
        "hardware": record.facts.hardware or None,
        "versions": record.facts.versions,
        "gpu_ids": record.facts.gpu_ids,
        "gates": [gate.line for gate in outcome.gates],
        "started_at": _microseconds(record.started_at),
        "ended_at": _microseconds(record.ended_at),
        "started_unix_s": record.started_at,
        "ended_unix_s": record.ended_at,
        "request_count": len(outcome.requests),
        "config_json": json.dumps(record.config.model_dump(), ensure_ascii=False),
        "params_json": json.dumps(record.params, ensure_ascii=False),
    }


def _figures(record: TrialRecord) -> list[Row]:
    """Return one row per concurrency; a comparison without a measurement gets a row too, so that none is lost."""
    measured = record.outcome.measurements if isinstance(record.outcome, Completed) else ()
    rows: list[Row] = [measurement.model_dump() for measurement in measured]
    others = {*record.speedup, *record.matches_baseline} - {measurement.concurrency for measurement in measured}
    rows += [{"concurrency": concurrency} for concurrency in sorted(others)]
    for row in rows:
        row["speedup"] = record.speedup.get(row["concurrency"])
        row["matches_baseline"] = record.matches_baseline.get(row["concurrency"])
    return rows or [{}]


def _table(rows: list[Row], schema: pa.Schema, what: str) -> pa.Table:
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except (pa.ArrowException, OverflowError) as error:
        raise StoreError(f"{what}: a value does not fit its column: {error}") from error


def trial_table(record: TrialRecord, parameters: Mapping[str, str]) -> pa.Table:
    """One trial as the rows of its file in trials/."""
    unknown = sorted(record.params.keys() - parameters.keys())
    if unknown:
        raise StoreError(f"trial {record.number} of {record.study!r}: {unknown[0]!r} is no parameter of this study")
    common = _common(record, parameters)
    rows = [common | row for row in _figures(record)]
    return _table(rows, table_schema("trials", parameters), f"trial {record.number} of {record.study!r}")


def requests_table(record: TrialRecord) -> pa.Table:
    """Return the requests of one trial, in order."""
    names = {"study": record.study, "trial": record.number}
    rows = [names | request.model_dump() for request in record.outcome.requests]
    return _table(rows, table_schema("requests"), f"requests of trial {record.number} of {record.study!r}")


def _values(row: Row, fields: Iterable[str]) -> Row:
    return {name: row[name] for name in fields}


def request_of(row: Row) -> Request:
    """Rebuild one request; a column that its file is too old to have holds the default."""
    known = {name: value for name, value in row.items() if value is not None and name in _REQUEST}
    return Request.model_validate(known)


def _outcome(rows: Sequence[Row], requests: Sequence[Request]) -> Row:
    first = rows[0]
    measured = first["status"] in {"completed", "infeasible", "hopeless"}
    shared = {
        "status": "completed" if measured else first["status"],
        "requests": tuple(requests),
        "gates": tuple(map(Gate.of, first["gates"])),
        "phases": _values(first, _PHASES),
        "server": {"resolved_args": first["resolved_args"], "version": first["sglang_version"] or ""},
    }
    if not measured:
        return {**shared, **_values(first, _FAILURE), "log_tail": first["log_tail"] or ""}
    figures = [row for row in rows if row["output_throughput"] is not None]
    return {**shared, "measurements": [_values(row, _MEASUREMENT) for row in figures]}


def record_of(rows: Sequence[Row], requests: Sequence[Request]) -> TrialRecord:
    """Rebuild the trial that `trial_table` wrote, but for its server log.

    Raises:
        ValueError: the rows are not those of a trial.
    """
    first = rows[0]
    return TrialRecord.model_validate(
        {
            **_values(first, _NAMES),
            "config": json.loads(first["config_json"]),
            "params": json.loads(first["params_json"]),
            "started_at": first["started_unix_s"],
            "ended_at": first["ended_unix_s"],
            "facts": {
                "hardware": first["hardware"] or "",
                "versions": dict(first["versions"]),
                "gpu_ids": first.get("gpu_ids") or (),
            },
            "violations": first["violations"],
            "outcome": _outcome(rows, requests),
            "speedup": {row["concurrency"]: row["speedup"] for row in rows if row["speedup"] is not None},
            "matches_baseline": {
                row["concurrency"]: row["matches_baseline"] for row in rows if row["matches_baseline"] is not None
            },
        }
    )


def events_table(events: Sequence[Event]) -> pa.Table:
    """Events in the order given."""
    # not "at": a word of SQL's own in DuckDB
    times = [{"happened_at": _microseconds(event.at), "happened_unix_s": event.at} for event in events]
    rows = [event.model_dump(exclude={"at"}) | time for event, time in zip(events, times, strict=True)]
    return _table(rows, table_schema("events"), "events")


def event_of(row: Row) -> Event:
    """Rebuild one event."""
    named = {name: row[name] for name in Event.model_fields if name != "at"}
    return Event.model_validate(named | {"at": row["happened_unix_s"]})
