"""Cost models that follow published figures, by the name that ``--cluster simulated:NAME`` takes."""

from __future__ import annotations

from dataclasses import replace

from raytune_eagle.errors import SpecError
from raytune_eagle.nodes.cost_model import CostModel, Draft, Machine

# The account of Kimi-K2.5 INT4 on 8 GPUs gives 90 tok/s for plain decoding and, for EAGLE-3, 53.2 (3/4/16 without CUDA
# graphs), 74.9 (with), 82.3 (3/4/5), 71.3 (second draft, 5/1/6), all under NCCL_PROTO=LL NCCL_ALGO=Ring
# NCCL_P2P_LEVEL=SYS. Its other figures (verify 21-28 ms before these settings take 27 % off; accept_len 2.0-2.4; bursts
# of 113 tok/s) agree with them where tok/s counts whole answers: of 256 tokens, 0.84 s of which pass before the first.
_KIMI_CATEGORIES = {
    "code": 0.19,
    "arithmetic": 0.10,
    "reasoning": 0.03,
    "extraction": -0.03,
    "summarising": -0.08,
    "chat": -0.22,
}
_KIMI_NODE = Machine(
    decode_ms=10.55,
    verify_ms=23.1,
    token_ms=1.55,
    token_power=0.5,
    overhead_ms=0.1,
    comm_share=0.5,
    eager_ms=2.9,
    ttft_ms=842.0,
    nccl={
        "NCCL_PROTO": {"Simple": 1.04, "LL": 0.60, "LL128": 0.74},
        "NCCL_ALGO": {"Ring": 0.85, "Tree": 0.96, "ring,tree;allreduce:tree": 0.96},
        "NCCL_P2P_LEVEL": {"PHB": 0.97, "SYS": 0.90},
        "NCCL_MAX_NCHANNELS": {"4": 1.15, "8": 1.03, "32": 1.02},
        "NCCL_NTHREADS": {"128": 1.04},
    },
)
_GOLDEN = (1.83, 2.43, 2.88, 3.24, 3.46, 3.62, 3.71, 3.77)
"""accept_len by draft tokens: kimi-k2.5-nvfp4, EAGLE3, thinking on (InferenceX, SPEED-Bench coding, B300)."""

KIMI_K25 = CostModel(
    name="kimi-k25",
    machine=_KIMI_NODE,
    drafts={
        "first": Draft.falling(0.614, 0.926, ranks=0.01, step_ms=0.31, categories=_KIMI_CATEGORIES),
        "second": Draft.falling(0.612, 0.76, ranks=0.01, step_ms=0.235, categories=_KIMI_CATEGORIES),
        "golden": Draft.from_accept_lens(_GOLDEN, ranks=0.15, step_ms=0.31),
    },
)
PRESETS = {KIMI_K25.name: KIMI_K25}


def preset(name: str) -> CostModel:
    """Give the cost model called NAME, or ``NAME:DRAFT`` with that draft for every path that names no draft of it.

    Raises:
        SpecError: there is no such model or draft.
    """
    chosen, _, draft = name.partition(":")
    model = PRESETS.get(chosen)
    if model is None:
        raise SpecError(
            f"--cluster simulated:{name}: neither a preset ({', '.join(PRESETS)}) nor a file ending in .csv "
            "nor a results/study=NAME folder"
        )
    if not draft:
        return model
    if draft not in model.drafts:
        raise SpecError(f"--cluster simulated:{name}: no draft {draft!r}; {chosen} has {', '.join(model.drafts)}")
    others = {key: value for key, value in model.drafts.items() if key != draft}
    return replace(model, drafts={draft: model.drafts[draft], **others})
