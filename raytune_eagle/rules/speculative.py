"""Rules of speculative decoding, and of every server flag that one of them reads beside the triple.

Lines are those of SGLang 0.5.20 (``srt/arg_groups/speculative_hook.py`` unless another file is named), compared with
0.5.16; other versions as named.
"""

from __future__ import annotations

from raytune_eagle.rules.attention import draft_backend, page_size, resolved
from raytune_eagle.rules.base import Change, Launch, at_default

SPECULATIVE_NAMES = ("num_steps", "eagle_topk", "num_draft_tokens")

_TREE_BACKENDS = ("flashinfer", "fa3", "triton")
_CHAIN_BACKENDS = ("flashmla", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "qsa")
_NO_DRAFT_BACKENDS = ("torch_native", "flex_attention", "hpc_ops", "minicpm_flashattn", "minicpm_flashinfer", "wave")
_ADAPTIVE_STEPS = (0, 1, 3, 5, 7)
_DEFAULT_RUNNING = 48
_DEFAULTS = {
    "tp-size": "1",
    "pp-size": "1",
    "kv-cache-dtype": "auto",
    "speculative-accept-threshold-single": "1.0",
    "speculative-accept-threshold-acc": "1.0",
}


def tree_capacity(num_steps: int, eagle_topk: int) -> int:
    """Draft tokens that the candidate list of one draft round holds, the verified token included.

    The first step adds topk candidates, each later one topk². SGLang takes ``torch.topk(scores, num_draft_tokens - 1)``
    of them (``organize_draft_results``, eagle_utils.py, 0.5.16-0.5.23): more fails with "selected index k out of
    range", at graph capture on a GPU and at the first request without graphs.
    """
    return 1 + eagle_topk + (num_steps - 1) * eagle_topk**2


def triple_is_whole(given: dict[str, object]) -> str | None:
    """num_steps, eagle_topk and num_draft_tokens come all together or not at all.

    num_steps alone ends in ``TypeError: '>' not supported between NoneType and int``, topk or draft tokens alone in an
    assertion (``_handle_eagle_family``, 900-915; 0.5.16:555-640).
    """
    missing = [name for name in SPECULATIVE_NAMES if given.get(name) is None]
    if not missing or len(missing) == len(SPECULATIVE_NAMES):
        return None
    return f"{', '.join(missing)} missing: give {', '.join(SPECULATIVE_NAMES)} together, or none of them"


# ------------------------------------------------------------------------------------------------ rewritten, no effect
def chain_rewrites_draft_tokens(launch: Launch) -> Change | None:
    """With eagle_topk 1 SGLang sets num_draft_tokens to num_steps + 1, with only a warning.

    ``_handle_eagle_family``, 0.5.20:966, 0.5.16:624, 0.5.23:1256.
    """
    spec = launch.speculative
    if spec is None or spec.eagle_topk != 1 or spec.num_draft_tokens == spec.num_steps + 1:
        return None
    chain = spec.model_copy(update={"num_draft_tokens": spec.num_steps + 1})
    reason = f"eagle_topk 1 makes num_draft_tokens {spec.num_steps + 1} (num_steps + 1), not {spec.num_draft_tokens}"
    return Change("rewritten", reason, speculative=chain)


def running_requests_are_48_by_default(launch: Launch) -> Change | None:
    """Speculation sets max_running_requests to 48 where it is not given (``_handle_eagle_family``, 0.5.16-0.5.23)."""
    if launch.speculative is None or launch.number("max-running-requests", 0) != _DEFAULT_RUNNING:
        return None
    return Change(
        "no effect", "--max-running-requests: 48 is what speculation takes", flags={"max-running-requests": None}
    )


def mixed_chunk_is_switched_off(launch: Launch) -> Change | None:
    """EAGLE-3 does not mix prefill chunks and decoding before 0.5.20 (0.5.16:521; 0.5.20 ``supports_mixed_chunk``)."""
    flag = "enable-mixed-chunk"
    if launch.speculative is None or flag not in launch.flags or launch.facts.sglang >= (0, 5, 20):
        return None
    return Change("rewritten", f"--{flag}: switched off beside speculation before SGLang 0.5.20", flags={flag: None})


def adaptive_needs_a_chain(launch: Launch) -> Change | None:
    """--speculative-adaptive falls back to static settings with topk > 1 (adaptive_spec_params.py:64)."""
    if "speculative-adaptive" not in launch.flags or launch.topk <= 1:
        return None
    return Change("rewritten", "--speculative-adaptive: off with eagle_topk > 1", flags={"speculative-adaptive": None})


def default_beside_speculation(launch: Launch) -> Change | None:
    """A flag at its parser's default (``add_cli_args``, 0.5.16 and 0.5.20): given or not, nothing can tell."""
    return at_default(launch, _DEFAULTS)


# -------------------------------------------------------------------------------------------------------------- invalid
def draft_is_given(launch: Launch) -> str | None:
    """EAGLE3 without a draft path loads the target as its draft and crashes (sglang issue 36528)."""
    if launch.speculative is not None and not launch.speculative.draft.strip():
        return "speculative decoding needs engine.draft, the path of an EAGLE-3 draft"
    return None


def tree_holds_draft_tokens(launch: Launch) -> str | None:
    """See `tree_capacity`; not seen by SGLang's own resolution."""
    spec = launch.speculative
    if spec is None or spec.eagle_topk == 1:
        return None
    most = tree_capacity(spec.num_steps, spec.eagle_topk)
    if spec.num_draft_tokens <= most:
        return None
    return (
        f"num_draft_tokens {spec.num_draft_tokens}: a tree of num_steps {spec.num_steps}, eagle_topk {spec.eagle_topk} "
        f"holds {most} at most"
    )


def tree_holds_longest_path(launch: Launch) -> str | None:
    """With eagle_topk above 1 an accepted path of num_steps + 1 tokens must fit into num_draft_tokens.

    ``_compact_accept_to_front`` (eagle_worker_common.py, 0.5.16-0.5.23; 0.5.12 has no such step) writes num_steps + 1
    places into a block of num_draft_tokens: fewer end the scheduler at its first verify with "The expanded size of the
    tensor (7) must match the existing size (9)", whatever was accepted (seen with 0.5.20 at 8/4/7). Not seen by
    SGLang's own resolution.
    """
    spec = launch.speculative
    if spec is None or launch.topk <= 1 or launch.facts.sglang <= (0, 5, 12) or spec.num_draft_tokens > spec.num_steps:
        return None
    return (
        f"num_draft_tokens {spec.num_draft_tokens}: with eagle_topk above 1 SGLang needs num_steps + 1 = "
        f"{spec.num_steps + 1} or more"
    )


def draft_tokens_are_fewer_than_64(launch: Launch) -> str | None:
    """64 draft tokens end in an illegal memory access on GPUs, 60 are fine (sglang issue 12349).

    Never sampled; a ``start_from`` entry is launched all the same, for whoever knows that it works by now. Not seen by
    SGLang's own resolution.
    """
    spec, most = launch.speculative, launch.facts.most_draft_tokens
    if spec is None or most is None or launch.on_cpu or spec.num_draft_tokens <= most:
        return None
    return (
        f"num_draft_tokens {spec.num_draft_tokens}: from {most + 1} on kernels end in an illegal memory access "
        f"(sglang issue 12349); as a start_from entry it is launched all the same"
    )


def tree_on_pages_needs_a_backend_for_it(launch: Launch) -> str | None:
    """Topk > 1 with page_size > 1: flashinfer, fa3 and triton only, up to 0.5.8 flashinfer only (0.5.20:982).

    The page size is the one in effect: FlashMLA, TRT-LLM and CuteDSL backends set their own. SGLang reads the base
    backend here, whatever --decode-attention-backend says. Not pinned, the default on NVIDIA GPUs is one of the three.
    """
    size = page_size(launch)
    if launch.topk <= 1 or size <= 1:
        return None
    able = _TREE_BACKENDS if launch.facts.sglang > (0, 5, 8) else _TREE_BACKENDS[:1]
    backend = resolved(launch).base
    if backend is None or backend in able:
        return None
    return f"eagle_topk {launch.topk} with page size {size} needs --attention-backend {', '.join(able)}, not {backend}"


def trtllm_mha_takes_chains_only(launch: Launch) -> str | None:
    """ValueError "trtllm_mha backend only supports topk = 1" (0.5.20:917; 0.5.16:570)."""
    backends = resolved(launch)
    if launch.topk <= 1 or "trtllm_mha" not in (backends.prefill, backends.decode):
        return None
    return f"attention backend trtllm_mha takes eagle_topk 1 only, not {launch.topk}"


def mla_backends_take_chains_only(launch: Launch) -> str | None:
    """The multi-step draft backends of the MLA kernels raise "only supports topk=1" (0.5.16-0.5.23).

    flashinfer_mla_backend.py:1177, flashmla_backend.py:594, draft_utils.py; built only for more than one step. With
    an MLA target on flashinfer the verify step ignores the tree mask (its source calls that open work), with any
    draft. Not seen by SGLang's own resolution.
    """
    if launch.topk <= 1 or launch.speculative is None:
        return None
    backends = resolved(launch)
    if launch.speculative.num_steps > 1 and draft_backend(launch) in _CHAIN_BACKENDS:
        return f"attention backend {draft_backend(launch)} takes eagle_topk 1 only, not {launch.topk}"
    if launch.facts.mla and "flashinfer" in (backends.decode, backends.prefill):
        return f"flashinfer with an MLA target takes eagle_topk 1 only, not {launch.topk}"
    return None


def draft_has_a_backend(launch: Launch) -> str | None:
    """A draft of more than one step needs a multi-step backend, which these do not have (draft_utils.py:96).

    ValueError "EAGLE is not supported in decode attention backend …" at start; FlexAttention is refused at once
    (attention_hook.py:80, an assertion). The CPU layer brings its own for torch_native.
    """
    spec = launch.speculative
    if spec is None:
        return None
    if resolved(launch).base == "flex_attention":
        return "attention backend flex_attention does not go with speculation"
    if not launch.on_cpu and spec.num_steps > 1 and draft_backend(launch) in _NO_DRAFT_BACKENDS:
        return f"attention backend {draft_backend(launch)} has no multi-step draft: EAGLE-3 does not start"
    return None


def pipeline_parallel_is_refused(launch: Launch) -> str | None:
    """An assertion up to 0.5.22 (validation_hook.py:75); 0.5.23 takes it with SGLANG_ENABLE_PP_SPEC."""
    if launch.speculative is None or launch.number("pp-size", 1) <= 1:
        return None
    if launch.facts.sglang >= (0, 5, 23) and launch.env.get("SGLANG_ENABLE_PP_SPEC", "0").lower() in {"1", "true"}:
        return None
    return f"--pp-size {launch.number('pp-size', 1)}: pipeline parallelism does not go with speculation"


def rejection_sampling_needs_a_chain(launch: Launch) -> str | None:
    """--speculative-use-rejection-sampling: topk 1, thresholds 1.0, not deterministic (0.5.20:923, 0.5.16:576)."""
    if launch.speculative is None or "speculative-use-rejection-sampling" not in launch.flags:
        return None
    if launch.topk > 1:
        return f"--speculative-use-rejection-sampling takes eagle_topk 1 only, not {launch.topk}"
    for name in ("speculative-accept-threshold-single", "speculative-accept-threshold-acc"):
        if launch.text(name) not in {None, "1", "1.0"}:
            return f"--speculative-use-rejection-sampling takes no --{name}"
    if launch.deterministic:
        return "--speculative-use-rejection-sampling does not go with --enable-deterministic-inference"
    return None


def adaptive_steps_are_candidates(launch: Launch) -> str | None:
    """--speculative-adaptive with a num_steps outside its candidates is refused (0.5.20:1131).

    Those without a file of one's own: DEFAULT_ADAPTIVE_CONFIG, adaptive_spec_params.py:26.
    """
    spec = launch.speculative
    own = "speculative-adaptive-config" in launch.flags
    if spec is None or own or "speculative-adaptive" not in launch.flags or spec.num_steps in _ADAPTIVE_STEPS:
        return None
    return f"--speculative-adaptive knows num_steps {', '.join(map(str, _ADAPTIVE_STEPS[1:]))}, not {spec.num_steps}"


def lora_is_refused(launch: Launch) -> str | None:
    """LoRA: NGRAM only up to 0.5.16 (server_args.py:7800); from 0.5.20 EAGLE3, but not adaptive (lora_hook.py)."""
    if launch.speculative is None or not {"enable-lora", "lora-paths"} & set(launch.flags):
        return None
    if launch.facts.sglang < (0, 5, 20):
        return "LoRA does not go with EAGLE-3 before SGLang 0.5.20"
    if "speculative-adaptive" in launch.flags:
        return "LoRA does not go with --speculative-adaptive"
    return None


REWRITES = (
    chain_rewrites_draft_tokens,
    running_requests_are_48_by_default,
    mixed_chunk_is_switched_off,
    adaptive_needs_a_chain,
    default_beside_speculation,
)
REFUSALS = (
    draft_is_given,
    tree_holds_draft_tokens,
    tree_holds_longest_path,
    draft_tokens_are_fewer_than_64,
    trtllm_mha_takes_chains_only,
    mla_backends_take_chains_only,
    draft_has_a_backend,
    tree_on_pages_needs_a_backend_for_it,
    pipeline_parallel_is_refused,
    rejection_sampling_needs_a_chain,
    adaptive_steps_are_candidates,
    lora_is_refused,
)
