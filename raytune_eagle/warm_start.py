"""``--warm-start results/study=NAME``: what an earlier study knows that holds for this one too.

accept_len holds for the same draft, model and workload, on any machine and under any NCCL setting; cycle times hold for
the same machine, model and server settings, whatever draft ran there is worth. What does not match is left out, and a
study of which nothing holds is refused with the reasons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raytune_eagle.errors import SpecError
from raytune_eagle.identity import digest, spec_of
from raytune_eagle.lessons import Lessons
from raytune_eagle.model.trial import TrialRecord
from raytune_eagle.model.workload import Workload
from raytune_eagle.ports import Fleet
from raytune_eagle.reference import Reference
from raytune_eagle.samplers.observed import Launch, measured
from raytune_eagle.space import Params, Space
from raytune_eagle.spec import Spec
from raytune_eagle.store import ParquetStore

_CHANGE_TOKENS = ("dtype", "quantization", "kv-cache-dtype", "context-length")
"""Server flags that change which tokens come out, and so what is accepted; so do those that begin with speculative-."""
_SAMPLING = ("max_new_tokens", "temperature", "ignore_eos")


@dataclass(frozen=True)
class Source:
    """An earlier study."""

    path: str
    spec: Spec
    prompts: str | None
    records: list[TrialRecord]

    @classmethod
    def read(cls, path: str) -> Source:
        """Read ``FOLDER/study=NAME``. Raises `SpecError` when there is no such study."""
        folder = Path(path.rstrip("/"))
        store, name = ParquetStore(str(folder.parent)), folder.name.removeprefix("study=")
        if not folder.name.startswith("study=") or name not in store.studies():
            raise SpecError(f"--warm-start {path}: no study there: give its folder, such as results/study=NAME")
        known = spec_of(store.read_events(name))
        if known is None:
            raise SpecError(f"--warm-start {path}: it does not say what it searched (no study_started event)")
        return cls(path, *known, [record for record in store.read(name) if record.kind == "trial"])

    def accept_differs(self, spec: Spec, workload: Workload) -> Iterator[str]:
        """Why its accept_lens do not hold for `spec`; nothing when they do."""
        ours, theirs = spec.engine, self.spec.engine
        if ours.model != theirs.model:
            yield f"another model ({theirs.model})"
        if not set(ours.draft) & set(theirs.draft):
            yield f"another draft ({', '.join(theirs.draft)})"
        if self.prompts != digest(workload):
            yield f"other prompts ({self.spec.workload.prompts})"
        for name in _SAMPLING:
            if getattr(spec.workload, name) != getattr(self.spec.workload, name):
                yield f"another {name} ({getattr(self.spec.workload, name)})"
        yield from (f"another {name}" for name in _unlike(ours.args, theirs.args) if _changes_tokens(name))

    def cycle_differs(self, spec: Spec, hardware: Collection[str]) -> Iterator[str]:
        """Why its cycle times do not hold for `spec` on nodes of `hardware`; nothing when they do."""
        ours, theirs = spec.engine, self.spec.engine
        if ours.model != theirs.model:
            yield f"another model ({theirs.model})"
        yield from (f"another {name}" for name in _unlike(ours.args, theirs.args))
        yield from (f"another {name}" for name in _unlike(ours.env, theirs.env))
        if spec.node.gpus != self.spec.node.gpus:
            yield f"{self.spec.node.gpus} GPUs"
        if spec.workload.concurrency != self.spec.workload.concurrency:
            yield f"other concurrencies ({', '.join(map(str, self.spec.workload.concurrency))})"
        other = sorted({record.facts.hardware for record in self.records} - set(hardware))
        if other:
            yield f"other hardware ({', '.join(other)})"

    def launches(self, space: Space, workload: Workload, hardware: Collection[str]) -> list[Launch]:
        """What holds for this study, as launches that know one factor or both.

        Raises:
            SpecError: nothing does; with the reasons.
        """
        no_accept = list(self.accept_differs(space.spec, workload))
        no_cycle = list(self.cycle_differs(space.spec, hardware))
        if no_accept and no_cycle:
            raise SpecError(
                f"--warm-start {self.path}: nothing of it holds here; accept_len: {', '.join(no_accept)}; "
                f"cycle times: {', '.join(no_cycle)}"
            )
        levels = len(self.spec.workload.concurrency)
        lessons = Lessons(levels, self.records, Reference(self.records))
        found = [_launch(space, record, lessons) for record in self.records]
        return [
            replace(
                one,
                accept=None if no_accept or not _ours(space, one) else one.accept,
                cycle=None if no_cycle or _here(space, record) is None else one.cycle,
            )
            for one, record in zip(found, self.records, strict=True)
            if one is not None
        ]


def read(paths: Sequence[str], space: Space, workload: Workload) -> list[Source]:
    """Read earlier studies, before any node is asked for.

    Raises:
        SpecError: one of them is not there, or knows nothing that could hold here on any hardware; or no sampler of
            this study could learn from it.
    """
    if paths and space.spec.search.sampler != "two-factor":
        raise SpecError("--warm-start: only search.sampler two-factor learns from earlier studies")
    sources = [Source.read(path) for path in paths]
    for source in sources:
        source.launches(space, workload, {record.facts.hardware for record in source.records})
    return sources


def known(sources: Iterable[Source], space: Space, workload: Workload, fleet: Fleet) -> list[Launch]:
    """All that earlier studies know of this one on the nodes of `fleet`; waits a minute for the first of these.

    Raises:
        SpecError: one of them knows nothing that holds here.
    """
    for _ in range(60):
        if fleet.nodes():
            break
        fleet.wait_any([], 1.0)
    hardware = {node.facts.hardware for node in fleet.nodes()}
    return [launch for source in sources for launch in source.launches(space, workload, hardware)]


def _launch(space: Space, record: TrialRecord, lessons: Lessons) -> Launch | None:
    figures = lessons.of(record)
    if not figures:
        return None
    return replace(measured(space.params(record.config) | (_here(space, record) or {}), figures), earlier=True)


def _here(space: Space, record: TrialRecord) -> Params | None:
    """Parameters of the same settings in this study, wherever its draft lies; None when it does not search them."""
    told = space.told(space.config(space.params(record.config)))
    return told[0] if told else None


def _ours(space: Space, launch: Launch) -> bool:
    """Whether its draft is one of this study's, where several are searched."""
    return all(launch.params[d.column] in d.values for d in space.dimensions if d.column == "draft")


def _unlike(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]


def _changes_tokens(flag: str) -> bool:
    return flag in _CHANGE_TOKENS or flag.startswith("speculative-")
