"""A night is long enough for a disk to fill and for an object store to be away: wait, say so, and lose nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from raytune_eagle.errors import StoreError, StoreOutageError
from raytune_eagle.model.trial import Event, TrialRecord
from raytune_eagle.ports import Store

PATIENCE_S = 600.0
_LOOK_S = 5.0


class PatientStore:
    """Writes to a store that may be away for a while; trials go on meanwhile, their results wait on their nodes.

    Args:
        store: where records belong.
        rescue: where they go when `store` stays away.
        rescued: how people are told of that place.
        say: takes a line for people.
        patience_s: how long to wait for `store`, each time.
    """

    def __init__(
        self,
        store: Store,
        rescue: Store,
        rescued: str,
        say: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._store, self._rescue, self._rescued = store, rescue, rescued
        self._say, self._patience_s = say, patience_s
        self._gave_up = False

    def append(self, record: TrialRecord) -> None:
        """See `raytune_eagle.ports.Store`. Raises `StoreError` when it stays away; then the record is rescued."""
        self._insist(lambda store: store.append(record))

    def append_events(self, study: str, events: Sequence[Event]) -> None:
        """Likewise."""
        self._insist(lambda store: store.append_events(study, events))

    def read(self, study: str) -> Iterable[TrialRecord]:
        """See `raytune_eagle.ports.Store`; not patient: nothing is lost by asking again later."""
        return self._store.read(study)

    def read_events(self, study: str) -> Iterable[Event]:
        """Likewise."""
        return self._store.read_events(study)

    def _insist(self, write: Callable[[Store], None]) -> None:
        began, waited = time.monotonic(), False
        while not self._gave_up:
            try:
                write(self._store)
            except StoreOutageError as exc:
                if not waited:
                    self._say(f"{exc}; waiting for it, {self._patience_s / 60:.0f} min at most; trials go on")
                waited, self._gave_up = True, time.monotonic() - began >= self._patience_s
                time.sleep(0.0 if self._gave_up else min(_LOOK_S, self._patience_s / 10))
            else:
                if waited:
                    self._say(f"results can be written again, after {time.monotonic() - began:.0f} s")
                return
        write(self._rescue)
        raise StoreError(
            f"results could not be written for {self._patience_s:.0f} s; what was in hand is in {self._rescued}: "
            "copy it over (cp -r), then run the same command to go on"
        )
