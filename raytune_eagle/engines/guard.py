"""Runs a command so that it and all its descendants die when its owner dies or the command ends.

``python -I -S guard.py OPTIONS-AS-JSON COMMAND…``; see `main`. Start it through `raytune_eagle.engines.guarded`.

How: the guard is a child subreaper, so that orphaned descendants, whatever session they moved to, become its children;
it kills them over and over until it has none. It learns of its owner's death from a socket that closes (and from a
pidfd, should a fork of the owner hold that socket open). The command has PR_SET_PDEATHSIG, so it dies with the guard
too. A second fork makes the guard nobody's direct child: an orderly Ray worker SIGKILLs its direct children, which
would take the guard before the grandchildren.

Standard library only and no package imports: it starts in some 30 ms, in whatever interpreter.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time

MARK = "RAYTUNE_EAGLE_GUARD"
"""Environment variable of everything that a guard runs: ``PID:START`` of the guard, for `guarded.sweep`."""

NAMESPACE_MARK = f"{MARK}_NAMESPACE"
"""Beside it the namespace in which that is its pid: in a container that something guarded started it means another."""

NOTES = f"/tmp/raytune-eagle-guards-{os.getuid()}"  # noqa: S108  a fixed place, whatever TMPDIR a guard was given
"""Folder with one empty file per guard, ``PIDNAMESPACE-PID-START``, removed at its end.

For `guarded.sweep`, too: programs that set their title, as SGLang's schedulers do, overwrite their environment, but
they are in the guard's session.
"""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LOOK_S = 0.02
"""Seconds between two looks at who is left."""

libc = ctypes.CDLL(None, use_errno=True)


def started(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, which tells it from a later one of its number; None: dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123  pathlib would double the start time
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if len(fields) < 20 or fields[0] in b"ZX" else fields[19].decode()  # noqa: PLR2004


def pid_namespace() -> int:
    """Ours: elsewhere pids mean other processes."""
    return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116


def note() -> str | None:
    """Leave a file that tells of this guard; None where that is not possible."""
    me = os.getpid()
    try:
        os.makedirs(NOTES, mode=0o700, exist_ok=True)  # noqa: PTH103
        path = f"{NOTES}/{pid_namespace()}-{me}-{started(me)}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError:
        return None
    return path


def parents() -> dict[int, int]:
    """Parent of each process of the machine."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:  # noqa: PTH123
                    found[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it ended meanwhile
    return found


def descendants(root: int) -> list[int]:
    """All processes below `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def send(pids: list[int], number: int) -> None:
    """Signal each of them; those that are gone are passed over."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


class Guard:
    """One command and what it leaves behind. `report` is the socket to the owner."""

    def __init__(self, command: list[str], report: int, cores: list[int] | None) -> None:
        self.command, self.report, self.cores = command, report, cores
        self.pid = 0
        self.code: int | None = None
        self.stopping = False
        self.wake, wake_end = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_end, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in STOP_SIGNALS:
            signal.signal(number, self.on_stop)

    def on_stop(self, *_: object) -> None:
        """Remember that someone asked us to end."""
        self.stopping = True

    def tell(self, text: str) -> None:
        """Send a line to the owner, who may be gone."""
        try:
            os.write(self.report, f"{text}\n".encode())
        except OSError:
            self.stopping = True  # nobody is left to work for

    def start(self) -> None:
        """Fork and execute the command; a command that cannot be executed is told as ``error``."""
        me = os.getpid()
        os.environ |= {MARK: f"{me}:{started(me)}", NAMESPACE_MARK: str(pid_namespace())}
        failure, failure_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.become_command(me, failure_end)
        os.close(failure_end)
        message = os.read(failure, 4096).decode()
        os.close(failure)
        self.tell(f"error {message}" if message else f"pid {self.pid} {me}")

    def become_command(self, guard: int, failure: int) -> None:
        """In the child: die with the guard, then turn into the command."""
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:
                os._exit(1)
            os.setpgid(0, 0)  # what signals its whole group, as Ray's reaper does with SIGKILL, must not hit the guard
            if self.cores:
                os.sched_setaffinity(0, self.cores)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these; the command should not
                signal.signal(number, signal.SIG_DFL)
            os.execvp(self.command[0], self.command)  # noqa: S606  a command line without a shell
        except (OSError, ValueError) as error:
            os.write(failure, f"{getattr(error, 'errno', 0)} {error}".encode())
        finally:
            os._exit(127)

    def reap(self) -> bool:
        """Collect children that ended, and tell the command's exit status; False when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.tell(f"exit {self.code}")

    def watch(self, owner: int) -> None:
        """Return when the command ended, the owner died or asked, or a signal came."""
        ends = [self.report]
        try:  # noqa: SIM105  contextlib would slow the start
            ends.append(os.pidfd_open(owner))
        except OSError:
            pass  # an old kernel or a strict container: the socket is enough but for a fork that keeps it open
        while True:
            ready = select.select([*ends, self.wake], [], [])[0]
            if self.wake in ready:
                os.read(self.wake, 4096)
                self.reap()
            if self.stopping or self.code is not None or any(end in ready for end in ends):
                return

    def end(self, grace_s: float) -> None:
        """SIGTERM everything, SIGKILL what is left after `grace_s`, return when nothing is."""
        me = os.getpid()
        send(descendants(me), signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.reap():
            if time.monotonic() >= deadline:
                send(descendants(me), signal.SIGKILL)
            time.sleep(LOOK_S)


def detach() -> None:
    """Become nobody's child, in a session of our own, and the one who inherits every orphan below."""
    if os.fork():
        os._exit(0)
    os.setsid()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main(options: str, *command: str) -> None:
    """Options: report (file descriptor), owner (pid), grace_s, remove (directories), cores."""
    asked = json.loads(options)
    os.set_inheritable(asked["report"], False)
    detach()
    noted = note()
    guard = Guard(list(command), asked["report"], asked["cores"])
    guard.start()
    guard.watch(asked["owner"])
    guard.end(asked["grace_s"])
    if asked["remove"]:
        import shutil  # noqa: PLC0415  only where needed: it would slow every start

        for folder in asked["remove"]:
            shutil.rmtree(folder, ignore_errors=True)
    if noted:
        os.unlink(noted)  # noqa: PTH108
    guard.tell("gone")
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
