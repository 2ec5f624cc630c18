"""Nodes in virtual time: a night of launches in a moment, under the same study loop.

Time moves only when someone waits, and then to the moment at which the next trial ends.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from raytune_eagle.errors import RaytuneEagleError
from raytune_eagle.model.trial import Completed, Failed, Job, NodeFacts
from raytune_eagle.ports import Pending


@dataclass(frozen=True)
class Answer:
    """What comes of a trial, and after how many virtual seconds."""

    outcome: Completed | Failed | RaytuneEagleError
    seconds: float


Response = Callable[[str, Job], Answer]
"""What the node of this name makes of a job."""


class SimulatedNode:
    """One node of a `SimulatedFleet`."""

    def __init__(self, name: str, fleet: SimulatedFleet) -> None:
        self.name, self.facts = name, fleet.facts
        self._fleet = fleet

    def submit(self, job: Job) -> Pending:
        """See `raytune_eagle.ports.Node`."""
        return self._fleet.schedule(self.name, job)

    def close(self) -> None:
        """Nothing runs between two waits."""


class SimulatedFleet:
    """Nodes of these names that answer as `respond` says.

    `present` and `delivered_late` may be changed while a study runs.

    Args:
        names: of the nodes.
        respond: what comes of a job.
        start: of the clock, seconds since the epoch.
        facts: of every node.
    """

    def __init__(
        self,
        names: Collection[str],
        respond: Response,
        start: float = 0.0,
        facts: NodeFacts = NodeFacts(hardware="simulated"),  # noqa: B008 - frozen
    ) -> None:
        self.present, self.facts = list(names), facts
        self.delivered_late: list[tuple[str, Job, Completed | Failed]] = []
        self._nodes = {name: SimulatedNode(name, self) for name in names}
        self._respond, self._now = respond, start
        self._under_way: list[tuple[float, int, Pending, Answer]] = []
        self._order = itertools.count()

    def nodes(self) -> Sequence[SimulatedNode]:
        """Those that are present now."""
        for name in self.present:
            if name not in self._nodes:
                self._nodes[name] = SimulatedNode(name, self)
        return [self._nodes[name] for name in self.present]

    def schedule(self, node: str, job: Job) -> Pending:
        """Start a trial now."""
        answer, pending = self._respond(node, job), Future[Completed | Failed]()
        heapq.heappush(self._under_way, (self._now + answer.seconds, next(self._order), pending, answer))
        return pending

    def late(self) -> Sequence[tuple[SimulatedNode, Job, Completed | Failed]]:
        """What `delivered_late` holds, once."""
        late, self.delivered_late = self.delivered_late, []
        return [(self._nodes[name], job, outcome) for name, job, outcome in late]

    def wait_any(self, pending: Collection[Pending], timeout_s: float) -> set[Pending]:
        """Move the clock to the next end of a trial, or by the timeout, whichever is sooner."""
        until = self._now + timeout_s
        if self._under_way and self._under_way[0][0] <= until:
            self._now, _, done, answer = heapq.heappop(self._under_way)
            if isinstance(answer.outcome, RaytuneEagleError):
                done.set_exception(answer.outcome)
            else:
                done.set_result(answer.outcome)
        else:
            self._now = until
        return {each for each in pending if each.done()}

    def now(self) -> float:
        """Virtual seconds."""
        return self._now

    def close(self) -> None:
        """Nothing to give back."""
