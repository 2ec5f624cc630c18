"""This machine as a node, and a fleet of such nodes: threads, no Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from raytune_eagle.model.trial import Completed, Event, Failed, Job
from raytune_eagle.nodes.turns import FreeForAll
from raytune_eagle.ports import Engine, Node, Pending, Turns
from raytune_eagle.trial import run_trial


class LocalNode:
    """Runs trials in a thread of this process."""

    def __init__(
        self, name: str, engine: Engine, on_event: Callable[[Event], None], turns: Turns | None = None
    ) -> None:
        self.name, self.facts = name, engine.describe()
        self._engine, self._on_event, self._turns = engine, on_event, turns or FreeForAll()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, job: Job) -> Pending:
        """See `raytune_eagle.ports.Node`."""
        return self._pool.submit(self._run, job)

    def close(self) -> None:
        """Wait for the trial that runs; a thread cannot be ended from outside."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: Job) -> Completed | Failed:
        def progress(name: str, detail: str) -> None:
            self._on_event(
                Event(at=time.time(), study=job.study, name=name, node=self.name, number=job.number, detail=detail)
            )

        return run_trial(self._engine, job, progress, self._turns)


class LocalFleet:
    """A fixed set of nodes under the wall clock."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = tuple(nodes)

    def nodes(self) -> Sequence[Node]:
        """All of them, always."""
        return self._nodes

    def late(self) -> Sequence[tuple[Node, Job, Completed | Failed]]:
        """None: a thread cannot be out of touch."""
        return ()

    def wait_any(self, pending: Collection[Pending], timeout_s: float) -> set[Pending]:
        """See `raytune_eagle.ports.Fleet`."""
        if not pending:
            time.sleep(timeout_s)
        return wait(pending, timeout_s, FIRST_COMPLETED).done

    def now(self) -> float:
        """Wall clock."""
        return time.time()

    def close(self) -> None:
        """Close every node."""
        for node in self._nodes:
            node.close()
