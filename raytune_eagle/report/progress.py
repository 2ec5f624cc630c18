"""What `run` shows while it goes on: a line per node on a terminal, quiet lines in a pipe, or events as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import IO, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from raytune_eagle.model.trial import Event, TrialRecord
from raytune_eagle.report.outlook import Best, best_so_far, node_hours, node_states, seconds_left, span
from raytune_eagle.spec import Spec

_SHOWN = {
    "trial_started": "launching",
    "ready": "ready",
    "retry": "starting once more",
    "gate": "note",
    "pass": "measuring",
    "trial_done": "done",
    "node_quarantined": "put aside",
    "node_put_aside": "put aside",
    "node_silent": "no answer",
    "node_back": "back",
    "node_lost": "lost",
    "dropped": "dropped",
    "search_stopped": "stopped",
    "cpu": "note",
    "swept": "cleaned up",
}
_ON_TERMINAL = _SHOWN.keys() - {"trial_started", "ready", "pass"}
"""What stays above the lines of the nodes; the rest they show themselves."""


class Progress(Protocol):
    """Takes events from any thread, between entering and leaving; `records` is the study's own growing list."""

    records: Sequence[TrialRecord]

    def __call__(self, event: Event) -> None:
        """Show it, if it is of that kind."""
        ...

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        """Leave the terminal as it was."""
        ...


class Lines:
    """One line for each event that a person waits for; to stderr, so that stdout stays for results.

    Args:
        console: of stderr.
        simulated: the study runs in virtual time, that of its events; else the clock of this process counts.
        only: names of events that are shown.
    """

    def __init__(self, console: Console, *, simulated: bool = False, only: Collection[str] = _SHOWN) -> None:
        self.records: Sequence[TrialRecord] = ()
        self._console, self._began, self._told = console, time.monotonic(), set[str]()
        self._simulated, self._first, self._only = simulated, math.inf, only

    def __call__(self, event: Event) -> None:
        """See `Progress`."""
        self._first = min(self._first, event.at)
        word, once = _SHOWN.get(event.name), _once(event)
        if word is None or event.name not in self._only or once in self._told:
            return
        self._told |= {once} if once else set()
        clock = span_clock(event.at - self._first if self._simulated else time.monotonic() - self._began)
        where = f"{event.node or '-':>8} #{event.number if event.number is not None else '-':<3}"
        text = f"{clock} {escape(where)} {word:<10} {escape(event.detail)}"
        self._console.print(text, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        return None


def _once(event: Event) -> str | None:
    """What is told once and not at each launch: that a CPU serves, and each thing that a gate warns of."""
    if event.name == "gate" and event.detail.startswith("warning"):
        return event.detail.partition(":")[0]
    return event.name if event.name == "cpu" else None


def span_clock(seconds: float) -> str:
    """``07:05``, and with hours ``1:07:05``."""
    hours, rest = divmod(int(seconds), 3600)
    return (f"{hours}:" if hours else "") + f"{rest // 60:02d}:{rest % 60:02d}"


class Board:
    """A line per node and one for the study, kept up to date under what is done; for `simulated` see `Lines`."""

    def __init__(self, console: Console, spec: Spec, *, simulated: bool = False) -> None:
        self.records: Sequence[TrialRecord] = ()
        self._spec, self._lines, self._events = (
            spec,
            Lines(console, simulated=simulated, only=_ON_TERMINAL),
            list[Event](),
        )
        self._simulated = simulated
        self._ranked: tuple[int, list[Best]] = (0, [])
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=2, transient=True)

    def __call__(self, event: Event) -> None:
        """See `Progress`."""
        self._events.append(event)
        self._lines(event)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def _render(self) -> Group:
        now = self._events[-1].at if self._simulated and self._events else time.time()
        states = node_states(list(self._events))
        names = {event.number: event.detail for event in self._events if event.name == "trial_started"}
        lines = [Text(no_wrap=True, overflow="ellipsis").append(f"{state.name:>10} ", "bold") for state in states]
        for line, state in zip(lines, states, strict=True):
            launch = f"#{state.number} " if state.number is not None else ""
            line.append(f"{span_clock(now - state.since):>7} ", "dim").append(f"{launch}{state.state}", "cyan")
            line.append(f"  {state.detail or names.get(state.number, '')}", "dim")
        return Group(*lines, Text(self._study_line(now), no_wrap=True, overflow="ellipsis"))

    def _study_line(self, now: float) -> str:
        states, records, spec = node_states(list(self._events)), list(self.records), self._spec
        trials = [record for record in records if record.kind == "trial"]
        failed = sum(record.outcome.status != "completed" for record in trials)
        if self._ranked[0] != len(records):  # once per launch: ranking thousands twice a second would slow the study
            self._ranked = len(records), best_so_far(records, spec.workload.concurrency)
        parts = [f"{len(trials)} of {spec.budget.trials} trials, {failed} failed"]
        parts += [
            f"best at {best.concurrency}: {best.label} {best.throughput:.1f} tok/s"
            + (f" ({best.speedup:.2f}x)" if best.speedup else "")
            for best in self._ranked[1]
        ]
        left = seconds_left(records, spec.budget.trials, len(states))
        parts += [] if left is None else [f"about {span(left)} left"]
        if spec.node.cost_per_hour is not None:
            parts.append(f"cost so far {node_hours(records, states, now) * spec.node.cost_per_hour:,.2f}")
        return " · ".join(parts)


class Json:
    """Every event as one line of JSON, for programs."""

    def __init__(self, out: IO[str]) -> None:
        self.records: Sequence[TrialRecord] = ()
        self._out = out

    def __call__(self, event: Event) -> None:
        """See `Progress`."""
        self._out.write(event.model_dump_json() + "\n")
        self._out.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        return None
