"""Nodes that share a machine: starts overlap, measurements are alone, and a dead holder blocks nobody."""

import multiprocessing as mp
import os
import signal
import time

import pytest

from raytune_eagle.nodes.turns import FileTurns, FreeForAll

pytestmark = pytest.mark.slow  # waiting is what is tested


def hold(folder, kind, seconds, log):
    with getattr(FileTurns(folder), kind)():
        log.put((kind, "in", time.monotonic()))
        time.sleep(seconds)
        log.put((kind, "out", time.monotonic()))


def play(folder, *parts):
    """Start each (delay, kind, seconds) in a process of its own; return what happened in order of time."""
    context = mp.get_context("fork")
    log, processes = context.SimpleQueue(), []
    for delay, kind, seconds in parts:
        time.sleep(delay)
        processes.append(context.Process(target=hold, args=(str(folder), kind, seconds, log)))
        processes[-1].start()
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    events = []
    while not log.empty():
        events.append(log.get())
    return [f"{kind} {what}" for kind, what, _ in sorted(events, key=lambda event: event[2])]


def test_starts_overlap(tmp_path):
    """Two that start or stop servers do not wait for each other."""
    assert play(tmp_path, (0, "busy", 0.6), (0.1, "busy", 0.6)) == ["busy in", "busy in", "busy out", "busy out"]


def test_measurements_are_alone(tmp_path):
    """Two measurements come one after the other."""
    assert play(tmp_path, (0, "quiet", 0.5), (0.1, "quiet", 0.2)) == ["quiet in", "quiet out"] * 2


def test_a_waiting_measurement_is_not_overtaken(tmp_path):
    """A start that comes after a waiting measurement waits for it, or starts could keep it out for ever."""
    order = play(tmp_path, (0, "busy", 0.8), (0.2, "quiet", 0.2), (0.2, "busy", 0.1))
    assert order == ["busy in", "busy out", "quiet in", "quiet out", "busy in", "busy out"]


@pytest.mark.parametrize("kind", ["busy", "quiet"])
def test_a_killed_holder_blocks_nobody(tmp_path, kind):
    """The kernel gives the lock of a killed process back."""
    context = mp.get_context("fork")
    log = context.SimpleQueue()
    holder = context.Process(target=hold, args=(str(tmp_path), kind, 60, log))
    holder.start()
    assert log.get()[1] == "in"
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(10)
    with FileTurns(str(tmp_path)).quiet():
        assert holder.exitcode == -signal.SIGKILL


def test_free_for_all_never_waits():
    """A node that has its machine to itself takes no turns."""
    turns = FreeForAll()
    with turns.quiet(), turns.busy(), turns.quiet():
        assert turns.quiet() is not None
