"""Whether what a study asks for fits its target: known before a launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytune_eagle import specfile
from raytune_eagle.fit import check_models
from raytune_eagle.model.workload import Prompt, Workload

TINY = str(Path(__file__).parent.parent / "raytune_eagle" / "builtin" / "tiny" / "target")
SHAPE = {"num_steps": [3], "eagle_topk": [1], "num_draft_tokens": [4]}
SHORT, LONG = "def add(a, b):\n", "def add(a, b):\n    return a + b\n" * 300  # of more than 2048 tokens


def found(texts, answer, model=TINY, **args):
    """What is said of the workload, as (level, text)."""
    written = {"max_new_tokens": answer, "prompts": "builtin:tiny"}
    tree = {"name": "s", "engine": {"model": model, "draft": "d", "args": args}, "workload": written}
    spec = specfile.parse({**tree, "space": {"speculative": SHAPE}})
    prompts = tuple(Prompt(id=str(place), category="c", text=text) for place, text in enumerate(texts))
    told = check_models(spec, Workload(prompts=prompts, max_new_tokens=answer), None, None)
    return [(each.level, each.line) for each in told if each.subject.startswith("workload")]


@pytest.mark.parametrize(
    ("texts", "answer", "args", "level", "words"),
    [
        ([SHORT], 16, {}, None, ""),
        ([SHORT], 2048, {}, "problem", "2048 tokens do not fit the context of 2048: every request would be refused"),
        ([SHORT], 600, {"context-length": 512}, "problem", "600 tokens do not fit the context of 512"),
        ([SHORT] * 9 + [LONG], 16, {}, "problem", "1 of 10 prompts, of up to "),
        ([SHORT] * 99 + [LONG], 16, {}, "warning", "1 of 100 prompts, of up to "),
    ],
)
def test_requests_that_would_be_refused_are_known_before_a_launch(texts, answer, args, level, words):
    """More of them than may fail is a problem: two models were loaded to find out."""
    told = found(texts, answer, **args)
    assert [each for each, _ in told] == ([level] if level else [])
    assert words in "".join(line for _, line in told)


def test_an_estimate_refuses_nobody(tmp_path):
    """Without a tokenizer lengths are guessed: a warning, that says so."""
    ((level, line),) = found([LONG], 16, str(_without_tokenizer(tmp_path)))
    assert level == "warning"
    assert "estimated: no tokenizer could be used" in line


def _without_tokenizer(folder):
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(Path(TINY) / name)
    return folder
