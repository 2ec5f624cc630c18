"""Ctrl-C, and being told to end or hung up: in order the first time, at once the second."""

import os  # and signal alone: until the command has imported this, Ctrl-C is Python's own traceback
import signal

INTERRUPTED = 130
"""Exit code of what was interrupted."""


def end_on_signals() -> None:
    """The first signal ends in an orderly way; a second one at once, and the guards clear up. nohup stays nohup."""
    seen: list[int] = []

    def handler(number: int, _frame: object) -> None:
        seen.append(number)
        if len(seen) > 1:
            os._exit(INTERRUPTED)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
