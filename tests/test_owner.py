"""What owns a node, without a cluster: calls that may be repeated, results that wait, and an end by itself."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rigs import fake_servers, job

from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.sglang import SglangEngine
from raytune_eagle.model.trial import Completed
from raytune_eagle.nodes.owner import Late, Owner, Setup, Spool

pytestmark = pytest.mark.slow  # each starts the fake server


def setup(folder, grace_s=1e6, **changes):
    """For owners in this very process, which one that nobody asks any more would end: none does so here."""
    engine = SglangEngine(Settings(work_dir=Path(folder)))
    return Setup(study="s", make_engine=lambda _: engine, grace_s=grace_s, **changes)


def outcome_of(owner, token):
    """As a driver asks: by short calls; returns events and outcome."""
    events, deadline = [], time.monotonic() + 60
    while time.monotonic() < deadline:
        news = owner.news(token, len(events), 1.0)
        events += news.events
        if news.outcome is not None:
            return events, news.outcome
    raise AssertionError("no outcome in 60 s")


@pytest.fixture
def spooled(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return setup(tmp_path / "work", spool=True)


def test_start_and_news_may_be_repeated(tmp_path):
    """A call that is sent twice starts one server, and answers that were lost are given again, whole."""
    owner = Owner("x", setup(tmp_path))
    for _ in range(3):
        owner.start("t", job(1))
    events, outcome = outcome_of(owner, "t")
    assert isinstance(outcome, Completed)
    assert [name for *_, name, _ in events].count("launch") == 1
    again = owner.news("t", len(events), 0)
    assert (again.outcome, list(again.events)) == (outcome, [])
    assert owner.news("another", len(events), 0).outcome is None


def test_events_come_until_they_were_seen(tmp_path):
    """What was not acknowledged comes again; what was, does not."""
    owner = Owner("x", setup(tmp_path))
    owner.start("t", job(1))
    deadline = time.monotonic() + 60
    while owner.news("t", 0, 1.0).outcome is None:
        assert time.monotonic() < deadline
    first = owner.news("t", 0, 0).events
    assert len(first) > 3
    assert owner.news("t", 0, 0).events == first
    assert owner.news("t", 2, 0).events == first[2:]
    assert owner.news("t", 0, 0).events == first[2:]


def test_undelivered_outcome_is_found_by_the_next_owner(spooled):
    """A result that its driver did not take waits on the node's disk, and once, until it is acknowledged."""
    owner = Owner("x", spooled)
    owner.start("t", job(7))
    _, outcome = outcome_of(owner, "t")
    late = Owner("x", spooled).late()
    assert late == [Late("t", job(7), outcome)]
    assert Owner("y", spooled).late() == []
    owner.forget("t")
    assert Owner("x", spooled).late() == []


def test_torn_spool_costs_nothing(spooled):
    """A file that cannot be read is passed over and removed."""
    Spool("x").write(Late("a", job(1), Completed(measurements=(), requests=())))
    path = Spool("x")._folder / "a.pickle"
    path.write_bytes(path.read_bytes()[:20])
    assert Spool("x").read() == []
    assert not path.exists()


OWNER = """
import sys, time
sys.path[:0] = {paths!r}
from test_owner import setup
from rigs import job
from raytune_eagle.nodes.owner import Owner
owner = Owner("x", setup({folder!r}, grace_s=8.0))
owner.start("t", job(1, env={{"RAYTUNE_FAKE": "never_ready"}}))
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner_process(tmp_path):
    """An owner in a process of its own, whose parent is a process of its own as well: (parent, owner)."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    script = OWNER.format(paths=paths, folder=str(tmp_path))
    parent = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert parent.stdout.readline() == b"started\n"
    yield psutil.Process(parent.pid), psutil.Process(parent.pid).children()[0]
    parent.kill()
    parent.communicate()


def test_owner_that_nobody_asks_ends_with_its_server(owner_process):
    """After grace_s without a call, owner and server are gone by themselves."""
    _, owner = owner_process
    _, alive = psutil.wait_procs([owner, *_servers(owner)], timeout=20)
    assert alive == []


def test_owner_dies_with_its_parent(owner_process):
    """The parent (Ray's raylet) is killed: owner and server are gone at once, whoever inherits the orphan."""
    parent, owner = owner_process
    servers = _servers(owner)
    parent.kill()
    _, alive = psutil.wait_procs([owner, *servers], timeout=2)
    assert alive == []


def _servers(owner):
    """The fake servers of this owner; waits for the first."""
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        if found := fake_servers(owner.pid):
            return [server for server, _ in found]
        time.sleep(0.02)
    raise AssertionError("no server")
