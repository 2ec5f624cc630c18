"""What SGLang and NCCL accept, rewrite or ignore: no launch is spent on what is known before.

Three verdicts:

* *invalid*: refused at start, or crashes at the first request; never launched.
* *rewritten*: SGLang runs something else than was asked; the point goes by the rewritten value.
* *no effect*: a knob that nothing reads beside the others; the point goes by what is left without it.

`canonical` gives the name of a point: two launches with one canonical form are one point, and one is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from raytune_eagle.model import Config

Verdict = Literal["invalid", "rewritten", "no effect"]

NCCL_PROTOCOLS = ("LL", "LL128", "Simple")
"""Tokens of NCCL_PROTO; `^` excludes (NCCL 2.30 docs/userguide/source/env.rst)."""

NCCL_ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")
"""Tokens of NCCL_ALGO (likewise; NVLS from 2.17, NVLSTree from 2.18, PAT from 2.23)."""


@dataclass(frozen=True)
class Finding:
    """What one rule said of one configuration."""

    rule: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Judgement:
    """What all rules together said: the canonical form, and how it came about.

    Attributes:
        canonical: None when a rule found the configuration invalid.
    """

    canonical: Config | None
    findings: tuple[Finding, ...]

    @property
    def reasons(self) -> str:
        """All findings in one line."""
        return "; ".join(f"{f.verdict}: {f.reason}" for f in self.findings)


def tree_capacity(num_steps: int, eagle_topk: int) -> int:
    """Draft tokens that the candidate list of one draft round holds, the verified token included.

    The first step adds topk candidates, each later one topk². SGLang takes ``torch.topk(scores, num_draft_tokens - 1)``
    of them (``organize_draft_results``, eagle_utils.py, 0.5.16-0.5.23): more fails with "selected index k out of
    range", at graph capture on a GPU and at the first request without graphs.
    """
    return 1 + eagle_topk + (num_steps - 1) * eagle_topk**2


def chain_rewrites_draft_tokens(config: Config) -> tuple[Config, str] | None:
    """With eagle_topk 1 SGLang sets num_draft_tokens to num_steps + 1, with only a warning.

    ``_handle_eagle_family``, speculative_hook.py (0.5.16:624, 0.5.23:1256).
    """
    spec = config.speculative
    if spec is None or spec.eagle_topk != 1 or spec.num_draft_tokens == spec.num_steps + 1:
        return None
    chain = spec.model_copy(update={"num_draft_tokens": spec.num_steps + 1})
    reason = f"eagle_topk 1 makes num_draft_tokens {spec.num_steps + 1} (num_steps + 1), not {spec.num_draft_tokens}"
    return config.model_copy(update={"speculative": chain}), reason


def tree_holds_draft_tokens(config: Config) -> str | None:
    """See `tree_capacity`."""
    spec = config.speculative
    if spec is None or spec.eagle_topk == 1:
        return None
    most = tree_capacity(spec.num_steps, spec.eagle_topk)
    if spec.num_draft_tokens <= most:
        return None
    return (
        f"num_draft_tokens {spec.num_draft_tokens}: a tree of num_steps {spec.num_steps}, eagle_topk {spec.eagle_topk} "
        f"holds {most} at most"
    )


def tree_holds_longest_path(config: Config) -> str | None:
    """With eagle_topk above 1 an accepted path of num_steps + 1 tokens must fit into num_draft_tokens.

    ``_compact_accept_to_front`` (eagle_worker_common.py, 0.5.16-0.5.23; 0.5.12 has no such step) writes num_steps + 1
    places into a block of num_draft_tokens: fewer end the scheduler at its first verify with "The expanded size of the
    tensor (7) must match the existing size (9)", whatever was accepted (seen with 0.5.20 at 8/4/7).
    """
    spec = config.speculative
    if spec is None or spec.eagle_topk == 1 or spec.num_draft_tokens > spec.num_steps:
        return None
    return (
        f"num_draft_tokens {spec.num_draft_tokens}: with eagle_topk above 1 SGLang needs num_steps + 1 = "
        f"{spec.num_steps + 1} or more"
    )


def draft_is_given(config: Config) -> str | None:
    """EAGLE3 without a draft path loads the target as its draft and crashes (sglang issue 36528)."""
    if config.speculative is not None and not config.speculative.draft.strip():
        return "speculative decoding needs engine.draft, the path of an EAGLE-3 draft"
    return None


def triple_is_whole(given: dict[str, object]) -> str | None:
    """num_steps, eagle_topk and num_draft_tokens come all together or not at all.

    num_steps alone ends in ``TypeError: '>' not supported between NoneType and int``, topk or draft tokens alone in an
    assertion (``_handle_eagle_family``, speculative_hook.py, 0.5.16:555-640).
    """
    missing = [name for name in SPECULATIVE_NAMES if given.get(name) is None]
    if not missing or len(missing) == len(SPECULATIVE_NAMES):
        return None
    return f"{', '.join(missing)} missing: give {', '.join(SPECULATIVE_NAMES)} together, or none of them"


def continuous_decode_steps_is_read_nowhere(config: Config) -> tuple[Config, str] | None:
    """``--num-continuous-decode-steps`` is parsed and read nowhere (0.5.16-0.5.23)."""
    return _without_flag(config, "num-continuous-decode-steps", "SGLang parses it and reads it nowhere")


def buffsize_is_for_simple(config: Config) -> tuple[Config, str] | None:
    """NCCL_BUFFSIZE sizes the buffers of the Simple protocol only (init.cc computeBuffSizes, NCCL 2.27-2.30)."""
    if config.env.get("NCCL_PROTO") not in {"LL", "LL128"}:
        return None
    return _without_env(config, "NCCL_BUFFSIZE", f"it sizes Simple only, not {config.env['NCCL_PROTO']}")


def nthreads_is_not_for_ll128(config: Config) -> tuple[Config, str] | None:
    """LL128 takes NCCL_LL128_NTHREADS instead of NCCL_NTHREADS (tuning.cc getNthreads, NCCL 2.27-2.30)."""
    if config.env.get("NCCL_PROTO") != "LL128":
        return None
    return _without_env(config, "NCCL_NTHREADS", "LL128 does not read it")


SPECULATIVE_NAMES = ("num_steps", "eagle_topk", "num_draft_tokens")

_REWRITES: tuple[tuple[Verdict, Callable[[Config], tuple[Config, str] | None]], ...] = (
    ("rewritten", chain_rewrites_draft_tokens),
    ("no effect", continuous_decode_steps_is_read_nowhere),
    ("no effect", buffsize_is_for_simple),
    ("no effect", nthreads_is_not_for_ll128),
)
_REFUSALS: tuple[Callable[[Config], str | None], ...] = (
    draft_is_given,
    tree_holds_draft_tokens,
    tree_holds_longest_path,
)


def judge(config: Config) -> Judgement:
    """Apply every rule: first what is rewritten or without effect, then what is refused."""
    findings: list[Finding] = []
    for verdict, rewrite in _REWRITES:
        changed = rewrite(config)
        if changed is not None:
            config, reason = changed
            findings.append(Finding(rewrite.__name__, verdict, reason))
    verdicts = [(rule.__name__, rule(config)) for rule in _REFUSALS]
    refused = [Finding(name, "invalid", why) for name, why in verdicts if why is not None]
    return Judgement(None if refused else config, (*findings, *refused))


def canonical(config: Config) -> Config:
    """The point that a launch really is; an invalid configuration stands for itself."""
    return judge(config).canonical or config


def key(config: Config) -> str:
    """Uid of the canonical form: equal keys are the same point."""
    form = canonical(config)
    flags = {**form.args, **form.tuned_args}  # where a flag stands on the line makes no other point
    shown = {name: value for name, value in flags.items() if value is not None and value is not False}
    return form.model_copy(update={"args": shown, "tuned_args": {}, "launcher": ()}).uid


def _without_flag(config: Config, flag: str, why: str) -> tuple[Config, str] | None:
    if flag not in config.args and flag not in config.tuned_args:
        return None
    update = {
        group: {name: value for name, value in getattr(config, group).items() if name != flag}
        for group in ("args", "tuned_args")
    }
    return config.model_copy(update=update), f"--{flag}: {why}"


def _without_env(config: Config, name: str, why: str) -> tuple[Config, str] | None:
    if name not in config.env:
        return None
    env = {other: value for other, value in config.env.items() if other != name}
    return config.model_copy(update={"env": env}), f"{name}: {why}"
