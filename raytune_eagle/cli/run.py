"""``raytune-eagle run``: a study from its spec to its verdict."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.console import Console

from raytune_eagle import specfile
from raytune_eagle.cli.input import understood, workload_of
from raytune_eagle.cli.options import CLUSTER, Finite, cluster_check, nodes_option, nodes_to_make
from raytune_eagle.cli.studies import FAILED, if_interrupted, results_option, say, stdout
from raytune_eagle.errors import Mistakes, SpecError
from raytune_eagle.home import home
from raytune_eagle.interrupts import end_on_signals
from raytune_eagle.live import Live
from raytune_eagle.model.trial import Event
from raytune_eagle.model.workload import Workload
from raytune_eagle.nodes.address import SIMULATED
from raytune_eagle.patience import PATIENCE_S, PatientStore
from raytune_eagle.report import console as shown
from raytune_eagle.report.facts import Facts
from raytune_eagle.report.progress import Board, Json, Lines, Progress
from raytune_eagle.report.verdict import verdict
from raytune_eagle.space import Space
from raytune_eagle.spec import Spec
from raytune_eagle.store import ParquetStore
from raytune_eagle.workload import drawn, held_out_prompts, told_if_many

if TYPE_CHECKING:
    from raytune_eagle.study import Study

_WARM = "Also learn from this study: accept_len of the same draft and workload, cycle times of the same hardware."
_PATIENCE = "Seconds to wait for results that cannot be written; then they go to ~/raytune-eagle-rescued, and it ends."
_SIMULATED = (
    " simulated:WHAT launches nothing: a cost model in virtual time (kimi-k25, kimi-k25:golden), a table (FILE.csv) or "
    "the records of a study (results/study=NAME)."
)
_OF_OPTION = re.compile(r"^(?:budget|search)\.(trials|hours|seed):")
_VIRTUAL = "nothing is launched; hours, minutes and seconds below are those of the simulation, not of the clock"


@click.command()
@click.argument("spec_file", metavar="SPEC.yaml")
@click.option("--study", help="Name of the study; default: the spec's.")
@click.option("--trials", type=click.IntRange(min=1), help="Launches in all; default: the spec's budget.")
@click.option("--hours", type=Finite(min=0, min_open=True), help="Start no launch after so many hours.")
@click.option(
    "--cluster",
    "where",
    default="local",
    show_default=True,
    metavar="local|auto|ADDRESS|simulated:WHAT",
    callback=cluster_check("local", "auto", simulated=True),
    help=CLUSTER + _SIMULATED,
)
@nodes_option("Nodes, with `local` (of this machine) or simulated")
@click.option("--seed", type=int, help="Seed of the search; default: the spec's.")
@click.option("--detach", is_flag=True, help="As a job of the cluster whose head this is; see status, logs, stop.")
@click.option("--warm-start", "earlier", multiple=True, metavar="results/study=NAME", help=_WARM)
@click.option("--patience", type=Finite(min=0), default=PATIENCE_S, show_default=True, help=_PATIENCE)
@click.option("--json", "as_json", is_flag=True, help="Events to stdout, one JSON object a line; the rest to stderr.")
@results_option
def run(spec_file: str, where: str, nodes: int | None, results: str, **changes: Any) -> None:
    """Run the study of SPEC.yaml, or go on with it where it stopped.

    Exit 1 where it has no launch to recommend: no trial completed, or none kept the constraints.
    """
    earlier, patience, detach, as_json = (changes.pop(name) for name in ("earlier", "patience", "detach", "as_json"))
    way = _Way(where, nodes_to_make(nodes, where), earlier, patience)
    spec = _changed(specfile.load(spec_file), changes)
    if detach:
        _detach(spec, where)
        return
    with if_interrupted("run the same command again to go on"):
        _run(spec, results, way, _progress(spec, where, as_json=as_json))
    store = ParquetStore(results)
    records = Facts(store, spec.name).records if store.count(spec.name) else []
    console = stdout(stderr=as_json)
    found = shown.summary(records, spec.workload.concurrency, console)
    console.print(f"Records: {results.rstrip('/')}/study={spec.name}/trials/*.parquet", soft_wrap=True, highlight=False)
    say(shown.put_aside(store.read_events(spec.name)))
    if not found:
        say([f"study {spec.name} has nothing to recommend: {verdict(records, spec.workload.concurrency[0])}"])
        sys.exit(FAILED)


def _detach(spec: Spec, where: str) -> None:
    """The same command without --detach, as a job; mistakes that can be known here are told here."""
    from raytune_eagle.nodes import jobs  # noqa: PLC0415 - Ray takes seconds to import

    if where != "auto":
        raise SpecError("--detach: a job of the cluster runs on its head: be there, and add --cluster auto")
    mistakes = Mistakes()
    workload_of(spec, mistakes)
    mistakes.tell()
    words = [word for word in sys.argv[1:] if word != "--detach"]
    job = jobs.submit(spec.name, str(Path.cwd()), [sys.executable, "-m", "raytune_eagle", *words])
    click.echo(job)
    say([f"study {spec.name} runs as job {job}; raytune-eagle status, logs {spec.name}, stop {spec.name}"])


def _progress(spec: Spec, where: str, *, as_json: bool) -> Progress:
    console, simulated = Console(stderr=True), where.startswith(SIMULATED)
    if as_json:
        return Json(sys.stdout)
    return Board(console, spec, simulated=simulated) if console.is_terminal else Lines(console, simulated=simulated)


class _Way(NamedTuple):
    """How a study is run: nothing of it makes it another study."""

    where: str
    nodes: int
    earlier: tuple[str, ...]
    patience_s: float


def _run(spec: Spec, results: str, way: _Way, progress: Progress) -> None:
    # Ray and Optuna take seconds to import, which no other command need wait for.
    from raytune_eagle import warm_start  # noqa: PLC0415
    from raytune_eagle.cluster import open_fleet  # noqa: PLC0415
    from raytune_eagle.doctor import refuse_results  # noqa: PLC0415
    from raytune_eagle.nodes.steered import SteeredFleet  # noqa: PLC0415
    from raytune_eagle.prior import prior_of  # noqa: PLC0415
    from raytune_eagle.simulation import refuse_mixture  # noqa: PLC0415
    from raytune_eagle.study import Study  # noqa: PLC0415
    from raytune_eagle.survey import survey  # noqa: PLC0415

    console, mistakes = Console(stderr=True), Mistakes()
    with mistakes.noting():
        refuse_results(results)
    workload = workload_of(spec, mistakes)
    store = ParquetStore(results)
    if workload and not mistakes.problems:
        refuse_mixture(store.read(spec.name), way.where)
        if study := _spent(spec, workload, store):
            _nothing_left(study, console)
            return
    if console.is_terminal:
        console.print("looking at the nodes (SGLang is asked for its flags once per version, some 10 s) …")
    space, notes = understood(spec, survey(spec, workload, way.where, way.nodes), mistakes)
    assert workload is not None  # noqa: S101 - else there was a mistake
    many = told_if_many(workload.prompts, "workload.num_prompts")
    say([*notes, *space.notes(), *many, *([_VIRTUAL] if way.where.startswith(SIMULATED) else [])])
    sources = warm_start.read(way.earlier, space, workload)
    with ExitStack() as stack:
        stack.enter_context(store.lock(spec.name))
        store.declare(spec.name, {dimension.column: dimension.kind for dimension in space.dimensions})
        held_out, live = _held_out(spec, workload), Live(results, spec.name)
        patient = _patient(store, space, way.patience_s)
        study = Study(space, workload, patient, _both(live.say, progress), held_out=held_out)
        if not way.where.startswith(SIMULATED):  # what was timed says nothing of a simulated machine
            prior = prior_of(space, store.read_probes(spec.name))
            say(prior.notes)
            study.search.take_prior(prior)
        progress.records = study.records
        if study.done():
            _nothing_left(study, console)
            return
        fleet = stack.enter_context(open_fleet(spec, way.where, way.nodes, study.note))
        end_on_signals()  # again: Ray has put its own handlers in the place of ours
        if sources:
            study.search.learn_from(warm_start.known(sources, space, workload, fleet))
        live.begin()
        stack.enter_context(progress)
        study.run(SteeredFleet(fleet, live.wishes, study.note, spec.name))


def _both(one: Callable[[Event], None], other: Callable[[Event], None]) -> Callable[[Event], None]:
    def tell(event: Event) -> None:
        one(event)
        other(event)

    return tell


def _patient(store: ParquetStore, space: Space, patience_s: float) -> PatientStore:
    """Results that cannot be written for long are put into the home of this user."""
    place = home() / "raytune-eagle-rescued" / time.strftime("%Y%m%d-%H%M%S")
    rescue = ParquetStore(str(place))
    rescue.declare(space.spec.name, {dimension.column: dimension.kind for dimension in space.dimensions})
    return PatientStore(store, rescue, str(place), lambda line: say([line]), patience_s)


def _changed(spec: Spec, changes: dict[str, Any]) -> Spec:
    """The spec with what the command line says otherwise, checked again."""
    tree = spec.model_dump(by_alias=True)
    places = {"study": tree, "trials": tree["budget"], "hours": tree["budget"], "seed": tree["search"]}
    for name, value in changes.items():
        if value is not None:
            places[name]["name" if name == "study" else name] = value
    try:
        return specfile.parse(tree)
    except SpecError as exc:  # the file was sound: what is wrong was written behind it
        raise SpecError(_OF_OPTION.sub(r"--\1:", line) for line in exc.problems) from exc


def _spent(spec: Spec, workload: Workload, store: ParquetStore) -> Study | None:
    """The study, if its budget is used up; whether any point is left only the nodes know. `SpecError`: see `Study`."""
    from raytune_eagle.study import Study  # noqa: PLC0415 - Ray takes seconds to import

    try:
        space = Space(spec)
    except SpecError:
        return None  # told together with what the nodes say
    study = Study(space, workload, store)
    return study if len(study.trials) >= spec.budget.trials and study.done() else None


def _nothing_left(study: Study, console: Console) -> None:
    console.print(f"study {study.spec.name} is done: {len(study.trials)} trials; nothing to launch")


def _held_out(spec: Spec, workload: Workload) -> Workload:
    """What the end is confirmed with; the prompts of the search where none is held out."""
    prompts = drawn(held_out_prompts(spec.workload.prompts), spec.workload.num_prompts, spec.search.seed)
    if not prompts and spec.confirm.top:
        say([f"{spec.workload.prompts}: no prompt is held out, so the best are confirmed on those of the search"])
    return workload.model_copy(update={"prompts": prompts or workload.prompts})
