"""The bench against a server that fails: each failure is told, and what was measured is kept."""

from __future__ import annotations

import re
import time

import pytest
from streaming_stub import Act, refused, run, running, work

from raytune_eagle.errors import SpecError


@pytest.fixture
def stub():
    """A running stub."""
    with running() as server:
        yield server


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        ("500", "HTTP 500: Internal Server Error"),
        ("drop", "the stream was cut off after 6 tokens"),
        ("cut", "the stream was cut off after 6 tokens"),
        ("zero", "the answer has 0 tokens"),
        ("error", "the server reported an error: input is longer than the context"),
        ("abort", "aborted by the server: out of memory"),
        ("garbage", "not a chunk of an answer: <html>"),
        ("stall", "timed out after 0.5 s without a token, 6 before"),
    ],
)
def test_each_failure_is_a_row_that_says_what_happened(stub, fail, said):
    """A request that fails is a row with its reason and without a hash; its tokens count nowhere."""
    stub.act = lambda number, text: Act(fail=fail if number == 6 else "")
    result = run(stub, work(max_failed_share=0.2, request_timeout_s=0.5))
    (failed,) = [row for row in result.requests if row.error]
    assert said.lower() in failed.error.lower()
    assert failed.output_hash is None
    assert result.measurements[0].failed_share == pytest.approx(1 / 8)
    assert result.measurements[0].completion_tokens == 7 * 12


@pytest.mark.slow
def test_a_steady_answer_may_take_longer_than_the_limit(stub):
    """Chunks 0.2 s apart are 2 s of an answer and never 1 s of silence: nothing failed."""
    stub.act = lambda number, text: Act(tokens=30, pace_s=0.2)
    result = run(stub, work(prompts=1, max_new_tokens=30, min_passes=1, max_passes=1, request_timeout_s=1.0))
    assert [row.error for row in result.requests if row.repeat >= 0] == [None]
    assert min(row.latency_s for row in result.requests) > 1.5


@pytest.mark.slow
def test_an_answer_that_drips_is_ended(stub):
    """Never silent for long, but slower than anybody would serve: its node is worth more than its end."""
    stub.act = lambda number, text: Act(tokens=12, step=1, pace_s=0.9 if number == 6 else 0.0)
    result = run(stub, work(max_failed_share=0.2, max_new_tokens=8, request_timeout_s=3.0))
    (failed,) = [row for row in result.requests if row.error]
    assert re.fullmatch(r"timed out after 7 s with \d+ tokens: 0.5 s a token and more", failed.error)
    assert 6.9 < failed.latency_s < 20


def test_an_answer_that_does_not_end_is_ended(stub):
    """Steady, but far past what was asked for: it would hold the bench for ever."""
    stub.act = lambda number, text: Act(tokens=3000 if number == 6 else 12, pace_s=0.01, delta=True)
    began = time.perf_counter()
    result = run(stub, work(max_failed_share=0.2, request_timeout_s=2.0))
    (failed,) = [row for row in result.requests if row.error]
    assert "does not end: " in failed.error
    assert "tokens are more than 2 times what was asked for" in failed.error
    assert time.perf_counter() - began < 20


def test_too_many_failures_end_the_bench_early(stub):
    """More failures than allowed end the bench with counts, the first different errors, and all rows."""
    stub.act = lambda number, text: Act(fail=["500", "", "error"][number % 3])
    error = refused(stub, work(40, max_passes=8, max_failed_share=0.05))
    assert error.failure_class == "requests_failed"
    assert "of 7 requests failed at concurrency 1 (at most 5.0% may): HTTP 500" in error.detail
    assert "; the server reported an error" in error.detail
    assert len(error.requests) == len(stub.bodies) < 20
    assert sum(row.error is not None for row in error.requests) == 5


def test_a_bench_without_a_token_is_no_figure(stub):
    """Where all may fail and all do, the bench fails, with its rows; 0 tokens per second would be read as measured."""
    stub.act = lambda number, text: Act(fail="500")
    error = refused(stub, work(4, max_failed_share=1.0))
    assert (error.failure_class, error.detail) == ("requests_failed", "not one token came at concurrency 1")
    assert len(error.requests) >= 4


def test_share_is_of_the_whole_bench_not_of_its_beginning(stub):
    """One failure among the first requests is no reason to stop when the whole bench can carry it."""
    stub.act = lambda number, text: Act(fail="500" if number == 0 else "", pace_s=0.0)
    result = run(stub, work(40, max_failed_share=0.02))
    assert [row.error is not None for row in result.requests].count(True) == 1


def test_a_dead_server_ends_the_bench_within_two_seconds(stub):
    """The classified error of `check` comes through within 2 s, with the rows so far and those under way."""
    stub.act = lambda number, text: Act(tokens=900, pace_s=0.01, delta=True) if number >= 8 else Act()
    stub.dead_at = time.perf_counter() + 1.0
    error = refused(stub, work(40, concurrency=(2,), request_timeout_s=60))
    assert time.perf_counter() - stub.dead_at < 2.0
    assert error.failure_class == "cuda_ima"
    assert len(error.requests) == len(stub.bodies)
    assert sum(row.error is None for row in error.requests) == 8
    assert [row.completion_tokens > 0 for row in error.requests if row.error] == [True, True]
    assert "not finished when the bench ended" in error.requests[-1].error


def test_broken_connections_of_a_dying_server_are_blamed_on_its_death(stub):
    """Connections break before the process is seen dead: the bench waits a moment for the real reason."""
    stub.act = lambda number, text: Act(fail="drop" if number >= 6 else "")
    stub.dead_at = time.perf_counter() + 0.6
    error = refused(stub, work())
    assert error.failure_class == "cuda_ima"
    assert error.requests


def test_a_refusing_server_that_lives_fails_by_its_requests(stub):
    """Nothing listens, the process lives: the bench ends with the connection error, and soon."""
    stub.url = "http://127.0.0.1:9"
    began = time.perf_counter()
    error = refused(stub, work(40, concurrency=(8,)))
    assert error.failure_class == "requests_failed"
    assert "Connection refused" in error.detail
    assert time.perf_counter() - began < 3


def test_rows_of_earlier_concurrencies_are_not_lost(stub):
    """A bench that fails at its second concurrency still hands back the rows of the first."""
    stub.act = lambda number, text: Act(fail="500" if number > 12 else "")
    error = refused(stub, work(concurrency=(1, 2)))
    assert [row.concurrency for row in error.requests].count(1) == 12


def test_bugs_are_not_swallowed(stub):
    """An exception of `check` that is no BenchError comes through as it is, and nothing goes on running."""
    stub.act = lambda number, text: Act(tokens=900, pace_s=0.01, delta=True)

    class BrokenError(Exception): ...

    def check() -> None:
        raise BrokenError

    stub.check = check
    with pytest.raises(BrokenError):
        run(stub, work())


def test_no_prompts_is_a_mistake_of_the_spec(stub):
    """An empty workload is refused and not measured as zero."""
    with pytest.raises(SpecError, match="no prompts"):
        run(stub, work(prompts=0))


def test_server_is_checked_through_the_run(stub):
    """`check` is called at least once a second."""
    stub.act = lambda number, text: Act(pace_s=0.016)
    began = time.perf_counter()
    run(stub, work())
    assert stub.checks >= max(2, time.perf_counter() - began)
