"""Who carries the all-reduces of the draft and verify steps: NCCL, or something that takes them before it.

Names of files are SGLang's. A decode step reduces a few tokens; what takes those leaves NCCL long prefills at most, so
that its settings cannot be told apart by anything that a study measures.
"""

from __future__ import annotations

from raytune_eagle.rules.base import Launch, Version

CUSTOM_BYTES = 8 << 20
"""Largest message of custom all-reduce (``_MAX_CAR_SIZE``, custom_all_reduce.py, 0.5.8-0.5.23; 16 MiB in some)."""

_CUSTOM_RANKS = (2, 4, 6, 8)
_HOPPER, _SM100, _SM100_END = 90, 100, 120
_FUSED_SINCE: tuple[tuple[Version, frozenset[str]], ...] = (
    (
        (0, 5, 8),
        frozenset(f"{name}ForCausalLM" for name in ("DeepseekV3", "GptOss", "Glm4Moe", "Glm4MoeLite", "Qwen3Moe")),
    ),
    (
        (0, 5, 12),
        frozenset(
            {
                *("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "Qwen3NextForCausalLM"),
                *("KimiK25ForConditionalGeneration", "Qwen3_5ForConditionalGeneration"),
                *("Qwen3_5MoeForConditionalGeneration", "InternS2PreviewForConditionalGeneration"),
            }
        ),
    ),
    (
        (0, 5, 16),
        frozenset(
            {
                *("MistralLarge3ForCausalLM", "Qwen3VLMoeForConditionalGeneration"),
                *("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"),
            }
        ),
    ),
    ((0, 5, 20), frozenset({"DeepseekV4ForCausalLM", "Qwen4ExpForConditionalGeneration"})),
)
"""Targets for which FlashInfer's fusion is on by itself, from the version read on (server_args.py 0.5.8:1611,
0.5.12:2443; arg_groups/overrides.py ``_FLASHINFER_ALLREDUCE_FUSION_ARCHS`` 0.5.16:1514, 0.5.20:988, 0.5.23:929)."""

_H20_UNTIL: Version = (0, 5, 13)
"""Before it an H20 is left out there (server_args.py 0.5.8:1605, 0.5.12:2440); not any more in 0.5.16 and later."""
_SYMMETRIC_RANKS = (2, 4, 6, 8)
_MSCCLPP_RANKS: tuple[tuple[Version, tuple[int, ...]], ...] = (((0, 5, 23), (4, 8)), ((0, 5, 8), (8,)))

_FUSION, _NO_FUSION = "flashinfer-allreduce-fusion-backend", "enforce-disable-flashinfer-allreduce-fusion"
_NO_CUSTOM = "disable-custom-all-reduce"
_SYMMETRIC, _MSCCLPP = "enable-torch-symm-mem", "enable-mscclpp"

READS = (
    "tp-size",
    "pp-size",
    "nnodes",
    "device",
    "enable-deterministic-inference",
    "enable-dp-attention",
    "moe-a2a-backend",
    "enable-flashinfer-allreduce-fusion",
    _FUSION,
    _NO_FUSION,
    _NO_CUSTOM,
    _SYMMETRIC,
    _MSCCLPP,
    "dtype",
)
"""Flags that decide it."""


def is_fused(launch: Launch) -> bool:
    """FlashInfer reduces and normalises up to 2048 tokens at once (``apply_flashinfer_allreduce_fusion``).

    On Hopper and Blackwell SM100 only, without DP attention; deterministic inference switches it off (overrides.py
    1108). Not known for GPUs that are not.
    """
    arch, flags = launch.facts.arch, launch.flags
    if arch is None or not (arch == _HOPPER or _SM100 <= arch < _SM100_END) or launch.number("tp-size", 1) <= 1:
        return False
    if _NO_FUSION in flags or "enable-dp-attention" in flags or launch.deterministic:
        return False
    if "enable-flashinfer-allreduce-fusion" in flags or _FUSION in flags:
        return True
    one_machine = launch.number("nnodes", 1) == 1
    by_itself = any(launch.facts.architecture in names for since, names in _FUSED_SINCE if launch.facts.sglang >= since)
    left_out = launch.facts.h20 and launch.facts.sglang < _H20_UNTIL
    return by_itself and one_machine and not left_out and launch.text("moe-a2a-backend") in {None, "none"}


def is_custom(launch: Launch) -> bool:
    """SGLang's own all-reduce (``should_custom_ar``, custom_all_reduce.py): full NVLink or two GPUs, up to 8 MiB.

    Not across machines or pipeline stages. Deterministic inference switches it off (attention_hook.py 0.5.20:594).
    """
    if not launch.facts.custom_all_reduce or _NO_CUSTOM in launch.flags or launch.deterministic:
        return False
    one_group = launch.number("nnodes", 1) == 1 and launch.number("pp-size", 1) == 1
    return one_group and launch.number("tp-size", 1) in _CUSTOM_RANKS


def is_symmetric(launch: Launch) -> bool:
    """PyTorch's symmetric memory, where it is asked for (torch_symm_mem.py, all_reduce_utils.py, 0.5.8-0.5.23).

    bfloat16 messages of less than 64 MiB on Hopper and Blackwell SM100, 2, 4, 6 or 8 ranks of one machine;
    deterministic inference switches it off (attention_hook.py 0.5.20:604). It needs NVLink multicast, which is not
    looked at here.
    """
    arch = launch.facts.arch
    if not launch.flags.get(_SYMMETRIC) or launch.deterministic or arch is None:
        return False
    right_gpu = arch == _HOPPER or _SM100 <= arch < _SM100_END
    right_type = launch.text("dtype") in {None, "auto", "bfloat16"}
    return right_gpu and right_type and launch.number("nnodes", 1) == 1 and launch.ranks in _SYMMETRIC_RANKS


def is_mscclpp(launch: Launch) -> bool:
    """MSCCL++, where it is asked for: up to 1 MiB, 8 ranks of one machine, from 0.5.23 on 4 too (pymscclpp.py).

    From 0.5.16 on only where the package ``mscclpp`` is installed, which is not looked at here.
    """
    if not launch.flags.get(_MSCCLPP) or launch.number("nnodes", 1) > 1:
        return False
    return launch.ranks in next((ranks for since, ranks in _MSCCLPP_RANKS if launch.facts.sglang >= since), ())


def has_no_nccl(launch: Launch) -> str | None:
    """Why nothing at all is reduced with NCCL: one GPU, or none (parallel_state.py)."""
    if launch.on_cpu:
        return "there is no GPU"
    return "--tp-size 1 reduces nothing" if launch.ranks <= 1 else None


def bypasses_nccl(launch: Launch) -> str | None:
    """Why the steps' messages do not reach NCCL, and what to write so that they do; None when they reach it."""
    if why := has_no_nccl(launch):
        return f"{why}, so NCCL is not on the serving path: search it where tp-size is 2 or more"
    takers = [
        (is_fused(launch), "FlashInfer fuses the all-reduces of up to 2048 tokens", f"{_NO_FUSION}: true"),
        (is_custom(launch), "custom all-reduce takes messages up to 8 MiB over NVLink", f"{_NO_CUSTOM}: true"),
        (is_symmetric(launch), "symmetric memory takes messages of less than 64 MiB", f"{_SYMMETRIC}: false"),
        (is_mscclpp(launch), "MSCCL++ takes messages up to 1 MiB", f"{_MSCCLPP}: false"),
    ]
    present = [(what, flag) for takes, what, flag in takers if takes]
    if not present:
        return None
    flags = " and ".join(flag for _, flag in present)
    return f"{' and '.join(what for what, _ in present)}, so they do not reach NCCL: write {flags} to search it"
