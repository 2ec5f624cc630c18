"""The bench, against a real HTTP server that streams in SGLang's shape and fails on demand."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from streaming_stub import Act, passes, run, running, work

from raytune_eagle.measure import measure
from raytune_eagle.measure.client import data_lines
from raytune_eagle.measure.passes import FILLER, WARM_UP
from raytune_eagle.measure.wire import token_count
from raytune_eagle.model.workload import Prompt, Workload

CAPTURES = Path(__file__).parent / "assets" / "streams"


@pytest.fixture
def stub():
    """A running stub."""
    with running() as server:
        yield server


def test_samples_of_the_machine_are_kept_by_pass(stub):
    """Twice a second, with the pass that they fell into: what tells why one pass was slower than another."""
    prompts = tuple(Prompt(id=f"p{n}", category="code", text=f"text {n}") for n in range(8))
    stub.act = lambda number, text: Act(tokens=30, pace_s=0.01)
    result = run(stub, Workload(prompts=prompts, min_passes=2, max_passes=2, precision=0.9))
    assert {sample.repeat for sample in result.samples} >= {0, 1}
    assert len(result.samples) >= 4
    assert all(sample.vitals.other_cores is not None for sample in result.samples)


def test_figures_are_the_servers_own(stub):
    """Tokens, rounds, histogram (under its old name) and accept figures are what the server said, not its chunks."""
    result = run(stub, work())
    (figures,) = result.measurements
    counted = [row for row in result.requests if row.repeat >= 0]
    assert figures.passes == 2
    assert figures.completion_tokens == 2 * 4 * 12
    assert figures.verify_rounds == 2 * 4 * 4
    assert figures.accept_len == pytest.approx(3.0)
    assert figures.accept_rate == pytest.approx(2 / 5)
    assert figures.failed_share == 0
    assert {(row.completion_tokens, row.verify_rounds, row.accept_histogram) for row in counted} == {(12, 4, (0, 0, 4))}
    assert all(row.prompt_tokens == 5 and row.category in "ab" for row in counted)
    assert figures.output_throughput == pytest.approx(1000 * figures.accept_len / figures.cycle_ms)


@pytest.mark.parametrize("delta", [True, False])
def test_ids_that_came_are_counted_beside_the_servers_count(stub, delta):
    """Whether chunks repeat what came before or not."""
    stub.act = lambda number, text: Act(delta=delta)
    assert {row.least_tokens for row in run(stub, work(max_passes=1)).requests if row.error is None} == {12}


def test_times_are_those_of_the_stream(stub):
    """First token, latency and gaps per token agree with a server that sends 3 tokens each 30 ms."""
    stub.act = lambda number, text: Act(pace_s=0.03, tokens=15)
    result = run(stub, work(prompts=3))
    (figures,) = result.measurements
    assert 25 <= figures.ttft_p50_ms <= 60  # after the comment, which comes first and is no token
    assert figures.itl_p50_ms == pytest.approx(10, rel=0.3)
    assert figures.output_throughput == pytest.approx(15 / 0.21, rel=0.25)
    assert 50 <= figures.burst_throughput <= 90
    row = result.requests[-1]
    assert row.itl_p50_ms == pytest.approx(10, rel=0.3)
    assert row.started_s + row.latency_s <= result.warmup_s + result.bench_s


def test_asks_for_what_the_workload_says(stub):
    """Each request carries the prompt, the sampling parameters, `stream` and the server's headers."""
    stub.headers = {"Authorization": "Bearer secret"}
    run(stub, work(temperature=0.5, ignore_eos=True))
    for body in stub.bodies:
        assert body["text"].startswith("prompt ")
        assert body["stream"] is True
        assert body["sampling_params"] == {"temperature": 0.5, "max_new_tokens": 12, "ignore_eos": True}
    assert {headers["Authorization"] for headers in stub.seen_headers} == {"Bearer secret"}


def test_passes_are_whole_shuffled_and_repeatable(stub):
    """Every pass has each prompt once, in another order; the same seed gives the same orders, another seed others."""
    stub.act = lambda number, text: Act(pace_s=0.0)
    first, again, other = (
        passes(run(stub, work(12, max_passes=3, precision=1e-6, seed=s)).requests) for s in (1, 1, 2)
    )
    assert all(sorted(order) == sorted(first[0]) for order in first)
    assert len({tuple(order) for order in first}) == len(first)
    assert first == again
    assert len(first) == 3
    assert first[0] != other[0]


@pytest.mark.parametrize(("concurrency", "warm"), [(1, 4), (6, 12)])
def test_warm_up_is_bounded_kept_and_marked(stub, concurrency, warm):
    """The warm-up is max(2 x concurrency, 4) requests at the same concurrency, kept as repeat -1, and in no figure."""
    result = run(stub, work(concurrency=(concurrency,)))
    repeats = Counter(row.repeat for row in result.requests)
    assert repeats[WARM_UP] == warm
    assert repeats[FILLER] <= concurrency
    assert len(result.requests) == len(stub.bodies)
    assert result.measurements[0].completion_tokens == 12 * sum(n for repeat, n in repeats.items() if repeat >= 0)
    assert 0 < result.warmup_s < 5
    assert result.bench_s > 0


def test_counted_requests_see_a_full_server(stub):
    """While a counted request runs there are always `concurrency` streams, never more, even with one slow prompt."""
    stub.act = lambda number, text: Act(tokens=60 if text == "prompt 3" else 12, pace_s=0.004)
    result = run(stub, work(10, concurrency=(4,)))
    counted = [row for row in result.requests if row.repeat >= 0]
    spans = [(row.started_s, row.started_s + row.latency_s) for row in result.requests]
    assert max(sum(a <= at < b for a, b in spans) for at, _ in spans) == 4
    begin, end = min(row.started_s for row in counted), max(row.started_s + row.latency_s for row in counted)
    for since in (begin, end - 0.06):  # all the while, and in the tail, where the slow prompt would be alone
        busy = sum(max(0.0, min(b, end) - max(a, since)) for a, b in spans)
        assert 3.4 <= busy / (end - since) <= 4.0


@pytest.mark.slow
def test_a_slow_last_prompt_does_not_lower_throughput(stub):
    """One prompt five times as long as the others leaves the throughput of streams of one speed as it was."""

    def throughput(longest):
        stub.act = lambda number, text: Act(tokens=longest if text == "prompt 3" else 60, pace_s=0.02)
        return run(stub, work(8, concurrency=(8,), max_passes=2)).measurements[0].output_throughput

    # counted by the wall clock, the tail of one stream would make it less than half
    assert throughput(300) == pytest.approx(throughput(60), rel=0.25)


def test_several_concurrencies_are_measured_one_after_the_other(stub):
    """Each concurrency has its figures and its own warm-up, in the order asked for."""
    stub.act = lambda number, text: Act(pace_s=0.01)
    result = run(stub, work(concurrency=(4, 1)))
    assert [figures.concurrency for figures in result.measurements] == [4, 1]
    assert result.measurements[0].output_throughput > 2.5 * result.measurements[1].output_throughput
    assert {row.concurrency for row in result.requests if row.repeat == WARM_UP} == {1, 4}
    assert [row.started_s for row in result.requests].count(0.0) == 2


def test_a_steady_server_needs_few_passes_and_a_moody_one_all(stub):
    """Passes stop as soon as the interval is narrow enough, and at the latest at `max_passes`, then not stable."""
    stub.act = lambda number, text: Act(pace_s=0.01)
    (steady,) = run(stub, work(6, max_passes=8, precision=0.2)).measurements
    assert steady.stable
    assert 2 <= steady.passes < 8
    assert (steady.ci_high - steady.ci_low) / 2 <= 0.2 * steady.output_throughput
    stub.bodies.clear()
    stub.act = lambda number, text: Act(pace_s=0.002 if (number - 4) // 6 % 2 else 0.008)
    (moody,) = run(stub, work(6, max_passes=4, precision=0.1)).measurements
    assert not moody.stable
    assert moody.passes == 4


def test_min_passes_are_kept(stub):
    """However steady the server, no bench is shorter than asked for."""
    (figures,) = run(stub, work(min_passes=3, max_passes=5, precision=0.9)).measurements
    assert figures.passes >= 3


def test_progress_tells_of_each_pass(stub):
    """Every pass is told, with its number, concurrency and figure."""
    told = []
    measure(stub, work(), lambda name, detail: told.append((name, detail)))
    assert [name for name, _ in told] == ["pass", "pass"]
    assert told[1][1].startswith("2 of at most 2 at concurrency 1: ")
    assert "tok/s" in told[1][1]


def test_both_ways_of_streaming_give_the_same_text(stub):
    """The hash is of the whole text, whether chunks repeat the text so far or bring only what is new."""
    hashes = set()
    for delta, step in ((False, 3), (True, 3), (True, 12), (False, 1), (True, 1)):
        act = Act(delta=delta, step=step, pace_s=0.0)
        stub.act = lambda number, text, act=act: act
        hashes |= {row.output_hash for row in run(stub, work()).requests}
    assert len(hashes) == 1
    assert len(hashes.pop()) == 16


@pytest.mark.parametrize("size", [1, 7, 1000, 10**6])
@pytest.mark.parametrize("name", ["baseline", "eagle3_3_4_16"])
def test_real_streams_are_read_however_they_are_cut(stub, name, size):
    """A captured stream of SGLang 0.5.16 gives its tokens, rounds and text, cut into pieces of any size."""
    raw = (CAPTURES / f"{name}.sse").read_bytes()
    if size == 1:
        raw = raw[-4000:][raw[-4000:].index(b"data:") :]  # bytes one by one take long
    pieces = tuple(raw[start : start + size] for start in range(0, len(raw), size))
    stub.act = lambda number, text: Act(raw=pieces, pace_s=0.0)
    rows = run(stub, work(2, min_passes=1, max_passes=1)).requests
    final = json.loads([line for line in raw.split(b"\n") if line.startswith(b"data: {")][-1][6:])
    assert {row.error for row in rows} == {None}
    assert {row.completion_tokens for row in rows} == {24}
    assert {row.verify_rounds for row in rows} == {final["meta_info"].get("spec_verify_ct")}
    assert len({row.output_hash for row in rows}) == 1
    histogram = tuple(final["meta_info"].get("spec_correct_drafts_histogram", ()))
    assert {row.accept_histogram for row in rows} == {histogram}


def test_plain_decoding_has_no_accept_figures(stub):
    """Without speculation accept_len, accept_rate and rounds are None, and a cycle is a token."""
    raw = (CAPTURES / "baseline.sse").read_bytes()
    stub.act = lambda number, text: Act(raw=(raw,))
    (figures,) = run(stub, work()).measurements
    assert (figures.accept_len, figures.accept_rate, figures.verify_rounds) == (None, None, None)
    assert figures.output_throughput == pytest.approx(1000 / figures.cycle_ms)


def test_token_count_is_not_fooled_by_the_text():
    """A text that quotes the field does not change the count; other spacing does not hide it."""
    text = json.dumps({"text": '"completion_tokens":99', "meta_info": {"a": 1, "completion_tokens": 7, "z": "x"}})
    assert token_count(text.encode()) == 7
    assert token_count(text.replace(": ", ":").encode()) == 7
    assert token_count(b'{"text": "completion_tokens"}') is None
    assert token_count(b'{"completion_tokens":null}') is None


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_events_survive_any_cut(size):
    """Payloads come out whole and in order wherever the network cuts, and an unfinished one stays waiting."""
    raw = b': note\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\ndata: {"c'
    buffer, got = bytearray(), []
    for start in range(0, len(raw), size):
        got += data_lines(buffer, raw[start : start + size])
    assert got == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]
    assert bytes(buffer) == b'data: {"c'


def test_fillers_are_not_waited_for_once_all_is_decided(stub):
    """One that never ends costs nothing at the last concurrency, and a slow answer's time before another."""
    stub.act = lambda number, text: Act(tokens=12, pace_s=1.0 if number >= 4 + 2 * 8 else 0.002)
    began = time.perf_counter()
    result = run(stub, work(prompts=8, concurrency=(2,), precision=0.9, request_timeout_s=30.0))
    assert time.perf_counter() - began < 3
    assert result.measurements[0].failed_share == 0
    late = [row for row in result.requests if row.repeat == FILLER]
    assert late
    assert all("not finished when the bench ended" in row.error for row in late)


def test_fillers_that_fail_take_no_figures_along(stub):
    """All passes are whole by then."""
    stub.act = lambda number, text: Act(fail="status" if number >= 4 + 2 * 8 else "")
    result = run(stub, work(prompts=8, concurrency=(2, 4), precision=0.9, max_failed_share=1.0))
    assert result.measurements[0].failed_share == 0
