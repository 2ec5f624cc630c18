"""Points in order: launches pooled by point, nodes and hours taken out."""

from __future__ import annotations

import pytest
from made_records import figures, plain, trial

from raytune_eagle.model.config import Config
from raytune_eagle.ranking import confirmed, label, leaderboard, pooled, searched
from raytune_eagle.statistics import Interval


def test_one_launch_keeps_its_interval():
    """A single launch is reported as measured."""
    assert pooled([figures(100, 3)]) == Interval(100, 97, 103)


def test_launches_that_agree_narrow_the_interval():
    """Four equal launches halve the interval of one."""
    assert pooled([figures(100, 4)] * 4) == pytest.approx((100, 98, 102))


def test_launches_that_disagree_widen_the_interval():
    """The spread between launches counts where it is more than what each saw of itself."""
    found = pooled([figures(90, 0.1), figures(110, 0.1)])
    assert found.value == 100
    assert found.low == pytest.approx(100 - 1.96 * 10)


def test_leaderboard_pools_by_key_and_puts_the_fastest_first():
    """Launches with one key are one row; broken constraints and failures come below whatever their speed.

    Confirmations, of other prompts, have a table of their own.
    """
    records = [
        plain(0, 100.0),
        trial(1, 120.0, speedup={1: 1.2}),
        trial(2, 130.0, speedup={1: 1.3}),
        trial(5, 900.0, kind="confirm", speedup={1: 9.0}),
        trial(3, 500.0, key="slow tails", violations=("itl_p95_ms 50 > 40",)),
        trial(4, None, key="broken"),
    ]
    rows = leaderboard(records, 1)
    assert [(row.key, row.status, row.numbers) for row in rows] == [
        ("k", "completed", (1, 2)),
        ("b", "completed", (0,)),
        ("slow tails", "infeasible", (3,)),
        ("broken", "failed", (4,)),
    ]
    assert (rows[0].throughput, rows[0].speedup, rows[0].accept_len, rows[0].kind) == (125, 1.25, 3.0, "trial")
    assert [row.reason for row in rows] == ["", "", "itl_p95_ms 50 > 40", "oom"]
    assert [(row.throughput, row.numbers) for row in confirmed(records, 1)] == [(900, (5,))]


def test_a_failed_launch_beside_good_ones_is_not_averaged_in():
    """A point that failed once keeps the figures of its other launches, and why it failed."""
    (row,) = leaderboard([trial(0, None), trial(1, 120.0)], 1)
    assert (row.throughput, row.measured, row.reason) == (120, 1, "oom")


def test_label_of_plain_decoding():
    """A configuration without speculation is called what it is."""
    assert label(Config(model="m")) == "plain decoding"


def test_a_fast_node_makes_no_point_fast():
    """Where plain decoding says that a node is faster, its figures are brought to an average node's."""
    records = [
        plain(0, 100.0, node="slow"),
        plain(1, 121.0, node="fast"),
        trial(2, 160.0, node="slow", key="better"),
        trial(3, 180.0, node="fast", key="lucky"),
    ]
    assert [(row.key, round(row.throughput)) for row in searched(records, 1)] == [("better", 176), ("lucky", 164)]


def test_within_noise_figures_stay_as_measured():
    """Nodes whose baselines agree are one kind of node: nothing is corrected."""
    records = [plain(0, 100.0, node="a"), plain(1, 101.0, node="b"), trial(2, 160.0, node="a")]
    assert searched(records, 1)[0].throughput == 160
