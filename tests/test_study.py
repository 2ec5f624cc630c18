"""The study loop, in virtual time: nothing launched twice, nothing lost, and it goes on where it stopped."""

import json
import re

import pytest
from made import SPEC, WORKLOAD, ListStore, completed, failed, make_space, surface
from virtual_studies import kinds, measured, run

from raytune_eagle.errors import SpecError
from raytune_eagle.model.trial import Completed
from raytune_eagle.nodes.simulated import Answer, SimulatedFleet
from raytune_eagle.study import Study


def test_baseline_first_on_every_node_then_exactly_the_budget():
    """Each node measures plain decoding before and after its trials; of those exactly `budget.trials` distinct ones."""
    store = ListStore()
    run(store, SimulatedFleet(["a", "b"], measured))
    assert kinds(store) == {"baseline": 4, "trial": 12}
    for node in ("a", "b"):
        mine = sorted((r for r in store.records if r.node == node), key=lambda r: r.started_at)
        assert [r.kind for r in mine] == ["baseline", *["trial"] * 6, "baseline"]
    trials = [r for r in store.records if r.kind == "trial"]
    assert len({r.key for r in trials}) == 12
    assert sorted(r.number for r in store.records) == list(range(16))


def test_start_from_comes_first_word_for_word():
    """The entries of start_from are the first trials, in order, as written."""
    starts = [
        {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 5, "num-continuous-decode-steps": 4},
        {"num_steps": 2, "eagle_topk": 1, "num_draft_tokens": 3},
    ]
    store = ListStore()
    run(store, SimulatedFleet(["a"], measured), make_space(start_from=starts))
    first, second = [r for r in store.records if r.kind == "trial"][:2]
    assert first.config.tuned_args == {"num-continuous-decode-steps": 4}
    assert second.params["num_steps"] == 2


def test_baseline_again_every_so_often():
    """After `baseline.every` trials on a node plain decoding is measured again there."""
    store = ListStore()
    run(store, SimulatedFleet(["a"], measured), make_space(baseline={"every": 4}))
    order = [r.kind[0] for r in sorted(store.records, key=lambda r: r.started_at)]
    assert "".join(order) == "bttttbttttbttttb"


def test_speedup_and_text_are_against_the_same_node():
    """A slow node's trial is compared with that node's own baseline, throughput and text."""

    def respond(node, job):
        slow = 0.5 if node == "b" else 1.0
        return Answer(completed(surface(job.config) * slow, texts={"p0": node}), 300.0)

    store = ListStore()
    run(store, SimulatedFleet(["a", "b"], respond))
    for r in store.records:
        if r.kind == "trial":
            assert r.speedup[1] == pytest.approx(surface(r.config) / 90.0)
            assert r.matches_baseline == {1: 1.0}


def test_text_that_differs_is_a_share():
    """One of three prompts that differs from the baseline makes two thirds."""

    def respond(node, job):
        return Answer(completed(100, texts={"p1": "other"} if job.config.speculative else {}), 1.0)

    store = ListStore()
    run(store, SimulatedFleet(["a"], respond))
    assert [r.matches_baseline[1] for r in store.records if r.kind == "trial"] == [pytest.approx(2 / 3)] * 12


def test_resume_runs_to_the_budget_and_repeats_nothing():
    """A study stopped by a bug goes on where it stopped: no number, point or baseline comes twice."""
    store, calls = ListStore(), []

    def stops(node, job):
        calls.append(job.number)
        if len(calls) > 7:
            raise RuntimeError("pulled the plug")
        return measured(node, job)

    with pytest.raises(RuntimeError):
        run(store, SimulatedFleet(["a", "b"], stops))
    before = len(store.records)
    assert 0 < before < 8
    study = run(store, SimulatedFleet(["a", "b"], measured))
    assert kinds(store) == {"baseline": 4, "trial": 12}
    assert len({r.key for r in study.trials}) == 12
    assert sorted(r.number for r in store.records) == list(range(16))


def test_points_kept_under_a_name_of_older_rules_are_not_launched_again():
    """Records whose key another version of the rules gave: their points are known by what was launched."""
    store = ListStore()
    small = {"num_steps": [3], "eagle_topk": [4], "num_draft_tokens": [5, 6, 7, 8]}
    space = {"space": {"speculative": small, "nccl": {}}}
    run(store, SimulatedFleet(["a"], measured), make_space(budget={"trials": 2}, **space))
    store.records = [record.model_copy(update={"key": "0" * 12}) for record in store.records]
    run(store, SimulatedFleet(["a"], measured), make_space(budget={"trials": 4}, **space))
    launched = [record.config.uid for record in store.records if record.kind == "trial"]
    assert len(launched) == len(set(launched)) == 4


def test_done_is_known_without_nodes():
    """A finished study says so before any node is asked for."""
    store = ListStore()
    assert not Study(make_space(), WORKLOAD, store).done()
    run(store, SimulatedFleet(["a"], measured))
    assert Study(make_space(), WORKLOAD, store).done()
    assert not Study(make_space(budget__trials=13), WORKLOAD, store).done()


def test_small_space_ends_by_itself():
    """When every valid point was launched the study ends, however large the budget, and is done."""
    space = make_space(space={"speculative": {"num_steps": [1, 2], "eagle_topk": [1, 2], "num_draft_tokens": [2, 3]}})
    store = ListStore()
    study = run(store, SimulatedFleet(["a"], measured), space)
    assert len(study.trials) == space.size == 5
    assert study.done()


@pytest.mark.parametrize("sampler", ["two-factor", "tpe", "random", "grid", "gp", "one-at-a-time"])
def test_samplers(sampler):
    """Every sampler fills the budget with distinct points, failures among them, and finds more than plain decoding."""

    def respond(node, job):
        spec = job.config.speculative
        bad = spec is not None and spec.num_draft_tokens > 12
        return Answer(failed() if bad else completed(surface(job.config)), 10.0)

    store = ListStore()
    study = run(store, SimulatedFleet(["a", "b", "c"], respond), make_space(search={"sampler": sampler, "seed": 3}))
    assert len({r.key for r in study.trials}) == 12
    best = max(r.outcome.measurements[0].output_throughput for r in study.trials if isinstance(r.outcome, Completed))
    assert best > 100


def test_tpe_learns():
    """On a clear surface TPE's launches are better in the mean than random ones: it hears what was measured."""

    def mean(sampler):
        store = ListStore()
        space = make_space(search={"sampler": sampler, "seed": 0}, budget__trials=40)
        figures = [
            r.outcome.measurements[0].output_throughput
            for r in run(store, SimulatedFleet(["a"], measured), space).trials
        ]
        return sum(figures) / len(figures)

    assert mean("tpe") > 1.03 * mean("random")


def test_hours_end_the_study():
    """No launch starts after the hours are over; what runs is kept."""
    store = ListStore()
    run(store, SimulatedFleet(["a"], measured), make_space(budget={"trials": 100, "hours": 0.1}))
    started = [r.started_at for r in store.records]
    assert len(started) == 12
    assert max(started) < 360


def test_other_spec_under_the_same_name_is_refused():
    """A changed spec is refused with the difference; a larger budget is not a change."""
    store = ListStore()
    run(store, SimulatedFleet(["a"], measured))
    with pytest.raises(SpecError) as caught:
        Study(make_space(engine__model="/other"), WORKLOAD, store)
    assert caught.value.problems[1] == '  engine.model: "/m" -> "/other"'
    Study(make_space(budget__trials=20), WORKLOAD, store)


def test_changed_prompts_are_refused():
    """The same file name with other prompts in it makes other figures: refused like any change."""
    store = ListStore()
    run(store, SimulatedFleet(["a"], measured))
    other = WORKLOAD.model_copy(update={"prompts": WORKLOAD.prompts[:1]})
    with pytest.raises(SpecError, match=r"workload.prompts \(contents\)"):
        Study(make_space(), other, store)


def test_spec_is_kept_before_the_first_launch():
    """Killed right after its first launch began, a study still knows what it was started with."""
    store = ListStore()

    def respond(node, job):
        assert [event.name for event in store.events] == ["study_started"]
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run(store, SimulatedFleet(["a"], respond))


def test_events_tell_the_story():
    """Every launch has its start and its end among the events, and the spec is in the first."""
    store = ListStore()
    study = run(store, SimulatedFleet(["a"], measured))
    assert store.events[0].name == "study_started"
    assert json.loads(store.events[0].detail)["name"] == study.spec.name
    for name in ("trial_started", "trial_done"):
        assert {e.number for e in store.events if e.name == name} == {r.number for r in store.records}
    assert SPEC  # the text that all of this came from


@pytest.mark.slow
def test_stops_when_nothing_is_worth_a_launch():
    """With search.stop_below the search ends before its budget, says why and what it gives up, and stays ended."""
    store = ListStore()
    space = make_space(search={"sampler": "two-factor", "stop_below": 0.01}, budget__trials=100, confirm={"top": 0})
    study = run(store, SimulatedFleet(["a", "b"], measured), space)
    assert 5 <= len(study.trials) < 50
    stopped = [event for event in store.events if event.name == "search_stopped"]
    assert len(stopped) == 1
    assert re.match(
        r"the best next launch is expected to gain 0\.\d\d%, less than search\.stop_below \(1\.00%\); given up: .*"
        r"num_steps=\d+, .*, which is faster than the best with a chance of \d+%",
        stopped[0].detail,
    )
    best = max(r.outcome.measurements[0].output_throughput for r in study.trials)
    assert best > 0.97 * max(surface(space.config(point)) for point in space.points())
    assert Study(space, WORKLOAD, store).done()
