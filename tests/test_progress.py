"""What `run` shows: a line per node on a terminal, quiet lines in a pipe, JSON for programs."""

from __future__ import annotations

import io
import json

import pytest
from made import make_space
from made_results import Made, write
from rich.console import Console

from raytune_eagle.model.trial import Event
from raytune_eagle.report.outlook import best_so_far, node_hours, node_states, seconds_left
from raytune_eagle.report.progress import Board, Json, Lines, span_clock

EVENTS = [
    Event(at=1e9, study="s", name="trial_started", node="node-0", number=3, detail="python3 -m sglang.launch_server"),
    Event(at=1e9 + 1, study="s", name="weights", node="node-0", number=3, detail="[bold]3/64[/bold]"),
    Event(at=1e9 + 2, study="s", name="trial_done", node="node-1", number=2, detail="90.0 tok/s"),
]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return write(str(tmp_path_factory.mktemp("results")), Made(trials=20, requests=16, passes=2))


def test_a_terminal_shows_nodes_and_outlook(records):
    """One line per node with what it does, then trials, failures, the best, time left and cost so far."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=400, color_system=None)
    spec = make_space(node={"gpus": 8, "cost_per_hour": 98.0}, budget={"trials": 40, "hours": 1}).spec
    board = Board(console, spec)
    board.records = records
    with board:
        for event in EVENTS:
            board(event)
        console.print(board._render())
    shown = text.getvalue()
    assert "#3 loading weights  [bold]3/64[/bold]" in shown
    assert "#2 " not in shown.split("node-1")[-1].splitlines()[0]
    assert "20 of 40 trials" in shown
    assert "best at 1: EAGLE3 5/4/16 " in shown
    assert "about " in shown
    assert "cost so far " in shown


def test_a_narrow_terminal_keeps_a_line_per_node(records):
    """Lines are cut to the width, never folded."""
    console = Console(file=io.StringIO(), force_terminal=True, width=40, color_system=None)
    board = Board(console, make_space().spec)
    board.records = records
    for event in EVENTS:
        board(event)
    lines = console.render_lines(board._render())
    assert len(lines) == 3


def test_a_pipe_gets_quiet_lines():
    """One plain line for what a person waits for, none for each shard of weights, and no control characters."""
    text = io.StringIO()
    lines = Lines(Console(file=text, width=80))
    with lines:
        for event in EVENTS:
            lines(event)
    assert [line.split()[1:4] for line in text.getvalue().splitlines()] == [
        ["node-0", "#3", "launching"],
        ["node-1", "#2", "done"],
    ]
    assert "\x1b" not in text.getvalue()


STARTED = Event(at=1e9 - 3600, study="s", name="study_started", detail="{}")


def test_lines_of_a_simulation_show_its_time():
    """An hour that passed in a moment reads as an hour, since the study began; of a real study the clock counts."""
    for simulated, times in ((True, ["1:00:00", "1:00:02"]), (False, ["00:00", "00:00"])):
        text = io.StringIO()
        lines = Lines(Console(file=text, width=80), simulated=simulated)
        for event in (STARTED, *EVENTS):
            lines(event)
        assert [line.split()[0] for line in text.getvalue().splitlines()] == times


def test_the_board_of_a_simulation_shows_its_time(records):
    """How long a node does what it does, and what it cost, count from the last event, not from the clock."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=200, color_system=None)
    board = Board(console, make_space(node={"gpus": 8, "cost_per_hour": 98.0}).spec, simulated=True)
    for event in (STARTED, *EVENTS):
        board(event)
    console.print(board._render())
    first, second, study = text.getvalue().splitlines()[-3:]
    assert first.split()[:2] == ["node-0", "00:01"]
    assert second.split()[:2] == ["node-1", "00:00"]
    assert "cost so far 0.03" in study
    assert "1:00:02" in text.getvalue()


def test_json_is_one_event_a_line():
    """Every event comes back as it was."""
    text = io.StringIO()
    with Json(text) as told:
        for event in EVENTS:
            told(event)
    assert [Event.model_validate(json.loads(line)) for line in text.getvalue().splitlines()] == EVENTS


def test_outlook_by_hand(records):
    """Best, time left and node-hours are those of the records."""
    trials = [r for r in records if r.kind == "trial"]
    whole = sum(r.ended_at - r.started_at for r in records)
    assert seconds_left(records, 40, 2) == pytest.approx(20 * whole / len(trials) / 2)
    assert seconds_left([], 40, 2) is None
    assert node_hours(records, [], 0.0) == pytest.approx(whole / 3600)
    assert node_hours(records, node_states(EVENTS), 1e9 + 61) == pytest.approx((whole + 60) / 3600)
    (best,) = best_so_far(records, [8])
    measured = [m for r in trials for m in getattr(r.outcome, "measurements", ()) if m.concurrency == 8]
    assert best.throughput == pytest.approx(max(m.output_throughput for m in measured), rel=0.05)


def test_clock():
    """Minutes and seconds, with hours where there are any."""
    assert [span_clock(seconds) for seconds in (5, 65, 3725)] == ["00:05", "01:05", "1:02:05"]
