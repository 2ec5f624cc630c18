"""What the engine does when a start or a server goes wrong, against a fake server program."""

from __future__ import annotations

import gzip
import http.client
import os
import signal
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from raytune_eagle.engines import watch
from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.sglang import SglangEngine
from raytune_eagle.errors import BenchError, LaunchError, NodeError, SpecError
from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.trial import Job
from raytune_eagle.model.workload import Workload

FAKE = Path(__file__).parent / "fakes" / "launch_server.py"

LOGS = Path(__file__).parent / "assets" / "logs"

SESSION = f"{os.getpid()}-{time.time()}"

SPEC = Speculative(draft="builtin:tiny", num_steps=3, eagle_topk=4, num_draft_tokens=12)


def job(faults="", **changes):
    """A trial whose server has these faults."""
    config = Config(model="any", launcher=("python3", str(FAKE)), env={"RAYTUNE_FAKE": faults}, speculative=SPEC)
    config = config.model_copy(update=changes)
    return Job(study="s", number=7, kind="trial", config=config, workload=Workload(prompts=()))


@pytest.fixture
def settings(tmp_path):
    """Limits that a loaded machine keeps, and a folder of its own."""
    return Settings(work_dir=tmp_path / "logs", start_stall_s=20, start_timeout_s=30)


@pytest.fixture
def seen():
    """Progress events, in order."""
    return []


@pytest.fixture
def serve(settings, seen):
    """Serve with these settings and note progress."""

    def start(job, **changes):
        engine = SglangEngine(Settings(**{**vars(settings), **changes}))
        return engine.serve(job, lambda name, detail: seen.append((name, detail)))

    return start


@pytest.fixture(autouse=True)
def session(monkeypatch, tmp_path):
    """Marks what these tests start: other sessions may run the same fake at the same time."""
    monkeypatch.setenv("RAYTUNE_TEST_SESSION", SESSION)
    (tmp_path / "secrets").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "secrets"))


def descendants():
    """Living processes that these tests started; guards are nobody's children, so the environment tells."""
    return {
        process.pid for process in psutil.process_iter() if _environ(process).get("RAYTUNE_TEST_SESSION") == SESSION
    }


def _environ(process):
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def post(server, body=b"{}"):
    """One request, as a client would send it."""
    request = urllib.request.Request(f"{server.url}/generate", body, server.headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read()


STREAM = b'{"text": "x", "stream": true, "sampling_params": {"max_new_tokens": 200}}'


def fails(serve, job, **changes):
    """The error of a start, and how long it took."""
    started = time.monotonic()
    with pytest.raises(LaunchError) as caught, serve(job, **changes):
        pytest.fail("the server was called ready")
    assert not descendants()
    return caught.value, time.monotonic() - started


def test_ended_start_is_classified_from_its_log(serve):
    """A server that ends is noticed within 2 s, and the failure is what its log says, with the log's tail."""
    error, took = fails(serve, job(f"exit={LOGS / 'fail_0516_h200_oom_kv.log'}"))
    assert error.failure_class == "oom_kv"
    assert "leave no GPU memory" in error.log_tail
    assert "Load weight begin" in gzip.decompress(error.server_log).decode()
    assert took < 2 + 2


def test_crash_counts_against_its_configuration(serve):
    """A scheduler that crashed while the launcher then killed itself is not put down to the machine."""
    error, _ = fails(serve, job(f"exit={LOGS / 'fail_0520_cpu_segfault.log'}:137"))
    assert error.failure_class == "crashed"
    assert "SIGSEGV" in error.detail


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "stall"])
def test_start_that_does_nothing_is_ended_as_stalled(serve, fault):
    """No new log bytes and no CPU work for start_stall_s: ended long before start_timeout_s."""
    error, took = fails(serve, job(fault), start_stall_s=3)
    assert error.failure_class == "stalled"
    assert 3 <= took < 15


@pytest.mark.slow
def test_start_that_never_ends_is_ended(serve):
    """A server that goes on logging but never serves is ended at start_timeout_s."""
    error, took = fails(serve, job("never_ready"), start_timeout_s=3)
    assert error.failure_class == "start_timeout"
    assert 3 <= took < 15


@pytest.mark.slow
def test_a_large_log_is_not_read_again_at_each_growth(serve, tmp_path):
    """A start that logs megabytes is read once as it grows, and three times when it is ended: not the square of it."""
    before = psutil.Process().io_counters().read_chars
    fails(serve, job("never_ready=100"), start_timeout_s=5)
    read, (log,) = psutil.Process().io_counters().read_chars - before, (tmp_path / "logs").rglob("*.log")
    assert log.stat().st_size > 2_000_000
    assert read < 4.6 * log.stat().st_size


@pytest.mark.slow
def test_port_that_was_taken_is_told_and_tried_again(serve, seen):
    """SGLang hangs when its port is taken, deaf to SIGTERM: ended, told as what it is, tried once more on another."""
    error, _ = fails(serve, job("take_port"), start_stall_s=3)
    assert error.failure_class == "port_taken"
    assert [name for name, _ in seen].count("launch") == 2
    assert [name for name, _ in seen].count("retry") == 1


@pytest.mark.parametrize("name", ["graph_capture_failed", "port_taken"])
def test_failure_that_passes_costs_one_retry(serve, seen, tmp_path, name):
    """A transient failure at the first start only: the second serves, and the retry is an event."""
    env = {"RAYTUNE_FAKE": f"exit={LOGS / f'made_{name}.log'}", "RAYTUNE_FAKE_ONCE": str(tmp_path / "once")}
    with serve(job(env=env)) as server:
        server.check()
    assert [event for event, _ in seen if event in ("launch", "retry", "ready")] == [
        "launch",
        "retry",
        "launch",
        "ready",
    ]
    assert next(detail for event, detail in seen if event == "retry").startswith(name)


def test_failure_that_stays_is_not_retried(serve, seen):
    """What will fail again is not launched again."""
    fails(serve, job(f"exit={LOGS / 'made_cuda_ima.log'}"))
    assert [name for name, _ in seen].count("launch") == 1


@pytest.mark.parametrize(
    ("log", "error"),
    [("made_disk_full.log", NodeError), ("made_gpu_lost.log", NodeError), ("made_sglang_missing.log", SpecError)],
)
def test_fault_of_machine_or_spec_is_not_the_configurations(serve, log, error):
    """A broken machine is a NodeError, a spec that cannot run anywhere a SpecError."""
    with pytest.raises(error), serve(job(f"exit={LOGS / log}")):
        pytest.fail("the server was called ready")
    assert not descendants()


def test_interpreter_that_is_not_there_is_a_mistake_in_the_spec(serve, tmp_path):
    """engine.python that names nothing: SpecError, and the key file is gone."""
    with pytest.raises(SpecError, match=r"engine\.python"), serve(job(), python=str(tmp_path / "python3")):
        pytest.fail("nothing was there to start")
    assert list((tmp_path / "secrets").iterdir()) == []


def test_refused_generations_end_a_start(serve):
    """A healthy server that refuses to generate is not ready, and its words are kept."""
    error, _ = fails(serve, job("refuse"))
    assert error.failure_class == "generation_failed"
    assert "refused, as RAYTUNE_FAKE asks" in error.detail


def test_server_of_another_model_is_not_ours(serve, seen):
    """/server_info with another model path: not our server, whatever it answers; tried once more on another port."""
    error, _ = fails(serve, job("wrong_model"))
    assert error.failure_class == "port_taken"
    assert "/another/model" in error.detail
    assert [name for name, _ in seen].count("retry") == 1


def test_death_in_mid_stream_is_a_bench_error(serve):
    """A server that dies at work: its class from the log, within 2 s."""
    with serve(job("die=40")) as server:
        server.check()
        with pytest.raises((OSError, http.client.HTTPException)):
            post(server, STREAM)
        with pytest.raises(BenchError) as caught:
            until_dead(server)
    assert caught.value.failure_class == "cuda_ima"


@pytest.mark.slow
def test_death_of_a_scheduler_is_noticed_though_the_server_lives_on(serve):
    """The first process goes on answering; the death of one that it needs is noticed within 2 s all the same."""
    with serve(job("kill_scheduler=60")) as server:
        time.sleep(watch.SETTLED_S)
        server.check()
        post(server, STREAM)
        with pytest.raises(BenchError, match=r"process \d+ of the server died"):
            until_dead(server)


def until_dead(server):
    """Check each tenth of a second for 2 s."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        server.check()
        time.sleep(0.1)


def test_exit_ends_what_resists_and_hides(serve):
    """A server deaf to SIGTERM, with children in sessions of their own: all gone, in little more than the grace."""
    with serve(job("ignore_sigterm,grandchildren")) as server:
        tree = psutil.net_connections("tcp")
        port = int(server.url.rpartition(":")[2])
        first = next(psutil.Process(each.pid) for each in tree if each.status == "LISTEN" and each.laddr.port == port)
        family = [first, *first.parent().children(recursive=True)]
        assert len(family) >= 5
        started = time.monotonic()
    assert time.monotonic() - started < 4
    assert not [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def test_error_of_the_body_passes_and_the_server_is_gone(serve):
    """What goes wrong while measuring reaches the caller unchanged."""
    with pytest.raises(ZeroDivisionError), serve(job()):
        raise ZeroDivisionError
    assert not descendants()


def test_killed_server_is_a_failure_with_a_name(serve):
    """SIGKILL from outside is not the configuration's fault, unless the kernel killed for want of memory meanwhile."""
    with serve(job()) as server:
        # all are looked for before the first is killed: the others may end by that
        victims = [pid for pid in descendants() if "guard.py" not in " ".join(psutil.Process(pid).cmdline())]
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(NodeError, match="killed_by_os: a process of the server was killed from outside"):
            until_dead(server)


def test_log_is_kept_under_a_telling_name_without_the_key(serve, settings):
    """NUMBER-KIND-UID.log stays after the end, and the key is neither in it nor in the copy of the server."""
    trial = job()
    with serve(trial) as server:
        key = server.headers["Authorization"].removeprefix("Bearer ")
        assert key.startswith("rte-")
        assert "server_args" in gzip.decompress(server.log()).decode()
        commands = [" ".join(_cmdline(process)) for process in psutil.process_iter()]
        assert not [line for line in commands if key in line], "process listings show command lines to everyone"
    (log,) = settings.work_dir.iterdir()
    assert log.name == f"00007-trial-{trial.config.uid}.log"
    assert key not in log.read_text()


def test_a_missing_draft_is_the_specs_fault_where_it_is_the_only_one(serve):
    """No other launch of a study with one draft would find it; of several drafts another one may be there."""
    work = job("missing_draft", speculative=SPEC.model_copy(update={"draft": "some/draft"}))
    with (
        pytest.raises(SpecError, match=r"engine: model_missing: .*some/draft is not a local folder"),
        serve(work, only_draft="some/draft"),
    ):
        pass
    with pytest.raises(LaunchError) as caught, serve(work):
        pass
    assert caught.value.failure_class == "model_missing"
