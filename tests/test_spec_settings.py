"""Flags and environment of a spec: what is wrong with a value is told before any SGLang is asked."""

import json
from pathlib import Path

import pytest
import yaml

from raytune_eagle import rules, specfile
from raytune_eagle.errors import SpecError
from raytune_eagle.spec import settings as spec_settings
from raytune_eagle.spec.flag_numbers import REAL, WHOLE, WITH_UNITS

FLAGS = json.loads((Path(__file__).parent / "assets/sglang_0520_flags.json").read_text())["flags"]
REMOVED_BY_0520 = {"cuda-graph-max-bs"}
SPEC = """
name: s
engine: {model: /m, draft: /d, args: {ARGS}, env: {ENV}}
space: {speculative: {num_steps: [1], eagle_topk: [1], num_draft_tokens: [2]}, nccl: {NCCL}, args: {SPACE}}
start_from: [{START}]
"""


def problems(**changes):
    text = SPEC
    for name in ("ARGS", "ENV", "NCCL", "SPACE", "START"):
        text = text.replace(f"{{{name}}}", f"{{{changes.get(name, '')}}}")
    with pytest.raises(SpecError) as caught:
        specfile.parse(yaml.safe_load(text))
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("place", "written", "line"),
    [
        ("ARGS", "tp-size: 8.0", "engine.args.tp-size: 8.0 is no whole number: write 8"),
        ("ARGS", "tp: 1.5", "engine.args.tp: 1.5 is no whole number"),
        ("ARGS", "page-size: on", "engine.args.page-size: True is no whole number"),
        (
            "ARGS",
            'trust-remote-code: "True"',
            "engine.args.trust-remote-code: 'True' is a text: write true, without quotes",
        ),
        (
            "ARGS",
            "disable-radix-cache: 1",
            "engine.args.disable-radix-cache: takes no value: write true or false, not 1",
        ),
        ("ARGS", "dtype: {a: 1}", "engine.args.dtype: expected true, false, a number or a text, found a dict"),
        ("ENV", "NCCL_PROTO: LL256", "engine.env.NCCL_PROTO: 'LL256' is not one of LL, LL128, Simple"),
        ("ENV", "NCCL_DEBUG: on", "engine.env.NCCL_DEBUG: YAML reads on, yes, off and no as true and false: quote it"),
        (
            "NCCL",
            "NCCL_NTHREADS: [on]",
            "space.nccl.NCCL_NTHREADS[0]: YAML reads on, yes and true as True: write a number, or quote a text",
        ),
        ("NCCL", "NCCL_NTHREADS: [256, 1.5]", "space.nccl.NCCL_NTHREADS[1]: '1.5' is no whole number"),
        (
            "NCCL",
            "NCCL_BUFFSIZE: [-1]",
            "space.nccl.NCCL_BUFFSIZE[0]: -1 is no size of a buffer: give bytes, 1 or more",
        ),
        ("SPACE", "page-size: [1, 16.0]", "space.args.page-size[1]: 16.0 is no whole number: write 16"),
        (
            "SPACE",
            'enable-mixed-chunk: [true, "false"]',
            "space.args.enable-mixed-chunk[1]: 'false' is a text: write false, without quotes",
        ),
        ("START", "num-steps: 3", "start_from[0].num-steps: unknown; did you mean 'num_steps'?"),
        ("START", "NCCL_PROTO: LL9", "start_from[0].NCCL_PROTO: 'LL9' is not one of LL, LL128, Simple"),
        ("START", "NCCL_PROTO: [LL]", "start_from[0].NCCL_PROTO: give one value"),
        (
            "START",
            "num_steps: 0, eagle_topk: 1, num_draft_tokens: 2",
            "start_from[0].num_steps: 0 is too small: 1 or more",
        ),
        (
            "START",
            'num_steps: 1, eagle_topk: "1", num_draft_tokens: 2',
            "start_from[0].eagle_topk: '1' is a text: write it without quotes",
        ),
        ("START", "tp-size: 8.0", "start_from[0].tp-size: 8.0 is no whole number: write 8"),
        (
            "START",
            "draft: 7, num_steps: 1, eagle_topk: 1, num_draft_tokens: 2",
            "start_from[0].draft: 7 is no path of a draft",
        ),
    ],
)
def test_wrong_values(place, written, line):
    """One wrong value gives one line with its place and what to write instead."""
    assert problems(**{place: written}) == [line]


def test_mistakes_behind_mistakes_are_told_too():
    """What pydantic would look for only in a sound part is told in the same go as what makes the part unsound."""
    told = problems(
        ARGS="dtype: [[1]], tp-size: 8.0",
        ENV="NCCL_PROTO: LL9, OMP_NUM_THREADS: on",
        NCCL="NCCL_ALGO: [Rink], NCCL_PROTO: []",
        START="topk_eagle: 1",
    )
    assert sorted(line.split(":")[0] for line in told) == [
        "engine.args.dtype",
        "engine.args.tp-size",
        "engine.env.NCCL_PROTO",
        "engine.env.OMP_NUM_THREADS",
        "space.nccl.NCCL_ALGO[0]",
        "space.nccl.NCCL_PROTO",
        "start_from[0].topk_eagle",
    ]


def test_mistakes_between_parts_are_told_beside_others():
    """A flag that is fixed and searched is told although another part is wrong as well."""
    told = problems(ARGS="page-size: 1", SPACE="page-size: [1, 16]", START="num_step: 1")
    assert "space.args.page-size: also fixed in engine.args; keep one" in told
    assert len(told) == 2


def test_what_is_known_of_flags_is_true_of_0520():
    """Every flag that is said to be a switch or a number is one in SGLang 0.5.20, of that kind."""
    switches = {name for name in FLAGS if name.startswith(("enable-", "disable-"))} | {*spec_settings.SWITCHES}
    assert [name for name in sorted(switches) if not FLAGS[name]["bare"]] == []
    kinds = {"int": WHOLE, "float": REAL, "human_readable_int": WITH_UNITS}
    wrong = [
        name for kind, names in kinds.items() for name in {*names} - REMOVED_BY_0520 if FLAGS[name]["kind"] != kind
    ]
    assert wrong == []
    assert {name for name in rules.ALIASES.values() if name in FLAGS} >= {"tp-size", "pp-size", "dp-size", "ep-size"}
