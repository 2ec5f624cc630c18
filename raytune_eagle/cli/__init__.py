"""``raytune-eagle``: parse, call one function, print.

Machine-readable output goes to stdout, everything else to stderr. Exit codes: 0 done; 1 the study or check did not
succeed; 2 bad usage or bad input; 130 interrupted.
"""

from __future__ import annotations

from typing import Any

import click

from raytune_eagle import __version__
from raytune_eagle.cli.bench import bench
from raytune_eagle.cli.nodes import logs, nodes, status, stop
from raytune_eagle.cli.plan import doctor, plan
from raytune_eagle.cli.probe import probe
from raytune_eagle.cli.results import COMMANDS
from raytune_eagle.cli.run import run
from raytune_eagle.cli.studies import FAILED, say
from raytune_eagle.cli.usage import BAD_INPUT, refuse, refuse_empty
from raytune_eagle.errors import RaytuneEagleError, SpecError
from raytune_eagle.interrupts import INTERRUPTED, end_on_signals


class _Group(click.Group):
    """Turns our own errors, and those of usage, into one line each and the right exit code."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*args, **extra)
        except click.UsageError as exc:
            raise refuse(exc) from exc

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as exc:
            raise refuse(exc, ctx) from exc
        except SpecError as exc:
            say(exc.problems)
            ctx.exit(BAD_INPUT)
        except RaytuneEagleError as exc:
            say([str(exc)])
            ctx.exit(FAILED)
        except KeyboardInterrupt as exc:
            say(["; ".join(["interrupted", *map(str, exc.args)])])
            ctx.exit(INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="raytune-eagle")
def main() -> None:
    """Find the SGLang EAGLE-3 launch that serves your workload fastest, overnight, on every node at once."""
    end_on_signals()


for _command in (run, plan, doctor, probe, bench, nodes, status, logs, stop, *COMMANDS):
    main.add_command(_command)
refuse_empty(main)
