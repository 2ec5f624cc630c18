"""One node of a Ray cluster, seen from the driver: what its actor is asked, and when it is given up."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from raytune_eagle.errors import NodeError
from raytune_eagle.model.trial import Completed, Event, Failed, Job, NodeFacts
from raytune_eagle.nodes.owner import Late, News, Setup
from raytune_eagle.ports import Pending

_NEWS_S = 5.0
"""For so long an owner waits for news before it says that there are none."""
_LATE_S = 10.0
"""So much later an answer is not waited for: it is asked for again."""


class RayNode:
    """One node, seen from the driver.

    `tend` is called by the fleet's listening thread alone, over and over; everything else by any thread.

    Attributes:
        alive: whether its actor may still answer.
        silent: whether its last call got no answer.
    """

    def __init__(self, name: str, owner: Any, setup: Setup, tell: Callable[[Event], None]) -> None:
        self.name, self.facts, self.alive, self.silent = name, NodeFacts(), True, False
        self._owner, self._tell, self._study, self._grace_s = owner, tell, setup.study, setup.grace_s
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

    def fail(self, mistake: BaseException) -> None:
        """Have `ready` raise it: a bug, or a mistake in the spec."""
        self._mistake = mistake
        self._lost(str(mistake))

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
            if isinstance(exc.cause, NodeError):
                self._lost(str(exc.cause))
            else:
                self.fail(exc.cause)
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
        when = at or time.time()
        self._tell(Event(at=when, study=self._study, name=name, node=self.name, number=number, detail=detail))


def _there(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0, fetch_local=False)[0])


def _first_line(exc: BaseException) -> str:
    return next(iter(str(exc).strip().splitlines()), type(exc).__name__)
