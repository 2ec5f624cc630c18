"""Commands that read what studies left: no launch, no node, and nothing written but what is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from raytune_eagle.cli.studies import (
    FAILED,
    Chosen,
    chosen,
    facts_of,
    latest,
    none_under,
    records_of,
    results_option,
    say,
    stdout,
    uncollected,
)
from raytune_eagle.engines.launch import resolved
from raytune_eagle.errors import RaytuneEagleError, SpecError, StoreError
from raytune_eagle.model.config import Config
from raytune_eagle.model.trial import Completed, TrialRecord
from raytune_eagle.report import console as shown
from raytune_eagle.report.export import FORMS as EXPORTS
from raytune_eagle.report.export import export
from raytune_eagle.report.render import FORMS, render
from raytune_eagle.report.verdict import verdict, winner
from raytune_eagle.rescore import limited, parse_mix, remixed
from raytune_eagle.store import ParquetStore

_SLOW_FROM = 1000


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
    asked, store = Query(results), ParquetStore(results)
    _advise(store, studies := store.studies())
    table = asked.schema() if sql is None else asked.run(sql)
    say([*asked.warnings, *([] if studies or schema else [none_under(results)])])
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
    found = chosen(results, study)
    records = _judged(records_of(found), **again) if any(again.values()) else facts_of(found).records
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
    fastest = winner(records, concurrency or measured[0]) if measured else None
    if fastest is None:
        say([verdict(records, concurrency or 1)])
        sys.exit(FAILED)
    click.echo(export(_pasteable(fastest.config), form), nl=False)


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

    found = chosen(results, study)
    records, known = records_of(found), spec_of(found.store.read_events(found.name))
    if known is None:
        raise SpecError(f"study {found.name!r} does not say what it searched: no study_started event")
    if note := shown.simulated_from(records):
        click.echo(note)
    spec = known[0].model_copy(update={"name": found.name})  # which `run --study` gave it
    for line in lines(Explanation(spec, records)):
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
@click.option("-o", "--output", metavar="FILE.html", help="Where; - is stdout; default: STUDY.html here.")
@results_option
def report(study: str, output: str | None, results: str) -> None:
    """Write one HTML page on STUDY: verdict, charts with their tables, failures, the launch command. Opens offline."""
    from raytune_eagle.report.page import page  # noqa: PLC0415 - its libraries take a moment to import

    found = chosen(results, study)
    _advise(found.store, [found.name])
    path = Path(output or f"{found.name}.html")
    with uncollected():
        text = page(facts_of(found))
    if output == "-":
        sys.stdout.buffer.write(text.encode())
        return
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

    found = chosen(results, study) if study else latest(results)
    token = secrets.token_urlsafe(16)

    def ready(taken: int) -> None:
        click.echo(f"http://127.0.0.1:{taken}/#token={token}")
        say([f"live page of study {found.name}; Ctrl-C ends the page, not the study"])
        sys.stdout.flush()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(Dashboard(Watch(found.results, found.name), token), port, ready))


@click.command()
@click.argument("study_a")
@click.argument("study_b")
@results_option
def compare(study_a: str, study_b: str, results: str) -> None:
    """Show STUDY_A and STUDY_B side by side: what differs, plain decoding, the fastest, points in both."""
    from raytune_eagle.report.comparison import compare_studies  # noqa: PLC0415

    one, other = (facts_of(chosen(results, study)) for study in (study_a, study_b))
    compare_studies((one.records, one.events), (other.records, other.events), stdout())


@click.group("results")
def results_group() -> None:
    """Look after the folder of records."""


@results_group.command("compact")
@click.argument("studies", nargs=-1, metavar="[STUDY]…")
@results_option
def compact(studies: tuple[str, ...], results: str) -> None:
    """Put one file in the place of many, for each STUDY (default: all). Readers never see half of it."""

    def one(found: Chosen) -> None:
        done = found.store.compact(found.name)
        words = ", ".join(f"{each.table}: {each.files:,} files, {each.rows:,} rows" for each in done)
        click.echo(f"{found.name}: {words or 'nothing to do'}")

    _each(_all_or(studies, results), one)


@results_group.command("check")
@click.argument("studies", nargs=-1, metavar="[STUDY]…")
@results_option
def check(studies: tuple[str, ...], results: str) -> None:
    """Look for torn and foreign files, duplicates and lost requests in each STUDY (default: all); exit 1 if any."""
    strangers = [] if studies else ParquetStore(results).strangers()
    found = len(strangers)
    for line in strangers:
        click.echo(line)
    for store, study, _ in _all_or(studies, results):
        lines = _problems(store, study)
        found += len(lines)
        for line in lines:
            click.echo(line)
        say([f"{study}: {len(lines) or 'no'} problem{'s' * (len(lines) != 1)}"])
    if found:
        sys.exit(FAILED)


def _all_or(studies: Sequence[str], results: str) -> list[Chosen]:
    """Those that were named, or all that there are."""
    if studies:
        return [chosen(results, each) for each in dict.fromkeys(studies)]
    store = ParquetStore(results)
    found = [Chosen(store, name, results) for name in store.studies()]
    if not found:
        raise SpecError(none_under(results))
    return found


def _each(studies: Sequence[Chosen], act: Callable[[Chosen], None]) -> None:
    """Of several studies one to which it cannot be done is named, the others go on, and the exit code is 1."""
    told: dict[str, None] = {}
    for study in studies:
        try:
            act(study)
        except RaytuneEagleError as exc:
            if len(studies) == 1:
                raise
            say([line for line in str(exc).splitlines() if line not in told])
            told |= dict.fromkeys(str(exc).splitlines())
    if told:
        sys.exit(FAILED)


def _problems(store: ParquetStore, study: str) -> list[str]:
    try:
        records, problems = store.reading(study)
        others = sorted({record.study for record in records} - {study})
        return [
            *problems,
            *(f"study={study}: holds records of study {each!r}: give it that name again" for each in others),
        ]
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
    """Write studies into an Optuna storage, for optuna-dashboard; the records stay what `run` goes on from.

    Of several studies one that cannot be copied is named and left out; exit 1 then.
    """
    from raytune_eagle.report.to_optuna import to_optuna  # noqa: PLC0415

    def one(found: Chosen) -> None:
        click.echo(f"{found.name}: {to_optuna(records_of(found, brief=True), url, found.name)} trials")

    _each(_all_or(studies, results), one)


COMMANDS: Sequence[click.Command] = (query, best, explain, report, dashboard, compare, results_group, export_group)
