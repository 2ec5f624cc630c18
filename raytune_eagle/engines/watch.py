"""Watches a server from outside: its processes, its log, its CPU time and its port."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from raytune_eagle.engines.guarded import Guarded
from raytune_eagle.failures import hangs
from raytune_eagle.logs import lines, progress

CPU_SHARE = 0.2
"""Less CPU than this share of one core, over all processes, is waiting and not work."""
SERVER_TITLES = ("sglang::", "spawn_main")
"""In the command lines of processes without which a server cannot go on; others (compilers) may come and go."""
SETTLED_S = 2.0
"""A fork has its parent's command line until it executes something else: only what kept its title so long is needed."""


@dataclass
class Processes:
    """The server's processes; those that it needs are remembered once seen."""

    guarded: Guarded
    needed: dict[int, psutil.Process] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)

    def tree(self) -> list[psutil.Process]:
        """All that live now, the launcher first."""
        try:
            launcher = psutil.Process(self.guarded.pid)
            found = [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self.pids |= {process.pid for process in found}
        for process in found[1:]:
            if process.pid not in self.needed and _is_needed(process):
                self.needed[process.pid] = process
        return found

    def dead(self) -> str | None:
        """Which of the processes that the server needs has died, in words; None while all live."""
        code = self.guarded.poll()
        if code is not None:
            return f"the server's first process ended with {code}"
        self.tree()
        for pid, process in self.needed.items():
            if not _lives(process):
                return f"process {pid} of the server died"
        return None

    def cpu_s(self) -> float:
        """CPU seconds spent so far by those that live."""
        total = 0.0
        for process in self.tree():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system
        return total

    def listen_on(self, port: int) -> bool | None:
        """Whether one of ours listens on this port: None when nobody is known to, False when a stranger does.

        A socket that came while psutil looked has no owner yet: it is left for the next look, or a server of ours
        that has just begun to listen would be taken for a stranger.
        """
        ours = {process.pid for process in self.tree()}
        listeners = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        owners = [each.pid for each in listeners if each.laddr and each.laddr.port == port and each.pid is not None]
        if not owners:
            return None
        return any(pid in ours for pid in owners)


def _is_needed(process: psutil.Process) -> bool:
    try:
        if time.time() - process.create_time() < SETTLED_S:
            return False
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(title in line for title in SERVER_TITLES)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class LogFollower:
    """Reads what is new in a log, whole lines at a time; what was read is not read again.

    Attributes:
        gave_up: a line so far says that the server did; see `raytune_eagle.failures.hangs`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.at, self.size = path, 0, 0
        self.gave_up = False
        self.last: tuple[str, str] | None = None

    def news(self) -> tuple[bool, list[tuple[str, str]]]:
        """Whether the log grew, and what it says of progress that it had not said just before."""
        with self.path.open("rb") as log:
            log.seek(self.at)
            new = log.read()
        self.gave_up = self.gave_up or hangs(new.decode(errors="replace"))
        size, whole = self.at + len(new), new[: max(new.rfind(b"\n"), new.rfind(b"\r")) + 1]
        grew, self.size, self.at = size > self.size, size, self.at + len(whole)
        events = []
        for line in lines(whole.decode(errors="replace")):
            if (event := progress(line)) and event != self.last:
                self.last = event
                events.append(event)
        return grew, events


class Stall:
    """Tells when neither the log nor the CPU has moved for too long."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.since = self.looked_at = time.monotonic()
        self.cpu_s = 0.0

    def over(self, cpu_s: float, *, grew: bool) -> bool:
        """To be called often; CPU time counts as progress when it is more than idle threads use."""
        now = time.monotonic()
        worked = (cpu_s - self.cpu_s) / max(now - self.looked_at, 1e-3) >= CPU_SHARE
        self.looked_at, self.cpu_s = now, cpu_s
        if grew or worked:
            self.since = now
        return now - self.since > self.limit_s
