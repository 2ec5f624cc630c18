"""Plain decoding by node and time: noise is left alone, drift and node effects are taken out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from made_records import plain, trial

from raytune_eagle.reference import Reference


def at(number: int, tok_s: float, hour: float, node: str = "n"):
    """Plain decoding on a node at an hour."""
    return plain(number, tok_s, node=node, started_at=hour * 3600)


def test_one_launch_is_its_own_reference():
    """At any time and only on its node and at its concurrency."""
    reference = Reference([plain(0, 100.0)])
    assert reference.at("n", 1, 12345.0) == pytest.approx(100)
    assert reference.at("other", 1, 0.0) is None
    assert reference.at("n", 8, 0.0) is None
    assert reference.factor("other", 1, 0.0) == 1


def test_launches_that_agree_are_averaged():
    """Two launches 1 % apart are one speed with noise on it: no drift is told, and the mean counts at any time."""
    reference = Reference([at(0, 100.0, 0), at(1, 101.0, 8)])
    assert reference.drifts() == []
    assert reference.at("n", 1, 0.0) == pytest.approx(math.sqrt(100 * 101), rel=1e-3)
    assert reference.factor("n", 1, 4 * 3600.0) == 1


def test_drift_is_followed_by_time():
    """A node that slows down by 20 % over a night: the reference between two launches lies between them, by time."""
    reference = Reference([at(0, 100.0, 0), at(1, 80.0, 8)])
    assert [(drift.node, drift.low, drift.high) for drift in reference.drifts()] == [
        ("n", pytest.approx(80), pytest.approx(100))
    ]
    assert reference.at("n", 1, 0.0) == pytest.approx(100)
    assert reference.at("n", 1, 4 * 3600.0) == pytest.approx(math.sqrt(100 * 80))
    assert reference.at("n", 1, 99 * 3600.0) == pytest.approx(80)
    early, late = (reference.factor("n", 1, hour * 3600.0) for hour in (0, 8))
    assert 100 * early == pytest.approx(80 * late)


def test_nodes_that_differ_are_brought_to_the_average_node():
    """The same launch on a fast and on a slow node comes to the same figure."""
    reference = Reference([at(0, 100.0, 0, "slow"), at(1, 125.0, 0, "fast")])
    assert reference.effects(1) == {
        "fast": pytest.approx(math.sqrt(1.25)),
        "slow": pytest.approx(1 / math.sqrt(1.25)),
    }
    assert 200 * reference.factor("slow", 1, 0) == pytest.approx(250 * reference.factor("fast", 1, 0))


def test_only_completed_plain_decoding_counts():
    """Trials and failed baselines say nothing of the machine; one with an open interval next to nothing."""
    assert Reference([trial(0, 100.0), plain(1, None)]).at("n", 1, 0.0) is None
    vague = Reference([plain(0, 100.0), plain(1, 90.0, half=90.0)])
    assert vague.drifts() == []
    assert vague.at("n", 1, 0.0) == pytest.approx(100, rel=0.02)


def test_false_alarms_are_rare():
    """Of 500 studies of 2 equal nodes with 3 launches each at 1 % noise, fewer than 3 % tell a drift or an effect."""
    rng = np.random.default_rng(0)
    told = 0
    for _ in range(500):
        speeds = 100 * np.exp(rng.normal(0, 0.01, 6))
        records = [at(i, float(speed), i, "ab"[i % 2]) for i, speed in enumerate(speeds)]
        reference = Reference(records)
        told += bool(reference.drifts() or reference.effects(1))
    assert told < 15
