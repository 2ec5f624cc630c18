"""Bad files through the installed command: exit 2 and one line per mistake, which says where and what to write."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made import WORKLOAD, completed, make_space, surface
from made_checkpoints import SHAPES, make_draft, make_target

from raytune_eagle.nodes.simulated import Answer, SimulatedFleet
from raytune_eagle.store import ParquetStore
from raytune_eagle.study import Study

pytestmark = pytest.mark.slow  # a process of its own for each

COMMAND = Path(sys.executable).parent / "raytune-eagle"
SPEC = """
name: s
engine: {{model: {model}, draft: {draft}, python: {python}, args: {{{args}}}}}
node: {{gpus: 0}}
workload: {{prompts: {prompts}, max_new_tokens: 8}}
space: {{speculative: {{num_steps: [1], eagle_topk: [1], num_draft_tokens: [2]}}}}
"""
TEXTS = ["write a haiku", "sum a list", "name three rivers"]


def command(*words, cwd):
    """Run the installed command; its answer must never be a traceback."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cwd / "cache")}
    done = subprocess.run(
        [COMMAND, *map(str, words)], cwd=cwd, env=environment, check=False, capture_output=True, text=True, timeout=120
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def python(tmp_path):
    """An interpreter that says it has SGLang 0.5.20 and knows three flags; it can serve nothing."""
    about = {"python": "3.11.7", "sglang": "0.5.20", "torch": None, "pins": {}}
    about |= {"nvidia-nccl-cu12": None, "nvidia-nccl-cu13": None}
    flag = {"bare": False, "kind": "int", "choices": None}
    names = ("tp-size", "cuda-graph-max-bs-decode", "cuda-graph-max-bs-prefill")
    known = {"version": "0.5.20", "flags": dict.fromkeys(names, flag)}
    (tmp_path / "about.json").write_text(json.dumps(about))
    (tmp_path / "flags.json").write_text(json.dumps(known))
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\n"
        f'if [ -z "$4" ]; then cat {tmp_path}/about.json; exit; fi\n'
        f'printf "%s" "$4"; cat {tmp_path}/flags.json; echo\n'
    )
    program.chmod(0o755)
    return program


def write_spec(folder, python, **changes):
    known = {"model": "builtin:tiny", "draft": "builtin:tiny", "python": python, "prompts": "builtin:tiny", "args": ""}
    (folder / "s.yaml").write_text(SPEC.format(**{**known, **changes}))
    return folder / "s.yaml"


def refused(folder, python, *words, **changes):
    """The one line that `run` refuses a spec with."""
    done = command("run", write_spec(folder, python, **changes), *words, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert not list(folder.glob("results/study=*/trials/*"))
    return done.stderr.removeprefix("raytune-eagle: ").rstrip("\n")


# --------------------------------------------------------------------------------------------------- target and draft
def test_draft_directory_missing(tmp_path, python):
    """A draft that is not where the spec says is named before Ray starts."""
    assert (
        refused(tmp_path, python, draft="/data/eagle3/nowhere")
        == "engine.draft: /data/eagle3/nowhere: no such directory"
    )


@pytest.mark.parametrize(
    ("changes", "shapes", "line"),
    [
        ({"architectures": ["LlamaForCausalLMEagle"], "draft_vocab_size": None, "eagle_config": None},
         {"d2t": None, "fc.weight": [7168, 14336]},
         "an EAGLE draft of the first kind (architectures: LlamaForCausalLMEagle)"),
        ({"hidden_size": 4096}, {"fc.weight": [4096, 12288]},
         "fc takes 12288 inputs, but 3 captured layers of a target 7168 wide give 21504"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 40, 70]}}, {},
         "captured layers [2, 40, 70]: the target has 61 layers"),
    ],
    ids=["not_eagle3", "other_hidden_size", "layers_outside"],
)  # fmt: skip
def test_unfit_drafts(tmp_path, python, changes, shapes, line):
    """A draft that is not EAGLE-3, or for a target of another width or depth, is refused with the numbers."""
    target = make_target(tmp_path / "target")
    draft = make_draft(tmp_path / "draft", {**SHAPES, **shapes}, **changes)
    told = refused(tmp_path, python, model=target, draft=draft)
    assert told.startswith("engine.draft: ")
    assert line in told


def test_target_with_too_few_layers(tmp_path, python):
    """A target too shallow for the layers that SGLang would capture is refused, with what to write."""
    target = make_target(tmp_path / "target", num_hidden_layers=6)
    told = refused(tmp_path, python, model=target, draft=make_draft(tmp_path / "draft", eagle_config=None))
    assert "needs a target of 7 layers; this one has 6: write eagle_config.eagle_aux_hidden_state_layer_ids" in told


def test_missing_shard(tmp_path, python):
    """A shard of the index that is not there is named."""
    target = make_target(tmp_path / "target", shards=3)
    gone = target / "model-00002-of-00003.safetensors"
    gone.unlink()
    told = refused(tmp_path, python, model=target, draft=make_draft(tmp_path / "draft"))
    assert told == f"engine.model: {gone}: no such file"


def test_torn_safetensors_header(tmp_path, python):
    """A weight file that a copy left torn is named."""
    target, draft = make_target(tmp_path / "target"), make_draft(tmp_path / "draft")
    torn = target / "model-00001-of-00001.safetensors"
    with torn.open("r+b") as file:
        file.truncate(1000)
    told = refused(tmp_path, python, model=target, draft=draft)
    assert told == f"engine.model: {torn}: torn safetensors header; copy it again"


# ------------------------------------------------------------------------------------------------------------- prompts
@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "no such file; write the path of a prompt file, or one of builtin:mixed, builtin:tiny"),
        (b"", 'empty; write one JSON object per line: {"text": '),
        (b" \r\n\n", "empty; write one JSON object per line"),
        (b'{"text": "a"}\n{text: b}\n', "2: not JSON; write one JSON object per line"),
        (b'[{"text": "a"}, {"te', "1: not JSON, though it starts like a list"),
        ('{"text": "é"}\n'.encode("latin-1"), "1: not UTF-8; save the file as UTF-8"),
        ('{"text": "a"}\n'.encode("utf-16"), "1: not UTF-8; save the file as UTF-8"),
        (json.dumps({"text": "a b " * 2_500_000}).encode(), "1: a prompt of 10,000,000 characters; at most 4,000,000"),
    ],
    ids=["missing", "empty", "blank", "not_json", "torn_list", "latin1", "utf16", "10_mb_line"],
)
def test_prompt_files(tmp_path, python, content, line):
    """A prompts file that cannot be used is named with its line and with what to write instead."""
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    told = refused(tmp_path, python, prompts=path)
    assert told.startswith(f"{path}:")
    assert line in told


def test_prompts_with_crlf_and_bom_are_fine(tmp_path, python):
    """Files from other editors (byte order mark, CRLF) are no mistake."""
    lines = "".join(json.dumps({"text": text}) + "\r\n" for text in TEXTS)
    (tmp_path / "prompts.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    done = command("plan", write_spec(tmp_path, python, prompts=tmp_path / "prompts.jsonl"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------------------------------ interpreter and flags
def test_interpreter_without_sglang(tmp_path):
    """An interpreter that has no SGLang is refused before Ray starts."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    bare = tmp_path / "bare" / "bin" / "python"
    told = refused(tmp_path, bare)
    assert told == f"engine.python: {bare} has no sglang: install it there, or name another one"


def test_interpreter_missing(tmp_path):
    """An interpreter that is not there is refused before Ray starts."""
    told = refused(tmp_path, "/no/such/python")
    assert told.startswith("engine.python: /no/such/python cannot be run: ")
    assert told.endswith(": name an interpreter that has SGLang")


def test_unknown_flag(tmp_path, python):
    """A flag that this SGLang does not know: `doctor` finds it (exit 1), and from then on `run` refuses it (exit 2)."""
    spec = write_spec(tmp_path, python, args="cuda-graph-max-bs: 8")
    line = "SGLang 0.5.20 has no such flag; did you mean 'cuda-graph-max-bs-decode'?"
    done = command("doctor", spec, cwd=tmp_path)
    assert done.returncode == 1
    assert f"\tproblem\tengine.args.cuda-graph-max-bs\t{line}\n" in done.stdout
    told = refused(tmp_path, python, args="cuda-graph-max-bs: 8")
    assert told == f"engine.args.cuda-graph-max-bs: {line}"


# ------------------------------------------------------------------------------------------------------------- results
def test_results_directory_not_writable(tmp_path, python):
    """Results that could not be written are refused before anything is launched."""
    (tmp_path / "file").touch()
    told = refused(tmp_path, python, "--results", tmp_path / "file" / "results")
    assert told == f"--results: {tmp_path}/file is a file, not a folder; name another"
    told = refused(tmp_path, python, "--results", "/proc/results")
    assert told.startswith("--results: /proc cannot be written (")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Records of a small study, made in virtual time."""
    folder = tmp_path_factory.mktemp("results")
    space, store = make_space(), ParquetStore(str(folder))
    store.declare(space.spec.name, {d.column: d.kind for d in space.dimensions})
    fleet = SimulatedFleet(["a"], lambda node, job: Answer(completed(surface(job.config)), 60.0))
    Study(space, WORKLOAD, store).run(fleet)
    return folder


@pytest.mark.parametrize("words", [("best", "s"), ("query", "select count(distinct number) as trials from trials")])
def test_foreign_and_torn_files_in_results(tmp_path, results, words):
    """A foreign file and a torn one are named and passed over; the rest is read as if they were not there."""
    folder = tmp_path / "results"
    shutil.copytree(results, folder)
    trials = sorted((folder / "study=s" / "trials").glob("*.parquet"))
    torn = trials[-1]
    torn.write_bytes(torn.read_bytes()[:300])
    foreign = torn.parent / "notes.parquet"
    foreign.write_text("not parquet at all")
    (torn.parent / "README.txt").write_text("a foreign file of another kind")
    done = command(*words, "--results", folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("raytune-eagle: ")]
    assert len(told) == 2
    assert {path.name for path in (torn, foreign) for line in told if path.name in line} == {torn.name, foreign.name}
    assert words[0] == "best" or str(len(trials) - 1) in done.stdout
