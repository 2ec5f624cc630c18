"""What the page says of one concurrency: the verdict, what speaks for it, and its charts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from markupsafe import Markup

from raytune_eagle.model.measurement import Measurement
from raytune_eagle.model.trial import TrialRecord
from raytune_eagle.ranking import Row, label, measurement
from raytune_eagle.report.facts import Facts, Standing
from raytune_eagle.report.noise import between_launches
from raytune_eagle.report.page import charts_search, charts_space
from raytune_eagle.report.page.chart import Chart
from raytune_eagle.report.verdict import ratio_of_intervals, speed, widened
from raytune_eagle.statistics import Interval, LaunchNoise

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
_LABEL_WIDTH = 34


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


def view(facts: Facts, standing: Standing) -> View:
    """Everything of one concurrency."""
    best, launch = standing.best, standing.launch
    ratio = standing.found.over_plain if standing.found else None
    ours = facts.figures_of(best, standing.concurrency) if best else None
    return View(
        concurrency=standing.concurrency,
        tone=_tone(ratio),
        ratio=ratio,
        strip=_strip(ratio) if ratio else Markup(),
        sentence=standing.sentence[:1].upper() + standing.sentence[1:],
        name=label(best.config) if best else "",
        checks=list(_checks(facts, standing)) if best else [],
        figures=_compared(ours, standing.plain) if ours else [],
        command=launch.config.command() if launch else "",
        command_of=f"of {label(launch.config)}" if launch else "",
        charts=list(_charts(facts, standing)),
    )


def _charts(facts: Facts, standing: Standing) -> Iterator[Chart]:
    """Those that have something to show."""
    level = standing.concurrency
    found = [
        charts_search.again(facts, standing),
        charts_search.ranking(facts, standing),
        charts_search.progress(facts, level),
        charts_search.trade(facts, level),
        *charts_space.maps(facts, level),
        charts_space.importance(facts, level),
        charts_space.cycle(facts, standing),
        charts_space.categories(facts, standing),
        charts_space.nodes(facts, level),
    ]
    yield from (chart for chart in found if chart is not None)


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
    """What speaks for the verdict and what against it; `standing` has a best."""
    found = standing.found
    if found is None:
        return
    yield _interval_check(found.over_plain)
    if found.confirmed:
        times = "once" if found.best.measured == 1 else f"{found.best.measured} times"
        yield "good", f"confirmed: launched {times} more, in turns with plain decoding"
    else:
        yield "warn", "not confirmed by other launches: the best of many is partly the luckiest"
    own = [record for record in facts.records if record.number in found.best.numbers]
    level = standing.concurrency
    yield _precision_check([figures for record in own if (figures := measurement(record, level))])
    yield from _texts_check([r.matches_baseline[level] for r in own if level in r.matches_baseline])
    yield from _gates_check(own)
    noise = between_launches(facts.records, level)
    rows = standing.again if found.confirmed else standing.rows
    others = (r for r in rows if r.status == "completed" and r.config.speculative and r.key != found.best.key)
    if second := next(others, None):
        yield from _second_check(found.best, second, facts.labels[second.numbers[0]], noise)


def _interval_check(ratio: Interval | None) -> tuple[str, str]:
    if ratio is None:
        return "bad", "no node measured both it and plain decoding"
    if ratio.low <= 1 <= ratio.high:
        return "warn", "the interval of the ratio holds 1: no difference is shown"
    return "good", f"the interval of the ratio, {ratio.low:.2f} to {ratio.high:.2f}, leaves out 1"


def _precision_check(figures: list[Measurement]) -> tuple[str, str]:
    if all(each.stable for each in figures):
        return "good", "its passes agree within the asked precision"
    return "warn", "its passes ran out before the asked precision was reached"


def _gates_check(launches: list[TrialRecord]) -> Iterator[tuple[str, str]]:
    """What was not right with its servers; a warning that came several times is told once."""
    gates = [gate for record in launches for gate in record.outcome.gates]
    warned = {gate.name: gate.detail for gate in gates if gate.verdict == "warning"}
    yield from (("warn", f"gate {name}: {detail}") for name, detail in warned.items())
    if gates and not warned:
        yield "good", f"its servers passed {len({gate.name for gate in gates if gate.verdict == 'passed'})} gates"


def _second_check(best: Row, second: Row, name: str, noise: LaunchNoise) -> Iterator[tuple[str, str]]:
    one, other = speed(best), speed(second)
    if one is None or other is None:
        return
    ratio = widened(ratio_of_intervals(one, other), noise.half_width(best.measured, second.measured))
    if ratio.low > 1:
        yield "good", f"the next, {name}, is slower beyond what launches differ by"
    else:
        yield "note", f"the next, {name}, is as fast within what launches differ by"


def _texts_check(shares: list[float]) -> Iterator[tuple[str, str]]:
    if not shares:
        yield "note", "texts were not compared with plain decoding's"
    elif min(shares) == 1:
        yield "good", "every text is plain decoding's"
    else:
        yield "note", f"{min(shares):.1%} of its texts are plain decoding's; rounding alone can make others differ"


def _strip(ratio: Interval) -> Markup:
    """The interval as a strip, with the mark where both are equal."""
    low, high = min(ratio.low, 1.0), max(min(ratio.high, ratio.value * 3), 1.0)
    pad = (high - low) * 0.12 or 0.1
    left, span = low - pad, high - low + 2 * pad

    def x(value: float) -> float:
        return round(10 + 380 * min(max((value - left) / span, 0), 1), 1)

    text = f"ratio {ratio.value:.2f}, 95 % interval {ratio.low:.2f} to {ratio.high:.2f}; 1 is plain decoding"
    ends = Markup("").join(
        _mark(x(value), f"{value:.2f}") for value in (ratio.low, ratio.high) if x(value) not in (390, 10)
    )
    near = any(abs(x(1) - x(value)) < _LABEL_WIDTH for value in (ratio.low, ratio.high))
    return Markup(
        '<svg class="strip" viewBox="0 0 400 62" role="img" aria-label="{}">'
        '<line x1="10" x2="390" y1="26" y2="26" stroke="var(--line)" stroke-width="2"/>'
        '<line x1="{}" x2="{}" y1="8" y2="44" stroke="var(--plain)" stroke-width="2" stroke-dasharray="4 3"/>'
        '<line x1="{}" x2="{}" y1="26" y2="26" stroke="var(--accent)" stroke-width="8" stroke-linecap="round"/>'
        '<circle cx="{}" cy="26" r="8" fill="var(--surface)" stroke="var(--accent)" stroke-width="4"/>{}{}</svg>'
    ).format(text, x(1), x(1), x(ratio.low), x(ratio.high), x(ratio.value), ends, "" if near else _mark(x(1), "1×"))


def _mark(x: float, text: str) -> Markup:
    place = Markup('<text x="{}" y="60" text-anchor="middle" font-size="14" fill="var(--muted)">{}</text>')
    return place.format(min(max(x, 18), 382), text)
