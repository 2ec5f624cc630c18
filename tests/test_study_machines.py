"""Machines that fail under a study, come late, join and leave: nothing is lost, nothing is kept twice."""

from collections import Counter

import pytest
from made import ListStore, completed, make_space, surface
from virtual_studies import kinds, measured, run

from raytune_eagle.errors import NodeError
from raytune_eagle.model.trial import Failed, NodeFacts
from raytune_eagle.nodes.simulated import Answer, SimulatedFleet


@pytest.mark.parametrize(("gpus", "order"), [(("A", "B"), "btttbtttb"), (("A", "C"), "btttbbtttb"), ((), "btttbtttb")])
def test_a_node_with_other_gpus_measures_plain_decoding_anew(gpus, order):
    """A node is its name and its GPUs: whether plain decoding is known does not depend on Ray's ids, but on those."""
    store = ListStore()
    for trials, ids in ((3, ("A", "B")), (6, gpus)):
        start = max((r.ended_at for r in store.records), default=0.0)
        fleet = SimulatedFleet(["a"], measured, start, NodeFacts(gpu_ids=ids))
        run(store, fleet, make_space(budget={"trials": trials}))
    assert "".join(r.kind[0] for r in sorted(store.records, key=lambda r: r.started_at)) == order


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
