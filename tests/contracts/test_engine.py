"""What every engine keeps, over the real SGLang on the CPU and over a fake server; see `raytune_eagle.ports.Engine`."""

from __future__ import annotations

import gzip
import json
import socket
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from real_server import REAL

from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.sglang import SglangEngine
from raytune_eagle.engines.watch import SETTLED_S
from raytune_eagle.errors import BenchError, LaunchError, NodeError
from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.trial import Job
from raytune_eagle.model.workload import Workload

FAKE = Path(__file__).parents[1] / "fakes" / "launch_server.py"
CONFIGS = {
    "fake": Config(model="builtin:tiny", launcher=("python3", str(FAKE))),
    "cpu": REAL,
}


@pytest.fixture(params=["fake", pytest.param("cpu", marks=[pytest.mark.sglang, pytest.mark.alone])])
def base(request):
    """The configuration that a server is started from."""
    return CONFIGS[request.param]


@pytest.fixture
def temporary(monkeypatch):
    """Where temporary files go that nobody minds; its path leaves room for a socket's name, so SGLang's would too."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """An engine with folders of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return SglangEngine(Settings(work_dir=tmp_path / "logs", start_timeout_s=240))


def job(base, steps, topk, tokens, number=0):
    """A trial of these speculative settings."""
    spec = Speculative(draft="builtin:tiny", num_steps=steps, eagle_topk=topk, num_draft_tokens=tokens)
    config = base.model_copy(update={"speculative": spec})
    return Job(study="contract", number=number, kind="trial", config=config, workload=Workload(prompts=()))


def ignore(name, detail):
    """Progress that nobody looks at."""


def generate(server, tokens=24):
    """One answer of the server."""
    body = {"text": "import os", "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
    headers = {"Content-Type": "application/json", **server.headers}
    request = urllib.request.Request(f"{server.url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def secret_files():
    """Key files of servers, which must not stay."""
    return set(Path(tempfile.gettempdir()).glob("**/server.yaml"))


def processes_at(server):
    """The process that listens on the server's port, its guard, and all that this guard guards."""
    port = int(server.url.rpartition(":")[2])
    listening = [
        each.pid for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr.port == port
    ]
    guard = psutil.Process(listening[0]).parent()
    return [guard, *guard.children(recursive=True)]


def addresses(processes):
    """Those that they listen on."""
    every = [connection for each in processes for connection in each.net_connections("tcp")]
    return {connection.laddr.ip for connection in every if connection.status == "LISTEN"}


def living(processes):
    """Those that run still."""
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def is_open(url):
    """Whether something listens there."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_serves_answers_and_leaves_nothing(base, engine, temporary):
    """Two servers in a row speculate; after each, processes, port and files are gone, a broken one's too."""
    urls = []
    for number in range(2):
        with engine.serve(job(base, 3, 4, 12, number), ignore) as server:
            urls.append(server.url)
            answer = generate(server)
            assert answer["meta_info"]["completion_tokens"] == 24
            assert answer["meta_info"]["spec_verify_ct"] < 24
            server.check()
            processes = processes_at(server)
            assert len(processes) >= 3, "a guard, a server and its scheduler"
            scratch = Path(processes[0].environ()["TMPDIR"])
            assert scratch.is_dir()
            assert len(secret_files()) == 1
            assert addresses(processes) == {"127.0.0.1"}
            tell_of_itself(server)
            if number == 1:
                kill_a_scheduler(server, processes)
        assert living(processes) == []
        assert secret_files() == set()
        assert list(temporary.iterdir()) == []
        assert not scratch.exists()
        assert not is_open(server.url)
    assert urls[0] != urls[1]


def kill_a_scheduler(server, processes):
    """The first process would notice late or never; `check` tells within 2 s."""
    time.sleep(SETTLED_S)
    server.check()
    scheduler = next(each for each in processes if "sglang::scheduler" in " ".join(each.cmdline()))
    scheduler.kill()
    with pytest.raises((BenchError, NodeError), match=r"died|ended"):  # SGLang tells that it was killed
        check_for(server, 2)


def check_for(server, seconds):
    """As a measurement does, only more often."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        server.check()
        time.sleep(0.1)


def tell_of_itself(server):
    """Facts, log and times are there, and no key is in what is kept."""
    key = server.headers["Authorization"].removeprefix("Bearer ")
    log = gzip.decompress(server.log()).decode()
    assert json.loads(server.facts.resolved_args)["speculative_num_draft_tokens"] == 12
    assert server.facts.version == "0.5.20"
    assert "fired up" in log
    assert key not in log + server.facts.resolved_args
    assert server.launch_s > 0
    assert server.ready_s >= 0


def test_tree_that_is_too_small_is_a_launch_error(base, engine, tmp_path):
    """3/4/64 answers /health and dies at the first generation: that is a failed launch of a named class."""
    with pytest.raises(LaunchError) as caught, engine.serve(job(base, 3, 4, 64), ignore):
        pytest.fail("a server that cannot generate was called ready")
    assert caught.value.failure_class == "tree_too_small"
    assert "selected index k out of range" in caught.value.log_tail
    assert secret_files() == set()
    assert not [line for line in command_lines() if str(tmp_path) in line], "the --config file's folder tells ours"


def command_lines():
    """Of all processes that we may look at."""
    return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]


@pytest.mark.sglang
@pytest.mark.alone
def test_two_ranks_meet_in_a_private_file_and_one_killed_ends_both(engine, temporary):
    """Tensor-parallel size 2 over gloo: right answers, nothing listens but on loopback, and nothing is left."""
    two = {"args": {**REAL.args, "tp-size": 2}, "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}  # one machine, two ranks
    with engine.serve(job(REAL.model_copy(update=two), 3, 1, 4), ignore) as server:
        assert generate(server)["meta_info"]["spec_verify_ct"] < 20, "2.3 tokens a round: the ranks agree"
        processes = processes_at(server)
        assert sum("sglang::scheduler" in " ".join(each.cmdline()) for each in processes) == 2
        assert addresses(processes) == {"127.0.0.1"}
        kill_a_scheduler(server, processes)
    assert living(processes) == []
    assert secret_files() == set()
    assert list(temporary.iterdir()) == []
