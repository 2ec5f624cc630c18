"""Two studies side by side: what differs between them, plain decoding, the fastest, and the points in both."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raytune_eagle.model.trial import Completed, Event, TrialRecord
from raytune_eagle.ranking import Row, leaderboard, names_of
from raytune_eagle.report.facts import written_spec
from raytune_eagle.report.noise import between_launches
from raytune_eagle.report.verdict import Sides, fastest, ratio_of_intervals, sides, speed, widened, winner
from raytune_eagle.spec import differences
from raytune_eagle.statistics import LaunchNoise

_OF_LAUNCHES = ("name", "budget", "search", "start_from", "baseline", "confirm")
Study = tuple[Sequence[TrialRecord], Sequence[Event]]
_Rows = Sequence[Row | None]


def compare_studies(one: Study, other: Study, console: Console) -> None:
    """Print what differs, and one table per concurrency that both measured."""
    for line in what_differs(one, other):
        console.print(escape(line), soft_wrap=True, highlight=False)
    common = sorted(_levels(one[0]) & _levels(other[0]))
    if not common:
        console.print("They have no concurrency in common.")
    for level in common:
        console.print(_table(one[0], other[0], level))


def _levels(records: Sequence[TrialRecord]) -> set[int]:
    measured = [record.outcome.measurements for record in records if isinstance(record.outcome, Completed)]
    return {figures.concurrency for several in measured for figures in several}


def what_differs(one: Study, other: Study) -> Iterator[str]:
    """Machines, versions and the spec: what makes figures of the two studies not comparable, or the point of it."""
    for name, first, second in (
        ("hardware", *(_hardware(side) for side in (one[0], other[0]))),
        ("sglang", *(_version(side) for side in (one[0], other[0]))),
    ):
        if first != second:
            yield f"differs: {name}: {first} / {second}"
    specs = [_spec(events) for events in (one[1], other[1])]
    if all(specs):
        yield from (f"differs: {line}" for line in differences(specs[0], specs[1]))


def _hardware(records: Sequence[TrialRecord]) -> str:
    return ", ".join(sorted({record.facts.hardware or "unknown" for record in records}))


def _version(records: Sequence[TrialRecord]) -> str:
    return ", ".join(sorted({record.outcome.server.version for record in records} - {""})) or "unknown"


def _spec(events: Sequence[Event]) -> dict[str, Any]:
    """Leaves of the spec, without what only says which launches there were; empty when it is not known."""
    return dict(_leaves({name: value for name, value in written_spec(events).items() if name not in _OF_LAUNCHES}))


def _leaves(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _table(one: Sequence[TrialRecord], other: Sequence[TrialRecord], level: int) -> Table:
    names = (one[0].study, other[0].study)
    table = Table(title=f"concurrency {level}")
    table.add_column("", overflow="fold")
    for name in names:
        table.add_column(f"{escape(name)}, tok/s", justify="right", overflow="fold")
    table.add_column(f"{escape(names[1])} / {escape(names[0])}", justify="right", overflow="fold")
    searched = [[record for record in side if record.kind != "confirm"] for side in (one, other)]
    boards = [leaderboard(side, level) for side in searched]
    plain = [next((row for row in board if row.kind == "baseline" and row.throughput), None) for board in boards]
    noise = max((between_launches(side, level) for side in (one, other)), key=lambda each: each.variance)
    _add_rows(table, "search", (plain, [winner(side, level) for side in searched]), (one, other), noise)
    table.add_row("search: points in both", *_shared(*boards))
    found = [_confirmed(side, level) for side in (one, other)]
    if any(found):
        best = [each and fastest(each) for each in found]
        _add_rows(table, "confirmed", ([each and each.plain for each in found], best), (one, other), noise)
    return table


def _confirmed(records: Sequence[TrialRecord], level: int) -> Sides | None:
    """What was launched again and compares with plain decoding beside it; None where nothing does."""
    found = sides(records, level) if any(record.kind == "confirm" for record in records) else None
    return found if found and found.confirmed else None


def _add_rows(
    table: Table, stage: str, rows: tuple[_Rows, _Rows], studies: Sequence[Sequence[TrialRecord]], noise: LaunchNoise
) -> None:
    """Plain decoding and the fastest of one stage: the search and what confirms it have prompts of their own."""
    plain, best = rows
    named = (_named(row, records) for row, records in zip(best, studies, strict=True))
    table.add_row(f"{stage}: plain decoding", *map(_speed, plain), _ratio(plain, noise))
    table.add_row(f"{stage}: fastest", *named, _ratio(best, noise))


def _speed(row: Row | None) -> str:
    found = speed(row)
    return f"{found.value:.1f} ({found.low:.1f}–{found.high:.1f})" if found else "–"


def _named(row: Row | None, records: Sequence[TrialRecord]) -> str:
    return "–" if row is None else f"{escape(names_of(each.config for each in records)(row.config))}\n{_speed(row)}"


def _ratio(rows: _Rows, noise: LaunchNoise) -> str:
    """Of the second over the first, with what launches differ by in its interval, which theirs do not hold."""
    one, other = rows
    first, second = speed(one), speed(other)
    if one is None or other is None or first is None or second is None:
        return "–"
    found = widened(ratio_of_intervals(second, first), noise.half_width(one.measured, other.measured))
    return f"{found.value:.2f}x ({found.low:.2f}–{found.high:.2f})"


def _shared(one: Sequence[Row], other: Sequence[Row]) -> tuple[str, str, str]:
    """How many points both measured, and the median ratio of their throughput."""
    sides = [{_point(row): row.throughput for row in board if row.throughput} for board in (one, other)]
    common = sorted(sides[0].keys() & sides[1].keys())
    if not common:
        return "0", "", "–"
    middle = statistics.median(sides[1][key] / sides[0][key] for key in common)
    return str(len(common)), "", f"median {middle:.2f}x"


def _point(row: Row) -> str:
    """What was tuned, whatever the paths of model and draft and the fixed flags."""
    chosen = row.config.speculative
    steps = chosen and (chosen.num_steps, chosen.eagle_topk, chosen.num_draft_tokens)
    return json.dumps([steps, sorted(row.config.env.items()), sorted(row.config.tuned_args.items())], default=str)
