"""Random launches of a space much wider than any study's, for SGLang and our rules to agree on."""

import random

from raytune_eagle import rules
from raytune_eagle.model.config import Config, Speculative

PLATFORMS = {
    "cpu": {"has_amx": False, "has_flashinfer": False},
    "hopper": {"is_sm90": True, "is_hopper_with_cuda_12_3": True, "has_flashinfer": True},
    "blackwell": {"is_sm100": True, "is_sm100_or_sm110": True, "is_blackwell": True, "has_flashinfer": True},
}
FACTS = {
    "cpu": rules.Assumptions(gpus=0, mla=False, amx=False, most_draft_tokens=None),
    "hopper": rules.Assumptions(gpus=8, mla=False, arch=90, most_draft_tokens=None),
    "blackwell": rules.Assumptions(gpus=8, mla=False, arch=100, most_draft_tokens=None),
}
BACKENDS = {
    "cpu": ("torch_native", "intel_amx", "triton", "flex_attention"),
    "hopper": ("fa3", "flashinfer", "triton", "torch_native", "flex_attention", "trtllm_mha", "flashmla", "hpc_ops"),
    "blackwell": ("fa3", "fa4", "flashinfer", "triton", "trtllm_mha", "trtllm_mla", "cutedsl_mla", "torch_native"),
}
FLAGS = {
    "page-size": (None, None, 1, 16, 32, 64, 48, 128),
    "tp-size": (None, 1, 2, 8),
    "dtype": (None, "auto", "bfloat16", "float16"),
    "kv-cache-dtype": (None, None, "auto", "fp8_e5m2", "fp8_e4m3"),
    "enable-deterministic-inference": (None, None, None, True),
    "max-running-requests": (None, 48, 8),
    "chunked-prefill-size": (None, None, None, 2048, 4096, 1000, -1),
    "enable-mixed-chunk": (None, None, None, True),
    "disable-overlap-schedule": (None, None, True),
    "disable-radix-cache": (None, None, True),
    "disable-cuda-graph": (None, None, True),
    "cuda-graph-max-bs-decode": (None, None, 8, 16),
    "sampling-backend": (None, None, "pytorch"),
    "schedule-policy": (None, None, "fcfs", "lpm"),
    "stream-interval": (None, None, 1, 4),
    "num-continuous-decode-steps": (None, None, 4),
    "disable-custom-all-reduce": (None, None, True),
    "speculative-adaptive": (None, None, None, None, None, True),
    "speculative-use-rejection-sampling": (None, None, None, None, None, True),
    "pp-size": (None, None, None, None, None, None, None, None, 1, 2),
}


def draws(count, seed=0):
    """`count` of (platform, Config): most are neighbours of the one before, so that many are one point."""
    chance = random.Random(seed)
    parts = None
    for index in range(count):
        parts = _neighbour(chance, *parts) if index % 4 and parts else _fresh(chance)
        yield parts[0], _config(*parts)


def _fresh(chance):
    platform = chance.choice(tuple(PLATFORMS))
    few = chance.sample(tuple(FLAGS), chance.randint(2, 7))
    flags = {name: chance.choice(FLAGS[name]) for name in few}
    for name in ("attention-backend", "prefill-attention-backend", "decode-attention-backend"):
        likely = 0.6 if name == "attention-backend" else 0.12
        flags[name] = chance.choice(BACKENDS[platform]) if chance.random() < likely else None
    triple = (chance.randint(1, 8), chance.choice((1, 1, 2, 4, 8)), chance.randint(2, 32))
    return platform, triple, flags


def _neighbour(chance, platform, triple, flags):
    flags = dict(flags)
    steps, topk, tokens = triple
    what = chance.random()
    if what < 0.4:
        return platform, (steps, topk, chance.randint(2, 32)), flags
    if what < 0.5:
        return platform, (steps, chance.choice((1, 2, 4)), tokens), flags
    name = chance.choice((*FLAGS, "attention-backend"))
    flags[name] = chance.choice(FLAGS.get(name, (None, *BACKENDS[platform])))
    return platform, triple, flags


def _config(platform, triple, flags):
    steps, topk, tokens = triple
    draft = Speculative(draft="DRAFT", num_steps=steps, eagle_topk=topk, num_draft_tokens=tokens)
    args = {"device": "cpu" if platform == "cpu" else "cuda", "random-seed": 0}
    return Config(
        model="TARGET", speculative=draft, args=args, tuned_args={k: v for k, v in flags.items() if v is not None}
    )


def point(platform, config, target, draft):
    """What tests/sglang_resolution.py reads."""
    words = [{"TARGET": target, "DRAFT": draft}.get(word, word) for word in config.argv()]
    return {"argv": words, "env": config.env, "platform": PLATFORMS[platform]}
