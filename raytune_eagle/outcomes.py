"""What a trial came to: the figure searched for, its constraints, and how it stands beside plain decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence

from raytune_eagle.model.measurement import Measurement
from raytune_eagle.model.trial import Best, Completed, Failed, ServerFacts, TrialRecord
from raytune_eagle.reference import Reference
from raytune_eagle.spec import Objective, Spec
from raytune_eagle.statistics import tabulate

_DRAFT_AT_ONCE = ("draft_class",)
_DRAFT_IN_THE_END = ("shape_mismatch", "accept_len")
_IN_THE_END = 3
"""Launches: a shape that does not fit may come from one tree, a draft that guesses nothing from one number of steps."""


def objective_value(objective: Objective, record: TrialRecord, reference: Reference) -> float | None:
    """The figure searched for, as an average node would give it: geometric mean over the concurrencies; None: none."""
    if not isinstance(record.outcome, Completed) or not record.outcome.measurements:
        return None
    figures = [
        getattr(m, objective.metric) * reference.factor(record.node, m.concurrency, record.started_at)
        for m in record.outcome.measurements
    ]
    if any(figure <= 0 for figure in figures):
        return None
    return math.exp(math.fsum(math.log(figure) for figure in figures) / len(figures))


class Leader:
    """The best launch that was searched and measured to its end, with its requests: what the others have to beat."""

    def __init__(self, objective: Objective, reference: Reference) -> None:
        self._objective, self._reference = objective, reference
        self._record: TrialRecord | None = None

    def add(self, record: TrialRecord) -> None:
        """Look at one more launch."""
        if record.kind != "trial" or record.status != "completed":
            return
        value, best = self._value(record), self._value(self._record) if self._record else None
        if value is not None and (best is None or value > best):
            self._record = record

    def _value(self, record: TrialRecord) -> float | None:
        return objective_value(self._objective, record, self._reference)

    def to_beat(self, node: str) -> tuple[Best, ...]:
        """Its figures as `node` would have given them, by concurrency; empty without one."""
        record = self._record
        if record is None or not isinstance(record.outcome, Completed):
            return ()
        return tuple(_best(record, figures, self._reference, node) for figures in record.outcome.measurements)


def _best(record: TrialRecord, figures: Measurement, reference: Reference, node: str) -> Best:
    level, when = figures.concurrency, record.started_at
    faster = reference.factor(record.node, level, when) / reference.factor(node, level, when)
    table = tabulate(row for row in record.outcome.requests if row.concurrency == level)
    return Best(
        concurrency=level,
        output_throughput=figures.output_throughput * faster,
        prompts=tuple(
            zip(table.prompts, table.tokens.sum(0).tolist(), (table.seconds.sum(0) / faster).tolist(), strict=True)
        ),
    )


def violations(objective: Objective, outcome: Completed) -> tuple[str, ...]:
    """Constraints that a measured trial breaks, one line each."""
    return tuple(
        f"{name} {getattr(m, name):.4g} > {limit:g} at concurrency {m.concurrency}"
        for m in outcome.measurements
        for name, limit in objective.constraints.items()
        if getattr(m, name) > limit
    )


def violation(objective: Objective, record: TrialRecord) -> float:
    """How far the worst constraint is broken, as a share of its limit; 0 or less is feasible."""
    if not isinstance(record.outcome, Completed) or not objective.constraints:
        return 0.0
    shares = [
        getattr(m, name) / limit - 1
        for m in record.outcome.measurements
        for name, limit in objective.constraints.items()
    ]
    return max(shares, default=0.0)


def speedup(outcome: Completed | Failed, baseline: Completed | None) -> dict[int, float]:
    """Throughput over that of plain decoding, by concurrency."""
    if baseline is None or not isinstance(outcome, Completed):
        return {}
    plain = {m.concurrency: m.output_throughput for m in baseline.measurements}
    ours = {m.concurrency: m.output_throughput for m in outcome.measurements}
    return {concurrency: ours[concurrency] / plain[concurrency] for concurrency in ours.keys() & plain.keys()}


def same_text(outcome: Completed | Failed, baseline: Completed | None) -> dict[int, float]:
    """Share of prompts whose text equals the baseline's, by concurrency; greedy decoding only."""
    if baseline is None or not isinstance(outcome, Completed):
        return {}
    ours, plain = _texts(outcome), _texts(baseline)
    shares: dict[int, list[bool]] = {}
    for (concurrency, prompt), text in ours.items():
        if (concurrency, prompt) in plain:
            shares.setdefault(concurrency, []).append(text == plain[concurrency, prompt])
    return {concurrency: sum(equal) / len(equal) for concurrency, equal in shares.items()}


def brief(record: TrialRecord) -> TrialRecord:
    """Without requests, log and the server's arguments: thousands of launches would fill the memory."""
    left_out = {"requests": (), "server_log": b"", "server": ServerFacts(version=record.outcome.server.version)}
    return record.model_copy(update={"outcome": record.outcome.model_copy(update=left_out)})


def _texts(outcome: Completed) -> dict[tuple[int, str], str]:
    """Hash of the first measured answer to each prompt."""
    texts: dict[tuple[int, str], str] = {}
    for request in outcome.requests:
        if request.repeat >= 0 and request.output_hash is not None:
            texts.setdefault((request.concurrency, request.prompt_id), request.output_hash)
    return texts


def hopeless(spec: Spec, records: Sequence[TrialRecord]) -> str | None:
    """Why, after the last of these launches, no other of the study can succeed; None while one may.

    Plain decoding itself failed, and nowhere came to figures; once more where it had been ready (a server may be killed
    by anything). Or the only draft is at fault, and no launch with it has succeeded: at once where
    it is no EAGLE-3 draft, after three launches where a configuration might be to blame as well.
    """
    last = records[-1]
    if not isinstance(last.outcome, Failed) or last.status == "lost":
        return None
    name, detail = last.outcome.failure_class, last.outcome.failure_detail
    if last.kind == "baseline":
        plains = [record.outcome for record in records if record.kind == "baseline"]
        first = len(plains) == 1 and last.outcome.failure_phase == "bench"
        if first or any(outcome.status == "completed" for outcome in plains):
            return None
        return f"plain decoding itself fails with these engine settings: {name}: {detail}"
    drafted = [record for record in records if record.config.speculative]
    if last not in drafted or len(spec.engine.draft) > 1 or any(r.outcome.status == "completed" for r in drafted):
        return None
    count = sum(isinstance(r.outcome, Failed) and r.outcome.failure_class == name for r in drafted)
    if name in _DRAFT_AT_ONCE or (name in _DRAFT_IN_THE_END and count >= _IN_THE_END):
        return f"engine.draft: no launch with it succeeds ({count} failed, {name}): {detail}"
    return None


def in_words(record: TrialRecord) -> str:
    """One line for people."""
    outcome = record.outcome
    if isinstance(outcome, Failed):
        return f"{outcome.status}: {outcome.failure_class}: {outcome.failure_detail}"
    several = len(outcome.measurements) > 1
    return ", ".join(
        f"{m.output_throughput:.1f} tok/s" + (f" at {m.concurrency}" if several else "") for m in outcome.measurements
    )
