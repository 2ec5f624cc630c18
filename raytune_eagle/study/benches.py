"""What a study knows of each of its nodes: plain decoding to compare with, and how long it is put aside."""

from __future__ import annotations

from dataclasses import dataclass, field

from raytune_eagle.model.trial import Completed, Kind, TrialRecord
from raytune_eagle.ports import Node

_QUARANTINE_S = 10.0
"""For the first failure of a machine in a row; twice as long for each further one."""


@dataclass
class Bench:
    """One node; plain decoding on the prompts of the search (``baseline``) and on those held out (``confirm``)."""

    plain: dict[Kind, TrialRecord] = field(default_factory=dict)
    since_baseline: int = 0
    failures: int = 0
    away_until: float = 0.0

    def note(self, record: TrialRecord, *, plain: bool) -> None:
        """Take a launch on this node; `plain`: it is of plain decoding as configured."""
        if plain:
            self.plain[record.kind] = record
        if record.kind != "confirm":
            self.since_baseline = 0 if record.kind == "baseline" else self.since_baseline + 1

    def to_compare(self, kind: Kind) -> Completed | None:
        """Plain decoding on the prompts of a launch of this kind, where it was measured."""
        plain = self.plain.get("confirm" if kind == "confirm" else "baseline")
        return plain.outcome if plain and isinstance(plain.outcome, Completed) else None

    def owes_plain(self, node: Node, every: int) -> bool:
        """Whether `node` is to measure plain decoding now: never done on its GPUs, or not for `every` launches."""
        return not _same_gpus(self.plain.get("baseline"), node) or self.since_baseline >= every

    def put_aside(self, now: float) -> float:
        """Count a failure of the machine, and give the seconds that it is left alone."""
        self.failures += 1
        pause = _QUARANTINE_S * 2.0 ** (self.failures - 1)
        self.away_until = now + pause
        return pause


def _same_gpus(plain: TrialRecord | None, node: Node) -> bool:
    """Whether plain decoding was measured on the GPUs that a node of this name has now; where nobody knows, it was."""
    if plain is None:
        return False
    then, now = plain.facts.gpu_ids, node.facts.gpu_ids
    return then == now or not then or not now
