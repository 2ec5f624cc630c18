"""The parts of the engine that need no server: the launch spelled out, whose fault a failure is, the GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from raytune_eagle.engines import gpus as gpus_module
from raytune_eagle.engines import launch
from raytune_eagle.engines.gpus import Gpu, await_release, require_free, visible_indices
from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.sglang import SglangEngine, whose
from raytune_eagle.engines.vitals import Pulse
from raytune_eagle.engines.watch import LogFollower, Stall
from raytune_eagle.errors import NodeError
from raytune_eagle.failures import Failure
from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.trial import Job
from raytune_eagle.model.workload import Workload

FAKES = Path(__file__).parent / "fakes"
SPEC = Speculative(draft="builtin:tiny", num_steps=3, eagle_topk=4, num_draft_tokens=12)


def job(**changes):
    """A trial of this configuration, which is never launched."""
    config = Config(model="any", launcher=("python3", "launch_server.py"), speculative=SPEC).model_copy(update=changes)
    return Job(study="s", number=7, kind="trial", config=config, workload=Workload(prompts=()))


@pytest.fixture
def settings():
    """Folders of its own: what is prepared here is never started, so no guard removes its key file."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Settings(work_dir=Path(name) / "logs")


def test_temporary_files_of_a_server_go_with_it(settings, tmp_path, monkeypatch):
    """They lie in its private folder, or in one whose path is short enough for sockets; torch's kernels do not."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    one = launch.prepare(settings, job())
    assert one.env["TMPDIR"] == str(one.scratch) == str(one.secret_dir)
    far = tmp_path / ("x" * 70)
    other = launch.prepare(Settings(work_dir=far), job())
    assert other.secret_dir.parent == far
    assert other.env["TMPDIR"] == str(other.scratch)
    assert len(other.env["TMPDIR"]) < 20
    other.scratch.rmdir()
    assert one.env["TORCHINDUCTOR_CACHE_DIR"] == other.env["TORCHINDUCTOR_CACHE_DIR"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert launch.prepare(settings, job()).env["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


def test_whose_fault_a_refused_argument_is():
    """An argument or a draft of this configuration alone is not the spec's fault; the only draft and all else is."""
    config = job(tuned_args={"own-flag": 1}, args={"common-flag": 1}).config
    assert whose(
        Failure("bad_argument", "arguments", "", "spec", line="unrecognized arguments: --own-flag"), config
    ) == ("configuration")
    assert whose(Failure("bad_argument", "arguments", "", "spec", line="unrecognized: --common-flag"), config) == "spec"
    assert (
        whose(Failure("model_missing", "arguments", "", "spec", line="'builtin:tiny' missing"), config)
        == "configuration"
    )
    missing = Failure("model_missing", "arguments", "", "spec", line="'builtin:tiny' missing")
    assert whose(missing, config, only_draft="builtin:tiny") == "spec"
    assert whose(missing, config, only_draft="another") == "configuration"
    assert whose(Failure("disk_full", "arguments", "", "machine"), config) == "machine"


def test_key_and_own_config_file_go_into_a_private_file(settings, tmp_path):
    """Our key joins the user's --config, 0600 in a 0700 folder; keys given as arguments are moved there too."""
    own = tmp_path / "own.yaml"
    own.write_text("log-level: warning\n")
    one = launch.prepare(settings, job(args={"config": str(own), "api-key": "mine", "admin-api-key": "root"}))
    assert one.argv.count("--config") == 1
    file = Path(one.argv[one.argv.index("--config") + 1])
    assert yaml.safe_load(file.read_text()) == {"log-level": "warning", "api-key": "mine", "admin-api-key": "root"}
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert one.headers == {"Authorization": "Bearer mine"}
    assert not {"mine", "root"} & set(one.argv)


def test_paths_under_home_are_launched_as_they_are_here(settings, monkeypatch):
    """SGLang would look for a folder named ``~``: model and draft are given to it in full."""
    monkeypatch.setenv("HOME", "/home/me")
    draft = Speculative(draft="~/draft", num_steps=3, eagle_topk=1, num_draft_tokens=4)
    words = launch.prepare(settings, job(model="~/models/kimi", speculative=draft)).argv
    assert words[words.index("--model-path") + 1] == "/home/me/models/kimi"
    assert words[words.index("--speculative-draft-model-path") + 1] == "/home/me/draft"


OTHER_MEETINGS = [
    {"pipeline-parallel-size": 2},
    {"nnodes": 2},
    {"dp": 2},
    {"nccl-init-addr": "10.0.0.1:5000"},
    "data_parallel_size: 2",
]


@pytest.mark.parametrize("args", OTHER_MEETINGS)
def test_ranks_of_one_machine_meet_in_a_private_file(settings, args, tmp_path, monkeypatch):
    """No store of torch's listens; where there may be other ranks SGLang's own way is kept; the user's value wins."""
    monkeypatch.delenv(launch.INIT_METHOD, raising=False)
    one = launch.prepare(settings, job(args={"tp": 8}))
    assert one.env[launch.INIT_METHOD] == f"file://{one.secret_dir}/ranks"
    assert one.env["MASTER_PORT"] == one.argv[one.argv.index("--nccl-port") + 1]
    if isinstance(args, str):
        (own := tmp_path / "own.yaml").write_text(args)
        args = {"config": str(own)}
    assert launch.INIT_METHOD not in launch.prepare(settings, job(args=args)).env
    monkeypatch.setenv(launch.INIT_METHOD, "env://")
    assert launch.prepare(settings, job()).env[launch.INIT_METHOD] == "env://"
    assert launch.prepare(settings, job(env={launch.INIT_METHOD: "x"})).env[launch.INIT_METHOD] == "x"


def test_ports_are_distinct_and_new():
    """Server and NCCL ports differ; so they do from launch to launch."""
    ports = launch.free_ports("127.0.0.1", 20)
    assert len(set(ports)) == 20


def test_command_can_be_pasted_and_has_no_secret(settings):
    """The line has environment, interpreter and flags; built-in names are paths, keys are left out."""
    text = SglangEngine(settings).command(job(args={"api-key": "k3y-0f-me"}, env={"A": "b c"}, model="builtin:tiny"))
    assert text.startswith("A='b c' python3 ")
    assert re.search(r"--model-path \S+/tiny/target ", text)
    assert "k3y-0f-me" not in text
    assert "--port" not in text


class FakeGpus:
    """GPUs whose states are given, the last for ever."""

    def __init__(self, *states):
        self.states = list(states)

    def look(self):
        """The next state."""
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


def test_gpus_in_use_are_a_node_error_that_names_the_pids():
    """Another process with more than 512 MiB on our GPUs: no launch, and who it is."""
    with pytest.raises(NodeError, match=r"GPU 1 is in use by pid 42 \(600 MiB\)"):
        require_free(FakeGpus([Gpu(0, 10, {41: 500}), Gpu(1, 700, {42: 600})]), {})
    assert require_free(FakeGpus([Gpu(0, 600, {41: 500})]), {}) == [Gpu(0, 600, {41: 500})]


def test_memory_that_nobody_holds_is_not_free():
    """What a GPU keeps beyond what it held at first, with no process to show for it, ends the use of the node."""
    least = {}
    require_free(FakeGpus([Gpu(0, 600, {})]), least)
    require_free(FakeGpus([Gpu(0, 1000, {})]), least)
    with pytest.raises(NodeError, match="GPU 0: 2600 MiB are in use by no process, 600 at first"):
        require_free(FakeGpus([Gpu(0, 2600, {})]), least)


def test_release_waits_for_pids_and_memory(monkeypatch):
    """Memory within 512 MiB of before and none of our pids: both are waited for, and neither for ever."""
    before = [Gpu(0, 100, {})]
    ours_there, memory_there, free = [Gpu(0, 100, {7: 1})], [Gpu(0, 700, {})], [Gpu(0, 600, {})]
    waited = []
    await_release(FakeGpus(ours_there, memory_there, free), before, {7}, waited.append)
    assert len(waited) == 2
    monkeypatch.setattr(gpus_module, "RELEASE_S", 0.0)
    with pytest.raises(NodeError, match=r"700 MiB, 100 before"):
        await_release(FakeGpus(memory_there), before, {7}, waited.append)


def test_engine_asks_the_gpus_before_and_after(settings):
    """Busy GPUs stop a launch; GPUs that stay full after one are the machine's fault."""
    busy = SglangEngine(settings, FakeGpus([Gpu(0, 900, {42: 900})]))
    with pytest.raises(NodeError, match="pid 42"), busy.serve(job(), lambda *_: None):
        pytest.fail("served on a busy GPU")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0,2", [0, 2]), ("GPU-b", [1]), ("GPU-c,0", [2, 0]), ("", []), ("1,9,2", [1]), ("GPU-,1", [])],
)
def test_visible_devices(visible, expected):
    """Indices or UUIDs (or their beginnings); as in CUDA, what is unknown or ambiguous ends the list."""
    assert visible_indices(visible, ["GPU-aa", "GPU-bb", "GPU-cc"]) == expected


THREE = {
    "gpus": [
        {"used": 3072, "total": 8192, "pids": {100 + n: 2048}, "clock": 1980 - n, "heat": 40 + n} for n in range(3)
    ]
}
"""GPUs as the fake NVML tells them: each with one process of 2 GiB."""


def look(tmp_path, count, said, visible=None):
    """What `Nvml.look` gives or raises, as text, in a process that finds the fake NVML."""
    (tmp_path / "nvml.json").write_text(json.dumps(said))
    env = {**os.environ, "PYTHONPATH": f"{FAKES / 'nvml'}:{FAKES.parents[1]}", "NVML_FAKE": str(tmp_path / "nvml.json")}
    env = {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"}
    env |= {"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {}
    code = f"""
from raytune_eagle.engines.gpus import Nvml
from raytune_eagle.errors import NodeError
try:
    print(Nvml({count}).look())
except NodeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_gpu_that_does_not_tell_its_clock_is_used_all_the_same(tmp_path):
    """A MIG slice refuses to say; that is no failure of the machine."""
    mute = {"gpus": [{"used": 3072, "total": 8192, "pids": {100: 2048}}]}
    assert look(tmp_path, 1, mute) == str([Gpu(0, 3072, {100: 2048}, 8192, 0, 0)])


def test_nvml_looks_at_our_gpus_only(tmp_path):
    """CUDA_VISIBLE_DEVICES chooses, memory is in MiB, and too few GPUs or a broken driver are the machine's fault."""
    chosen = "GPU-00000002,0"
    two = [Gpu(2, 3072, {102: 2048}, 8192, 1978, 42), Gpu(0, 3072, {100: 2048}, 8192, 1980, 40)]
    assert look(tmp_path, 2, THREE, chosen) == str(two)
    assert "3 GPUs asked for, 2 visible" in look(tmp_path, 3, THREE, chosen)
    assert look(tmp_path, 3, THREE).count("Gpu(") == 3
    assert "NVML: driver gone" in look(tmp_path, 1, THREE | {"broken": "driver gone"})


def test_log_that_ends_in_half_a_line_has_grown_once(tmp_path):
    """A progress bar that hangs in mid-line is not growth for ever, and is told once its line is whole."""
    log = tmp_path / "log"
    log.write_text("Load weight end. elapsed=1 s, type=X, y\nMulti-thread loading shards:  50% Completed | 1/2")
    follower = LogFollower(log)
    assert follower.news() == (True, [("weights", "X")])
    assert follower.news() == (False, [])
    with log.open("a") as more:
        more.write("\r")
    assert follower.news() == (True, [("weights", "1/2")])


def test_a_log_is_read_once_and_a_server_that_gave_up_is_noticed(tmp_path):
    """What was read may be gone from the file; words that come in two parts are seen all the same, and stay seen."""
    log = tmp_path / "log"
    log.write_text("Load weight end. elapsed=1 s, type=X, y\nERROR: [Errno 98] error while att")
    follower = LogFollower(log)
    assert follower.news() == (True, [("weights", "X")])
    assert not follower.gave_up
    read = log.read_text().replace("X", "Y")
    log.write_text(f"{read}empting to bind on address ('127.0.0.1', 1)\n")
    assert follower.news() == (True, [])
    assert follower.gave_up
    log.write_text(log.read_text() + "more\n")
    assert follower.news() == (True, [])
    assert follower.gave_up


def test_stall_needs_silence_and_idleness():
    """Either new log bytes or CPU work is progress; without both, the limit counts."""
    stall = Stall(0.05)
    time.sleep(0.06)
    assert not stall.over(1.0, grew=False), "a second of CPU in 0.06 s is work"
    time.sleep(0.06)
    assert not stall.over(1.0, grew=True)
    time.sleep(0.06)
    assert stall.over(1.0, grew=False)


class Sleeper:
    """A process tree that uses no CPU, and GPUs whose clocks fall at each look."""

    looks = 0

    def cpu_s(self):
        return 0.0

    def look(self):
        self.looks += 1
        return [Gpu(0, 0, {}, 0, 1980, 60), Gpu(1, 0, {}, 0, 1980 - 100 * self.looks, 60 + self.looks)]


def test_pulse_counts_what_others_do():
    """A core that another process keeps busy is other load; GPUs are looked at now and then."""
    machine = Sleeper()
    pulse = Pulse(machine, machine)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass
    ours = pulse.take()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(1.0)
        theirs = pulse.take()
        busy.kill()
    assert (ours.clock_mhz, ours.temperature_c) == (1880, 61), "the slowest and the hottest of them"
    assert theirs.clock_mhz is None
    assert machine.looks == 1
    assert theirs.other_cores > 0.5
