"""Statistics, against truths that the data were generated from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from generated_measurements import Truth

from raytune_eagle.figures import accept_len, best_second, by_category, token_gaps, weighted_percentile
from raytune_eagle.model.measurement import Request
from raytune_eagle.statistics import Ratio, compare, launch_noise, t_975, throughput

PAIRS = 200


def row(**values) -> Request:
    """A request of one second and ten tokens, but for `values`."""
    start = {"concurrency": 1, "repeat": 0, "prompt_id": "p", "category": "code", "started_s": 0.0, "latency_s": 1.0}
    return Request(**({**start, "completion_tokens": 10} | values))


@pytest.mark.slow
@pytest.mark.parametrize(
    "truth", [Truth(), Truth(drift=0.03, passes=8), Truth(prompts=24, request_noise=0.1, passes=4)]
)
def test_equal_configurations_are_seldom_called_different(truth):
    """Of 200 comparisons of a configuration with itself at most 6 % find a difference."""
    found = sum(compare(truth.draw(2 * pair), truth.draw(2 * pair + 1)).different for pair in range(PAIRS))
    assert found <= 0.06 * PAIRS


def stopped(rows: tuple[Request, ...]) -> tuple[Request, ...]:
    """What a bench keeps that stops once its interval is within 2 %."""
    for passes in range(2, 8):
        kept = tuple(one for one in rows if one.repeat < passes)
        if throughput(kept, rows[0].concurrency).half_width <= 0.02:
            return kept
    return rows


@pytest.mark.slow
def test_equal_benches_that_stopped_when_they_agreed_are_seldom_called_different():
    """Stopping keeps those whose passes agree by luck; of 300 such pairs at most 6 % find a difference."""
    truth = Truth(passes=8)
    pairs = [[stopped(truth.draw(2 * pair + side)) for side in range(2)] for pair in range(300)]
    assert sum(len(one) < len(truth.draw(0)) for pair in pairs for one in pair) > 100
    assert sum(compare(*pair).different for pair in pairs) <= 0.06 * 300


@pytest.mark.slow
def test_five_percent_are_found():
    """A true difference of 5 % is found, in the right direction, in at least 90 % of 200 comparisons of 12 passes."""
    truth = Truth(passes=12)
    faster = replace(truth, speed=truth.speed * 1.05)
    ratios = [compare(faster.draw(10_000 + pair), truth.draw(pair)) for pair in range(PAIRS)]
    assert sum(ratio.low > 1 for ratio in ratios) >= 0.9 * PAIRS
    assert np.mean([ratio.value for ratio in ratios]) == pytest.approx(1.05, abs=0.005)
    assert np.mean([ratio.low <= 1.05 <= ratio.high for ratio in ratios]) >= 0.9


def test_a_difference_on_some_prompts_only_is_less_sure():
    """Where one side is better on some prompts and worse on others, the interval says so: it is wider."""
    truth, moody = Truth(pass_noise=0.002), Truth(pass_noise=0.002, taste=0.2)
    even, uneven = compare(truth.draw(1), truth.draw(2)), compare(truth.draw(1), moody.draw(2))
    assert uneven.high / uneven.low > 1.5 * even.high / even.low - 0.5
    assert np.log(uneven.high / uneven.low) > 2 * np.log(even.high / even.low)


@pytest.mark.slow
@pytest.mark.parametrize("passes", [2, 3, 8])
def test_interval_of_throughput_holds_the_truth(passes):
    """The 95 % interval covers the true throughput in 91 to 99 % of 200 benches, with few passes as with many."""
    truth = Truth(passes=passes)
    intervals = [throughput(truth.draw(seed), truth.concurrency) for seed in range(PAIRS)]
    covered = np.mean([interval.low <= truth.throughput() <= interval.high for interval in intervals])
    assert 0.91 <= covered <= 0.99


def test_interval_narrows_with_passes_but_prompts_do_not_widen_it():
    """More passes narrow the interval; a large spread between the prompts, the same in each pass, does not widen it."""
    widths = [np.mean([throughput(Truth(passes=n).draw(s), 8).half_width for s in range(40)]) for n in (3, 6, 12)]
    assert widths[0] > widths[1] > widths[2]
    alike, mixed = (Truth(passes=6, prompt_spread=spread) for spread in (0.0, 0.6))
    assert throughput(mixed.draw(1), 8).half_width == pytest.approx(throughput(alike.draw(1), 8).half_width, rel=0.35)


def test_throughput_is_streams_times_tokens_per_stream_second():
    """The figure itself, by hand; warm-up and fillers count nowhere."""
    rows = [row(concurrency=4), row(concurrency=4, prompt_id="q", latency_s=3.0, completion_tokens=20)]
    ignored = [row(repeat=-1, latency_s=99), row(repeat=-2, latency_s=99)]
    assert throughput([*rows, *ignored], 4).value == pytest.approx(4 * 30 / 4)


@pytest.mark.parametrize(("failed_after", "seconds"), [(16.0, 16.0), (0.01, 3.0)])
def test_a_failed_request_is_time_without_a_token(failed_after, seconds):
    """It held its stream until it failed; refused at once it costs what a good answer to its prompt took."""
    rows = [row(repeat=n, prompt_id=name, latency_s=s) for n in range(2) for name, s in (("short", 1.0), ("long", 3.0))]
    failed = row(repeat=2, prompt_id="long", error="timed out", latency_s=failed_after, completion_tokens=7)
    expected = 50 / (9 + seconds)
    assert throughput([*rows, row(repeat=2, prompt_id="short"), failed], 1).value == pytest.approx(expected)


def test_no_answer_at_all_is_no_throughput():
    """Where all of it failed there is neither a figure nor an interval."""
    assert throughput([row(error="HTTP 500"), row(prompt_id="q", error="HTTP 500")], 1) == (0.0, 0.0, 0.0)


def test_throughput_of_little_data_is_no_crash():
    """No rows give zeros; one pass falls back on its prompts; one request gives an interval that claims little."""
    assert throughput([], 4) == (0.0, 0.0, 0.0)
    single = throughput(Truth(passes=1).draw(0), 8)
    assert 0 < single.low < single.value < single.high
    one = throughput([row()], 1)
    assert one.low == 0
    assert one.half_width == pytest.approx(1)


def test_same_rows_and_seed_give_the_same_interval():
    """The bootstrap is seeded: equal data give equal figures, whatever the order of the rows."""
    rows = Truth(passes=4).draw(5)
    assert throughput(rows, 8, seed=3) == throughput(rows[::-1], 8, seed=3)
    assert compare(rows, rows, seed=3) == compare(rows[::-1], rows, seed=3)


def test_single_passes_are_never_called_different():
    """One pass on a side says nothing on how passes differ, however large the ratio."""
    fast = replace(Truth(passes=1), speed=300.0)
    assert compare(fast.draw(0), Truth(passes=5).draw(1)) == Ratio(
        value=compare(fast.draw(0), Truth(passes=5).draw(1)).value, low=0.0, high=float("inf")
    )


def test_compare_uses_common_prompts_only():
    """Prompts that one side did not answer are left out on the other, so that like is compared with like."""
    truth = Truth(passes=4, pass_noise=0.0, request_noise=0.0, drift=0.0)
    full = truth.draw(0)
    part = [one for one in full if int(one.prompt_id[1:]) < 20]
    assert compare(full, part).value == pytest.approx(1.0)


def test_compare_refuses_what_cannot_be_compared():
    """No common prompt, no answers, or several concurrencies in one side are errors, not figures."""
    with pytest.raises(ValueError, match="no answered prompt in common"):
        compare([row()], [row(prompt_id="q")])
    with pytest.raises(ValueError, match="no answered prompt in common"):
        compare([row()], [row(error="HTTP 500")])
    with pytest.raises(ValueError, match="one concurrency"):
        compare([row(), row(concurrency=2)], [row()])


@pytest.mark.slow
def test_passes_that_agree_by_luck_do_not_end_a_bench():
    """Stopping at the first narrow interval picks the lucky ones: never after two passes, and the truth is held."""
    truth, stops, held = Truth(passes=8), [], []
    for seed in range(150):
        rows = truth.draw(seed)
        known = {n: throughput([one for one in rows if one.repeat < n], truth.concurrency) for n in range(2, 9)}
        stops.append(next((n for n, interval in known.items() if interval.half_width <= 0.02), 8))
        held.append(known[stops[-1]].low <= truth.throughput() <= known[stops[-1]].high)
    assert min(stops) > 2
    assert np.mean(held) >= 0.88


def test_exact_repeats_leave_the_least_doubt():
    """Data without any noise give the ratio itself, and the interval of passes that differ by 2.5 %, not none."""
    rows = [row(repeat=number, prompt_id=name) for number in range(3) for name in "ab"]
    slow = [one.model_copy(update={"latency_s": 2.0}) for one in rows]
    ratio = compare(rows, slow)
    factor = np.exp(1.96 * 0.025 * (2 / 3) ** 0.5)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2.0 / factor, 2.0, 2.0 * factor))
    assert ratio.different


def test_failed_cells_leave_the_rest_usable():
    """Requests that failed here and there cost what they would have given, and do not break the resampling."""
    truth = Truth(passes=5, pass_noise=0.01)
    rows = [one.model_copy(update={"error": "timed out"}) if n % 7 == 0 else one for n, one in enumerate(truth.draw(1))]
    ratio = compare(rows, truth.draw(2))
    assert ratio.value == pytest.approx(6 / 7, abs=0.03)
    assert np.isfinite([ratio.low, ratio.high]).all()


def test_by_category_adds_up():
    """Categories are told apart per concurrency, with their own accept length, and failed rows are left out."""
    rows = [
        row(verify_rounds=5),
        row(verify_rounds=3, repeat=1, completion_tokens=6, latency_s=0.5),
        row(category="chat", prompt_id="q", concurrency=4),
        row(category="chat", prompt_id="q", error="HTTP 500"),
    ]
    code, chat = by_category(rows)
    assert (code.category, code.requests, code.completion_tokens) == ("code", 2, 16)
    assert code.accept_len == pytest.approx(16 / 8)
    assert code.output_throughput == pytest.approx(16 / 1.5)
    assert (chat.category, chat.concurrency, chat.accept_len) == ("chat", 4, None)
    assert chat.output_throughput == pytest.approx(40.0)


def test_accept_len_is_a_ratio_of_sums():
    """Long answers weigh more than short ones, and rows without rounds stay out."""
    rows = [row(completion_tokens=90, verify_rounds=30), row(completion_tokens=10, verify_rounds=10), row()]
    assert accept_len(rows) == pytest.approx(100 / 40)
    assert accept_len([row()]) is None


def test_gaps_are_per_token():
    """A chunk of four tokens after 40 ms is four tokens at 10 ms; the first chunk has no gap."""
    gaps, weights = token_gaps([1.0, 1.04, 1.06], [2, 6, 7])
    assert gaps == pytest.approx([0.01, 0.02])
    assert weights == pytest.approx([4, 1])


def test_percentiles_go_by_weight():
    """The weighted percentile equals the percentile of the values written out as often as they weigh."""
    rng = np.random.default_rng(0)
    values, weights = rng.random(50), rng.integers(1, 9, 50)
    written_out = np.repeat(values, weights)
    wanted = np.percentile(written_out, (5, 50, 95), method="inverted_cdf")
    assert weighted_percentile(values, weights.astype(float), (5, 50, 95)) == pytest.approx(wanted)
    assert weighted_percentile(np.array([]), np.array([]), (50, 95)) == pytest.approx([0, 0])


def test_best_second_finds_the_burst():
    """The busiest window of one second counts, wherever it begins; its end is not in it."""
    times = np.array([0.0, 0.9, 1.0, 1.5, 1.95, 2.6])
    assert best_second(times, np.array([1.0, 2, 3, 4, 5, 6])) == 3 + 4 + 5
    assert best_second(times[::-1], np.array([6.0, 5, 4, 3, 2, 1])) == 3 + 4 + 5
    assert best_second(np.array([]), np.array([])) == 0


@pytest.mark.parametrize(("freedom", "wanted"), [(1, 12.706), (7.9, 2.365), (14, 2.145), (60, 2.000), (1e6, 1.960)])
def test_student_t(freedom, wanted):
    """Against the printed table, fractions rounded down."""
    assert t_975(freedom) == pytest.approx(wanted, rel=0.005)


@pytest.mark.parametrize("points", [3, 5])
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_equals_are_not_told_apart_however_much_launches_differ(points, noise):
    """Two rounds of equals, 2,000 times: two of them are called different in at most 6 %."""
    rng, told = np.random.default_rng(1), 0
    for _ in range(2000):
        logs = rng.normal(0, noise, (points, 2))
        found = launch_noise([(logs, np.zeros((points, 2)))])
        told += abs(logs[0].mean() - logs[1].mean()) > found.half_width(2, 2)
    assert told <= 0.06 * 2000


@pytest.mark.parametrize("shapes", [((2, 2), (2, 2)), ((4, 2),)])
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.1])
def test_what_few_repeated_launches_say_is_not_talked_down(noise, shapes):
    """A point and plain decoding, confirmed twice and searched once before; or three points searched and confirmed.

    Of 2,000 such studies of equals at most 12 % call two of them different.
    """
    rng, told = np.random.default_rng(1), 0
    for _ in range(2000):
        tables = [(rng.normal(0, noise, shape), np.zeros(shape)) for shape in shapes]
        found, logs = launch_noise(tables, alike=False), tables[0][0]
        told += abs(logs[0].mean() - logs[1].mean()) > found.half_width(2, 2)
    assert told <= 0.12 * 2000
