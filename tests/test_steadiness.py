"""Why passes differ: each cause is told from rows and vitals that show it, and from no others."""

from __future__ import annotations

import numpy as np
import pytest

from raytune_eagle.gates.steadiness import cause, pass_speeds
from raytune_eagle.model.measurement import Request, Sample, Vitals


def rows(speeds, tokens=None):
    """Passes over 6 prompts at these tokens per stream second, `tokens` in each answer of a pass."""
    tokens = tokens or [100] * len(speeds)
    return [
        Request(
            concurrency=1,
            repeat=number,
            prompt_id=f"p{prompt}",
            category="code",
            started_s=0.0,
            latency_s=tokens[number] / speed,
            completion_tokens=tokens[number],
        )
        for number, speed in enumerate(speeds)
        for prompt in range(6)
    ]


def samples(name, values):
    """Three looks at a machine in each pass."""
    return [
        Sample(concurrency=1, repeat=number, vitals=Vitals(**{name: value}))
        for number, value in enumerate(values)
        for _ in range(3)
    ]


def test_speeds_are_by_pass():
    """Tokens per stream second, in the order of the passes."""
    assert pass_speeds(rows([50, 40, 45])) == pytest.approx([50, 40, 45])


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ([80, 100, 101, 99, 100], "the first pass was 20.0% slower than the others"),
        ([100, 98, 96, 94.1, 92, 90.2], "throughput fell by 9.8% from first to last pass"),
        ([90, 92, 94, 96, 98, 100], "throughput rose by"),
        ([100, 80, 103, 78, 101, 82], "passes differ by 13"),
        ([100, 90], "passes differ by"),
        ([100], "one pass tells nothing"),
    ],
)
def test_pattern_of_passes(speeds, said):
    """A slow start, a drift, neither: told apart by their passes alone."""
    assert said in cause(rows(speeds))
    if "differ by" in said:
        assert "without a pattern" in cause(rows(speeds))


def test_noise_is_given_no_cause():
    """Of 200 sets of 8 passes that differ by chance, few are given a cause; what is told would else mean nothing."""
    rng = np.random.default_rng(0)
    told = ["without a pattern" not in cause(rows(100 * np.exp(rng.normal(0, 0.03, 8)))) for _ in range(200)]
    assert sum(told) <= 25  # two looks at 5 % each


def test_answers_of_other_lengths():
    """Sampled answers are other work in each pass."""
    assert "answers differ in length from pass to pass by" in cause(rows([100, 101, 99], [100, 80, 120]))


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("other_cores", [0.1, 3.0, 0.1, 0.2], "other load (0.1 cores in the fastest pass, 3 in the slowest)"),
        ("clock_mhz", [1980, 1500, 1980, 1980], "GPU clocks fell (1980 MHz in the fastest pass, 1500 in the slowest)"),
        ("temperature_c", [60, 82, 61, 60], "GPUs grew hot (60 C in the fastest pass, 82 in the slowest)"),
        ("other_cores", [3.0, 0.1, 3.0, 3.0], ""),
        ("clock_mhz", [1980, 1975, 1980, 1980], ""),
    ],
)
def test_what_the_machine_did(name, values, said):
    """Vitals are a cause where the slowest pass had the worse of them; else they are not."""
    told = cause(rows([100, 80, 99, 98]), samples(name, values))
    assert said in told if said else "fell" not in told and "load" not in told
