"""Before a launch is spent: would this study fail, and why? On this machine, or on every node of a cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from raytune_eagle import __version__
from raytune_eagle.checkpoints import fingerprint
from raytune_eagle.cluster import LOCAL, check_local, node_settings
from raytune_eagle.engines.builtin import builtin_path
from raytune_eagle.engines.gpus import Nvml
from raytune_eagle.engines.machine import check_folder, check_gpus, check_machine
from raytune_eagle.errors import SpecError
from raytune_eagle.findings import Finding, problem, problems, warning
from raytune_eagle.gates.foreseen import foreseen
from raytune_eagle.model.workload import Workload
from raytune_eagle.space import Space
from raytune_eagle.spec import Spec
from raytune_eagle.survey import Look, ask_nodes, look

_CLOCK_S = 5.0


def examine(spec: Spec, workload: Workload, results: str, where: str, nodes: int) -> dict[str, list[Finding]]:
    """Everything that can be known before a launch, by node; ``""`` stands for the machine that this runs on.

    Raises:
        NodeError: there is no cluster at `where`.
    """
    here = list(check_folder("--results", _path(results))) if is_local(results) else []
    if where == LOCAL:
        return {"": [*_fits(spec, nodes), *examine_node(spec, workload).findings, *here]}
    asked = time.time()
    answers = ask_nodes(where, partial(examine_node, spec, workload))
    if not answers:
        here.append(problem("--cluster", f"no node of {where} has the resource eagle_node; see cluster.yaml"))
    here += differences({name: answer.traits for name, answer in answers.items() if isinstance(answer, Examined)})
    return {"": here} | {name: _answer(answer, asked) for name, answer in answers.items()}


@dataclass(frozen=True)
class Examined:
    """What is found on one machine.

    Attributes:
        clock: its time when it was asked, seconds since the epoch.
        traits: what must be the same on every node, by the place in the spec that it stems from.
    """

    findings: list[Finding]
    clock: float
    traits: dict[str, str]


def differences(traits: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Problems where nodes are not alike: their figures could not be compared."""
    found = []
    for place in dict.fromkeys(place for node in traits.values() for place in node):
        by_value: dict[str, list[str]] = {}
        for name, node in sorted(traits.items()):
            by_value.setdefault(node.get(place, "none"), []).append(name)
        if len(by_value) > 1:
            shown = "; ".join(f"{value} on {', '.join(names)}" for value, names in by_value.items())
            found.append(problem(place, f"not the same on every node: {shown}"))
    return found


def examine_node(spec: Spec, workload: Workload) -> Examined:
    """What is found on the machine that this runs on; most of its seconds SGLang takes to be asked."""
    settings, clock = node_settings(spec), time.time()
    seen = look(spec, workload)
    findings = [*seen.findings, *_space(spec, seen), *_gates(spec, workload)]
    findings += check_gpus(settings, Nvml(settings.gpus))
    findings += check_machine(settings)
    return Examined(findings, clock, _traits(spec, seen))


def _traits(spec: Spec, seen: Look) -> dict[str, str]:
    """Versions, and what the checkpoints hold."""
    sglang = ".".join(map(str, seen.facts.sglang))
    found = {"raytune-eagle": __version__, "engine.python": f"SGLang {sglang}"}
    with suppress(SpecError):
        found["engine.model"] = fingerprint(builtin_path(spec.engine.model, "target")) or "missing"
        for index, draft in enumerate(spec.engine.draft):
            found[f"engine.draft[{index}]"] = fingerprint(builtin_path(draft, "draft")) or "missing"
    return found


def _space(spec: Spec, seen: Look) -> list[Finding]:
    """What the rules say here, with the versions and GPUs of this very node."""
    try:
        space = Space(spec, seen.facts)
    except SpecError as exc:
        return [problem(*_split(line)) for line in exc.problems]
    return [warning(*_split(line)) for line in space.notes()]


def _gates(spec: Spec, workload: Workload) -> list[Finding]:
    with suppress(SpecError):  # told with the models
        return list(foreseen(spec, workload.prompts, builtin_path(spec.engine.model, "target")))
    return []


def _answer(answer: Examined | str, asked: float) -> list[Finding]:
    """A node's findings; its clock is fast or slow if it read less than when it was asked, or more than now."""
    if isinstance(answer, str):
        return [problem("node", f"{answer}; look at it with: ray status")]
    off = max(asked - answer.clock, answer.clock - time.time())
    late = f"{off:.0f} s off this machine's: events would stand in the wrong order; start chronyd on both"
    return answer.findings if off < _CLOCK_S else [*answer.findings, warning("clock", late)]


def refuse_results(results: str) -> None:
    """Raise `SpecError` when records could not be written there."""
    if is_local(results) and (lines := problems(check_folder("--results", _path(results)))):
        raise SpecError(lines)


def is_local(results: str) -> bool:
    """Whether results go to a folder of this machine."""
    return "://" not in results or results.startswith("file://")


def _path(results: str) -> str:
    return results.removeprefix("file://")


def _fits(spec: Spec, nodes: int) -> list[Finding]:
    try:
        check_local(spec, nodes)
    except SpecError as exc:
        return [problem(*_split(line)) for line in exc.problems]
    return []


def _split(line: str) -> tuple[str, str]:
    subject, _, detail = line.partition(": ")
    return subject, detail
