"""Why the passes over one prompt set differ, as far as their rows tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from raytune_eagle.model.measurement import Request, Sample
from raytune_eagle.statistics import t_975, tabulate

_NOTICEABLE = 0.02
"""Of throughput: less is no cause worth telling."""
_LEAST, _FEW = 2, 3
_SIGNS = (
    ("other_cores", "other load", "cores", 1, 0.5),
    ("clock_mhz", "GPU clocks fell", "MHz", -1, 0.02),
    ("temperature_c", "GPUs grew hot", "C", 1, 8.0),
)
"""Of `Vitals`: name, words, unit, whether a rise or a fall is to blame, and the least of it (of clocks: a share)."""


def cause(requests: Sequence[Request], samples: Sequence[Sample] = ()) -> str:
    """What made the passes of one concurrency differ, as far as its rows and the machine's vitals tell."""
    speeds = pass_speeds(requests)
    if len(speeds) < _LEAST:
        return "one pass tells nothing of others"
    told = [line for line in (_answers(requests), *_vitals(speeds, samples)) if line]
    if len(speeds) >= _FEW:
        told += [line for line in (_first_pass(speeds), _drift(speeds)) if line]
    spread = float(np.std(np.log(speeds), ddof=1))
    return ", ".join(told) if told else f"passes differ by {spread:.1%} without a pattern that shows"


def pass_speeds(requests: Sequence[Request]) -> list[float]:
    """Tokens per stream second of each pass, in order."""
    table = tabulate(requests)
    return [float(tokens / seconds) for tokens, seconds in zip(table.tokens.sum(1), table.seconds.sum(1), strict=True)]


def _vitals(speeds: Sequence[float], samples: Sequence[Sample]) -> Iterator[str]:
    """What the machine did in the slowest pass and not in the fastest."""
    slow, fast = (
        [sample.vitals for sample in samples if sample.repeat == speeds.index(pick(speeds))] for pick in (min, max)
    )
    for name, what, unit, sign, least in _SIGNS:
        values = [[value for v in side if (value := getattr(v, name)) is not None] for side in (slow, fast)]
        if not all(values):
            continue
        before, after = (sum(side) / len(side) for side in reversed(values))
        if sign * (after - before) >= least * (before if name == "clock_mhz" else 1):
            yield f"{what} ({before:.4g} {unit} in the fastest pass, {after:.4g} in the slowest)"


def _answers(requests: Sequence[Request]) -> str | None:
    """Answers of other lengths in each pass (temperature, or kernels that round by batch) are work of other sizes."""
    table = tabulate(requests)
    totals = table.tokens.sum(1)
    spread = float(totals.std(ddof=1) / totals.mean())
    return f"answers differ in length from pass to pass by {spread:.1%}" if spread > _NOTICEABLE else None


def _first_pass(speeds: Sequence[float]) -> str | None:
    first, rest = speeds[0], np.log(speeds[1:])
    gap = float(np.log(first) - rest.mean())
    allowed = t_975(len(rest) - 1) * float(rest.std(ddof=1)) * (1 + 1 / len(rest)) ** 0.5
    if abs(gap) <= max(allowed, _NOTICEABLE):
        return None
    return f"the first pass was {abs(np.expm1(gap)):.1%} {'faster' if gap > 0 else 'slower'} than the others"


def _drift(speeds: Sequence[float]) -> str | None:
    """A straight line through the logs whose slope is beyond chance; the first pass is left to `_first_pass`."""
    logs = np.log(speeds)
    at = np.arange(len(logs)) - (len(logs) - 1) / 2
    slope = float(at @ logs / (at @ at))
    rest = logs - logs.mean() - slope * at
    error = (float(rest @ rest) / (len(logs) - 2) / float(at @ at)) ** 0.5
    change = slope * (len(logs) - 1)
    if abs(slope) <= t_975(len(logs) - 2) * error or abs(change) <= _NOTICEABLE:
        return None
    return f"throughput {'rose' if change > 0 else 'fell'} by {abs(np.expm1(change)):.1%} from first to last pass"
