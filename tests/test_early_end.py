"""A launch that cannot be the best any more is ended early, kept, shown and never crowned; one that may win is not."""

import sys
from pathlib import Path

import pytest
from streaming_stub import Act, running, work

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import early_end as benchmark

from raytune_eagle import specfile
from raytune_eagle.measure import measure
from raytune_eagle.measure.early_end import Judge
from raytune_eagle.measure.passes import FILLER
from raytune_eagle.model.measurement import Request
from raytune_eagle.model.trial import Best
from raytune_eagle.model.workload import Workload
from raytune_eagle.ranking import leaderboard, searched
from raytune_eagle.simulation import fleet
from raytune_eagle.space import Space
from raytune_eagle.store import ParquetStore
from raytune_eagle.study import Study
from raytune_eagle.workload import load_prompts


@pytest.fixture
def stub():
    """A running stub."""
    with running() as server:
        yield server


def best(seconds=0.001, concurrency=1, prompts=16):
    """A best launch that answers 12 tokens in so many seconds."""
    each = tuple((f"p{n}", 12.0, seconds) for n in range(prompts))
    return Best(concurrency=concurrency, output_throughput=12 * concurrency / seconds, prompts=each)


def rows(seconds, concurrency=1, count=32):
    return [
        Request(
            concurrency=concurrency,
            repeat=0,
            prompt_id=f"p{n % 16}",
            category="a",
            started_s=0.0,
            latency_s=seconds * (1 + n % 3 / 100),
            completion_tokens=12,
        )
        for n in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["quiet", "usual", "loud"])
def test_of_those_ended_none_would_have_won(noise):
    """Of 700 simulated launches at each of three noises (2,100) at most 0.5 % of the ended ones were better."""
    found = benchmark.figures(benchmark.NOISES[noise], 700)
    assert found["ended"] > 200
    assert found["ended_that_would_have_won"] <= 0.005 * found["ended"]
    assert found["answers_saved"] > 0.3


def test_too_few_answers_say_nothing():
    """Eleven answers of a launch at half the speed are not enough, twelve are."""
    assert Judge([best(1.0)])(rows(2.0, count=11)) == ""
    assert "0.50 times the speed of the best" in Judge([best(1.0)])(rows(2.0, count=12))


def test_what_is_within_noise_goes_on():
    """Five percent behind may be noise of two launches; nothing to beat ends nothing."""
    assert Judge([best(1.0)])(rows(1.05)) == ""
    assert Judge([])(rows(100.0)) == ""


def test_other_concurrencies_may_make_up_for_it():
    """A quarter behind at the first of two concurrencies goes on; behind at both it ends, at the second."""
    judge = Judge([best(1.0), best(1.0, concurrency=4)])
    assert judge(rows(1.3)) == ""
    assert "at concurrency 4" in judge(rows(1.3, concurrency=4))


def test_a_slow_server_is_left_early(stub):
    """Against a real server: the bench stops within its first pass, what was answered is counted, the rest is not."""
    stub.act = lambda number, text: Act(pace_s=0.01)
    told = []
    workload = work(prompts=64, concurrency=(1, 2), max_passes=4)
    best_ones = [best(0.001, level, 64) for level in workload.concurrency]
    found = measure(stub, workload, lambda name, detail: told.append(name), judge=Judge(best_ones))
    assert "ended early after 1" in found.hopeless
    assert told[-1] == "hopeless"
    assert [m.concurrency for m in found.measurements] == [1]
    assert len(stub.bodies) < 64
    counted = [row for row in found.requests if row.repeat >= 0]
    assert 12 <= len(counted) < 20
    assert found.measurements[0].completion_tokens == 12 * len(counted)
    assert all(row.repeat == FILLER or row.latency_s > 0 for row in found.requests)


SPEC = {
    "name": "early",
    "engine": {"model": "/m", "draft": "/d/golden"},
    "workload": {"prompts": "builtin:mixed", "max_passes": 3},
    "space": {"speculative": {"num_steps": {"int": [1, 8]}, "eagle_topk": [1, 8], "num_draft_tokens": [2, 9, 32, 48]}},
    "search": {"sampler": "random", "seed": 1},
    "confirm": {"top": 1, "rounds": 1},
    "budget": {"trials": 14, "hours": 1000},
}


def night(tmp_path, **search):
    spec = specfile.parse({**SPEC, "search": {**SPEC["search"], **search}})
    space, store = Space(spec), ParquetStore(str(tmp_path / str(search)))
    store.declare(spec.name, {d.column: d.kind for d in space.dimensions})
    settings = spec.workload.settings()
    workload = Workload(prompts=load_prompts(spec.workload.prompts), **settings)
    Study(space, workload, store).run(fleet(spec, "simulated:kimi-k25", 1))
    return list(store.read(spec.name))


@pytest.mark.slow
def test_a_study_keeps_them_and_crowns_none(tmp_path):
    """Records say so after a round trip, rank below all that was measured whole, and are no candidate for the end."""
    records = night(tmp_path)
    early = [record for record in records if record.status == "hopeless"]
    assert early
    assert all(record.outcome.hopeless.startswith("ended early after") for record in early)
    rows = leaderboard(records, 1)
    order = [row.status for row in rows]
    assert order == sorted(order, key=["completed", "hopeless", "infeasible", "failed"].index)
    assert next(row.reason for row in rows if row.status == "hopeless").startswith("ended early")
    assert not {record.key for record in early} & {row.key for row in searched(records, 1)}
    assert {record.kind for record in early} == {"trial"}
    best_one = max(r.outcome.measurements[0].output_throughput for r in records if r.status == "completed")
    assert all(record.outcome.measurements[0].output_throughput < best_one for record in early)


@pytest.mark.slow
def test_it_saves_hours_and_finds_the_same(tmp_path):
    """With and without: the same winner, in less time; `end_hopeless: false` measures every launch to its end."""
    short, whole = night(tmp_path), night(tmp_path, end_hopeless=False)
    assert all(record.status != "hopeless" for record in whole)
    assert searched(short, 1)[0].key == searched(whole, 1)[0].key
    seconds = [max(r.ended_at for r in records if r.kind == "trial") for records in (short, whole)]
    assert seconds[0] < seconds[1]
