"""What `raytune-eagle probe` timed: all-reduces by NCCL environment and message size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from raytune_eagle.report.page.chart import Cell, Chart, Column, axis, plain
from raytune_eagle.report.probes import Row, spelled

_MOST_SHOWN = 24
_MOST_TOLD = 5
_LONGEST = 30
_KIB = 1024
_COLUMNS = (
    *map(Column, ("environment", "node")),
    Column("message", "bytes"),
    Column("needed by"),
    Column("median", "µs"),
    Column("95th percentile", "µs"),
    Column("of default", "x"),
    *map(Column, ("NCCL took", "error")),
)


class _Time(NamedTuple):
    """One environment at one size: median over nodes and steps, in µs and over the default's, and who needs it."""

    us: float
    share: float | None
    needed: str


Times = dict[str, dict[int, _Time]]
"""By environment and message size in bytes."""


def all_reduces(rows: Sequence[Row]) -> Chart | None:
    """A map of environments and message sizes; None where nothing was timed. `rows` are in the order of measuring."""
    times = _times(rows)
    if not times:
        return None
    default = spelled(rows[0]["env"])
    order = sorted(times, key=lambda name: (name != default, _over_all(times[name])))
    shown = order if len(order) <= _MOST_SHOWN else [*order[: _MOST_SHOWN // 2], *order[-_MOST_SHOWN // 2 :]]
    return Chart(
        key="probes",
        title="All-reduce by NCCL environment",
        about="Median time of one all-reduce in µs, as raytune-eagle probe took it, without a server. Colour is that "
        f"time over the default's, the first row.{_words(rows, order, shown)}",
        alt="; ".join(f"{name}: {_over_all(times[name]):.2f} times the default's time" for name in order[:_MOST_TOLD]),
        data=[_map(times, shown)],
        layout={
            "xaxis": axis("message", type="category", showgrid=False),
            "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
        },
        columns=_COLUMNS,
        rows=[_cells(row, times) for row in rows],
        height=110 + 24 * len(shown),
        legend=(("@good", "half the default's time"), ("@wash", "the same"), ("@bad", "twice or more")),
        wide=True,
    )


def _times(rows: Sequence[Row]) -> Times:
    found: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        if row["p50_us"]:
            found.setdefault(spelled(row["env"]), {}).setdefault(row["message_bytes"], []).append(row)
    usual = found.get(spelled(rows[0]["env"]), {}) if rows else {}
    bases = {size: _median(several) for size, several in usual.items()}
    return {
        name: {size: _time(several, bases.get(size)) for size, several in sorted(by_size.items())}
        for name, by_size in found.items()
    }


def _time(rows: Sequence[Row], base: float | None) -> _Time:
    needed = dict.fromkeys(_needed(row) for row in rows)
    return _Time(_median(rows), base and _median(rows) / base, ", ".join(needed))


def _median(rows: Sequence[Row]) -> float:
    return float(statistics.median(row["p50_us"] for row in rows))


def _needed(row: Row) -> str:
    return f"{row['step']} of {row['tokens']} token{'s' * (row['tokens'] != 1)}"


def _over_all(times: dict[int, _Time]) -> float:
    """Geometric mean over the sizes; infinite where nothing can be compared."""
    shares = [time.share for time in times.values() if time.share]
    return statistics.geometric_mean(shares) if shares else math.inf


def _words(rows: Sequence[Row], order: Sequence[str], shown: Sequence[str]) -> str:
    """What is not drawn, and what failed."""
    failed = sorted({f"{spelled(row['env'])} ({row['error']})" for row in rows if row["error"]})
    few = "" if len(shown) == len(order) else f" Drawn are the fastest and the slowest of {len(order)}."
    return few + (f" Failed: {'; '.join(failed[:3])}{' …' if len(failed) > 3 else ''}." if failed else "")  # noqa: PLR2004


def _map(times: Times, shown: Sequence[str]) -> dict[str, Any]:
    sizes = sorted({size for found in times.values() for size in found})
    cells = [[times[name].get(size) for size in sizes] for name in shown]
    return {
        "type": "heatmap",
        "x": [_size(size) for size in sizes],
        "y": [plain(_short(name)) for name in shown],
        "z": [[math.log2(cell.share) if cell and cell.share else None for cell in row] for row in cells],
        "text": [[f"{cell.us:.3g}" if cell else "" for cell in row] for row in cells],
        "customdata": [[_hover(name, cell) for cell in row] for name, row in zip(shown, cells, strict=True)],
        "zmin": -1,
        "zmax": 1,
        "colorscale": [[0, "@good"], [0.5, "@wash"], [1, "@bad"]],
        "showscale": False,
        "texttemplate": "%{text}",
        "hovertemplate": "%{customdata}<extra></extra>",
        "hoverongaps": False,
        "xgap": 2,
        "ygap": 2,
    }


def _hover(name: str, cell: _Time | None) -> str:
    if cell is None:
        return ""
    share = f", {cell.share:.2f}x the default's" if cell.share else ""
    return f"{plain(name)}<br>{plain(cell.needed)}<br>{cell.us:.4g} µs{share}"


def _size(size: int) -> str:
    if size < _KIB:
        return f"{size} B"
    return f"{size / _KIB:.3g} KiB" if size < _KIB**2 else f"{size / _KIB**2:.3g} MiB"


def _short(name: str) -> str:
    """Without what all variables share, as long as fits beside an axis."""
    words = name.replace("NCCL_", "")
    return words if len(words) <= _LONGEST else f"{words[: _LONGEST - 1]}…"


def _cells(row: Row, times: Times) -> tuple[Cell, ...]:
    size, took = row["message_bytes"], row["p50_us"]
    found = times.get(spelled(row["env"]), {}).get(size)
    base = found.us / found.share if found and found.share else None
    share = took / base if took and base else None
    names = (spelled(row["env"]), row["node"], size, _needed(row))
    return (*names, took, row["p95_us"], share, row["chosen"], row["error"])
