"""The report of a study: one HTML file that needs nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from importlib import resources
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from raytune_eagle import __version__
from raytune_eagle.report.best import Interval, label
from raytune_eagle.report.chart import Chart, short
from raytune_eagle.report.charts import charts
from raytune_eagle.report.charts_nodes import failure_classes, failures, gates, timeline
from raytune_eagle.report.facts import Facts, Standing, measurements

_FIGURES = (
    ("output_throughput", "output throughput", "tok/s"),
    ("accept_len", "accept_len", "tokens"),
    ("cycle_ms", "cycle (plain decoding: per token)", "ms"),
    ("ttft_p50_ms", "time to first token, median", "ms"),
    ("ttft_p95_ms", "time to first token, 95th percentile", "ms"),
    ("itl_p50_ms", "between tokens, median", "ms"),
    ("itl_p95_ms", "between tokens, 95th percentile", "ms"),
    ("burst_throughput", "best second", "tok/s"),
)
_COLUMNS = (
    ("launch", "", True),
    ("kind", "", False),
    ("node", "", False),
    ("status", "", False),
    ("streams", "", False),
    ("throughput", "tok/s", False),
    ("low", "tok/s", False),
    ("high", "tok/s", False),
    ("accept_len", "tokens", False),
    ("cycle", "ms", False),
    ("speedup", "x", False),
    ("same text", "share", False),
    ("failure or broken limit", "", False),
)
_ENOUGH_LAUNCHES = 2


class View(NamedTuple):
    """One concurrency, as the page shows it."""

    concurrency: int
    tone: str
    ratio: Interval | None
    strip: Markup
    sentence: str
    name: str
    checks: list[tuple[str, str]]
    figures: list[tuple[str, str, str, str, str]]
    command: str
    command_of: str
    charts: list[Chart]


def page(facts: Facts) -> str:
    """Whole text of the page."""
    standings = [facts.standing(level) for level in facts.concurrencies]
    views = [_view(facts, standing) for standing in standings]
    classes = failure_classes(facts)
    common = [chart for chart in (timeline(facts), failures(facts, classes)) if chart]
    environment = Environment(loader=PackageLoader("raytune_eagle.report", "page"), autoescape=True)
    return environment.get_template("report.html").render(
        facts=facts,
        meta=list(_meta(facts)),
        standings=views,
        nothing=facts.standing(1).sentence if not views else "",
        common=common,
        failures=classes,
        gates=gates(facts),
        version=__version__,
        made=time.strftime("%F %T UTC", time.gmtime()),
        data=_json(_payload(facts, views, common)),
        css=Markup(_own("report.css")),  # noqa: S704 - files of this package
        script=Markup(_own("report.js")),  # noqa: S704
        plotly=Markup((resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")),  # noqa: S704
    )


def _own(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _json(value: Any) -> Markup:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))  # noqa: S704


def _payload(facts: Facts, views: list[View], common: list[Chart]) -> dict[str, Any]:
    each = {f"{chart.key}-{view.concurrency}": chart.payload() for view in views for chart in view.charts}
    whole = {f"{chart.key}-all": chart.payload() for chart in common}
    rows = [short(row) for record in facts.records for row in _rows(record)]
    return {"charts": each | whole, "labels": facts.labels, "launches": {"columns": _COLUMNS, "rows": rows}}


def _rows(record: Any) -> Iterator[list[Any]]:
    failure = getattr(record.outcome, "failure_class", None) or "; ".join(record.violations) or None
    names = [record.number, record.kind, record.node, record.status]
    for m in measurements(record):
        level = m.concurrency
        figures = [level, m.output_throughput, m.ci_low, m.ci_high, m.accept_len, m.cycle_ms]
        yield [*names, *figures, record.speedup.get(level), record.matches_baseline.get(level), failure]
    if not measurements(record):
        yield [*names, *[None] * 8, failure]


def _meta(facts: Facts) -> Iterator[tuple[str, str]]:
    engine, (start, end) = facts.spec.get("engine") or {}, facts.span
    last = facts.records[-1].facts
    yield "Model", str(engine.get("model") or facts.records[0].config.model)
    drafts = engine.get("draft") or sorted({r.config.speculative.draft for r in facts.records if r.config.speculative})
    if drafts:
        yield "Draft", ", ".join(map(str, drafts))
    yield "Hardware", f"{len(facts.nodes)} × {last.hardware or 'unknown'}"
    version = last.versions.get("sglang") or next((r.outcome.server.version for r in facts.measured), "")
    if version:
        yield "SGLang", version
    yield "Launches", f"{len(facts.records)}, {len(facts.failed)} failed"
    yield "Begun", time.strftime("%F %H:%M UTC", time.gmtime(start))
    yield "Took", f"{(end - start) / 3600:.1f} h, {facts.node_hours:.1f} node-hours"
    if facts.cost is not None:
        yield "Cost", f"{facts.cost:,.0f}"


def _view(facts: Facts, standing: Standing) -> View:
    best, ratio = standing.best, standing.over_plain
    ours = facts.figures_of(best, standing.concurrency) if best else None
    slower = ratio is not None and ratio.high < 1
    chosen = next((row for row in standing.rows if row.kind == "baseline"), best) if slower else best
    return View(
        concurrency=standing.concurrency,
        tone=_tone(ratio),
        ratio=ratio,
        strip=_strip(ratio) if ratio else Markup(),
        sentence=standing.sentence[:1].upper() + standing.sentence[1:],
        name=label(best.config) if best else "",
        checks=list(_checks(facts, standing)),
        figures=_compared(ours, standing.plain) if ours else [],
        command=chosen.config.command() if chosen else "",
        command_of=f"of {label(chosen.config)}" if chosen else "",
        charts=charts(facts, standing),
    )


def _tone(ratio: Interval | None) -> str:
    if ratio is None:
        return "warn"
    return "good" if ratio.low > 1 else "bad" if ratio.high < 1 else "warn"


def _compared(ours: dict[str, float], plain: dict[str, float] | None) -> list[tuple[str, str, str, str, str]]:
    found = []
    for field, name, unit in _FIGURES:
        mine, theirs = ours.get(field), (plain or {}).get(field)
        ratio = f"{mine / theirs:.2f}×" if mine and theirs else "–"
        found.append((name, unit, _figure(mine), _figure(theirs), ratio))
    return found


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"  # noqa: PLR2004


def _checks(facts: Facts, standing: Standing) -> Iterator[tuple[str, str]]:
    """What speaks for the verdict and what against it."""
    best, ratio, level = standing.best, standing.over_plain, standing.concurrency
    if best is None:
        yield "bad", "nothing that was searched has figures and keeps the limits"
        return
    if ratio is None:
        yield "bad", "no node measured both it and plain decoding"
    elif ratio.low <= 1 <= ratio.high:
        yield "warn", "the interval of the ratio holds 1: no difference is shown"
    else:
        yield "good", f"the interval of the ratio, {ratio.low:.2f} to {ratio.high:.2f}, leaves out 1"
    several = best.measured >= _ENOUGH_LAUNCHES
    yield ("good" if several else "warn"), f"launched {best.measured} time{'s' if several else ', so not confirmed: the best of many is partly the luckiest'}"
    own = [r for r in facts.records if r.number in best.numbers]
    figures = [m for r in own for m in measurements(r) if m.concurrency == level]
    stable = all(m.stable for m in figures)
    yield ("good" if stable else "warn"), "passes agreed within the asked precision" if stable else "passes ran out before the asked precision was reached"
    yield from _texts([r.matches_baseline[level] for r in own if level in r.matches_baseline])
    second = next((row for row in standing.rows if row.kind != "baseline" and row.status == "completed" and row.key != best.key), None)
    if second and second.ci_high and best.ci_low:
        apart = second.ci_high < best.ci_low
        told = f"the second, {label(second.config)}, " + ("is slower beyond its interval" if apart else "is as fast within its interval")
        yield ("good" if apart else "note"), told


def _texts(shares: list[float]) -> Iterator[tuple[str, str]]:
    if not shares:
        yield "note", "texts were not compared with plain decoding's"
    elif min(shares) == 1:
        yield "good", "every text is plain decoding's"
    else:
        yield "warn", f"{min(shares):.1%} of the texts are plain decoding's; greedy decoding would give all of them but for rounding"


def _strip(ratio: Interval) -> Markup:
    """The interval as a strip, with the mark where both are equal."""
    low, high = min(ratio.low, 1.0), max(min(ratio.high, ratio.value * 3), 1.0)
    pad = (high - low) * 0.12 or 0.1
    left, span = low - pad, high - low + 2 * pad

    def x(value: float) -> float:
        return round(10 + 500 * min(max((value - left) / span, 0), 1), 1)

    text = f"ratio {ratio.value:.2f}, 95 % interval {ratio.low:.2f} to {ratio.high:.2f}; 1 is plain decoding"
    anchor = "start" if x(ratio.low) < 60 else "middle"  # noqa: PLR2004 - a text's half width
    return Markup(
        '<svg class="strip" viewBox="0 0 520 62" role="img" aria-label="{}">'
        '<line x1="10" x2="510" y1="26" y2="26" stroke="var(--line)" stroke-width="2"/>'
        '<line x1="{}" x2="{}" y1="8" y2="44" stroke="var(--plain)" stroke-width="2" stroke-dasharray="4 3"/>'
        '<line x1="{}" x2="{}" y1="26" y2="26" stroke="var(--accent)" stroke-width="8" stroke-linecap="round"/>'
        '<circle cx="{}" cy="26" r="8" fill="var(--surface)" stroke="var(--accent)" stroke-width="4"/>'
        '<g font-size="13" fill="var(--muted)"><text x="{}" y="60" text-anchor="middle">1×</text>'
        '<text x="{}" y="60" text-anchor="{}">{:.2f}</text><text x="{}" y="60" text-anchor="middle">{:.2f}</text></g></svg>'
    ).format(text, x(1), x(1), x(ratio.low), x(ratio.high), x(ratio.value), x(1), x(ratio.low), anchor, ratio.low, x(ratio.high), ratio.high)
