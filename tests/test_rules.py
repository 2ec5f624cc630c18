"""What SGLang and NCCL refuse, rewrite or ignore is known before a launch."""

import pytest

from raytune_eagle import rules
from raytune_eagle.model import Config, Speculative


def config(steps=3, topk=4, tokens=12, draft="/d", **parts):
    return Config(
        model="/m",
        speculative=Speculative(draft=draft, num_steps=steps, eagle_topk=topk, num_draft_tokens=tokens),
        **parts,
    )


@pytest.mark.parametrize(
    ("steps", "topk", "holds"),
    [(1, 2, 3), (2, 2, 7), (3, 4, 37), (2, 4, 21), (1, 1, 2), (5, 1, 6), (5, 8, 265)],
)
def test_tree_capacity(steps, topk, holds):
    """The candidate list has topk + (steps-1)·topk² places, the verified token comes on top (3/4 holds 37, not 64)."""
    assert rules.tree_capacity(steps, topk) == holds


@pytest.mark.parametrize(("steps", "topk"), [(1, 2), (2, 2), (3, 4), (2, 5)])
def test_tree_edge(steps, topk):
    """One token more than the tree holds is invalid, as many as it holds are accepted."""
    most = rules.tree_capacity(steps, topk)
    assert rules.judge(config(steps, topk, most)).canonical is not None
    refused = rules.judge(config(steps, topk, most + 1))
    assert refused.canonical is None
    assert [(f.rule, f.verdict) for f in refused.findings] == [("tree_holds_draft_tokens", "invalid")]
    assert f"holds {most} at most" in refused.reasons


def test_chain_is_named_by_what_sglang_runs():
    """Topk 1 with 8 draft tokens is really steps + 1 tokens, so both spellings are one point."""
    asked, real = config(3, 1, 8), config(3, 1, 4)
    judgement = rules.judge(asked)
    assert judgement.canonical == real
    assert judgement.findings[0].verdict == "rewritten"
    assert rules.key(asked) == rules.key(real)
    assert not rules.judge(real).findings


def test_missing_draft_is_invalid():
    """EAGLE3 without a draft path loads the target as its draft and crashes: refused here."""
    assert rules.judge(config(draft=" ")).canonical is None
    assert rules.judge(Config(model="/m")).canonical is not None


@pytest.mark.parametrize("given", [{"num_steps": 3}, {"eagle_topk": 4}, {"num_steps": 3, "num_draft_tokens": 4}])
def test_all_three_or_none(given):
    """Part of the triple is refused, with the missing names."""
    message = rules.triple_is_whole(given)
    assert all(name in message for name in rules.SPECULATIVE_NAMES)
    assert message.split(" missing")[0] == ", ".join(n for n in rules.SPECULATIVE_NAMES if n not in given)


def test_whole_triples_and_none_pass():
    """All three, or none at all, are fine."""
    assert rules.triple_is_whole({}) is None
    assert rules.triple_is_whole({"num_steps": 1, "eagle_topk": 1, "num_draft_tokens": 2}) is None


@pytest.mark.parametrize(
    ("env", "left"),
    [
        ({"NCCL_PROTO": "LL", "NCCL_BUFFSIZE": "16777216"}, {"NCCL_PROTO": "LL"}),
        ({"NCCL_PROTO": "LL128", "NCCL_NTHREADS": "256"}, {"NCCL_PROTO": "LL128"}),
        ({"NCCL_PROTO": "LL", "NCCL_NTHREADS": "256"}, {"NCCL_PROTO": "LL", "NCCL_NTHREADS": "256"}),
        ({"NCCL_PROTO": "Simple", "NCCL_BUFFSIZE": "1"}, {"NCCL_PROTO": "Simple", "NCCL_BUFFSIZE": "1"}),
        ({"NCCL_BUFFSIZE": "1"}, {"NCCL_BUFFSIZE": "1"}),
    ],
)
def test_knobs_without_effect_leave_no_trace_in_the_name(env, left):
    """A knob that nothing reads beside the others is dropped from the canonical form, the others stay."""
    assert rules.canonical(config(env=env, args={"tp-size": 8})).env == left


def test_key_ignores_order_place_and_switched_off_flags():
    """Where a flag stands, and a switch that is off, make no other point; a value does."""
    one = config(args={"tp-size": 8, "x": True}, tuned_args={"y": False, "z": 1})
    other = config(args={"z": 1, "x": True}, tuned_args={"tp-size": 8, "num-continuous-decode-steps": 4})
    assert rules.key(one) == rules.key(other)
    assert rules.key(one) != rules.key(config(args={"tp-size": 4, "x": True}, tuned_args={"z": 1}))
