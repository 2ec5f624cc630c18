"""The CPU layer computes what SGLang would: speculative decoding gives plain decoding's text. Real servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from real_server import REAL

from raytune_eagle.engines import builtin
from raytune_eagle.engines.builtin import builtin_path
from raytune_eagle.engines.cpu import server as cpu_server
from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.sglang import SglangEngine
from raytune_eagle.errors import SpecError
from raytune_eagle.model.config import Speculative
from raytune_eagle.model.trial import Job
from raytune_eagle.model.workload import Workload

PROMPTS = [
    "def main(",
    "import os\nimport sys\n\n",
    "class Node:\n    def __init__(self",
    "The quick brown fox",
    "for i in range(10):\n    print(",
    '"""Return the',
    "x",
    "try:\n    value = int(text)\nexcept ValueError:\n",
    "if __name__ == ",
    "Once upon a time there was",
]


def texts(tmp_path, spec):
    """Greedy answers to all prompts, four at a time, and the mean accepted length (1 without speculation)."""
    speculative = spec and Speculative(
        draft="builtin:tiny", num_steps=spec[0], eagle_topk=spec[1], num_draft_tokens=spec[2]
    )
    config = REAL.model_copy(update={"speculative": speculative})
    job = Job(study="cpu", number=0, kind="trial", config=config, workload=Workload(prompts=()))
    seen = []
    engine = SglangEngine(Settings(work_dir=tmp_path, start_timeout_s=240))
    with engine.serve(job, lambda name, _: seen.append(name)) as server, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: ask(server, prompt), PROMPTS))
    assert "cpu" in seen, "that the CPU layer serves is told"
    rounds = sum(answer["meta_info"].get("spec_verify_ct") or 48 for answer in answers)
    return [answer["output_ids"] for answer in answers], 48 * len(PROMPTS) / rounds


def ask(server, prompt):
    """48 tokens, greedy."""
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}}
    headers = {"Content-Type": "application/json", **server.headers}
    request = urllib.request.Request(f"{server.url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


@pytest.mark.sglang
@pytest.mark.timeout(600)
def test_speculative_text_is_plain_text(tmp_path):
    """Over ten prompts, trees (3/4/12) and chains (6/1/7) give plain decoding's tokens."""
    plain, _ = texts(tmp_path, None)
    for spec in [(3, 4, 12), (6, 1, 7)]:
        speculative, accept_len = texts(tmp_path, spec)
        assert speculative == plain
        assert accept_len > 1.5, "else nothing was speculated and equality proves nothing"


def test_unknown_built_in_names_the_known():
    """A wrong name is told with the right ones; other names are left alone."""
    with pytest.raises(SpecError, match="builtin:huge: no such built-in model; known: builtin:tiny"):
        builtin_path("builtin:huge", "target")
    assert builtin_path("/models/x", "draft") == "/models/x"
    assert builtin_path("builtin:tiny", "draft").endswith("builtin/tiny/draft")
    assert builtin.names() == ["tiny"]


def test_built_in_names_are_resolved_in_both_spellings():
    """``--flag value`` and ``--flag=value``; a name elsewhere is not touched."""
    target, draft = builtin_path("builtin:tiny", "target"), builtin_path("builtin:tiny", "draft")
    words = [
        "--model-path=builtin:tiny",
        "--speculative-draft-model-path",
        "builtin:tiny",
        "--served-model-name",
        "builtin:tiny",
    ]
    assert cpu_server.resolve(words) == [
        f"--model-path={target}",
        "--speculative-draft-model-path",
        draft,
        "--served-model-name",
        "builtin:tiny",
    ]


def test_another_version_is_refused(monkeypatch):
    """The shim stands in for private names of one version: any other is refused, in one line."""
    monkeypatch.setattr(cpu_server.metadata, "version", lambda _: "0.5.19")
    assert cpu_server.refusal().startswith("raytune_eagle.engines.cpu works with sglang 0.5.20 only")


def test_missing_sglang_is_one_clear_line(tmp_path):
    """An interpreter without SGLang: exit 2 and one line, no traceback."""
    code = "import sys; from raytune_eagle.engines.cpu import server; sys.exit(server.main([]))"
    root = str(builtin.ROOT.parents[1])
    hide = (
        "import importlib.metadata as m\ndef version(name): raise m.PackageNotFoundError(name)\nm.version = version\n"
    )
    env = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", hide + code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: raytune_eagle.engines.cpu needs sglang 0.5.20")
    assert done.stderr.count("\n") == 1


def test_only_known_models_leave_the_others_out():
    """Model modules are skipped only when every model of the launch is of a known architecture."""
    assert cpu_server.unused_models(["--model-path", "/no/such/model"]) == []
    assert cpu_server.unused_models([]) == []
