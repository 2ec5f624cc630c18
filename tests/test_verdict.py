"""The verdict: ratios by node, and sentences no surer than the figures."""

from __future__ import annotations

import math

import pytest
from made import failed
from made_records import TUNED, figures, plain, requests, trial

from raytune_eagle.model.config import Config
from raytune_eagle.model.trial import Completed
from raytune_eagle.report.noise import between_launches
from raytune_eagle.report.verdict import ratio, ratio_of_intervals, sides, verdict, winner
from raytune_eagle.statistics import Interval, LaunchNoise

NO_NOISE = LaunchNoise(0.0, 4)


def test_ratio_of_intervals_by_hand():
    """Errors add in squares on the log scale."""
    found = ratio_of_intervals(Interval(200, 200 / 1.1, 200 * 1.1), Interval(100, 100 / 1.1, 100 * 1.1))
    width = math.exp(math.sqrt(2) * math.log(1.1))
    assert found == pytest.approx((2, 2 / width, 2 * width))


def test_ratio_with_an_interval_down_to_zero_shows_nothing():
    """A baseline that may be zero has no upper end, one that may be anything no lower."""
    found = ratio_of_intervals(Interval(10, 0, 20), Interval(10, 0, 20))
    assert found.low == 0
    assert found.high > 1e100


def test_ratio_pairs_prompts_where_requests_are_kept():
    """Prompts of very different speed cancel: the interval is far narrower than the launches' own."""
    speed = {"a": 10.0, "b": 100.0, "c": 1000.0}
    both = [
        trial(0, 1.0, 0.9, outcome=Completed(measurements=(figures(1, 0.9),), requests=requests(chosen)))
        for chosen in ({name: 2 * value for name, value in speed.items()}, speed)
    ]
    found = ratio(both[:1], both[1:], 1, NO_NOISE)
    assert found.value == pytest.approx(2)
    assert 1.9 < found.low < 2 < found.high < 2.1


def test_ratio_falls_back_on_intervals():
    """Without requests, or with a single pass, the launches' intervals decide."""
    expected = ratio_of_intervals(Interval(200, 199, 201), Interval(100, 99, 101))
    assert ratio([trial(0, 200.0)], [plain(1, 100.0)], 1, NO_NOISE) == pytest.approx(expected)
    one_pass = [
        record.model_copy(update={"outcome": record.outcome.model_copy(update={"requests": requests({"a": 1.0}, 1)})})
        for record in (trial(0, 200.0), plain(1, 100.0))
    ]
    assert ratio(one_pass[:1], one_pass[1:], 1, NO_NOISE) == pytest.approx(expected)


def test_launches_differ_by_more_than_their_passes_show():
    """The spread from launch to launch is added, less of it the more launches there are."""
    exact = [trial(0, 200.0, 0.0), plain(1, 100.0, 0.0)]
    noise = LaunchNoise(0.01**2, 4)
    one = ratio(exact[:1], exact[1:], 1, noise)
    assert one.high / one.value == pytest.approx(math.exp(2.776 * 0.01 * math.sqrt(2)))
    four = ratio(exact[:1] * 4, exact[1:] * 4, 1, noise)
    assert math.log(four.high / four.value) == pytest.approx(math.log(one.high / one.value) / 2)


def test_the_winner_is_searched_and_keeps_the_constraints():
    """A point that breaks a constraint does not win; nothing wins where nothing was measured."""
    records = [plain(0, 50.0), trial(1, 200.0, key="x", violations=("v",)), trial(2, 100.0), trial(3, 90.0, key="y")]
    assert winner(records, 1).key == "k"
    assert winner(records, 8) is None
    assert winner(records[:2], 1) is None


def test_plain_decoding_wins_where_it_is_faster():
    """What is launched in the morning is what was fastest, with or without a draft."""
    assert winner([plain(0, 300.0), trial(1, 200.0)], 1).key == "b"
    tuned_plain = plain(2, 400.0, key="p", kind="confirm", config=Config(model="m", env=LL))
    again = [plain(1, 300.0, kind="confirm"), tuned_plain, trial(3, 350.0, kind="confirm", config=TUNED_LL)]
    assert winner([plain(0, 300.0), *again], 1).key == "p"


def test_gain_is_taken_node_by_node():
    """A fast node that only ran the tuned side, or a slow one that only ran the other, moves nothing."""
    records = [
        plain(0, 100.0, node="slow"),
        trial(1, 150.0, node="slow"),
        plain(2, 1000.0, node="fast"),
        trial(3, 1500.0, node="fast"),
        trial(4, 9999.0, node="alone"),
        plain(5, 1.0, node="other"),
    ]
    found = sides(records, 1)
    assert found.over_plain.value == pytest.approx(1.5)
    assert 1.4 < found.over_plain.low < found.over_plain.high < 1.6


LL = {"NCCL_PROTO": "LL"}
TUNED_LL = Config(model="m", speculative=TUNED, env=LL)
SAME = Config(model="m", env=LL)


def confirmation(plain_tok_s: float, same_tok_s: float, tuned_tok_s: float):
    """A study whose search saw 150 of 100, and two rounds that saw other figures."""
    rounds = [
        record
        for number in (2, 5)
        for record in (
            plain(number, plain_tok_s, kind="confirm"),
            plain(number + 1, same_tok_s, kind="confirm", key="same", config=SAME),
            trial(number + 2, tuned_tok_s, kind="confirm", config=TUNED_LL),
        )
    ]
    return [plain(0, 100.0), trial(1, 150.0, config=TUNED_LL), *rounds]


@pytest.mark.parametrize(
    ("figures_", "sentence"),
    [
        (
            (100.0, 120.0, 144.0),
            (
                "EAGLE3 3/4/12 NCCL_PROTO=LL is 1.44x (1.39–1.50) of plain decoding, "
                "1.20x (1.16–1.25) of plain decoding under the same settings"
            ),
        ),
        (
            (100.0, 144.0, 144.0),
            (
                "EAGLE3 3/4/12 NCCL_PROTO=LL is 1.44x (1.39–1.50) of plain decoding, 1.00x (0.96–1.04) of plain "
                "decoding under the same settings: its settings help, no difference by speculation is shown"
            ),
        ),
        (
            (100.0, 160.0, 144.0),
            (
                "plain decoding is faster: the best, EAGLE3 3/4/12 NCCL_PROTO=LL, is 1.44x (1.39–1.50) of plain "
                "decoding, 0.90x (0.87–0.93) of plain decoding under the same settings"
            ),
        ),
    ],
)
def test_a_confirmed_verdict_names_both_gains(figures_, sentence):
    """The search's own figures are not in it; plain decoding under the winner's settings is."""
    assert verdict(confirmation(*figures_), 1) == sentence


@pytest.mark.parametrize(("lost", "lack"), [("failed", "is failed (tree_too_small)"), ("never", "was not measured")])
def test_a_missing_second_gain_is_told(lost, lack):
    """Plain decoding under the winner's settings failed, or was never launched: what speculation gives is unknown."""
    records = [record for record in confirmation(100.0, 120.0, 144.0) if record.key != "same"]
    if lost == "failed":
        records += [
            plain(number, 1.0, kind="confirm", key="same", config=SAME, outcome=failed("tree_too_small"))
            for number in (20, 21)
        ]
    assert verdict(records, 1).endswith(
        f"of plain decoding; what of it is by speculation is not known: plain decoding under the same settings {lack}"
    )


def test_a_winner_that_failed_once_says_so():
    """One of its two launches beside plain decoding died: the ratio is of the other, and the reader is told."""
    records = confirmation(100.0, 120.0, 144.0)
    last = next(record for record in reversed(records) if record.key == records[1].key)
    records[records.index(last)] = last.model_copy(update={"outcome": failed("oom_kv")})
    assert verdict(records, 1).endswith("; 1 of its 2 launches gave no figures (oom_kv)")


@pytest.mark.parametrize(("searched", "surer"), [(136.0, True), (80.0, False)])
def test_a_winner_of_one_round_that_came_out_otherwise_before_is_no_sure_one(searched, surer):
    """Launches of one point that differ by a third are what launches differ by; before it was a guess of 2 %."""
    again = [plain(2, 101.0, kind="confirm"), trial(3, 136.0, kind="confirm")]
    found = sides([plain(0, 100.0), trial(1, searched), *again], 1)
    assert found.over_plain.value == pytest.approx(136 / 101)
    assert (found.over_plain.low > 1) == surer


def test_the_rounds_of_a_confirmation_say_what_launches_differ_by():
    """Two rounds that agree are not widened by what the search saw before them."""
    records = confirmation(100.0, 120.0, 144.0)
    calm = between_launches(records, 1)
    assert between_launches([plain(0, 100.0), trial(1, 400.0, config=TUNED_LL), *records[2:]], 1) == calm


def test_a_confirmation_that_failed_leaves_the_search_to_speak():
    """Without figures of both sides the verdict is the search's, and says that nothing confirmed it."""
    records = [plain(0, 100.0), trial(1, 150.0), plain(2, 100.0, kind="confirm"), trial(3, None, kind="confirm")]
    assert verdict(records, 1) == (
        "EAGLE3 3/4/12 is 1.50x (1.39–1.62) of plain decoding; not confirmed by other launches"
    )


def test_what_failed_once_in_its_confirmations_does_not_win():
    """A launch that fails in one of two rounds would fail again some night: the next best is taken."""
    records = [
        plain(0, 100.0),
        *(plain(number, 100.0, kind="confirm") for number in (1, 2)),
        trial(3, 150.0, kind="confirm", key="frail"),
        trial(4, None, kind="confirm", key="frail"),
        *(trial(number, 140.0, kind="confirm", key="sound") for number in (5, 6)),
    ]
    assert winner(records, 1).key == "sound"


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        (
            [plain(0, 100.0), trial(1, 138.0), trial(2, 138.0)],
            "EAGLE3 3/4/12 is 1.38x (1.29–1.48) of plain decoding; not confirmed by other launches",
        ),
        (
            [plain(0, 100.0, 10.0), trial(1, 105.0, 10.0), trial(2, 105.0, 10.0)],
            (
                "no difference shown: the best, EAGLE3 3/4/12, is 1.05x (0.92–1.21) of plain decoding; "
                "not confirmed by other launches"
            ),
        ),
        (
            [plain(0, 100.0), trial(1, 60.0), trial(2, 60.0)],
            (
                "plain decoding is faster: the best, EAGLE3 3/4/12, is 0.60x (0.56–0.64) of plain decoding; "
                "not confirmed by other launches"
            ),
        ),
        ([plain(0, 100.0), trial(1, None), trial(2, None)], "no trial completed (2 launched; most often: oom)"),
        ([], "no trial completed (0 launched)"),
        ([trial(0, 9.0, violations=("v",))], "no trial kept the constraints"),
        (
            [
                *(plain(0, 100.0), trial(1, 150.0), trial(2, 138.0, key="y")),
                *(plain(3, 100.0, kind="confirm"), trial(4, 150.0, kind="confirm", violations=("v",))),
            ],
            "EAGLE3 3/4/12 is 1.38x (1.27–1.51) of plain decoding; not confirmed by other launches",
        ),
        (
            [plain(0, 100.0), trial(1, 150.0), trial(2, 150.0, kind="confirm", violations=("v",))],
            "no trial kept the constraints",
        ),
        (
            [plain(0, 100.0, node="other"), trial(1, 138.0), trial(2, 138.0)],
            "EAGLE3 3/4/12 is the fastest at 138.0 tok/s, but no node measured plain decoding beside it",
        ),
        (
            [trial(1, 138.0)],
            "EAGLE3 3/4/12 is the fastest at 138.0 tok/s, but there is no plain decoding to compare with",
        ),
        (
            [plain(0, 100.0, violations=("itl_p95_ms 48 > 40",)), trial(1, 138.0)],
            "EAGLE3 3/4/12 is the fastest at 138.0 tok/s, but plain decoding is infeasible: itl_p95_ms 48 > 40",
        ),
    ],
)
def test_the_verdict_is_no_surer_than_the_figures(records, sentence):
    """Each state of a study has its sentence."""
    assert verdict(records, 1) == sentence


def test_the_verdict_tells_a_concurrency_that_nobody_measured():
    """Another concurrency's figures do not stand in."""
    assert verdict([trial(1, 138.0)], 8) == "no trial was measured at concurrency 8"
