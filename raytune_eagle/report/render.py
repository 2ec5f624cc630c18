"""A table of results as bytes: for people (``table``) or for programs (``csv``, ``json``, ``parquet``)."""

from __future__ import annotations

import csv
import datetime as dt
import decimal
import io
import json
import math
import shutil
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raytune_eagle.errors import SpecError

_PLAIN = (1e-3, 1e7)  # sizes that are shown without an exponent
_LONGEST = 600  # characters of one value: a table is for the eye, the other formats have all
_NARROWEST = 7  # characters per column below which rows are shown one under the other


def render(table: pa.Table, form: str = "table", width: int | None = None) -> bytes:
    """Spell a table in one of `FORMS`; `width` is of the terminal, asked from it when None."""
    if form not in FORMS:
        raise SpecError(f"--format: {form!r} is not one of {', '.join(FORMS)}")
    return FORMS[form](table, width)


def _parquet(table: pa.Table, width: int | None) -> bytes:
    del width
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


def _json(table: pa.Table, width: int | None) -> bytes:
    """One array, one object a line; what JSON has no word for (NaN, infinity) is null."""
    del width
    lines = [json.dumps(dict(zip(table.column_names, row, strict=True)), ensure_ascii=False) for row in _rows(table)]
    return ("[" + ",\n".join(lines) + "]\n").encode()


def _csv(table: pa.Table, width: int | None) -> bytes:
    """Header and rows; null is empty, lists and maps are JSON."""
    del width
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.column_names)
    writer.writerows([_word(value) for value in row] for row in _rows(table))
    return text.getvalue().encode()


def _word(value: object) -> object:
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False)
    return value


def _rows(table: pa.Table) -> list[tuple[Any, ...]]:
    """Rows of plain JSON values."""
    columns = [[_plain(value, column.type) for value in column.to_pylist()] for column in table.columns]
    return list(zip(*columns, strict=True))


def _plain(value: Any, kind: pa.DataType) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, decimal.Decimal):  # what DuckDB sums integers into
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dt.datetime):
        return value.isoformat().replace("+00:00", "Z")
    return _nested(value, kind)


def _nested(value: Any, kind: pa.DataType) -> Any:
    if pa.types.is_map(kind):
        return {str(key): _plain(item, kind.item_type) for key, item in value}
    if isinstance(value, list):
        return [_plain(item, kind.field(0).type) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item, kind.field(name).type) for name, item in value.items()}
    return str(value)


def _table(table: pa.Table, width: int | None) -> bytes:
    """A box as wide as the terminal at most; with too many columns for that, each row as a list of its values."""
    wide = width or shutil.get_terminal_size((120, 24)).columns
    text = io.StringIO()
    console = Console(file=text, width=wide, force_terminal=False, color_system=None, legacy_windows=False)
    if table.num_columns * _NARROWEST > wide:
        _print_tall(console, table)
    else:
        console.print(_boxed(table))
    return ("\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n").encode()


def _boxed(table: pa.Table) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, caption=None if table.num_rows else "no rows")
    for name, kind in zip(table.column_names, table.schema.types, strict=True):
        number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
        shown.add_column(Text(name), justify="right" if number else "left", overflow="fold")
    for row in _rows(table):
        shown.add_row(*[Text(_shown(value)) for value in row])
    return shown


def _print_tall(console: Console, table: pa.Table) -> None:
    for place, row in enumerate(_rows(table)):
        shown = Table(box=None, show_header=False, title=f"row {place + 1}", title_justify="left", pad_edge=False)
        shown.add_column(overflow="fold")
        shown.add_column(overflow="fold")
        for name, value in zip(table.column_names, row, strict=True):
            shown.add_row(Text(name), Text(_shown(value)))
        console.print(shown)
    if not table.num_rows:
        console.print("no rows")


def _shown(value: object) -> str:
    """Short for the eye: four figures after the point at most, long texts cut; null is a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        readable = _PLAIN[0] <= abs(value) < _PLAIN[1] or not value
        return f"{value:.4f}".rstrip("0").rstrip(".") if readable else f"{value:.4g}"
    text = str(_word(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters; --format json has all)"


FORMS: dict[str, Callable[[pa.Table, int | None], bytes]] = {
    "table": _table,
    "csv": _csv,
    "json": _json,
    "parquet": _parquet,
}
