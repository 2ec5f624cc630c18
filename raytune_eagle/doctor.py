"""Before a launch is spent: would this study fail, and why? On this machine, or on every node of a cluster."""

from __future__ import annotations

import importlib
import json
import os
import time
from contextlib import suppress
from functools import partial
from typing import Any

from raytune_eagle.checkpoints import DRAFT, check_draft, check_target
from raytune_eagle.cluster import LOCAL, check_local, node_settings
from raytune_eagle.drafts import Demand
from raytune_eagle.engines.builtin import builtin_path
from raytune_eagle.engines.flags import Flags, ask, cached, mistakes
from raytune_eagle.engines.gpus import Nvml
from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.machine import check_folder, check_gpus, check_interpreter, check_machine
from raytune_eagle.errors import NodeError, SpecError
from raytune_eagle.findings import Finding, ok, problem, problems, warning
from raytune_eagle.gates.foreseen import foreseen
from raytune_eagle.model import Workload
from raytune_eagle.nodes import local_ray
from raytune_eagle.rules import SPECULATIVE_NAMES
from raytune_eagle.spec import Spec, values
from raytune_eagle.weights import Checkpoint, UnreadableError

_BYTES_PER_TOKEN = 3.5
"""Of UTF-8, where there is no tokenizer: English takes 4 to 5, code and Chinese 3."""
_NODE_S = 300.0
"""For a node to answer: a cold file system takes a minute for SGLang's imports."""
_CLOCK_S = 5.0
_LONGEST = 8
"""Prompts that are tokenized: the one with most tokens is among those with most bytes."""


def examine(spec: Spec, workload: Workload, results: str, where: str, nodes: int) -> dict[str, list[Finding]]:
    """Everything that can be known before a launch, by node; ``""`` stands for the machine that this runs on.

    Raises:
        NodeError: there is no cluster at `where`.
    """
    here = list(check_folder("--results", _path(results))) if is_local(results) else []
    if where == LOCAL:
        return {"": [*_fits(spec, nodes), *examine_node(spec, workload)[0], *here]}
    os.environ.update(local_ray.ENVIRONMENT)
    nodes_ray = importlib.import_module("raytune_eagle.nodes.ray")  # after the environment: Ray reads it once
    asked = time.time()
    answers = nodes_ray.ask_every_node(where, partial(examine_node, spec, workload), _NODE_S)
    if not answers:
        here.append(problem("--cluster", f"no node of {where} has the resource {nodes_ray.RESOURCE}; see cluster.yaml"))
    return {"": here} | {name: _answer(answer, asked) for name, answer in answers.items()}


def examine_node(spec: Spec, workload: Workload) -> tuple[list[Finding], float]:
    """What is found on the machine that this runs on, and its clock; most of its seconds SGLang takes to be asked."""
    settings, clock = node_settings(spec), time.time()
    findings, version = check_interpreter(settings, spec.engine.version)
    findings += _flags(spec, settings, version)
    findings += check_models(spec, workload)
    findings += _gates(spec)
    findings += check_gpus(settings, Nvml(settings.gpus))
    findings += check_machine(settings)
    return findings, clock


def _answer(answer: tuple[list[Finding], float] | str, asked: float) -> list[Finding]:
    """A node's findings; its clock is fast or slow if it read less than when it was asked, or more than now."""
    if isinstance(answer, str):
        return [problem("node", f"{answer}; look at it with: ray status")]
    findings, clock = answer
    off = max(asked - clock, clock - time.time())
    late = f"{off:.0f} s off this machine's: events would stand in the wrong order; start chronyd on both"
    return findings if off < _CLOCK_S else [*findings, warning("clock", late)]


def refuse(spec: Spec, workload: Workload) -> None:
    """The cheap part (a second): raise `SpecError` with what would fail on this machine; asks SGLang for nothing."""
    settings = node_settings(spec)
    findings, version = check_interpreter(settings, spec.engine.version)
    findings += check_models(spec, workload)
    known = cached(settings, version) if version else None
    findings += _flag_findings(spec, known) if known else []
    if lines := problems(findings):
        raise SpecError(lines)


def refuse_results(results: str) -> None:
    """Raise `SpecError` when records could not be written there."""
    if is_local(results) and (lines := problems(check_folder("--results", _path(results)))):
        raise SpecError(lines)


def is_local(results: str) -> bool:
    """Whether results go to a folder of this machine."""
    return "://" not in results or results.startswith("file://")


def _path(results: str) -> str:
    return results.removeprefix("file://")


# ---------------------------------------------------------------------------------------------------- model and draft
def check_models(spec: Spec, workload: Workload) -> list[Finding]:
    """Target and drafts, and how they fit each other and the workload."""
    try:
        target = builtin_path(spec.engine.model, "target")
        drafts = [builtin_path(draft, "draft") for draft in spec.engine.draft]
    except SpecError as exc:
        return [problem("engine", line) for line in exc.problems]
    findings, demand = check_target(target), _demand(spec, workload, target)
    for index, draft in enumerate(drafts):
        subject = DRAFT if len(drafts) == 1 else f"{DRAFT}[{index}]"
        findings += check_draft(draft, target, demand, subject)
    return findings


def _demand(spec: Spec, workload: Workload, target: str) -> Demand:
    tokens, estimated = longest_prompt([prompt.text for prompt in workload.prompts], target)
    length = spec.engine.args.get("context-length")
    return Demand(
        tokens=tokens + workload.max_new_tokens,
        estimated=estimated,
        context_length=length if isinstance(length, int) and not isinstance(length, bool) else None,
        lengthen=_is_on(spec.engine.env.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "")),
    )


def _is_on(text: str) -> bool:
    return text.lower() in {"1", "true", "yes", "y"}


def longest_prompt(texts: list[str], target: str) -> tuple[int, bool]:
    """Tokens of the longest prompt, and whether they are an estimate: no tokenizer, or none that can be used here."""
    longest = sorted(texts, key=lambda text: len(text.encode()))[-_LONGEST:]
    with suppress(ImportError, UnreadableError, OSError):
        tokenizers, path = importlib.import_module("tokenizers"), Checkpoint(target).folder / "tokenizer.json"
        tokenizer = _tokenizer(tokenizers, path.read_text(encoding="utf-8"))
        if tokenizer is not None:
            return max(len(tokenizer.encode(text).ids) for text in longest), False
    return max(int(len(text.encode()) / _BYTES_PER_TOKEN) + 1 for text in longest), True


def _tokenizer(tokenizers: Any, text: str) -> Any:
    try:
        json.loads(text)
        return tokenizers.Tokenizer.from_str(text)
    except Exception:  # noqa: BLE001 - tokenizers raises plain Exception for what it does not understand
        return None


def _gates(spec: Spec) -> list[Finding]:
    with suppress(SpecError):  # told by `check_models`
        return list(foreseen(spec, builtin_path(spec.engine.model, "target")))
    return []


# -------------------------------------------------------------------------------------------------------------- flags
def _flags(spec: Spec, settings: Settings, version: str | None) -> list[Finding]:
    if version is None:
        return []
    try:
        flags = ask(settings, version)
    except NodeError as exc:
        return [problem("engine.args", f"{exc}; start the server by hand to see why")]
    return _flag_findings(spec, flags) or [
        ok("engine.args", f"all flags are known to SGLang {version} ({len(flags.flags)})")
    ]


def _flag_findings(spec: Spec, flags: Flags) -> list[Finding]:
    lines = [line.partition(": ") for line in mistakes(flags, flag_places(spec))]
    return [problem(place, text) for place, _, text in lines]


def flag_places(spec: Spec) -> dict[str, tuple[str, Any]]:
    """Every server flag that the study would write, and its value, by where it stands in the spec."""
    places = {f"engine.args.{name}": (name, value) for name, value in spec.engine.args.items()}
    for name, choices in spec.space.args.items():
        places |= {f"space.args.{name}[{i}]": (name, value) for i, value in enumerate(values(choices))}
    for index, entry in enumerate(spec.start_from):
        own = {"draft", *SPECULATIVE_NAMES}
        flags = {name: value for name, value in entry.items() if name not in own and not name.isupper()}
        places |= {f"start_from[{index}].{name}": (name, value) for name, value in flags.items()}
    return places


def _fits(spec: Spec, nodes: int) -> list[Finding]:
    try:
        check_local(spec, nodes)
    except SpecError as exc:
        return [problem(*_split(line)) for line in exc.problems]
    return []


def _split(line: str) -> tuple[str, str]:
    subject, _, detail = line.partition(": ")
    return subject, detail
