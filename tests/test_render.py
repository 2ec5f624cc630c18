"""How tables of results are spelled: for people and for programs."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytune_eagle.errors import SpecError
from raytune_eagle.report.query import Query
from raytune_eagle.report.render import render

TABLE = pa.table(
    {
        "text": ['a,"b"\n', None],
        "number": [1.5, float("nan")],
        "yes": [True, None],
        "sum": pa.array([Decimal(3), None], pa.decimal128(38, 0)),
        "list": [[1, 2], None],
        "map": pa.array([[("k", "v")], None], pa.map_(pa.string(), pa.string())),
        "at": pa.array([dt.datetime(2026, 1, 2, tzinfo=dt.UTC), None], pa.timestamp("us", "UTC")),
    }
)


def test_json_is_parsed_back():
    """JSON holds every value in its own kind, and null for what it cannot spell."""
    first, second = json.loads(render(TABLE, "json"))
    assert list(first.values()) == ['a,"b"\n', 1.5, True, 3, [1, 2], {"k": "v"}, "2026-01-02T00:00:00Z"]
    assert set(second.values()) == {None}


def test_csv_is_parsed_back():
    """CSV quotes what it must; lists and maps are JSON, null is empty."""
    found = list(csv.reader(io.StringIO(render(TABLE, "csv").decode())))
    assert found[0] == TABLE.column_names
    assert found[1] == ['a,"b"\n', "1.5", "true", "3", "[1, 2]", '{"k": "v"}', "2026-01-02T00:00:00Z"]
    assert found[2] == [""] * 7


def test_parquet_is_parsed_back():
    """Parquet gives the same table again."""
    assert pq.read_table(pa.BufferReader(render(TABLE, "parquet"))).schema == TABLE.schema


def test_a_long_value_is_cut_in_a_table_alone():
    """A table is for the eye: a value of thousands of characters is cut and says how long it is; json has all of it."""
    table = pa.table({"log": ["x" * 9000], "number": [1]})
    text = render(table, "table", 100).decode()
    assert len(text) < 2000
    assert "(9,000 characters" in " ".join(text.split())
    assert json.loads(render(table, "json"))[0]["log"] == "x" * 9000


def test_an_empty_answer_is_said():
    """A table without rows says so instead of showing nothing."""
    assert b"no rows" in render(TABLE.slice(0, 0), "table", 80)
    assert b"no rows" in render(TABLE.slice(0, 0), "table", 20)


def test_an_unknown_format_is_refused():
    """The formats are named when another is asked for."""
    with pytest.raises(SpecError, match="'xml' is not one of table, csv, json, parquet"):
        render(TABLE, "xml")


@pytest.mark.parametrize(
    ("sql", "names"),
    [
        ("select 1 as a, 2 as a, 3 as a", ["a", "a_1", "a_2"]),
        ("select 1 as a, 2 as a_1, 3 as a", ["a", "a_1", "a_2"]),
        ("select t.x, u.x from (select 1 as x) t, (select 2 as x) u", ["x", "x_1"]),
    ],
)
def test_columns_of_one_name_are_all_kept(tmp_path, sql, names):
    """Each has a name of its own, as in a table that DuckDB makes of it, so that no form of the answer loses one."""
    found = Query(str(tmp_path)).run(sql)
    assert list(json.loads(render(found, "json"))[0].items()) == list(zip(names, range(1, 4), strict=False))
    assert render(found, "csv").decode().splitlines()[0] == ",".join(names)
