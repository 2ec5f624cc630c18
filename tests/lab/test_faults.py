"""What an unattended night brings, on real hosts: each fault during a trial, and what must hold afterwards."""

import random
import signal
import time

import pytest
from lab.study_run import servers
from lab.waiting import await_true

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


def since(began):
    return round(time.monotonic() - began, 1)


def test_servers_and_an_actor_die(study, times):
    """A server that is killed, one that hangs, an actor: told as what it is, and the node's next launch within 15 s."""
    run = study("servers", 100, round_ms=40).start()
    _, second, third = run.cluster.lab.hosts
    for host, number, told in (
        (second, signal.SIGKILL, "put aside .*killed_by_os"),  # whose fault the machine is: the trial is asked again
        (third, signal.SIGSTOP, "done +failed: requests_failed: .*timed out after 10 s"),
    ):
        pid, at, began = run.await_trial(host), len(run.text()), time.monotonic()
        host.run("kill", f"-{number.value}", str(pid))
        run.await_line(rf"{host.name} #\d+ +{told}", 25, at)
        times[f"server {number.name}: told"] = since(began)
        told_at = time.monotonic()
        run.await_line(rf"{host.name} #\d+ +launching", 15, at)
        times[f"server {number.name}: next launch there, after that"] = since(told_at)
    run.await_trial(second)
    at, began = len(run.text()), time.monotonic()
    second.kill("ray::Owner")
    await_true(lambda: not servers(second), 15, "the server of a dead owner lives")
    times["actor SIGKILL: server gone"] = since(began)
    run.await_line("h2 .*put aside", 15, at)
    times["actor SIGKILL: driver knows"] = since(began)
    run.await_line(r"h2 #\d+ +ready", 60, at)
    times["actor SIGKILL: node in use again"] = since(began)
    run.interrupt()
    run.check_whole()
    failed = [record for record in run.records() if record.outcome.status != "completed"]
    assert [record.outcome.failure_class for record in failed] == ["requests_failed"]


def test_links_are_cut_for_a_while(study, times):
    """Packets are lost silently for 10 s and 30 s: the driver knows within 20 s, and the trials go on to their ends.

    Ray takes up to 20 s more to be in touch again, and after 60 s in all a node is given up.
    """
    run = study("cut", 100, round_ms=120).start()  # plain decoding: 384 rounds
    _, second, third = run.cluster.lab.hosts
    pids = {host: run.await_busy(host) for host in (second, third)}
    began, at = time.monotonic(), len(run.text())
    for host in pids:
        host.cut(silent=True)
    run.await_line("h2 .*no answer", 20, at)
    times["silent drop: driver knows"] = since(began)
    time.sleep(max(0.0, 10 - since(began)))
    second.heal()
    run.await_line("h2 .*back", 20, at)
    times["silent drop of 10 s: back after"] = since(began)
    assert servers(second) == [pids[second]]
    assert servers(third) == [pids[third]]
    run.await_line("h3 .*no answer", 1, at)
    time.sleep(max(0.0, 30 - since(began)))
    third.heal()
    run.await_line("h3 .*back", 30, at)
    times["silent drop of 30 s: back after"] = since(began)
    for host in pids:
        run.await_line(rf"{host.name} #\d+ +done +\d", 90, at)
    run.interrupt()
    run.check_whole()
    assert "put aside" not in run.text()
    assert all(record.outcome.status == "completed" for record in run.records())


def test_a_link_is_cut_for_good_and_a_raylet_dies(study, times):
    """After a minute both trials are asked again elsewhere; nothing is left there; both nodes are used again."""
    run = study("gone", 100, round_ms=50).start()
    _, second, third = run.cluster.lab.hosts
    for host in (second, third):
        run.await_busy(host)
    at, began = len(run.text()), time.monotonic()
    second.cut(silent=True)
    third.kill("raylet/raylet")
    await_true(lambda: not servers(third) and not third.find("ray::Owner"), 15, lambda: str(third.processes()))
    times["raylet SIGKILL: actor and server gone"] = since(began)
    run.await_line("h3 .*(no answer|put aside)", 20, at)
    times["raylet SIGKILL: driver knows"] = since(began)
    run.await_line("h2 .*no answer", 20, at)
    times["link cut: driver knows"] = since(began)
    await_true(lambda: not servers(second) and not second.find("ray::Owner"), 130, lambda: str(second.processes()))
    times["link cut: isolated server and owner gone"] = since(began)
    for host in (second, third):
        run.await_line(rf"{host.name} .*put aside", 60, at)
    times["link cut, raylet SIGKILL: given up"] = since(began)
    second.heal()
    healed = time.monotonic()
    run.await_line(r"h3 #\d+ +ready", 150, run.after("h3 .*put aside"))
    times["raylet SIGKILL: node in use again"] = since(began)
    run.await_line(r"h2 #\d+ +ready", 150, run.after("h2 .*put aside"))
    times["link healed: node in use again"] = since(healed)
    run.interrupt()
    run.check_whole()
    assert all(record.outcome.status == "completed" for record in run.records())


def test_power_off_and_boot(study, times):
    """The study goes on without the machine, and uses it within a minute of its boot, SSH and Ray's start included."""
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
    await_true(lambda: host.find("raylet/raylet"), 60, lambda: str(host.processes()))
    joined = time.monotonic()
    run.await_line(r"h3 #\d+ +launching", 30, run.after("h3 .*put aside"))
    times["boot: first launch after Ray is there"] = since(joined)
    times["boot: first launch there"] = since(booted)
    assert since(booted) < 60
    run.await_line(r"h3 #\d+ +ready", 30, run.after("h3 .*put aside"))
    times["boot: node in use again"] = since(booted)
    run.interrupt()
    run.check_whole()


def test_results_disk_is_full(study, times):
    """The disk of the results is full for a while: told, waited for, and not a record is missing in the end."""
    run = study("disk", 8, round_ms=5)
    head, results = run.cluster.head, run.folder / "results"
    results.mkdir()
    head.run("mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(results))
    run.start().await_line(r"#\d+ +done", 60)
    head.shell(f"head -c 300M /dev/zero >{results}/full", check=False)
    run.await_line("No space left.*trials go on", 30)
    at, began = len(run.text()), time.monotonic()
    head.run("rm", f"{results}/full")
    run.await_line("results can be written again", 20, at)
    times["results' disk was full: written again after"] = since(began)
    run.end(120)
    head.run("cp", "-r", str(results), str(run.folder / "kept"))  # what only the head sees, for all to see
    head.run("umount", str(results))
    head.run("cp", "-r", f"{run.folder}/kept/.", str(results))
    run.check_whole(8)


def test_driver_is_killed_at_random_moments(study, times):
    """SIGKILL of the driver 20 times: no server outlives it by 15 s; the same command ends with exactly the budget."""
    run, moments, longest = study("driver", 24, round_ms=10), random.Random(0), 0.0
    for _ in range(20):
        run.start()
        time.sleep(moments.uniform(0.2, 8))
        assert run.process.poll() is None, run.text()[-3000:]
        run.sigkill()
        longest = max(longest, await_true(lambda: not run.left(), 15, lambda: f"left: {run.left()}"))
    times["driver SIGKILL: nothing left on any host, longest of 20"] = longest
    run.start().end(240)
    run.check_whole(24)
