"""Turns on a machine that several nodes share: starts may overlap, measurements are alone.

Cores of one's own are not enough: beside a busy neighbour with four cores too, a node with four cores served 0.88 times
as many tokens a second as alone (`benchmarks/neighbours.py --free`, 5 launches each on a machine of 32 cores).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class FreeForAll:
    """For a node that has its machine to itself."""

    def busy(self) -> AbstractContextManager[None]:
        """Nobody to wait for."""
        return nullcontext()

    def quiet(self) -> AbstractContextManager[None]:
        """Nobody to wait for."""
        return nullcontext()


class FileTurns:
    """Turns by file locks, which the kernel gives back when a holder dies, however it dies.

    Two locks: `floor` is shared by those who are busy and held alone by the one who measures; `gate` is held while
    waiting for the floor, so that a measurement which waits is not overtaken by ever new starts.

    Args:
        folder: an existing folder on this machine that all its nodes share.
    """

    def __init__(self, folder: str) -> None:
        self._gate, self._floor = os.path.join(folder, "turns.gate"), os.path.join(folder, "turns.floor")  # noqa: PTH118 - travels to Ray actors as text

    def busy(self) -> AbstractContextManager[None]:
        """Several at once, but not while someone measures or waits to."""
        return self._hold(fcntl.LOCK_SH)

    def quiet(self) -> AbstractContextManager[None]:
        """Alone."""
        return self._hold(fcntl.LOCK_EX)

    @contextmanager
    def _hold(self, how: int) -> Iterator[None]:
        with _locked(self._gate, fcntl.LOCK_EX) as gate:
            floor = os.open(self._floor, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(floor, how)
                fcntl.flock(gate, fcntl.LOCK_UN)
                yield
            finally:
                os.close(floor)


@contextmanager
def _locked(path: str, how: int) -> Iterator[int]:
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(fd, how)
        yield fd
    finally:
        os.close(fd)
