"""Whole tables of a study: many files at once, one file in the place of many.

A compacted file holds the rows of many trials (``compact-FIRST-LAST.parquet``); everything else is as in the files
that it replaces, so that a reader without this package sees no difference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from raytune_eagle.errors import StoreError
from raytune_eagle.schema import file_parameters, file_problem, table_schema
from raytune_eagle.store.files import READ_ERRORS, Files, LocalFiles
from raytune_eagle.store.rows import Row

TABLE_NAMES = ("requests", "trials", "events", "probes")
"""In the order in which they are compacted."""
_COMPACT = re.compile(r"compact-\d+-\d+\.parquet")
_NUMBER = {"trials": "number", "requests": "trial"}
_READERS = min(4, os.cpu_count() or 1)  # decoding takes a core each
_REMOTE_READERS = 16  # opening a file there is waiting


class Compacted(NamedTuple):
    """What compacting one table did."""

    table: str
    files: int
    rows: int


def is_compact(name: str) -> bool:
    """Whether a file holds many trials."""
    return _COMPACT.fullmatch(name) is not None


def load(files: Files, table: str, folder: str, name: str, columns: list[str] | None = None) -> pa.Table | str:
    """Rows of a file (`columns` that it has not are passed over), or the line that says why it has none."""
    path = files.path(folder, name)
    try:
        with files.open(folder, name) as file:
            return file_problem(table, file.schema_arrow, path) or file.read(columns=columns, use_threads=False)
    except READ_ERRORS as error:
        return f"{path}: torn or unreadable: {' '.join(str(error).split())[:200]}"


def load_all(
    files: Files, table: str, folder: str, names: Sequence[str], columns: list[str] | None = None
) -> Iterator[tuple[str, pa.Table | str]]:
    """Load many files, several at once; in the order given."""
    workers = _READERS if isinstance(files, LocalFiles) else _REMOTE_READERS
    with ThreadPoolExecutor(workers) as pool:
        yield from zip(names, pool.map(lambda name: load(files, table, folder, name, columns), names), strict=True)


def rows_by_trial(table: pa.Table, column: str, wanted: Sequence[int] | None = None) -> dict[int, list[Row]]:
    """Rows of each trial, or of those wanted, in order."""
    if wanted is not None:
        table = table.filter(pc.is_in(table[column], value_set=pa.array(wanted, pa.int64())))
    groups: dict[int, list[Row]] = {}
    for row in table.to_pylist():
        groups.setdefault(row[column], []).append(row)
    return groups


def numbers(table: pa.Table, column: str) -> set[int]:
    """Trials that a table has rows of."""
    return {int(value) for value in table[column].to_numpy()}


def compact_study(files: Files, folder: str) -> list[Compacted]:
    """Put one file in the place of the many in each table of a study; nobody else may write it meanwhile.

    Torn files and whatever else lies in the folders is kept beside it as it is. The change is one exchange of two
    folders: a reader finds all the old files or the new one. One that had listed the old ones and not opened them yet
    has to list again.

    Raises:
        StoreError: on a remote filesystem, or one that cannot exchange folders; nothing was changed then.
    """
    if not isinstance(files, LocalFiles):
        raise StoreError(f"{files.path(folder)}: only local folders can be compacted: elsewhere no change is atomic")
    done = [_compact(files, folder, table) for table in TABLE_NAMES]
    return [each for each in done if each is not None]


def _compact(files: LocalFiles, folder: str, table: str) -> Compacted | None:
    place = f"{folder}/{table}"
    loaded = list(load_all(files, table, place, files.names(place)))
    sound = [(name, found) for name, found in loaded if not isinstance(found, str)]
    if len(sound) <= 1:
        return None
    whole = _together(table, [found for _, found in sound])
    replaced = {name for name, _ in sound}
    with files.replacing(folder, table, keep=files.others(place, replaced)) as new:
        files.write_table(new, _name(table, whole, sorted(replaced)), whole)
    return Compacted(table, len(sound), whole.num_rows)


def _together(table: str, parts: Sequence[pa.Table]) -> pa.Table:
    parameters: dict[str, str] = {}
    for part in parts:
        parameters |= file_parameters(part.schema)
    schema = table_schema(table, parameters)
    try:
        whole = pa.concat_tables(parts, promote_options="default")
        for field in schema:
            if field.name not in whole.column_names:  # all files are older than it
                whole = whole.append_column(field, pa.nulls(whole.num_rows, field.type))
        whole = whole.select(schema.names).cast(schema)
    except (pa.ArrowException, KeyError) as error:
        raise StoreError(f"files of {table} that disagree on a column cannot be compacted: {error}") from error
    key = _NUMBER.get(table)
    if key is None:
        return whole
    return whole.take(np.argsort(whole[key].to_numpy(), kind="stable"))  # requests keep their order


def _name(table: str, whole: pa.Table, names: Sequence[str]) -> str:
    key = _NUMBER.get(table)
    if key is None:  # events and probes sort by the time of their writing
        return max(names)
    bounds: Any = pc.min_max(whole[key]).as_py()
    return f"compact-{bounds['min']:05d}-{bounds['max']:05d}.parquet"
