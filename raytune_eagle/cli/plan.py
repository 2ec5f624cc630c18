"""``raytune-eagle plan`` and ``doctor``: what a study would do, and what would make it fail, without a launch."""

from __future__ import annotations

import sys

import click
from rich.console import Console

from raytune_eagle import specfile
from raytune_eagle.cli.input import understood, workload_of
from raytune_eagle.cli.options import CLUSTER, cluster_check, local_or_cluster, nodes_option, nodes_to_make
from raytune_eagle.cli.studies import FAILED, results_option, say
from raytune_eagle.errors import Mistakes
from raytune_eagle.report import console as shown


@click.command()
@click.argument("spec_file", metavar="SPEC.yaml")
@click.option("--show", type=click.IntRange(min=0), default=5, show_default=True, help="Launch commands to show.")
@click.option(
    "--cluster",
    "where",
    metavar="auto|ADDRESS",
    callback=cluster_check("local", "auto", simulated=True),
    help="Ask the nodes of this cluster, not this machine.",
)
def plan(spec_file: str, show: int, where: str | None) -> None:
    """Show what SPEC.yaml would launch, without launching: size, rules, commands, cost."""
    from raytune_eagle.survey import planned, survey  # noqa: PLC0415 - Ray takes seconds to import

    spec, mistakes = specfile.load(spec_file), Mistakes()
    workload = workload_of(spec, mistakes)
    space, notes = understood(spec, survey(spec, workload, where, 1) if where else planned(spec), mistakes)
    say(notes)
    for line in shown.plan(space, show):
        click.echo(line)


@click.command()
@click.argument("spec_file", metavar="SPEC.yaml")
@local_or_cluster(CLUSTER)
@nodes_option("Nodes to make of this machine, with `local`")
@results_option
def doctor(spec_file: str, where: str, nodes: int | None, results: str) -> None:
    """Look for what would make SPEC.yaml fail, on every node, without a launch; exit 1 if anything would."""
    from raytune_eagle.doctor import examine  # noqa: PLC0415 - Ray takes seconds to import

    here = nodes_to_make(nodes, where)
    spec, mistakes = specfile.load(spec_file), Mistakes()
    workload = workload_of(spec, mistakes)
    mistakes.tell()
    assert workload is not None  # noqa: S101 - else there was a mistake
    found = examine(spec, workload, results, where, here)
    shown.findings(found, Console())
    if any(finding.level == "problem" for findings in found.values() for finding in findings):
        sys.exit(FAILED)
