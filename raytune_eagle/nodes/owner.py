"""What lives on a node and owns it: runs the trials there, and ends by itself when nobody asks for them any more.

All of its calls are short and may be repeated: a connection that breaks for a while loses neither a trial nor an
event. No Ray in here, so that this can be tried without a cluster.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raytune_eagle.errors import RaytuneEagleError
from raytune_eagle.model.trial import Completed, Failed, Job, NodeFacts
from raytune_eagle.nodes.turns import FreeForAll
from raytune_eagle.ports import Engine, Turns
from raytune_eagle.trial import run_trial

GRACE_S = 60.0
"""So long a node may be out of touch before it is given up: by its driver, and by itself."""

EngineMaker = Callable[[str], Engine]
"""Builds the engine of the node of this name, on that node."""

Outcome = Completed | Failed | BaseException
Told = tuple[float, int, str, str]
"""An event: time, number of the trial, name, detail."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Late:
    """What a trial came to while its node was out of touch."""

    token: str
    job: Job
    outcome: Completed | Failed


@dataclass(frozen=True)
class News:
    """What an owner has to tell.

    Attributes:
        events: from the one on that was asked for.
        outcome: of the trial with the token that was asked for; None while it runs.
    """

    events: Sequence[Told] = ()
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Setup:
    """How owners work.

    Attributes:
        study: theirs.
        make_engine: called once, on the node.
        turns: for nodes that share a machine.
        grace_s: see `GRACE_S`.
        spool: whether outcomes are kept on the node's disk until they were handed over.
    """

    study: str
    make_engine: EngineMaker
    turns: Turns = field(default_factory=FreeForAll)
    grace_s: float = GRACE_S
    spool: bool = False


class Owner:
    """Owns the node that it is made on; its methods are called from several threads."""

    def __init__(self, name: str, setup: Setup) -> None:
        end_with_parent()
        self._engine, self._setup = setup.make_engine(name), setup
        self._spool = Spool(name) if setup.spool else None
        self._changed = threading.Condition()
        self._told: list[Told] = []
        self._forgotten = 0
        self._token, self._since = "", time.time()
        self._job: Job | None = None
        self._outcome: Outcome | None = None
        self._heard = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def describe(self) -> NodeFacts:
        """What this machine is."""
        return self._engine.describe()

    def late(self) -> list[Late]:
        """Outcomes that owners of this node before this one could not hand over."""
        return self._spool.read() if self._spool else []

    def forget(self, token: str) -> None:
        """The outcome of this token was handed over."""
        if self._spool:
            self._spool.remove(token)

    def start(self, token: str, job: Job) -> None:
        """Start a trial; that of a known token is not started twice."""
        with self._changed:
            if token == self._token:
                return
            self.forget(self._token)
            self._token, self._job, self._since, self._outcome = token, job, time.time(), None
        threading.Thread(target=self._run, args=(token, job), daemon=True).start()

    def news(self, token: str, seen: int, wait_s: float) -> News:
        """Events after the first `seen` of this owner's, and the outcome of `token`; waits for some."""
        self._heard = time.monotonic()
        with self._changed:
            del self._told[: max(0, seen - self._forgotten)]
            self._forgotten = max(self._forgotten, seen)
            self._changed.wait_for(lambda: self._told or (self._outcome is not None and token == self._token), wait_s)
            outcome = self._outcome if token == self._token else None
            return News(tuple(self._told), outcome)

    def doing(self) -> tuple[Job | None, float, str]:
        """The trial that runs, since when, and the last thing that it told."""
        with self._changed:
            running = self._job if self._outcome is None else None
            return running, self._since, self._told[-1][2] if self._told else ""

    def _run(self, token: str, job: Job) -> None:
        def progress(name: str, detail: str) -> None:
            with self._changed:
                self._told.append((time.time(), job.number, name, detail))
                self._changed.notify_all()

        gpus_in_order()
        outcome = _outcome(lambda: run_trial(self._engine, job, progress, self._setup.turns))
        if self._spool and isinstance(outcome, Completed | Failed):
            self._spool.write(Late(token, job, outcome))
        with self._changed:
            self._outcome, self._since = outcome, time.time()
            self._changed.notify_all()

    def _watch(self) -> None:
        """A driver that has not asked for so long has given this node up, or is dead: end, and with us the server."""
        while time.monotonic() - self._heard < self._setup.grace_s:
            time.sleep(min(1.0, self._setup.grace_s / 10))
        os._exit(1)


def _outcome(trial: Callable[[], Completed | Failed]) -> Outcome:
    """Also errors are values here; of a bug its text goes home, which any driver can read."""
    try:
        return trial()
    except RaytuneEagleError as exc:
        return exc
    except BaseException:  # noqa: BLE001 - the driver raises it
        return RuntimeError(traceback.format_exc())


def gpus_in_order() -> None:
    """Ray (2.60) gives GPUs as a set, in another order each time, which ranks and NCCL's rings would follow."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(each.isdigit() for each in given):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(sorted(given, key=int))


def end_with_parent() -> None:
    """End this process, at once and however it is busy, when the one that started it ends.

    Ray's workers look whether init has become their parent, which it never does below a child subreaper (2.60.0): with
    their raylet killed they lived on for minutes, with their servers.
    """
    parent = os.getppid()
    try:
        pidfd = os.pidfd_open(parent)
    except OSError:
        _log.warning("pid %d cannot be watched", parent)
        return
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        select.select([pidfd], [], [])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Spool:
    """Outcomes on a node's own disk, one file each."""

    def __init__(self, name: str) -> None:
        self._folder = Path(tempfile.gettempdir()) / f"raytune-eagle-{os.getuid()}" / "undelivered" / name

    def write(self, late: Late) -> None:
        """Keep it; a disk that is full costs no more than this second copy."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = self._folder / f"{late.token}.partial"
            partial.write_bytes(pickle.dumps(late))
            partial.rename(self._folder / f"{late.token}.pickle")
        except OSError as exc:
            _log.warning("the outcome is kept in memory only: %s", exc)

    def read(self) -> list[Late]:
        """All that are there and whole."""
        found = []
        for path in sorted(self._folder.glob("*.pickle")):
            try:
                found.append(pickle.loads(path.read_bytes()))  # noqa: S301 - written by us, in a folder of ours alone
            except Exception:  # noqa: BLE001 - of another version, or cut short
                path.unlink(missing_ok=True)
        return found

    def remove(self, token: str) -> None:
        """It was handed over."""
        if token:
            (self._folder / f"{token}.pickle").unlink(missing_ok=True)
