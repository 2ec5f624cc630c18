"""What a running study and those who look on tell each other, in hidden files beside its records.

None of it is a record: events are in events/ too, a minute later at most, and whatever lies here may be lost without
harm. Readers of Parquet pass over names with a dot in front.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raytune_eagle.errors import StoreError
from raytune_eagle.model.trial import Event

_EVENTS, _WISHES = ".live.jsonl", ".wishes"
STOP = "stop"
_ASIDE = "aside-"


class Live:
    """The hidden files of one study in a local folder.

    Args:
        results: folder of records. With a URI of another filesystem nothing is told and nobody can ask for anything.
        study: its name.
    """

    def __init__(self, results: str, study: str) -> None:
        self.local = "://" not in results or results.startswith("file://")
        place = results.removeprefix("file://") if self.local else "/dev/null"
        self.folder = Path(place).expanduser().absolute() / f"study={study}"

    def begin(self) -> None:
        """Forget what was told to and by an earlier run."""
        with contextlib.suppress(OSError):
            for path in (self.folder / _EVENTS, *self._wish_files()):
                path.unlink(missing_ok=True)

    def say(self, event: Event) -> None:
        """Tell an event at once; a disk that is full is no reason to stop a study."""
        with contextlib.suppress(OSError), (self.folder / _EVENTS).open("a", encoding="utf-8") as file:
            file.write(event.model_dump_json() + "\n")

    def events(self) -> list[Event]:
        """What was told since the run began; a torn last line is passed over."""
        try:
            lines = (self.folder / _EVENTS).read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        return list(_parsed(lines))

    def wish(self, name: str, *, granted: bool = True) -> None:
        """Ask for something (`STOP`, or what `aside` gives), or no longer."""
        folder = self.folder / _WISHES
        try:
            folder.mkdir(exist_ok=True)
            path = folder / name
            path.touch() if granted else path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{folder}: cannot be written: {error.strerror}") from error

    def wishes(self) -> frozenset[str]:
        """What is asked for."""
        return frozenset(path.name for path in self._wish_files())

    def _wish_files(self) -> list[Path]:
        folder = self.folder / _WISHES
        return list(folder.iterdir()) if folder.is_dir() else []

    def writer(self) -> dict[str, Any] | None:
        """Process, host and start of the run that goes on now; None when none does."""
        try:
            with (self.folder / ".lock").open(encoding="utf-8") as file:
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return None  # nobody holds it
                return dict(json.loads(file.read()))
        except (OSError, ValueError):
            return None


def aside(node: str) -> str:
    """The wish that a node gets no further trial; for names that are no file names too."""
    return _ASIDE + node.encode().hex()


def put_aside(wishes: frozenset[str]) -> set[str]:
    """Nodes that shall get no further trial."""
    return {bytes.fromhex(name.removeprefix(_ASIDE)).decode() for name in wishes if name.startswith(_ASIDE)}


def _parsed(lines: list[str]) -> Iterator[Event]:
    for line in lines:
        with contextlib.suppress(ValueError):
            yield Event.model_validate_json(line)
