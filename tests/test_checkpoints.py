"""Targets and drafts read from their folders: what is told of whole, broken and unfit ones."""

import json
import struct
import time
from pathlib import Path

import pytest
from made_checkpoints import SHAPES, make_draft, make_target, write_weights

from raytune_eagle.checkpoints import check_draft, check_target, is_hub_id
from raytune_eagle.checkpoints.drafts import Demand
from raytune_eagle.checkpoints.weights import Checkpoint, UnreadableError, read_header
from raytune_eagle.engines.builtin import builtin_path

PUBLIC = Path(__file__).parent / "assets" / "draft_configs"  # published by SafeAILab and SpecForge


def capturing(*layers):
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}


def told(findings, level="problem"):
    return [finding.detail for finding in findings if finding.level == level]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("models") / "target", shards=2)


def test_bundled_pair_is_sound():
    """The pair that comes with the package has nothing to be told."""
    target, draft = builtin_path("builtin:tiny", "target"), builtin_path("builtin:tiny", "draft")
    findings = check_target(target) + check_draft(draft, target, Demand(tokens=300))
    assert {finding.level for finding in findings} == {"ok"}
    assert "24 layers, 128 wide, 4096 tokens" in findings[0].detail


def test_64_shards_in_five_seconds(tmp_path):
    """A target of 64 shards (12,800 tensors, 376 GB on paper) is read in under 5 s, headers only."""
    folder = make_target(tmp_path / "large", shards=64)
    began = time.monotonic()
    findings = check_target(str(folder))
    assert time.monotonic() - began < 5
    assert told(findings) == []
    assert "64 safetensors files, all complete" in told(findings, "ok")


def test_draft_that_fits(target, tmp_path):
    """A draft that was made for the target gives neither problem nor warning."""
    assert {f.level for f in check_draft(str(make_draft(tmp_path / "d")), str(target))} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "shapes", "level", "line"),
    [
        ({}, {"fc.weight": [7168, 12288]}, "problem",
         "fc takes 12288 inputs, but 3 captured layers of a target 7168 wide give 21504: name a draft that was"),
        ({"num_aux_hidden_states": 4, **capturing(1, 20, 40, 57)}, {"fc.weight": [7168, 28672]}, None, ""),
        ({"num_aux_hidden_states": 4}, {"fc.weight": [7168, 28672]}, "problem",
         "num_aux_hidden_states is 4, but 3 layers are captured"),
        (capturing(1, 20, 30, 50, 57), {"fc.weight": [7168, 35840]}, None, ""),
        ({"hidden_size": 2048, "target_hidden_size": 7168}, {"fc.weight": [2048, 21504]}, None, ""),
        ({"hidden_size": 2048}, {"fc.weight": None}, "problem", "made for a target 2048 wide, this one is 7168 wide"),
        ({"architectures": ["LlamaForCausalLMEagle"], "draft_vocab_size": None, "eagle_config": None},
         {"fc.weight": [7168, 14336], "d2t": None}, "problem", "an EAGLE draft of the first kind"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None, "eagle_config": None}, {"d2t": None},
         "problem", "no EAGLE-3 draft (architectures: LlamaForCausalLM)"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "problem", "write LlamaForCausalLMEagle3 there"),
        (capturing(1, 29, 29), {}, "problem", "the same one twice"),
        (capturing(1, 29, 60), {}, "problem", "the target has 61 layers"),
        (capturing(1, 29, 59), {}, None, ""),
        (capturing(-1, 29, 57), {}, "problem", "LlamaForCausalLM does not give it"),
        ({"eagle_config": None}, {}, "warning", "no captured layers named: SGLang takes [2, 30, 58]"),
        ({}, {"d2t": [31999]}, "problem", "d2t maps 31999 tokens, draft_vocab_size is 32000"),
        ({}, {"t2d": [151936]}, "problem", "t2d covers 151936 tokens, the target has 129280"),
        ({}, {"lm_head.weight": [16000, 7168]}, "problem", "lm_head gives 16000 tokens, draft_vocab_size is 32000"),
        ({}, {"d2t": None}, "problem", "draft_vocab_size 32000 of 129280 tokens, but no d2t says which"),
        ({"draft_vocab_size": 200000}, {"d2t": [200000], "lm_head.weight": [200000, 7168]}, "problem",
         "draft_vocab_size 200000 is more than the target's 129280"),
        ({"vocab_size": 129300}, {}, "warning", "vocab_size 129300, the target's is 129280"),
        ({"max_position_embeddings": 2048}, {}, "problem", "its context is 2048 tokens, the target's 4096"),
    ],
)  # fmt: skip
def test_what_a_draft_can_be_wrong_in(target, tmp_path, changes, shapes, level, line):
    """Each mistake of a draft gives exactly one line, which names the numbers; what only looks odd gives none."""
    draft = make_draft(tmp_path / "d", {**SHAPES, **shapes}, **changes)
    lines = [f for f in check_draft(str(draft), str(target)) if f.level != "ok"]
    assert [f.level for f in lines] == ([level] if level else [])
    assert not lines or line in lines[0].detail


def test_prompts_beyond_the_drafts_context(target, tmp_path):
    """Prompts longer than the draft's context are warned of, and it is said when tokens were estimated."""
    draft = str(make_draft(tmp_path / "d", max_position_embeddings=2048))
    lines = told(check_draft(draft, str(target), Demand(3000, estimated=True, lengthen=True)), "warning")
    assert len(lines) == 1
    assert (
        "about 3000 tokens (estimated: no tokenizer could be used), more than the draft's context of 2048" in lines[0]
    )
    assert told(check_draft(draft, str(target), Demand(2000, context_length=2048))) == []


@pytest.mark.parametrize("layers", [4, 6])
def test_too_few_layers_for_the_default(tmp_path, layers):
    """A target in which SGLang's default layers [2, n/2, n-3] are not three is refused, with what to write."""
    target = make_target(tmp_path / "t", num_hidden_layers=layers)
    lines = told(check_draft(str(make_draft(tmp_path / "d", eagle_config=None)), str(target)))
    assert len(lines) == 1
    assert f"needs a target of 7 layers; this one has {layers}: write eagle_config" in lines[0]


def test_seven_layers_are_enough(tmp_path):
    """Seven layers give three captured ones, [2, 3, 4]; SGLang 0.5.20 serves such a pair, so it is not refused."""
    target = make_target(tmp_path / "t", num_hidden_layers=7)
    findings = check_draft(str(make_draft(tmp_path / "d", eagle_config=None)), str(target))
    assert told(findings) == []
    assert "SGLang takes [2, 3, 4]" in told(findings, "warning")[0]


def test_deepseek_like_targets_count_layers_otherwise(tmp_path):
    """DeepSeek-like targets add 1 to the captured layers only if the first is 1 (deepseek_v2.py, 0.5.20)."""
    target = make_target(tmp_path / "t", architectures=["DeepseekV3ForCausalLM"])
    last = capturing(2, 30, 60)
    assert told(check_draft(str(make_draft(tmp_path / "d", **last)), str(target))) == []


@pytest.mark.parametrize("path", sorted(PUBLIC.glob("*.json")), ids=lambda path: path.stem)
def test_public_drafts_are_read_right(tmp_path, path):
    """Each public draft's config, with weights as it describes them, fits a target of its own width and vocabulary."""
    config = json.loads(path.read_text())
    width, small, large = config["hidden_size"], config["draft_vocab_size"], config["vocab_size"]
    shapes = {"fc.weight": [width, 3 * width], "d2t": [small], "t2d": [large], "lm_head.weight": [small, width]}
    draft = make_draft(tmp_path / "d", shapes)
    (draft / "config.json").write_bytes(path.read_bytes())
    target = make_target(tmp_path / "t", hidden_size=width, vocab_size=large, max_position_embeddings=131072)
    lines = told(check_draft(str(draft), str(target), Demand(lengthen=True)))
    if path.stem == "safeailab_eagle3_config":
        assert len(lines) == 1
        assert "looks like EAGLE-3, but architectures is [LlamaForCausalLM]" in lines[0]
    else:
        assert lines == []
    other = make_target(tmp_path / "o", hidden_size=5120)
    assert f"fc takes {3 * width} inputs, but 3 captured layers of a target 5120 wide give 15360" in "".join(
        told(check_draft(str(draft), str(other)))
    )


def test_embedding_as_a_captured_layer(tmp_path):
    """Layer -1 is a warning where it is not known that the target fails on it."""
    target = make_target(tmp_path / "t", architectures=["Qwen3MoeForCausalLM"])
    findings = check_draft(str(make_draft(tmp_path / "d", **capturing(-1, 29, 57))), str(target))
    assert told(findings) == []
    assert "-1 asks for the embedding, and not every target gives it" in told(findings, "warning")[0]


def test_nested_text_config(tmp_path):
    """Vision models keep the language model's numbers in text_config; they are found there."""
    inner = {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840, "max_position_embeddings": 262144}
    target = make_target(tmp_path / "t", text_config=inner, hidden_size=1152, vocab_size=0)
    found = Checkpoint(target)
    assert [found.number(n) for n in ("hidden_size", "num_hidden_layers", "vocab_size")] == [7168, 61, 163840]
    assert found.context == 262144


def test_quantisation_is_named(tmp_path):
    """The method of a quantised target is told, wherever its config keeps it."""
    inner = {"hidden_size": 7168, "quantization_config": {"quant_method": "compressed-tensors"}}
    target = make_target(tmp_path / "t", text_config=inner)
    assert "quantised: compressed-tensors" in check_target(str(target))[0].detail


def test_missing_shard_is_named(tmp_path):
    """A shard that the index names and that is not there gives one line with its path."""
    folder = make_target(tmp_path / "t", shards=3)
    gone = folder / "model-00002-of-00003.safetensors"
    gone.unlink()
    assert told(check_target(str(folder))) == [f"{gone}: no such file"]
    (folder / "model.safetensors.index.json").unlink()
    assert told(check_target(str(folder))) == [f"{gone}: no such file"]


def test_index_that_disagrees(tmp_path):
    """A tensor that the index puts into a shard which lacks it is told with both names."""
    folder = make_target(tmp_path / "t", shards=2)
    write_weights(folder / "model-00002-of-00002.safetensors", {"other": [4]})
    line = told(check_target(str(folder)))[0]
    assert "model-00002-of-00002.safetensors: lacks model.layers.2.experts.0.weight, " in line
    assert "and 197 more, which the index puts there" in line


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda data: b"", "torn safetensors header"),
        (lambda data: data[:5], "torn safetensors header"),
        (lambda data: data[:40], "torn safetensors header"),
        (lambda data: struct.pack("<Q", 2**62) + data[8:], "torn safetensors header"),
        (lambda data: data[:8] + b"[" + data[9:], "torn safetensors header"),
        (lambda data: data[:-1], "bytes, its header says"),
        (lambda data: data + b"\0", "bytes, its header says"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "torn safetensors header"),
    ],
)
def test_torn_files(tmp_path, damage, line):
    """Whatever a copy that broke off leaves behind is told as such, never as a traceback."""
    path = tmp_path / "model.safetensors"
    write_weights(path, {"a": [4, 4], "b": [3]})
    assert read_header(path) == {"a": (4, 4), "b": (3,)}
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UnreadableError, match=line):
        read_header(path)


def test_folders_that_are_no_model(tmp_path):
    """A folder that is missing, empty or has a broken config is named, with what is wrong."""
    assert told(check_target(str(tmp_path / "no" / "such" / "place")))[0].endswith("no such directory")
    assert told(check_target(str(tmp_path)))[0] == f"{tmp_path}/config.json: no such file"
    (tmp_path / "config.json").write_text("{")
    assert told(check_target(str(tmp_path)))[0] == f"{tmp_path}/config.json: not JSON; copy it again"
    (tmp_path / "config.json").write_text("{}")
    assert told(check_target(str(tmp_path)))[0] == f"{tmp_path}: no weights (*.safetensors) in it; copy it again"


def test_hub_ids_are_said_to_be_unchecked(target):
    """Ids of a model hub are no mistake, but it is said that nothing was checked; a missing path is a mistake."""
    findings = check_target("meta-llama/Llama-3.1-8B") + check_draft("lmsys/draft", str(target))
    assert [f.level for f in findings] == ["warning", "warning"]
    assert "cannot be checked" in findings[0].detail
    assert not is_hub_id("/data/draft")
    assert not is_hub_id("./draft")
    assert not is_hub_id("data/eagle3/epoch4")
    assert not is_hub_id("~/draft")


def test_bin_weights_are_said_to_be_unchecked(target, tmp_path):
    """A draft kept as pytorch_model.bin (as its authors publish it) is accepted with a warning."""
    draft = make_draft(tmp_path / "d")
    (draft / "model.safetensors").rename(draft / "pytorch_model.bin")
    findings = check_draft(str(draft), str(target))
    assert told(findings) == []
    assert "cannot be checked here" in told(findings, "warning")[0]
