"""Launches of a study that are not through: numbered, under way on a node, or waiting for another one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from raytune_eagle.model.config import Config
from raytune_eagle.model.trial import Job, Kind
from raytune_eagle.ports import Node, Pending
from raytune_eagle.search import Proposal

_MOST_TRIES = 3
"""A trial is asked again at most twice when machines fail under it."""
_TAKEN_DOWN = 2
"""A configuration under which so many different nodes failed is lost, not asked again."""


@dataclass
class Task:
    """A launch on its way: what is tried and where it was tried already."""

    number: int
    kind: Kind
    config: Config
    proposal: Proposal | None = None
    lost_on: list[str] = field(default_factory=list)
    started_at: float = 0.0


class Tasks:
    """All of one study.

    Args:
        numbers: those of the launches that left records.

    Attributes:
        busy: those under way, and where.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.busy: dict[Pending, tuple[Node, Task]] = {}
        self._taken, self._lowest = set(numbers), 0
        self._waiting: deque[Task] = deque()
        self._lost: dict[int, Task] = {}
        self._losses = Counter[str]()

    def new(self, kind: Kind, config: Config, proposal: Proposal | None = None) -> Task:
        """Make one, under the lowest number never used: one whose launch left no record is used again."""
        while self._lowest in self._taken:
            self._lowest += 1
        self._taken.add(self._lowest)
        return Task(self._lowest, kind, config, proposal)

    @property
    def waiting(self) -> bool:
        """Whether a trial is to be asked again."""
        return bool(self._waiting)

    def trials(self) -> int:
        """Trials under way or waiting."""
        under_way = [task for _, task in self.busy.values()] + list(self._waiting)
        return sum(task.kind == "trial" for task in under_way)

    def again_on(self, node: str, names: set[str]) -> Task | None:
        """What `node` tries again: a trial lost elsewhere, or lost on every one of `names`; None for nothing."""
        again = next((t for t in self._waiting if node not in t.lost_on or names <= set(t.lost_on)), None)
        if again is not None:
            self._waiting.remove(again)
        return again

    def lost(self, task: Task, node: str) -> bool:
        """Let a trial wait for another node, `node` having failed under it; True: it is given up instead."""
        task.lost_on.append(node)
        if task.kind == "trial":
            given_up = len(task.lost_on) >= _MOST_TRIES or len(set(task.lost_on)) >= _TAKEN_DOWN
        else:  # the records lack it, so that it is asked for again, as another task; its number is free
            self._losses[task.config.uid] += 1
            given_up = task.kind == "confirm" and self._losses[task.config.uid] >= _MOST_TRIES
        if given_up:
            return True
        if task.kind == "trial":
            self._lost[task.number] = task
            self._waiting.append(task)
        else:
            self._taken.discard(task.number)
            self._lowest = min(self._lowest, task.number)
        return False

    def found(self, job: Job) -> Task | None:
        """The lost trial that `job` was, which need wait no more; None where none is lost or it was found before."""
        task = self._lost.pop(job.number, None)
        if task is None or task.config != job.config:
            return None
        if task in self._waiting:
            self._waiting.remove(task)
        return task
