"""The records as pandas frames, for notebooks."""

from __future__ import annotations

import pandas as pd

from raytune_eagle.errors import SpecError
from raytune_eagle.report.query import Query
from raytune_eagle.schema import TABLES
from raytune_eagle.store import ParquetStore

_ORDER = {
    "trials": "number, concurrency",
    "requests": "trial, concurrency, started_s",
    "events": "happened_unix_s",
    "probes": "measured_unix_s",
}


def load(results: str = "results", study: str | None = None, table: str = "trials") -> pd.DataFrame:
    """All rows of a table.

    Args:
        results: folder, or any `pyarrow.fs` URI.
        study: only this one; None is all of them, with the searched parameters of each.
        table: ``trials``, ``requests``, ``events`` or ``probes``; results/README.md has every column with its unit.

    Returns:
        One row per row of the files, in the order of study and number; maps are dictionaries, null is NaN or None.
        Empty, with its columns, where there is nothing.

    Raises:
        SpecError: `table` is none of them, there are studies and none has this name, or its folder was renamed.
        StoreError: a file cannot be read.
    """
    if table not in TABLES:
        raise SpecError(f"table: {table!r} is not one of {', '.join(TABLES)}")
    asked = Query(results)
    known = asked.studies()
    if study is not None and known and study not in known:
        raise SpecError(f"no study {study!r} under {results}; there are: {', '.join(known)}")
    chosen = "" if study is None else "where study = '{}'".format(study.replace("'", "''"))
    sql = f"select * from {table} {chosen} order by study, {_ORDER[table]}"  # noqa: S608 - the names are checked
    frame: pd.DataFrame = asked.run(sql).to_pandas(maps_as_pydicts="strict")
    if study is not None and frame.empty:
        _refuse_renamed(results, study)
    return frame


def _refuse_renamed(results: str, study: str) -> None:
    """Raise `SpecError` where records of another study stand in this one's folder: no row has its name."""
    others = {record.study for record in ParquetStore(results).reading(study, brief=True).records} - {study}
    if others:
        raise SpecError(
            f"study={study} under {results} holds records of study {min(others)!r}: give it that name again"
        )
