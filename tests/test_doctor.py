"""What `doctor` finds on this machine and on the nodes of a cluster, and the flags that SGLang is asked for."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_checkpoints import make_draft, make_target

from raytune_eagle import specfile
from raytune_eagle.checkpoints import fingerprint
from raytune_eagle.doctor import differences, examine, flag_places, longest_prompt
from raytune_eagle.engines import machine
from raytune_eagle.engines.flags import Flags, ask, cached, mistakes
from raytune_eagle.engines.gpus import Gpu
from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.machine import check_folder, check_gpus, check_interpreter
from raytune_eagle.errors import NodeError
from raytune_eagle.findings import problems
from raytune_eagle.model import Prompt, Workload

needs_sglang = pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="this interpreter has no SGLang")
ROOT = Path(__file__).parent.parent
ASSET = ROOT / "tests" / "assets" / "sglang_0520_flags.json"
WORKLOAD = Workload(prompts=(Prompt(id="p", category="c", text="a short prompt"),), max_new_tokens=16)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def flags():
    return Flags.from_json(ASSET.read_text())


def settings(tmp_path, python=None, gpus=0):
    return Settings(work_dir=tmp_path / "work", python=python, gpus=gpus)


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def answering(path, count, version="0.5.20", last="--tp-size"):
    """An interpreter that answers both questions like one with SGLang, and counts how often it was asked for flags."""
    about = {"python": "3.11.7", "sglang": version, "pins": {"torch": ["2.13.0", "2.12.0"]}, "torch": "2.12.0"}
    about |= {"nvidia-nccl-cu12": None, "nvidia-nccl-cu13": "2.30.7"}
    known = {"version": version, "flags": {last.removeprefix("--"): {"bare": False, "kind": "int", "choices": None}}}
    (path.parent / "about.json").write_text(json.dumps(about))
    (path.parent / "flags.json").write_text(json.dumps(known))
    return program(
        path,
        f'if [ -z "$4" ]; then cat {path.parent}/about.json; exit; fi\n'
        f'echo asked >> {count}; echo noise; printf "%s" "$4"; cat {path.parent}/flags.json; echo',
    )


# -------------------------------------------------------------------------------------------------------------- flags
@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("cuda-graph-max-bs", 8, "SGLang 0.5.20 has no such flag; did you mean 'cuda-graph-max-bs-decode'?"),
        ("cuda-graph-bs", [1, 2], "SGLang 0.5.20 has no such flag; did you mean 'cuda-graph-bs-decode'?"),
        ("mem-fraction-statik", 0.8, "SGLang 0.5.20 has no such flag; did you mean 'mem-fraction-static'?"),
        ("xyzzy", 1, "SGLang 0.5.20 has no such flag"),
        ("tp", 8, "short for 'tp-size': write that, so that the rules know it too"),
        ("tp-size", "eight", "'eight' is no whole number"),
        ("mem-fraction-static", "much", "'much' is no number"),
        ("tp-size", True, "needs a value"),
        ("disable-radix-cache", "x", "takes no value: write true or false, not 'x'"),
        ("dtype", "float8", "'float8' is not one of float, auto, bfloat16, float16, float32, half"),
        ("dtype", True, "needs a value: one of auto, bfloat16, float, float16, float32, half"),
        ("dtype", "float32", None),
        ("tensor-parallel-size", 8, None),
        ("disable-radix-cache", True, None),
        ("disable-radix-cache", False, None),
        ("mem-fraction-static", 0.85, None),
        ("context-length", "16K", None),
        ("attention-backend", None, None),
        ("cuda-graph-bs-decode", [1, 2, 4], None),
    ],
)
def test_flags_of_0520(flags, name, value, line):
    """Against the flags of 0.5.20: unknown, renamed, shortened and mistyped ones are told, sound ones are not."""
    assert flags.mistake(name, value) == line


@needs_sglang
@pytest.mark.sglang
def test_captured_flags_are_those_of_the_installed_version(tmp_path, flags):
    """The installed SGLang, asked through the CPU layer's shim, answers what the asset of these tests says."""
    asked = ask(settings(tmp_path), "0.5.20")
    assert asked.flags.keys() == flags.flags.keys()
    assert asked == cached(settings(tmp_path), "0.5.20")


@pytest.mark.parametrize("spec", sorted((ROOT / "search_spaces").glob("*.yaml")), ids=lambda path: path.stem)
def test_bundled_specs_use_known_flags(flags, spec):
    """No flag of a spec that we ship is unknown to SGLang 0.5.20, in engine.args, space.args or start_from."""
    assert list(mistakes(flags, flag_places(specfile.load(spec)))) == []


def test_places_of_flags():
    """A wrong flag is named by where it stands in the spec, NCCL variables and the three numbers are none."""
    spec = specfile.parse(
        {
            "name": "s",
            "engine": {"model": "/m", "draft": "/d", "args": {"tp-size": 8}},
            "space": {"args": {"dtype": [None, "half"]}},
            "start_from": [
                {"NCCL_PROTO": "LL", "num_steps": 1, "eagle_topk": 1, "num_draft_tokens": 2, "dtype": "half"}
            ],
        }
    )
    assert flag_places(spec) == {
        "engine.args.tp-size": ("tp-size", 8),
        "space.args.dtype[0]": ("dtype", None),
        "space.args.dtype[1]": ("dtype", "half"),
        "start_from[0].dtype": ("dtype", "half"),
    }


def test_flags_are_asked_once_per_version(tmp_path):
    """The answer is kept for interpreter and version; another version is asked anew; a torn file is asked over."""
    count = tmp_path / "count"
    here = settings(tmp_path, answering(tmp_path / "python", count))
    assert cached(here, "0.5.20") is None
    assert set(ask(here, "0.5.20").flags) == {"tp-size"}
    assert ask(here, "0.5.20") == cached(here, "0.5.20")
    assert count.read_text().count("asked") == 1
    ask(settings(tmp_path, answering(tmp_path / "python", count, "0.5.23")), "0.5.23")
    assert count.read_text().count("asked") == 2
    for file in (tmp_path / "cache").rglob("*.json"):
        file.write_text("{")
    assert cached(here, "0.5.20") is None


def test_an_interpreter_that_does_not_answer(tmp_path):
    """What an interpreter dies of when it is asked for flags is told in one line."""
    broken = program(tmp_path / "python", "echo 'ImportError: libcuda.so.1' >&2; exit 1")
    with pytest.raises(NodeError, match="SGLang does not tell its flags: ImportError: libcuda"):
        ask(settings(tmp_path, broken), "0.5.20")


# ------------------------------------------------------------------------------------------------------------ machine
def test_versions_that_do_not_go_together(tmp_path):
    """A torch other than the one that SGLang pins, and a version other than the spec's, are warned of on GPU nodes."""
    python = answering(tmp_path / "python", tmp_path / "count", "0.5.16")
    findings, version = check_interpreter(settings(tmp_path, python, gpus=1), "0.5.20")
    assert version == "0.5.16"
    assert [f.level for f in findings] == ["ok", "warning", "warning"]
    assert "torch 2.12.0, NCCL 2.30.7" in findings[0].detail
    assert findings[1].line == "engine.version: the rules were told 0.5.20, this machine has 0.5.16, which wins"
    assert "was made for torch 2.13.0, found 2.12.0" in findings[2].detail


def test_cpu_layer_wants_its_version(tmp_path):
    """On the CPU only the proven version serves right tokens; another one is a problem."""
    python = answering(tmp_path / "python", tmp_path / "count", "0.5.16")
    findings, _ = check_interpreter(settings(tmp_path, python), "0.5.16")
    assert problems(findings) == ["engine.python: SGLang 0.5.16: the CPU layer (node.gpus: 0) works with 0.5.20 only"]


def test_gpus_and_who_holds_them(tmp_path):
    """A GPU that another process holds is a problem that names it; free ones and too few are told as well."""
    holder = os.getpid()
    looks = SimpleNamespace(look=lambda: [Gpu(0, 100, {}, 81920), Gpu(1, 40000, {holder: 39000}, 81920)])
    findings = list(check_gpus(settings(tmp_path, gpus=2), looks))
    assert findings[0].detail == "GPU 0: 100 of 81920 MiB in use"
    assert f"held by pid {holder} (" in findings[1].detail
    assert findings[1].level == "problem"

    def fails():
        raise NodeError("NVML: driver not loaded")

    (told,) = check_gpus(settings(tmp_path, gpus=2), SimpleNamespace(look=fails))
    assert told.line == "node.gpus: NVML: driver not loaded"


def test_folders(tmp_path):
    """A folder is ok when it can be made; a file in its place or a file system that refuses is a problem."""
    (tmp_path / "file").touch()
    assert [f.level for f in check_folder("--results", str(tmp_path / "new" / "deep"))] == ["ok"]
    assert not (tmp_path / "new").exists()
    (told,) = check_folder("--results", str(tmp_path / "file" / "x"))
    assert told.line == f"--results: {tmp_path}/file is a file, not a folder; name another"
    (told,) = check_folder("--results", "/proc/x")
    assert told.line.startswith("--results: /proc cannot be written (")


def test_disk_and_limits(tmp_path, monkeypatch):
    """Little room is a warning and none a problem; so are few open files."""
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=500 << 20, total=1 << 40))
    assert [f.level for f in check_folder("work dir", str(tmp_path))] == ["warning"]
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20, total=1 << 40))
    assert [f.level for f in check_folder("work dir", str(tmp_path))] == ["problem"]
    for soft, level in ((256, "problem"), (1024, "warning"), (65536, "ok")):
        monkeypatch.setattr(machine.resource, "getrlimit", lambda _, soft=soft: (soft, 1 << 20))
        assert machine._open_files().level == level


def test_tokens_are_counted_or_estimated(tmp_path):
    """With the target's tokenizer prompts are counted, without one estimated, and it is known which."""
    pytest.importorskip("tokenizers")
    target = str(ROOT / "raytune_eagle" / "builtin" / "tiny" / "target")
    counted, estimated = longest_prompt(["def add(a, b):\n    return a + b\n", "x"], target)
    assert not estimated
    assert 5 < counted < 30
    assert longest_prompt(["x" * 350, "x"], str(make_target(tmp_path / "t"))) == (101, True)
    assert longest_prompt(["x" * 350], "some/hub-id") == (101, True)


# ------------------------------------------------------------------------------------------------------------ command
def doctor(spec, *words, cwd=ROOT):
    return subprocess.run(
        [sys.executable, "-m", "raytune_eagle", "doctor", str(spec), *map(str, words)],
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


SPEC = """
name: s
engine: {{model: {model}, draft: [{drafts}], python: {python}, args: {{{args}}}}}
node: {{gpus: 0}}
workload: {{prompts: builtin:tiny}}
space: {{speculative: {{num_steps: [1], eagle_topk: [1], num_draft_tokens: [2]}}}}
"""


def write_spec(folder, python, **changes):
    known = {"model": "builtin:tiny", "drafts": "builtin:tiny", "python": python, "args": ""}
    (folder / "s.yaml").write_text(SPEC.format(**{**known, **changes}))
    return folder / "s.yaml"


@needs_sglang
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
    python = answering(tmp_path / "python", tmp_path / "count")
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


def test_nodes_that_differ_are_told():
    """One node with another draft or SGLang is a problem that names both sides; equal nodes are none."""
    one, other = (
        {"engine.draft[0]": "aa", "engine.python": "SGLang 1"},
        {"engine.draft[0]": "bb", "engine.python": "SGLang 1"},
    )
    assert differences({"h1": one, "h2": dict(one)}) == []
    (found,) = differences({"h1": one, "h2": other, "h3": one})
    assert (found.level, found.subject) == ("problem", "engine.draft[0]")
    assert found.detail == "not the same on every node: aa on h1, h3; bb on h2"


def test_fingerprint_tells_a_torn_copy(tmp_path):
    """Equal folders have equal fingerprints wherever they lie; a byte more, less or other at an end shows."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(300_000))
    same = fingerprint(str(tmp_path / "a"))
    assert same == fingerprint(str(tmp_path / "b"))
    (tmp_path / "b" / "model.safetensors").write_bytes(bytes(299_999))
    assert fingerprint(str(tmp_path / "b")) != same
    (tmp_path / "b" / "model.safetensors").write_bytes(bytes(299_999) + b"x")
    assert fingerprint(str(tmp_path / "b")) != same
    assert fingerprint(str(tmp_path / "c")) is None


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
        spec = write_spec(tmp_path, answering(tmp_path / "python", tmp_path / "count"))
        found = examine(specfile.load(spec), WORKLOAD, str(tmp_path / "r"), ready.read_text(), 1)
        done = doctor(write_spec(tmp_path, "/no/python"), "--cluster", ready.read_text(), cwd=tmp_path)
    finally:
        os.killpg(cluster.pid, 9)
        cluster.wait()
    assert set(found) == {"", "local-0", "local-1"}
    assert {f.level for f in found["local-1"]} == {"ok"}
    assert done.returncode == 1
    assert "local-0\tproblem\tengine.python\t/no/python cannot be run" in done.stdout
    assert "local-1\tproblem\tengine.python\t/no/python cannot be run" in done.stdout
