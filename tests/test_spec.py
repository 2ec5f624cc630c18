"""The spec file: good ones are read whole, and every mistake is told with its path."""

from pathlib import Path

import pytest
import yaml

from raytune_eagle import specfile
from raytune_eagle.errors import SpecError
from raytune_eagle.spec import differences

SPECS = sorted((Path(__file__).parent.parent / "search_spaces").glob("*.yaml"))
GOOD = """
name: s
engine: {model: /m, draft: /d, args: {tp-size: 8}}
workload: {concurrency: [1, 4]}
space:
  speculative: {num_steps: {int: [1, 10]}, eagle_topk: [1, 2, 4], num_draft_tokens: {int: [2, 60]}}
  nccl: {NCCL_PROTO: [null, LL]}
start_from: [{num_steps: 3, eagle_topk: 4, num_draft_tokens: 5}]
"""


def problems(text):
    with pytest.raises(SpecError) as caught:
        specfile.parse(yaml.safe_load(text))
    return list(caught.value.problems)


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_shipped_specs_are_read(path):
    """Every spec that we ship passes its own checks."""
    assert specfile.load(path).name


def test_scalars_stand_for_lists():
    """One draft and one concurrency need no list."""
    spec = specfile.parse(yaml.safe_load(GOOD.replace("[1, 4]", "4")))
    assert (spec.engine.draft, spec.workload.concurrency) == (("/d",), (4,))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("model: /m", "modle: /m", "engine.modle: unknown key; did you mean 'model'?"),
        ("model: /m, ", "", "engine.model: missing"),
        ("name: s", "name: a/b", "name: 'a/b': use letters, digits, '.', '_' and '-' only, 100 at most"),
        ("[1, 10]", "[10, 1]", "space.speculative.num_steps: int range [10, 1] is reversed: write [1, 10]"),
        ("[1, 2, 4]", "[]", "space.speculative.eagle_topk: empty: give at least one"),
        ("[1, 2, 4]", "[1, 1]", "space.speculative.eagle_topk: the same choice twice"),
        ("[null, LL]", "[null, LL, LL256]", "space.nccl.NCCL_PROTO[2]: 'LL256' is not one of LL, LL128, Simple"),
        (
            "{NCCL_PROTO: [null, LL]}",
            "{NCCL_ALGO: [Ring, Tree]}",
            (
                "space.nccl.NCCL_ALGO[1]: NCCL_ALGO=Tree leaves Broadcast without an algorithm: "
                "write ring,tree;allreduce:tree (from NCCL 2.24 on there is no implicit Ring)"
            ),
        ),
        ("[null, LL]", '["LL,^LL128"]', "space.nccl.NCCL_PROTO[0]: '^LL128' is not one of LL, LL128, Simple"),
        (
            "[null, LL]",
            '["allreduce:LL;Simple"]',
            "space.nccl.NCCL_PROTO[0]: 'Simple': only the first list may stand without a function",
        ),
        ("{NCCL_PROTO: [null, LL]}", "{NCCL_NTHREADS: [all]}", "space.nccl.NCCL_NTHREADS[0]: 'all' is no whole number"),
        (
            "{NCCL_PROTO: [null, LL]}",
            "{NCCL_P2P_LEVEL: [SYS, sys]}",
            "space.nccl.NCCL_P2P_LEVEL[1]: 'sys' is not one of LOC, NVL, PIX, PXB, PHB, SYS",
        ),
        (
            "{int: [2, 60]}",
            "[8, 200]",
            "space.speculative.num_draft_tokens[1]: 200: no tree holds that: num_steps 10, eagle_topk 4 hold 149",
        ),
        (
            "{int: [2, 60]}",
            "{int: [2, 150]}",
            (
                "space.speculative.num_draft_tokens: int range [2, 150]: no tree holds that: "
                "num_steps 10, eagle_topk 4 hold 149: write [2, 149]"
            ),
        ),
        ("NCCL_PROTO", "PROTO", "space.nccl: 'PROTO': NCCL variables start with NCCL_ (others belong in engine.env)"),
        ("tp-size: 8", "port: 8", "engine.args.port: does not belong here: each launch takes a free port"),
        ("tp-size: 8", "--tp-size: 8", "engine.args: '--tp-size': write the flag as 'tp-size'"),
        (
            "tp-size: 8",
            "speculative-num-steps: 3",
            "engine.args.speculative-num-steps: does not belong here: set space.speculative.num_steps",
        ),
        (
            "eagle_topk: 4, ",
            "",
            "start_from[0]: eagle_topk missing: give num_steps, eagle_topk, num_draft_tokens together, or none of them",
        ),
        ("draft: /d, ", "", "engine.draft: missing: space.speculative needs the path of an EAGLE-3 draft"),
        ("[1, 4]", "[0]", "workload.concurrency[0]: input should be greater than or equal to 1 (found 0)"),
        ("num_steps: {int: [1, 10]}, ", "", "space.speculative.num_steps: missing"),
        (
            "eagle_topk: 4, ",
            "eagle_topk: 4, num_step: 3, ",
            "start_from[0].num_step: unknown; did you mean 'num_steps'?",
        ),
        (
            "eagle_topk: 4, ",
            "eagle_topk: 4, port: 1, ",
            "start_from[0].port: does not belong here: each launch takes a free port",
        ),
        (
            "{int: [1, 10]}",
            "{int: [1, 10000000]}",
            "space.speculative.num_steps: int range [1, 10000000] has 10,000,000 values: list those worth a launch",
        ),
        (
            "workload: {",
            "workload: {temperature: .inf, ",
            "workload.temperature: input should be a finite number (found inf)",
        ),
        ("{int: [1, 10]}", "{int: [0, 3]}", "space.speculative: num_steps must be 1 or more"),
    ],
)
def test_one_mistake_one_line(old, new, line):
    """Each mistake gives exactly one line: where, what, and what to write instead."""
    assert old in GOOD
    assert problems(GOOD.replace(old, new, 1)) == [line]


def test_all_mistakes_at_once():
    """Mistakes in several places are told together."""
    text = GOOD.replace("model: /m", "modle: /m").replace("[null, LL]", "[LL256]").replace("[1, 2, 4]", "[]")
    paths = [line.split(":")[0] for line in problems(text)]
    assert paths == ["engine.modle", "space.speculative.eagle_topk", "space.nccl.NCCL_PROTO[0]"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"name: a\nname: b\n", "line 2, column 1: key 'name' twice"),
        (b"a: &x [1]\nb: *x\n", "line 2, column 4: aliases (*name) are not accepted"),
        (b"a:\n\t- 1\n", "line 2, column 1: a tab is no indentation: use spaces"),
        (b"on: 1\n", "line 1, column 1: key True is not text: quote it"),
        (b"- 1\n", "expected a mapping that starts with `name:`, found list"),
        (b"", "expected a mapping that starts with `name:`, found NoneType"),
        (b"\xff\xfe\x00", "not UTF-8 (byte 0): save it as UTF-8"),
    ],
)
def test_files_that_are_no_spec(tmp_path, content, told):
    """What is no YAML mapping is told in one line with the file and, where there is one, the place."""
    path = tmp_path / "s.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        specfile.load(path)
    assert caught.value.problems == (f"{path}: {told}",)


def test_missing_file(tmp_path):
    """A file that is not there is named."""
    with pytest.raises(SpecError, match=r"nowhere.yaml: No such file"):
        specfile.load(tmp_path / "nowhere.yaml")


def test_crlf_and_bom_are_fine(tmp_path):
    """Files from other editors are read like any."""
    path = tmp_path / "s.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert specfile.load(path).name == "s"


def test_differences_name_the_leaf():
    """Budget and price make no other study; a changed leaf is shown with both values."""
    one = specfile.parse(yaml.safe_load(GOOD))
    budget = specfile.parse(yaml.safe_load(GOOD + "budget: {trials: 5}\nnode: {cost_per_hour: 3}\n"))
    assert differences(one.identity(), budget.identity()) == []
    other = specfile.parse(yaml.safe_load(GOOD.replace("tp-size: 8", "tp-size: 4")))
    assert differences(one.identity(), other.identity()) == ["engine.args.tp-size: 8 -> 4"]
