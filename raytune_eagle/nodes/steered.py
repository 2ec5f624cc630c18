"""A fleet that people steer while a study runs: nodes put aside by hand, and the wish to stop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from raytune_eagle.live import STOP, put_aside
from raytune_eagle.model.trial import Completed, Event, Failed, Job
from raytune_eagle.ports import Fleet, Node, Pending


@dataclass
class SteeredFleet:
    """Another fleet, less the nodes that were put aside; a trial that runs there comes to its end.

    Attributes:
        fleet: the nodes themselves.
        wishes: what is asked for now; called about once a second.
        note: takes the events of nodes that are put aside and back.
        study: whose events these are.
    """

    fleet: Fleet
    wishes: Callable[[], frozenset[str]]
    note: Callable[[Event], None]
    study: str
    _aside: set[str] = field(default_factory=set)

    def nodes(self) -> Sequence[Node]:
        """See `raytune_eagle.ports.Fleet`."""
        return [node for node in self.fleet.nodes() if node.name not in self._aside]

    def wait_any(self, pending: Collection[Pending], timeout_s: float) -> set[Pending]:
        """Also looks at the wishes.

        Raises:
            KeyboardInterrupt: to stop is wished, which ends a study as Ctrl-C does.
        """
        wishes = self.wishes()
        if STOP in wishes:
            raise KeyboardInterrupt
        now = put_aside(wishes)
        for node in sorted(now ^ self._aside):
            name = "node_put_aside" if node in now else "node_back"
            self.note(Event(at=self.fleet.now(), study=self.study, name=name, node=node, detail="by hand"))
        self._aside = now
        return self.fleet.wait_any(pending, timeout_s)

    def late(self) -> Sequence[tuple[Node, Job, Completed | Failed]]:
        """See `raytune_eagle.ports.Fleet`."""
        return self.fleet.late()

    def now(self) -> float:
        """See `raytune_eagle.ports.Fleet`."""
        return self.fleet.now()

    def close(self) -> None:
        """See `raytune_eagle.ports.Fleet`."""
        self.fleet.close()
