"""The live page's server: what it tells while a study runs, who may ask, and that it touches nothing."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from made_results import Made, write

from raytune_eagle.live import STOP, Live, aside, put_aside
from raytune_eagle.model.trial import Event
from raytune_eagle.nodes.simulated import SimulatedFleet
from raytune_eagle.nodes.steered import SteeredFleet
from raytune_eagle.report.dashboard.watch import Watch
from raytune_eagle.report.outlook import node_states, span
from raytune_eagle.store import ParquetStore

MADE = Made(trials=12, requests=16, passes=2)


@contextlib.contextmanager
def served(results: Path, *words: str):
    """The command itself, on a free port; gives its address and token."""
    command = [sys.executable, "-m", "raytune_eagle", "dashboard", "--results", str(results), "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url, _, token = process.stdout.readline().strip().partition("#token=")
            assert token, process.stderr.read()
            yield url, token
        finally:
            process.terminate()
            process.communicate(timeout=10)


def get(url, data=None, **headers):
    """Status, headers and text of an answer."""
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    write(str(folder), MADE)
    return folder


@pytest.fixture(scope="module")
def page(results):
    with served(results) as found:
        yield found


def test_state_is_told_as_it_is(page):
    """The first server-sent event has the study's launches, its best and its failures."""
    with urllib.request.urlopen(f"{page[0]}events", timeout=20) as stream:
        line = stream.readline().decode()
    state = json.loads(line.removeprefix("data: "))
    assert (state["study"], state["trials"], state["budget"]) == ("made", 12, 12)
    assert [best["label"] for best in state["best"]] == ["EAGLE3 5/4/16"] * 2
    assert state["writer"] is None
    assert state["nodes"] == []
    assert len(state["launches"]) == 14


def test_page_and_headers(page):
    """The page comes with a policy that lets it ask nobody else, and without scripts in its text."""
    status, headers, text = get(page[0])
    assert status == 200
    assert "default-src 'self'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "onclick" not in text
    assert page[1] not in text


def test_a_foreign_name_gets_nothing(page):
    """A page elsewhere whose name was made to point here (DNS rebinding) is refused."""
    assert get(page[0], Host="evil.example")[0] == 403


def test_logs_of_launches_and_no_other_file(page, results):
    """A launch's log is shown as text; a name that is none finds nothing, however it climbs."""
    name = next((results / "study=made/logs").iterdir()).name.removesuffix(".log.gz")
    status, headers, text = get(f"{page[0]}log/{name}")
    assert (status, headers["Content-Type"], "fired up" in text) == (200, "text/plain; charset=utf-8", True)
    for bad in ("..%2f..%2ftrials", "%2e%2e/x", "00000-aaaaaaaaaaaa", ".lock"):
        assert get(f"{page[0]}log/{bad}")[0] == 404


def test_buttons_want_the_token(page, results):
    """Without the token, or with another, nothing is asked of the study."""
    for headers in ({}, {"X-Token": "wrong"}):
        assert get(f"{page[0]}wish", data=b'{"what": "stop"}', **headers)[0] == 403
    assert Live(str(results), "made").wishes() == frozenset()


def test_buttons_reach_a_run_and_only_a_run(page, results):
    """With the token a wish reaches the run that holds the study's lock; without a run it is refused."""
    header = {"X-Token": page[1]}
    assert get(f"{page[0]}wish", data=b'{"what": "stop"}', **header)[0] == 409
    live = Live(str(results), "made")
    with ParquetStore(str(results)).lock("made"):
        assert get(f"{page[0]}wish", data=b'{"what": "aside", "node": "a/../b"}', **header)[0] == 200
        assert put_aside(live.wishes()) == {"a/../b"}
        assert get(f"{page[0]}wish", data=b'{"what": "back", "node": "a/../b"}', **header)[0] == 200
        assert get(f"{page[0]}wish", data=b"nonsense", **header)[0] == 400
        assert get(f"{page[0]}wish", data=b'{"what": "stop"}', **header)[0] == 200
    assert live.wishes() == {STOP}
    live.begin()
    assert live.wishes() == frozenset()


@pytest.mark.slow
def test_a_taken_port_is_told(page, results):
    """One line that says what to do, exit 2."""
    port = page[0].rsplit(":", 1)[1].strip("/")
    command = [sys.executable, "-m", "raytune_eagle", "dashboard", "--results", str(results), "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"--port {port}: " in done.stderr
    assert "give another, or 0 for any" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_a_run_tells_is_seen_at_once(results):
    """Events that are not kept yet are shown: weights, graphs, passes, with the launch and since when."""
    live, watch = Live(str(results), "made"), Watch(str(results), "made")
    live.begin()
    names = {"study": "made", "node": "node-0", "number": 77}
    with ParquetStore(str(results)).lock("made"):
        live.say(Event(at=2e9, name="trial_started", detail="python3 …", **names))
        live.say(Event(at=2e9 + 5, name="weights", detail="3/64", **names))
        live.say(Event(at=2e9 + 6, name="weights", detail="4/64", **names))
        with (live.folder / ".live.jsonl").open("a") as file:
            file.write('{"torn')
        state = watch.look()
    (node,) = (each for each in state["nodes"] if each["name"] == "node-0")
    assert (node["state"], node["detail"], node["number"], node["since"]) == ("loading weights", "4/64", 77, 2e9 + 5)
    assert state["writer"]["pid"]
    live.begin()
    assert watch.look()["writer"] is None


def test_looking_changes_nothing(results):
    """Files are the same before and after a look."""
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*.parquet")}
    Watch(str(results), "made").look()
    assert {path: path.stat().st_mtime_ns for path in results.rglob("*.parquet")} == before


def test_steering_a_fleet():
    """A node that is put aside takes no further trial until it is back, and to stop ends as Ctrl-C does."""
    wishes, told = set(), []
    fleet = SimulatedFleet(["a", "b"], None)
    steered = SteeredFleet(fleet, lambda: frozenset(wishes), told.append, "s")
    assert [node.name for node in steered.nodes()] == ["a", "b"]
    wishes.add(aside("b"))
    steered.wait_any([], 1.0)
    assert [node.name for node in steered.nodes()] == ["a"]
    wishes.clear()
    steered.wait_any([], 1.0)
    assert [node.name for node in steered.nodes()] == ["a", "b"]
    assert [(event.name, event.node) for event in told] == [("node_put_aside", "b"), ("node_back", "b")]
    wishes.add(STOP)
    with pytest.raises(KeyboardInterrupt):
        steered.wait_any([], 1.0)


def test_states_of_nodes():
    """A state lasts from the first event that gave it, and a study that is done leaves all idle."""
    names = {"study": "s", "node": "a", "number": 3}
    events = [
        Event(at=1, name="trial_started", detail="…", **names),
        Event(at=2, name="graph_capture", detail="1/9", **names),
        Event(at=3, name="graph_capture", detail="2/9", **names),
    ]
    (state,) = node_states(events)
    assert state == ("a", "capturing graphs", 2, 3, "2/9")
    (state,) = node_states([*events, Event(at=9, study="s", name="study_done")])
    assert (state.state, state.number) == ("idle", None)


def test_spans_in_words():
    """Seconds, minutes and hours, as a person says them."""
    assert [span(seconds) for seconds in (5, 89, 90, 3540, 3600, 12000)] == [
        "5 s",
        "89 s",
        "2 min",
        "59 min",
        "1 h 0 min",
        "3 h 20 min",
    ]
