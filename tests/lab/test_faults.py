"""What an unattended night brings, on real hosts: each fault during a trial, and what must hold afterwards."""

import random
import signal
import time

import pytest
from lab.study_run import await_true, servers

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


def since(began):
    return round(time.monotonic() - began, 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_server_dies_or_hangs(study, times, number):
    """The trial fails with a class, the node's next launch comes within 15 s, the rest of the study is whole."""
    name = f"server-{number.name.lower()}"
    run = study(name, 6, round_ms=10).start()
    host = run.cluster.lab.hosts[1]
    pid, at, began = run.await_busy(host), len(run.text()), time.monotonic()
    host.run("kill", f"-{number.value}", str(pid))
    run.await_line(r"h2 #\d+ +launching", 30, at)
    times[f"{name}: next trial"] = since(began)
    assert since(began) < 15 + (10 if number is signal.SIGSTOP else 0)  # request_timeout_s of a hanging one: 10
    run.end(120)
    run.check_whole(6)
    failed = [record.outcome for record in run.records() if record.outcome.status == "failed"]
    assert len(failed) == 1
    assert failed[0].failure_class != "unknown"


def test_actor_is_killed(study, times):
    """Its server is gone within 15 s, the trial is asked again, no trial is lost or counted twice."""
    run = study("actor", 12, round_ms=10).start()
    host = run.cluster.lab.hosts[1]
    run.await_busy(host)
    began = time.monotonic()
    host.kill("ray::Owner")
    await_true(lambda: not servers(host), 15, "the server of a dead owner lives")
    times["actor SIGKILL: server gone"] = since(began)
    run.await_line("h2 .*put aside", 15)
    times["actor SIGKILL: driver knows"] = since(began)
    run.end(150)
    run.check_whole(12)
    assert all(record.outcome.status == "completed" for record in run.records())


def test_raylet_is_killed(study, times):
    """Actor and server go at once, the trial is asked again, and the node is used again without anybody's help."""
    run = study("raylet", 100, round_ms=50).start()
    host = run.cluster.lab.hosts[2]
    run.await_busy(host)
    at, began = len(run.text()), time.monotonic()
    host.kill("raylet/raylet")
    await_true(lambda: not servers(host) and not host.find("ray::Owner"), 15, lambda: str(host.processes()))
    times["raylet SIGKILL: actor and server gone"] = since(began)
    run.await_line("h3 .*put aside", 30, at)
    times["raylet SIGKILL: driver knows"] = since(began)
    run.await_line(r"h3 #\d+ +ready", 150, at)
    times["raylet SIGKILL: node in use again"] = since(began)
    run.interrupt()
    run.check_whole()
    assert all(record.outcome.status == "completed" for record in run.records())


@pytest.mark.parametrize("seconds", [10, 40])
def test_link_is_cut_for_a_while(study, times, seconds):
    """Packets are lost silently: the driver knows within 20 s, and the trial goes on as if nothing had been."""
    run = study(f"cut-{seconds}", 100, round_ms=100 if seconds < 20 else 200).start()  # plain decoding: 384 rounds
    host = run.cluster.lab.hosts[1]
    pid, began, at = run.await_busy(host), time.monotonic(), len(run.text())
    host.cut(silent=True)
    run.await_line("h2 .*no answer", 20)
    times[f"silent drop of {seconds} s: driver knows"] = since(began)
    time.sleep(max(0.0, seconds - since(began)))
    host.heal()
    run.await_line("h2 .*back", 30)
    times[f"silent drop of {seconds} s: back after"] = since(began)
    assert servers(host) == [pid]
    run.await_line(r"h2 #\d+ +done", 90, at)
    run.interrupt()
    run.check_whole()
    assert "put aside" not in run.text()
    assert next(record.outcome.status for record in run.records() if record.node == "h2") == "completed"


def test_link_is_cut_for_good_and_comes_back(study, times):
    """After a minute the trial is asked again elsewhere, the isolated server ends by itself, no result counts twice."""
    run = study("cut", 100, round_ms=50).start()
    host = run.cluster.lab.hosts[2]
    run.await_busy(host)
    at, began = len(run.text()), time.monotonic()
    host.cut(silent=True)
    run.await_line("h3 .*no answer", 20, at)
    times["link cut: driver knows"] = since(began)
    await_true(lambda: not servers(host) and not host.find("ray::Owner"), 130, lambda: str(host.processes()))
    times["link cut: isolated server gone"] = since(began)
    run.await_line("h3 .*put aside", 30, at)
    times["link cut: given up"] = since(began)
    host.heal()
    healed = time.monotonic()
    run.await_line(r"h3 #\d+ +ready", 150, run.text().index("put aside"))
    times["link healed: node in use again"] = since(healed)
    run.interrupt()
    run.check_whole()
    assert all(record.outcome.status == "completed" for record in run.records())


def test_power_off_and_boot(study, times):
    """The study goes on without the machine, and uses it within a minute of its boot."""
    run = study("power", 100, round_ms=50).start()
    host = run.cluster.lab.hosts[2]
    run.await_busy(host)
    at, began = len(run.text()), time.monotonic()
    host.power_off()
    run.await_line("h3 .*no answer", 20, at)
    times["power-off: driver knows"] = since(began)
    run.await_line("h3 .*put aside", 90, at)
    times["power-off: trial asked again"] = since(began)
    host.boot()
    booted = time.monotonic()
    await_true(lambda: host.find("raylet/raylet"), 90, lambda: str(host.processes()))
    joined = time.monotonic()
    run.await_line(r"h3 #\d+ +launching", 60, run.text().index("put aside"))
    times["Ray is there again: first launch"] = since(joined)
    assert since(joined) < 30
    run.await_line(r"h3 #\d+ +ready", 30, run.text().index("put aside"))
    times["boot: node in use again"] = since(booted)
    run.interrupt()
    run.check_whole()


def test_driver_is_killed_at_random_moments(study, times):
    """SIGKILL of the driver 20 times: no server outlives it by 15 s; the same command ends with exactly the budget."""
    run, moments, longest = study("driver", 40, round_ms=10), random.Random(0), 0.0
    for _ in range(20):
        run.start()
        time.sleep(moments.uniform(0.2, 12))
        assert run.process.poll() is None, run.text()[-3000:]
        run.sigkill()
        longest = max(longest, await_true(lambda: not run.left(), 15, lambda: f"left: {run.left()}"))
    times["driver SIGKILL: nothing left on any host, longest of 20"] = longest
    run.start().end(240)
    run.check_whole(40)
