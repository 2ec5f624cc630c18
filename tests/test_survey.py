"""What is known of nodes before a launch: facts for the rules, and one line for what all nodes say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from made import completed
from made_interpreter import make_interpreter

from raytune_eagle import rules, specfile
from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.machine import installed
from raytune_eagle.findings import ok, problem
from raytune_eagle.model.workload import Workload
from raytune_eagle.nodes.simulated import Answer, SimulatedFleet
from raytune_eagle.space import Space
from raytune_eagle.store import ParquetStore
from raytune_eagle.study import Study
from raytune_eagle.survey import Look, assume, merged, planned
from raytune_eagle.workload import load_prompts

KIMI = Path(__file__).parent.parent / "search_spaces/kimi_k25_8gpu.yaml"
SPEC = """
name: s
engine: {model: builtin:tiny, draft: builtin:tiny, python: PYTHON, args: {tp-size: 8}}
node: {gpus: GPUS}
workload: {concurrency: [CONCURRENCY]}
space: {speculative: {num_steps: [1], eagle_topk: [1], num_draft_tokens: [2, 16]}}
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def spec(python, gpus=0, concurrency=1):
    text = SPEC.replace("PYTHON", str(python)).replace("GPUS", str(gpus)).replace("CONCURRENCY", str(concurrency))
    return specfile.parse(yaml.safe_load(text))


def facts(python, **changes):
    return assume(spec(python, **changes), installed(Settings(Path("/tmp"), python=str(python))))


def test_facts_of_this_machine(tmp_path):
    """Versions are the interpreter's, not the spec's; the target's attention is known, and no GPU is."""
    known = facts(make_interpreter(tmp_path / "env", "0.5.16.post1", nccl="2.30.7"))
    assert (known.sglang, known.nccl, known.gpus) == ((0, 5, 16), (2, 30, 7), 0)
    assert (known.architecture, known.mla, known.arch) == ("LlamaForCausalLM", False, None)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_h20"), [("NVIDIA H20", True), ("NVIDIA H20-3e", True), ("NVIDIA H200", False)])
def test_an_h20_is_told_from_an_h200(tmp_path, name, is_h20):
    """By the name that NVML gives: their fusion differs in older versions."""
    gpus = [{"used": 0, "total": 8192}] * 8
    (tmp_path / "gpus.json").write_text(json.dumps({"name": name, "arch": [9, 0], "nvlink": True, "gpus": gpus}))
    code = (
        "import sys, yaml; from raytune_eagle import specfile; from raytune_eagle.survey import assume\n"
        "found = assume(specfile.parse(yaml.safe_load(sys.argv[1])), None); print(found.arch, found.h20)"
    )
    text = SPEC.replace("PYTHON", sys.executable).replace("GPUS", "8").replace("CONCURRENCY", "1")
    root = Path(__file__).parent.parent
    env = {
        **os.environ,
        "PYTHONPATH": f"{root / 'tests/fakes/nvml'}:{root}",
        "NVML_FAKE": str(tmp_path / "gpus.json"),
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    }
    done = subprocess.run([sys.executable, "-c", code, text], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["90", str(is_h20)]


def test_messages_too_large_for_custom_all_reduce(tmp_path):
    """16 tokens of 128 numbers at 2 bytes fit 8 MiB for 2,048 streams, and not for more."""
    python = make_interpreter(tmp_path / "env")
    assert facts(python, gpus=8, concurrency=2048).custom_all_reduce is True
    assert facts(python, gpus=8, concurrency=2049).custom_all_reduce is False


def test_a_line_that_not_all_nodes_give_names_those_that_do():
    """What every node says is told once; what some say, with their names."""
    both, one = problem("engine.draft", "/d: no such directory"), problem("engine.python", "no sglang")
    looks = {
        name: Look(rules.Assumptions(), tuple(found))
        for name, found in {"a": [both], "b": [both, one, ok("x", "y")]}.items()
    }
    assert merged(looks) == ("engine.draft: /d: no such directory", "engine.python: no sglang (on b only)")


def test_a_machine_that_is_no_node_asks_an_sglang_of_the_assumed_version_only(tmp_path):
    """Planning for GPUs that are not here: another version here says nothing of the nodes', and that is told."""
    same = planned(spec(make_interpreter(tmp_path / "same"), gpus=8))
    assert (same.mistakes, same.notes, same.facts.sglang) == ((), (), (0, 5, 20))
    other = planned(spec(make_interpreter(tmp_path / "other", "0.5.8"), gpus=8))
    assert other.facts.sglang == (0, 5, 20)
    assert [line.split(":")[0] for line in other.notes] == ["engine.version"]


@pytest.mark.slow
def test_a_study_is_not_done_by_what_is_only_assumed_of_its_nodes(tmp_path):
    """All points that NVLink leaves were launched, not those of a node without: `run` looks at the nodes first."""
    path = tmp_path / "s.yaml"
    path.write_text(
        "name: s\nengine: {model: /m, draft: /d, args: {tp-size: 8}}\nworkload: {prompts: builtin:tiny}\n"
        "space: {speculative: {num_steps: [1, 2], eagle_topk: [1], num_draft_tokens: [2]}, "
        "nccl: {NCCL_PROTO: [null, LL]}}\nconfirm: {top: 0}\nbudget: {trials: 4}\n"
    )
    written = specfile.load(path)
    space, store = Space(written), ParquetStore(str(tmp_path / "results"))
    settings = written.workload.settings()
    workload = Workload(prompts=load_prompts("builtin:tiny"), **settings)
    Study(space, workload, store).run(SimulatedFleet(["a"], lambda node, job: Answer(completed(90), 60.0)))
    assert len([record for record in store.read("s") if record.kind == "trial"]) == space.size == 2
    words = [sys.executable, "-m", "raytune_eagle", "run", str(path)]
    done = subprocess.run(words, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("raytune-eagle: node.gpus: 1 node(s) of 8 GPUs need 8")


@pytest.mark.slow
def test_the_kimi_spec_is_planned_for_machines_that_are_not_here():
    """Nothing is claimed of GPUs and files that are not here; custom all-reduce is taken for granted."""
    known = planned(specfile.load(KIMI)).facts
    assert (known.arch, known.architecture, known.mla, known.custom_all_reduce) == (None, None, None, True)
