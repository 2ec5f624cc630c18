"""What the rows of a bench add up to: figures, without a word on how sure they are (see `raytune_eagle.statistics`).

Rows with a negative `repeat` (the warm-up and the fillers) count nowhere; rows that failed, as time alone (`charged`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from raytune_eagle.model import Value
from raytune_eagle.model.measurement import Request

Array = NDArray[np.float64]


class CategorySummary(Value):
    """Figures of the answers of one category at one concurrency; what failed is no part of them, as time neither.

    Attributes:
        output_throughput: tokens per second if every stream served this category at the speed seen here.
        accept_len: completion tokens / verify rounds; None without speculation.
    """

    category: str
    concurrency: int
    requests: int
    completion_tokens: int
    output_throughput: float
    accept_len: float | None


def counted(requests: Iterable[Request]) -> list[Request]:
    """The rows that were answered, and are of a pass (not the warm-up, not a filler); see `charged` for throughput."""
    return [row for row in requests if row.repeat >= 0 and row.error is None]


def charged(requests: Iterable[Request]) -> list[Request]:
    """The rows that a throughput is made of: those counted, and what failed of a pass as an answer without a token.

    A failed request held its stream, so its seconds count; and as many as a good answer to its prompt took, at the
    least, or a server that refuses its long prompts at once would be the faster for it.
    """
    rows = [row for row in requests if row.repeat >= 0]
    good = [row for row in rows if row.error is None]
    if len(good) == len(rows) or not good:
        return good
    seconds = defaultdict[str, list[float]](list)
    for row in good:
        seconds[row.prompt_id].append(row.latency_s)
    usual = fmean(row.latency_s for row in good)

    def charge(row: Request) -> Request:
        least = fmean(seconds[row.prompt_id]) if row.prompt_id in seconds else usual
        nothing = {"error": None, "completion_tokens": 0, "verify_rounds": None}
        return row.model_copy(update={**nothing, "latency_s": max(row.latency_s, least)})

    return [row if row.error is None else charge(row) for row in rows]


def by_category(requests: Iterable[Request]) -> tuple[CategorySummary, ...]:
    """Figures per concurrency and category, in that order."""
    groups: dict[tuple[int, str], list[Request]] = {}
    for row in counted(requests):
        groups.setdefault((row.concurrency, row.category), []).append(row)
    return tuple(_summary(groups[key]) for key in sorted(groups))


def _summary(rows: Sequence[Request]) -> CategorySummary:
    tokens = sum(row.completion_tokens for row in rows)
    seconds = sum(row.latency_s for row in rows)
    return CategorySummary(
        category=rows[0].category,
        concurrency=rows[0].concurrency,
        requests=len(rows),
        completion_tokens=tokens,
        output_throughput=rows[0].concurrency * tokens / seconds if seconds else 0.0,
        accept_len=accept_len(rows),
    )


def accept_len(rows: Iterable[Request]) -> float | None:
    """Completion tokens / verify rounds over the rows that tell their rounds; None where none does."""
    told = [(row.completion_tokens, row.verify_rounds) for row in rows if row.verify_rounds]
    return sum(tokens for tokens, _ in told) / sum(rounds for _, rounds in told) if told else None


def token_gaps(times: Sequence[float], counts: Sequence[int]) -> tuple[Array, Array]:
    """Time per token of each chunk after the first of one stream (unit of `times`), and how many tokens it brought.

    A chunk that brings 4 tokens after 40 ms is 4 tokens at 10 ms each: that is how fast the text is read off.
    """
    tokens = np.diff(np.asarray(counts, dtype=float))
    return np.diff(np.asarray(times, dtype=float)) / tokens, tokens


def weighted_percentile(values: Array, weights: Array, percents: Sequence[float]) -> Array:
    """Smallest values with at least so many percent of the weight at or below them; zeros without values."""
    if not len(values):
        return np.zeros(len(percents))
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    places = np.searchsorted(reached, np.asarray(percents) / 100 * reached[-1], side="left")
    return np.asarray(values[order][np.minimum(places, len(values) - 1)])


def best_second(times: Array, tokens: Array) -> float:
    """Most tokens that came within one second; `times` in seconds in any order, `tokens` as many."""
    if not len(times):
        return 0.0
    order = np.argsort(times, kind="stable")
    moments, sums = times[order], np.concatenate([[0.0], np.cumsum(tokens[order])])
    ends = np.searchsorted(moments, moments + 1.0, side="left")
    return float((sums[ends] - sums[: len(moments)]).max())
