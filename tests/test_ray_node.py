"""A real local Ray: an actor that is killed, and nothing left behind."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import yaml
from made_interpreter import make_interpreter
from rigs import FAKE, SPEC, Rig, fake_servers, job

from raytune_eagle import cluster, specfile, survey
from raytune_eagle.errors import NodeError
from raytune_eagle.model.trial import Completed
from raytune_eagle.nodes import local_ray
from raytune_eagle.store import ParquetStore


def descendants():
    return {p.pid: p for p in psutil.Process().children(recursive=True)}


@pytest.mark.ray
def test_killed_actor_is_a_node_error_and_the_node_comes_back(tmp_path):
    """SIGKILL of the actor during a trial: NodeError within seconds, its server gone, the node usable again."""
    with ExitStack() as stack:
        rig = Rig("ray", tmp_path, stack)
        node = rig.nodes()["local-0"]
        pending = node.submit(job(1, env={"RAYTUNE_FAKE": "never_ready"}))
        server, owner = _await_server()
        assert owner.name().startswith("ray::Owner")
        killed = time.monotonic()
        owner.kill()
        wait([pending], 30)
        assert isinstance(pending.exception(timeout=0), NodeError)
        _, alive = psutil.wait_procs([server], timeout=15)
        assert not alive, f"its server lives on {time.monotonic() - killed:.0f} s later"
        again = rig.nodes()[node.name]
        assert isinstance(rig.result(again.submit(job(2))), Completed)


@pytest.mark.ray
def test_killed_raylet_takes_its_node_with_it(tmp_path, capfd):
    """SIGKILL of a raylet: NodeError, no server within 15 s, the other node free, the node back; stdout clean."""
    name = "local-1"
    with ExitStack() as stack:
        rig = Rig("ray", tmp_path, stack)
        node = rig.nodes()[name]
        pending = node.submit(job(1, env={"RAYTUNE_FAKE": "never_ready"}))
        server, owner = _await_server()
        raylet = owner.parent()
        assert raylet.name() == "raylet"
        raylet.kill()
        _, alive = psutil.wait_procs([server, owner], timeout=15)
        assert not alive
        wait([pending], 30)
        assert isinstance(pending.exception(timeout=0), NodeError)
        other = next(each for each in rig.nodes(1).values() if each.name != name)
        assert isinstance(rig.result(other.submit(job(2))), Completed)
        again = rig.nodes()[name]
        assert isinstance(rig.result(again.submit(job(3))), Completed)
    assert capfd.readouterr().out == ""


@pytest.mark.ray
def test_killed_raylet_of_this_machine_ends_the_study(tmp_path):
    """The raylet that the driver itself depends on: no server is left, and within 30 s asking for nodes says why."""
    with ExitStack() as stack:
        rig = Rig("ray", tmp_path, stack)
        pending = rig.nodes()["local-0"].submit(job(1, env={"RAYTUNE_FAKE": "never_ready"}))
        server, owner = _await_server()
        owner.parent().kill()
        _, alive = psutil.wait_procs([server, owner], timeout=15)
        assert not alive
        wait([pending], 30)
        assert isinstance(pending.exception(timeout=0), NodeError)
        with pytest.raises(NodeError, match="Ray of this machine"):
            rig.nodes(3)


def _await_server():
    """The fake server, and the process that owns it: its guard was told whose death to watch."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for server, owner in fake_servers():
            return server, psutil.Process(owner)
        time.sleep(0.1)
    raise AssertionError("no server started")


@pytest.mark.ray
def test_local_ray_is_on_loopback_and_leaves_nothing(tmp_path):
    """Every port of the local Ray is on loopback; after the end its processes and its folder are gone."""
    before = set(descendants())
    with ExitStack() as stack:
        rig = Rig("ray", tmp_path, stack)
        rays = [p for p in psutil.process_iter() if _in_our_ray(p)]
        folders = {_ray_folder(p) for p in rays}
        assert len(folders) == 1
        listening = [
            c.laddr.ip for p in rays if p.is_running() for c in p.net_connections("inet") if c.status == "LISTEN"
        ]
        assert len(listening) > 4
        assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
        assert len(rig.nodes()) == 2
    _, alive = psutil.wait_procs(rays, timeout=15)
    assert alive == []
    assert not Path(folders.pop()).exists()
    assert set(descendants()) <= before
    assert threading.active_count() < 50


def _ray_folder(process):
    try:
        return process.environ().get("RAY_TMPDIR", "")
    except psutil.Error:
        return ""


def _in_our_ray(process):
    return _ray_folder(process).startswith("/tmp/rte-")


@pytest.mark.ray
def test_a_node_that_hangs_is_not_waited_for(tmp_path, caplog, monkeypatch):
    """Once the other has answered it has three seconds: then the question is over, and it is named."""

    def question():
        try:
            (tmp_path / "first").touch(exist_ok=False)
        except FileExistsError:
            time.sleep(60)

    for name, value in local_ray.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("raytune_eagle.nodes.joining._TELL_S", 1.0)
    spec = specfile.parse(yaml.safe_load(SPEC))
    with cluster.local_ray_of(spec, 2) as (address, _):
        began = time.monotonic()
        answers = survey.ask_nodes(address, question, 60, straggle_s=3)
        assert time.monotonic() - began < 30
    assert sorted(answers.values(), key=str) == [None, "it did not answer in time"]
    (late,) = [name for name, answer in answers.items() if answer]
    assert re.search(rf"no answer after \d+ s from {late};", caplog.text)


GPU_SPEC = """
name: leak
engine: {{model: builtin:tiny, draft: builtin:tiny, python: {python}}}
node: {{gpus: 1}}
workload: {{prompts: builtin:tiny, max_new_tokens: 8, max_passes: 2, min_passes: 2}}
space: {{speculative: {{num_steps: {{int: [1, 5]}}, eagle_topk: [1, 2], num_draft_tokens: {{int: [2, 8]}}}}}}
search: {{sampler: random}}
budget: {{trials: 4}}
"""


@pytest.mark.ray
def test_gpu_that_keeps_memory_puts_its_node_aside(tmp_path):
    """Its trial is kept, the node takes no other, the study goes on with the other one, and both reports name it."""
    wrapper = tmp_path / "python"
    wrapper.write_text(
        "#!/bin/sh\n"  # has SGLang as far as it is asked, and serves the fake
        f'case "$#:$1:$2" in 2:-c:*|4:-c:*) exec {make_interpreter(tmp_path / "env")} "$@";;\n'
        f'*:-m:sglang.launch_server) shift 2; exec {sys.executable} {FAKE} "$@";; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    wrapper.chmod(0o755)
    (tmp_path / "spec.yaml").write_text(GPU_SPEC.format(python=wrapper))
    nvml = tmp_path / "nvml.json"
    gpus = [{"used": 0, "total": 80000, "pids": {}}, {"used": 0, "total": 80000, "pids": {}}]
    nvml.write_text(json.dumps({"arch": [9, 0], "nvlink": True, "gpus": gpus}))
    path = os.pathsep.join([str(FAKE.parent / "nvml"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "NVML_FAKE": str(nvml), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "raytune_eagle"]
    log = tmp_path / "log"
    with log.open("w") as out:
        run = subprocess.Popen(
            [*command, "run", "spec.yaml", "--nodes", "2"], cwd=tmp_path, env=env, stdout=out, stderr=out
        )
    deadline = time.monotonic() + 60
    while not re.search(r"local-1 #\d +ready", log.read_text()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    gpus[1]["used"] = 2000  # while its first server runs: from now on it does not go away
    (tmp_path / "leak.json").write_text(json.dumps({"arch": [9, 0], "nvlink": True, "gpus": gpus}))
    (tmp_path / "leak.json").rename(nvml)
    assert run.wait(200) == 0, log.read_text()
    text = log.read_text()
    records = list(ParquetStore(str(tmp_path / "results")).read("leak"))
    assert Counter(record.kind for record in records)["trial"] == 4
    assert len([record for record in records if record.node == "local-1"]) == 1
    assert re.search(r"node local-1 is put aside: for \d+ s: GPU .*GPU 1: 2000 MiB", text)
    shown = subprocess.run(
        [*command, "nodes"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"local-1 +│ put aside", shown)
