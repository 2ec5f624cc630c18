"""Whole machines of a Ray cluster: on each node with the resource ``eagle_node`` one actor that owns it.

An actor is never restarted and its calls are never repeated by Ray: a trial whose node was lost was not judged, and
the study decides where it is asked again.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytune_eagle.errors import NodeError, RaytuneEagleError
from raytune_eagle.model import Completed, Event, Failed, Job, NodeFacts
from raytune_eagle.nodes.turns import FreeForAll
from raytune_eagle.ports import Engine, Pending, Turns
from raytune_eagle.trial import run_trial

RESOURCE = "eagle_node"
NAME_LABEL = "eagle-node"
"""Ray label that names a node; without it a node goes by its host's name."""

_REFRESH_S = 2.0
_POLL_S = 0.25

EngineMaker = Callable[[str], Engine]
"""Builds the engine of the node of this name, on that node."""


class _Owner:
    """Lives on the node and owns it; threaded, so that it can be asked for events while a trial runs."""

    def __init__(self, name: str, make_engine: EngineMaker, turns: Turns) -> None:
        self._engine, self._turns = make_engine(name), turns
        self._events: queue.SimpleQueue[tuple[float, int, str, str]] = queue.SimpleQueue()

    def describe(self) -> NodeFacts:
        return self._engine.describe()

    def run(self, job: Job) -> Completed | Failed | RaytuneEagleError:
        """Our own errors come back as values: Ray would wrap them into classes of its own."""

        def progress(name: str, detail: str) -> None:
            self._events.put((time.time(), job.number, name, detail))

        try:
            return run_trial(self._engine, job, progress, self._turns)
        except RaytuneEagleError as exc:
            return exc

    def events(self, wait_s: float) -> list[tuple[float, int, str, str]]:
        """Everything since the last call; waits for the first."""
        found = []
        with suppress(queue.Empty):
            found.append(self._events.get(timeout=wait_s))
            while True:
                found.append(self._events.get_nowait())
        return found


class RayNode:
    """One node, seen from the driver."""

    def __init__(self, name: str, owner: Any, on_event: Callable[[Event], None]) -> None:
        self.name, self.facts, self.alive = name, NodeFacts(), True
        self._owner, self._on_event = owner, on_event
        self._study = ""
        self._describing = owner.describe.remote()
        self._listening: Any = None

    def ready(self) -> bool:
        """Whether the actor is up and has described its machine; a dead one is not `alive`.

        Raises:
            SpecError: what the spec says cannot work on that machine (no such interpreter, say).
        """
        if self._describing is not None and ray.wait([self._describing], timeout=0)[0]:
            with self._noting_death():
                self.facts = ray.get(self._describing)
            self._describing = None
        return self.alive and self._describing is None

    def submit(self, job: Job) -> Pending:
        """See `raytune_eagle.ports.Node`."""
        self._study = job.study
        outer: Future[Completed | Failed] = Future()
        outer.set_running_or_notify_cancel()
        self._owner.run.remote(job).future().add_done_callback(lambda inner: self._settle(inner, outer))
        return outer

    def poll(self) -> None:
        """Hand on the events that have come."""
        if self._listening is not None:
            if not ray.wait([self._listening], timeout=0)[0]:
                return
            with self._noting_death():
                for at, number, name, detail in ray.get(self._listening):
                    self._on_event(
                        Event(at=at, study=self._study, name=name, node=self.name, number=number, detail=detail)
                    )
        self._listening = self._owner.events.remote(10.0) if self.alive else None

    def close(self) -> None:
        """Kill the actor; the guard of its server ends that."""
        self.alive = False
        with suppress(RayError, ValueError):
            ray.kill(self._owner)

    def _settle(self, inner: Future[Any], outer: Pending) -> None:
        exc = inner.exception()
        if isinstance(exc, RayError):
            self.alive = False
            outer.set_exception(NodeError(f"{self.name}: its actor was lost: {type(exc).__name__}"))
        elif exc is not None:
            outer.set_exception(exc)
        elif isinstance(inner.result(), RaytuneEagleError):
            outer.set_exception(inner.result())
        else:
            outer.set_result(inner.result())

    def _noting_death(self) -> _NotingDeath:
        return _NotingDeath(self)


class _NotingDeath:
    """A Ray error inside means that the actor is gone."""

    def __init__(self, node: RayNode) -> None:
        self._node = node

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> bool:
        if isinstance(error, RayTaskError) and not isinstance(error.cause, NodeError):
            raise error.cause  # a mistake in the spec, or a bug: it would come again with the next actor
        if kind is not None and issubclass(kind, RayError):
            self._node.alive = False
            return True
        return False


class RayFleet:
    """All nodes of a running Ray cluster that carry the resource ``eagle_node``; nodes may join and leave.

    Args:
        address: of the cluster, ``HOST:PORT``, or ``auto``.
        make_engine: builds a node's engine, on that node.
        gpus: that a node must have; its actor owns them all.
        on_event: called with each event of a trial, in the thread that waits.
        turns: for nodes that share a machine.
    """

    def __init__(
        self,
        address: str,
        make_engine: EngineMaker,
        gpus: int,
        on_event: Callable[[Event], None],
        turns: Turns | None = None,
    ) -> None:
        self._make_engine, self._gpus, self._on_event = make_engine, gpus, on_event
        self._turns = turns or FreeForAll()
        self._nodes: dict[str, RayNode] = {}
        self._refreshed = 0.0
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)

    def nodes(self) -> Sequence[RayNode]:
        """Nodes whose actor is up. A node whose actor died is taken anew, under its old name."""
        if time.monotonic() - self._refreshed > _REFRESH_S:
            self._refresh()
            self._refreshed = time.monotonic()
        return [node for node in self._nodes.values() if node.ready()]

    def wait_any(self, pending: Collection[Pending], timeout_s: float) -> set[Pending]:
        """See `raytune_eagle.ports.Fleet`; hands on events meanwhile."""
        deadline = time.monotonic() + timeout_s
        while True:
            for node in self._nodes.values():
                node.poll()
            left = deadline - time.monotonic()
            done = wait(pending, max(0.0, min(_POLL_S, left)), FIRST_COMPLETED).done
            if done or left <= 0:
                return done
            if not pending:
                time.sleep(max(0.0, min(_POLL_S, left)))

    def now(self) -> float:
        """Wall clock."""
        return time.time()

    def close(self) -> None:
        """Kill the actors and leave the cluster."""
        for node in self._nodes.values():
            node.close()
        ray.shutdown()

    def _refresh(self) -> None:
        listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        present = {n["NodeID"]: n for n in listed if n["Alive"] and n["Resources"].get(RESOURCE)}
        for node_id in [i for i, node in self._nodes.items() if i not in present or not node.alive]:
            self._nodes.pop(node_id).close()
        for node_id, node in present.items():
            if node_id not in self._nodes and node["Resources"].get("GPU", 0) >= self._gpus:
                name = _name(node)
                self._nodes[node_id] = RayNode(name, self._own(node_id, name), self._on_event)

    def _own(self, node_id: str, name: str) -> Any:
        options = {
            "num_cpus": 0,
            "num_gpus": self._gpus,
            "resources": {RESOURCE: 1},
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": 4,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }
        return ray.remote(_Owner).options(**options).remote(name, self._make_engine, self._turns)


def ask_every_node(address: str, question: Callable[[], Any], timeout_s: float) -> dict[str, Any]:
    """Call `question` on every node with the resource ``eagle_node``, also on those that a study owns.

    Returns:
        Each node's answer, or, as text, why there is none, by the node's name.

    Raises:
        NodeError: there is no cluster at `address`.
    """
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except ConnectionError as exc:
        raise NodeError(f"no Ray cluster at {address}: {exc}") from exc
    try:
        listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        present = [node for node in listed if node["Alive"] and node["Resources"].get(RESOURCE)]
        asked = {_name(node): _on_node(question, node["NodeID"]) for node in present}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s) if asked else None
        return {name: _answer_of(reference) for name, reference in asked.items()}
    finally:
        ray.shutdown()


def _on_node(question: Callable[[], Any], node_id: str) -> Any:
    """Start it there, with no claim on CPUs or GPUs, and with the GPUs that the node has to be seen."""
    options = {
        "num_cpus": 0,
        "max_retries": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        "runtime_env": {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}},
    }

    def call() -> Any:
        return question()

    return ray.remote(call).options(**options).remote()


def _answer_of(reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=0)
    except GetTimeoutError:
        return "it did not answer in time"
    except RayError as exc:
        return f"it did not answer: {str(exc).strip().splitlines()[-1]}"


def _name(node: dict[str, Any]) -> str:
    return str(node.get("Labels", {}).get(NAME_LABEL) or node["NodeManagerHostname"])
