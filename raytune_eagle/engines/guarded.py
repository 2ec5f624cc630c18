"""Processes that cannot outlive their owner: the owner's side of ``guard.py``.

Use from any thread; one `Guarded` is for one thread at a time, but for `poll`, which any may call.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from raytune_eagle.engines import guard

STOP_S = 30.0
"""Seconds beyond the grace that the dead may take to be gone; longer means that the kernel cannot end them."""


class StillAliveError(OSError):
    """Processes are still there after SIGKILL: they hang in the kernel (a stuck GPU or file server)."""


class Guarded:
    """A command that dies, with everything it started, with this process or at `stop`, whichever comes first.

    Args:
        argv: the command, without a shell.
        env: its whole environment; None is a copy of ours.
        stdout: where its output and errors go; None discards them.
        grace_s: seconds between SIGTERM and SIGKILL.
        remove: directories to remove once everything is dead, also when this process was killed.
        cores: CPU cores that it may use; None is all of ours.

    Attributes:
        pid: of the command.
        guard_pid: of its guard.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | None = None,
        grace_s: float = 1.0,
        remove: Sequence[Path | str] = (),
        cores: Sequence[int] | None = None,
    ) -> None:
        self.argv, self.env, self.stdout = list(argv), env, stdout
        self.grace_s, self.remove, self.cores = grace_s, [str(folder) for folder in remove], cores
        self.pid = self.guard_pid = 0
        self._code: int | None = None
        self._gone = self._stopped = False
        self._lock = threading.Lock()
        self._unread = b""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Start the command and return once it runs; OSError when it cannot be executed."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._spawn(theirs.fileno())
        try:
            self._await_pid()
        except BaseException:
            self._socket.close()
            raise
        return self

    def _spawn(self, report: int) -> None:
        options = {
            "report": report,
            "owner": os.getpid(),
            "grace_s": self.grace_s,
            "remove": self.remove,
            "cores": self.cores,
        }
        output = subprocess.DEVNULL if self.stdout is None else self.stdout
        # -I -S: nothing of the environment or of site-packages, which would multiply the start time
        first = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, json.dumps(options), *self.argv],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[report],
        )
        first.wait()  # it has left the guard behind and ended

    def _await_pid(self) -> None:
        """Wait for the guard's first line."""
        self._socket.settimeout(STOP_S)
        while not self.pid:
            received = self._socket.recv(4096)
            self._take(received)
            if not received:
                raise OSError(f"the guard of {self.argv[0]} did not start")
        self._socket.settimeout(0)

    def _take(self, received: bytes) -> None:
        """Understand what the guard said."""
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            match word:
                case "pid":
                    self.pid, self.guard_pid = map(int, rest.split())
                case "exit":
                    self._code = int(rest)
                case "gone":
                    self._gone = True
                case "error":
                    number, _, message = rest.partition(" ")
                    raise OSError(int(number), message, self.argv[0])

    def _listen(self, timeout_s: float) -> bool:
        """Read what the guard has to say; False when it is gone."""
        try:
            self._socket.settimeout(timeout_s)
            while received := self._socket.recv(4096):
                self._take(received)
        except (BlockingIOError, TimeoutError):
            return True
        except OSError:
            pass  # closed by `stop`, or reset: the guard was killed
        return False

    def _await_guard(self) -> None:
        """Its socket closes a moment before it is gone itself."""
        deadline = time.monotonic() + 1
        while guard.started(self.guard_pid) and time.monotonic() < deadline:
            time.sleep(0.002)

    def poll(self) -> int | None:
        """Exit code of the command (negative: the signal that ended it), None while it runs; never waits."""
        with self._lock:
            left = self._code is not None or self._listen(0)
            if self._code is None and not left:
                self._code = -signal.SIGKILL  # the guard was killed, and with it the command
            return self._code

    def wait(self, timeout_s: float) -> int | None:
        """Like `poll`, after waiting up to `timeout_s` for the end."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.poll()

    def stop(self) -> None:
        """End the command and all it started; return when nothing is left. Safe to call twice.

        Raises:
            StillAliveError: some of it cannot be killed.
        """
        with self._lock:
            if self._stopped:
                return
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)  # what the guard sees when we die, too
            left = self._listen(self.grace_s + STOP_S)
            self._socket.close()
            if left:
                raise StillAliveError(f"{self.argv[0]} (pid {self.pid}) or a process it started cannot be killed")
            self._await_guard()
            if not self._gone:
                sweep()  # the guard was killed: so is the command, but perhaps not what that started
                for folder in self.remove:
                    shutil.rmtree(folder, ignore_errors=True)
            self._stopped = True
            if self._code is None:
                self._code = -signal.SIGKILL


def marked() -> dict[int, str]:
    """Mark of each process that some guard started, as far as we may look; both of our own pid namespace."""
    ours = guard.pid_namespace()
    found = {}
    for pid in guard.parents():
        try:
            if Path(f"/proc/{pid}/ns/pid").stat().st_ino != ours:
                continue
            entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        variables = dict(entry.partition("=")[::2] for entry in entries)
        if guard.MARK in variables and variables.get(guard.NAMESPACE_MARK, str(ours)) == str(ours):
            found[pid] = variables[guard.MARK]
    return found


def noted() -> dict[int, Path]:
    """Notes of guards of our pid namespace that are dead, by the guard's pid, which is its session's number too."""
    ours = guard.pid_namespace()
    found = {}
    for path in Path(guard.NOTES).glob(f"{ours}-*-*"):
        _, pid, start = path.name.split("-")
        if not _alive(f"{pid}:{start}"):
            found[int(pid)] = path
    return found


def _in_sessions(sessions: set[int]) -> list[int]:
    """Processes in these sessions, as far as their leader is gone: else the number was given to someone else."""
    dead = {session for session in sessions if guard.started(session) is None}
    found = []
    for pid in guard.parents() if dead else ():
        with suppress(OSError):
            if os.getsid(pid) in dead and guard.started(pid):
                found.append(pid)
    return found


def sweep(timeout_s: float = 10.0) -> list[int]:
    """Kill what guards that were SIGKILLed have left behind on this machine; return the pids.

    Safe while other guards run: a process is touched only when the very guard that it names is dead, or when it is in
    the session of one that is.
    """
    swept: list[int] = []
    deadline = time.monotonic() + timeout_s
    notes = noted()
    while orphans := {pid for pid, mark in marked().items() if not _alive(mark)} | set(_in_sessions(set(notes))):
        guard.send(list(orphans), signal.SIGKILL)
        swept += sorted(orphans - set(swept))
        if time.monotonic() > deadline:
            raise StillAliveError(f"processes {sorted(orphans)} of a guard that is dead cannot be killed")
        time.sleep(0.02)
    for path in notes.values():
        path.unlink(missing_ok=True)
    return swept


def _alive(mark: str) -> bool:
    """Whether the guard of this mark still runs."""
    pid, _, start = mark.partition(":")
    return not pid.isdigit() or guard.started(int(pid)) == start
