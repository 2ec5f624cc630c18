"""``--cluster simulated:WHAT``: a study in virtual time, with figures that nobody can take for measured ones."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from raytune_eagle.errors import SpecError
from raytune_eagle.model.trial import Event, NodeFacts, TrialRecord
from raytune_eagle.nodes.address import SIMULATED
from raytune_eagle.nodes.answers import CostModelNodes
from raytune_eagle.nodes.presets import preset
from raytune_eagle.nodes.replay import RecordedNodes, TableNodes
from raytune_eagle.nodes.simulated import Response, SimulatedFleet
from raytune_eagle.spec import Spec
from raytune_eagle.store import ParquetStore

_NODE = "simulated-"
MARK = "simulated"
"""Name among a node's versions by which its records are known; its value is what was simulated."""


def fleet(spec: Spec, where: str, nodes: int) -> SimulatedFleet:
    """`nodes` nodes that answer as WHAT of ``simulated:WHAT`` says.

    WHAT is a preset (``kimi-k25``, ``kimi-k25:golden`` with that draft), a table (``FILE.csv``, ``FILE.csv:BENCHMARK``)
    or the records of a study (``results/study=NAME``).

    Raises:
        SpecError: there is no such thing, or it has nothing of this spec.
    """
    what = where.removeprefix(SIMULATED)
    facts = NodeFacts(hardware=f"simulated: {what}", versions={MARK: what})
    names = [f"{_NODE}{index}" for index in range(nodes)]
    return SimulatedFleet(names, _response(spec, what), start=time.time(), facts=facts)


def _response(spec: Spec, what: str) -> Response:
    path, found, benchmark = what.partition(".csv")
    if found:
        draft = spec.engine.draft[0] if spec.space.speculative and spec.engine.draft else None
        return TableNodes(path + found, spec.engine.model, draft, benchmark.removeprefix(":"))
    folder = Path(what.rstrip("/"))
    if folder.name.startswith("study="):
        records = list(ParquetStore(os.fspath(folder.parent)).read(folder.name.removeprefix("study=")))
        if not records:
            raise SpecError(f"--cluster simulated:{what}: no records there")
        return RecordedNodes(records)
    return CostModelNodes(preset(what), spec.search.seed)


def simulated_nodes(events: Iterable[Event]) -> bool:
    """Whether the times of these events are virtual, by the names of their nodes."""
    names = {event.node for event in events if event.node}
    return bool(names) and all(name.startswith(_NODE) for name in names)


def simulated(record: TrialRecord) -> str | None:
    """What a record was simulated from; None where it was measured."""
    return record.facts.versions.get(MARK)


def refuse_mixture(records: Iterable[TrialRecord], where: str) -> None:
    """Raise `SpecError` where a study would hold measured figures beside simulated ones, or ones of two models."""
    ours = where.removeprefix(SIMULATED) if where.startswith(SIMULATED) else None
    for record in records:
        theirs = simulated(record)
        if theirs != ours:
            held = f"figures simulated from {theirs}" if theirs else "measured figures"
            raise SpecError(
                f"--cluster {where}: study {record.study!r} holds {held}: give this one a name of its own (--study)"
            )
