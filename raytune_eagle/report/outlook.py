"""How far a study is: what each node does, best so far, time left, cost so far; for terminal and live page alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from raytune_eagle.model.trial import Completed, Event, TrialRecord
from raytune_eagle.ranking import label, leaderboard

_STATES = {
    "trial_started": "starting",
    "launch": "starting",
    "weights": "loading weights",
    "kv_cache": "allocating the KV cache",
    "graph_capture": "capturing graphs",
    "retry": "starting once more",
    "ready": "warming up",
    "pass": "measuring",
    "trial_done": "idle",
    "node_quarantined": "put aside",
    "node_lost": "lost",
    "node_put_aside": "put aside by hand",
    "node_silent": "no answer",
}
_QUIET = ("trial_started", "launch", "trial_done", "kv_cache")
"""Events whose detail says nothing of how far a launch is."""


class NodeState(NamedTuple):
    """What a node does: state, since when (seconds since the epoch), which launch, how far."""

    name: str
    state: str
    since: float
    number: int | None
    detail: str


class Best(NamedTuple):
    """Fastest configuration so far at a concurrency; `speedup` over plain decoding of its node, None if unknown."""

    concurrency: int
    label: str
    throughput: float
    low: float
    high: float
    speedup: float | None


def node_states(events: Iterable[Event]) -> list[NodeState]:
    """The latest of each node; a state lasts from the first event that gave it."""
    states: dict[str, NodeState] = {}
    before: dict[str, NodeState] = {}  # what a node did when it fell silent or was put aside
    for event in events:
        if event.name == "study_done":
            states = {name: _at_rest(state, event.at) for name, state in states.items()}
        elif event.name == "node_back" and event.node in before:
            states[event.node] = before.pop(event.node)
        elif event.node is not None and event.name in _STATES:
            last = states.get(event.node, NodeState(event.node, "idle", event.at, None, ""))
            if event.name in ("node_silent", "node_put_aside"):
                before[event.node] = last
            states[event.node] = _next(last, event)
    return [states[name] for name in sorted(states)]


def _at_rest(state: NodeState, at: float) -> NodeState:
    """When a study is done; a node that was put aside for a fault stays so."""
    return state if state.state == "put aside" else NodeState(state.name, "idle", at, None, "")


def _next(last: NodeState, event: Event) -> NodeState:
    if event.name == "node_put_aside" and last.number is not None:
        return last  # its trial comes to its end
    state = _STATES[event.name]
    since = last.since if (last.state, last.number) == (state, event.number) else event.at
    number = None if state == "idle" else event.number
    return NodeState(last.name, state, since, number, "" if event.name in _QUIET else event.detail)


def best_so_far(records: Sequence[TrialRecord], concurrencies: Sequence[int]) -> list[Best]:
    """Fastest that was searched and breaks no limit, one a concurrency that has any."""
    found = []
    for level in concurrencies:
        rows = [r for r in leaderboard(records, level) if r.status == "completed" and r.kind != "baseline"]
        if rows and rows[0].throughput is not None:
            top = rows[0]
            figures = (top.throughput or 0.0, top.ci_low or 0.0, top.ci_high or 0.0)
            found.append(Best(level, label(top.config), *figures, top.speedup))
    return found


def seconds_left(records: Sequence[TrialRecord], trials: int, nodes: int) -> float | None:
    """Until so many trials are in, from how long launches took so far; None before the first trial."""
    done = [record for record in records if record.kind == "trial"]
    if not done or not nodes:
        return None
    whole = math.fsum(record.ended_at - record.started_at for record in records if record.kind != "confirm")
    return max(0, trials - len(done)) * whole / len(done) / nodes


def node_hours(records: Sequence[TrialRecord], states: Sequence[NodeState], now: float) -> float:
    """Spent on launches so far, those under way included."""
    under_way = math.fsum(now - state.since for state in states if state.number is not None)
    return (math.fsum(record.ended_at - record.started_at for record in records) + under_way) / 3600


def levels(records: Sequence[TrialRecord], spec: dict[str, Any]) -> list[int]:
    """Concurrencies that the spec asks for; of a study without one those that were measured."""
    asked = (spec.get("workload") or {}).get("concurrency")
    measured = [record.outcome.measurements for record in records if isinstance(record.outcome, Completed)]
    return list(asked) if asked else sorted({figures.concurrency for several in measured for figures in several})


def span(seconds: float) -> str:
    """Words for a time: ``42 s``, ``7 min``, ``3 h 20 min``."""
    if seconds < 90:  # noqa: PLR2004
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"  # noqa: PLR2004
