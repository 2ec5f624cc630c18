"""``raytune-eagle probe``: times the all-reduces of a study's steps, without a launch."""

from __future__ import annotations

import signal
import sys
from typing import Any

import click
from rich.console import Console

from raytune_eagle import specfile
from raytune_eagle.cli.options import Finite, local_or_cluster
from raytune_eagle.cli.studies import FAILED, if_interrupted, results_option, say, stdout
from raytune_eagle.report.probes import Probing, probe_table
from raytune_eagle.space import Space
from raytune_eagle.store import ParquetStore

_CLUSTER = "`local` is this machine, `auto` every node of the running cluster at once, else HOST:PORT of one."


@click.command()
@click.argument("spec_file", metavar="SPEC.yaml")
@local_or_cluster(_CLUSTER)
@click.option("--most", type=click.IntRange(min=1), help="NCCL environments to time at most; default: all.")
@click.option(
    "--limit",
    "limit_s",
    type=Finite(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds after which one counts as hanging.",
)
@results_option
def probe(spec_file: str, where: str, most: int | None, limit_s: float, results: str) -> None:
    """Time the all-reduces of SPEC.yaml's steps under each NCCL environment of its space, without a launch."""
    from raytune_eagle.doctor import refuse_results  # noqa: PLC0415 - what they import takes half a second
    from raytune_eagle.probes import plan, probe_all  # noqa: PLC0415

    refuse_results(results)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was timed is kept, however it ends
    space = Space(specfile.load(spec_file))
    asked, store, rows = plan(space, most, limit_s), ParquetStore(results), list[dict[str, Any]]()
    say(asked.notes)
    if not asked.environments:
        return
    told = Probing(Console(stderr=True), len(asked.environments))

    def keep(new: list[dict[str, Any]]) -> None:
        rows.extend(new)
        told(new)

    try:
        with if_interrupted("what was timed is kept, another probe times all anew"):
            failed = probe_all(space.spec, asked, where, keep)
    finally:
        store.append_probes(space.spec.name, rows)
    stdout().print(probe_table(rows))
    say(failed)
    if failed or not any(row["p50_us"] for row in rows):
        sys.exit(FAILED)
