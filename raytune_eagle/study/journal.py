"""What happens to a study: told at once, and kept in few files."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raytune_eagle.model.trial import Event
from raytune_eagle.ports import Store


class Journal:
    """The events of one study, from any thread.

    Args:
        store: where they are kept.
        study: its name.
        listener: called with each, after it was noted.
    """

    def __init__(self, store: Store, study: str, listener: Callable[[Event], None]) -> None:
        self._store, self._study, self._listener = store, study, listener
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def note(self, event: Event) -> None:
        """Take an event."""
        with self._lock:
            self._events.append(event)
        self._listener(event)

    def flush(self) -> None:
        """Keep what was noted since; raises `StoreError`."""
        with self._lock:
            events, self._events = self._events, []
        self._store.append_events(self._study, events)
