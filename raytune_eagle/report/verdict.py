"""Which launch is fastest, and how sure that is.

Intervals are of 95 %. Where the end of a study was confirmed, the verdict is from those launches alone: they were
chosen before they ran, alternated with plain decoding on the same nodes, and got prompts that the search never saw.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from raytune_eagle.model.measurement import Measurement, Request
from raytune_eagle.model.trial import Failed, TrialRecord
from raytune_eagle.ranking import (
    Row,
    confirmed,
    confirming,
    leaderboard,
    measurement,
    names_of,
    pooled,
)
from raytune_eagle.report.noise import between_launches
from raytune_eagle.statistics import Interval, LaunchNoise, compare_launches


class Sides(NamedTuple):
    """What a verdict is about, at one concurrency.

    Attributes:
        best: the fastest that was searched; the fastest with speculation where there is any.
        plain: plain decoding as configured, None when it has no figures.
        same: plain decoding under the settings of `best`, where they are others and it was measured.
        over_plain, over_same: throughput of `best` over theirs; None where no node measured both.
        confirmed: whether all of it comes from confirmations.
    """

    best: Row
    plain: Row | None
    same: Row | None
    over_plain: Interval | None
    over_same: Interval | None
    confirmed: bool


def ratio(tuned: Sequence[TrialRecord], plain: Sequence[TrialRecord], concurrency: int, noise: LaunchNoise) -> Interval:
    """Throughput of `tuned` over `plain`, launches of one node: by prompt where requests are kept, else by intervals.

    By prompt is sharper: a prompt that is long for both sides cancels. `noise` is what launches differ by, which no
    pass within a launch shows.
    """
    found = _by_prompt(tuned, plain, concurrency)
    if found is None:
        found = ratio_of_intervals(*(pooled(_figures(side, concurrency)) for side in (tuned, plain)))
    return widened(found, noise.half_width(len(tuned), len(plain)))


def _by_prompt(tuned: Sequence[TrialRecord], plain: Sequence[TrialRecord], concurrency: int) -> Interval | None:
    try:
        found = compare_launches(_requests(tuned, concurrency), _requests(plain, concurrency))
    except ValueError:  # no requests kept, or no prompt in common
        return None
    # With a single pass on a side nothing is known this way, and the launches' own intervals know more.
    return Interval(found.value, found.low, found.high) if found.low else None


def ratio_of_intervals(one: Interval, other: Interval) -> Interval:
    """Quotient of two independent figures, their errors added in squares on the log scale."""
    value = one.value / other.value
    below = math.hypot(_log(one.value, one.low), _log(other.high, other.value))
    above = math.hypot(_log(one.high, one.value), _log(other.value, other.low))
    return _interval(value, below, above)


def widened(found: Interval, half: float) -> Interval:
    """With `half` added in squares to either side of its logarithm: what launches differ by, say."""
    below, above = _log(found.value, found.low), _log(found.high, found.value)
    return _interval(found.value, math.hypot(below, half), math.hypot(above, half))


def _interval(value: float, below: float, above: float) -> Interval:
    return Interval(value, value * math.exp(-below), value * math.exp(min(above, 700.0)))


def speed(row: Row | None) -> Interval | None:
    """Throughput of a point with its interval; None without figures."""
    if row is None or row.throughput is None or row.ci_low is None or row.ci_high is None:
        return None
    return Interval(row.throughput, row.ci_low, row.ci_high)


def _log(high: float, low: float) -> float:
    return math.log(high / low) if low > 0 else math.inf


def _figures(launches: Sequence[TrialRecord], concurrency: int) -> list[Measurement]:
    return [found for record in launches if (found := measurement(record, concurrency))]


def _requests(launches: Sequence[TrialRecord], concurrency: int) -> list[list[Request]]:
    """Those of each launch."""
    return [[row for row in record.outcome.requests if row.concurrency == concurrency] for record in launches]


def _gain(
    records: Sequence[TrialRecord], over: tuple[Row, Row | None], concurrency: int, noise: LaunchNoise
) -> Interval | None:
    """Ratio of two points, node by node, so that a faster machine helps neither side; nodes weigh alike."""
    one, other = over
    if other is None or one.key == other.key:
        return None
    chosen = [[r for r in records if r.key == row.key and measurement(r, concurrency)] for row in (one, other)]
    nodes = sorted({record.node for record in chosen[0]} & {record.node for record in chosen[1]})
    sides = [[[record for record in side if record.node == node] for side in chosen] for node in nodes]
    return _geometric_mean([ratio(tuned, plain, concurrency, noise) for tuned, plain in sides])


def _geometric_mean(found: Sequence[Interval]) -> Interval | None:
    if len(found) < 2:  # noqa: PLR2004 - nothing to average
        return found[0] if found else None
    count = len(found)
    value = math.exp(math.fsum(math.log(one.value) for one in found) / count)
    below = math.hypot(*(_log(one.value, one.low) for one in found)) / count
    above = math.hypot(*(_log(one.high, one.value) for one in found)) / count
    return _interval(value, below, above)


def sides(records: Sequence[TrialRecord], concurrency: int) -> Sides | None:
    """What there is to say at a concurrency; None when nothing that was searched has figures and keeps its limits."""
    own = {record.key for record in records if record.kind == "baseline"}
    again, noise = confirming(records), between_launches(records, concurrency)
    found = _sides(again, confirmed(records, concurrency), own, concurrency, noise)
    if found is not None and found.over_plain is not None:
        return found._replace(confirmed=True)
    # What broke a limit when it was launched again is no winner, whatever the search saw of it.
    broken = {record.key for record in again if record.violations} - own
    before = [record for record in records if record.kind != "confirm" and record.key not in broken]
    return _sides(before, leaderboard(before, concurrency), own, concurrency, noise)


def _sides(
    records: Sequence[TrialRecord], rows: Sequence[Row], own: set[str], concurrency: int, noise: LaunchNoise
) -> Sides | None:
    sound = [row for row in rows if row.status == "completed"]
    plain = next((row for row in sound if row.key in own), None)
    others = [row for row in sound if row.key not in own]
    if not others:
        return None

    def over(one: Row, other: Row | None) -> Interval | None:
        return _gain(records, (one, other), concurrency, noise)

    # What failed in one of its launches would fail again some night. `rows` are in order of speed.
    best = min(others, key=lambda row: (row.config.speculative is None, bool(row.reason)))
    alike = (row for row in others if row.config.speculative is None and _settings(row) == _settings(best))
    same = next(alike, None) if best.config.speculative else None
    return Sides(best, plain, same, over(best, plain), over(best, same), confirmed=False)


def _settings(row: Row) -> tuple[dict[str, str], dict[str, object]]:
    return row.config.env, {**row.config.args, **row.config.tuned_args}


def winner(records: Sequence[TrialRecord], concurrency: int) -> Row | None:
    """What to launch: the fastest there is, plain decoding included where it was measured beside; None for nothing."""
    found = sides(records, concurrency)
    return None if found is None else fastest(found)


def fastest(found: Sides) -> Row:
    """By the ratios, not by the rows' own throughput: those may come from different nodes."""
    beside = ((found.plain, found.over_plain), (found.same, found.over_same))
    slower = [(gain.value, row) for row, gain in beside if row is not None and gain is not None and gain.value < 1]
    return min(slower, key=lambda each: each[0])[1] if slower else found.best


def verdict(records: Sequence[TrialRecord], concurrency: int) -> str:
    """Say in one sentence what was found, no surer than the intervals are."""
    return in_words(sides(records, concurrency), records, concurrency)


def in_words(found: Sides | None, records: Sequence[TrialRecord], concurrency: int) -> str:
    """The sentence for what `sides` found of these records."""
    if found is None:
        return _nothing(records, concurrency)
    name = names_of(record.config for record in records)(found.best.config)
    if found.over_plain is None:
        why = _why_not_compared(found, records, concurrency)
        return f"{name} is the fastest at {found.best.throughput:.1f} tok/s, but {why}"
    return "; ".join([_sentence(name, found, found.over_plain), *_caveats(found, records, concurrency)])


def _caveats(found: Sides, records: Sequence[TrialRecord], concurrency: int) -> Iterator[str]:
    """What the sentence does not rest on though one would think so."""
    best = found.best
    if not found.confirmed:
        yield "not confirmed by other launches"
    elif found.over_same is None and _gains_by_settings(found):
        lack = _lack(best, records, concurrency)
        yield f"what of it is by speculation is not known: plain decoding under the same settings {lack}"
    if best.measured < len(best.numbers):
        why = f" ({best.reason})" if best.reason else ""
        yield f"{len(best.numbers) - best.measured} of its {len(best.numbers)} launches gave no figures{why}"


def _gains_by_settings(found: Sides) -> bool:
    """Whether it is faster than plain decoding as configured, and may be so by its settings alone."""
    faster = found.over_plain is not None and found.over_plain.low > 1
    tuned = found.plain is not None and _settings(found.best) != _settings(found.plain)
    return faster and tuned and found.best.config.speculative is not None


def _lack(best: Row, records: Sequence[TrialRecord], concurrency: int) -> str:
    """Why plain decoding under the settings of `best` has no figures."""
    rows = confirmed(records, concurrency)
    alike = (row for row in rows if row.config.speculative is None and _settings(row) == _settings(best))
    tried = next(alike, None)
    return f"is {tried.status} ({tried.reason})" if tried and tried.reason else "was not measured"


def _why_not_compared(found: Sides, records: Sequence[TrialRecord], concurrency: int) -> str:
    if found.plain is not None:
        return "no node measured plain decoding beside it"
    plain = next((row for row in leaderboard(records, concurrency) if row.kind == "baseline" and row.reason), None)
    return (
        f"plain decoding is {plain.status}: {plain.reason}" if plain else "there is no plain decoding to compare with"
    )


def _sentence(name: str, found: Sides, over_plain: Interval) -> str:
    figures = f"{_times(over_plain)} of plain decoding"
    same = found.over_same
    if same is not None:
        figures += f", {_times(same)} of plain decoding under the same settings"
    gains = [gain for gain in (over_plain, same) if gain is not None]
    if any(gain.high < 1 for gain in gains):
        return f"plain decoding is faster: the best, {name}, is {figures}"
    if all(gain.low > 1 for gain in gains):
        return f"{name} is {figures}"
    if over_plain.low > 1:
        return f"{name} is {figures}: its settings help, no difference by speculation is shown"
    return f"no difference shown: the best, {name}, is {figures}"


def _times(gain: Interval) -> str:
    return f"{gain.value:.2f}x ({gain.low:.2f}–{gain.high:.2f})"


def _nothing(records: Sequence[TrialRecord], concurrency: int) -> str:
    searched = [record for record in records if record.kind == "trial"]
    if any(record.status == "infeasible" for record in records if record.kind != "baseline"):
        return "no trial kept the constraints"
    if any(record.status == "completed" for record in searched):
        return f"no trial was measured at concurrency {concurrency}"
    failures = Counter(record.outcome.failure_class for record in searched if isinstance(record.outcome, Failed))
    often = f"; most often: {failures.most_common(1)[0][0]}" if failures else ""
    return f"no trial completed ({len(searched)} launched{often})"
