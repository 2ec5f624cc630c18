"""To wait for what comes about in its own time."""

import time
from collections.abc import Callable


def await_true(what: Callable[[], object], seconds: float, why: str | Callable[[], str]) -> float:
    """Wait until it is true; returns the seconds that this took."""
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"not in {seconds:g} s: {why if isinstance(why, str) else why()}")
        time.sleep(0.1)
    return time.monotonic() - began
