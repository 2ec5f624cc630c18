"""Bad files through the installed command: exit 2 and one line per mistake, which says where and what to write.

What goes wrong with results, queries and while a study runs is in test_bad_input_running.py.
"""

import json
import subprocess
import sys

import pytest
from bad_input import TEXTS, command, refused, write_spec
from made_checkpoints import SHAPES, make_draft, make_target
from made_interpreter import make_interpreter, times_asked

pytestmark = pytest.mark.slow  # a process of its own for each


@pytest.fixture
def python(tmp_path):
    """An interpreter that says it has SGLang 0.5.20 and knows a few flags; it can serve nothing."""
    return make_interpreter(tmp_path / "env")


# ------------------------------------------------------------------------------------------------------------ the spec
@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("name: s", "nam: s", "nam: unknown key; did you mean 'name'?"),
        ("max_new_tokens: 8", "max_new_tokens: many", "workload.max_new_tokens: expected a whole number, found 'many'"),
        ("gpus: 0", "gpus: on", "node.gpus: expected a whole number, found True"),
        ("max_new_tokens: 8", "ignore_eos: 1", "workload.ignore_eos: expected true or false, found 1"),
        (
            "args: {}",
            "args: {trust-remote-code: 1}",
            "engine.args.trust-remote-code: takes no value: write true or false, not 1",
        ),
        ("eagle_topk: [1]", "eagle_topk: []", "space.speculative.eagle_topk: empty: give at least one"),
        (
            "num_steps: [1]",
            "num_steps: {int: [5, 1]}",
            "space.speculative.num_steps: int range [5, 1] is reversed: write [1, 5]",
        ),
        (
            "nccl: {}",
            "nccl: {NCCL_PROTO: [LL, LL256]}",
            "space.nccl.NCCL_PROTO[1]: 'LL256' is not one of LL, LL128, Simple",
        ),
        (
            "nccl: {}",
            "nccl: {NCCL_ALGO: [Tree]}",
            (
                "space.nccl.NCCL_ALGO[0]: NCCL_ALGO=Tree leaves Broadcast without an algorithm: write "
                "ring,tree;allreduce:tree (from NCCL 2.24 on there is no implicit Ring)"
            ),
        ),
        (
            "eagle_topk: [1], num_draft_tokens: [2]",
            "eagle_topk: [2], num_draft_tokens: [2, 9]",
            "space.speculative.num_draft_tokens[1]: 9: no tree holds that: num_steps 1, eagle_topk 2 hold 3",
        ),
        ("name: s", "name: ../s", "name: '../s': use letters, digits, '.', '_' and '-' only, 100 at most"),
        ("name: s", "name: a/b", "name: 'a/b': use letters, digits, '.', '_' and '-' only, 100 at most"),
        (
            "name: s",
            "name: a..b",
            "name: 'a..b' cannot name a study: letters, digits, '_', '-' and single '.', no other in front",
        ),
    ],
)
def test_mistakes_in_the_spec(tmp_path, python, old, new, line):
    """Each of the mistakes that people make in a spec is one line with its place."""
    path = write_spec(tmp_path, python)
    text = path.read_text()
    assert old in text
    assert refused(tmp_path, path, text=text.replace(old, new)) == line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: s\nengine:\n\tmodel: /m\n", "line 3, column 1: a tab is no indentation: use spaces"),
        (
            "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nname: s\n",
            "line 2, column 8: aliases (*name) are not accepted",
        ),
        ("name: s\nengine: {model: /m}\nname: t\n", "line 3, column 1: key 'name' twice"),
        ("name: s\nengine: {model: /m, model: /n}\n", "line 2, column 21: key 'model' twice"),
        ("name: s\non: 1\n", "line 2, column 1: key True is not text: quote it"),
        ("name: " + "[" * 5000, "not YAML: nested too deeply"),
        ("name: s\nengine: {model: /m}\nday: 2024-13-45\n", "not YAML: month must be in 1..12"),
    ],
    ids=["tab", "anchor_bomb", "key_twice", "inner_key_twice", "on_as_key", "nested", "no_date"],
)
def test_files_that_are_no_yaml(tmp_path, python, text, told):
    """What YAML itself stumbles over, or people over YAML, is one line with line and column."""
    path = tmp_path / "s.yaml"
    assert refused(tmp_path, path, text=text) == f"{path}: {told}"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--nodes", "0"], "run --nodes 0: write a whole number, 1 or more"),
        (["--nodes", "-3"], "run --nodes -3: write a whole number, 1 or more"),
        (["--study", "a/b"], "name: 'a/b': use letters, digits, '.', '_' and '-' only, 100 at most"),
        (["--study", ".."], "name: '..': use letters, digits, '.', '_' and '-' only, 100 at most"),
    ],
)
def test_bad_options(tmp_path, python, words, line):
    """A number of nodes that is none and a study that no folder can be named after."""
    assert refused(tmp_path, write_spec(tmp_path, python), *words) == line


def test_everything_wrong_is_told_in_one_go(tmp_path, python):
    """Prompts, starts, target, draft, flags and results: one line each, the first time."""
    start = "{num_steps: 1, eagle_topk: 2, num_draft_tokens: 9, page-sice: 1}"
    path = write_spec(tmp_path, python, model="/no/target", draft="/no/draft", prompts="/no/prompts", args="tp-sise: 1")
    path.write_text(path.read_text() + f"start_from: [{start}]\n")
    (tmp_path / "file").touch()
    done = command("run", path, "--nodes", 999, "--results", tmp_path / "file" / "r", cwd=tmp_path)
    assert done.returncode == 2
    told = [line.removeprefix("raytune-eagle: ") for line in done.stderr.splitlines()]
    places = ["--results", "/no/prompts", "--nodes 999", "engine.args.tp-sise", "start_from[0].page-sice"]
    assert [line.split(":")[0] for line in told] == [*places, "engine.model", "engine.draft", "start_from[0]"]


# --------------------------------------------------------------------------------------------------- target and draft
def test_draft_directory_missing(tmp_path, python):
    """A draft that is not where the spec says is named before Ray starts."""
    assert (
        refused(tmp_path, write_spec(tmp_path, python, draft="/data/eagle3/nowhere"))
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
    told = refused(tmp_path, write_spec(tmp_path, python, model=target, draft=draft))
    assert told.startswith("engine.draft: ")
    assert line in told


def test_target_with_too_few_layers(tmp_path, python):
    """A target too shallow for the layers that SGLang would capture is refused, with what to write."""
    target = make_target(tmp_path / "target", num_hidden_layers=6)
    told = refused(
        tmp_path, write_spec(tmp_path, python, model=target, draft=make_draft(tmp_path / "draft", eagle_config=None))
    )
    assert "needs a target of 7 layers; this one has 6: write eagle_config.eagle_aux_hidden_state_layer_ids" in told


def test_missing_shard(tmp_path, python):
    """A shard of the index that is not there is named."""
    target = make_target(tmp_path / "target", shards=3)
    gone = target / "model-00002-of-00003.safetensors"
    gone.unlink()
    told = refused(tmp_path, write_spec(tmp_path, python, model=target, draft=make_draft(tmp_path / "draft")))
    assert told == f"engine.model: {gone}: no such file"


def test_torn_safetensors_header(tmp_path, python):
    """A weight file that a copy left torn is named."""
    target, draft = make_target(tmp_path / "target"), make_draft(tmp_path / "draft")
    torn = target / "model-00001-of-00001.safetensors"
    with torn.open("r+b") as file:
        file.truncate(1000)
    told = refused(tmp_path, write_spec(tmp_path, python, model=target, draft=draft))
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
    told = refused(tmp_path, write_spec(tmp_path, python, prompts=path))
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
    told = refused(tmp_path, write_spec(tmp_path, bare))
    assert told == f"engine.python: {bare} has no sglang: install it there, or name another one"


def test_interpreter_missing(tmp_path):
    """An interpreter that is not there is refused before Ray starts."""
    told = refused(tmp_path, write_spec(tmp_path, "/no/such/python"))
    assert told.startswith("engine.python: /no/such/python cannot be run: ")
    assert told.endswith(": name an interpreter that has SGLang")


@pytest.mark.parametrize("place", ["engine.args.cuda-graph-max-bs", "start_from[0].cuda-graph-max-bs"])
def test_removed_flag(tmp_path, python, place):
    """A flag that this SGLang does not have is found the first time, wherever it stands, with its name of today."""
    path = write_spec(tmp_path, python, args="cuda-graph-max-bs: 8" if place.startswith("engine") else "")
    if place.startswith("start"):
        path.write_text(path.read_text() + "start_from: [{cuda-graph-max-bs: 8}]\n")
    line = f"{place}: SGLang 0.5.20 has no such flag; did you mean 'cuda-graph-max-bs-decode'?"
    assert refused(tmp_path, path) == line
    assert refused(tmp_path, path) == line
    assert times_asked(python) == 1
    done = command("plan", path, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"raytune-eagle: {line}\n")


def test_plan_without_sglang_says_that_flags_are_not_checked(tmp_path):
    """Where there is no SGLang to ask, `plan` goes by the spec and says so; it is no mistake there."""
    done = command("plan", write_spec(tmp_path, "/no/python", args="tp-sise: 1"), cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith("raytune-eagle: engine.python: /no/python cannot be run: ")
    assert done.stderr.endswith("; flags are not checked\n")
    assert "1 valid points" in done.stdout
