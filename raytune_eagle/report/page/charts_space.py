"""Charts of the space: which settings move throughput, and what a cycle is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from raytune_eagle.figures import by_category
from raytune_eagle.model.measurement import Request
from raytune_eagle.model.trial import TrialRecord
from raytune_eagle.ranking import label
from raytune_eagle.report.facts import Facts, Standing
from raytune_eagle.report.page.chart import RAMP, Cell, Chart, Column, axis, bars, height, lying, plain, scale
from raytune_eagle.report.page.charts_search import TOK_S, launches
from raytune_eagle.report.page.influence import MOST, cycle_parts, importances

_FEW_CELLS = 60  # as many texts as can be read
Cells = dict[tuple[int, int], float]


def maps(facts: Facts, level: int) -> Iterator[Chart]:
    """num_steps × eagle_topk: the best throughput and the mean accepted length of each cell."""
    cells: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for record, figures in launches(facts, level, "trial"):
        chosen = record.config.speculative
        if chosen:
            pair = (figures.output_throughput, figures.accept_len or 0.0)
            cells.setdefault((chosen.eagle_topk, chosen.num_steps), []).append(pair)
    if len(cells) < 2:  # noqa: PLR2004 - one cell is no map
        return
    best = {place: max(speed for speed, _ in found) for place, found in cells.items()}
    length = {place: math.fsum(tokens for _, tokens in found) / len(found) for place, found in cells.items()}
    rows = [(*place, len(cells[place]), best[place], length[place]) for place in sorted(cells)]
    about = "The fastest launch of each num_steps × eagle_topk, over all other settings."
    yield _map("speed-map", "Throughput by steps and topk", about, (best, TOK_S), rows)
    about = "Mean accept_len of the same cells. Where it rises and throughput does not, steps cost more than they win."
    yield _map("length-map", "Accepted length by steps and topk", about, (length, "tokens"), rows)


def _map(key: str, title: str, about: str, shown: tuple[Cells, str], rows: Sequence[Sequence[Cell]]) -> Chart:
    values, unit = shown
    topks, steps = sorted({topk for topk, _ in values}), sorted({step for _, step in values})
    top = max(values, key=lambda place: values[place])
    few = len(topks) * len(steps) <= _FEW_CELLS
    names = ("eagle_topk", "num_steps", "launches", "best throughput, tok/s", "mean accept_len, tokens")
    trace = {
        "type": "heatmap",
        "x": [str(step) for step in steps],
        "y": [str(topk) for topk in topks],
        "z": [[values.get((topk, step)) for step in steps] for topk in topks],
        "texttemplate": "%{z:.3~s}" if few else "",
        "hovertemplate": f"num_steps %{{x}}, eagle_topk %{{y}}<br>%{{z:.5g}} {unit}<extra></extra>",
        "hoverongaps": False,
    }
    category = {"type": "category", "showgrid": False}
    return Chart(
        key=key,
        title=title,
        about=about,
        alt=f"Highest at num_steps {top[1]}, eagle_topk {top[0]}: {values[top]:.4g} {unit}; {len(values)} cells.",
        data=[trace | {"colorscale": RAMP, "colorbar": scale(unit), "xgap": 2, "ygap": 2}],
        layout={"xaxis": axis("num_steps", **category), "yaxis": axis("eagle_topk", **category)},
        columns=[Column(name) for name in names],
        rows=rows,
        height=130 + 56 * len(topks),
    )


def importance(facts: Facts, level: int) -> Chart | None:
    """Which searched parameter moves throughput, after Optuna."""
    whole = [(r, f.output_throughput) for r, f in launches(facts, level, "trial")]
    found = importances(whole)
    if not found:
        return None
    names = list(found)
    sample = f" Taken from {MOST:,} of the {len(whole):,} launches." if len(whole) > MOST else ""
    return Chart(
        key="importance",
        title="What moved throughput",
        about="Importance of each searched parameter for being among the better launches (Optuna, PED-ANOVA). "
        f"It tells what is worth searching, not which value is best; from few launches it is a hint.{sample}",
        alt=f"{names[0]} matters most, with {found[names[0]]:.0%}.",
        data=[lying(names, list(found.values()), "@accent", ".0%")],
        layout={"xaxis": axis("share", tickformat=".0%"), "yaxis": {"autorange": "reversed"}},
        columns=(Column("parameter"), Column("importance", "share")),
        rows=list(found.items()),
        height=height(len(names)),
    )


def cycle(facts: Facts, standing: Standing) -> Chart | None:
    """What the winner's verify cycle is made of, after a fit over all launches."""
    found = cycle_parts([(r.config, f) for r, f in launches(facts, standing.concurrency, "trial", "confirm")])
    best = standing.best
    if found is None or best is None or best.config.speculative is None:
        return None
    parts = found.parts(best.config.speculative)
    token = (standing.plain or {}).get("cycle_ms")
    beside = f" Plain decoding takes {token:.4g} ms per token." if token else ""
    look = {"textposition": "inside", "insidetextanchor": "middle"}
    return Chart(
        key="cycle",
        title="What the fastest one's cycle is made of",
        about="Fitted, not measured: cycle = fixed + a × num_steps + b × num_draft_tokens, over "
        f"{found.launches} launches (R² {found.r2:.2f}).{beside}",
        alt="; ".join(f"{name} {value:.4g} ms" for name, value in parts.items()),
        data=[
            lying([label(best.config)], [value], colour, ".3g", name=name, **look)
            for (name, value), colour in zip(parts.items(), ("@c1", "@c2", "@c3"), strict=True)
        ],
        layout={"barmode": "relative", "xaxis": axis("ms per cycle"), "yaxis": {}, "showlegend": True},
        columns=(Column("part"), Column("time", "ms")),
        rows=list(parts.items()),
        height=200,
    )


def categories(facts: Facts, standing: Standing) -> Chart | None:
    """Throughput by category of prompts, the winner beside plain decoding."""
    best, level = standing.best, standing.concurrency
    if best is None:
        return None
    of = {r.number: r for r in facts.records}
    kind = of[best.numbers[0]].kind
    ours = _by_category([of[number] for number in best.numbers], level)
    plain_rows = standing.again if kind == "confirm" else standing.rows
    keys = {r.key for r in facts.records if r.kind == "baseline"}
    numbers = [number for row in plain_rows if row.key in keys for number in row.numbers]
    theirs = _by_category([of[number] for number in numbers], level)
    rows = [(name, ours[name], theirs[name], ours[name] / theirs[name]) for name in ours.keys() & theirs.keys()]
    rows.sort(key=lambda row: (-row[3], row[0]))
    if not rows:
        return None
    names, hover = [row[0] for row in rows], "%{x}: %{y:.5g} tok/s"
    above = {"text": [f"{row[3]:.2f}×" for row in rows], "textposition": "outside", "cliponaxis": False}
    return Chart(
        key="categories",
        title="By category of prompts",
        about="The fastest searched configuration beside plain decoding. For the mix of your own traffic: "
        f"raytune-eagle best {facts.study} --mix {names[0]}=0.7,{names[-1]}=0.3",
        alt="; ".join(f"{name}: {times:.2f} times plain decoding" for name, _, _, times in rows),
        data=[
            bars(label(best.config), names, [row[1] for row in rows], "@accent", hover, **above),
            bars("plain decoding", names, [row[2] for row in rows], "@plain", hover),
        ],
        layout={"barmode": "group", "xaxis": {}, "yaxis": axis("output throughput, tok/s"), "showlegend": True},
        columns=(
            Column("category"),
            Column("fastest searched", TOK_S),
            Column("plain decoding", TOK_S),
            Column("speedup", "x"),
        ),
        rows=rows,
    )


def _by_category(records: Sequence[TrialRecord], level: int) -> dict[str, float]:
    requests: list[Request] = [r for record in records for r in record.outcome.requests if r.concurrency == level]
    return {each.category: each.output_throughput for each in by_category(requests) if each.output_throughput}


def nodes(facts: Facts, level: int) -> Chart | None:
    """Plain decoding on each node: how far the machines agree."""
    found = launches(facts, level, "baseline")
    names = sorted({record.node for record, _ in found})
    by_node = {name: [f.output_throughput for r, f in found if r.node == name] for name in names}
    look = {"type": "box", "boxpoints": "all", "jitter": 0.5, "pointpos": 0, "fillcolor": "@wash", "hoveron": "points"}
    look |= {"marker": {"color": "@plain", "size": 6}, "line": {"width": 1.5}}
    columns = ("node", "launch", "throughput, tok/s", "low, tok/s", "high, tok/s")
    if not found:
        return None
    return Chart(
        key="nodes",
        title="Plain decoding by node",
        about="Every launch of plain decoding. Nodes that lie apart are different machines to a search; "
        "each launch is held against plain decoding of its own node.",
        alt="; ".join(
            f"{name}: {min(v):.5g} to {max(v):.5g} tok/s in {len(v)} launches" for name, v in by_node.items()
        ),
        data=[
            {**look, "name": plain(name), "y": values, "hovertemplate": "%{y:.5g} tok/s<extra></extra>"}
            for name, values in by_node.items()
        ],
        layout={"yaxis": axis("output throughput, tok/s"), "xaxis": {"type": "category"}},
        columns=[Column(name) for name in columns],
        rows=[(r.node, r.number, f.output_throughput, f.ci_low, f.ci_high) for r, f in found],
    )
