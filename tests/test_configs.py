"""What stands in a model's folder and cannot be used: each mistake gives one line that says what to write instead."""

import json
import os
import struct

import pytest
from made_checkpoints import SHAPES, make_draft, make_target

from raytune_eagle.checkpoints import DRAFT, check_draft, check_quantisation, check_target, fingerprint
from raytune_eagle.fit import longest_prompt


def lines(findings, level="problem"):
    return [finding.detail for finding in findings if finding.level == level]


def edit(folder, **changes):
    """Write values into a config.json as they are, null too."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(make_target(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture
def draft(tmp_path):
    return make_draft(tmp_path / "draft")


# ------------------------------------------------------------------------------------------------------------ weights
def test_weights_without_tensors(tmp_path, draft, target):
    """A valid header that names no tensor is not complete, neither of a draft nor of a target."""
    (draft / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    assert lines(check_draft(str(draft), target)) == [f"{draft}: no tensor in its safetensors files; copy it again"]
    other = make_target(tmp_path / "target")
    (other / "model.safetensors.index.json").unlink()
    (other / "model-00001-of-00001.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    assert lines(check_target(str(other))) == [f"{other}: no tensor in its safetensors files; copy it again"]


@pytest.mark.parametrize(
    ("name", "problems"),
    [(None, 1), ("model.fc.weight", 0), ("fc.weight_packed", 0)],
)
def test_draft_without_fc(tmp_path, target, name, problems):
    """A draft whose weights lack the projection of the captured layers is refused; prefixed or packed it is there."""
    shapes = {**SHAPES, "fc.weight": None} | ({name: SHAPES["fc.weight"]} if name else {})
    found = lines(check_draft(str(make_draft(tmp_path / "draft", shapes)), target))
    assert len(found) == problems
    assert all("its weights lack fc.weight" in line for line in found)


def test_header_with_an_infinite_offset(draft, target):
    """An offset that no file can have is a torn header."""
    header = b'{"fc.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e400]}}'
    (draft / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "torn safetensors header" in lines(check_draft(str(draft), target))[0]


# ------------------------------------------------------------------------------------------------------------ numbers
@pytest.mark.parametrize("model", ["target", "draft"])
@pytest.mark.parametrize(
    "name", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"]
)
@pytest.mark.parametrize("value", ["128", [128], float("inf"), float("nan"), 0, -1, 1.5, True])
def test_numbers_that_are_none(tmp_path, draft, target, model, name, value):
    """Text, a list, what is infinite, zero, negative or broken: one line with the key and the value."""
    if model == "target":
        findings = check_target(edit(make_target(tmp_path / "target"), **{name: value}))
    else:
        findings = check_draft(edit(draft, **{name: value}), target)
    assert len(lines(findings)) == 1
    assert lines(findings)[0].endswith(f"config.json: {name} is {json.dumps(value)}: write a positive whole number")


def test_numbers_of_a_nested_model(tmp_path):
    """The numbers of text_config count, not those beside it."""
    target = make_target(tmp_path / "target", vocab_size=0)
    inner = {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": "x"}
    assert [line.split(": ")[1] for line in lines(check_target(edit(target, text_config=inner)))] == [
        'vocab_size is "x"'
    ]
    assert lines(check_target(edit(target, text_config={**inner, "vocab_size": 5}))) == []


def test_draft_vocabulary(draft, target):
    """The draft's own vocabulary must be a number, or null: SGLang then takes the target's head."""
    found = lines(check_draft(edit(draft, draft_vocab_size="x"), target))
    assert found == [f'{draft}/config.json: draft_vocab_size is "x": write a positive whole number']
    assert lines(check_draft(edit(draft, draft_vocab_size=None), target)) == []


def test_draft_of_no_width(draft, target):
    """A draft that names no width is refused, with the width of its own weights."""
    found = lines(check_draft(edit(draft, hidden_size=None), target))
    assert found == [f"{draft}/config.json: names no hidden_size: write it there (7168)"]


@pytest.mark.parametrize("take_away", [True, False])
def test_target_of_no_size(tmp_path, take_away):
    """A target that names neither width nor depth is no mistake, but it is said which check cannot be made."""
    target = make_target(tmp_path / "target")
    edit(target, hidden_size=None, num_hidden_layers=None)
    if take_away:
        config = json.loads((target / "config.json").read_text())
        kept = {name: value for name, value in config.items() if value is not None}
        (target / "config.json").write_text(json.dumps(kept))
    findings = check_target(str(target))
    assert lines(findings) == []
    assert [line.partition("config.json: ")[2] for line in lines(findings, "warning")] == [
        "no hidden_size, nor in its text_config, so the draft's width cannot be checked",
        "no num_hidden_layers, nor in its text_config, so whether its captured layers exist cannot be checked",
    ]


# -------------------------------------------------------------------------------------------------------------- lists
@pytest.mark.parametrize("ids", [["1", "29", "57"], "1,29,57", [1.5, 29, 57], [True, 29, 57], 3, {"1": 2}])
def test_captured_layers_that_are_no_numbers(draft, target, ids):
    """Captured layers in another form than a list of whole numbers are not taken for none."""
    findings = check_draft(edit(draft, eagle_config={"eagle_aux_hidden_state_layer_ids": ids}), target)
    assert lines(findings, "warning") == []
    assert len(lines(findings)) == 1
    assert f"captured layers {json.dumps(ids)}: they must be a list of whole numbers; write" in lines(findings)[0]


def test_section_that_is_no_mapping(draft, target):
    """A list for eagle_config is told with what belongs there."""
    findings = check_draft(edit(draft, eagle_config=[1]), target)
    assert lines(findings, "warning") == []
    assert len(lines(findings)) == 1
    assert 'captured layers {"eagle_config": [1]}: they must be a list of whole numbers' in lines(findings)[0]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ([], 'names no architectures: write them as a list, as ["LlamaForCausalLM"]'),
        (None, 'names no architectures: write them as a list, as ["LlamaForCausalLM"]'),
        ("Llama", 'architectures is "Llama": write it as a list: ["Llama"]'),
        ([5], "architectures is [5]: write it as a list of names"),
        (5, "architectures is 5: write it as a list of names"),
    ],
)
def test_architectures_of_a_target(tmp_path, given, line):
    """A target needs its architecture as a list of text."""
    target = make_target(tmp_path / "target")
    assert lines(check_target(edit(target, architectures=given))) == [f"{target}/config.json: {line}"]


@pytest.mark.parametrize("given", ["LlamaForCausalLMEagle3", [5], 5])
def test_architectures_of_a_draft(draft, target, given):
    """Text for the draft's architectures is not read letter by letter."""
    found = lines(check_draft(edit(draft, architectures=given), target))
    assert len(found) == 1
    assert f"architectures is {json.dumps(given)}: write it as a list" in found[0]


# -------------------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("data", [b"{", b"\xff\xfe\x00", b"[]"])
def test_torn_tokenizer(tmp_path, name, data):
    """A tokenizer file that broke off is a problem, and prompts are then estimated."""
    target = make_target(tmp_path / "target")
    (target / name).write_bytes(data)
    found = lines(check_target(str(target)))
    assert len(found) == 1
    assert found[0].startswith(f"{target / name}: not ")
    assert longest_prompt(["a prompt"], str(target))[1]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize(
    ("make", "line"),
    [
        (os.mkfifo, "no regular file; put the model's own file there"),
        (os.mkdir, "a directory; put the model's own file there"),
        (lambda path: path.symlink_to(path), "a link that leads back to itself; put the model's own file there"),
    ],
    ids=["fifo", "directory", "loop"],
)
@pytest.mark.timeout(20)
def test_what_is_no_file(draft, target, name, make, line):
    """A pipe, a folder and a link to itself are told, with what to do, and never waited for."""
    (draft / name).unlink()
    make(draft / name)
    assert lines(check_draft(str(draft), target)) == [f"{draft / name}: {line}"]


@pytest.mark.timeout(20)
def test_tokenizer_that_is_a_pipe(tmp_path):
    """Nor is a tokenizer waited for that is a pipe."""
    target = make_target(tmp_path / "target")
    (target / "tokenizer.json").unlink()
    os.mkfifo(target / "tokenizer.json")
    assert lines(check_target(str(target))) == [
        f"{target}/tokenizer.json: no regular file; put the model's own file there"
    ]
    assert longest_prompt(["a prompt"], str(target))[1]


def test_names_that_are_none(draft, target):
    """A home of nobody, and a file name with a NUL in an index, are told as such."""
    assert lines(check_target("~nobody-of-that-name/t")) == [
        "~nobody-of-that-name/t: no such user; write the whole path"
    ]
    assert fingerprint("~nobody-of-that-name/t") is None
    index = {"weight_map": {"fc.weight": "a\0.safetensors"}}
    (draft / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "no name of a file; copy the index again" in lines(check_draft(str(draft), target))[0]


# ------------------------------------------------------------------------------------------------------- quantisation
def test_quantisation_of_a_draft(draft):
    """A draft is asked for its quantisation as the target is, under its own name."""
    edit(draft, quantization_config={"quant_method": "foo"})
    (found,) = check_quantisation(str(draft), None, ("awq", "fp8"), None, DRAFT)
    assert (found.level, found.subject) == ("problem", DRAFT)
    assert "quantised as foo, which this SGLang does not know: it knows awq, fp8" in found.detail


def test_quantisation_that_is_no_mapping(draft, target):
    """A list where SGLang wants a mapping is told, not taken for plain weights."""
    found = lines(check_draft(edit(draft, quantization_config=["awq"]), target))
    assert found == [
        f'{draft}/config.json: quantization_config is ["awq"]: write it as a mapping, {{"quant_method": …}}'
    ]
