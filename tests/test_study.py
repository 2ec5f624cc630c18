"""The study loop, in virtual time: nothing launched twice, nothing lost, and it goes on where it stopped."""

import json
import re
from collections import Counter

import pytest
from made import SPEC, WORKLOAD, ListStore, completed, failed, make_space, surface

from raytune_eagle.errors import NodeError, SpecError
from raytune_eagle.model.trial import Completed, Failed, NodeFacts
from raytune_eagle.model.workload import Prompt
from raytune_eagle.nodes.simulated import Answer, SimulatedFleet
from raytune_eagle.study import Study


def measured(node, job):
    return Answer(completed(surface(job.config)), 300.0)


def run(store, fleet, space=None):
    study = Study(space or make_space(), WORKLOAD, store)
    study.run(fleet)
    return study


def kinds(store):
    return Counter(r.kind for r in store.records)


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


@pytest.mark.parametrize(("gpus", "order"), [(("A", "B"), "btttbtttb"), (("A", "C"), "btttbbtttb"), ((), "btttbtttb")])
def test_a_node_with_other_gpus_measures_plain_decoding_anew(gpus, order):
    """A node is its name and its GPUs: whether plain decoding is known does not depend on Ray's ids, but on those."""
    store = ListStore()
    for trials, ids in ((3, ("A", "B")), (6, gpus)):
        start = max((r.ended_at for r in store.records), default=0.0)
        fleet = SimulatedFleet(["a"], measured, start, NodeFacts(gpu_ids=ids))
        run(store, fleet, make_space(budget={"trials": trials}))
    assert "".join(r.kind[0] for r in sorted(store.records, key=lambda r: r.started_at)) == order


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


def test_lost_machine_asks_the_same_number_again_elsewhere():
    """A trial under a node that failed is not judged: same number, other node, nothing recorded for the loss."""
    lost = []

    def respond(node, job):
        if node == "a" and job.kind == "trial" and not lost:
            lost.append(job.number)
            return Answer(NodeError("power cut"), 5.0)
        return measured(node, job)

    store = ListStore()
    run(store, SimulatedFleet(["a", "b"], respond))
    again = next(r for r in store.records if r.number == lost[0])
    assert (again.node, again.status) == ("b", "completed")
    assert kinds(store) == {"baseline": 4, "trial": 12}
    assert any(e.name == "node_quarantined" and e.node == "a" for e in store.events)


def test_configuration_that_takes_down_two_nodes_is_lost():
    """The second node lost under one configuration marks it; it is not asked a third time and the study goes on."""
    killer, tries = [], Counter()

    def respond(node, job):
        if job.kind == "trial":
            killer or killer.append(job.config.uid)
            if job.config.uid == killer[0]:
                tries[node] += 1
                return Answer(NodeError("machine hangs"), 5.0)
        return measured(node, job)

    store = ListStore()
    study = run(store, SimulatedFleet(["a", "b", "c"], respond))
    lost = next(r for r in study.trials if r.config.uid == killer[0])
    assert lost.status == "lost"
    assert isinstance(lost.outcome, Failed)
    assert sorted(tries.values()) == [1, 1]
    assert len(study.trials) == 12


def out_of_touch(meanwhile):
    """Node "a" is given up under its second launch, and back with that launch's result after `meanwhile` seconds."""
    lost, fleet = [], None

    def respond(node, job):
        if node == "a" and job.kind == "trial" and not lost:
            lost.append(job)
            return Answer(NodeError("a: out of touch for 60 s"), 60.0)
        if lost and not lost[1:] and fleet.now() >= 360 + meanwhile:
            lost.append(job)
            fleet.delivered_late.append(("a", lost[0], completed(1234)))
        return Answer(completed(surface(job.config)), 100.0)

    fleet = SimulatedFleet(["a", "b"], respond)
    store = ListStore()
    run(store, fleet)
    assert len(lost) == 2
    assert sorted(r.number for r in store.records) == list(range(len(store.records)))
    assert Counter(r.key for r in store.records if r.kind == "trial").most_common(1)[0][1] == 1
    assert kinds(store)["trial"] == 12
    return next(r for r in store.records if r.number == lost[0].number)


def test_late_result_is_kept_once():
    """A node that was given up is back with a result before the trial has one elsewhere: it counts, as its own."""
    record = out_of_touch(meanwhile=-250)
    assert (record.node, record.outcome.measurements[0].output_throughput) == ("a", 1234)


def test_result_that_is_too_late_is_dropped():
    """After the trial came to a result elsewhere, a late one is not counted twice."""
    assert out_of_touch(meanwhile=200).node == "b"


def test_a_single_node_gets_its_lost_trial_back():
    """With no other node the trial is asked again on the same one, three tries in all."""
    tries = Counter()

    def respond(node, job):
        tries[job.number] += 1
        if job.kind == "trial" and tries[job.number] == 1 and job.number == 1:
            return Answer(NodeError("hiccup"), 5.0)
        return measured(node, job)

    store = ListStore()
    study = run(store, SimulatedFleet(["a"], respond))
    assert tries[1] == 2
    assert {r.status for r in study.trials} == {"completed"}


def test_outcome_survives_a_machine_that_fails_at_the_end():
    """A trial judged before its GPUs failed to come free is kept, not asked again; the node rests."""

    def respond(node, job):
        if job.kind == "trial" and job.number == 3:
            return Answer(NodeError("GPU 3 keeps 20 GiB", completed(123.0)), 5.0)
        return measured(node, job)

    store = ListStore()
    study = run(store, SimulatedFleet(["a"], respond))
    assert study.records[3].outcome.measurements[0].output_throughput == 123.0
    assert any(e.name == "node_quarantined" for e in store.events)


@pytest.mark.parametrize(("phase", "elsewhere"), [("bench", False), ("launch", True)])
def test_plain_decoding_that_fails_once_stops_nothing(phase, elsewhere):
    """A server that was killed while it was measured, or a node on which it fails: it rests and tries again."""
    down = Failed(failure_class="killed_by_os", failure_phase=phase, failure_detail="made for a test")

    def respond(node, job):
        first = node == "a" and not any(r.node == "a" for r in store.records)
        late = first and elsewhere
        return Answer(down if first else completed(surface(job.config)), 500.0 if late else 100.0)

    store = ListStore()
    study = run(store, SimulatedFleet(["a", "b"] if elsewhere else ["a"], respond))
    assert {r.status for r in study.trials} == {"completed"}
    assert [r.status for r in store.records if r.node == "a" and r.kind == "baseline"][:2] == ["failed", "completed"]
    assert any(e.name == "node_quarantined" and "plain decoding failed" in e.detail for e in store.events)


def test_plain_decoding_that_fails_stops_the_study():
    """If even the baseline fails, no launch could be judged: the study stops at once and says why; the record stays."""
    store = ListStore()
    with pytest.raises(SpecError, match=r"plain decoding itself fails.*model_missing"):
        run(store, SimulatedFleet(["a"], lambda node, job: Answer(failed("model_missing"), 1.0)))
    assert [(r.kind, r.status) for r in store.records] == [("baseline", "failed")]


@pytest.mark.parametrize(("name", "launches"), [("draft_class", 1), ("shape_mismatch", 3), ("accept_len", 3)])
def test_only_draft_that_is_at_fault_stops_the_study(name, launches):
    """No night is spent on a draft that cannot work: the study ends with the reason, its records kept."""

    def respond(node, job):
        return Answer(failed(name) if job.config.speculative else completed(90), 1.0)

    store = ListStore()
    with pytest.raises(SpecError, match=rf"engine.draft: no launch with it succeeds \({launches} failed, {name}\)"):
        run(store, SimulatedFleet(["a"], respond))
    assert kinds(store) == {"baseline": 1, "trial": launches}


def test_draft_failure_stops_nothing_where_another_may_work():
    """With two drafts, after a success, or of a class that a configuration is to blame for, the search goes on."""
    two = make_space(engine__draft=["/d", "/e"])
    for space, name, bad in [
        (two, "draft_class", lambda config: config.speculative.draft == "/d"),
        (make_space(), "accept_len", lambda config: config.speculative.num_steps == 1),
        (make_space(), "graph_capture_failed", lambda _: True),
    ]:
        store = ListStore()
        respond = lambda node, job, name=name, bad=bad: Answer(  # noqa: E731
            failed(name) if job.config.speculative and bad(job.config) else completed(90), 1.0
        )
        run(store, SimulatedFleet(["a"], respond), space)
        assert kinds(store)["trial"] == 12


def test_text_that_is_not_the_models_never_wins():
    """A launch whose answers part from plain decoding's is kept as failed, however fast it was."""
    prompts = WORKLOAD.model_copy(
        update={"prompts": tuple(Prompt(id=f"p{n}", category="code", text=f"text {n}") for n in range(9))}
    )

    def respond(node, job):
        broken = bool(job.config.speculative and job.config.speculative.num_steps == 1)
        row = completed(1).requests[0]
        rows = tuple(
            row.model_copy(
                update={"prompt_id": p.id, "output_hash": str(broken), "prefix_hashes": ("x", f"{broken}", "z")}
            )
            for p in prompts.prompts
        )
        return Answer(completed(1000 if broken else 100).model_copy(update={"requests": rows}), 1.0)

    store = ListStore()
    Study(make_space(), prompts, store).run(SimulatedFleet(["a"], respond))
    broken = [r for r in store.records if r.config.speculative and r.config.speculative.num_steps == 1]
    assert broken
    assert {(r.status, r.outcome.failure_class, r.outcome.failure_phase) for r in broken} == {
        ("failed", "text", "gate")
    }
    assert {r.status for r in store.records if r not in broken} == {"completed"}


def test_nodes_may_join_and_leave():
    """A node that joins is used (after its own baseline), one that leaves is not waited for."""
    store = ListStore()
    fleet = SimulatedFleet(["a"], measured)

    def respond(node, job):
        if job.number == 3:
            fleet.present = ["a", "late"]
        if job.number == 8:
            fleet.present = ["late"]
        return measured(node, job)

    fleet._respond = respond
    study = run(store, fleet)
    assert next(r.kind for r in store.records if r.node == "late") == "baseline"
    assert len(study.trials) == 12


def test_no_node_for_five_minutes_ends_it():
    """Without nodes the study does not wait for ever."""
    with pytest.raises(NodeError, match="no node for 300 s"):
        run(ListStore(), SimulatedFleet([], measured))


def test_hours_end_the_study():
    """No launch starts after the hours are over; what runs is kept."""
    store = ListStore()
    run(store, SimulatedFleet(["a"], measured), make_space(budget={"trials": 100, "hours": 1}))
    started = [r.started_at for r in store.records]
    assert len(started) == 12
    assert max(started) < 3600


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


def test_constraints_make_infeasible():
    """A trial over a limit is kept as infeasible, with what it broke."""

    def respond(node, job):
        steps = job.config.speculative.num_steps if job.config.speculative else 1
        return Answer(completed(surface(job.config), itl_p95_ms=10.0 * steps), 10.0)

    store = ListStore()
    study = run(
        store,
        SimulatedFleet(["a"], respond),
        make_space(objective={"constraints": {"itl_p95_ms": 25}}, search={"sampler": "tpe"}),
    )
    for r in study.trials:
        assert (r.status == "infeasible") == (r.config.speculative.num_steps > 2)
    assert any(r.status == "infeasible" for r in study.trials)
    assert all("itl_p95_ms" in r.violations[0] for r in study.trials if r.status == "infeasible")


def test_events_tell_the_story():
    """Every launch has its start and its end among the events, and the spec is in the first."""
    store = ListStore()
    study = run(store, SimulatedFleet(["a"], measured))
    assert store.events[0].name == "study_started"
    assert json.loads(store.events[0].detail)["name"] == study.spec.name
    for name in ("trial_started", "trial_done"):
        assert {e.number for e in store.events if e.name == name} == {r.number for r in store.records}
    assert SPEC  # the text that all of this came from


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
