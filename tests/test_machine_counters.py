"""What the kernel tells of a machine: who listens on a port, and kills for want of memory."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil

from raytune_eagle.engines import launch, watch
from raytune_eagle.engines.guarded import Guarded
from raytune_eagle.engines.memory import oom_kills


def test_stranger_on_our_port_is_recognised():
    """The port counts as ours only when a process of our guarded tree listens on it."""
    with socket.create_server(("127.0.0.1", 0)) as stranger, Guarded(["sleep", "600"]) as guarded:
        port = stranger.getsockname()[1]
        assert watch.Processes(guarded).listen_on(port) is False
        assert watch.Processes(guarded).listen_on(launch.free_ports("127.0.0.1", 1)[0]) is None


def test_listener_without_a_known_owner_is_no_stranger(monkeypatch):
    """A socket that came while psutil looked has no owner yet: our own server must not be taken for another."""
    socket_just_opened = SimpleNamespace(status=psutil.CONN_LISTEN, laddr=SimpleNamespace(port=4242), pid=None)
    monkeypatch.setattr(psutil, "net_connections", lambda kind: [socket_just_opened])
    with Guarded(["sleep", "60"]) as guarded:
        assert watch.Processes(guarded).listen_on(4242) is None


def test_kills_for_want_of_memory_are_counted(tmp_path):
    """By the kernel's own counters, as far as there are any."""
    counters = [tmp_path / "vmstat", tmp_path / "memory.events", tmp_path / "none"]
    counters[0].write_text("nr_free_pages 5\noom_kill 3\n")
    counters[1].write_text("low 0\noom 1\noom_kill 1\noom_group_kill 0\n")
    assert oom_kills(counters) == 4
    assert oom_kills([tmp_path / "none"]) == 0
    assert "oom_kill" in Path("/proc/vmstat").read_text(), "the kernel that this runs on counts"
