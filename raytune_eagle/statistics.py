"""What the rows of a bench say, and how sure that is.

Throughput is `concurrency` × tokens / stream seconds over the requests in question: every counted request ran beside
`concurrency` - 1 others from its first to its last moment (see `raytune_eagle.measure`), so this is the rate of a
server that is kept that busy (Little's law). Unlike tokens by wall clock it has no ramp and no tail in it, and it can
be told of any part of the requests: a pass, a category, a resample. A request that failed is one of no token.

Only rows of passes matter (see `raytune_eagle.figures.charged`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from raytune_eagle.figures import Array, charged, counted
from raytune_eagle.model import Value
from raytune_eagle.model.measurement import Measurement, Request

DRAWS = 1000
"""Resamples per bootstrap: the standard error of their spread is 2 % of it, far less than the spread of the passes."""

_CAUTION = 1.1
"""Keeps comparisons of equals at 3 % false alarms where passes are as many on either side, and, with the floor below,
below 6 % where either side stopped when its passes agreed."""

LAUNCH_NOISE = 0.02
"""What two launches of one configuration differ by beyond what their passes show, as a standard deviation of the log,
until repeated launches say otherwise: memory lies elsewhere, kernels are chosen anew, clocks start from other heat.
Plain decoding of a 7 B model on 2 and 4 H200s differed by 0.2 to 4 % (results/study=random7b-…), its speculative points
by 3 to 22 %, and a 135 M model, whose cycle is the host's, by 5 to 28 %."""
_LAUNCH_FREEDOM = 4
"""Degrees of freedom that this expectation is worth while no launch was repeated; beside launches that were, one."""
_SPEAKS = 2
"""Degrees of freedom from which launches may stand alone."""

_PASS_NOISE = 0.015
"""What passes differ by at least, as a standard deviation of the log. Two or three passes may agree by luck, and just
then a bench stops; so no interval is narrower than passes that differ by so much would make it (on one H200 it was 1 to
5 %). At a precision of 2 % the second pass is therefore never the last. Of benches at a noise of 3 % that stop at 2 %,
88 % held the truth without this, 91 % with it."""
_PASS_NOISE_COMPARED = 0.025
"""The same where two benches are compared, since either may have stopped by luck: at a noise of 3 % and a precision of
2 % then 5 % of equals are called different, and 7 % were with the floor of a single bench (4,000 made pairs)."""

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def t_975(freedom: float) -> float:
    """97.5 % point of Student's t for `freedom` >= 1 degrees of freedom; exact to 0.5 % (fractions round down)."""
    whole = max(1, int(freedom))
    if whole <= len(_T_975):
        return _T_975[whole - 1]
    return 1.959964 + 2.372 / whole + 2.82 / whole**2  # the first terms of its expansion around the normal


def log_variance(figures: Measurement) -> float:
    """Variance of the log of a launch's throughput, read back from its 95 % interval; where that is open, 1."""
    if figures.ci_low <= 0:
        return 1.0
    half = float(np.log(figures.ci_high / figures.ci_low)) / 2
    return (half / t_975(figures.passes - 1)) ** 2


class LaunchNoise(NamedTuple):
    """Variance of the log of throughput from launch to launch, and by how many degrees of freedom it is known."""

    variance: float
    freedom: float

    def half_width(self, launches: int, others: int) -> float:
        """Half of the 95 % interval that it adds to the log of a ratio of so many launches to so many others."""
        return t_975(self.freedom) * math.sqrt(self.variance * (1 / launches + 1 / others))


def degrees_of_freedom(logs: Array) -> int:
    """Of what is left of a table of shape (configurations, rounds), less what a row or, of several, a column shares."""
    rows, columns = logs.shape
    return max(1, rows - 1) * (columns - 1) if rows and columns else 0


def launch_noise(tables: Iterable[tuple[Array, Array]], *, alike: bool = True) -> LaunchNoise:
    """What launches differ by beyond their passes.

    Args:
        tables: each of logs of throughput, shape (configurations, rounds), every configuration launched once in each
            round; and of their variances by their own passes, same shape. What all configurations of a round share
            (the hour, the node) is taken out; a single configuration's launches are taken as they are.
        alike: whether a configuration's launches were the same but for chance: the same prompts, beside the same.

    Few launches say little, so they are weighed together with `LAUNCH_NOISE`, which must not talk down what they do
    say: it weighs as one launch more. (As four, 15 to 30 % of equals were told apart where one to three points had
    been launched twice and launches differ by 10 %; now 6 to 11 %, at 5 % of noise 2 to 8 %.) From two degrees of
    freedom on, launches that are alike stand alone if that is the wider interval: of two rounds of 3 or 5 equals then
    5 % are told apart. 20,000 made rounds each.
    """
    total, own = 0.0, 0
    for logs, variances in tables:
        if freedom := degrees_of_freedom(logs):
            rest = logs - logs.mean(1, keepdims=True)
            rest = rest - rest.mean(0) if len(rest) > 1 else rest
            total += max(0.0, float((rest**2).sum()) - freedom * float(variances.mean()))
            own += freedom
    expected = 1 if own else _LAUNCH_FREEDOM
    weighed = LaunchNoise((expected * LAUNCH_NOISE**2 + total) / (expected + own), expected + own)
    alone = [LaunchNoise(total / own, own)] if alike and own >= _SPEAKS else []
    return max([weighed, *alone], key=lambda noise: noise.half_width(1, 1))


class Interval(NamedTuple):
    """A figure and its 95 % interval, in the figure's unit."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half its width, as a share of the figure; 0 for a figure of 0."""
        return (self.high - self.low) / 2 / self.value if self.value else 0.0


class Ratio(Value):
    """Throughput of one configuration over that of another, with its 95 % interval; `high` may be infinite."""

    value: Annotated[float, Field(gt=0)]
    low: float
    high: float

    @property
    def different(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.low > 1 or self.high < 1


class Table(NamedTuple):
    """Requests as two arrays of shape (passes, prompts); a cell whose request failed or is missing holds 0 in both."""

    tokens: Array
    seconds: Array
    prompts: tuple[str, ...]

    @property
    def passes(self) -> int:
        """Number of passes with at least one answer."""
        return len(self.tokens)

    def columns(self, prompts: Sequence[str]) -> Table:
        """The same passes over `prompts` only, in that order."""
        places = {prompt: place for place, prompt in enumerate(self.prompts)}
        chosen = [places[prompt] for prompt in prompts]
        return Table(self.tokens[:, chosen], self.seconds[:, chosen], tuple(prompts))


def tabulate(*launches: Iterable[Request]) -> Table:
    """Lay the counted rows out by pass and prompt. A prompt that comes twice in a pass is added up.

    The passes of several launches come one launch after the other.
    """
    rows = [(launch, row) for launch, requests in enumerate(launches) for row in counted(requests)]
    passes = {key: place for place, key in enumerate(sorted({(launch, row.repeat) for launch, row in rows}))}
    prompts = {name: place for place, name in enumerate(sorted({row.prompt_id for _, row in rows}))}
    places = ([passes[launch, row.repeat] for launch, row in rows], [prompts[row.prompt_id] for _, row in rows])
    tokens, seconds = np.zeros((len(passes), len(prompts))), np.zeros((len(passes), len(prompts)))
    np.add.at(tokens, places, [row.completion_tokens for _, row in rows])
    np.add.at(seconds, places, [row.latency_s for _, row in rows])
    return Table(tokens, seconds, tuple(prompts))


def _log_speed(tokens: Array, seconds: Array) -> Array:
    """Log of tokens per stream second; a resample that caught only empty cells repeats the mean of the others."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(tokens) - np.log(seconds)
    return np.where(np.isfinite(logs), logs, logs[np.isfinite(logs)].mean() if np.isfinite(logs).any() else 0.0)


def _weights(rng: np.random.Generator, units: int) -> Array:
    """How often each of `units` was drawn, with replacement, in each resample: shape (DRAWS, units)."""
    drawn = rng.integers(units, size=(DRAWS, units)) + units * np.arange(DRAWS)[:, None]
    return np.bincount(drawn.ravel(), minlength=DRAWS * units).reshape(DRAWS, units).astype(float)


def _variance(logs: Array, units: int) -> float:
    """Bootstrap variance of a log, corrected for what a resample of few units is too narrow by (n / (n - 1))."""
    return float(logs.var()) * units / (units - 1)


def _variance_of_passes(table: Table, rng: np.random.Generator) -> float:
    weights = _weights(rng, table.passes)
    return _variance(_log_speed(weights @ table.tokens.sum(1), weights @ table.seconds.sum(1)), table.passes)


def _variance_of_cells(table: Table) -> float:
    """Variance of the log speed from what is of one request alone, neither of its pass nor of its prompt."""
    rows, columns = table.tokens.shape
    cells = table.tokens / table.tokens.sum() - table.seconds / table.seconds.sum()  # to first order, summing to 0
    rest = cells - cells.mean(0) - cells.mean(1, keepdims=True)
    return float((rest**2).sum() * rows * columns / ((rows - 1) * (columns - 1)))


def throughput(requests: Iterable[Request], concurrency: int, seed: int = 0) -> Interval:
    """Tokens per second of the charged rows, all of them at `concurrency`, with a 95 % bootstrap interval.

    Whole passes are resampled: two requests of one pass share the clocks, the neighbours and the drift of their time,
    so that they are no two witnesses. The prompts stay as they are, each pass being over all of them: how prompts
    differ from each other is no doubt about the speed on this set (and no number of passes would take it away).
    Their spread comes in where configurations are compared (`compare`), and here with a single pass, where nothing
    else is known: then prompts are resampled. The interval is log-symmetric, its width the bootstrap's standard error
    times Student's t for the passes, since 2 to 8 of them are too few for percentiles. (0, 0, 0) without a token.
    """
    table = tabulate(charged(requests))
    if not table.tokens.sum():
        return Interval(0.0, 0.0, 0.0)
    least = _floor(_PASS_NOISE, 1 / table.passes)
    if table.passes == 1:
        table = Table(table.tokens.T, table.seconds.T, table.prompts)
    value = concurrency * float(table.tokens.sum() / table.seconds.sum())
    if table.passes == 1:
        return Interval(value, 0.0, value * 2)  # one request: known to its order of magnitude
    spread = _variance_of_passes(table, np.random.default_rng(seed)) ** 0.5
    factor = float(np.exp(min(max(t_975(table.passes - 1) * spread, least), 50.0)))
    return Interval(value, value / factor, value * factor)


Launches = Sequence[Sequence[Request]]


def compare(a: Sequence[Request], b: Sequence[Request], seed: int = 0) -> Ratio:
    """Throughput of `a` over throughput of `b`, on the prompts that both were sent, with a 95 % bootstrap interval.

    Two things are resampled, and their variances added: the passes of `a` and of `b`, each on their own; and the
    prompts, the same draw for both sides, so that what is common to both (a long prompt is long for both) cancels and
    only what one side does better on some prompts remains. Log-symmetric, with Student's t for the degrees of freedom
    that the parts have together (Welch, Satterthwaite). With a single pass on a side there is no telling how passes
    differ: the interval is then (0, inf), and nothing is called different.

    Seeing a true 5 % at a pass-to-pass noise of 3 % nine times in ten takes 12 passes on either side.

    Raises:
        ValueError: a side holds no answer, no output token or more than one concurrency, or they share no prompt.
    """
    return compare_launches([a], [b], seed)


def compare_launches(a: Launches, b: Launches, seed: int = 0) -> Ratio:
    """As `compare`, for the requests of several launches on a side: their passes are added to one another."""
    left, right = (tabulate(*map(charged, side)) for side in (a, b))
    common = sorted(set(left.prompts) & set(right.prompts))
    if not common:
        raise ValueError("the two sides have no answered prompt in common")
    left, right = left.columns(common), right.columns(common)
    if not left.tokens.sum() or not right.tokens.sum():
        raise ValueError("a side has no output tokens")
    log_ratio = _log_total(left, a) - _log_total(right, b)
    value = float(np.exp(log_ratio))
    if min(left.passes, right.passes) == 1:
        return Ratio(value=value, low=0.0, high=float("inf"))
    factor = float(np.exp(min(_margin(left, right, np.random.default_rng(seed)), 50.0)))
    return Ratio(value=value, low=value / factor, high=value * factor)


def _log_total(table: Table, launches: Launches) -> float:
    levels = {row.concurrency for requests in launches for row in counted(requests)}
    if len(levels) != 1:
        raise ValueError(f"rows of one concurrency can be compared, not of {sorted(levels)}")
    return float(np.log(levels.pop() * table.tokens.sum() / table.seconds.sum()))


def _floor(noise: float, passes: float) -> float:
    """Least half-width of the 95 % interval of a log; `passes` is the sum of 1 / passes over the sides."""
    return 1.96 * noise * float(passes**0.5)


def _margin(left: Table, right: Table, rng: np.random.Generator) -> float:
    """Half-width of the 95 % interval of the log ratio."""
    parts = [(_variance_of_passes(side, rng), side.passes - 1) for side in (left, right)]
    units = len(left.prompts)
    if units > 1:
        draws = _weights(rng, units)
        sides = [_log_speed(draws @ side.tokens.sum(0), draws @ side.seconds.sum(0)) for side in (left, right)]
        known = _variance_of_cells(left) + _variance_of_cells(right)  # it is in the variance of the passes already
        parts.append((max(0.0, _variance(sides[0] - sides[1], units) - known), units - 1))
    least = _floor(_PASS_NOISE_COMPARED, 1 / left.passes + 1 / right.passes)
    total = sum(variance for variance, _ in parts)
    if not total:
        return least
    freedom = total**2 / sum(variance**2 / degrees for variance, degrees in parts)
    return max(float(_CAUTION * t_975(freedom) * total**0.5), least)
