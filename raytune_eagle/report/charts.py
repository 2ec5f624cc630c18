"""Charts of what the launches of a study gave, one concurrency at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from raytune_eagle.model import Measurement, Request, TrialRecord
from raytune_eagle.report.best import Row, label
from raytune_eagle.report.chart import Chart, Column, axis, plain
from raytune_eagle.report.facts import Facts, Standing, measurements
from raytune_eagle.report.influence import cycle_parts, importances
from raytune_eagle.statistics import by_category

_MOST_BARS = 15
_LAUNCH = Column("launch", of_launch=True)
_TOK_S = "tok/s"


def charts(facts: Facts, standing: Standing) -> list[Chart]:
    """All charts of one concurrency; those that have nothing to show are left out."""
    level = standing.concurrency
    found = [
        ranking(standing),
        progress(facts, level),
        trade(facts, level),
        *steps_maps(facts, level),
        importance(facts, level),
        cycle(facts, standing),
        categories(facts, standing),
        nodes(facts, level),
    ]
    return [chart for chart in found if chart is not None]


def _of(record: TrialRecord, level: int) -> Measurement | None:
    return next((figures for figures in measurements(record) if figures.concurrency == level), None)


def _pairs(
    facts: Facts, level: int, kinds: Sequence[str] = ("trial", "confirm")
) -> Iterator[tuple[TrialRecord, Measurement]]:
    for record in facts.records:
        if record.kind in kinds and (figures := _of(record, level)):
            yield record, figures


def ranking(standing: Standing) -> Chart | None:
    """The fastest configurations with their intervals, and plain decoding."""
    measured = [row for row in standing.rows if row.throughput is not None]
    fastest = measured[:_MOST_BARS]
    fastest += [row for row in measured[_MOST_BARS:] if row.kind == "baseline"][:1]
    if not fastest:
        return None
    groups = {
        "searched": ("@accent", [row for row in fastest if row.kind != "baseline" and row.status == "completed"]),
        "breaks a constraint": ("@warn", [row for row in fastest if row.status == "infeasible"]),
        "plain decoding": ("@plain", [row for row in fastest if row.kind == "baseline"]),
    }
    order = [_bar_name(row) for row in fastest]
    return Chart(
        key="ranking",
        title="Fastest configurations",
        about="Throughput with its 95 % interval, all launches of a configuration together. Overlapping intervals: no difference is shown.",
        alt=f"{label(fastest[0].config)} leads with {fastest[0].throughput:.5g} tok/s; {len(fastest)} configurations shown.",
        data=[_dots(name, colour, rows) for name, (colour, rows) in groups.items() if rows],
        layout={
            "xaxis": axis("output throughput, tok/s", rangemode="normal"),
            "yaxis": {"autorange": "reversed", "categoryorder": "array", "categoryarray": order, "automargin": True},
            "showlegend": True,
        },
        columns=[
            Column("configuration"),
            Column("status"),
            Column("launches"),
            Column("throughput", _TOK_S),
            Column("low", _TOK_S),
            Column("high", _TOK_S),
            Column("accept_len", "tokens"),
            Column("speedup", "x"),
        ],
        rows=[
            (
                _row_name(r),
                r.status,
                ", ".join(map(str, r.numbers[:9])),
                r.throughput,
                r.ci_low,
                r.ci_high,
                r.accept_len,
                r.speedup,
            )
            for r in measured
        ],
        height=110 + 26 * len(fastest),
    )


def _row_name(row: Row) -> str:
    return " ".join([label(row.config), *(f"{name}={value}" for name, value in row.config.env.items())])


def _bar_name(row: Row) -> str:
    """Unique by the number of its first launch, short enough to stand beside an axis."""
    name = _row_name(row)
    return plain(f"{name if len(name) <= 34 else name[:33] + '…'}  #{row.numbers[0]}")  # noqa: PLR2004


def _dots(name: str, colour: str, rows: Sequence[Row]) -> dict[str, object]:
    values = [(row.throughput or 0.0, row.ci_low or 0.0, row.ci_high or 0.0) for row in rows]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [value for value, _, _ in values],
        "y": [_bar_name(row) for row in rows],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - value for value, _, high in values],
            "arrayminus": [value - low for value, low, _ in values],
            "color": colour,
            "thickness": 2,
            "width": 0,
        },
        "marker": {"color": colour, "size": 10},
        "hovertemplate": "%{y}<br>%{x:.5g} tok/s<extra></extra>",
    }


def progress(facts: Facts, level: int) -> Chart:
    """Throughput of each launch in order, the best so far, plain decoding, and failures."""
    found = list(_pairs(facts, level))
    best, line = 0.0, []
    for record, figures in found:
        best = max(best, figures.output_throughput if record.status == "completed" else 0.0)
        line.append(best)
    plain_ = list(_pairs(facts, level, ("baseline",)))
    failed = [record.number for record in facts.failed]
    return Chart(
        key="progress",
        title="Best so far",
        about="Every launch in the order of its number; the line is the fastest until then, crosses are launches that failed.",
        alt=f"After {len(found)} measured launches the best is {best:.5g} tok/s; {len(failed)} failed.",
        data=[
            _launches("launch", "@accent", found, symbol="circle", opacity=0.55),
            {
                "type": "scatter",
                "mode": "lines",
                "name": "best so far",
                "x": [r.number for r, _ in found],
                "y": line,
                "line": {"color": "@accent", "width": 3, "shape": "hv"},
                "hovertemplate": "best so far: %{y:.5g} tok/s<extra></extra>",
            },
            _launches("plain decoding", "@plain", plain_, symbol="diamond"),
            {
                "type": "scatter",
                "mode": "markers",
                "name": "failed",
                "x": failed,
                "y": [0] * len(failed),
                "launches": failed,
                "marker": {"color": "@bad", "symbol": "x", "size": 8},
                "hovertemplate": "#%{x} %{text}: failed<extra></extra>",
                "cliponaxis": False,
            },
        ],
        layout={
            "xaxis": axis("launch", rangemode="tozero"),
            "yaxis": axis("output throughput, tok/s", rangemode="tozero"),
            "showlegend": True,
        },
        columns=[
            Column("launch"),
            Column("configuration", of_launch=True),
            Column("kind"),
            Column("status"),
            Column("throughput", _TOK_S),
            Column("failure"),
        ],
        rows=[_progress_row(record, level) for record in facts.records],
    )


def _progress_row(record: TrialRecord, level: int) -> tuple[str | int | float | None, ...]:
    figures = _of(record, level)
    failure = getattr(record.outcome, "failure_class", None)
    return record.number, record.number, record.kind, record.status, figures and figures.output_throughput, failure


def _launches(
    name: str, colour: str, found: Sequence[tuple[TrialRecord, Measurement]], **marker: object
) -> dict[str, object]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [record.number for record, _ in found],
        "y": [figures.output_throughput for _, figures in found],
        "launches": [record.number for record, _ in found],
        "marker": {"color": colour, "size": 7, **marker},
        "hovertemplate": "#%{x} %{text}<br>%{y:.5g} tok/s<extra></extra>",
    }


def trade(facts: Facts, level: int) -> Chart | None:
    """accept_len against cycle time: what a long tree wins and what it costs."""
    found = [(record, figures) for record, figures in _pairs(facts, level) if figures.accept_len]
    if not found:
        return None
    cycles, lengths = [f.cycle_ms for _, f in found], [f.accept_len or 0.0 for _, f in found]
    base = [f.cycle_ms for _, f in _pairs(facts, level, ("baseline",))]
    most = max([*cycles, *base]) * 1.08
    return Chart(
        key="trade",
        title="Accepted length against cycle time",
        about="Up is more tokens per verify round, left is quicker rounds. Along a dotted line throughput is the same; what counts is to lie above the line of plain decoding.",
        alt=f"{len(found)} launches; accept_len from {min(lengths):.3g} to {max(lengths):.3g} tokens, cycle from {min(cycles):.4g} to {max(cycles):.4g} ms.",
        data=[
            *_iso_lines(most, max(lengths) * 1.1, level, [f.output_throughput for _, f in found]),
            {
                "type": "scatter",
                "mode": "markers",
                "name": "launch",
                "x": cycles,
                "y": lengths,
                "launches": [r.number for r, _ in found],
                "customdata": [f.output_throughput for _, f in found],
                "marker": {
                    "color": [f.output_throughput for _, f in found],
                    "colorscale": [[0, "@ramp0"], [0.5, "@ramp1"], [1, "@ramp2"]],
                    "size": 9,
                    "line": {"color": "@surface", "width": 1},
                    "showscale": True,
                    "colorbar": {"title": {"text": "tok/s"}, "thickness": 12, "outlinewidth": 0},
                },
                "hovertemplate": "%{text}<br>%{y:.3g} tokens in %{x:.4g} ms<br>%{customdata:.5g} tok/s<extra></extra>",
            },
            {
                "type": "scatter",
                "mode": "markers",
                "name": "plain decoding",
                "x": base,
                "y": [1] * len(base),
                "marker": {"color": "@plain", "symbol": "diamond", "size": 10},
                "hovertemplate": "plain decoding<br>%{x:.4g} ms per token<extra></extra>",
            },
        ],
        layout={
            "xaxis": axis("cycle, ms", range=[0, most]),
            "yaxis": axis("accept_len, tokens", range=[0, max(lengths) * 1.1]),
            "showlegend": False,
        },
        columns=[_LAUNCH, Column("accept_len", "tokens"), Column("cycle", "ms"), Column("throughput", _TOK_S)],
        rows=[(r.number, f.accept_len, f.cycle_ms, f.output_throughput) for r, f in found],
        height=440,
        legend=[("@accent", "launch, darker is faster"), ("@plain", "plain decoding")],
    )


def _iso_lines(most_ms: float, most_tokens: float, level: int, speeds: Sequence[float]) -> Iterator[dict[str, object]]:
    """Rays of equal throughput: level × accept_len / cycle."""
    for speed in _round_steps(min(speeds), max(speeds)):
        slope = speed / level / 1000  # tokens per millisecond and stream
        end = min(most_ms, most_tokens / slope)
        yield {
            "type": "scatter", "mode": "lines+text", "x": [0, end * 0.97], "y": [0, end * 0.97 * slope],
            "text": ["", f"{speed:g}"], "textposition": "middle left" if end < most_ms else "top left", "textfont": {"color": "@muted", "size": 11},
            "line": {"color": "@iso", "width": 1, "dash": "dot"}, "hoverinfo": "skip", "showlegend": False,
        }  # fmt: skip


def _round_steps(low: float, high: float) -> list[float]:
    """Four to eight round values between two."""
    step = 10 ** math.floor(math.log10(max(high - low, high * 0.05)))
    step = next(s for s in (step / 5, step / 2, step, step * 2) if (high - low) / s <= 7) if high > low else step  # noqa: PLR2004
    first = math.ceil(low / step)
    return [round(step * place, 10) for place in range(max(1, first), math.floor(high / step) + 1)]


def steps_maps(facts: Facts, level: int) -> list[Chart]:
    """num_steps × eagle_topk: the best throughput and the mean accepted length of each cell."""
    cells: dict[tuple[int, int], list[tuple[TrialRecord, Measurement]]] = {}
    for record, figures in _pairs(facts, level):
        chosen = record.config.speculative
        if chosen:
            cells.setdefault((chosen.eagle_topk, chosen.num_steps), []).append((record, figures))
    if len(cells) < 2:  # noqa: PLR2004 - one cell is no map
        return []
    best = {place: max(f.output_throughput for _, f in found) for place, found in cells.items()}
    length = {place: math.fsum(f.accept_len or 0.0 for _, f in found) / len(found) for place, found in cells.items()}
    rows = [
        (topk, steps, len(cells[topk, steps]), best[topk, steps], length[topk, steps]) for topk, steps in sorted(cells)
    ]
    return [
        _map(
            "speed-map",
            "Throughput by steps and topk",
            "Best launch of each num_steps × eagle_topk, over all other settings.",
            best,
            "tok/s",
            rows,
        ),
        _map(
            "length-map",
            "Accepted length by steps and topk",
            "Mean accept_len of the same cells. Where it rises and throughput does not, the draft steps cost more than they bring.",
            length,
            "tokens",
            rows,
        ),
    ]


def _map(
    key: str,
    title: str,
    about: str,
    values: dict[tuple[int, int], float],
    unit: str,
    rows: list[tuple[int, int, int, float, float]],
) -> Chart:
    topks, steps = sorted({t for t, _ in values}), sorted({s for _, s in values})
    top = max(values, key=lambda place: values[place])
    few = len(topks) * len(steps) <= 60  # noqa: PLR2004 - as many texts as can be read
    z = [[values.get((t, s)) for s in steps] for t in topks]
    return Chart(
        key=key,
        title=title,
        about=about,
        alt=f"Highest at num_steps {top[1]}, eagle_topk {top[0]}: {values[top]:.4g} {unit}; {len(values)} cells.",
        data=[{"type": "heatmap", "x": [str(s) for s in steps], "y": [str(t) for t in topks], "z": z, "colorscale": [[0, "@ramp0"], [0.5, "@ramp1"], [1, "@ramp2"]], "xgap": 2, "ygap": 2, "texttemplate": "%{z:.4g}" if few else "", "hovertemplate": f"num_steps %{{x}}, eagle_topk %{{y}}<br>%{{z:.5g}} {unit}<extra></extra>", "colorbar": {"title": {"text": unit}, "thickness": 12, "outlinewidth": 0}}],
        layout={"xaxis": axis("num_steps", type="category", showgrid=False), "yaxis": axis("eagle_topk", type="category", showgrid=False)},
        columns=[Column("eagle_topk"), Column("num_steps"), Column("launches"), Column("best throughput", _TOK_S), Column("mean accept_len", "tokens")],
        rows=rows,
        height=130 + 56 * len(topks),
    )  # fmt: skip


def importance(facts: Facts, level: int) -> Chart | None:
    """Which searched parameter moves throughput, after Optuna."""
    found = importances([(r, f.output_throughput) for r, f in _pairs(facts, level, ("trial",))])
    if not found:
        return None
    names = list(found)
    return Chart(
        key="importance",
        title="What moved throughput",
        about="Importance of each searched parameter among the better launches (Optuna, PED-ANOVA). It tells what to search further, not which value is best; with few launches it is a hint.",
        alt=f"{names[0]} matters most, with {found[names[0]]:.0%}.",
        data=[{"type": "bar", "orientation": "h", "x": [found[n] for n in names], "y": [plain(n) for n in names], "marker": {"color": "@accent"}, "texttemplate": "%{x:.0%}", "textposition": "auto", "hovertemplate": "%{y}: %{x:.1%}<extra></extra>"}],
        layout={"xaxis": axis("share of importance", tickformat=".0%"), "yaxis": {"autorange": "reversed", "automargin": True}},
        columns=[Column("parameter"), Column("importance", "share")],
        rows=list(found.items()),
        height=110 + 34 * len(names),
    )  # fmt: skip


def cycle(facts: Facts, standing: Standing) -> Chart | None:
    """What the winner's verify cycle is made of, after a fit over all launches."""
    found = cycle_parts([(r.config, f) for r, f in _pairs(facts, standing.concurrency)])
    chosen = standing.best.config.speculative if standing.best else None
    if found is None or chosen is None:
        return None
    parts = found.parts(chosen)
    one_token = standing.plain and standing.plain.get("cycle_ms")
    beside = f" Plain decoding takes {one_token:.4g} ms per token." if one_token else ""
    return Chart(
        key="cycle",
        title="What the winner's cycle is made of",
        about=f"Fitted, not measured: cycle = fixed + a × num_steps + b × num_draft_tokens over {found.launches} launches (R² {found.r2:.2f}).{beside}",
        alt="; ".join(f"{name} {value:.4g} ms" for name, value in parts.items()),
        data=[{"type": "bar", "orientation": "h", "name": name, "x": [value], "y": [plain(label(standing.best.config)) if standing.best else ""], "marker": {"color": colour}, "texttemplate": "%{x:.3g} ms", "textposition": "inside", "insidetextanchor": "middle", "hovertemplate": f"{name}: %{{x:.4g}} ms<extra></extra>"} for (name, value), colour in zip(parts.items(), ("@c1", "@c2", "@c3"), strict=True)],
        layout={"barmode": "relative", "xaxis": axis("ms per cycle"), "yaxis": {"automargin": True}, "showlegend": True},
        columns=[Column("part"), Column("time", "ms")],
        rows=list(parts.items()),
        height=190,
    )  # fmt: skip


def categories(facts: Facts, standing: Standing) -> Chart | None:
    """Throughput by category of prompts, the winner beside plain decoding."""
    level = standing.concurrency
    if standing.best is None:
        return None
    sides = {
        "winner": _by_category([r for r in facts.records if r.number in standing.best.numbers], level),
        "plain decoding": _by_category([r for r in facts.records if r.kind == "baseline"], level),
    }
    names = sorted(sides["winner"].keys() & sides["plain decoding"].keys())
    if not names:
        return None
    rows = [
        (n, sides["winner"][n], sides["plain decoding"][n], sides["winner"][n] / sides["plain decoding"][n])
        for n in names
    ]
    rows.sort(key=lambda row: -row[3])
    return Chart(
        key="categories",
        title="By category of prompts",
        about="The fastest searched configuration beside plain decoding, all its launches. For another mix of your traffic: raytune-eagle best STUDY --mix code=0.7,chat=0.3",
        alt="; ".join(f"{name}: {times:.2f} times plain decoding" for name, _, _, times in rows),
        data=[
            {"type": "bar", "name": label(standing.best.config), "x": [plain(r[0]) for r in rows], "y": [r[1] for r in rows], "text": [f"{r[3]:.2f}×" for r in rows], "textposition": "outside", "cliponaxis": False, "marker": {"color": "@accent"}, "hovertemplate": "%{x}: %{y:.5g} tok/s<extra></extra>"},
            {"type": "bar", "name": "plain decoding", "x": [plain(r[0]) for r in rows], "y": [r[2] for r in rows], "marker": {"color": "@plain"}, "hovertemplate": "%{x}: %{y:.5g} tok/s<extra></extra>"},
        ],
        layout={"barmode": "group", "xaxis": {"automargin": True}, "yaxis": axis("output throughput, tok/s"), "showlegend": True},
        columns=[Column("category"), Column("winner", _TOK_S), Column("plain decoding", _TOK_S), Column("speedup", "x")],
        rows=rows,
    )  # fmt: skip


def _by_category(records: Sequence[TrialRecord], level: int) -> dict[str, float]:
    requests: list[Request] = [r for record in records for r in record.outcome.requests if r.concurrency == level]
    return {each.category: each.output_throughput for each in by_category(requests) if each.output_throughput}


def nodes(facts: Facts, level: int) -> Chart | None:
    """Plain decoding on each node: how far the machines agree."""
    found = list(_pairs(facts, level, ("baseline",)))
    if not found:
        return None
    names = sorted({record.node for record, _ in found})
    by_node = {name: [f.output_throughput for r, f in found if r.node == name] for name in names}
    return Chart(
        key="nodes",
        title="Plain decoding by node",
        about="Every launch of plain decoding. Nodes that lie apart are different machines to a search; each launch is held against plain decoding of its own node.",
        alt="; ".join(f"{name}: {min(v):.5g} to {max(v):.5g} tok/s in {len(v)} launches" for name, v in by_node.items()),
        data=[{"type": "box", "name": plain(name), "y": values, "boxpoints": "all", "jitter": 0.5, "pointpos": 0, "marker": {"color": "@plain", "size": 6}, "line": {"width": 1.5}, "fillcolor": "@wash", "hovertemplate": "%{y:.5g} tok/s<extra></extra>", "hoveron": "points"} for name, values in by_node.items()],
        layout={"yaxis": axis("output throughput, tok/s"), "xaxis": {"automargin": True, "type": "category"}},
        columns=[Column("node"), Column("launch"), Column("throughput", _TOK_S), Column("low", _TOK_S), Column("high", _TOK_S)],
        rows=[(r.node, r.number, f.output_throughput, f.ci_low, f.ci_high) for r, f in found],
    )  # fmt: skip
