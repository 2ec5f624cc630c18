"""What SGLang and NCCL accept, rewrite or ignore: no launch is spent on what is known before.

Three verdicts:

* *invalid*: refused at start, or crashes at the first request; never launched.
* *rewritten*: SGLang runs something else than was asked; the point goes by the rewritten value.
* *no effect*: a knob that nothing reads beside the others; the point goes by what is left without it.

`canonical` gives the name of a point: two launches with one canonical form are one point, and one is enough.

The rules are in two parts that can be judged apart: those that read the speculative triple, with every flag that any
of them reads (`BESIDE_SPECULATION`), and those that read NCCL's environment and all other flags. The second part reads
flags of the first and changes none of them. Each rule names its source and the versions in which it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from raytune_eagle.model.config import Config
from raytune_eagle.rules import all_reduce, attention, nccl, server, speculative
from raytune_eagle.rules.all_reduce import CUSTOM_BYTES
from raytune_eagle.rules.base import (
    ALIASES,
    Assumptions,
    Change,
    Finding,
    Judgement,
    Launch,
    Verdict,
    version,
)
from raytune_eagle.rules.nccl_lists import ALGORITHMS as NCCL_ALGORITHMS
from raytune_eagle.rules.nccl_lists import PROTOCOLS as NCCL_PROTOCOLS
from raytune_eagle.rules.nccl_lists import parse as parse_nccl
from raytune_eagle.rules.nccl_lists import spelling, unusable
from raytune_eagle.rules.speculative import SPECULATIVE_NAMES, tree_capacity, triple_is_whole

Part = Literal["speculative", "server"]

BESIDE_SPECULATION = frozenset(
    {
        *attention.READS,
        "max-running-requests",
        "enable-mixed-chunk",
        "pp-size",
        "tp-size",
        "enable-lora",
        "lora-paths",
        "speculative-adaptive",
        "speculative-adaptive-config",
        "speculative-use-rejection-sampling",
        "speculative-accept-threshold-single",
        "speculative-accept-threshold-acc",
    }
)
"""Server flags that some rule of the speculative part reads or changes."""

BESIDE_NCCL = frozenset(nccl.READS)
NCCL_NAMES = nccl.NAMES
"""Server flags that some rule of the other part reads without changing them."""

_REWRITES: dict[Part, tuple[Callable[[Launch], Change | None], ...]] = {
    "speculative": (*speculative.REWRITES, *attention.REWRITES),
    "server": (*nccl.REWRITES, *server.REWRITES),
}
_REFUSALS: dict[Part, tuple[Callable[[Launch], str | None], ...]] = {
    "speculative": (*speculative.REFUSALS, *attention.REFUSALS),
    "server": nccl.REFUSALS,
}
_ANYWHERE = Assumptions()


def judge(config: Config, facts: Assumptions = _ANYWHERE, part: Part | None = None) -> Judgement:
    """Apply every rule (or one part): first what is rewritten or without effect, then what is refused."""
    findings: list[Finding] = []
    launch = Launch(config, facts)
    parts: tuple[Part, ...] = (part,) if part else ("speculative", "server")
    for name in parts:
        launch = _rewrite(launch, _REWRITES[name], findings)
    verdicts = [(rule.__name__, rule(launch)) for name in parts for rule in _REFUSALS[name]]
    refused = [Finding(name, "invalid", why) for name, why in verdicts if why is not None]
    return Judgement(None if refused else launch.config, (*findings, *refused))


def _rewrite(launch: Launch, rules: tuple[Callable[[Launch], Change | None], ...], findings: list[Finding]) -> Launch:
    """Until no rule finds anything more: what one takes away may leave another without effect."""
    for rule in rules * 2:
        while (change := rule(launch)) is not None:
            launch = launch.changed(change)
            findings.append(Finding(rule.__name__, change.verdict, change.reason))
    return launch


def canonical(config: Config, facts: Assumptions = _ANYWHERE) -> Config:
    """The point that a launch really is; an invalid configuration stands for itself."""
    return judge(config, facts).canonical or config


def key(config: Config, facts: Assumptions = _ANYWHERE) -> str:
    """Uid of the canonical form: equal keys are the same point."""
    return name(canonical(config, facts))


def name(form: Config) -> str:
    """Uid of a configuration that is canonical already, whatever the order and spelling of its settings."""
    flags = {**form.args, **form.tuned_args}  # where a flag stands on the line makes no other point
    shown = {ALIASES.get(flag, flag): v for flag, v in flags.items() if v is not None and v is not False}
    env = {variable: spelling(variable, value) for variable, value in form.env.items()}
    return form.model_copy(update={"args": shown, "tuned_args": {}, "env": env, "launcher": ()}).uid


def nccl_mistake(variable: str, value: str) -> str | None:
    """What is wrong with a value of an NCCL variable, whatever it stands beside; None for what some launch can use."""
    if variable in {"NCCL_PROTO", "NCCL_ALGO"}:
        lists = parse_nccl(variable, value)
        if isinstance(lists, str):
            return lists
        algo, proto = (value, None) if variable == "NCCL_ALGO" else (None, value)
        why = unusable(algo, proto, (2, 24), nvls=True, nodes=2)
        return None if why is None else f"{why} (from NCCL 2.24 on there is no implicit Ring)"
    if variable == "NCCL_P2P_LEVEL":
        known = value in nccl.P2P_LEVELS or value.isdigit()
        return None if known else f"{value!r} is not one of {', '.join(nccl.P2P_LEVELS)}"
    if variable in {*nccl.NUMBERS, *nccl.SIZES} and nccl.whole(value) is None:
        return f"{value!r} is no whole number"
    if variable in nccl.SIZES and (nccl.whole(value) or 0) < 1:
        return f"{value} is no size of a buffer: give bytes, 1 or more"
    return None


def notes(config: Config, facts: Assumptions = _ANYWHERE, concurrency: int = 1) -> Iterator[str]:
    """What no rule forbids and a person should know before a study, one line each."""
    launch = Launch(config, facts)
    limit = launch.number("max-running-requests", 48)
    if concurrency > limit:
        yield (
            f"concurrency {concurrency}: SGLang runs {limit} requests at once beside speculation: "
            f"set max-running-requests in engine.args"
        )
    graphs = launch.number("cuda-graph-max-bs-decode", launch.number("cuda-graph-max-bs", concurrency))
    if concurrency > graphs:
        yield f"concurrency {concurrency}: CUDA graphs are captured up to batch {graphs} only"


def bypasses_nccl(config: Config, facts: Assumptions = _ANYWHERE, variable: str = "NCCL_PROTO") -> str | None:
    """Why this NCCL variable could not act here; see `raytune_eagle.rules.all_reduce.bypasses_nccl`."""
    launch = Launch(config, facts)
    tunes = variable in nccl.TUNING or all_reduce.has_no_nccl(launch)
    return all_reduce.bypasses_nccl(launch) if tunes else None


def all_rules() -> dict[str, Any]:
    """Every rule by name."""
    both = [*_REWRITES.values(), *_REFUSALS.values()]
    return {rule.__name__: rule for rules in both for rule in rules}


__all__ = [
    "ALIASES",
    "BESIDE_NCCL",
    "BESIDE_SPECULATION",
    "CUSTOM_BYTES",
    "NCCL_ALGORITHMS",
    "NCCL_NAMES",
    "NCCL_PROTOCOLS",
    "SPECULATIVE_NAMES",
    "Assumptions",
    "Finding",
    "Judgement",
    "Part",
    "Verdict",
    "all_rules",
    "bypasses_nccl",
    "canonical",
    "judge",
    "key",
    "name",
    "nccl_mistake",
    "notes",
    "spelling",
    "tree_capacity",
    "triple_is_whole",
    "version",
]
