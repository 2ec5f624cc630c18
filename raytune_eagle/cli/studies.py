"""How commands find a study and read it, and where they print."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import click
from rich.console import Console

from raytune_eagle.errors import SpecError, StoreError
from raytune_eagle.model.trial import Event, TrialRecord
from raytune_eagle.report.facts import Facts, written_spec
from raytune_eagle.store import FOLDER, ParquetStore, check_study_name

FILE_WIDTH = 120
FAILED = 1
results_option = click.option(
    "--results", default="results", show_default=True, help="Folder or pyarrow.fs URI of records."
)


def say(lines: Sequence[str]) -> None:
    """Tell people: to stderr."""
    for line in lines:
        click.echo(f"raytune-eagle: {line}", err=True)


@contextlib.contextmanager
def if_interrupted(words: str) -> Iterator[None]:
    """Say `words` behind "interrupted" where the block is: what is kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt as exc:
        raise KeyboardInterrupt(words) from exc


def stdout(*, stderr: bool = False) -> Console:
    """As wide as the terminal; a file or pipe takes tables that need not be broken. Or stderr, likewise."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else FILE_WIDTH)


class Chosen(NamedTuple):
    """A study that there is, in its store, which is at `results`."""

    store: ParquetStore
    name: str
    results: str


def chosen(results: str, study: str) -> Chosen:
    """Find a study by its name, by its folder (``results/study=NAME``, as a shell completes it), or by its spec's name.

    Raises:
        SpecError: there is none, or several have it in their spec; the line names those that there are.
    """
    folder, is_folder, name = study.rstrip("/").rpartition(FOLDER)
    results = folder if is_folder and folder else results
    store = ParquetStore(results)
    try:
        check_study_name(name)
    except StoreError as exc:
        raise SpecError(str(exc)) from exc
    known = store.studies()
    return Chosen(store, name if name in known else _by_spec(store, known, name, results), results)


def latest(results: str) -> Chosen:
    """The study to which something happened last.

    Raises:
        SpecError: there is none.
    """
    store = ParquetStore(results)
    last = {name: max((event.at for event in events), default=0.0) for name, events in _events_of_all(store).items()}
    if not last:
        raise SpecError(none_under(results))
    return Chosen(store, max(last, key=lambda name: last[name]), results)


def _by_spec(store: ParquetStore, known: Sequence[str], name: str, results: str) -> str:
    """A study that was run under another name (`run --study`) than its spec's, which is the one given."""
    alike = [each for each, events in _events_of_all(store).items() if written_spec(events).get("name") == name]
    if len(alike) == 1:
        say([f"the study of spec {name!r} is {alike[0]!r}"])
        return alike[0]
    if not known:
        raise SpecError(none_under(results))
    listed = ", ".join(alike or known)
    raise SpecError(f"no study {name!r} under {results}; {'of that spec ' if alike else ''}there are: {listed}")


def _events_of_all(store: ParquetStore) -> dict[str, list[Event]]:
    """Events of each study, by its name; one that cannot be read is told and left out."""
    found = {}
    for name in store.studies():
        try:
            found[name] = store.read_events(name)
        except StoreError as exc:
            say([str(exc)])
    return found


def none_under(results: str) -> str:
    """What to say where a folder of records has no study: it may be one of a study itself."""
    above, is_folder, _ = results.rstrip("/").rpartition(FOLDER)
    return f"no study under {results}: " + (f"give --results {above or '.'}" if is_folder else "run one first")


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile: of thousands of records that all stay, looking for it takes a third."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def records_of(found: Chosen, *, brief: bool = False) -> list[TrialRecord]:
    """All launches with their requests, or `brief` without; what cannot be read is told."""
    with uncollected():
        reading = found.store.reading(found.name, brief=brief)
    say(reading.problems)
    if not reading.records:
        raise SpecError(f"study {found.name!r} has no trial yet")
    return reading.records


def facts_of(found: Chosen) -> Facts:
    """All launches with the requests of those alone that a verdict compares: for thousands of them far quicker."""
    with uncollected():
        facts = Facts(found.store, found.name)
    say(facts.problems)
    return facts
