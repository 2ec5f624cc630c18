"""What a terminal shows of a study: its plan, its progress and what came of it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raytune_eagle.findings import Finding
from raytune_eagle.model.trial import Event, TrialRecord
from raytune_eagle.ranking import Row, confirmed, leaderboard, names_of
from raytune_eagle.reference import Reference
from raytune_eagle.report.outlook import node_states
from raytune_eagle.report.verdict import verdict, winner
from raytune_eagle.simulation import simulated
from raytune_eagle.space import GroupSize, Space

_MOST_ROWS = 15
_BOARD = ("tok/s", "95 % interval", "accept_len", "speedup")
_WIDE, _ANY = 100, 10_000
"""Columns of a terminal that leave twenty for a name beside the figures; and of one that any table fits on."""
_OF_PASSES = "Intervals are over the passes of a launch; what launches differ by beside that counts in the verdict."
_OTHER_S = 120.0
"""Share of a launch that is not its start: warm-up, passes, stop. A guess for `plan`, told as one."""


def summary(records: Sequence[TrialRecord], concurrencies: Sequence[int], console: Console) -> bool:
    """Leaderboard, verdict and winner for each concurrency; simulated figures are called so before and after.

    Returns:
        Whether there is a launch to recommend, at any concurrency.
    """
    note = simulated_from(records)
    if note:
        console.print(note, style="bold", soft_wrap=True, highlight=False)
    told: set[str] = set()
    for concurrency in concurrencies:
        rows, again = leaderboard(records, concurrency), confirmed(records, concurrency)
        _print_board(rows[:_MOST_ROWS], f"concurrency {concurrency}", console)
        if len(rows) > _MOST_ROWS:
            console.print(f"… and {len(rows) - _MOST_ROWS} more: raytune-eagle query")
        if again:
            _print_board(again, f"confirmed at concurrency {concurrency}", console)
        if not told:
            console.print(_OF_PASSES, soft_wrap=True, highlight=False)
        for line in (*_recorded_speedups(rows), *_conditions(records, concurrency)):
            console.print(line, soft_wrap=True, highlight=False)
        console.print(f"Verdict at concurrency {concurrency}: {escape(verdict(records, concurrency))}", soft_wrap=True)
        best = winner(records, concurrency)
        if best is not None:
            known = best.config.command() in told
            console.print(f"Launch command of the fastest{': as above' if known else ':'}", style="bold")
            if not known:
                console.print(escape(best.config.command()), soft_wrap=True, highlight=False)
            told.add(best.config.command())
    if note:
        console.print(_virtual_time(records), soft_wrap=True, highlight=False)
    return bool(told)


def simulated_from(records: Sequence[TrialRecord]) -> str:
    """Say from what the figures were simulated; empty for measured ones."""
    found = sorted({what for record in records if (what := simulated(record))})
    return f"SIMULATED from {', '.join(found)}: no server ran, these are not measurements" if found else ""


def _virtual_time(records: Sequence[TrialRecord]) -> str:
    nodes = len({record.node for record in records})
    began, ended = min(record.started_at for record in records), max(record.ended_at for record in records)
    busy = math.fsum(record.ended_at - record.started_at for record in records) / 3600
    return f"Simulated time: {(ended - began) / 3600:.1f} h on {nodes} node(s), {busy:.1f} node-hours of launches"


def _recorded_speedups(rows: Sequence[Row]) -> Iterator[str]:
    """Speedups that nothing here bears out, as where launches were copied into a folder without plain decoding."""
    if any(row.speedup for row in rows) and not any(row.kind == "baseline" and row.throughput for row in rows):
        yield "Plain decoding is not among these launches: speedups are what was recorded where they ran."


def _conditions(records: Sequence[TrialRecord], concurrency: int) -> Iterator[str]:
    """What nodes and hours did to the figures, where it is more than noise."""
    reference = Reference(records)
    for node, effect in reference.effects(concurrency).items():
        yield f"{escape(node)}: plain decoding is {effect:.2f}x of an average node's; figures above are freed from that"
    for drift in reference.drifts():
        if drift.concurrency == concurrency:
            span = f"{drift.low:.1f} to {drift.high:.1f} tok/s"
            yield f"{escape(drift.node)}: plain decoding drifted, {span}; figures above are freed from that"


def _print_board(rows: Sequence[Row], title: str, console: Console) -> None:
    """A table whose names are folded and whose figures are not; on a terminal too narrow for it a line for each row."""
    name_of = names_of(row.config for row in rows)
    table = Table(title=title)
    table.add_column("launch", justify="right", no_wrap=True)
    table.add_column("configuration", overflow="fold")
    for name in _BOARD:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", overflow="fold")
    lines = [title]
    for row in rows:
        figures, status = _figures(row), _status(row)
        table.add_row(row.launches, escape(name_of(row.config)), *figures, escape(status))
        told = [f"{name} {value}" for name, value in zip(_BOARD, figures, strict=True) if value]
        lines.append(f"{row.launches}: {name_of(row.config)}: {', '.join([*told, *([status] if status else [])])}")
    fits = console.measure(table, options=console.options.update(max_width=_ANY)).maximum <= console.width
    if fits or console.width >= _WIDE:
        console.print(table)
    else:
        console.print(escape("\n".join(lines)), soft_wrap=True, highlight=False)


def _status(row: Row) -> str:
    """Of a launch that was ended early only when: by how much it was behind is among its gates."""
    reason = row.reason.partition(":")[0] if row.status == "hopeless" else row.reason
    return f"{row.status if row.status != 'completed' else ''} {reason}".strip()


def _figures(row: Row) -> list[str]:
    """Those of `_BOARD`, empty where there is none."""
    interval = "" if row.ci_low is None else f"{row.ci_low:.1f}–{row.ci_high:.1f}"
    return [_number(row.throughput, 1), interval, _number(row.accept_len, 2), _number(row.speedup, 2, "x")]


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def plan(space: Space, show: int) -> Iterator[str]:
    """Size of the space, what the rules take from it and why, the first launches, and what the study would cost."""
    spec = space.spec
    yield f"study {spec.name}: {space.size:,} valid points"
    for group in space.groups:
        yield from _group(group)
    yield from (f"  note: {line}" for line in space.notes())
    yield ""
    yield f"plain decoding (every node first, every {spec.baseline.every} trials, and last):"
    yield space.baseline().command()
    for index, start in enumerate(space.starts[:show]):
        yield f"start_from[{index}]:"
        yield start.config.command()
    rest = max(0, show - len(space.starts))
    for params, _ in zip(space.points(spec.search.seed), range(rest), strict=False):
        yield "a point of the space:"
        yield space.config(params).command()
    yield ""
    yield from _cost(space)


def _group(group: GroupSize) -> Iterator[str]:
    yield f"  {group.name}: {group.raw:,} combinations written, {len(group.left):,} points left"
    for (rule, verdict_), count in group.removed.most_common():
        yield f"    {count:,} {verdict_} ({rule}), for example {group.examples[rule]}"


def _cost(space: Space) -> Iterator[str]:
    """From the time limits in the spec, since nothing was launched yet: the most that the launches can be."""
    spec = space.spec
    trials = min(spec.budget.trials, space.size + len(space.starts))
    plain = 2 + trials // spec.baseline.every
    again = spec.confirm.rounds * (spec.confirm.top + 2) if spec.confirm.top else 0
    most = spec.engine.start_timeout_s + _OTHER_S
    hours = (trials + plain + again) * most / 3600
    price = f" ({hours * spec.node.cost_per_hour:,.0f} of cost)" if spec.node.cost_per_hour else ""
    yield (
        f"budget: {trials} trials in {spec.budget.hours:g} h, {plain} launches of plain decoding (two more a further "
        f"node), and about {again} to confirm the best"
    )
    yield (
        f"about {hours:,.1f} node-hours{price} if every start took all of start_timeout_s "
        f"({spec.engine.start_timeout_s:g} s) and measuring {_OTHER_S:.0f} s; starts are usually far quicker"
    )


_ASIDE = "node_quarantined"
_TELLING = ("trial_started", "ready", "trial_done", _ASIDE)


def node_table(events: Sequence[Event]) -> Table:
    """One line per node: what it does, since when."""
    table = Table(title=f"study {events[0].study}")
    for name in ("node", "state", "since", "launch", "detail"):
        table.add_column(name, overflow="fold")
    for each in node_states(events):
        since = time.strftime("%F %T", time.localtime(each.since))
        number = "" if each.number is None else str(each.number)
        table.add_row(escape(each.name), each.state, since, number, escape(each.detail))
    return table


def put_aside(events: Iterable[Event]) -> list[str]:
    """Nodes that were put aside and have not been of use since, one line each."""
    return [f"node {node} is put aside: {event.detail}" for node, event in _latest(events) if event.name == _ASIDE]


def _latest(events: Iterable[Event]) -> list[tuple[str, Event]]:
    """What each node did last."""
    return sorted({event.node: event for event in events if event.node and event.name in _TELLING}.items())


def live_table(rows: Sequence[tuple[str, str, int, str, float, str, int | None, str]]) -> Table:
    """One line per node of a running cluster: name, address, GPUs, state, since, study, launch, detail."""
    table = Table()
    for name in ("node", "address", "GPUs", "state", "since", "study", "launch", "detail"):
        table.add_column(name, overflow="fold")
    for node, address, gpus, state, since, study, number, detail in rows:
        clock = time.strftime("%F %T", time.localtime(since)) if since else ""
        launch = "" if number is None else str(number)
        table.add_row(escape(node), address, str(gpus), state, clock, escape(study), launch, escape(detail))
    return table


def job_table(rows: Sequence[tuple[str, str, str, float, str]]) -> Table:
    """One line per job that runs a study: study, job, status, start, message."""
    table = Table()
    for name in ("study", "job", "status", "since", "detail"):
        table.add_column(name, overflow="fold")
    for study, job, status, since, detail in rows:
        table.add_row(escape(study), job, status, time.strftime("%F %T", time.localtime(since)), escape(detail))
    return table


_COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def findings(by_node: Mapping[str, Sequence[Finding]], console: Console) -> None:
    """A table on a terminal, else one tab-separated line each; then one line that counts."""
    flat = [(node or "here", finding) for node, findings_ in by_node.items() for finding in findings_]
    if console.is_terminal:
        console.print(_findings_table(flat))
    else:
        for node, each in flat:
            console.file.write(f"{node}\t{each.level}\t{each.subject}\t{each.detail}\n")
    counts = Counter(each.level for _, each in flat)
    verdict_ = "this study would fail" if counts["problem"] else "nothing found that would make this study fail"
    summary_ = f"{verdict_}: {counts['problem']} problem(s), {counts['warning']} warning(s), {counts['ok']} ok"
    Console(stderr=True).print(summary_, highlight=False, soft_wrap=True)


def _findings_table(flat: Sequence[tuple[str, Finding]]) -> Table:
    table = Table()
    for name in ("node", "", "what", "found"):
        table.add_column(name, overflow="fold")
    for node, each in flat:
        level = f"[{_COLOURS[each.level]}]{each.level}[/]"
        table.add_row(escape(node), level, escape(each.subject), escape(each.detail))
    return table
