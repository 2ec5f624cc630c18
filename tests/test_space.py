"""From spec to points and launches, and back."""

import shlex
from pathlib import Path

import optuna
import pytest
from small_space import CUSTOM, SMALL, space

from raytune_eagle import rules, specfile
from raytune_eagle.errors import SpecError
from raytune_eagle.space import Space

SPECS = Path(__file__).parent.parent / "search_spaces"

PUBLISHED_ENV = {
    "NCCL_PROTO": "LL",
    "NCCL_ALGO": "Ring",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216",
    "NCCL_NTHREADS": "512",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
}

PUBLISHED_ARGS = (
    "--model-path /shared/kimi-k2.5-int4 --trust-remote-code --tp-size 8 --mem-fraction-static 0.85 "
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path /data/eagle3/output_10k_sglang/4 "
    "--speculative-num-steps 2 --speculative-eagle-topk 4 --speculative-num-draft-tokens 5 "
    "--num-continuous-decode-steps 4 --disable-custom-all-reduce"
)


@pytest.fixture(scope="module")
def kimi():
    """The space of the published launch: its 924,480 points take a second to judge."""
    return Space(specfile.load(SPECS / "kimi_k25_8gpu.yaml"))


def test_published_kimi_launch_word_for_word(kimi):
    """The published launch is the first of the Kimi spec, word for word and in order."""
    config = kimi.starts[0].config
    assert config.env == PUBLISHED_ENV
    assert config.argv() == PUBLISHED_ARGS.split()
    assert config.launcher == ("python3", "-m", "sglang.launch_server")


def test_command_is_what_a_shell_runs():
    """The one-line command splits back into environment and words, whatever is in the paths."""
    text = SMALL.replace("/m,", '"/a b/$x\'y",')
    config = space(text).config({"num_steps": 1, "eagle_topk": 1, "num_draft_tokens": 2, "nccl_proto": "LL"})
    words = shlex.split(config.command())
    assert words == ["NCCL_PROTO=LL", *config.launcher, *config.argv()]
    assert "/a b/$x'y" in words


def test_points_are_distinct_valid_and_canonical():
    """Enumeration gives each point once, in canonical form, and as many as `size` says."""
    s = space(SMALL)
    points = list(s.points())
    configs = [s.config(p) for p in points]
    assert len(points) == s.size == len({rules.key(c) for c in configs})
    assert all(rules.judge(c).findings == () for c in configs)
    assert len({c.command() for c in configs}) == s.size


def test_size_counted_by_hand():
    """2 drafts × (3 chains + topk 2: steps 1 take 2..3 tokens, 2 take 3..6, 3 take 4..6) × 2 pages × what NCCL does.

    That is Simple × 2 + LL without custom all-reduce; with it NCCL's settings decide nothing.
    """
    assert space(SMALL).size == 2 * (3 + 2 + 4 + 3) * 2 * (3 + 1)


def test_seeded_order_is_a_permutation():
    """A seed changes the order only."""
    s = space(SMALL)
    plain, shuffled = ([s.config(p).uid for p in s.points(seed)] for seed in (None, 7))
    assert plain != shuffled
    assert sorted(plain) == sorted(shuffled)


def test_optuna_proposals_come_back_as_told():
    """What Optuna suggests becomes a launch, and the launch read back is something it could have suggested."""
    s = space(SMALL)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    settled = 0
    for _ in range(200):
        found = s.settle(s.suggest(study.ask()))
        if found is None:
            continue
        settled += 1
        config, params = found
        assert params == s.params(config)
        assert s.judge(config).findings == ()
        told = s.told(config)
        assert told is not None
        optuna.trial.create_trial(params=told[0], distributions=told[1], value=1.0)  # raises when they disagree
        assert s.key(s.config({**params, **told[0]})) == s.key(config)
    assert settled > 100


def test_chain_needs_no_draft_tokens():
    """With topk 1 num_draft_tokens is not asked of Optuna: it follows from num_steps."""
    s = space(SMALL)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.enqueue_trial({"eagle_topk": 1, "num_steps": 3})
    trial = study.ask()
    assert s.suggest(trial)["num_draft_tokens"] == 4
    assert "num_draft_tokens" not in trial.params


def test_one_draft_is_no_dimension_and_two_are():
    """A list of drafts is searched; a single one is not a parameter."""
    assert "draft" in {d.column for d in space(SMALL).dimensions}
    one = space(SMALL.replace("[/d1, /d2]", "/d1"))
    assert "draft" not in {d.column for d in one.dimensions}
    assert {one.config(p).speculative.draft for p in one.points()} == {"/d1"}


def test_starts_outside_the_space_are_kept_but_not_told():
    """A start with a value that is not searched is launched; no sampler is told of it."""
    s = space(SMALL + "start_from: [{num_steps: 3, eagle_topk: 2, num_draft_tokens: 4, NCCL_PROTO: LL128}]")
    assert s.starts[0].config.env == {"NCCL_PROTO": "LL128"}
    assert s.told(s.starts[0].config) is None


def test_start_without_effect_of_its_extras_is_the_point_of_the_space(kimi):
    """The published launch carries flags without effect; its point is a searched one, so TPE learns of it."""
    told = kimi.told(kimi.starts[0].config)
    assert told is not None
    assert told[0]["nccl_proto"] == "LL"


def test_invalid_start_is_refused_with_its_place():
    """An impossible start is a mistake in the spec, found before any launch."""
    with pytest.raises(SpecError) as caught:
        space(SMALL + "start_from: [{num_steps: 1, eagle_topk: 2, num_draft_tokens: 6}]")
    assert caught.value.problems[0].startswith("start_from[0]: invalid: num_draft_tokens 6: a tree of num_steps 1")


def test_space_without_a_valid_point_is_refused():
    """A space in which no backend takes trees says which rule emptied it."""
    text = SMALL.replace("[1, 2]", "[2]").replace("page-size: [null, 16]", "attention-backend: [trtllm_mha]")
    with pytest.raises(SpecError, match=r"no valid point.*trtllm_mha_takes_chains_only"):
        space(text)


def test_space_too_large_to_count_is_refused():
    """A space that would take minutes to judge says which values are too many, at once."""
    text = SMALL.replace("int: [1, 3]", "int: [1, 1000]").replace("int: [2, 6]", "int: [2, 1000]")
    with pytest.raises(SpecError, match=r"3,996,000 combinations of speculative .* of speculative-num_steps \(1000\)"):
        space(text)


def test_baseline_has_no_speculation_and_no_searched_setting():
    """Plain decoding as configured: no draft, no NCCL variable, none of the searched flags."""
    config = space(SMALL).baseline()
    assert config.speculative is None
    assert config.env == {}
    assert config.argv() == ["--model-path", "/m", "--tp-size", "8"]


def test_column_kinds():
    """Parquet types follow from the values written in the spec."""
    assert {d.column: d.kind for d in space(SMALL).dimensions} == {
        "draft": "str",
        "eagle_topk": "int",
        "num_steps": "int",
        "num_draft_tokens": "int",
        "nccl_proto": "str",
        "nccl_buffsize": "int",
        "disable_custom_all_reduce": "bool",
        "page_size": "int",
    }


def test_notes_of_a_study():
    """What no rule forbids is said: streams above SGLang's cap."""
    s = space(SMALL.replace("name: s", "name: s\nworkload: {concurrency: [64]}"))
    assert [line.split(":")[0] for line in s.notes()] == ["concurrency 64"]


def test_what_every_launch_has_stays():
    """A proposal is launched with engine.env and engine.args as written, also where a rule sees no effect in them."""
    text = CUSTOM.replace("args: {tp-size: 8}", "args: {tp-size: 8, dtype: auto}, env: {NCCL_MIN_CTAS: 2}")
    s = space(text)
    config, _ = s.settle({"num_steps": 1, "eagle_topk": 1, "num_draft_tokens": 2, "draft": "/d1"})
    assert config.env == {"NCCL_MIN_CTAS": "2"}
    assert config.args == {"tp-size": 8, "dtype": "auto"}


def test_64_draft_tokens_are_launched_only_where_asked_for():
    """A start with 64 draft tokens is kept word for word; no other point has as many."""
    text = SMALL.replace("[1, 2]", "[2, 8]").replace("{int: [2, 6]}", "[6, 63, 64]")
    s = space(text + "start_from: [{num_steps: 3, eagle_topk: 8, num_draft_tokens: 64}]")
    assert [start.config.speculative.num_draft_tokens for start in s.starts] == [64]
    assert {p["num_draft_tokens"] for p in s.points()} == {6, 63}


def test_a_cross_rule_splits_the_space():
    """With pages of 16 trees need another backend than fa4, chains do not: counted by hand."""
    text = SMALL.replace("page-size: [null, 16]", "page-size: [null, 16], attention-backend: [fa3, fa4]")
    one = space(text.replace("[/d1, /d2]", "/d1"))
    chains, trees, server = 3, 2 + 4 + 3, 3 + 1
    assert one.size == (4 * chains + 3 * trees) * server
