"""The report of a study: one HTML file that needs nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from raytune_eagle import __version__
from raytune_eagle.model.trial import Failed, TrialRecord
from raytune_eagle.report.console import simulated_from
from raytune_eagle.report.facts import Facts, measurements
from raytune_eagle.report.page.chart import Cell, Chart, short
from raytune_eagle.report.page.charts_failures import failure_classes, failures, gates
from raytune_eagle.report.page.charts_nodes import timeline
from raytune_eagle.report.page.charts_probes import all_reduces
from raytune_eagle.report.page.view import View, view

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


def page(facts: Facts) -> str:
    """Whole text of the page."""
    views = [view(facts, facts.standing(level)) for level in facts.concurrencies]
    classes = failure_classes(facts)
    common = [chart for chart in (all_reduces(facts.probes), timeline(facts), failures(facts, classes)) if chart]
    environment = Environment(loader=PackageLoader("raytune_eagle.report", "page"), autoescape=True)
    return environment.get_template("report.html").render(
        facts=facts,
        meta=list(_meta(facts)),
        standings=views,
        note=simulated_from(facts.records),
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


def _rows(record: TrialRecord) -> Iterator[Sequence[Cell]]:
    """One row per concurrency, or one without figures."""
    reason = record.outcome.failure_class if isinstance(record.outcome, Failed) else "; ".join(record.violations)
    names = (record.number, record.kind, record.node, record.status)
    for m in measurements(record):
        figures = (m.concurrency, m.output_throughput, m.ci_low, m.ci_high, m.accept_len, m.cycle_ms)
        beside = (record.speedup.get(m.concurrency), record.matches_baseline.get(m.concurrency))
        yield (*names, *figures, *beside, reason or None)
    if not measurements(record):
        yield (*names, *[None] * 8, reason or None)


def _meta(facts: Facts) -> Iterator[tuple[str, str]]:
    engine, (start, end) = facts.spec.get("engine") or {}, facts.span
    last = facts.records[-1].facts
    yield "Model", str(engine.get("model") or facts.records[0].config.model)
    drafts = engine.get("draft") or sorted({r.config.speculative.draft for r in facts.records if r.config.speculative})
    if drafts:
        yield "Draft", ", ".join(map(str, drafts))
    yield "Hardware", f"{len(facts.nodes)} × {last.hardware or 'unknown'}"
    version = last.versions.get("sglang") or facts.records[-1].outcome.server.version
    if version:
        yield "SGLang", version
    yield "Launches", f"{len(facts.records)}, {len(facts.failed)} failed"
    yield "Begun", time.strftime("%F %H:%M UTC", time.gmtime(start))
    yield "Took", f"{(end - start) / 3600:.1f} h, {facts.node_hours:.1f} node-hours"
    if facts.cost is not None:
        yield "Cost", f"{facts.cost:,.0f}"
