"""SQL over all studies: read-only views ``trials``, ``requests``, ``events`` and ``probes``.

The files are handed to DuckDB as Arrow datasets, and its own ways to files, network and extensions are shut before it
sees a statement: what a query can reach are the views.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from raytune_eagle.errors import SpecError, StoreError
from raytune_eagle.schema import TABLES, file_problem, table_schema
from raytune_eagle.store.files import READ_ERRORS, Files, LocalFiles, open_files

_ALLOWED = {"SELECT", "EXPLAIN", "MULTI"}  # MULTI: PIVOT, which first asks which columns there will be
_SHUT = (
    "set temp_directory = ''",
    "set autoinstall_known_extensions = false",
    "set autoload_known_extensions = false",
    "set python_enable_replacements = false",  # or a query could name the variables of this program
    "set enable_external_access = false",
    "set lock_configuration = true",
)
_UNKNOWN_COLUMN = re.compile(r'Referenced column "(.+?)" not found|does not have a column named "(.+?)"')
_STREAM = re.compile(r"stream registered as|^(?!Binder).*arrow_scan")  # DuckDB 2 and 1: an Arrow dataset broke off
_MOST_LOOKS = 5  # at a folder that is compacted under the eyes
_READERS = 16  # at once from a remote filesystem, where opening a file is waiting
_REPEATED = {"study", "kind", "node", "status", "failure_class", "prompt_id", "category", "name", "step"}
"""Texts that come again and again: as dictionaries they are neither built nor compared row by row."""
_FORMATS = {
    table: ds.ParquetFileFormat(
        read_options=ds.ParquetReadOptions(dictionary_columns=_REPEATED & {column.name for column in columns}),
        default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True),
    )
    for table, columns in TABLES.items()
}


class _MovedError(StoreError):
    """Files that had been listed were replaced by a compacted one before they were read."""


class _Found(NamedTuple):
    fragment: ds.Fragment | None
    problem: str | None


class Query:
    """Queries over one results folder or URI.

    Attributes:
        warnings: after `run` or `schema`: one line per file that was passed over as torn or foreign.
    """

    def __init__(self, results: str) -> None:
        self._files = open_files(results)
        self.warnings: list[str] = []

    def studies(self) -> list[str]:
        """Names of all studies, in order."""
        return sorted(name.removeprefix("study=") for name in self._folders())

    def _folders(self) -> list[str]:
        return [name for name in self._files.entries("", folders=True) if name.startswith("study=")]

    def run(self, sql: str) -> pa.Table:
        """Answer one reading statement (SELECT, WITH, FROM, DESCRIBE, SHOW, SUMMARIZE, PIVOT, EXPLAIN).

        Raises:
            SpecError: the statement is not one of those, or DuckDB refuses it; one line that says why.
            StoreError: files cannot be read, or come from a newer version.
        """
        _check(sql)
        for _ in range(_MOST_LOOKS - 1):
            with contextlib.suppress(_MovedError):
                return self._run(sql)
        return self._run(sql)

    def _run(self, sql: str) -> pa.Table:
        self.warnings = []
        datasets = {name: self._dataset(name) for name in _meant(sql)}
        with _database(os.getpid()).cursor() as connection:
            for name, dataset in datasets.items():
                connection.register(name, dataset)
            try:
                return _answer(connection, sql)
            except (*READ_ERRORS, duckdb.Error) as error:
                if isinstance(error, READ_ERRORS) or _STREAM.search(str(error)):
                    self._look_for_moved(datasets.values())
                    raise StoreError(_rotten(datasets.values()) or " ".join(str(error).split())) from error
                names = {column for dataset in datasets.values() for column in dataset.schema.names}
                raise _explained(error, names) from error

    def _look_for_moved(self, datasets: Iterable[ds.Dataset]) -> None:
        """Raise `_MovedError` when files that were there are not, as after `results compact`."""
        paths = [fragment.path for dataset in datasets for fragment in dataset.get_fragments() if fragment.path]
        if any(info.type == fs.FileType.NotFound for info in self._files.filesystem.get_file_info(paths)):
            raise _MovedError("files went away while they were read; ask again")

    def schema(self) -> pa.Table:
        """Every column of every view: view, column, type, unit, meaning; searched parameters of all studies too."""
        self.warnings = []
        rows = []
        for view, columns in TABLES.items():
            known = {column.name: column for column in columns}
            for field in self._dataset(view).schema:
                column = known.get(field.name)
                unit, meaning = (column.unit, column.meaning) if column else ("", "searched parameter")
                names = {"view": view, "column": field.name, "type": str(column.type if column else field.type)}
                rows.append(names | {"unit": unit, "meaning": meaning})
        return pa.Table.from_pylist(rows)

    def _dataset(self, table: str) -> ds.Dataset:
        """All sound files of a table."""
        found = self._open_all(table)
        self.warnings += [one.problem for one in found if one.problem]
        fragments = [one.fragment for one in found if one.fragment is not None]
        schema = _unified(table, [fragment.physical_schema for fragment in fragments])
        if not fragments:
            return ds.dataset(schema.empty_table())
        return ds.FileSystemDataset(fragments, schema=schema, format=_FORMATS[table], filesystem=self._files.filesystem)

    def _open_all(self, table: str) -> list[_Found]:
        places = [
            (f"{study}/{table}", name) for study in self._folders() for name in self._files.names(f"{study}/{table}")
        ]
        if isinstance(self._files, LocalFiles):
            return [_open(self._files, table, *place) for place in places]
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(lambda place: _open(self._files, table, *place), places))


@functools.cache
def _database(process: int) -> duckdb.DuckDBPyConnection:
    """One for all queries of a process, empty and shut: its start takes longer than most answers do.

    What a query registers is its own cursor's. A forked process has a database of its own, `process` being its id: the
    threads of its parent's did not come along.
    """
    del process
    connection = duckdb.connect()
    for setting in _SHUT:
        connection.execute(setting)
    return connection


def _meant(sql: str) -> list[str]:
    """Views that a statement could mean: those that it names, or all of them (SHOW TABLES)."""
    words = set(re.findall(r"\w+", sql.lower()))
    return [name for name in TABLES if name in words] or list(TABLES)


def _open(files: Files, table: str, folder: str, name: str) -> _Found:
    """Read the end of a file; the fragment remembers it, so that the query need not read it again."""
    path = files.path(folder, name)
    try:
        files.check(path)
        fragment = _FORMATS[table].make_fragment(path, files.filesystem)
        problem = file_problem(table, fragment.physical_schema, path)
        return _Found(None if problem else fragment, problem)
    except FileNotFoundError as error:
        if name in files.names(folder):  # a link that leads nowhere
            return _Found(None, f"{path}: torn or unreadable: {error}")
        raise _MovedError(f"{path}: went away while it was read; ask again") from error
    except READ_ERRORS as error:
        return _Found(None, f"{path}: torn or unreadable: {' '.join(str(error).split())[:200]}")


def _unified(table: str, schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Fixed columns, and the parameters of all studies; one that they type differently is a number or else text."""
    types: dict[str, pa.DataType] = {field.name: _read_as(field) for field in table_schema(table)}
    fixed = set(types)
    for place, schema in enumerate(schemas):
        if place and schema.equals(schemas[place - 1]):
            continue  # as nearly all are: those of one study
        for field in schema:
            if field.name not in fixed:
                types[field.name] = _wider(types.get(field.name, field.type), field.type)
    return pa.schema(sorted(types.items(), key=lambda item: item[0] not in fixed))


def _read_as(field: pa.Field) -> pa.DataType:
    return pa.dictionary(pa.int32(), field.type) if field.name in _REPEATED else field.type


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    if one == other:
        return one
    return pa.float64() if {one, other} == {pa.int64(), pa.float64()} else pa.string()


def _check(sql: str) -> None:
    """Let pass one statement that reads."""
    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as error:
        raise _explained(error, set()) from error
    if len(statements) != 1:
        raise SpecError(f"query: one statement is wanted, not {len(statements)}")
    kind = statements[0].type.name
    if kind not in _ALLOWED:
        raise SpecError(f"query: {kind} is not for reading; use SELECT, WITH, DESCRIBE, SHOW, SUMMARIZE or PIVOT")


def _answer(connection: duckdb.DuckDBPyConnection, sql: str) -> pa.Table:
    """In a thread of its own: within DuckDB no signal is heard, so that Ctrl-C would wait for the answer."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(_answer_here, connection, sql)
        try:
            return asked.result()
        except KeyboardInterrupt:
            connection.interrupt()
            raise


def _answer_here(connection: duckdb.DuckDBPyConnection, sql: str) -> pa.Table:
    answer = connection.sql(sql)
    if answer is None:
        raise SpecError("query: the statement gives no rows")
    table: pa.Table = answer.to_arrow_table()
    return table.rename_columns(_told_apart(table.column_names))


def _told_apart(names: Sequence[str]) -> list[str]:
    """As DuckDB names them where a table has columns of one name: ``a``, ``a_1``; JSON and pandas would lose one."""
    taken, found = set(names), list[str]()
    for name in names:
        numbered = (f"{name}_{count}" for count in itertools.count(1))
        found.append(name if name not in found else next(each for each in numbered if each not in taken))
        taken.add(found[-1])
    return found


def _rotten(datasets: Iterable[ds.Dataset]) -> str | None:
    """Name the file whose end is sound, so that it was let in, and whose middle is not."""
    for fragment in (fragment for dataset in datasets for fragment in dataset.get_fragments()):
        try:
            fragment.to_table()
        except READ_ERRORS as error:
            return f"{fragment.path}: unreadable: {' '.join(str(error).split())}"
    return None


def _explained(error: Exception, columns: set[str]) -> SpecError:
    """One line for people; for an unknown column with those that it may have meant."""
    text = str(error)
    unknown = _UNKNOWN_COLUMN.search(text)
    if unknown:
        name = unknown[1] or unknown[2]
        close = difflib.get_close_matches(name.lower(), sorted(columns), n=3, cutoff=0.5)
        hint = (
            f"did you mean {', '.join(close)}?" if close else "DESCRIBE trials lists them; a text is in single quotes"
        )
        return SpecError(f"query: no column {name!r}; {hint}")
    line = " ".join(text.split("\n\nLINE ", maxsplit=1)[0].split())
    if "Table with name" in line:
        line = f"{line.split('!')[0]}; there are {', '.join(TABLES)}"
    return SpecError(f"query: {line}")
