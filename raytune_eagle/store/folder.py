"""The folder of a study on a local disk: made so that it lasts, locked by one process, gone where nothing was kept."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from raytune_eagle.errors import SpecError, StoreError


@contextlib.contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Hold the lock of `folder`; the kernel frees it when this process ends, however it ends.

    A folder in which nothing is kept in the end goes with it: a run that was refused leaves nothing.

    Raises:
        SpecError: another process holds it; the message names that one.
        StoreError: it cannot be made or locked.
    """
    made = [parent for parent in folder.parents if not parent.exists()]
    path = folder / ".lock"
    try:
        stream = _lock(path)
    except BlockingIOError as error:
        raise SpecError(f"{what}: {_holder(path)}; wait for it or stop it") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened and locked: {error.strerror or error}") from error
    with stream:
        _sign(path)
        try:
            yield
        finally:
            _leave(folder, made)


def _lock(path: Path) -> TextIO:
    while True:
        make_durable(path.parent)
        stream = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            stream.close()
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                return stream
        stream.close()  # who held it took the file away before this one had it: lock the next


def _leave(folder: Path, made: Sequence[Path]) -> None:
    with contextlib.suppress(OSError):
        hidden = [path for path in folder.iterdir() if path.name.startswith(".")]
        if len(hidden) == len(list(folder.iterdir())) and all(path.is_file() for path in hidden):
            for path in hidden:
                path.unlink()
            for each in (folder, *made):
                each.rmdir()  # fails, and ends this, at the first that holds something


def _sign(path: Path) -> None:
    """Write who holds the lock; it holds without that too, so a full disk is no reason to fail here."""
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(owner), encoding="utf-8")


def _holder(path: Path) -> str:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return f"process {owner['pid']} on {owner['host']} writes it since {owner['started']}"
    except (OSError, ValueError, KeyError):
        return "another process writes it"


def make_durable(directory: Path) -> None:
    """Create a folder so that it survives a power cut: its entry in each new parent is synced too."""
    missing = [parent for parent in (directory, *directory.parents) if not parent.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for created in reversed(missing):
        sync_folder(created.parent)


def sync_folder(directory: Path) -> None:
    """Have the entries of a folder on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network filesystems cannot sync a folder and need not: their server orders the entries
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(descriptor)
