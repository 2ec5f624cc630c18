"""Trials out of their files, one in each or many in one, with their requests."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from raytune_eagle.model.measurement import Request
from raytune_eagle.model.trial import TrialRecord
from raytune_eagle.schema import TABLES
from raytune_eagle.store.files import Files
from raytune_eagle.store.rows import Row, record_of, request_of
from raytune_eagle.store.tables import is_compact, load, load_all, rows_by_trial

_MOST_LOOKS = 5
_TRIAL_FILE = re.compile(r"(\d{5,})-[0-9a-f]{12}\.parquet")
_LEFT_OUT: Row = {"resolved_args": "{}", "env": {}, "launch_command": ""}
"""Columns that a brief reading passes over, and what stands for them; the last two are in config_json too."""
_BRIEF = [column.name for column in TABLES["trials"] if column.name not in _LEFT_OUT]
_BRIEF_REQUEST = [column.name for column in TABLES["requests"] if not pa.types.is_list(column.type)]
"""What figures are made of: lists cost more than all else together."""


class Found(NamedTuple):
    """A trial, or the line that says why a file (or a part of it) is none."""

    number: int
    path: str
    what: TrialRecord | str


def number_of(name: str) -> int:
    """Trial of a file, by its name; -1 for a file of many or of none."""
    match = _TRIAL_FILE.fullmatch(name)
    return int(match[1]) if match else -1


class Answers:
    """The requests of trials, from the file of each or from compacted ones.

    Of `wanted` alone, and without their histograms and hashes of prefixes, where that is given.

    Attributes:
        problems: a line for each file of requests that `put_in` could not read.
    """

    def __init__(self, files: Files, study_folder: str, wanted: Iterable[int] | None = None) -> None:
        self._files, self._folder = files, f"{study_folder}/requests"
        self._wanted = None if wanted is None else list(wanted)
        self._columns = None if wanted is None else _BRIEF_REQUEST
        self._compacted: dict[int, list[Row]] | None = None
        self.problems: list[str] = []

    def of(self, record_number: int, name: str, expected: int) -> tuple[list[Request], list[str]]:
        """Requests of a trial; when they are lost the trial still counts, and its loss is told."""
        if not expected:
            return [], []
        rows: list[Row] | str = self._many().get(record_number, [])
        if not rows:
            table = load(self._files, "requests", self._folder, name, self._columns)
            rows = table if isinstance(table, str) else table.to_pylist()
        return ([], [rows]) if isinstance(rows, str) else ([request_of(row) for row in rows], [])

    def put_in(self, record: TrialRecord) -> TrialRecord:
        """The trial with its requests; a file of them that cannot be read is told in `problems`."""
        name = f"{record.number:05d}-{record.config.uid}.parquet"
        requests, lost = self.of(record.number, name, 1)
        self.problems += lost if lost and name in self._files.names(self._folder) else []  # else there may be none
        return record.model_copy(update={"outcome": record.outcome.model_copy(update={"requests": tuple(requests)})})

    def _many(self) -> dict[int, list[Row]]:
        if self._compacted is None:
            self._compacted = {}
            for name in filter(is_compact, self._files.names(self._folder)):
                table = load(self._files, "requests", self._folder, name, self._columns)
                self._compacted |= {} if isinstance(table, str) else rows_by_trial(table, "trial", self._wanted)
        return self._compacted


def scan(files: Files, study_folder: str, *, brief: bool = False) -> list[Found]:
    """Trials by number, and a line for each file that is none.

    Args:
        files: where they are.
        study_folder: ``study=NAME``.
        brief: without requests and the server's arguments; far quicker.
    """
    folders = [f"{study_folder}/trials", f"{study_folder}/requests"]
    for _ in range(_MOST_LOOKS):
        before = [set(files.names(folder)) for folder in folders]
        found = _scan(files, study_folder, sorted(before[0]), brief=brief)
        if all(names <= set(files.names(folder)) for names, folder in zip(before, folders, strict=True)):
            break  # else they were compacted under our eyes
    seen: set[int] = set()
    return [_once(each, seen) for each in sorted(found, key=lambda each: each.number)]


def _scan(files: Files, study_folder: str, names: Sequence[str], *, brief: bool) -> list[Found]:
    place, answers = f"{study_folder}/trials", None if brief else Answers(files, study_folder)
    loaded = list(load_all(files, "trials", place, names, _BRIEF if brief else None))
    found = [Found(number_of(name), files.path(place, name), told) for name, told in loaded if isinstance(told, str)]
    for name, groups in _grouped([(name, table) for name, table in loaded if not isinstance(table, str)]):
        found += _trials(files.path(place, name), name, groups, answers)
    return found


def _grouped(loaded: Sequence[tuple[str, pa.Table]]) -> Iterator[tuple[str, dict[int, list[Row]]]]:
    """Rows of each file by trial; all files turned into rows at once, which costs a quarter of one by one."""
    if not loaded:
        return
    rows = iter(pa.concat_tables([table for _, table in loaded], promote_options="default").to_pylist())
    for name, table in loaded:
        groups: dict[int, list[Row]] = {}
        for row in itertools.islice(rows, table.num_rows):
            groups.setdefault(row["number"], []).append(row)
        yield name, groups


def _once(found: Found, seen: set[int]) -> Found:
    if isinstance(found.what, str):
        return found
    if found.number in seen:
        return found._replace(what=f"{found.path}: trial {found.number} is in another file already")
    seen.add(found.number)
    return found


def _trials(path: str, name: str, groups: dict[int, list[Row]], answers: Answers | None) -> Iterator[Found]:
    if not groups or (not is_compact(name) and list(groups) != [number_of(name)]):
        yield Found(number_of(name), path, f"{path}: not a trial's file: its name and rows disagree")
        return
    for number, rows in groups.items():
        requests: list[Request] = []
        if answers is not None:
            requests, problems = answers.of(number, f"{number:05d}-{rows[0]['uid']}.parquet", rows[0]["request_count"])
            yield from (Found(number, path, line) for line in problems)
        yield Found(number, path, _record(path, rows, requests))


def _record(path: str, rows: list[Row], requests: list[Request]) -> TrialRecord | str:
    try:
        return record_of([_LEFT_OUT | row for row in rows], requests)
    except (ValueError, TypeError) as error:
        return f"{path}: not a trial: {' '.join(str(error).split())[:200]}"
