"""What `doctor` finds on this machine and on the nodes of a cluster, and the flags that SGLang is asked for."""

import os
import tempfile
from pathlib import Path

import pytest
from made_checkpoints import make_target
from made_interpreter import make_interpreter, times_asked

from raytune_eagle import specfile
from raytune_eagle.checkpoints import fingerprint
from raytune_eagle.doctor import differences
from raytune_eagle.engines.flags import Flags, ask, cached, mistakes
from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.machine import check_folder, check_interpreter, installed
from raytune_eagle.errors import NodeError
from raytune_eagle.findings import problems
from raytune_eagle.fit import longest_prompt
from raytune_eagle.model.workload import Prompt, Workload
from raytune_eagle.spec import flags_written

ROOT = Path(__file__).parent.parent
ASSET = ROOT / "tests" / "assets" / "sglang_0520_flags.json"
NVML = ROOT / "tests" / "fakes" / "nvml"
PROMPTS = tuple(Prompt(id=str(n), category="c", text="a short prompt") for n in range(8))
WORKLOAD = Workload(prompts=PROMPTS, max_new_tokens=16)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def flags():
    return Flags.from_json(ASSET.read_text())


def settings(tmp_path, python=None, gpus=0):
    return Settings(work_dir=tmp_path / "work", python=str(python) if python else None, gpus=gpus)


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


@pytest.mark.sglang
def test_captured_flags_are_those_of_the_installed_version(tmp_path, flags):
    """The installed SGLang, asked through the CPU layer's shim, answers what the asset of these tests says."""
    here = settings(tmp_path)
    asked = ask(here, installed(here))
    assert asked.flags.keys() == flags.flags.keys()
    assert asked == cached(here, installed(here))


@pytest.mark.parametrize("spec", sorted((ROOT / "search_spaces").glob("*.yaml")), ids=lambda path: path.stem)
def test_bundled_specs_use_known_flags(flags, spec):
    """No flag of a spec that we ship is unknown to SGLang 0.5.20, in engine.args, space.args or start_from."""
    assert list(mistakes(flags, flags_written(specfile.load(spec)))) == []


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
    assert list(flags_written(spec)) == [
        ("engine.args.tp-size", "tp-size", 8),
        ("space.args.dtype[0]", "dtype", None),
        ("space.args.dtype[1]", "dtype", "half"),
        ("start_from[0].dtype", "dtype", "half"),
    ]


def test_flags_are_asked_once_per_version(tmp_path):
    """The answer is kept for interpreter and version; another version is asked anew; a torn file is asked over."""
    python = make_interpreter(tmp_path / "env")
    here = settings(tmp_path, python)
    there = installed(here)
    assert cached(here, there) is None
    assert "tp-size" in ask(here, there).flags
    assert ask(here, there) == cached(here, there)
    assert times_asked(python) == 1
    make_interpreter(tmp_path / "env", "0.5.23")
    ask(here, installed(here))
    assert times_asked(python) == 2
    for file in (tmp_path / "cache").rglob("*.json"):
        file.write_text("{")
    assert cached(here, there) is None


@pytest.mark.parametrize("given", ["", "~"])
def test_without_a_home_answers_are_kept_in_the_temporary_folder(tmp_path, monkeypatch, given):
    """HOME and XDG_CACHE_HOME that are empty are none: nothing is kept under the root of the file system."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home") if given else "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    here = settings(tmp_path, make_interpreter(tmp_path / "env"))
    assert ask(here, installed(here)) == cached(here, installed(here))
    (file,) = tmp_path.rglob("flags-*.json")
    where = "home" if given else f"tmp/raytune-eagle-{os.getuid()}"
    assert file.parent == tmp_path / where / ".cache" / "raytune-eagle"


def test_another_name_of_one_interpreter_is_not_asked_again(tmp_path):
    """A link to an interpreter that was asked is known by its prefix."""
    python = make_interpreter(tmp_path / "env")
    ask(settings(tmp_path, python), installed(settings(tmp_path, python)))
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    wrapper.chmod(0o755)
    assert cached(settings(tmp_path, wrapper), installed(settings(tmp_path, wrapper))) is not None


def test_an_interpreter_that_does_not_answer(tmp_path):
    """What an interpreter dies of when it is asked for flags is told in one line."""
    python = make_interpreter(tmp_path / "env")
    there = installed(settings(tmp_path, python))
    python.write_text("#!/bin/sh\necho 'ImportError: libcuda.so.1' >&2; exit 1\n")
    with pytest.raises(NodeError, match="SGLang does not tell its flags: ImportError: libcuda"):
        ask(settings(tmp_path, python), there)


# ------------------------------------------------------------------------------------------------------------ machine
def test_versions_that_do_not_go_together(tmp_path):
    """A torch or NCCL other than the pinned ones, and a version other than the spec's, are warned of on GPU nodes."""
    pins = {"torch": ["2.13.0", "2.12.0"], "nvidia-nccl-cu13": ["2.30.7", "2.31.1"]}
    python = make_interpreter(tmp_path / "env", "0.5.16", pins=pins, torch="2.12.0", nccl="2.31.1")
    findings, there = check_interpreter(settings(tmp_path, python, gpus=1), "0.5.20")
    assert there.sglang == "0.5.16"
    assert [f.level for f in findings] == ["ok", "warning", "warning", "warning", "warning"]
    assert "torch 2.12.0, NCCL 2.31.1" in findings[0].detail
    assert findings[1].line == "engine.version: the rules were told 0.5.20, this machine has 0.5.16, which wins"
    assert "SGLang 0.5.16 was made for torch 2.13.0, found 2.12.0" in findings[2].detail
    assert "torch 2.12.0 was made for nvidia-nccl-cu13 2.30.7, found 2.31.1" in findings[3].detail
    assert "NCCL 2.31.1: from 2.31 on" in findings[4].detail


def test_torch_with_an_old_cudnn(tmp_path):
    """The pair that SGLang itself refuses for multimodal models is warned of; with a newer cuDNN nothing is."""
    bad = make_interpreter(tmp_path / "bad", torch="2.9.1+cu128", cudnn="9.10.2.21")
    good = make_interpreter(tmp_path / "good", torch="2.9.1+cu128", cudnn="9.16.0.29")
    lines = [
        [f.detail for f in check_interpreter(settings(tmp_path, each, gpus=1), "0.5.20")[0] if f.level == "warning"]
        for each in (bad, good)
    ]
    assert ["install cuDNN 9.15" in line for line in lines[0]] == [True]
    assert lines[1] == []


def test_cpu_layer_wants_its_version(tmp_path):
    """On the CPU only the proven version serves right tokens; another one is a problem."""
    python = make_interpreter(tmp_path / "env", "0.5.16")
    findings, _ = check_interpreter(settings(tmp_path, python), "0.5.16")
    assert problems(findings) == ["engine.python: SGLang 0.5.16: the CPU layer (node.gpus: 0) works with 0.5.20 only"]


def test_folders(tmp_path):
    """A folder is ok when it can be made; a file in its place or a file system that refuses is a problem."""
    (tmp_path / "file").touch()
    assert [f.level for f in check_folder("--results", str(tmp_path / "new" / "deep"))] == ["ok"]
    assert not (tmp_path / "new").exists()
    (told,) = check_folder("--results", str(tmp_path / "file" / "x"))
    assert told.line == f"--results: {tmp_path}/file is a file, not a folder; name another"
    (told,) = check_folder("--results", "/proc/x")
    assert told.line.startswith("--results: /proc cannot be written (")
    assert [each.line for each in check_folder("--results", "")] == ["--results: empty: name a folder"]
    (told,) = check_folder("--results", "~nobody7/x")
    assert told.line == "--results: ~nobody7/x: no such user; write the whole path"


def test_tokens_are_counted_or_estimated(tmp_path):
    """With the target's tokenizer prompts are counted, without one estimated, and it is known which."""
    target = str(ROOT / "raytune_eagle" / "builtin" / "tiny" / "target")
    counted, estimated = longest_prompt(["def add(a, b):\n    return a + b\n", "x"], target)
    assert not estimated
    assert 5 < counted < 30
    assert longest_prompt(["x" * 350, "x"], str(make_target(tmp_path / "t"))) == (101, True)
    assert longest_prompt(["x" * 350], "some/hub-id") == (101, True)


def test_nodes_that_differ_are_told():
    """One node with another draft or SGLang is a problem that names both sides; equal nodes are none."""
    one = {"engine.draft[0]": "aa", "engine.python": "SGLang 1"}
    assert differences({"h1": one, "h2": dict(one)}) == []
    (found,) = differences({"h1": one, "h2": {**one, "engine.draft[0]": "bb"}, "h3": one})
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
