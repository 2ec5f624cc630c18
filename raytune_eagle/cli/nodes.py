"""``raytune-eagle nodes``, ``status``, ``logs``, ``stop``: what runs on the nodes, and the jobs of ``run --detach``."""

from __future__ import annotations

import sys

import click

from raytune_eagle.cli.options import cluster_check
from raytune_eagle.cli.studies import FAILED, chosen, latest, results_option, say, stdout
from raytune_eagle.errors import SpecError
from raytune_eagle.live import Live
from raytune_eagle.report import console as shown
from raytune_eagle.simulation import simulated_nodes


@click.command()
@click.option("--study", help="Of this study only; default: the one with the latest event.")
@click.option(
    "--cluster",
    "where",
    metavar="auto|ADDRESS",
    callback=cluster_check("auto"),
    help="Ask the nodes of this running cluster instead.",
)
@results_option
def nodes(study: str | None, where: str | None, results: str) -> None:
    """Show what each node of a study, or of a cluster, does, since when, and whether it is put aside."""
    if where is not None:
        from raytune_eagle.cluster import live_nodes  # noqa: PLC0415 - Ray takes seconds to import

        stdout().print(shown.live_table(live_nodes(where)))
        return
    found = chosen(results, study) if study else latest(results)
    events = found.store.read_events(found.name)
    if not events:
        raise SpecError(f"no events of study {found.name!r} under {found.results}: run it first")
    live = Live(found.results, found.name)
    if live.local and live.writer() is None:
        say([f"nobody runs study {found.name!r} now; this is what its nodes did last"])
    if simulated_nodes(events):
        say(["its nodes are simulated: times are those of the simulation"])
    stdout().print(shown.node_table(events))


@click.command()
@click.argument("study", required=False)
def status(study: str | None) -> None:
    """Show the jobs of `run --detach`, of one STUDY or all; exit 1 when the latest failed or was stopped."""
    from raytune_eagle.nodes import jobs  # noqa: PLC0415 - Ray takes seconds to import

    found = jobs.status(study)
    if not found:
        raise SpecError(
            "no study was started with --detach on this cluster" if study is None else f"no job of {study!r}"
        )
    stdout().print(shown.job_table(found))
    if not jobs.succeeded(found[0][2]):
        sys.exit(FAILED)


@click.command()
@click.argument("study")
@click.option("-f", "--follow", is_flag=True, help="Go on until it ends.")
def logs(study: str, *, follow: bool) -> None:
    """Print what the latest job of STUDY has printed."""
    from raytune_eagle.nodes import jobs  # noqa: PLC0415 - Ray takes seconds to import

    for text in jobs.logs(study, follow=follow):
        click.echo(text, nl=False)


@click.command()
@click.argument("study")
def stop(study: str) -> None:
    """End the job of STUDY in an orderly way; `run` with the same words goes on with it."""
    from raytune_eagle.nodes import jobs  # noqa: PLC0415 - Ray takes seconds to import

    click.echo(jobs.stop(study))
