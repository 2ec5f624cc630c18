"""Each mistake with a draft that SGLang 0.5.20 can be given on the CPU, provoked on the real server: seen, and by name.

3/4/64 is in contracts/test_engine.py.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path

import pytest
from real_server import REAL

from raytune_eagle import gates
from raytune_eagle.engines.builtin import builtin_path
from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.sglang import SglangEngine
from raytune_eagle.model.config import Speculative
from raytune_eagle.model.trial import Completed, Failed, Job
from raytune_eagle.model.workload import Workload
from raytune_eagle.nodes.turns import FreeForAll
from raytune_eagle.trial import run_trial
from raytune_eagle.workload import load_prompts

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(200)]

WORKLOAD = Workload(
    prompts=load_prompts("builtin:tiny")[:8], max_new_tokens=24, ignore_eos=True, min_passes=1, max_passes=1
)


def trial(folder, draft="builtin:tiny", triple=(3, 1, 4), **tuned):
    """What comes of a launch on the real server; without a draft it decodes plainly."""
    names = ("num_steps", "eagle_topk", "num_draft_tokens")
    spec = Speculative(draft=str(draft), **dict(zip(names, triple, strict=True))) if draft else None
    config = REAL.model_copy(update={"speculative": spec, "tuned_args": tuned})
    job = Job(study="gates", number=0, kind="trial", config=config, workload=WORKLOAD)
    engine = SglangEngine(Settings(work_dir=folder / "logs", start_timeout_s=150))
    return run_trial(engine, job, lambda *_: None, FreeForAll())


def altered(folder, **changes):
    """A copy of the bundled draft whose config.json says something else."""
    copy = folder / "draft"
    shutil.copytree(builtin_path("builtin:tiny", "draft"), copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    return copy


def untrained(folder):
    """A copy of the bundled draft whose weights are noise of the size that weights have."""
    copy = altered(folder)
    path = copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = struct.unpack("<Q", data[:8])[0]
    rng = random.Random(0)
    for name, tensor in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__" and tensor["dtype"] == "BF16":
            start, end = (8 + length + offset for offset in tensor["data_offsets"])
            words = [rng.choice((0, 0x8000)) | (0x3C00 + rng.randrange(0x80)) for _ in range((end - start) // 2)]
            data[start:end] = struct.pack(f"<{len(words)}H", *words)
    path.write_bytes(data)
    return copy


def verdict(outcome, name):
    """Of the gate of this name."""
    return next(gate.verdict for gate in outcome.gates if gate.name == name)


def layers(*ids):
    """A draft's section with these captured layers."""
    return {"eagle_aux_hidden_state_layer_ids": list(ids), "use_aux_hidden_state": True}


def test_right_draft_passes_and_its_text_is_plain_decodings(tmp_path):
    """Plain decoding, then EAGLE-3 at 3/1/4: no gate fails or warns of the draft, and the text is plain decoding's."""
    plain, right = trial(tmp_path, draft=None), trial(tmp_path)
    assert isinstance(plain, Completed), plain
    assert isinstance(right, Completed), right
    judged = gates.judged(right, plain, 0.0)
    for name in ("resolved_args", "algorithm", "draft_class", "accept_len", "max_running_requests", "context", "text"):
        assert verdict(judged, name) == "passed", name
    assert "cuda_graph" not in {gate.name for gate in right.gates}, "there are none on a CPU"


def test_eagle_flag_with_an_eagle3_draft(tmp_path):
    """It starts without a word; the trial fails before its bench."""
    outcome = trial(tmp_path, **{"speculative-algorithm": "EAGLE"})
    assert isinstance(outcome, Failed)
    assert (outcome.failure_class, outcome.failure_phase) == ("algorithm", "gate")
    assert not outcome.requests
    assert outcome.phases.ready_s is not None


def test_draft_that_was_never_trained(tmp_path):
    """Its guesses are chance: 1.0 tokens per verify round, and the trial fails whatever its throughput was."""
    outcome = trial(tmp_path, draft=untrained(tmp_path))
    assert isinstance(outcome, Failed)
    assert (outcome.failure_class, outcome.failure_phase) == ("accept_len", "gate")
    assert outcome.requests


def test_shifted_captured_layers_are_told(tmp_path):
    """The draft hears other layers than it was trained on: it serves, guesses little, and says nothing of it."""
    outcome = trial(tmp_path, draft=altered(tmp_path, eagle_config=layers(0, 1, 2)))
    assert isinstance(outcome, Completed), outcome
    assert verdict(outcome, "accept_len") == "warning"
    assert outcome.measurements[0].accept_len < 1.75


@pytest.mark.parametrize(
    "changes",
    [{"eagle_config": layers(1, 11)}, {"hidden_size": 256}, {"architectures": ["LlamaForCausalLM"]}],
    ids=["a layer missing", "another width", "another class"],
)
def test_draft_that_does_not_fit_is_a_shape_mismatch(tmp_path, changes):
    """Two captured layers of three, a wrong hidden size, a class that is no EAGLE-3: the start fails, by its name."""
    outcome = trial(tmp_path, draft=altered(tmp_path, **changes))
    assert isinstance(outcome, Failed)
    assert outcome.failure_class == "shape_mismatch"
    assert "name a draft that was trained for it" in outcome.failure_detail


def test_target_as_its_own_draft(tmp_path):
    """Another model's folder for the draft: whatever SGLang makes of it, it is no figure."""
    outcome = trial(tmp_path, draft=Path(builtin_path("builtin:tiny", "target")))
    assert isinstance(outcome, Failed)
