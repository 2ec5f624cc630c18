"""What a chart is to a page: a figure for Plotly, the words that describe it, and the table behind it.

Texts that come from records are escaped here, once, for Plotly, which takes some HTML in any text for markup. Colours
are names that the page resolves for its theme (``@accent``).
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Column:
    """A column of a table; `of_launch` holds numbers of launches that are shown with their names."""

    name: str
    unit: str = ""
    of_launch: bool = False


@dataclass(frozen=True)
class Chart:
    """One figure.

    Attributes:
        key: unique on the page, letters and dashes.
        about: how to read it, one or two sentences shown above it.
        alt: what it shows, in words, for who does not see it.
        data, layout: of Plotly; trace key ``launches`` (numbers) stands for their names as `text`.
        columns, rows: the table behind it.
        height: pixels.
        legend: colours and what they mean, where Plotly has no legend for it.
        wide: over the whole width of the page.
    """

    key: str
    title: str
    about: str
    alt: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    height: int = 380
    legend: Sequence[tuple[str, str]] = ()
    wide: bool = False

    def payload(self) -> dict[str, Any]:
        """What its script needs, as plain JSON values."""
        columns = [[c.name, c.unit, c.of_launch] for c in self.columns]
        rows = [[short(cell) for cell in row] for row in self.rows]
        return {"data": short(self.data), "layout": short(self.layout), "columns": columns, "rows": rows}


def plain(text: str) -> str:
    """A text that Plotly shows as it is."""
    return html.escape(text, quote=False)


def short(value: Any) -> Any:
    """Plain JSON with five figures a number, which is more than any was measured to."""
    kind = type(value)  # of hundreds of thousands: exact types are quicker to tell apart
    if kind is float:
        return float(f"{value:.5g}") if value - value == 0 else None  # no NaN, no infinity
    if kind is str or kind is int or value is None:
        return value
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [short(item) for item in value]
    return short(float(value)) if isinstance(value, float) else value


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with its title."""
    return {"title": {"text": title}, **more}


Trace = dict[str, Any]
RAMP = [[0, "@ramp0"], [0.5, "@ramp1"], [1, "@ramp2"]]
"""Colours from little to much."""


def scale(title: str) -> Trace:
    """The legend of a ramp."""
    return {"title": {"text": title}, "thickness": 12, "outlinewidth": 0}


def dots(name: str, x: Sequence[Any], y: Sequence[Any], marker: Trace, hover: str, **more: Any) -> Trace:
    """Points; `hover` is in Plotly's template language."""
    points = {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "marker": {"size": 8, **marker}}
    return {**points, "hovertemplate": f"{hover}<extra></extra>", **more}


def bars(name: str, names: Sequence[str], values: Sequence[float], colour: str, hover: str, **more: Any) -> Trace:
    """Upright bars; names are taken as they are."""
    trace = {"type": "bar", "name": plain(name), "x": [plain(each) for each in names], "y": values}
    return {**trace, "marker": {"color": colour}, "hovertemplate": f"{hover}<extra></extra>", **more}


def lying(names: Sequence[str], values: Sequence[float], colour: str, digits: str, **more: Any) -> Trace:
    """Bars that lie, with their values on them."""
    trace = {"type": "bar", "orientation": "h", "x": values, "y": [plain(each) for each in names]}
    texts = {"texttemplate": f"%{{x:{digits}}}", "hovertemplate": f"%{{y}}: %{{x:{digits}}}<extra></extra>"}
    return {**trace, "marker": {"color": colour}, "textposition": "auto", **texts, **more}


def height(rows: int) -> int:
    """Pixels that so many lying bars need."""
    return 110 + 34 * rows
