"""Whole machines of a Ray cluster: on each node with the resource ``eagle_node`` one actor that owns it.

An actor is never restarted and its calls are never repeated by Ray: a trial whose node was lost was not judged, and
the study decides where it is asked again. A connection that breaks loses nothing: the actor is asked for news by short
calls, over and over, until it answers or `GRACE_S` is over; then both sides give up by themselves.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytune_eagle.errors import NodeError
from raytune_eagle.model.trial import Completed, Event, Failed, Job
from raytune_eagle.nodes.joining import NAMESPACE, RESOURCE, join, listed, named
from raytune_eagle.nodes.owner import Owner, Setup
from raytune_eagle.nodes.ray_node import RayNode
from raytune_eagle.ports import Pending

_LOOK_S = 2.0
"""Seconds between two looks at which nodes there are."""
_TICK_S = 0.25

_AGAIN_S = 10.0
"""Between two actors on one node: one that cannot be started would be tried without end."""

_log = logging.getLogger(__name__)


class RayFleet:
    """All nodes of a running Ray cluster that carry the resource ``eagle_node``; nodes may join and leave.

    Two threads of its own listen to the nodes and look for new ones, so that a study which is busy, or a head that
    does not answer, costs no node its trial.

    Args:
        address: of the cluster, ``HOST:PORT``, or ``auto``.
        setup: of the owners.
        gpus: that a node must have; its actor owns them all.
        on_event: called with each event of a trial, in the thread that waits.

    Raises:
        NodeError: there is no cluster at `address`.
    """

    def __init__(self, address: str, setup: Setup, gpus: int, on_event: Callable[[Event], None]) -> None:
        self._setup, self._gpus, self._on_event = setup, gpus, on_event
        self._nodes: dict[str, RayNode] = {}
        self._ids: dict[str, str] = {}
        self._known: set[str] = set()
        self._again_at: dict[str, float] = {}
        self._told: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._closing, self._cut_off = threading.Event(), False
        join(address, NAMESPACE)
        self._home = ray.get_runtime_context().get_node_id()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._listen, self._look)]
        for thread in self._threads:
            thread.start()

    def nodes(self) -> Sequence[RayNode]:
        """Nodes that can be reached. A node whose actor died is taken anew, under its old name.

        Raises:
            NodeError: the Ray of this very machine died, and with it what this process could own.
            SpecError: see `RayNode.ready`.
        """
        if self._cut_off:
            raise NodeError("the Ray of this machine (its raylet) died: once it runs again, the same command goes on")
        return [node for node in list(self._nodes.values()) if node.ready()]

    def late(self) -> Sequence[tuple[RayNode, Job, Completed | Failed]]:
        """See `raytune_eagle.ports.Fleet`."""
        nodes = list(self._nodes.values())
        return [(node, late.job, late.outcome) for node in nodes for late in node.take_late()]

    def wait_any(self, pending: Collection[Pending], timeout_s: float) -> set[Pending]:
        """See `raytune_eagle.ports.Fleet`; hands on events meanwhile."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._hand_on()
            left = deadline - time.monotonic()
            done = wait(pending, max(0.0, min(_TICK_S, left)), FIRST_COMPLETED).done
            if done or left <= 0:
                self._hand_on()
                return done
            if not pending:
                time.sleep(max(0.0, min(_TICK_S, left)))

    def now(self) -> float:
        """Wall clock."""
        return time.time()

    def close(self) -> None:
        """Kill the actors and leave the cluster."""
        self._closing.set()
        for node in list(self._nodes.values()):
            node.close()
        for thread in self._threads:
            thread.join(1)
        ray.shutdown()

    def _hand_on(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._on_event(self._told.get_nowait())

    def _listen(self) -> None:
        while not self._closing.is_set():
            nodes = list(self._nodes.values())
            references = [reference for node in nodes for reference in node.waiting_for()]
            if references:
                ray.wait(references, timeout=_TICK_S, fetch_local=False)
            else:
                self._closing.wait(_TICK_S)
            for node in nodes:
                try:
                    node.tend()
                except Exception as exc:  # noqa: BLE001 - a bug: raised where the study asks for nodes
                    node.fail(exc)

    def _look(self) -> None:
        while not self._closing.is_set():
            try:
                self._refresh()
            except Exception as exc:  # noqa: BLE001 - the head does not answer, say: the nodes that we have go on
                _log.warning("the cluster cannot be asked for its nodes: %s", exc)
            self._closing.wait(_LOOK_S)

    def _refresh(self) -> None:
        """Own new nodes, and anew those whose owner is dead; a machine that rebooted has its name but another id."""
        self._cut_off = not any(node["NodeID"] == self._home for node in listed(ours=False))
        able = [node for node in listed() if node["Resources"].get("GPU", 0) >= self._gpus]
        present = named(able, self._age)
        self._known |= {node["NodeID"] for node in able}
        for name, node in list(self._nodes.items()):
            if not node.alive or (name in present and present[name]["NodeID"] != self._ids[name]):
                self._nodes.pop(name).close()
        for name in present.keys() - self._nodes.keys():
            node_id = present[name]["NodeID"]
            if time.monotonic() >= self._again_at.get(node_id, 0.0):
                self._ids[name], self._again_at[node_id] = node_id, time.monotonic() + _AGAIN_S
                self._nodes[name] = RayNode(name, self._own(name), self._setup, self._told.put)

    def _age(self, node_id: str) -> int:
        """New ones before ours before those that we know and did not take."""
        return 0 if node_id not in self._known else 1 if node_id in self._ids.values() else 2

    def _own(self, name: str) -> Any:
        options = {
            "name": f"{name} {uuid.uuid4().hex[:8]}",
            "num_cpus": 0,
            "num_gpus": self._gpus,
            "resources": {RESOURCE: 1},
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": 8,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._ids[name], soft=False),
        }
        return ray.remote(Owner).options(**options).remote(name, self._setup)
