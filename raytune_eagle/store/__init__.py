"""Parquet under ``ROOT/study=NAME/``: the only record of what was measured (results/README.md has every column).

One write-once file per trial. A trial's log and requests are written before its file in trials/, so that whoever sees
the trial finds both. `study` is a plain string column in every file, which is what the readers' own inference makes
of ``study=NAME`` as well; hence names that a reader would take for a number or a date are refused.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import fs

from raytune_eagle.errors import StoreError
from raytune_eagle.model.trial import Event, TrialRecord
from raytune_eagle.schema import check_parameters, file_parameters, file_problem, parameter_kind, table_schema
from raytune_eagle.store.files import READ_ERRORS, Files, open_files
from raytune_eagle.store.rows import event_of, events_table, requests_table, trial_table
from raytune_eagle.store.tables import Compacted, compact_study, is_compact, load, load_all, numbers
from raytune_eagle.store.trials import Answers, number_of, scan

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LIKE_A_VALUE = re.compile(r"[0-9._-]+|0[xb][0-9a-f_]+|inf|infinity|epoch|__HIVE_DEFAULT_PARTITION__", re.IGNORECASE)
FOLDER = "study="
"""What the name of a study's folder begins with."""
_GZIP = b"\x1f\x8b"


def check_study_name(study: str) -> None:
    """Raise `StoreError` for a name that cannot be a folder or that readers would not take for a text."""
    if (why := _refusal(study)) is not None:
        raise StoreError(why)


def _refusal(study: str) -> str | None:
    if not _NAME.fullmatch(study) or ".." in study:
        return f"{study!r} cannot name a study: letters, digits, '_', '-' and single '.', no other in front"
    if _LIKE_A_VALUE.fullmatch(study):
        return f"{study!r} cannot name a study: readers take it for a number or a date; put a word in front"
    return None


class Reading(NamedTuple):
    """Trials by number, and one line for each file (or part of one) that cannot be used."""

    records: list[TrialRecord]
    problems: list[str]


class ParquetStore:
    """Store in a local folder or any `pyarrow.fs` URI (S3, GCS, HDFS, …).

    What `read` gives back equals what was appended, but for `server_log`, which stays in logs/ and comes back empty.
    Safe to use from several threads as long as no two append the same trial; one process writes a study (`lock`).
    """

    def __init__(self, root: str, filesystem: fs.FileSystem | None = None) -> None:
        self._files: Files = open_files(root, filesystem)
        self._declared: dict[str, dict[str, str]] = {}
        self._compacted: dict[str, set[int]] = {}
        self._numbers: dict[str, set[int]] = {}

    @contextlib.contextmanager
    def lock(self, study: str) -> Iterator[None]:
        """Be the only writer of a study, and clear away what a killed one left.

        Nothing is locked on remote filesystems: they offer no lock that ends with its holder.

        Raises:
            SpecError: another process (it is named) or another part of this one writes the study.
        """
        folder = _folder(study)
        with self._files.lock(folder, f"study {study!r}"):
            self._files.remove_temporaries(folder)
            for table in ("trials", "requests", "events", "probes", "logs"):
                self._files.remove_temporaries(f"{folder}/{table}")
            self._remove_orphans(folder)
            yield

    def declare(self, study: str, parameters: Mapping[str, str]) -> None:
        """Tell the searched parameters of a study and their kinds (`schema.KINDS`), before its first `append`.

        All its trials files then have the same columns, baselines included; each file keeps the declaration.

        Raises:
            StoreError: a name is reserved, or the study was recorded with other parameters.
        """
        check_parameters(parameters)
        kept = self._kept_parameters(_folder(study))
        if kept is not None and kept != dict(parameters):
            raise StoreError(f"study {study!r} was recorded with the parameters {kept}, not {dict(parameters)}")
        self._declared[study] = dict(parameters)

    def append(self, record: TrialRecord) -> None:
        """Keep a trial, its requests and its server log; durable when it returns.

        Raises:
            StoreError: the number exists, or something could not be written; then nothing of the trial is visible.
        """
        folder, stem = _folder(record.study), f"{record.number:05d}-{record.config.uid}"
        self._refuse_duplicate(folder, record.number)
        table = trial_table(record, self._parameters(record))
        requests, log = record.outcome.requests, record.outcome.server_log
        try:
            if log:
                packed = log if log.startswith(_GZIP) else gzip.compress(log)
                self._files.write(f"{folder}/logs", f"{stem}.log.gz", packed)
            if requests:
                self._files.write_table(f"{folder}/requests", f"{stem}.parquet", requests_table(record))
            self._files.write_table(f"{folder}/trials", f"{stem}.parquet", table)  # last: makes it visible
            self._numbers[f"{folder}/trials"].add(record.number)
        except StoreError:
            for part, name in (("trials", "parquet"), ("requests", "parquet"), ("logs", "log.gz")):
                self._files.remove(f"{folder}/{part}", f"{stem}.{name}")
            raise

    def append_events(self, study: str, events: Sequence[Event]) -> None:
        """Keep events of one study; an empty sequence writes nothing."""
        folder = _folder(study)
        if any(event.study != study for event in events):
            raise StoreError(f"events of another study cannot be kept in {study!r}")
        if events:
            self._files.write_table(f"{folder}/events", _next_name(), events_table(events))

    def append_probes(self, study: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep timings of all-reduces; the keys are columns of probes, those left out are null."""
        folder, schema = _folder(study), table_schema("probes")
        unknown = sorted({key for row in rows for key in row} - set(schema.names))
        if unknown:
            raise StoreError(f"probes have no column {unknown[0]!r}")
        if rows:
            table = pa.Table.from_pylist([{**row, "study": study} for row in rows], schema=schema)
            self._files.write_table(f"{folder}/probes", _next_name(), table)

    def read(self, study: str) -> Iterator[TrialRecord]:
        """All trials of a study by number; torn and foreign files are passed over (`problems` names them)."""
        found = scan(self._files, _folder(study))
        yield from (each.what for each in found if isinstance(each.what, TrialRecord))

    def reading(self, study: str, *, brief: bool = False) -> Reading:
        """All trials of a study by number, and every file that cannot be used.

        Args:
            study: its name.
            brief: for thousands of trials: without requests and without what the servers said of themselves.
        """
        found = [each.what for each in scan(self._files, _folder(study), brief=brief)]
        lines = [each for each in found if isinstance(each, str)]
        for table in ("events", "probes"):
            place = f"{_folder(study)}/{table}"
            loaded = load_all(self._files, table, place, self._files.names(place))
            lines += [each for _, each in loaded if isinstance(each, str)]
        return Reading([each for each in found if isinstance(each, TrialRecord)], lines)

    def listing(self, study: str) -> tuple[tuple[str, ...], ...]:
        """Names of its files of trials and events: equal as long as nothing was added."""
        folder = _folder(study)
        return tuple(tuple(self._files.names(f"{folder}/{table}")) for table in ("trials", "events"))

    def count(self, study: str) -> int:
        """Files in trials/ of a study."""
        return len(self._files.names(f"{_folder(study)}/trials"))

    def with_requests(self, records: Iterable[TrialRecord]) -> Reading:
        """Trials of one study that were read brief, with their requests, but for what these hold in lists."""
        chosen = list(records)
        if not chosen:
            return Reading([], [])
        answers = Answers(self._files, _folder(chosen[0].study), [record.number for record in chosen])
        return Reading([answers.put_in(record) for record in chosen], answers.problems)

    def compact(self, study: str) -> list[Compacted]:
        """One file in the place of many, in each table; readers find the old files or the new one, never both.

        Raises:
            SpecError: a process writes the study.
            StoreError: there is no such study, or its filesystem cannot exchange two folders in one step.
        """
        if study not in self.studies():
            raise StoreError(f"no study {study!r} here; there are: {', '.join(self.studies()) or 'none'}")
        with self.lock(study):
            return compact_study(self._files, _folder(study))

    def read_events(self, study: str) -> list[Event]:
        """All events of a study by time, those of one moment in the order of their writing."""
        folder = f"{_folder(study)}/events"
        tables = load_all(self._files, "events", folder, self._files.names(folder))
        rows = [row for _, table in tables if not isinstance(table, str) for row in table.to_pylist()]
        return sorted((event_of(row) for row in rows), key=lambda event: event.at)

    def read_probes(self, study: str) -> list[dict[str, Any]]:
        """All timings of all-reduces of a study, by time; keys are the columns of probes."""
        folder = f"{_folder(study)}/probes"
        tables = load_all(self._files, "probes", folder, self._files.names(folder))
        rows = [row for _, table in tables if not isinstance(table, str) for row in table.to_pylist()]
        return sorted(
            ({**row, "env": dict(row["env"] or ())} for row in rows), key=lambda row: row["measured_unix_s"] or 0
        )

    def studies(self) -> list[str]:
        """Names of all studies, in order; folders that no study can have the name of are others'."""
        return [name for name in self._named() if _refusal(name) is None]

    def strangers(self) -> list[str]:
        """One line for each folder that is named like a study's and is none."""
        wrong = [(name, _refusal(name)) for name in self._named()]
        return [f"{FOLDER}{name}: {why}" for name, why in wrong if why is not None]

    def _named(self) -> list[str]:
        entries = self._files.entries("", folders=True)
        return sorted(name.removeprefix(FOLDER) for name in entries if name.startswith(FOLDER))

    def problems(self, study: str) -> list[str]:
        """One line for each file that cannot be used."""
        return self.reading(study).problems

    def _parameters(self, record: TrialRecord) -> dict[str, str]:
        """Declared kinds; without a declaration those that the study's files have, else what the record shows."""
        if record.study in self._declared:
            return self._declared[record.study]
        kept = self._kept_parameters(_folder(record.study)) or {}
        new = {name: parameter_kind([value]) for name, value in record.params.items() if name not in kept}
        check_parameters(kept | new)
        return kept | new

    def _kept_parameters(self, folder: str) -> dict[str, str] | None:
        """Parameters in the study's newest sound file; None when there is none."""
        for name in reversed(self._files.names(f"{folder}/trials")):
            with contextlib.suppress(*READ_ERRORS), self._files.open(f"{folder}/trials", name) as file:
                if not file_problem("trials", file.schema_arrow, self._files.path(folder, "trials", name)):
                    return file_parameters(file.schema_arrow)
        return None

    def _refuse_duplicate(self, folder: str, number: int) -> None:
        """A torn file is no trial: its number may be used again, or a study could never go on after one.

        The folder is listed for the first trial only, and for a number that is there: nobody else writes the study.
        """
        place = f"{folder}/trials"
        if number not in self._numbers.get(place, ()) and place in self._numbers:
            return
        names = self._files.names(place)
        self._numbers[place] = {number_of(name) for name in names}
        for name in names:
            sound = number_of(name) == number and not isinstance(load(self._files, "trials", place, name), str)
            many = self._numbers_in(place, name) if is_compact(name) else set()
            self._numbers[place] |= many
            if sound or number in many:
                raise StoreError(f"{self._files.path(place, name)}: trial {number} is kept already")

    def _numbers_in(self, place: str, name: str) -> set[int]:
        """Trials of a compacted file, which never changes: read once."""
        path = self._files.path(place, name)
        if path not in self._compacted:
            table = load(self._files, "trials", place, name, ["number"])
            self._compacted[path] = set() if isinstance(table, str) else numbers(table, "number")
        return self._compacted[path]

    def _remove_orphans(self, folder: str) -> None:
        """Requests without a trial come from a writer that was killed between the two; the trial is run again."""
        trials = set(self._files.names(f"{folder}/trials"))
        for name in self._files.names(f"{folder}/requests"):
            if number_of(name) >= 0 and name not in trials:
                self._files.remove(f"{folder}/requests", name)


def _folder(study: str) -> str:
    check_study_name(study)
    return f"{FOLDER}{study}"


def _next_name() -> str:
    """Name that sorts in the order of writing."""
    return f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.parquet"
