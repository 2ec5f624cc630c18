"""``raytune-eagle``: parse, call one function, print.

Machine-readable output goes to stdout, everything else to stderr. Exit codes: 0 done; 1 the study or check did not
succeed; 2 bad usage or bad input; 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from types import FrameType
from typing import Any

import click
from rich.console import Console

from raytune_eagle import __version__, specfile
from raytune_eagle.cli_results import COMMANDS, FAILED, results_option, say, stdout
from raytune_eagle.errors import RaytuneEagleError, SpecError, StoreError
from raytune_eagle.live import Live
from raytune_eagle.model import Event, TrialRecord, Workload
from raytune_eagle.report import console as shown
from raytune_eagle.report.progress import Board, Json, Lines, Progress
from raytune_eagle.space import Space
from raytune_eagle.spec import Spec
from raytune_eagle.store import ParquetStore, check_study_name
from raytune_eagle.workload import held_out_prompts, load_prompts

_BAD_INPUT, _INTERRUPTED = 2, 130
_CLUSTER = "`local` starts Ray on this machine, `auto` joins the running cluster, else HOST:PORT of one."


class _Group(click.Group):
    """Turns our own errors into one line each and the right exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpecError as exc:
            say(exc.problems)
            ctx.exit(_BAD_INPUT)
        except RaytuneEagleError as exc:
            say([str(exc)])
            ctx.exit(FAILED)
        except KeyboardInterrupt:
            say(["interrupted; run the same command again to go on"])
            ctx.exit(_INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="raytune-eagle")
def main() -> None:
    """Find the SGLang EAGLE-3 launch that serves your workload fastest, overnight, on every node at once."""


@main.command()
@click.argument("spec_file", metavar="SPEC.yaml")
@click.option("--study", help="Name of the study; default: the spec's.")
@click.option("--trials", type=click.IntRange(min=1), help="Launches in all; default: the spec's budget.")
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), help="Start no launch after so many hours.")
@click.option("--cluster", "where", default="local", show_default=True, metavar="local|auto|ADDRESS", help=_CLUSTER)
@click.option("--nodes", type=int, default=1, show_default=True, help="Nodes to make of this machine, with `local`.")
@click.option("--seed", type=int, help="Seed of the search; default: the spec's.")
@click.option("--json", "as_json", is_flag=True, help="Events to stdout, one JSON object a line; the rest to stderr.")
@results_option
def run(spec_file: str, where: str, nodes: int, results: str, *, as_json: bool, **changes: Any) -> None:
    """Run the study of SPEC.yaml, or go on with it where it stopped."""
    _end_on_signals()
    space, workload = _space_and_workload(_changed(specfile.load(spec_file), changes))
    records = _run(space, workload, results, (where, nodes), _progress(space.spec, as_json=as_json))
    spec, console = space.spec, Console(stderr=True) if as_json else stdout()
    shown.summary(records, spec.workload.concurrency, console)
    console.print(f"Records: {results.rstrip('/')}/study={spec.name}/trials/*.parquet", soft_wrap=True, highlight=False)
    if not any(record.outcome.status == "completed" and record.kind == "trial" for record in records):
        sys.exit(FAILED)


def _progress(spec: Spec, *, as_json: bool) -> Progress:
    console = Console(stderr=True)
    if as_json:
        return Json(sys.stdout)
    return Board(console, spec) if console.is_terminal else Lines(console)


def _run(
    space: Space, workload: Workload, results: str, place: tuple[str, int], progress: Progress
) -> list[TrialRecord]:
    # Ray and Optuna take seconds to import, which no other command need wait for.
    from raytune_eagle.cluster import LOCAL, check_local, open_fleet  # noqa: PLC0415
    from raytune_eagle.doctor import refuse, refuse_results  # noqa: PLC0415
    from raytune_eagle.nodes.steered import SteeredFleet  # noqa: PLC0415
    from raytune_eagle.study import Study  # noqa: PLC0415

    spec, (where, nodes) = space.spec, place
    refuse_results(results)
    store = ParquetStore(results)
    with ExitStack() as stack:
        stack.enter_context(store.lock(spec.name))
        store.declare(spec.name, {dimension.column: dimension.kind for dimension in space.dimensions})
        live = Live(results, spec.name)

        def tell(event: Event) -> None:
            live.say(event)
            progress(event)

        study = Study(space, workload, store, tell, held_out=_held_out(spec, workload))
        progress.records = study.records
        if study.done():
            click.echo(f"study {spec.name} is done: {len(study.trials)} trials; nothing to launch", err=True)
            return study.records
        if where == LOCAL:
            check_local(spec, nodes)
            refuse(spec, workload)
        fleet = stack.enter_context(open_fleet(spec, where, nodes, study.note))
        _end_on_signals()  # again: Ray has put its own handlers in the place of ours
        live.begin()
        stack.enter_context(progress)
        study.run(SteeredFleet(fleet, live.wishes, study.note, spec.name))
    return study.records


def _changed(spec: Spec, changes: dict[str, Any]) -> Spec:
    """The spec with what the command line says otherwise, checked again."""
    tree = spec.model_dump(by_alias=True)
    places = {"study": tree, "trials": tree["budget"], "hours": tree["budget"], "seed": tree["search"]}
    for name, value in changes.items():
        if value is not None:
            places[name]["name" if name == "study" else name] = value
    return specfile.parse(tree)


def _space_and_workload(spec: Spec) -> tuple[Space, Workload]:
    try:
        check_study_name(spec.name)
    except StoreError as exc:
        raise SpecError(f"name: {exc}") from exc
    settings = spec.workload.model_dump(exclude={"prompts"})
    prompts = load_prompts(spec.workload.prompts)
    return Space(spec), Workload(prompts=prompts, seed=spec.search.seed, **settings)


def _held_out(spec: Spec, workload: Workload) -> Workload:
    """What the end is confirmed with; the prompts of the search where none is held out."""
    prompts = held_out_prompts(spec.workload.prompts)
    if not prompts and spec.confirm.top:
        say([f"{spec.workload.prompts}: no prompt is held out, so the best are confirmed on those of the search"])
    return workload.model_copy(update={"prompts": prompts or workload.prompts})


@main.command()
@click.argument("spec_file", metavar="SPEC.yaml")
@click.option("--show", type=click.IntRange(min=0), default=5, show_default=True, help="Launch commands to show.")
def plan(spec_file: str, show: int) -> None:
    """Show what SPEC.yaml would launch, without launching: size, rules, commands, cost."""
    space, _ = _space_and_workload(specfile.load(spec_file))
    for line in shown.plan(space, show):
        click.echo(line)


@main.command()
@click.argument("spec_file", metavar="SPEC.yaml")
@click.option("--cluster", "where", default="local", show_default=True, metavar="local|auto|ADDRESS", help=_CLUSTER)
@click.option("--nodes", type=int, default=1, show_default=True, help="Nodes to make of this machine, with `local`.")
@results_option
def doctor(spec_file: str, where: str, nodes: int, results: str) -> None:
    """Look for what would make SPEC.yaml fail, on every node, without a launch; exit 1 if anything would."""
    from raytune_eagle.doctor import examine  # noqa: PLC0415 - as in _run

    space, workload = _space_and_workload(specfile.load(spec_file))
    found = examine(space.spec, workload, results, where, nodes)
    shown.findings(found, Console())
    if any(finding.level == "problem" for findings in found.values() for finding in findings):
        sys.exit(FAILED)


for _command in COMMANDS:
    main.add_command(_command)


@main.command()
@click.option("--study", help="Of this study only; default: the one with the latest event.")
@results_option
def nodes(study: str | None, results: str) -> None:
    """Show what each node of a study does, since when, and whether it is put aside."""
    store = ParquetStore(results)
    by_study = {name: list(store.read_events(name)) for name in ([study] if study else store.studies())}
    events: list[Event] = max(by_study.values(), key=lambda found: found[-1].at if found else 0.0, default=[])
    if not events:
        raise SpecError(f"no events under {results}: run a study first")
    stdout().print(shown.node_table(events))


def _end_on_signals() -> None:
    """The first signal ends in an orderly way; a second one at once, and the guards clear up."""
    seen: list[int] = []

    def handler(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            os._exit(_INTERRUPTED)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)
