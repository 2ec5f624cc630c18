"""The command, installed or as ``python -m raytune_eagle``; imports next to nothing before it minds Ctrl-C."""

import os
import signal

from raytune_eagle.interrupts import INTERRUPTED


def main() -> None:
    """Run the command of `sys.argv`."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))  # nothing has begun until the command sets its own
    from raytune_eagle import cli  # noqa: PLC0415 - takes a second, in which Ctrl-C may come
    from raytune_eagle.output import whole_output  # noqa: PLC0415

    with whole_output():
        cli.main(prog_name="raytune-eagle")


if __name__ == "__main__":
    main()
