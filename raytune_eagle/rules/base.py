"""What a rule sees, and what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Self

from raytune_eagle.model.config import Config, FlagValue, Speculative

Verdict = Literal["invalid", "rewritten", "no effect"]
Version = tuple[int, ...]

ALIASES = {
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "pp": "pp-size",
    "pipeline-parallel-size": "pp-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
    "ep": "ep-size",
    "expert-parallel-size": "ep-size",
    "dcp-size": "decode-context-parallel-size",
    "attn-cp-size": "attention-context-parallel-size",
    "moe-dp-size": "moe-data-parallel-size",
    "nccl-init-addr": "dist-init-addr",
}
"""Two spellings of one flag (``add_cli_args``, 0.5.8-0.5.23; argparse also takes ``--tp`` for ``--tp-size``)."""

_NCCL_OF_SGLANG: tuple[tuple[Version, Version], ...] = (
    ((0, 5, 23), (2, 30, 7)),
    ((0, 5, 12), (2, 28, 9)),
    ((0, 5, 8), (2, 27, 5)),
    ((0, 0, 0), (2, 27, 3)),
)
"""NCCL that the torch pinned by each SGLang brings, newest first."""


def version(text: str) -> Version:
    """First three numbers of a version; "0.5.20.post1" is (0, 5, 20)."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


@dataclass(frozen=True)
class Assumptions:
    """What is known of the place where a configuration would run; None is not known, and then nothing is claimed.

    Attributes:
        sglang: its version.
        nccl: its version; not given, the one that this SGLang's torch brings.
        gpus: of one node; 0 is the CPU layer.
        mla: whether the target has multi-head latent attention (DeepSeek, Kimi).
        arch: compute capability of the GPUs, 90 for Hopper, 100 for Blackwell.
        h20: whether the GPUs are H20s.
        amx: whether a CPU has it.
        architecture: of the target, as its config.json names it.
        custom_all_reduce: whether SGLang's own all-reduce, where it is on, can take the messages of a verify step
            (they are small enough, and the GPUs are two or joined by NVLink).
        most_draft_tokens: see `raytune_eagle.rules.speculative.draft_tokens_are_fewer_than_64`.
    """

    sglang: Version = (0, 5, 20)
    nccl: Version = ()
    gpus: int = 8
    mla: bool | None = None
    arch: int | None = None
    h20: bool | None = None
    amx: bool | None = None
    architecture: str | None = None
    custom_all_reduce: bool | None = None
    most_draft_tokens: int | None = 63

    @cached_property
    def nccl_version(self) -> Version:
        """The one given, or the one that comes with this SGLang."""
        return self.nccl or next(nccl for sglang, nccl in _NCCL_OF_SGLANG if self.sglang >= sglang)


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


@dataclass(frozen=True)
class Change:
    """What SGLang or NCCL makes of a setting.

    Attributes:
        flags, env: new values by name; None takes the setting away.
    """

    verdict: Verdict
    reason: str
    speculative: Speculative | None = None
    flags: dict[str, FlagValue] = field(default_factory=dict)
    env: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """A configuration as the rules read it: its flags in one place, each under one name, those that are off left out.

    Raises nothing: a value of an unexpected type is a flag that no rule knows.
    """

    config: Config
    facts: Assumptions

    @cached_property
    def flags(self) -> dict[str, FlagValue]:
        """All server flags but the speculative triple."""
        both = {**self.config.args, **self.config.tuned_args}
        return {ALIASES.get(name, name): v for name, v in both.items() if v is not None and v is not False}

    @property
    def env(self) -> dict[str, str]:
        """Environment of the launch."""
        return self.config.env

    @property
    def speculative(self) -> Speculative | None:
        """The triple and its draft."""
        return self.config.speculative

    @property
    def topk(self) -> int:
        """eagle_topk; 0 without speculation."""
        return self.config.speculative.eagle_topk if self.config.speculative else 0

    def text(self, flag: str) -> str | None:
        """A flag as it stands on the command line, None when it is not there."""
        value = self.flags.get(flag)
        return None if value is None else str(value)

    def number(self, flag: str, default: int) -> int:
        """A flag that is a whole number."""
        value = self.flags.get(flag)
        return int(value) if isinstance(value, int | str) and re.fullmatch(r"-?\d+", str(value)) else default

    @cached_property
    def on_cpu(self) -> bool:
        """Whether the server has no GPU."""
        return not self.facts.gpus or self.flags.get("device") == "cpu"

    @cached_property
    def ranks(self) -> int:
        """GPUs that reduce together: tensor and pipeline parallel ones (data parallel replicas do not)."""
        return self.number("tp-size", 1) * self.number("pp-size", 1)

    @property
    def deterministic(self) -> bool:
        """--enable-deterministic-inference."""
        return bool(self.flags.get("enable-deterministic-inference"))

    def changed(self, change: Change) -> Self:
        """The launch that really runs."""
        config = self.config
        update: dict[str, object] = {}
        if change.speculative is not None:
            update["speculative"] = change.speculative
        if change.env:
            env = {**config.env, **change.env}
            update["env"] = {name: value for name, value in env.items() if value is not None}
        if change.flags:
            update["args"] = _with(config.args, change.flags)
            update["tuned_args"] = _with(config.tuned_args, change.flags)
        return type(self)(config.model_copy(update=update), self.facts)


def _with(flags: dict[str, FlagValue], new: dict[str, FlagValue]) -> dict[str, FlagValue]:
    """New values only where the flag stands, so that it keeps its place on the command line."""
    changed = {name: new.get(ALIASES.get(name, name), value) for name, value in flags.items()}
    gone = {name for name in flags if new.get(ALIASES.get(name, name), True) is None}
    return {name: value for name, value in changed.items() if name not in gone}


def at_default(launch: Launch, defaults: dict[str, str]) -> Change | None:
    """Flags that stand at their parser's default."""
    given = [name for name, default in defaults.items() if _same(launch.text(name), default)]
    if not given:
        return None
    return Change("no effect", f"--{', --'.join(given)}: the default", flags=dict.fromkeys(given))


def _same(text: str | None, default: str) -> bool:
    if text is None or text == default:
        return text == default
    try:
        return float(text) == float(default)
    except ValueError:
        return False
