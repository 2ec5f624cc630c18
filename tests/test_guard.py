"""What a guard promises: however its owner, its command or it itself ends, nothing of the command is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import raytune_eagle
from raytune_eagle.engines import guard
from raytune_eagle.engines.guarded import Guarded, marked, sweep

SLEEP = "import time; time.sleep(600)"
DAEMON = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
# a child, one with a session of its own, and a daemon that forked twice
FAMILY = f"""
import subprocess, sys, time
for code, session in [({SLEEP!r}, False), ({SLEEP!r}, True), ({DAEMON!r}, False)]:
    subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=session).poll()
"""
ENDING = f"{FAMILY}time.sleep(1); sys.exit(7)"
FAMILY += "time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{FAMILY}"
# an owner in a process of its own: starts argv[1] under a guard, tells its pids, and ends as argv[3] says
OWNER = """
import os, sys
from raytune_eagle.engines import guard
from raytune_eagle.engines.guarded import Guarded
guarded = Guarded([sys.executable, "-S", "-c", sys.argv[1]], remove=[sys.argv[2]]).start()
print(guarded.guard_pid, flush=True)
sys.stdin.readline()
exec(sys.argv[3])
"""
# inside a guard: one more guard, with a family of its own
NESTED = f"""
import sys, time
from raytune_eagle.engines import guard
from raytune_eagle.engines.guarded import Guarded
inner = Guarded([sys.executable, "-S", "-c", {FAMILY!r}]).start()
time.sleep(600)
"""
ROOT = str(Path(raytune_eagle.__file__).parents[1])


def family(guard_pid, size):
    """The guard and its descendants, once they are `size` and have all become what they will be."""
    top = psutil.Process(guard_pid)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        members = living(top.children(recursive=True))
        if len(members) == size and sum(is_daemon(member) for member in members) == 1:
            return [top, *members]
        time.sleep(0.02)
    raise AssertionError(f"{len(members)} processes instead of {size}: {members}")


def is_daemon(process):
    """Whether it is (or will be) the one that forked twice."""
    try:
        return process.cmdline()[-1:] == [DAEMON]
    except psutil.Error:
        return False


def living(processes):
    """Those that run; a zombie has ended, whoever should collect it."""
    found = []
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def await_end(processes, timeout_s=4.0):
    """Processes that are left after a while."""
    deadline = time.monotonic() + timeout_s
    while living(processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    return living(processes)


@pytest.fixture
def owner(tmp_path):
    """Start an owner; gives it and its guard's pid."""
    started = []

    def start(command, ending="pass"):
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, command, str(tmp_path / "remove"), ending],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": ROOT},
        )
        (tmp_path / "remove" / "below").mkdir(parents=True)
        started.append(process)
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


ENDINGS = {
    "killed": None,
    "os._exit": "os._exit(3)",
    "end of program": "pass",
    "exception": "raise SystemError",
    "a fork keeps the socket": "os.set_inheritable(guarded._socket.fileno(), True); "
    "os.posix_spawn('/bin/sleep', ['sleep', '8'], os.environ); os._exit(0)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_outlives_the_owner(owner, tmp_path, ending):
    """However the owner ends, children, other sessions and daemons are gone, and so is the directory to remove."""
    process, guard_pid = owner(FAMILY, ENDINGS[ending] or "pass")
    members = family(guard_pid, 4)
    if ENDINGS[ending] is None:
        process.kill()
    else:
        process.stdin.write(b"\n")
        process.stdin.flush()
    process.wait(20)
    assert await_end(members) == []
    assert not (tmp_path / "remove").exists()


def test_nested_guards_end_together(owner):
    """A guard inside the tree of another: when the outer owner is killed, both trees are gone."""
    process, guard_pid = owner(f"import sys; sys.path.insert(0, {ROOT!r})\n{NESTED}")
    members = family(guard_pid, 6)
    process.kill()
    assert await_end(members) == []


def test_guard_told_to_end_takes_all_with_it(owner):
    """SIGTERM to the guard alone ends everything, and the owner learns of its command's end."""
    _, guard_pid = owner(FAMILY)
    members = family(guard_pid, 4)
    os.kill(guard_pid, signal.SIGTERM)
    assert await_end(members) == []


def test_end_of_the_command_ends_the_rest_and_is_told_at_once():
    """A command that ends leaves no grandchild, and its exit code is known within 2 s (here: much less)."""
    with Guarded([sys.executable, "-S", "-c", ENDING]) as one:
        family(one.guard_pid, 4)
        started = time.monotonic()
        assert one.wait(10) == 7
        assert time.monotonic() - started < 1 + 2
    assert not [pid for pid, mark in marked().items() if mark.startswith(f"{one.guard_pid}:")]


def test_stop_kills_what_ignores_sigterm():
    """After the grace comes SIGKILL; `stop` returns when nothing is left, and can be called again."""
    with Guarded([sys.executable, "-S", "-c", STUBBORN], grace_s=0.3) as one:
        members = family(one.guard_pid, 4)
        started = time.monotonic()
        one.stop()
        assert 0.3 <= time.monotonic() - started < 3
        assert living(members[1:]) == []
        assert one.poll() == -signal.SIGKILL
        one.stop()


def test_command_outlives_the_thread_that_started_it():
    """PDEATHSIG fires when a *thread* ends: the guard starts the command, so the owner's thread may end."""
    one = Guarded(["sleep", "600"])
    thread = threading.Thread(target=one.start)
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert one.poll() is None
    one.stop()
    assert one.poll() == -signal.SIGTERM


@pytest.mark.alone  # a test beside it that sweeps would be first
def test_killed_guard_is_noticed_and_swept():
    """SIGKILL of the guard ends the command; what survives is found by its mark, and only that."""
    with Guarded(["sleep", "600"]) as bystander, Guarded([sys.executable, "-S", "-c", FAMILY]) as one:
        members = family(one.guard_pid, 4)
        os.kill(one.guard_pid, signal.SIGKILL)
        assert one.wait(3) == -signal.SIGKILL
        survivors = {each.pid for each in await_end(members, 0.3)}
        assert survivors, "else there would be nothing to sweep"
        assert survivors <= set(sweep())
        assert await_end(members) == []
        assert bystander.poll() is None
        assert bystander.pid in marked()


@pytest.mark.alone  # a test beside it that sweeps would be first
def test_orphans_without_their_environment_are_swept_by_their_session():
    """SGLang's schedulers overwrite their environment when they set their title: the guard's session tells them."""
    bare = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-S', '-c', {SLEEP!r}], env={{}})"
    with Guarded([sys.executable, "-S", "-c", f"{bare}; time.sleep(600)"]) as one:
        command = psutil.Process(one.pid)
        while not (children := command.children()) or SLEEP not in " ".join(children[0].cmdline()):
            time.sleep(0.02)
        os.kill(one.guard_pid, signal.SIGKILL)
        assert one.wait(3) == -signal.SIGKILL
        assert children[0].pid not in marked(), "else it would be found anyway"
        assert living(children) == children
        assert sweep() == [children[0].pid]
        assert await_end(children) == []
        assert sweep() == []


def test_guards_leave_no_notes():
    """The file that tells of a guard is there while it runs, and no longer."""
    with Guarded(["sleep", "600"]) as one:
        pattern = f"*-{one.guard_pid}-*"
        assert len(list(Path(guard.NOTES).glob(pattern))) == 1
    assert list(Path(guard.NOTES).glob(pattern)) == []


def test_sweep_leaves_what_a_guard_outside_of_our_container_runs():
    """A mark from another pid namespace says nothing here: there its number means another process."""
    env = {**os.environ, guard.MARK: "1:1", guard.NAMESPACE_MARK: str(guard.pid_namespace() + 1)}
    with subprocess.Popen([sys.executable, "-S", "-c", SLEEP], env=env) as process:
        time.sleep(0.3)
        assert process.pid not in marked()
        assert process.pid not in sweep()
        assert process.poll() is None
        process.kill()


def test_stop_after_a_killed_guard_sweeps_and_removes(tmp_path):
    """An owner whose guard was killed cleans up itself."""
    folder = tmp_path / "remove"
    folder.mkdir()
    with Guarded([sys.executable, "-S", "-c", FAMILY], remove=[folder]) as one:
        members = family(one.guard_pid, 4)
        os.kill(one.guard_pid, signal.SIGKILL)
        one.stop()
    assert await_end(members, 0.5) == []
    assert not folder.exists()


def test_command_that_kills_its_whole_group_spares_the_guard(tmp_path):
    """Ray's reaper ends with SIGKILL to its process group: the guard is not in it, and clears up by itself."""
    folder = tmp_path / "remove"
    folder.mkdir()
    one = Guarded([sys.executable, "-S", "-c", SLEEP], remove=[folder]).start()
    group = os.getpgid(one.pid)
    assert group != os.getpgid(one.guard_pid)
    os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:  # nobody but the guard removes it: `stop` comes later
        time.sleep(0.02)
    assert not folder.exists()
    one.stop()


def test_command_that_cannot_be_executed_is_an_error():
    """No silent start: the errno comes back through the guard."""
    with pytest.raises(FileNotFoundError, match="/no/such/program"):
        Guarded(["/no/such/program"]).start()


def test_output_environment_and_cores_reach_the_command(tmp_path):
    """The command sees the environment, the log and the cores that it was given."""
    core = min(os.sched_getaffinity(0))
    with (tmp_path / "log").open("wb") as log:
        code = "import os; print(os.environ['MINE'], sorted(os.sched_getaffinity(0)))"
        with Guarded([sys.executable, "-c", code], env={"MINE": "yes"}, stdout=log, cores=[core]) as one:
            assert one.wait(10) == 0
    assert (tmp_path / "log").read_text() == f"yes [{core}]\n"
