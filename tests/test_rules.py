"""What SGLang and NCCL refuse, rewrite or ignore is known before a launch."""

import pytest

from raytune_eagle import rules
from raytune_eagle.model.config import Config, Speculative


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


@pytest.mark.parametrize(("steps", "topk", "tokens", "fits"), [(8, 4, 7, False), (8, 4, 8, False), (8, 4, 9, True)])
def test_tree_must_hold_its_longest_path(steps, topk, tokens, fits):
    """8/4/7 starts, answers /health and dies at its first verify; num_steps + 1 tokens are the least."""
    judgement = rules.judge(config(steps, topk, tokens))
    assert (judgement.canonical is not None) == fits
    assert fits or "num_steps + 1 = 9 or more" in judgement.reasons


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


# ----------------------------------------------------------------------------------------------------------- by version
TREE = "tree_on_pages_needs_a_backend_for_it"


def verdicts(config_, **facts):
    return {f.rule: f.verdict for f in rules.judge(config_, rules.Assumptions(**facts)).findings}


@pytest.mark.parametrize(
    ("topk", "args", "facts", "rule"),
    [
        (4, {"page-size": 16, "attention-backend": "fa3"}, {}, None),
        (
            4,
            {"page-size": 16, "attention-backend": "fa3"},
            {"sglang": (0, 5, 8)},
            TREE,
        ),
        (4, {"page-size": 16, "attention-backend": "fa4"}, {}, TREE),
        (1, {"page-size": 16, "attention-backend": "fa4"}, {}, None),
        (4, {"page-size": 16}, {}, None),
        (4, {"page-size": 16}, {"gpus": 0}, TREE),
        (4, {"attention-backend": "flashmla"}, {}, TREE),
        (4, {"decode-attention-backend": "flashmla"}, {}, "mla_backends_take_chains_only"),
        (4, {"attention-backend": "trtllm_mha"}, {}, "trtllm_mha_takes_chains_only"),
        (4, {"attention-backend": "flashinfer"}, {"mla": True}, "mla_backends_take_chains_only"),
        (4, {"attention-backend": "flashinfer"}, {"mla": False}, None),
        (1, {"attention-backend": "flashinfer"}, {"mla": True}, None),
        (1, {"pp-size": 2}, {"sglang": (0, 5, 22)}, "pipeline_parallel_is_refused"),
        (1, {"attention-backend": "torch_native"}, {}, "draft_has_a_backend"),
        (1, {"attention-backend": "torch_native"}, {"gpus": 0}, None),
        (1, {"page-size": 48}, {}, "chunks_are_whole_pages"),
        (1, {"page-size": 64, "chunked-prefill-size": 1000}, {}, "chunks_are_whole_pages"),
        (1, {"enable-lora": True}, {"sglang": (0, 5, 16)}, "lora_is_refused"),
        (1, {"enable-lora": True}, {}, None),
        (1, {"enable-deterministic-inference": True, "attention-backend": "flashmla"}, {}, None),
    ],
)
def test_refusals_by_backend_and_version(topk, args, facts, rule):
    """A flag beside the triple is refused where SGLang refuses it, and nowhere else."""
    found = verdicts(config(3, topk, 4, args=args), **facts)
    invalid = {name for name, verdict in found.items() if verdict == "invalid"}
    if "enable-deterministic-inference" in args:
        assert invalid == {"deterministic_needs_a_backend_for_it"}
    elif rule is None:
        assert invalid == set()
    else:
        assert rule in invalid


def test_pipeline_parallel_from_0_5_23_behind_a_switch():
    """SGLANG_ENABLE_PP_SPEC lets 0.5.23 run it."""
    asked = config(3, 1, 4, args={"pp-size": 2}, env={"SGLANG_ENABLE_PP_SPEC": "1"})
    assert verdicts(asked, sglang=(0, 5, 23)) == {}
    assert "pipeline_parallel_is_refused" in verdicts(asked, sglang=(0, 5, 20))


def test_64_draft_tokens_only_word_for_word():
    """64 draft tokens are not sampled on GPUs; on a CPU, and where somebody asks for them, they are."""
    assert verdicts(config(5, 8, 64)) == {"draft_tokens_are_fewer_than_64": "invalid"}
    assert verdicts(config(5, 8, 63)) == {}
    assert verdicts(config(5, 8, 64), gpus=0) == {}
    assert verdicts(config(5, 8, 64), most_draft_tokens=None) == {}


# -------------------------------------------------------------------------------- NCCL
EIGHT = {"tp-size": 8}


@pytest.mark.parametrize(
    ("env", "args", "nccl", "refused"),
    [
        ({"NCCL_ALGO": "Tree"}, {}, (2, 27, 5), "leaves Broadcast without"),
        ({"NCCL_ALGO": "ring,tree;allreduce:tree"}, {}, (2, 30, 7), None),
        ({"NCCL_ALGO": "ring,tree;allreduce:tree", "NCCL_PROTO": "Simple"}, {}, (2, 31, 0), None),
        ({"NCCL_ALGO": "allreduce:tree"}, {}, (2, 31, 0), None),
        ({"NCCL_ALGO": "allreduce:tree", "NCCL_PROTO": "Simple"}, {}, (2, 30, 7), None),
        ({"NCCL_ALGO": "allreduce:tree", "NCCL_PROTO": "Simple"}, {}, (2, 31, 0), "leaves Broadcast without"),
        ({"NCCL_ALGO": "allreduce:tree", "NCCL_PROTO": "allreduce:Simple"}, {}, (2, 31, 0), None),
        ({"NCCL_ALGO": "ring;allreduce:nvls"}, {}, (2, 28, 9), "leaves AllReduce without"),
        ({"NCCL_ALGO": "ring;allreduce:nvls", "NCCL_NVLS_ENABLE": "1"}, {}, (2, 28, 9), None),
        ({"NCCL_ALGO": "ring;allreduce:nvls"}, {"enable-nccl-nvls": True}, (2, 28, 9), None),
        ({"NCCL_ALGO": "ring;allreduce:nvls", "NCCL_PROTO": "LL"}, {"enable-nccl-nvls": True}, (2, 28, 9), "AllReduce"),
        ({"NCCL_ALGO": "ring;allreduce:nvlstree"}, {"enable-nccl-nvls": True}, (2, 28, 9), "leaves AllReduce without"),
        ({"NCCL_ALGO": "ring;allreduce:pat"}, {}, (2, 28, 9), "leaves AllReduce without"),
        ({"NCCL_ALGO": "ring;allreduce:collnetchain"}, {}, (2, 28, 9), "leaves AllReduce without"),
        ({"NCCL_ALGO": "^tree"}, {}, (2, 28, 9), None),
        ({"NCCL_ALGO": "^ring"}, {}, (2, 28, 9), "leaves Broadcast without"),
        ({"NCCL_ALGO": "Ring, Tree"}, {}, (2, 28, 9), "' Tree' is not one of"),
        ({"NCCL_ALGO": "tree"}, {"tp-size": 1}, (2, 28, 9), None),
        ({"NCCL_P2P_LEVEL": "sys"}, {}, (2, 28, 9), "not one of LOC"),
    ],
)
def test_what_nccl_refuses(env, args, nccl, refused):
    """Lists that leave a function without an algorithm are invalid, by version of NCCL."""
    judgement = rules.judge(config(env=env, args=EIGHT | args), rules.Assumptions(nccl=nccl))
    if refused is None:
        assert judgement.canonical is not None, judgement.reasons
    else:
        assert judgement.canonical is None
        assert refused in judgement.reasons


@pytest.mark.parametrize(
    ("env", "left"),
    [
        ({"NCCL_NTHREADS": "100"}, {"NCCL_NTHREADS": "512"}),
        ({"NCCL_NTHREADS": "1024"}, {"NCCL_NTHREADS": "512"}),
        ({"NCCL_NTHREADS": "32"}, {"NCCL_NTHREADS": "64"}),
        ({"NCCL_NTHREADS": "96"}, {"NCCL_NTHREADS": "96"}),
        ({"NCCL_NTHREADS": "0"}, {}),
        ({"NCCL_NTHREADS": "512", "NCCL_PROTO": "LL"}, {"NCCL_PROTO": "LL"}),
        ({"NCCL_NTHREADS": "512", "NCCL_PROTO": "LL,Simple"}, {"NCCL_NTHREADS": "512", "NCCL_PROTO": "LL,Simple"}),
        ({"NCCL_BUFFSIZE": "4194304"}, {}),
        ({"NCCL_MAX_NCHANNELS": "64"}, {}),
        ({"NCCL_MAX_NCHANNELS": "0"}, {"NCCL_MAX_NCHANNELS": "1"}),
        ({"NCCL_MIN_NCHANNELS": "100"}, {"NCCL_MIN_NCHANNELS": "64"}),
        (
            {"NCCL_MIN_NCHANNELS": "16", "NCCL_MAX_NCHANNELS": "4"},
            {"NCCL_MIN_NCHANNELS": "16", "NCCL_MAX_NCHANNELS": "16"},
        ),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}, {"NCCL_P2P_DISABLE": "1"}),
        ({"NCCL_NVLS_ENABLE": "0"}, {}),
        ({"NCCL_NVLS_ENABLE": "1"}, {"NCCL_NVLS_ENABLE": "1"}),
    ],
)
def test_what_nccl_rewrites(env, left):
    """Values that NCCL or SGLang would change go by what they become."""
    assert rules.canonical(config(env=env, args=EIGHT)).env == left


def test_one_gpu_has_no_nccl_setting():
    """At tensor parallel size 1, and without a GPU, no NCCL variable makes another point; debugging ones are kept."""
    env = {"NCCL_PROTO": "LL", "NCCL_DEBUG": "INFO", "OTHER": "1"}
    assert rules.canonical(config(env=env)).env == {"NCCL_DEBUG": "INFO", "OTHER": "1"}
    none = rules.Assumptions(gpus=0)
    assert rules.canonical(config(env=env, args=EIGHT), none).env == {"NCCL_DEBUG": "INFO", "OTHER": "1"}


def test_determinism_takes_the_algorithm_over():
    """--enable-deterministic-inference sets NCCL_ALGO, and from 0.5.20 the channels."""
    env = {"NCCL_ALGO": "Ring", "NCCL_MAX_NCHANNELS": "4"}
    asked = config(args=EIGHT | {"enable-deterministic-inference": True}, env=env)
    assert rules.canonical(asked).env == {}
    assert rules.canonical(asked, rules.Assumptions(sglang=(0, 5, 16))).env == {"NCCL_MAX_NCHANNELS": "4"}


@pytest.mark.parametrize(
    ("name", "one", "other", "same"),
    [
        ("NCCL_ALGO", "Ring,Tree", "tree,RING", True),
        ("NCCL_ALGO", "Ring", "ring;allreduce:ring", True),
        ("NCCL_ALGO", "Ring", "Ring,Tree", False),
        ("NCCL_ALGO", "ring,tree;allreduce:tree", "ring;allreduce:TREE", True),
        ("NCCL_PROTO", "^LL128", "Simple,LL", True),
        ("NCCL_PROTO", "LL", "Simple", False),
    ],
)
def test_spellings_of_one_list(name, one, other, same):
    """What NCCL reads as the same list is one point."""
    keys = [rules.key(config(env={name: text}, args=EIGHT)) for text in (one, other)]
    assert (keys[0] == keys[1]) is same


def test_spellings_of_one_flag():
    """--tp, --tensor-parallel-size and --tp-size are one flag."""
    assert len({rules.key(config(args={name: 8})) for name in ("tp", "tensor-parallel-size", "tp-size")}) == 1


def test_every_rule_names_its_source():
    """Each rule says where it was read, and is told apart by its name."""
    for name, rule in rules.all_rules().items():
        assert rule.__doc__, name
        named = (".py", ".cc", "issue", "vllm", "0.5.", "See `")
        assert any(word in rule.__doc__ for word in named) or "(1" in rule.__doc__, name


def test_notes_tell_what_no_rule_forbids():
    """Concurrency above the default cap is said."""
    lines = list(rules.notes(config(args=EIGHT), concurrency=64))
    assert any("48 requests" in line for line in lines)
    assert list(rules.notes(config(args=EIGHT | {"disable-custom-all-reduce": True}))) == []
