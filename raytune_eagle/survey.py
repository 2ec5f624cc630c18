"""What is known of the nodes before a launch: facts for the rules, and what would fail there in any case.

Every node is asked, in seconds: its interpreter for its versions and its SGLang for its flags, its files for target
and drafts, its driver for the kind of its GPUs. A node's own version wins over what the spec assumes.
"""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from raytune_eagle import rules
from raytune_eagle.checkpoints import readable
from raytune_eagle.checkpoints.weights import Checkpoint
from raytune_eagle.cluster import LOCAL, check_local, node_settings
from raytune_eagle.engines.builtin import builtin_path
from raytune_eagle.engines.describe import gpu_count
from raytune_eagle.engines.flags import Flags, ask
from raytune_eagle.engines.gpus import Nvml, Traits
from raytune_eagle.engines.machine import Installed, check_interpreter
from raytune_eagle.errors import Mistakes, NodeError, SpecError
from raytune_eagle.findings import Finding, problem, problems
from raytune_eagle.fit import check_builtin, check_models, flag_findings
from raytune_eagle.model.workload import Workload
from raytune_eagle.nodes import local_ray
from raytune_eagle.nodes.address import SIMULATED
from raytune_eagle.rules import Assumptions
from raytune_eagle.simulation import fleet as simulated_fleet
from raytune_eagle.space import assumed
from raytune_eagle.spec import Spec, values

NODE_S = 300.0
"""For a node to answer: a cold file system takes a minute for SGLang's imports."""
STRAGGLE_S = 60.0
"""One that hangs keeps the others waiting no longer than this, or than twice what half of them took."""
_MLA = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
_PLAIN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Targets whose attention backend SGLang chooses without a rule of their own (arg_groups/model_overrides 0.5.20)."""


@dataclass(frozen=True)
class Look:
    """What one node has: facts for the rules, and findings of its interpreter, flags, target and drafts."""

    facts: Assumptions
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Survey:
    """What all nodes have.

    Attributes:
        facts: of the first of them, by name.
        mistakes: what would fail, one line each; a line that not all nodes give names those that do.
        notes: what a person should know, one line each.
    """

    facts: Assumptions
    mistakes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def look(spec: Spec, workload: Workload | None) -> Look:
    """The machine that this runs on, as a node of the study. A few seconds, of which SGLang takes most, once."""
    settings = node_settings(spec)
    findings, there = check_interpreter(settings, spec.engine.version)
    flags: Flags | None = None
    if there is not None:
        try:
            flags = ask(settings, there)
            findings += flag_findings(spec, flags)
        except NodeError as exc:
            findings.append(problem("engine.args", f"{exc}; start the server by hand to see why"))
    facts = assume(spec, there)
    findings += check_models(spec, workload, flags, facts.arch)
    return Look(facts, tuple(findings))


def survey(spec: Spec, workload: Workload | None, where: str, nodes: int) -> Survey:
    """Look at every node; `where` and `nodes` as in `raytune_eagle.cluster.open_fleet`.

    Raises:
        NodeError: there is no cluster at `where`.
    """
    if where.startswith(SIMULATED):  # no node to look at
        known = Mistakes()
        with known.noting():
            simulated_fleet(spec, where, nodes)
        return Survey(assumed(spec), tuple(known.problems))
    if where == LOCAL:
        return _survey_here(spec, workload, nodes)
    answers = ask_nodes(where, partial(look, spec, workload))
    looks = {name: answer for name, answer in sorted(answers.items()) if isinstance(answer, Look)}
    silent = tuple(f"{name}: {answer}" for name, answer in sorted(answers.items()) if isinstance(answer, str))
    if not looks:
        return Survey(assumed(spec), (), (*silent, f"no node of {where} answers yet: the rules follow the spec"))
    first = next(iter(looks))
    others = [name for name, each in looks.items() if each.facts != looks[first].facts]
    differ = (f"nodes differ from {first}, which the rules follow: {', '.join(others)}; see doctor",) if others else ()
    return Survey(looks[first].facts, merged(looks), (*silent, *differ, *_version(looks[first])))


def _survey_here(spec: Spec, workload: Workload | None, nodes: int) -> Survey:
    fits = Mistakes()
    with fits.noting():
        check_local(spec, nodes)
    if gpu_count() < spec.node.gpus:  # no node: what this machine has says nothing of one
        return Survey(assumed(spec), tuple(fits.problems))
    seen = look(spec, workload)
    return Survey(seen.facts, (*fits.problems, *_lines(seen)), _version(seen))


def ask_nodes(
    where: str, question: Any, timeout_s: float = NODE_S, straggle_s: float | None = STRAGGLE_S
) -> dict[str, Any]:
    """Each node's answer, or as text why there is none, by name; times as in `joining.ask_every_node`."""
    os.environ.update(local_ray.environment_for(where))
    joining = importlib.import_module("raytune_eagle.nodes.joining")  # after the environment: Ray reads it once
    answers: dict[str, Any] = joining.ask_every_node(where, question, timeout_s, straggle_s)
    return answers


def planned(spec: Spec) -> Survey:
    """What this machine tells of a study that may run elsewhere: its SGLang is asked, its files are not.

    A machine without the GPUs of a node is none; then only an SGLang of the assumed version is asked.
    """
    if unknown := problems(check_builtin(spec)):
        return Survey(assumed(spec), tuple(unknown))
    settings, node = node_settings(spec), gpu_count() >= spec.node.gpus
    findings, there = check_interpreter(settings, spec.engine.version)
    facts = assume(spec, there) if node else assumed(spec)
    if there is None:
        return Survey(facts, (), tuple(f"{line}; flags are not checked" for line in problems(findings)))
    if not node and there.sglang != spec.engine.version:
        other = f"this machine has {there.sglang}, and not the GPUs of a node; flags are not checked"
        return Survey(facts, (), (f"engine.version: the rules follow {spec.engine.version}: {other}",))
    try:
        flags = ask(settings if node else replace(settings, gpus=0), there)
    except NodeError as exc:
        return Survey(facts, (), (f"engine.args: {exc}; flags are not checked",))
    return Survey(facts, tuple(problems(flag_findings(spec, flags))))


def _version(seen: Look) -> tuple[str, ...]:
    """Whether it is another than the spec assumes."""
    return tuple(each.line for each in seen.findings if each.level == "warning" and each.subject == "engine.version")


def _lines(seen: Look) -> tuple[str, ...]:
    return tuple(problems(seen.findings))


def merged(looks: dict[str, Look]) -> tuple[str, ...]:
    """Every line once; one that not all give says who does."""
    givers: dict[str, list[str]] = {}
    for name, seen in looks.items():
        for line in _lines(seen):
            givers.setdefault(line, []).append(name)
    return tuple(
        line if len(names) == len(looks) else f"{line} (on {', '.join(names)} only)" for line, names in givers.items()
    )


# -------------------------------------------------------------------------------------------------------------- facts
def assume(spec: Spec, there: Installed | None) -> Assumptions:
    """Facts of the machine that this runs on, for the rules; what cannot be known stays as the spec has it."""
    facts, target, traits = assumed(spec), _target(spec), _traits(spec)
    architecture = target.architectures[0] if target and target.architectures else None
    return replace(
        facts,
        sglang=rules.version(there.sglang) if there and there.sglang else facts.sglang,
        nccl=rules.version(there.nccl) if there and there.nccl else (),
        arch=traits.arch if traits else None,
        h20="H20" in traits.name and "H200" not in traits.name if traits else None,
        mla=True if architecture in _MLA else False if architecture in _PLAIN else None,
        amx=None if spec.node.gpus or _has_amx() else False,
        architecture=architecture,
        custom_all_reduce=_custom_all_reduce(spec, traits, target),
    )


def _target(spec: Spec) -> Checkpoint | None:
    with suppress(SpecError):
        return readable(builtin_path(spec.engine.model, "target"))
    return None


def _traits(spec: Spec) -> Traits | None:
    with suppress(NodeError):
        return Nvml(spec.node.gpus).traits() if spec.node.gpus else None
    return None


def _has_amx() -> bool:
    with suppress(OSError):
        return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return False


def _custom_all_reduce(spec: Spec, traits: Traits | None, target: Checkpoint | None) -> bool:
    """Not over PCIe among more than two GPUs, and not for messages that are too large (16-bit hidden states)."""
    if traits and traits.nvlink is False and spec.node.gpus > 2:  # noqa: PLR2004 - two need no NVLink
        return False
    speculative, width = spec.space.speculative, target.number("hidden_size") if target else None
    tokens = max(values(speculative.num_draft_tokens)) if speculative else 1
    return 2 * (width or 0) * tokens * max(spec.workload.concurrency) <= rules.CUSTOM_BYTES
