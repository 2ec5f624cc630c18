"""What a check found: a level, a subject, and one line for people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of `raytune-eagle doctor`.

    Attributes:
        level: *problem*: the study would fail; *warning*: it would run, perhaps badly, or could not be checked.
        subject: what was looked at: the spec's own name for it (``engine.draft``) where it has one.
        detail: what was found and, unless it is ok, what to do instead.
    """

    level: Level
    subject: str
    detail: str

    @property
    def line(self) -> str:
        """As an error message: place, then what to write instead."""
        return f"{self.subject}: {self.detail}"


def ok(subject: str, detail: str) -> Finding:
    """Nothing to do."""
    return Finding("ok", subject, detail)


def warning(subject: str, detail: str) -> Finding:
    """Worth knowing; stops nothing."""
    return Finding("warning", subject, detail)


def problem(subject: str, detail: str) -> Finding:
    """The study would fail."""
    return Finding("problem", subject, detail)


def problems(findings: Iterable[Finding]) -> list[str]:
    """The lines of those that would make the study fail, each once."""
    return list(dict.fromkeys(finding.line for finding in findings if finding.level == "problem"))
