"""Which configuration won, how sure that is, and how to launch it.

Intervals are of 95 %. A configuration is shown faster only where the interval of its ratio to plain decoding, taken
node by node so that a faster machine helps neither side, leaves out 1.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from raytune_eagle.errors import SpecError
from raytune_eagle.model import Completed, Config, Failed, Kind, Measurement, Request, TrialRecord, Value
from raytune_eagle.statistics import compare

_NORMAL_975 = 1.96
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NEVER_SHOWN = ("failed", "lost")


class Interval(NamedTuple):
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


class Row(Value):
    """One point of the space at one concurrency, all its launches pooled.

    Attributes:
        key: of the canonical configuration; `config` is that of its latest launch.
        kind: ``baseline`` for plain decoding; ``confirm`` where one of its launches confirmed it.
        status: completed, infeasible (a constraint is broken in one of its launches), failed or lost (in all of them).
        numbers: of its launches; `measured` of them have figures.
        throughput, ci_low, ci_high: tokens per second, mean over the measured launches; None without any.
        accept_len, speedup: means over the launches that have one.
        reason: failure class or broken constraint.
    """

    key: str
    kind: Kind
    config: Config
    status: str
    numbers: tuple[int, ...]
    measured: int
    throughput: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    accept_len: float | None = None
    speedup: float | None = None
    reason: str = ""


RatioOf = Callable[[Sequence[TrialRecord], Sequence[TrialRecord], int], Interval]
"""Throughput of some launches over that of others of the same node, at a concurrency."""


def measurement(record: TrialRecord, concurrency: int) -> Measurement | None:
    """Figures of a launch at a concurrency, None when it has none."""
    found = record.outcome.measurements if isinstance(record.outcome, Completed) else ()
    return next((figures for figures in found if figures.concurrency == concurrency), None)


def pooled(figures: Sequence[Measurement]) -> Interval:
    """Mean throughput of repeated launches.

    Its variance is that of the launches' own intervals or that between the launches, whichever is larger: with two
    launches the spread between them says little, and with many it holds what no single launch can see of itself.
    """
    count = len(figures)
    if count == 1:
        return Interval(figures[0].output_throughput, figures[0].ci_low, figures[0].ci_high)
    values = [one.output_throughput for one in figures]
    mean = math.fsum(values) / count
    within = math.fsum(((one.ci_high - one.ci_low) / 2 / _NORMAL_975) ** 2 for one in figures) / count
    between = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = _NORMAL_975 * math.sqrt(max(within, between) / count)
    return Interval(mean, max(0.0, mean - half), mean + half)


def leaderboard(records: Iterable[TrialRecord], concurrency: int) -> list[Row]:
    """Every point that was launched, fastest first; broken constraints below, then those without figures."""
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        groups.setdefault(record.key, []).append(record)
    rows = [_row(group, concurrency) for group in groups.values()]
    order = {"completed": 0, "infeasible": 1}
    return sorted(rows, key=lambda row: (order.get(row.status, 2), -(row.throughput or 0.0), row.numbers))


def _row(group: Sequence[TrialRecord], concurrency: int) -> Row:
    last = group[-1]
    kinds = [record.kind for record in group]
    figures = [found for record in group if (found := measurement(record, concurrency))]
    speed = pooled(figures) if figures else None
    return Row(
        key=last.key,
        kind=next((kind for kind in ("baseline", "confirm") if kind in kinds), "trial"),
        config=last.config,
        status=_status(group, measured=bool(figures)),
        numbers=tuple(record.number for record in group),
        measured=len(figures),
        throughput=speed and speed.value,
        ci_low=speed and speed.low,
        ci_high=speed and speed.high,
        accept_len=_mean(one.accept_len for one in figures),
        speedup=_mean(record.speedup.get(concurrency) for record in group),
        reason=_reason(group),
    )


def _status(group: Sequence[TrialRecord], *, measured: bool) -> str:
    if any(record.status == "infeasible" for record in group):
        return "infeasible"
    if measured:
        return "completed"
    return next((record.status for record in group if record.status in _NEVER_SHOWN), "failed")


def _reason(group: Sequence[TrialRecord]) -> str:
    broken = [line for record in group for line in record.violations]
    failures = [record.outcome.failure_class for record in group if isinstance(record.outcome, Failed)]
    return next(iter([*broken, *failures]), "")


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def winner(records: Iterable[TrialRecord], concurrency: int) -> Row | None:
    """Fastest point that was searched and breaks no constraint, plain decoding apart; None when there is none."""
    rows = leaderboard(records, concurrency)
    return next((row for row in rows if row.status == "completed" and row.kind != "baseline"), None)


def label(config: Config) -> str:
    """Short name: algorithm and steps / topk / draft tokens, and the flags of this configuration alone."""
    chosen = config.speculative
    flags = [f"{name}={value}" for name, value in config.tuned_args.items() if value not in (None, False)]
    if chosen is None:
        return " ".join(["plain decoding", *flags])
    return " ".join([f"{chosen.ALGORITHM} {chosen.num_steps}/{chosen.eagle_topk}/{chosen.num_draft_tokens}", *flags])


def ratio(tuned: Sequence[TrialRecord], plain: Sequence[TrialRecord], concurrency: int) -> Interval:
    """Throughput of `tuned` over `plain`, launches of one node: by prompt where requests are kept, else by intervals.

    By prompt is sharper: a prompt that is long for both sides cancels.
    """
    try:
        found = compare(_requests(tuned, concurrency), _requests(plain, concurrency))
    except ValueError:  # no requests kept, or no prompt in common
        return ratio_of_intervals(*(pooled(_figures(side, concurrency)) for side in (tuned, plain)))
    if found.low == 0:  # a single pass on a side: the launches' own intervals know more
        return ratio_of_intervals(*(pooled(_figures(side, concurrency)) for side in (tuned, plain)))
    return Interval(found.value, found.low, found.high)


def ratio_of_intervals(one: Interval, other: Interval) -> Interval:
    """Quotient of two independent figures, their errors added in squares on the log scale."""
    value = one.value / other.value
    below = math.hypot(_log(one.value, one.low), _log(other.high, other.value))
    above = math.hypot(_log(one.high, one.value), _log(other.value, other.low))
    return Interval(value, value * math.exp(-below), value * math.exp(min(above, 700.0)))


def _log(high: float, low: float) -> float:
    return math.log(high / low) if low > 0 else math.inf


def _figures(launches: Sequence[TrialRecord], concurrency: int) -> list[Measurement]:
    return [found for record in launches if (found := measurement(record, concurrency))]


def _requests(launches: Sequence[TrialRecord], concurrency: int) -> list[Request]:
    """Measured requests of several launches, their passes numbered on."""
    rows: list[Request] = []
    for place, record in enumerate(launches):
        counted = [row for row in record.outcome.requests if row.concurrency == concurrency and row.repeat >= 0]
        rows += [row.model_copy(update={"repeat": row.repeat + place * 1_000_000}) for row in counted]
    return rows


def gain(
    records: Sequence[TrialRecord], row: Row, concurrency: int, ratio_of: RatioOf = ratio
) -> tuple[Interval, bool] | None:
    """Ratio of a point to plain decoding of the same nodes, and whether that ran under the same other settings.

    Plain decoding with the point's own environment and arguments counts where there is any, since those settings speed
    it up too. Nodes weigh alike (geometric mean). None when no node measured both.
    """
    plain = [record for record in records if record.kind == "baseline" and measurement(record, concurrency)]
    same = [record for record in plain if _settings(record.config) == _settings(row.config)]
    tuned = [record for record in records if record.key == row.key and measurement(record, concurrency)]
    for baselines in (same, plain):
        found = _by_node(tuned, baselines, concurrency, ratio_of)
        if found:
            return _geometric_mean(found), baselines is same
    return None


def _settings(config: Config) -> tuple[dict[str, str], dict[str, object]]:
    return config.env, {**config.args, **config.tuned_args}


def _by_node(
    tuned: Sequence[TrialRecord], plain: Sequence[TrialRecord], concurrency: int, ratio_of: RatioOf
) -> list[Interval]:
    nodes = sorted({record.node for record in tuned} & {record.node for record in plain})
    sides = [[[record for record in side if record.node == node] for side in (tuned, plain)] for node in nodes]
    return [ratio_of(one, other, concurrency) for one, other in sides]


def _geometric_mean(found: Sequence[Interval]) -> Interval:
    if len(found) == 1:
        return found[0]
    count = len(found)
    value = math.exp(math.fsum(math.log(one.value) for one in found) / count)
    below = math.hypot(*(_log(one.value, one.low) for one in found)) / count
    above = math.hypot(*(_log(one.high, one.value) for one in found)) / count
    return Interval(value, value * math.exp(-below), value * math.exp(min(above, 700.0)))


def verdict(records: Sequence[TrialRecord], concurrency: int, ratio_of: RatioOf = ratio) -> str:
    """Say in one sentence what was found, no surer than the intervals are."""
    row = winner(records, concurrency)
    if row is None:
        return _nothing(records, concurrency)
    name = label(row.config)
    found = gain(records, row, concurrency, ratio_of)
    if found is None:
        return f"{name} is the fastest at {row.throughput:.1f} tok/s, but no node measured plain decoding beside it"
    interval, same = found
    figure = f"{interval.value:.2f}x ({interval.low:.2f}–{interval.high:.2f}) of plain decoding on the same node"
    if interval.high < 1:
        text = f"plain decoding is faster: the best, {name}, is {figure}"
    elif interval.low > 1:
        text = f"{name} is {figure}"
    else:
        text = f"no difference shown: the best, {name}, is {figure}"
    return text + _cautions(row, same=same)


def _cautions(row: Row, *, same: bool) -> str:
    """What keeps the sentence from being more: the best of many is partly the luckiest, until it is launched again."""
    text = "" if same else "; plain decoding was not measured under the same environment and arguments"
    return text if row.measured > 1 else f"{text}; launched once, so not confirmed"


def _nothing(records: Sequence[TrialRecord], concurrency: int) -> str:
    searched = [record for record in records if record.kind != "baseline"]
    if any(record.status == "infeasible" for record in searched):
        return "no trial kept the constraints"
    if any(record.status == "completed" for record in searched):
        return f"no trial was measured at concurrency {concurrency}"
    failures = Counter(record.outcome.failure_class for record in searched if isinstance(record.outcome, Failed))
    often = f"; most often: {failures.most_common(1)[0][0]}" if failures else ""
    return f"no trial completed ({len(searched)} launched{often})"


def export(config: Config, form: str) -> str:
    """Spell a launch for use elsewhere, host and port left out.

    * ``command``: one line for a POSIX shell (longer only where a value holds a line break).
    * ``env``: a file for a POSIX shell: one line per variable, then ``RAYTUNE_EAGLE_ARGS``, the launcher and its words
      quoted once more. Run it with ``set -a; . ./FILE; set +a; eval "exec $RAYTUNE_EAGLE_ARGS"``.
    * ``json``: ``{"argv": [launcher and words], "env": {…}}``.

    Raises:
        SpecError: `form` is none of these, or a variable's name cannot be written in it.
    """
    argv = [*config.launcher, *config.argv()]
    if form == "json":
        return json.dumps({"argv": argv, "env": config.env}, indent=2, ensure_ascii=False) + "\n"
    if form not in {"command", "env"}:
        raise SpecError(f"--export: {form!r} is not one of command, env, json")
    bad = [name for name in config.env if not _SHELL_NAME.fullmatch(name)]
    if bad:
        raise SpecError(f"--export {form}: {bad[0]!r} is no name for a shell variable; use json")
    if form == "command":
        return config.command() + "\n"
    lines = {**config.env, "RAYTUNE_EAGLE_ARGS": shlex.join(argv)}
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in lines.items())
