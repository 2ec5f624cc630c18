"""Whether the kernel ended processes of this machine for want of memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))
"""Of the whole machine since it was started, and of our control group; either may be hidden in a container."""


def oom_kills(counters: Iterable[Path] = _COUNTERS) -> int:
    """Processes that the kernel has killed so far, by all counters that can be read; only a rise means something."""
    total = 0
    for path in counters:
        with suppress(OSError, ValueError):
            words = path.read_text().split()
            total += sum(int(words[at + 1]) for at, word in enumerate(words[:-1]) if word == "oom_kill")
    return total
