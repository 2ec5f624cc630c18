"""What every Store keeps, checked on a local folder, a file:// URI, an in-memory filesystem and a subtree of one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_records import trial
from pyarrow import fs

from raytune_eagle.errors import StoreError
from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.measurement import Gate, Measurement, Request
from raytune_eagle.model.trial import Completed, Event, Failed, NodeFacts, Phases, ServerFacts, TrialRecord
from raytune_eagle.ports import Store
from raytune_eagle.store import ParquetStore

TEXT = st.text(max_size=12)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
MAYBE = st.none() | NUMBER
POSITIVE = st.floats(0, exclude_min=True, allow_infinity=False)
COUNT = st.integers(0, 2**40)
FLAG = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | NUMBER | TEXT | st.lists(TEXT, max_size=2)
WORDS = st.dictionaries(TEXT, TEXT, max_size=3)
INSTANT = st.floats(0, 4e9)
MEASUREMENT = st.builds(
    Measurement,
    concurrency=st.integers(1, 64),
    accept_len=MAYBE,
    accept_rate=MAYBE,
    verify_rounds=st.none() | COUNT,
    passes=COUNT,
    completion_tokens=COUNT,
    **dict.fromkeys(["output_throughput", "ci_low", "ci_high"], POSITIVE),
    **dict.fromkeys(["cycle_ms", "burst_throughput", "ttft_p50_ms", "ttft_p95_ms"], NUMBER),
    **dict.fromkeys(["itl_p50_ms", "itl_p95_ms", "failed_share"], NUMBER),
)
REQUEST = st.builds(
    Request,
    ttft_s=MAYBE,
    itl_p50_ms=MAYBE,
    verify_rounds=st.none() | COUNT,
    accept_histogram=st.lists(COUNT, max_size=4).map(tuple),
    output_hash=st.none() | TEXT,
    error=st.none() | TEXT,
    prefix_hashes=st.lists(TEXT, max_size=4).map(tuple),
    compression=MAYBE,
    least_tokens=st.none() | COUNT,
    **dict.fromkeys(["concurrency", "repeat", "prompt_tokens", "completion_tokens"], COUNT),
    **dict.fromkeys(["started_s", "latency_s"], NUMBER),
)
GATE = st.builds(
    Gate, name=st.sampled_from(["accept_len", "text"]), verdict=st.sampled_from(["passed", "failed"]), detail=TEXT
)
SHARED = {
    "gates": st.lists(GATE, max_size=2).map(tuple),
    "requests": st.lists(REQUEST, max_size=3).map(tuple),
    "server": st.builds(ServerFacts, resolved_args=TEXT, version=TEXT),
    "phases": st.builds(Phases, launch_s=MAYBE, ready_s=MAYBE, warmup_s=MAYBE, bench_s=MAYBE, teardown_s=MAYBE),
}
COMPLETED = st.builds(
    Completed,
    measurements=st.lists(MEASUREMENT, max_size=3, unique_by=lambda found: found.concurrency).map(tuple),
    **SHARED,
)
FAILED = st.builds(
    Failed, **dict.fromkeys(["failure_class", "failure_phase", "failure_detail", "log_tail"], TEXT), **SHARED
)
CONFIG = st.builds(
    Config,
    model=TEXT,
    speculative=st.none() | st.builds(Speculative, draft=TEXT),
    args=st.dictionaries(TEXT, FLAG, max_size=3),
    tuned_args=st.dictionaries(TEXT, FLAG, max_size=3),
    env=WORDS,
    launcher=st.lists(TEXT, max_size=3).map(tuple),
)
RECORD = st.builds(
    TrialRecord,
    study=st.just("s"),
    number=st.integers(0, 10**7),
    config=CONFIG,
    params=st.dictionaries(st.sampled_from(["num_steps", "nccl_proto", "tp-size"]), FLAG),
    started_at=INSTANT,
    ended_at=INSTANT,
    facts=st.builds(NodeFacts, hardware=TEXT, versions=WORDS, gpu_ids=st.lists(TEXT, max_size=2).map(tuple)),
    violations=st.lists(TEXT, max_size=2).map(tuple),
    outcome=COMPLETED | FAILED,
    speedup=st.dictionaries(st.integers(1, 64), NUMBER, max_size=3),
    matches_baseline=st.dictionaries(st.integers(1, 64), NUMBER, max_size=3),
    **dict.fromkeys(["key", "node"], TEXT),
)


def record(number: int = 0, **changes: object) -> TrialRecord:
    """Smallest failed trial."""
    return trial(number, None, **changes)


@pytest.fixture(params=["path", "file-uri", "memory", "subtree"])
def reopen(request, tmp_path) -> Callable[[], Store]:
    """Open the same store anew at each call."""
    if request.param == "path":
        return lambda: ParquetStore(str(tmp_path / "results"))
    if request.param == "file-uri":
        return lambda: ParquetStore((tmp_path / "results").as_uri())
    memory, _ = fs.FileSystem.from_uri("mock:///")
    if request.param == "memory":
        return lambda: ParquetStore("results", memory)
    subtree = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    return lambda: ParquetStore("", subtree)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=RECORD)
def test_a_record_comes_back_equal(tmp_path_factory, wanted):
    """Whatever a record holds (any text, None, empty, 64-bit and mixed-type parameters) is read back exactly."""
    root = str(tmp_path_factory.mktemp("any"))
    ParquetStore(root).append(wanted)
    assert list(ParquetStore(root).read("s")) == [wanted]
    assert ParquetStore(root).problems("s") == []


def test_records_come_by_number_and_from_another_opening(reopen):
    """What one opening appended in any order another reads by number."""
    wanted = [record(number) for number in (10, 2, 0, 100_000)]
    for one in wanted:
        reopen().append(one)
    assert list(reopen().read("s")) == sorted(wanted, key=lambda one: one.number)


def test_requests_come_back_in_order(reopen):
    """A trial's requests are read back with it, in their order."""
    requests = tuple(
        Request(concurrency=1, repeat=r, prompt_id=p, category="c", started_s=0.1, latency_s=0.2)
        for r in (-1, 1, 0)
        for p in "ba"
    )
    wanted = record(outcome=Completed(measurements=(), requests=requests))
    reopen().append(wanted)
    assert list(reopen().read("s")) == [wanted]


def test_a_number_is_kept_once(reopen):
    """A second record with one number raises, even of another configuration, and changes nothing."""
    reopen().append(record())
    with pytest.raises(StoreError, match="trial 0 is kept already"):
        reopen().append(record(config=Config(model="other")))
    assert list(reopen().read("s")) == [record()]


def test_an_unknown_study_is_empty(reopen):
    """Asking for a study that was never written gives nothing and no error."""
    assert list(reopen().read("never")) == []
    assert list(reopen().read_events("never")) == []


def test_studies_do_not_mix(reopen):
    """Each study reads back its own trials only, also when a name begins like another."""
    for study in ("s", "s2"):
        reopen().append(record(study=study))
    assert [one.study for one in reopen().read("s")] == ["s"]


def test_events_come_by_time(reopen):
    """Events of several writes are read by time, those of one moment in the order they were written."""
    events = [Event(at=at, study="s", name=name) for at, name in ((3.5, "c"), (1.25, "a"), (1.25, "b"))]
    reopen().append_events("s", events[:2])
    reopen().append_events("s", events[2:])
    reopen().append_events("s", [])
    assert list(reopen().read_events("s")) == [events[1], events[2], events[0]]


def test_events_of_another_study_are_refused(reopen):
    """Events cannot land in a study that is not theirs."""
    with pytest.raises(StoreError, match="another study"):
        reopen().append_events("s", [Event(at=0, study="t", name="x")])
    assert list(reopen().read_events("s")) == []


@pytest.mark.parametrize(
    "study", ["", "..", "a/b", "/a", "a/../b", ".hidden", "a..b", "a b", "2024", "2024-01-01", "inf"]
)
def test_a_name_that_is_no_folder_is_refused(reopen, study):
    """Names that leave the results folder, hide in it, or that readers take for numbers or dates raise on each call."""
    store = reopen()
    for call in (
        lambda: store.append(record(study=study)),
        lambda: store.append_events(study, [Event(at=0, study=study, name="x")]),
        lambda: list(store.read(study)),
        lambda: list(store.read_events(study)),
    ):
        with pytest.raises(StoreError, match="cannot name a study"):
            call()
