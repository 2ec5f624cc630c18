"""Every error raised on purpose.

* RaytuneEagleError
  x SpecError      nothing in this spec (or command) can run as written: say where and what to write instead
  x TrialError     one *configuration* failed: becomes a `Failed` value, the study goes on
    + LaunchError  ... before its server was ready
    + GateError    ... because its server does not do what it says
    + BenchError   ... while it was measured
  x NodeError      the *machine* failed: the trial was not judged and is asked again elsewhere
  x StoreError     a result could not be written or read
    + StoreOutageError  ... for now: its place is full, read-only or cannot be reached

Anything else is a bug: it stops the study, with nothing lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the values stand a floor higher; only their names are needed here
    from raytune_eagle.model.measurement import Gate, Request
    from raytune_eagle.model.trial import Completed, Failed


class RaytuneEagleError(Exception):
    """Base of every error raised on purpose."""


class SpecError(RaytuneEagleError):
    """One or more mistakes in what the user gave, each one line that names its place.

    Attributes:
        problems: the lines, for example ``space.nccl.NCCL_PROTO[2]: 'LL256' is not one of LL, LL128, Simple``.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[SpecError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class Mistakes:
    """Collects every `SpecError` of several checks, so that all are told at once."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Go on after a `SpecError` inside, which is noted."""
        try:
            yield
        except SpecError as exc:
            self.problems += exc.problems

    def tell(self) -> None:
        """Raise what was noted, each line once; nothing if nothing was."""
        if self.problems:
            raise SpecError(dict.fromkeys(self.problems))


class TrialError(RaytuneEagleError):
    """One configuration failed; the study goes on.

    Attributes:
        failure_class: a name from `raytune_eagle.failures.classes`, for example ``tree_too_small``.
        detail: one line for people: what happened and, where known, what to do.
        log_tail: the last lines of the server's log.
        server_log: the whole log, secrets redacted, gzip-compressed; empty when there is none.
        requests: what was measured before it failed (`raytune_eagle.model.measurement.Request` values).
        gates: what had been looked at by then (`raytune_eagle.model.measurement.Gate` values).
    """

    phase = "bench"

    def __init__(self, failure_class: str, detail: str, log_tail: str = "") -> None:
        super().__init__(failure_class, detail, log_tail)
        self.failure_class, self.detail, self.log_tail = failure_class, detail, log_tail
        self.server_log: bytes = b""
        self.requests: tuple[Request, ...] = ()
        self.gates: tuple[Gate, ...] = ()

    def __str__(self) -> str:
        return f"{self.failure_class}: {self.detail}"


class LaunchError(TrialError):
    """The server ended, stalled or overran its time before it was ready."""

    phase = "launch"


class BenchError(TrialError):
    """The server died or failed too many requests while it was measured."""

    phase = "bench"


class GateError(TrialError):
    """A gate failed: what runs is not what the configuration says."""

    phase = "gate"

    def __init__(self, failure_class: str, detail: str, gates: tuple[Gate, ...] = ()) -> None:
        super().__init__(failure_class, detail)
        self.gates = gates


class NodeError(RaytuneEagleError):
    """The machine, not the configuration, failed: the trial is asked again elsewhere.

    Attributes:
        outcome: what the trial had come to before the machine failed (its GPUs did not come free, say); it is kept
            and not asked again. None when the trial was not judged.
    """

    def __init__(self, message: str, outcome: Completed | Failed | None = None) -> None:
        super().__init__(message, outcome)
        self.outcome = outcome

    def __str__(self) -> str:
        return str(self.args[0])


class StoreError(RaytuneEagleError):
    """A result could not be written or read; the message names the file."""


class StoreOutageError(StoreError):
    """The place of the results is full, read-only or cannot be reached, which may pass."""
