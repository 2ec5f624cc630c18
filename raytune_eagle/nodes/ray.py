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
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytune_eagle.errors import NodeError
from raytune_eagle.model import Completed, Event, Failed, Job, NodeFacts
from raytune_eagle.nodes.joining import NAMESPACE, RESOURCE, join, listed, node_name
from raytune_eagle.nodes.owner import Late, News, Owner, Setup
from raytune_eagle.ports import Pending

_LOOK_S = 2.0
"""Seconds between two looks at which nodes there are."""
_TICK_S = 0.25
_NEWS_S = 5.0
"""For so long an owner waits for news before it says that there are none."""
_LATE_S = 10.0
"""So much later an answer is not waited for: it is asked for again."""

_AGAIN_S = 10.0
"""Between two actors on one node: one that cannot be started would be tried without end."""

_log = logging.getLogger(__name__)


class RayNode:
    """One node, seen from the driver.

    `tend` is called by the fleet's listening thread alone, over and over; everything else by any thread.

    Attributes:
        alive: whether its actor may still answer.
        silent: whether its last call got no answer.
    """

    def __init__(self, name: str, owner: Any, tell: Callable[[Event], None], grace_s: float) -> None:
        self.name, self.facts, self.alive, self.silent = name, NodeFacts(), True, False
        self._owner, self._tell, self._grace_s = owner, tell, grace_s
        self._lock = threading.Lock()
        self._pending: Pending | None = None
        self._job: Job | None = None
        self._token = ""
        self._mistake: BaseException | None = None
        self._late: list[Late] = []
        self._asked_first: dict[str, Any] = {name: getattr(owner, name).remote() for name in ("describe", "late")}
        self._asked: Any = None
        self._asked_at = 0.0
        self._heard_at: float | None = None
        self._seen = 0

    def ready(self) -> bool:
        """Whether it has described its machine and can be reached; a dead one is not `alive`.

        Raises:
            SpecError: what the spec says cannot work on that machine (no such interpreter, say).
        """
        if self._mistake is not None:
            raise self._mistake
        return self.alive and not self.silent and not self._asked_first

    def submit(self, job: Job) -> Pending:
        """See `raytune_eagle.ports.Node`."""
        pending: Pending = Future()
        pending.set_running_or_notify_cancel()
        with self._lock:
            self._job, self._token, self._pending = job, uuid.uuid4().hex, pending
        self._start()
        if not self.alive:
            self._lost("its actor was lost")
        return pending

    def take_late(self) -> list[Late]:
        """What came of trials while this node was out of touch; each is given once."""
        with self._lock:
            late, self._late[:] = list(self._late), []
        for each in late:
            self._owner.forget.remote(each.token)
        return late

    def waiting_for(self) -> list[Any]:
        """Calls under way, for `ray.wait`."""
        return [*self._asked_first.values(), *([self._asked] if self._asked else [])]

    def tend(self) -> None:
        """Take what has come, ask for more, and give up when nothing came for too long."""
        for name, reference in list(self._asked_first.items()):
            if _there(reference):
                self._take(reference, partial(self._introduced, name))
        if self._asked is not None and _there(self._asked):
            asked, self._asked = self._asked, None
            self._take(asked, self._hear)
        if self._heard_at is not None and self.alive:
            self._mind_the_time(time.monotonic(), self._heard_at)
        if self.alive and self._asked is None and (not self.silent or time.monotonic() - self._asked_at > 1):
            self._asked, self._asked_at = self._owner.news.remote(self._token, self._seen, _NEWS_S), time.monotonic()

    def close(self) -> None:
        """Kill the actor; the guard of its server ends that."""
        if self.alive:
            self.alive = False
            self._lost("it was closed")
        with suppress(RayError, ValueError):
            ray.kill(self._owner)

    def _start(self) -> None:
        """Also when it comes back: the first call may have been lost, and a token is not started twice."""
        with self._lock:
            token, job = self._token, self._job if self._pending else None
        if job is not None:
            self._owner.start.remote(token, job)

    def _introduced(self, name: str, answer: Any) -> None:
        if name == "describe":
            self.facts = answer
        else:
            self._late.extend(answer)
        del self._asked_first[name]

    def _mind_the_time(self, now: float, heard_at: float) -> None:
        """Of an actor that has answered before: the first answer may take as long as its machine needs."""
        if self._asked is not None and now - self._asked_at > _NEWS_S + _LATE_S:
            self._asked = None
            self._fall_silent("no answer")
        if now - heard_at > self._grace_s:
            self._lost(f"out of touch for {self._grace_s:g} s")

    def _hear(self, news: News) -> None:
        self._seen += len(news.events)
        self._heard_at = time.monotonic()
        if self.silent:
            self.silent = False
            self._say("node_back", "it answers again")
            for name in self._asked_first:
                self._asked_first[name] = getattr(self._owner, name).remote()
            self._start()
        for at, number, name, detail in news.events:
            self._say(name, detail, number, at)
        if news.outcome is not None:
            self._settle(news.outcome)

    def _settle(self, outcome: Completed | Failed | BaseException) -> None:
        with self._lock:
            pending, self._pending = self._pending, None
            token, self._token = self._token, ""
        if pending is None:
            return
        if isinstance(outcome, BaseException):
            pending.set_exception(outcome)
        else:
            pending.set_result(outcome)
        self._owner.forget.remote(token)

    def _take(self, reference: Any, use: Callable[[Any], None]) -> None:
        """Use an answer, or understand why there is none."""
        try:
            use(ray.get(reference))
        except ActorUnavailableError as exc:
            self._fall_silent(_first_line(exc))
        except RayTaskError as exc:  # a mistake in the spec, or a bug: it would come again with the next actor
            if not isinstance(exc.cause, NodeError):
                self._mistake = exc.cause
            self._lost(str(exc.cause))
        except RayError as exc:
            self._lost(f"its actor was lost: {type(exc).__name__}")

    def _fall_silent(self, why: str) -> None:
        if not self.silent:
            self.silent = True
            self._say("node_silent", why)

    def _lost(self, why: str) -> None:
        """Nothing will come from this actor any more."""
        if self.alive:
            self.alive = False
            self._say("node_lost", why)
        with self._lock:
            pending, self._pending = self._pending, None
        if pending is not None:
            pending.set_exception(NodeError(f"{self.name}: {why}"))

    def _say(self, name: str, detail: str, number: int | None = None, at: float | None = None) -> None:
        job = self._job
        event = Event(
            at=at or time.time(),
            study=job.study if job else "",
            name=name,
            node=self.name,
            number=number,
            detail=detail,
        )
        self._tell(event)


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
        self._again_at: dict[str, float] = {}
        self._told: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._closing = threading.Event()
        join(address, NAMESPACE)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._listen, self._look)]
        for thread in self._threads:
            thread.start()

    def nodes(self) -> Sequence[RayNode]:
        """Nodes that can be reached. A node whose actor died is taken anew, under its old name."""
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
                node.tend()

    def _look(self) -> None:
        while not self._closing.is_set():
            try:
                self._refresh()
            except RayError as exc:  # the head does not answer: the nodes that we have go on
                _log.warning("the cluster cannot be asked for its nodes: %s", exc)
            self._closing.wait(_LOOK_S)

    def _refresh(self) -> None:
        """Own new nodes, and anew those whose owner is dead; a machine that rebooted has its name but another id."""
        present = {node_name(node): node for node in listed() if node["Resources"].get("GPU", 0) >= self._gpus}
        for name, node in list(self._nodes.items()):
            if not node.alive or (name in present and present[name]["NodeID"] != self._ids[name]):
                self._nodes.pop(name).close()
        for name in present.keys() - self._nodes.keys():
            if time.monotonic() < self._again_at.get(present[name]["NodeID"], 0.0):
                continue
            self._ids[name] = present[name]["NodeID"]
            self._again_at[self._ids[name]] = time.monotonic() + _AGAIN_S
            self._nodes[name] = RayNode(name, self._own(name), self._told.put, self._setup.grace_s)

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


def _there(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0, fetch_local=False)[0])


def _first_line(exc: BaseException) -> str:
    return next(iter(str(exc).strip().splitlines()), type(exc).__name__)
