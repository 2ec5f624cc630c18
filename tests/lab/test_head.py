"""Studies that outlive their terminal, and a head that does not outlive the study."""

import time

import pytest
from lab.study_run import COMMAND, servers
from lab.waiting import await_true

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


def test_detached_study_and_its_gcs(study, times):
    """`run --detach`: status, logs, nodes and stop reach it. Its GCS is killed: `ray up` and the same `run` end it."""
    run = study("detached", 24, round_ms=20)
    head = run.cluster.head
    began = time.monotonic()
    job = head.shell(f"{run.words()} --detach").stdout.strip()
    times["run --detach: submitted"] = round(time.monotonic() - began, 1)
    await_true(lambda: "RUNNING" in head.shell(f"{COMMAND} status detached").stdout, 20, "not running")
    refused = head.shell(f"{run.words()} --detach", check=False)
    assert (refused.returncode, job in refused.stderr) == (2, True)
    shown = {"detached", *(host.address for host in run.cluster.lab.hosts)}
    await_true(lambda: shown <= set(head.shell(f"{COMMAND} nodes --cluster auto").stdout.split()), 20, "not at work")
    await_true(run.records, 60, "no trial done")
    assert "done" in head.shell(f"{COMMAND} logs detached").stdout
    assert head.shell(f"{COMMAND} stop detached").stdout == "STOPPED\n"
    await_true(lambda: not run.left(), 15, lambda: str(run.left()))
    kept = len(run.records())
    assert 1 <= kept < 24
    assert head.shell(f"{COMMAND} status detached", check=False).returncode == 1
    time.sleep(1)  # a job's id holds the second
    head.shell(f"{run.words()} --detach")
    await_true(lambda: len(run.records()) > kept, 60, "no trial done")
    began = time.monotonic()
    head.kill("gcs_server")
    run.cluster.up()
    times["GCS SIGKILL: ray up returned"] = round(time.monotonic() - began, 1)
    await_true(lambda: not run.left(), 120, lambda: str(run.left()))
    times["GCS SIGKILL: nothing left of the old run"] = round(time.monotonic() - began, 1)
    head.shell(f"{run.words()} --detach")
    out = head.shell(f"{COMMAND} logs detached --follow", timeout=240).stdout
    times["GCS SIGKILL: study done"] = round(time.monotonic() - began, 1)
    assert "Verdict at concurrency 1" in out
    assert "SUCCEEDED" in head.shell(f"{COMMAND} status detached").stdout
    run.check_whole(24)


def test_head_is_powered_off_and_booted(study, times):
    """A detached study's head loses power: nothing runs on; after boot `ray up` and the same `run` end the study."""
    run = study("head-off", 12, round_ms=20)
    head = run.cluster.head
    head.shell(f"{run.words()} --detach")
    await_true(lambda: len(run.records()) >= 4, 60, "no trial done")
    began = time.monotonic()
    head.power_off()
    others = run.cluster.lab.hosts[1:]
    await_true(lambda: not any(servers(host) for host in others), 150, lambda: str(run.left()))
    times["head off: no server on any host"] = round(time.monotonic() - began, 1)
    head.boot()
    began = time.monotonic()
    run.cluster.up()
    run.start().end(240)
    times["head booted: ray up and study done"] = round(time.monotonic() - began, 1)
    run.check_whole(12)


def test_down_leaves_no_raylet(cluster, times):
    """`ray down`, last of all: the head goes at once, the workers follow by themselves, but for Ray's own helpers."""
    began = time.monotonic()
    cluster.down()
    hosts = cluster.lab.hosts
    await_true(lambda: not any(host.find("raylet/raylet") for host in hosts), 120, "raylets live")
    times["ray down: no raylet on any host"] = round(time.monotonic() - began, 1)
    left = [words for host in hosts for words in host.processes().values()]
    helpers = ("log_monitor.py", "ray::DashboardAgent", "ray::RuntimeEnvAgent")  # docs/cluster.md
    assert [words for words in left if not any(name in words for name in helpers)] == []
    assert not cluster.head.processes()
