"""Commands that read what studies left: no launch, no node, and nothing written but what is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from raytune_eagle.engines.launch import resolved
from raytune_eagle.errors import SpecError, StoreError
from raytune_eagle.model.config import Config
from raytune_eagle.model.trial import Completed, TrialRecord
from raytune_eagle.report import console as shown
from raytune_eagle.report.export import FORMS as EXPORTS
from raytune_eagle.report.export import export
from raytune_eagle.report.facts import Facts
from raytune_eagle.report.render import FORMS, render
from raytune_eagle.report.verdict import verdict, winner
from raytune_eagle.rescore import limited, parse_mix, remixed
from raytune_eagle.store import ParquetStore, check_study_name

FILE_WIDTH = 120
FAILED = 1
results_option = click.option(
    "--results", default="results", show_default=True, help="Folder or pyarrow.fs URI of records."
)
_SLOW_FROM = 1000


def say(lines: Sequence[str]) -> None:
    """Tell people: to stderr."""
    for line in lines:
        click.echo(f"raytune-eagle: {line}", err=True)


def stdout() -> Console:
    """As wide as the terminal; a file or pipe takes tables that need not be broken."""
    return Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile: thousands of records are made and all stay; to search them is a third of it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _known(results: str, study: str) -> ParquetStore:
    """The store, with a study of this name in it."""
    store = ParquetStore(results)
    try:
        check_study_name(study)
    except StoreError as exc:
        raise SpecError(str(exc)) from exc
    if study not in store.studies():
        known = ", ".join(store.studies()) or "none"
        raise SpecError(f"no study {study!r} under {results}; there are: {known}")
    return store


def _records(results: str, study: str, *, brief: bool = False) -> list[TrialRecord]:
    """All launches with their requests, or `brief` without."""
    with _uncollected():
        found = _known(results, study).reading(study, brief=brief)
    say(found.problems)
    if not found.records:
        raise SpecError(f"study {study!r} under {results} has no trial yet")
    return found.records


def _facts(results: str, study: str) -> Facts:
    """All launches with the requests of those alone that a verdict compares: for thousands of them far quicker."""
    with _uncollected():
        found = Facts(_known(results, study), study)
    say(found.problems)
    return found


@click.command()
@click.argument("sql", required=False)
@results_option
@click.option("--format", "form", type=click.Choice(list(FORMS)), default="table", show_default=True)
@click.option("--schema", is_flag=True, help="List every column with type, unit and meaning instead.")
def query(sql: str | None, results: str, form: str, *, schema: bool) -> None:
    """Answer SQL over the views trials, requests, events and probes (read-only, DuckDB)."""
    from raytune_eagle.report.query import Query  # noqa: PLC0415 - DuckDB and pandas are a third of a second

    if (sql is None) != schema:
        raise SpecError("query: give one SQL statement, or --schema")
    asked = Query(results)
    _advise(ParquetStore(results), asked.studies())
    table = asked.schema() if sql is None else asked.run(sql)
    say(asked.warnings)
    sys.stdout.buffer.write(render(table, form))


@click.command()
@click.argument("study")
@results_option
@click.option("--concurrency", type=click.IntRange(min=1), help="Which winner; default: the first measured.")
@click.option(
    "--export",
    "form",
    type=click.Choice([*EXPORTS, "adaptive"]),
    help="Print the launch alone; adaptive: the file of --speculative-adaptive-config, from all concurrencies.",
)
@click.option("--mix", metavar="CATEGORY=SHARE,…", help="Judge again for this mix of requests: code=0.7,chat=0.3.")
@click.option(
    "--limit", "limits", multiple=True, metavar="NAME=MS", help="Judge again under this limit: itl_p95_ms=40."
)
def best(study: str, results: str, concurrency: int | None, form: str | None, **again: Any) -> None:
    """Show the winner of STUDY with its interval against plain decoding, or export its launch."""
    records = _judged(_records(results, study), **again) if any(again.values()) else _facts(results, study).records
    outcomes = [record.outcome for record in records if isinstance(record.outcome, Completed)]
    measured = sorted({figures.concurrency for outcome in outcomes for figures in outcome.measurements})
    if concurrency is not None and concurrency not in measured:
        raise SpecError(f"--concurrency {concurrency}: study {study!r} measured {', '.join(map(str, measured))}")
    if form is None:
        shown.summary(records, [concurrency] if concurrency else measured, stdout())
        return
    if form == "adaptive":
        _export_adaptive(records, measured)
        return
    chosen = winner(records, concurrency or measured[0]) if measured else None
    if chosen is None:
        say([verdict(records, concurrency or 1)])
        sys.exit(FAILED)
    click.echo(export(_pasteable(chosen.config), form), nl=False)


def _judged(records: list[TrialRecord], mix: str | None, limits: Sequence[str]) -> list[TrialRecord]:
    if mix is not None:
        records = remixed(records, parse_mix(mix))
    return limited(records, limits) if limits else records


def _export_adaptive(records: Sequence[TrialRecord], measured: Sequence[int]) -> None:
    from raytune_eagle.report.adaptive import adaptive  # noqa: PLC0415 - only this asks for it

    found = adaptive(records, measured)
    say(["launch with this file as FILE (SGLang 0.5.20):", found.command])
    click.echo(found.text, nl=False)


@click.command()
@click.argument("study")
@results_option
def explain(study: str, results: str) -> None:
    """Show what STUDY has learned: parts of a cycle, what drafts accept, what settings are worth, what to try next."""
    from raytune_eagle.identity import spec_of  # noqa: PLC0415 - only this asks for it
    from raytune_eagle.report.explain import Explanation, lines  # noqa: PLC0415

    records = _records(results, study)
    known = spec_of(ParquetStore(results).read_events(study))
    if known is None:
        raise SpecError(f"study {study!r} under {results} does not say what it searched: no study_started event")
    if note := shown.simulated_from(records):
        click.echo(note)
    for line in lines(Explanation(known[0], records)):
        click.echo(line)


def _advise(store: ParquetStore, studies: Sequence[str]) -> None:
    """Say what would make thousands of files quick to read."""
    for study in studies:
        if (count := store.count(study)) > _SLOW_FROM:
            say([f"{count:,} files: `raytune-eagle results compact {study}` would make reading them faster"])


def _pasteable(config: Config) -> Config:
    """With paths for the built-in names, and for `python3` the interpreter of this environment, which served it."""
    first, *rest = config.launcher
    return resolved(config).model_copy(update={"launcher": (sys.executable if first == "python3" else first, *rest)})


@click.command()
@click.argument("study")
@click.option("-o", "--output", metavar="FILE.html", help="Where to write it; default: STUDY.html here.")
@results_option
def report(study: str, output: str | None, results: str) -> None:
    """Write one HTML page on STUDY: verdict, charts with their tables, failures, the launch command. Opens offline."""
    from raytune_eagle.report.page import page  # noqa: PLC0415 - its libraries take a moment to import

    _advise(_known(results, study), [study])
    path = Path(output or f"{study}.html")
    with _uncollected():
        text = page(_facts(results, study))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise SpecError(f"--output {path}: {exc.strerror or exc}") from exc
    click.echo(str(path))


@click.command()
@click.option("--study", help="Which one; default: the one with the latest event.")
@click.option("--port", type=click.IntRange(0, 65535), default=8787, show_default=True, help="On 127.0.0.1; 0: any.")
@results_option
def dashboard(study: str | None, port: int, results: str) -> None:
    """Serve a live page on a study: nodes, trials, failures, logs; its buttons stop it or put nodes aside."""
    from raytune_eagle.report.dashboard.server import Dashboard, serve  # noqa: PLC0415
    from raytune_eagle.report.dashboard.watch import Watch  # noqa: PLC0415

    store = ParquetStore(results)
    chosen = study or max(store.studies(), key=lambda name: _last_event(store, name), default="")
    if not chosen:
        raise SpecError(f"no study under {results}: run one first")
    _known(results, chosen)
    token = secrets.token_urlsafe(16)

    def ready(taken: int) -> None:
        click.echo(f"http://127.0.0.1:{taken}/#token={token}")
        say([f"live page of study {chosen}; Ctrl-C ends the page, not the study"])
        sys.stdout.flush()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(Dashboard(Watch(results, chosen), token), port, ready))


def _last_event(store: ParquetStore, study: str) -> float:
    return max((event.at for event in store.read_events(study)), default=0.0)


@click.command()
@click.argument("study_a")
@click.argument("study_b")
@results_option
def compare(study_a: str, study_b: str, results: str) -> None:
    """Show STUDY_A and STUDY_B side by side: what differs, plain decoding, the fastest, points in both."""
    from raytune_eagle.report.comparison import compare_studies  # noqa: PLC0415

    one, other = (_facts(results, study) for study in (study_a, study_b))
    compare_studies((one.records, one.events), (other.records, other.events), stdout())


@click.group("results")
def results_group() -> None:
    """Look after the folder of records."""


@results_group.command("compact")
@click.argument("studies", nargs=-1, metavar="[STUDY]…")
@results_option
def compact(studies: tuple[str, ...], results: str) -> None:
    """Put one file in the place of many, for each STUDY (default: all). Readers never see half of it."""
    store = ParquetStore(results)
    for study in studies or store.studies():
        done = _known(results, study).compact(study)
        words = ", ".join(f"{each.table}: {each.files:,} files, {each.rows:,} rows" for each in done)
        click.echo(f"{study}: {words or 'nothing to do'}")


@results_group.command("check")
@click.argument("studies", nargs=-1, metavar="[STUDY]…")
@results_option
def check(studies: tuple[str, ...], results: str) -> None:
    """Look for torn and foreign files, duplicates and lost requests in each STUDY (default: all); exit 1 if any."""
    store, found = ParquetStore(results), 0
    for study in studies or store.studies():
        lines = _problems(_known(results, study), study)
        found += len(lines)
        for line in lines:
            click.echo(line)
        say([f"{study}: {len(lines) or 'no'} problem{'s' * (len(lines) != 1)}"])
    if found:
        sys.exit(FAILED)


def _problems(store: ParquetStore, study: str) -> list[str]:
    try:
        return store.problems(study)
    except StoreError as exc:  # of this study alone: the others are still looked at
        return [str(exc)]


@click.group("export")
def export_group() -> None:
    """Copy studies into the formats of other tools."""


@export_group.command("optuna")
@click.argument("url", metavar="sqlite:///FILE.db")
@click.option("--study", "studies", multiple=True, help="Only this one; may be given several times.")
@results_option
def export_optuna(url: str, studies: tuple[str, ...], results: str) -> None:
    """Write studies into an Optuna storage, for optuna-dashboard; the records stay what `run` goes on from."""
    from raytune_eagle.report.to_optuna import to_optuna  # noqa: PLC0415

    for study in studies or ParquetStore(results).studies():
        count = to_optuna(_records(results, study, brief=True), url)
        click.echo(f"{study}: {count} trials")


COMMANDS: Sequence[click.Command] = (query, best, explain, report, dashboard, compare, results_group, export_group)
