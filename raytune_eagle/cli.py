"""``raytune-eagle``: parse, call one function, print.

Machine-readable output goes to stdout, everything else to stderr. Exit codes: 0 done; 1 the study or check did not
succeed; 2 bad usage or bad input; 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.console import Console

from raytune_eagle import __version__, specfile
from raytune_eagle.cli_options import cluster_check, local_or_cluster
from raytune_eagle.cli_probe import probe
from raytune_eagle.cli_results import COMMANDS, FAILED, results_option, say, stdout
from raytune_eagle.errors import Mistakes, RaytuneEagleError, SpecError, StoreError
from raytune_eagle.home import home
from raytune_eagle.live import Live
from raytune_eagle.model.trial import Event
from raytune_eagle.model.workload import Workload
from raytune_eagle.patience import PATIENCE_S, PatientStore
from raytune_eagle.report import console as shown
from raytune_eagle.report.facts import Facts
from raytune_eagle.report.progress import Board, Json, Lines, Progress
from raytune_eagle.space import Space
from raytune_eagle.spec import Spec
from raytune_eagle.store import ParquetStore, check_study_name
from raytune_eagle.workload import held_out_prompts, load_prompts

if TYPE_CHECKING:
    from raytune_eagle.study import Study
    from raytune_eagle.survey import Survey

_BAD_INPUT, _INTERRUPTED = 2, 130
_CLUSTER = "`local` starts Ray on this machine, `auto` joins the running cluster, else HOST:PORT of one."
_WARM = "Also learn from this study: accept_len of the same draft and workload, cycle times of the same hardware."
_PATIENCE = "Seconds to wait for results that cannot be written; then they go to ~/raytune-eagle-rescued, and it ends."
_SIMULATED = (
    " simulated:WHAT launches nothing: a cost model in virtual time (kimi-k25, kimi-k25:golden), a table (FILE.csv) or "
    "the records of a study (results/study=NAME)."
)


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
    _end_on_signals()


@main.command()
@click.argument("spec_file", metavar="SPEC.yaml")
@click.option("--study", help="Name of the study; default: the spec's.")
@click.option("--trials", type=click.IntRange(min=1), help="Launches in all; default: the spec's budget.")
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), help="Start no launch after so many hours.")
@click.option(
    "--cluster",
    "where",
    default="local",
    show_default=True,
    metavar="local|auto|ADDRESS|simulated:WHAT",
    callback=cluster_check("local", "auto", simulated=True),
    help=_CLUSTER + _SIMULATED,
)
@click.option(
    "--nodes", type=int, default=1, show_default=True, help="Nodes, with `local` (of this machine) or simulated."
)
@click.option("--seed", type=int, help="Seed of the search; default: the spec's.")
@click.option("--detach", is_flag=True, help="As a job of the cluster whose head this is; see status, logs, stop.")
@click.option("--warm-start", "earlier", multiple=True, metavar="results/study=NAME", help=_WARM)
@click.option("--patience", type=click.FloatRange(min=0), default=PATIENCE_S, show_default=True, help=_PATIENCE)
@click.option("--json", "as_json", is_flag=True, help="Events to stdout, one JSON object a line; the rest to stderr.")
@results_option
def run(spec_file: str, where: str, nodes: int, results: str, **changes: Any) -> None:
    """Run the study of SPEC.yaml, or go on with it where it stopped."""
    earlier, patience, detach, as_json = (changes.pop(name) for name in ("earlier", "patience", "detach", "as_json"))
    spec = _changed(specfile.load(spec_file), changes)
    if detach:
        _detach(spec, where)
        return
    _run(spec, results, _Way(where, nodes, earlier, patience), _progress(spec, as_json=as_json))
    store = ParquetStore(results)
    records = Facts(store, spec.name).records if store.count(spec.name) else []
    console = Console(stderr=True) if as_json else stdout()
    shown.summary(records, spec.workload.concurrency, console)
    console.print(f"Records: {results.rstrip('/')}/study={spec.name}/trials/*.parquet", soft_wrap=True, highlight=False)
    say(shown.put_aside(store.read_events(spec.name)))
    if not any(record.outcome.status == "completed" and record.kind == "trial" for record in records):
        sys.exit(FAILED)


def _detach(spec: Spec, where: str) -> None:
    """The same command without --detach, as a job; mistakes that can be known here are told here."""
    from raytune_eagle.nodes import jobs  # noqa: PLC0415 - as in _run

    if where != "auto":
        raise SpecError("--detach: a job of the cluster runs on its head: be there, and add --cluster auto")
    mistakes = Mistakes()
    _workload(spec, mistakes)
    mistakes.tell()
    words = [word for word in sys.argv[1:] if word != "--detach"]
    job = jobs.submit(spec.name, str(Path.cwd()), [sys.executable, "-m", "raytune_eagle", *words])
    click.echo(job)
    say([f"study {spec.name} runs as job {job}; raytune-eagle status, logs {spec.name}, stop {spec.name}"])


def _progress(spec: Spec, *, as_json: bool) -> Progress:
    console = Console(stderr=True)
    if as_json:
        return Json(sys.stdout)
    return Board(console, spec) if console.is_terminal else Lines(console)


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
    from raytune_eagle.simulation import refuse_mixture  # noqa: PLC0415
    from raytune_eagle.study import Study  # noqa: PLC0415
    from raytune_eagle.survey import survey  # noqa: PLC0415

    console, mistakes = Console(stderr=True), Mistakes()
    with mistakes.noting():
        refuse_results(results)
    workload = _workload(spec, mistakes)
    store = ParquetStore(results)
    if workload and not mistakes.problems:
        refuse_mixture(store.read(spec.name), way.where)
        if study := _spent(spec, workload, store):
            _nothing_left(study, console)
            return
    if console.is_terminal:
        console.print("looking at the nodes (SGLang is asked for its flags once per version, some 10 s) …")
    space, notes = _understood(spec, survey(spec, workload, way.where, way.nodes), mistakes)
    assert workload is not None  # noqa: S101 - else there was a mistake
    say([*notes, *space.notes()])
    sources = warm_start.read(way.earlier, space, workload)
    with ExitStack() as stack:
        stack.enter_context(store.lock(spec.name))
        store.declare(spec.name, {dimension.column: dimension.kind for dimension in space.dimensions})
        held_out, live = _held_out(spec, workload), Live(results, spec.name)
        patient = _patient(store, space, way.patience_s)
        study = Study(space, workload, patient, _both(live.say, progress), held_out=held_out)
        progress.records = study.records
        if study.done():
            _nothing_left(study, console)
            return
        fleet = stack.enter_context(open_fleet(spec, way.where, way.nodes, study.note))
        _end_on_signals()  # again: Ray has put its own handlers in the place of ours
        if sources:
            study.learn_from(warm_start.known(sources, space, workload, fleet))
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
    return specfile.parse(tree)


def _workload(spec: Spec, mistakes: Mistakes) -> Workload | None:
    with mistakes.noting():
        try:
            check_study_name(spec.name)
        except StoreError as exc:
            raise SpecError(f"name: {exc}") from exc
    with mistakes.noting():
        settings = spec.workload.model_dump(exclude={"prompts"})
        return Workload(prompts=load_prompts(spec.workload.prompts), seed=spec.search.seed, **settings)
    return None


def _understood(spec: Spec, found: Survey, mistakes: Mistakes) -> tuple[Space, tuple[str, ...]]:
    """The space that the nodes leave, and what is to be said of them; every mistake so far is told here."""
    mistakes.problems += found.mistakes
    space = None
    with mistakes.noting():
        space = Space(spec, found.facts)
    mistakes.tell()
    assert space is not None  # noqa: S101 - else there was a mistake
    return space, found.notes


def _spent(spec: Spec, workload: Workload, store: ParquetStore) -> Study | None:
    """The study, if its budget is used up; whether any point is left only the nodes know. `SpecError`: see `Study`."""
    from raytune_eagle.study import Study  # noqa: PLC0415 - as in _run

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
    prompts = held_out_prompts(spec.workload.prompts)
    if not prompts and spec.confirm.top:
        say([f"{spec.workload.prompts}: no prompt is held out, so the best are confirmed on those of the search"])
    return workload.model_copy(update={"prompts": prompts or workload.prompts})


@main.command()
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
    from raytune_eagle.survey import planned, survey  # noqa: PLC0415 - as in _run

    spec, mistakes = specfile.load(spec_file), Mistakes()
    workload = _workload(spec, mistakes)
    space, notes = _understood(spec, survey(spec, workload, where, 1) if where else planned(spec), mistakes)
    say(notes)
    for line in shown.plan(space, show):
        click.echo(line)


@main.command()
@click.argument("spec_file", metavar="SPEC.yaml")
@local_or_cluster(_CLUSTER)
@click.option("--nodes", type=int, default=1, show_default=True, help="Nodes to make of this machine, with `local`.")
@results_option
def doctor(spec_file: str, where: str, nodes: int, results: str) -> None:
    """Look for what would make SPEC.yaml fail, on every node, without a launch; exit 1 if anything would."""
    from raytune_eagle.doctor import examine  # noqa: PLC0415 - as in _run

    spec, mistakes = specfile.load(spec_file), Mistakes()
    workload = _workload(spec, mistakes)
    mistakes.tell()
    assert workload is not None  # noqa: S101 - else there was a mistake
    found = examine(spec, workload, results, where, nodes)
    shown.findings(found, Console())
    if any(finding.level == "problem" for findings in found.values() for finding in findings):
        sys.exit(FAILED)


for _command in (*COMMANDS, probe):
    main.add_command(_command)


@main.command()
@click.argument("url")
@click.option(
    "--workload", "prompts", default="builtin:mixed", show_default=True, help="Prompts: a file or builtin:NAME."
)
@click.option("--concurrency", default="1", show_default=True, help="Simultaneous streams; several as 1,8.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens per answer.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--max-passes", type=click.IntRange(min=1), default=8, show_default=True, help="Passes over the prompts.")
@click.option("--chat", is_flag=True, help="Send prompts as messages, in the model's chat template.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the server's API key.")
@click.option(
    "--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Form."
)
def bench(url: str, prompts: str, concurrency: str, api_key_env: str | None, form: str, **settings: Any) -> None:
    """Measure the server at URL: SGLang, or any that speaks OpenAI's chat format."""
    from raytune_eagle import bench as running  # noqa: PLC0415 - half a second of imports
    from raytune_eagle.report.running import show_bench  # noqa: PLC0415

    if api_key_env and api_key_env not in os.environ:
        raise SpecError(f"--api-key-env {api_key_env}: no such variable in the environment; export it first")
    levels, passes = _levels(concurrency), min(2, settings["max_passes"])
    workload = Workload(prompts=load_prompts(prompts), concurrency=levels, min_passes=passes, **settings)
    server = running.connect(url, os.environ[api_key_env] if api_key_env else "")
    report = running.bench(server, workload, lambda name, detail: click.echo(f"{name}: {detail}", err=True))
    if form == "json":
        click.echo(report.model_dump_json(indent=2))
    else:
        title = f"{report.server} at {report.url}: {report.model}"
        show_bench(title, (report.measurements, report.categories), report.gates, stdout())
    if any(gate.verdict == "failed" for gate in report.gates):
        sys.exit(FAILED)


def _levels(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts) or len(set(parts)) < len(parts):
        raise SpecError(f"--concurrency {text}: write numbers above 0, each once, for example 1,8")
    return tuple(map(int, parts))


@main.command()
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
        from raytune_eagle.cluster import live_nodes  # noqa: PLC0415 - as in _run

        stdout().print(shown.live_table(live_nodes(where)))
        return
    store = ParquetStore(results)
    known = store.studies()
    by_study = {name: list(store.read_events(name)) for name in ([study] if study else known)}
    events: list[Event] = max(by_study.values(), key=lambda found: found[-1].at if found else 0.0, default=[])
    if not events:
        raise SpecError(f"no events under {results}: run a study first")
    stdout().print(shown.node_table(events))


@main.command()
@click.argument("study", required=False)
def status(study: str | None) -> None:
    """Show the jobs of `run --detach`, of one STUDY or all; exit 1 when the latest failed or was stopped."""
    from raytune_eagle.nodes import jobs  # noqa: PLC0415 - as in _run

    found = jobs.status(study)
    if not found:
        raise SpecError(
            "no study was started with --detach on this cluster" if study is None else f"no job of {study!r}"
        )
    stdout().print(shown.job_table(found))
    if not jobs.succeeded(found[0][2]):
        sys.exit(FAILED)


@main.command()
@click.argument("study")
@click.option("-f", "--follow", is_flag=True, help="Go on until it ends.")
def logs(study: str, *, follow: bool) -> None:
    """Print what the latest job of STUDY has printed."""
    from raytune_eagle.nodes import jobs  # noqa: PLC0415 - as in _run

    for text in jobs.logs(study, follow=follow):
        click.echo(text, nl=False)


@main.command()
@click.argument("study")
def stop(study: str) -> None:
    """End the job of STUDY in an orderly way; `run` with the same words goes on with it."""
    from raytune_eagle.nodes import jobs  # noqa: PLC0415 - as in _run

    click.echo(jobs.stop(study))


def _end_on_signals() -> None:
    """The first signal ends in an orderly way; a second one at once, and the guards clear up. nohup stays nohup."""
    seen: list[int] = []

    def handler(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            os._exit(_INTERRUPTED)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
