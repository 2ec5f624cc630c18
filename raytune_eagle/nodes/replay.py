"""Nodes that answer what was measured before: a published table, or the records of a study."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from raytune_eagle.errors import SpecError
from raytune_eagle.model.config import Config
from raytune_eagle.model.measurement import Measurement
from raytune_eagle.model.trial import Completed, Failed, Job, TrialRecord
from raytune_eagle.nodes.simulated import Answer

_COLUMNS = (
    "model",
    "benchmark",
    "batch_size",
    "steps",
    "topk",
    "num_draft_tokens",
    "draft",
    "output_throughput",
    "accept_length",
    "baseline_throughput",
)
_LAUNCH_S = 300.0
"""What a launch takes where the table does not say."""


class Row(NamedTuple):
    """One line of a table of SpecForge's SpecBundle form; throughput in tokens per second over all streams."""

    benchmark: str
    streams: int
    shape: tuple[int, int, int]
    throughput: float
    accept_len: float
    plain: float


def _not_recorded(detail: str) -> Answer:
    failure = Failed(failure_class="not_recorded", failure_phase="launch", failure_detail=f"simulated: {detail}")
    return Answer(failure, 1.0)


class TableNodes:
    """Answers from a CSV of one row per launch: the columns of `_COLUMNS`, others are passed over.

    Rows count whose model and draft are the spec's (whole, or its last part after a slash). Over several benchmarks
    the answer is what equally many tokens of each would give. The table knows no intervals, so none are made up.

    Args:
        path: the file.
        model, draft: of the spec; None where the study searches no speculation.
        benchmark: keep to this one.

    Raises:
        SpecError: the file cannot be read, or has no such rows.
    """

    def __init__(self, path: str, model: str, draft: str | None, benchmark: str = "") -> None:
        lines = [line for line in _lines(path) if _means(model, line["model"])]
        ours = [line for line in lines if draft is None or _means(draft, line["draft"])]
        ours = [line for line in ours if benchmark in {"", line["benchmark"]}]
        if not ours:
            raise SpecError(_nothing(path, model, draft, benchmark))
        self._path, self._rows = path, [_row(line) for line in ours]

    def __call__(self, _node: str, job: Job) -> Answer:
        """See `raytune_eagle.nodes.simulated.Response`."""
        shape, figures = _shape(job.config), []
        for streams in job.workload.concurrency:
            rows = [row for row in self._rows if row.streams == streams]
            chosen = {row.benchmark: row for row in rows if shape in {None, row.shape}}
            if set(chosen) != {row.benchmark for row in self._rows}:
                return _not_recorded(f"{self._path} has no launch {shape} at concurrency {streams}")
            figures.append(_measured(list(chosen.values()), streams, plain=shape is None))
        return Answer(Completed(measurements=tuple(figures), requests=()), _LAUNCH_S)


class RecordedNodes:
    """Answers from the records of a study: launches of equal settings, in turn where there are several."""

    def __init__(self, records: Iterable[TrialRecord]) -> None:
        self._known: dict[str, list[TrialRecord]] = {}
        self._asked: dict[str, int] = {}
        for record in records:
            self._known.setdefault(_settings(record.config), []).append(record)

    def __call__(self, _node: str, job: Job) -> Answer:
        """See `raytune_eagle.nodes.simulated.Response`."""
        settings = _settings(job.config)
        found = self._known.get(settings)
        if not found:
            return _not_recorded("the replayed study has no launch of these settings")
        turn = self._asked[settings] = self._asked.get(settings, -1) + 1
        record = found[turn % len(found)]
        return Answer(record.outcome, max(record.ended_at - record.started_at, 0.0))


def _lines(path: str) -> list[dict[str, str]]:
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise SpecError(f"{path}: no column {missing[0]!r}; a table to replay has {', '.join(_COLUMNS)}")
            return [line for line in reader if line["draft"] != "baseline"]
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise SpecError(f"{path}: {getattr(exc, 'strerror', None) or exc}") from exc


def _row(line: dict[str, str]) -> Row:
    try:
        shape = (int(line["steps"]), int(line["topk"]), int(line["num_draft_tokens"]))
        figures = [float(line[name]) for name in ("output_throughput", "accept_length", "baseline_throughput")]
        return Row(line["benchmark"], int(line["batch_size"]), shape, *figures)
    except (TypeError, ValueError) as exc:
        raise SpecError(f"table to replay: {exc} in {dict(line)}") from exc


def _means(written: str, name: str) -> bool:
    return written == name or written.rstrip("/").rsplit("/", 1)[-1] == name.rsplit("/", 1)[-1]


def _nothing(path: str, model: str, draft: str | None, benchmark: str) -> list[str]:
    known = sorted({(line["model"], line["draft"], line["benchmark"]) for line in _lines(path)})
    asked = ", ".join(part for part in (model, draft, benchmark) if part)
    return [f"{path}: no launch of {asked}; it has (engine.model, engine.draft, benchmark):", *map(_joined, known)]


def _joined(names: tuple[str, ...]) -> str:
    return "  " + ", ".join(names)


def _measured(rows: list[Row], streams: int, *, plain: bool) -> Measurement:
    """As many tokens of each benchmark: times add up, and so do verify rounds."""
    speed = len(rows) / sum(1 / (row.plain if plain else row.throughput) for row in rows)
    accept_len = None if plain else len(rows) / sum(1 / row.accept_len for row in rows)
    token_ms = 1000 * streams / speed
    return Measurement(
        concurrency=streams,
        passes=1,
        output_throughput=speed,
        ci_low=speed,
        ci_high=speed,
        stable=False,
        completion_tokens=0,
        accept_len=accept_len,
        accept_rate=None if accept_len is None else (accept_len - 1) / (rows[0].shape[2] - 1),
        verify_rounds=None,
        cycle_ms=token_ms * (accept_len or 1.0),
        burst_throughput=speed,
        ttft_p50_ms=0.0,
        ttft_p95_ms=0.0,
        itl_p50_ms=token_ms,
        itl_p95_ms=token_ms,
        failed_share=0.0,
    )


def _shape(config: Config) -> tuple[int, int, int] | None:
    chosen = config.speculative
    return None if chosen is None else (chosen.num_steps, chosen.eagle_topk, chosen.num_draft_tokens)


def _settings(config: Config) -> str:
    """What makes two launches alike: not where the interpreter, the model or its draft lie."""
    chosen = config.speculative
    draft = chosen and chosen.draft.rstrip("/").rsplit("/", 1)[-1]
    flags = {**config.args, **config.tuned_args}
    return json.dumps([draft, _shape(config), config.env, flags], sort_keys=True)
