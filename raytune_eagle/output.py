"""Stdout that says which errors are its own, so that a full disk under it is one line."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_FAILED = 1
_NAME = "<stdout>"
_NOT_ENCODED = "backslashreplace"
"""As on stderr: a dash that the terminal's encoding does not have is no reason to lose a table."""


class _Stdout(io.FileIO):
    """Marks an error as its own: those of a full disk name no file."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as exc:
            exc.filename = _NAME
            raise


@contextmanager
def whole_output() -> Iterator[None]:
    """End with 1 and one line where stdout cannot be written; without the line where its reader went away."""
    sys.stdout = _marked() if sys.stdout else _nowhere()  # None where whoever started us has closed it
    sys.stderr = sys.stderr or _nowhere()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as exc:
        if exc.filename != _NAME:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer would fail once more at exit
        if exc.errno != errno.EPIPE:
            sys.stderr.write(f"raytune-eagle: stdout: {exc.strerror}\n")
        sys.exit(_FAILED)


def _marked() -> io.TextIOWrapper:
    """Stdout as Python has set it up, over one that marks its errors."""
    raw, like = _Stdout(1, "w", closefd=False), sys.__stdout__
    assert isinstance(like, io.TextIOWrapper)  # noqa: S101 - what Python makes of an open file
    made = io.TextIOWrapper(io.BufferedWriter(raw), like.encoding)
    made.reconfigure(line_buffering=like.line_buffering, write_through=like.write_through, errors=_NOT_ENCODED)
    return made


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")
