"""The things that can be swapped, and the rules that every one of them keeps (tests/contracts/ checks them)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Protocol

from raytune_eagle.model.measurement import Vitals
from raytune_eagle.model.trial import Completed, Event, Failed, Job, NodeFacts, ServerFacts, TrialRecord

Pending = Future[Completed | Failed]
"""A trial under way. It raises `NodeError` (not judged) or `SpecError` (nothing in the spec can run)."""

Progress = Callable[[str, str], None]
"""Called with an event's name and detail, from any thread; must not raise and must not block."""


class Server(Protocol):
    """A server that is ready: it has answered a generation.

    Attributes:
        url: ``http://HOST:PORT``, without a slash at the end.
        headers: what each request must carry (an API key); may be empty.
        facts: what it said of itself.
        launch_s: seconds from the start of its process until its HTTP port answered.
        ready_s: seconds from then until a generation succeeded.
    """

    url: str
    headers: dict[str, str]
    facts: ServerFacts
    launch_s: float
    ready_s: float

    def check(self) -> None:
        """Raise `BenchError`, classified from the log, if any of its processes died. Cheap enough for each second."""
        ...

    def vitals(self) -> Vitals:
        """What its machine does just now. Cheap enough for each second; called from the thread that calls `check`."""
        ...

    def log(self) -> bytes:
        """The log so far, secrets redacted, gzip-compressed."""
        ...


class Engine(Protocol):
    """Serves one configuration at a time over HTTP."""

    def serve(self, job: Job, progress: Progress) -> AbstractContextManager[Server]:
        """Start a server, wait until it is proven by one generation, yield it; on exit its processes are gone.

        Raises:
            LaunchError: the configuration did not become ready; nothing of it is left.
            NodeError: the machine is at fault (cannot start a process, GPUs not free, …), at the start or at the end.
        """
        ...

    def describe(self) -> NodeFacts:
        """What this machine is. May take some seconds."""
        ...


class Turns(Protocol):
    """Who may do what on a machine that several nodes share, so that no neighbour shifts another's figures."""

    def busy(self) -> AbstractContextManager[None]:
        """Hold while a server starts or stops: many may, but not while someone measures."""
        ...

    def quiet(self) -> AbstractContextManager[None]:
        """Hold while measuring: nobody else measures, starts or stops."""
        ...


class Node(Protocol):
    """One machine, owned whole. One trial at a time."""

    name: str
    facts: NodeFacts

    def submit(self, job: Job) -> Pending:
        """Start a trial.

        The future holds `Completed` or `Failed` (a value: the configuration failed), or raises `NodeError` (the trial
        was not judged), `SpecError` (nothing in the spec can run) or, for a bug, anything else.
        """
        ...

    def close(self) -> None:
        """End what runs and give the machine back; safe to call twice."""
        ...


class Fleet(Protocol):
    """The nodes of one study and the clock that they live by (simulated nodes have one of their own)."""

    def nodes(self) -> Sequence[Node]:
        """Nodes that can take a trial, busy ones included; may change from call to call."""
        ...

    def late(self) -> Sequence[tuple[Node, Job, Completed | Failed]]:
        """What came of trials on nodes that were given up (`NodeError`) and are back; each is given once."""
        ...

    def wait_any(self, pending: Collection[Pending], timeout_s: float) -> set[Pending]:
        """Wait until one is done or the time is over; return those that are done."""
        ...

    def now(self) -> float:
        """Seconds since the epoch on the nodes' clock."""
        ...

    def close(self) -> None:
        """Close every node and whatever was started for them; safe to call twice."""
        ...


class Store(Protocol):
    """Append-only home of the records of many studies. What was appended is durable when the call returns."""

    def append(self, record: TrialRecord) -> None:
        """Keep a trial, its requests and its server log. Raises `StoreError`; then nothing half-written is visible."""
        ...

    def append_events(self, study: str, events: Sequence[Event]) -> None:
        """Keep events of one study; an empty sequence writes nothing."""
        ...

    def read(self, study: str) -> Iterable[TrialRecord]:
        """All trials of a study by number; none when there is no such study. Torn and foreign files are passed over."""
        ...

    def read_events(self, study: str) -> Iterable[Event]:
        """All events of a study by time."""
        ...
