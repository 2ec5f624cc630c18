"""Records as they would have been judged for another mix of prompts or other limits, without a launch.

Throughput of a mix is tokens / stream seconds with each category's requests weighted by its share, which is what a
server would give whose traffic is of that mix, as long as the categories do not slow each other down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from raytune_eagle.errors import SpecError
from raytune_eagle.figures import accept_len, charged
from raytune_eagle.model.measurement import Measurement, Request
from raytune_eagle.model.trial import Completed, TrialRecord
from raytune_eagle.outcomes import violations
from raytune_eagle.spec import Objective
from raytune_eagle.statistics import throughput


def parse_mix(text: str) -> dict[str, float]:
    """Shares of requests by category out of ``code=0.7,chat=0.3``; they add up to 1 afterwards.

    Raises:
        SpecError: a share is no number above 0, or a category comes twice.
    """
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().rpartition("=")
        if not name or name in shares or not _positive(share):
            raise SpecError(f"--mix: {part.strip()!r}: write categories with their shares, as in code=0.7,chat=0.3")
        shares[name] = float(share)
    whole = sum(shares.values())
    return {name: share / whole for name, share in shares.items()}


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def remixed(records: Sequence[TrialRecord], mix: Mapping[str, float]) -> list[TrialRecord]:
    """The same launches with throughput, accept_len, cycle_ms and speedup of this mix.

    Other figures (times to the first token and between tokens, best second) stay those of the mix that was measured.

    Raises:
        SpecError: a category was not measured, or a launch has no requests on record.
    """
    known = {request.category for record in records for request in record.outcome.requests}
    missing = sorted(set(mix) - known)
    if missing:
        raise SpecError(f"--mix: no prompts of {missing[0]!r} were measured; there are: {', '.join(sorted(known))}")
    measured = [_remixed(record, mix) for record in records]
    return [_beside(record, measured) for record in measured]


def _remixed(record: TrialRecord, mix: Mapping[str, float]) -> TrialRecord:
    outcome = record.outcome
    if not isinstance(outcome, Completed):
        return record
    requests = tuple(_weighted(outcome.requests, mix))
    figures = tuple(_figures(record, each, requests) for each in outcome.measurements)
    return record.model_copy(
        update={"outcome": outcome.model_copy(update={"measurements": figures, "requests": requests})}
    )


def _weighted(requests: Sequence[Request], mix: Mapping[str, float]) -> list[Request]:
    """Charged requests of the mix, their tokens, rounds and seconds times what their category weighs."""
    levels = {row.concurrency for row in requests}
    rows = [row for level in sorted(levels) for row in charged(r for r in requests if r.concurrency == level)]
    rows = [row for row in rows if row.category in mix]
    of = Counter((row.concurrency, row.category) for row in rows)
    whole = Counter(row.concurrency for row in rows)
    found = []
    for row in rows:
        weight = mix[row.category] * whole[row.concurrency] / of[row.concurrency, row.category]
        tokens, rounds = row.completion_tokens * weight, row.verify_rounds and row.verify_rounds * weight
        update = {"completion_tokens": tokens, "verify_rounds": rounds, "latency_s": row.latency_s * weight}
        found.append(row.model_copy(update=update))
    return found


def _figures(record: TrialRecord, old: Measurement, requests: Sequence[Request]) -> Measurement:
    rows = [row for row in requests if row.concurrency == old.concurrency]
    if not rows:
        raise SpecError(f"--mix: trial {record.number} has no requests of this mix on record")
    found, length = throughput(rows, old.concurrency), accept_len(rows)
    cycle = 1000 * old.concurrency * (length or 1.0) / found.value
    update = {"output_throughput": found.value, "ci_low": found.low, "ci_high": found.high}
    return old.model_copy(update={**update, "accept_len": length, "cycle_ms": cycle})


def _beside(record: TrialRecord, records: Sequence[TrialRecord]) -> TrialRecord:
    """With the speedup over its node's plain decoding, mean of the launches there."""
    plain: dict[int, list[float]] = {}
    for each in records:
        if each.kind == "baseline" and each.node == record.node and isinstance(each.outcome, Completed):
            for figures in each.outcome.measurements:
                plain.setdefault(figures.concurrency, []).append(figures.output_throughput)
    if record.kind == "baseline" or not isinstance(record.outcome, Completed):
        return record
    speedup = {
        m.concurrency: m.output_throughput * len(plain[m.concurrency]) / sum(plain[m.concurrency])
        for m in record.outcome.measurements
        if m.concurrency in plain
    }
    return record.model_copy(update={"speedup": speedup})


def limited(records: Sequence[TrialRecord], limits: Sequence[str]) -> list[TrialRecord]:
    """The same launches under these limits (``itl_p95_ms=40``) and no others.

    Raises:
        SpecError: a limit is not of the form NAME=NUMBER, or there is none of that name.
    """
    constraints: dict[str, float] = {}
    for limit in limits:
        name, _, value = limit.partition("=")
        known = ("ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms", "cycle_ms")
        if name not in known or not _positive(value):
            raise SpecError(f"--limit: {limit!r}: write NAME=NUMBER in ms, the name one of {', '.join(known)}")
        constraints[name] = float(value)
    objective = Objective.model_validate({"constraints": constraints})
    return [
        record.model_copy(update={"violations": violations(objective, record.outcome)})
        if isinstance(record.outcome, Completed)
        else record
        for record in records
    ]
