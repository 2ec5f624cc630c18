"""The points of a study in order: all launches of a point pooled, freed from what its nodes and hours did to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from raytune_eagle.model import Value
from raytune_eagle.model.config import Config
from raytune_eagle.model.measurement import Measurement
from raytune_eagle.model.trial import Completed, Failed, Kind, TrialRecord
from raytune_eagle.reference import Reference
from raytune_eagle.statistics import Interval

_NORMAL_975 = 1.96
_MOST_NUMBERS = 4
_NEVER_SHOWN = ("failed", "lost")


class Row(Value):
    """One point of the space at one concurrency, all its launches of one kind pooled.

    Attributes:
        key: of the canonical configuration; `config` is that of its latest launch.
        kind: ``baseline`` for plain decoding, ``trial``, or ``confirm``.
        status: completed, infeasible (a constraint is broken in one of its launches), hopeless (ended early), failed or
            lost (in all of them).
        numbers: of its launches; `measured` of them have figures.
        throughput, ci_low, ci_high: tokens per second, mean over the measured launches; None without any. As
            measured, unless nodes or hours differ beyond noise: then what an average node would have given.
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

    @property
    def launches(self) -> str:
        """Numbers of its launches on a line; of many only the first."""
        if len(self.numbers) <= _MOST_NUMBERS:
            return ",".join(map(str, self.numbers))
        return f"{','.join(map(str, self.numbers[:2]))},… ({len(self.numbers)})"


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


def leaderboard(records: Sequence[TrialRecord], concurrency: int) -> list[Row]:
    """Every point that was searched and plain decoding, fastest first; then those ended early, infeasible, failed.

    Confirmations are of other prompts, so they are no part of it: see `confirmed`.
    """
    return _board([record for record in records if record.kind != "confirm"], concurrency, Reference(records))


def confirming(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The launches that confirm what was searched, but those from before the search went on.

    What it found since was not launched beside them, perhaps not on the same machine or day.
    """
    last = max((record.number for record in records if record.kind == "trial"), default=-1)
    return [record for record in records if record.kind == "confirm" and record.number > last]


def confirmed(records: Sequence[TrialRecord], concurrency: int) -> list[Row]:
    """What was launched again to confirm, in the same order.

    Every node has its own share of each point there, or of none, but for a round that was broken off: held against
    what plain decoding gave beside it, it neither helps nor harms. Speedups are over that plain decoding.
    """
    again = confirming(records)
    own = {record.key for record in records if record.kind == "baseline"}
    beside = [record.model_copy(update={"kind": "baseline"}) for record in again if record.key in own]
    rows = _board(again, concurrency, Reference(beside))
    plain = next((row for row in rows if row.key in own and row.throughput), None)
    return [row.model_copy(update={"speedup": _over(row, plain)}) for row in rows]


def _over(row: Row, plain: Row | None) -> float | None:
    if plain is None or plain.key == row.key or not plain.throughput or row.throughput is None:
        return None
    return row.throughput / plain.throughput


def _board(chosen: Iterable[TrialRecord], concurrency: int, reference: Reference) -> list[Row]:
    groups: dict[str, list[TrialRecord]] = {}
    for record in chosen:
        groups.setdefault(record.key, []).append(record)
    rows = [_row(group, concurrency, reference) for group in groups.values()]
    order = {"completed": 0, "hopeless": 1, "infeasible": 2}
    return sorted(rows, key=lambda row: (order.get(row.status, 3), -(row.throughput or 0.0), row.numbers))


def _row(group: Sequence[TrialRecord], concurrency: int, reference: Reference) -> Row:
    last = group[-1]
    measured = [(record, found) for record in group if (found := measurement(record, concurrency))]
    figures = [_freed(found, reference.factor(one.node, concurrency, one.started_at)) for one, found in measured]
    speed = pooled(figures) if figures else None
    return Row(
        key=last.key,
        kind="baseline" if any(record.kind == "baseline" for record in group) else last.kind,
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


def _freed(figures: Measurement, factor: float) -> Measurement:
    names = ("output_throughput", "ci_low", "ci_high")
    return figures.model_copy(update={name: getattr(figures, name) * factor for name in names})


def _status(group: Sequence[TrialRecord], *, measured: bool) -> str:
    if any(record.status == "infeasible" for record in group):
        return "infeasible"
    if measured:
        return "completed" if any(record.status == "completed" for record in group) else "hopeless"
    unmeasured = {*_NEVER_SHOWN, "hopeless"}  # hopeless: ended at another concurrency
    return next((record.status for record in group if record.status in unmeasured), "failed")


def _reason(group: Sequence[TrialRecord]) -> str:
    broken = [line for record in group for line in record.violations]
    failures = [record.outcome.failure_class for record in group if isinstance(record.outcome, Failed)]
    early = [one.hopeless for record in group if isinstance(one := record.outcome, Completed) and one.hopeless]
    return next(iter([*broken, *failures, *early]), "")


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def searched(records: Sequence[TrialRecord], concurrency: int) -> list[Row]:
    """Points that the search measured and that break no constraint, fastest first; plain decoding apart."""
    rows = leaderboard(records, concurrency)
    return [row for row in rows if row.status == "completed" and row.kind != "baseline"]


def label(config: Config, *, draft: bool = False) -> str:
    """Short name: algorithm and steps / topk / draft tokens, and the flags of this configuration alone.

    With `draft` its draft too: where a study has several.
    """
    chosen = config.speculative
    flags = [f"{name}={value}" for name, value in config.tuned_args.items() if value not in (None, False)]
    if chosen is None:
        return " ".join(["plain decoding", *flags])
    shape = f"{chosen.ALGORITHM} {chosen.num_steps}/{chosen.eagle_topk}/{chosen.num_draft_tokens}"
    return " ".join([shape, *([f"draft={chosen.draft}"] if draft else []), *flags])


def names_of(configs: Iterable[Config]) -> Callable[[Config], str]:
    """Short names that tell these apart: with the draft where there are several, and variables that not all share."""
    known = list(configs)
    several = len({config.speculative.draft for config in known if config.speculative}) > 1
    variables = dict.fromkeys(name for config in known for name in config.env)
    varied = [name for name in variables if len({config.env.get(name) for config in known}) > 1]

    def name(config: Config) -> str:
        env = (f"{each}={config.env[each]}" for each in varied if each in config.env)
        return " ".join([label(config, draft=several), *env])

    return name
