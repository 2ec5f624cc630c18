"""`doctor` as a user runs it: on this machine, with GPUs as a stand-in for NVML tells of them, and on a cluster."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_checkpoints import make_draft, make_target
from made_interpreter import make_interpreter

from raytune_eagle import specfile
from raytune_eagle.doctor import examine
from raytune_eagle.model.workload import Prompt, Workload

pytestmark = pytest.mark.slow  # a process of its own for each

ROOT = Path(__file__).parent.parent
NVML = ROOT / "tests" / "fakes" / "nvml"
PROMPTS = tuple(Prompt(id=str(n), category="c", text="a short prompt") for n in range(8))
WORKLOAD = Workload(prompts=PROMPTS, max_new_tokens=16)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def told(done):
    """Findings of the command by level: (subject, detail)."""
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    return {level: [(row[2], row[3]) for row in rows if row[1] == level] for level in ("ok", "warning", "problem")}


def doctor(spec, *words, cwd=ROOT, first=(), **env):
    """Run the command; `first` are words in front of it, `env` goes with it."""
    return subprocess.run(
        [*first, sys.executable, "-m", "raytune_eagle", "doctor", str(spec), *map(str, words)],
        cwd=cwd,
        env={**os.environ, **env},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


SPEC = """
name: s
engine: {{model: {model}, draft: [{drafts}], python: {python}, args: {{{args}}}}}
node: {{gpus: {gpus}}}
workload: {{prompts: builtin:tiny}}
space: {{speculative: {{num_steps: [1], eagle_topk: [1], num_draft_tokens: [2]}}, nccl: {{{nccl}}}}}
"""


def write_spec(folder, python, **changes):
    known = {"model": "builtin:tiny", "drafts": "builtin:tiny", "python": python, "args": "", "gpus": 0, "nccl": ""}
    (folder / "s.yaml").write_text(SPEC.format(**{**known, **changes}))
    return folder / "s.yaml"


@pytest.mark.sglang
def test_cpu_spec_passes(tmp_path):
    """The demo's spec has no problem on a machine that has the CPU layer; exit 0, one line per finding on stdout."""
    done = doctor("search_spaces/tiny_cpu.yaml", "--results", tmp_path / "results")
    assert done.returncode == 0, done.stdout
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert {len(line) for line in lines} == {4}
    assert {line[1] for line in lines} == {"ok"}
    subjects = {line[2] for line in lines}
    assert subjects >= {"engine.python", "engine.args", "engine.model", "engine.draft", "node.gpus", "ports", "clock"}
    assert done.stderr.startswith("nothing found that would make this study fail: 0 problem(s), 0 warning(s), ")
    assert not (tmp_path / "results").exists()


def test_everything_wrong_is_told_at_once(tmp_path):
    """Unknown flag, broken target, unfit draft and results in a file: all told, exit 1."""
    python = make_interpreter(tmp_path / "env")
    target = make_target(tmp_path / "target", shards=2)
    (target / "model-00001-of-00002.safetensors").unlink()
    draft = make_draft(tmp_path / "draft", {"fc.weight": [7168, 12288]})
    spec = write_spec(tmp_path, python, model=target, drafts=f"{draft}, /nowhere", args="tp-sice: 1")
    (tmp_path / "file").touch()
    done = doctor(spec, "--results", tmp_path / "file" / "results", "--nodes", 999)
    assert done.returncode == 1
    told = [line.split("\t")[2:] for line in done.stdout.splitlines() if "\tproblem\t" in line]
    assert [subject for subject, _ in told] == [
        "--nodes 999", "engine.args.tp-sice", "engine.model", "engine.draft[0]", "engine.draft[1]", "--results",
    ]  # fmt: skip
    assert "this study would fail: 6 problem(s)" in done.stderr


def test_bad_spec_is_bad_input(tmp_path):
    """A spec that cannot be read is bad input, not a finding: exit 2."""
    done = doctor(tmp_path / "none.yaml")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_interpreter_without_sglang_is_found(tmp_path):
    """An interpreter without SGLang is a problem that says what to do; nothing else is asked of it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    done = doctor(write_spec(tmp_path, python), cwd=tmp_path)
    assert done.returncode == 1
    assert f"engine.python\t{python} has no sglang: install it there, or name another one" in done.stdout


def fake_gpus(tmp_path, gpus, arch=(9, 0), *, nvlink=True):
    """Environment in which NVML tells of these GPUs."""
    (tmp_path / "gpus.json").write_text(json.dumps({"arch": arch, "nvlink": nvlink, "gpus": gpus}))
    path = os.pathsep.join([str(NVML), *filter(None, [os.environ.get("PYTHONPATH", str(ROOT))])])
    return {"NVML_FAKE": str(tmp_path / "gpus.json"), "PYTHONPATH": path}


FREE = {"used": 100, "total": 81920}


def test_gpus_and_who_holds_them(tmp_path):
    """A GPU that another process holds is a problem that names it; free ones are told as well, and too few."""
    python, holder = make_interpreter(tmp_path / "env"), os.getpid()
    spec = write_spec(tmp_path, python, gpus=2)
    held = {"used": 40000, "total": 81920, "pids": {holder: 39000}}
    lines = told(doctor(spec, **fake_gpus(tmp_path, [FREE, held])))
    assert ("node.gpus", "GPU 0: 100 of 81920 MiB in use") in lines["ok"]
    assert [f"held by pid {holder} (" in detail for _, detail in lines["problem"]] == [True]
    lines = told(doctor(spec, **fake_gpus(tmp_path, [FREE])))
    assert ("node.gpus", "2 GPUs asked for, 1 visible (CUDA_VISIBLE_DEVICES=None)") in lines["problem"]
    assert ("node.gpus", "NVML: Driver Not Loaded") in told(doctor(spec, PYTHONPATH=f"{NVML}:{ROOT}"))["problem"]


@pytest.mark.parametrize(
    ("args", "nvlink", "said"),
    [
        ("tp-size: 4", True, True),
        ("tp-size: 4", False, False),
        ("tp-size: 4, disable-custom-all-reduce: true", True, False),
    ],
    ids=["nvlink", "pcie", "switched_off"],
)
def test_whether_nccl_settings_can_act(tmp_path, args, nvlink, said):
    """With NVLink custom all-reduce takes the messages, which doctor says with what to write; over PCIe it does not."""
    python = make_interpreter(tmp_path / "env")
    spec = write_spec(tmp_path, python, gpus=4, args=args, nccl="NCCL_PROTO: [null, LL]")
    lines = told(doctor(spec, **fake_gpus(tmp_path, [FREE] * 4, nvlink=nvlink)))
    found = [line for subject, line in lines["warning"] if subject == "space.nccl" and "NCCL_DEBUG" not in line]
    assert [detail.endswith("write disable-custom-all-reduce: true to search it") for detail in found] == [True] * said


@pytest.mark.parametrize(("version", "fused"), [("0.5.20", True), ("0.5.8", False)])
def test_a_nodes_own_version_decides(tmp_path, version, fused):
    """FlashInfer fuses Kimi's all-reduces on Hopper from 0.5.12 on: the node's version counts, not the spec's."""
    python = make_interpreter(tmp_path / "env", version)
    kimi = {"architectures": ["KimiK25ForConditionalGeneration"], "kv_lora_rank": 512}
    target, draft = make_target(tmp_path / "target", **kimi), make_draft(tmp_path / "draft")
    args, nccl = "tp-size: 4, disable-custom-all-reduce: true", "NCCL_PROTO: [null, LL]"
    spec = write_spec(tmp_path, python, gpus=4, args=args, nccl=nccl, model=target, drafts=draft)
    lines = told(doctor(spec, **fake_gpus(tmp_path, [FREE] * 4)))
    advice = "write enforce-disable-flashinfer-allreduce-fusion: true to search it"
    found = [line for subject, line in lines["warning"] if subject == "space.nccl" and "NCCL_DEBUG" not in line]
    assert [advice in line for line in found] == [True] * fused


def test_quantisation_that_the_node_cannot_serve(tmp_path):
    """A method that this SGLang does not know, one that its GPUs are too old for, and one that goes."""
    python = make_interpreter(tmp_path / "env")
    lines = {}
    for name, arch in (("nf9", [9, 0]), ("fp8", [7, 5]), ("awq", [9, 0])):
        target = make_target(tmp_path / name, quantization_config={"quant_method": name})
        spec = write_spec(tmp_path, python, gpus=1, model=target, drafts=make_draft(tmp_path / f"{name}-draft"))
        lines[name] = told(doctor(spec, **fake_gpus(tmp_path, [FREE], arch)))
    ((subject, detail),) = lines["nf9"]["problem"]
    assert subject == "engine.model"
    assert detail.endswith("nf9, which this SGLang does not know: it knows awq, awq_marlin, compressed-tensors, fp8")
    assert ("engine.model", "quantised as fp8, which needs GPUs of compute capability 8.0; these have 7.5") in lines[
        "fp8"
    ]["problem"]
    assert lines["awq"]["problem"] == []


def test_quantisation_of_a_draft_that_is_unknown(tmp_path):
    """A draft of an unknown method is a problem under its own place, beside one that is sound."""
    python, target = make_interpreter(tmp_path / "env"), make_target(tmp_path / "t")
    odd = make_draft(tmp_path / "odd", quantization_config={"quant_method": "nf9"})
    spec = write_spec(tmp_path, python, model=target, drafts=f"{make_draft(tmp_path / 'd')}, {odd}")
    ((subject, detail),) = told(doctor(spec))["problem"]
    assert subject == "engine.draft[1]"
    assert detail.startswith(f"{odd}: quantised as nf9, which this SGLang does not know: it knows awq, ")


def test_quantisation_other_than_the_checkpoint(tmp_path):
    """--quantization that contradicts the checkpoint is refused at start, so it is a problem here."""
    python = make_interpreter(tmp_path / "env")
    target = make_target(tmp_path / "t", quantization_config={"quant_method": "awq"})
    draft = make_draft(tmp_path / "d")
    line = "fp8, but the target is quantised as awq: leave the flag out"
    for given, wrong in (("fp8", [("engine.args.quantization", line)]), ("awq_marlin", [])):
        spec = write_spec(tmp_path, python, model=target, drafts=draft, args=f"quantization: {given}")
        assert told(doctor(spec))["problem"] == wrong


@pytest.mark.parametrize(("soft", "level"), [(256, "problem"), (1024, "warning"), (8192, "ok")])
def test_few_open_files(tmp_path, soft, level):
    """256 open files are too few, 1024 few."""
    spec = write_spec(tmp_path, make_interpreter(tmp_path / "env"))
    lines = told(doctor(spec, first=("prlimit", f"--nofile={soft}:")))
    assert [detail.split(" ")[0] for subject, detail in lines[level] if subject == "ulimit -n"] == [str(soft)]


@pytest.mark.parametrize(("size", "level"), [("50m", "problem"), ("800m", "warning")])
def test_little_room_for_results(tmp_path, size, level):
    """Little room is a warning and next to none a problem: on a small file system of its own."""
    spec, disk = write_spec(tmp_path, make_interpreter(tmp_path / "env")), tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size={size} tmpfs {disk} && exec "$0" "$@"'
    done = doctor(spec, "--results", disk / "results", first=("unshare", "-rm", "sh", "-c", mount))
    found = [detail for subject, detail in told(done)[level] if subject == "--results"]
    assert [detail.endswith("GiB free; make room") for detail in found] == [True]


def test_server_flags_alone_need_no_draft(tmp_path):
    """A space of server flags without a draft is a study of plain decoding, and nothing is missing."""
    (tmp_path / "s.yaml").write_text(
        f"name: s\nengine: {{model: builtin:tiny, python: {make_interpreter(tmp_path / 'env')}}}\nnode: {{gpus: 0}}\n"
        "workload: {prompts: builtin:tiny}\nspace: {args: {page-size: [1, 16]}}\n"
    )
    done = doctor(tmp_path / "s.yaml", cwd=tmp_path)
    assert (done.returncode, told(done)["problem"]) == (0, [])


@pytest.mark.ray
def test_every_node_of_a_cluster_is_asked(tmp_path):
    """With a running cluster each node answers for itself, under its name; a node without SGLang fails the check."""
    script = (
        "import os, sys; from raytune_eagle.nodes import local_ray; os.environ.update(local_ray.ENVIRONMENT)\n"
        "local_ray.main(sys.argv[1:])"
    )
    ready = tmp_path / "address"
    cluster = subprocess.Popen([sys.executable, "-c", script, "2", str(ready)], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        spec = write_spec(tmp_path, make_interpreter(tmp_path / "env"))
        found = examine(specfile.load(spec), WORKLOAD, str(tmp_path / "r"), ready.read_text(), 1)
        done = doctor(write_spec(tmp_path, "/no/python"), "--cluster", ready.read_text(), cwd=tmp_path)
        spec = write_spec(tmp_path, make_interpreter(tmp_path / "env"), drafts="/no/draft", args="tp-sise: 1")
        words = [sys.executable, "-m", "raytune_eagle", "run", str(spec), "--cluster", ready.read_text()]
        refused = subprocess.run(words, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120)
        words[3] = "plan"
        planned = subprocess.run(words, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120)
    finally:
        os.killpg(cluster.pid, 9)
        cluster.wait()
    assert set(found) == {"", "local-0", "local-1"}
    assert {f.level for f in found["local-1"]} == {"ok"}
    assert done.returncode == 1
    assert "local-0\tproblem\tengine.python\t/no/python cannot be run" in done.stdout
    assert "local-1\tproblem\tengine.python\t/no/python cannot be run" in done.stdout
    assert (refused.returncode, refused.stderr.splitlines()) == (
        2,
        [
            "raytune-eagle: engine.args.tp-sise: SGLang 0.5.20 has no such flag; did you mean 'tp-size'?",
            "raytune-eagle: engine.draft: /no/draft: no such directory",
        ],
    )
    assert (planned.returncode, planned.stderr) == (2, refused.stderr), "plan asks the same nodes"
    assert not (tmp_path / "results").exists()
