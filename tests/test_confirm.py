"""The end of a study: the best launched again beside plain decoding, in rounds, wherever it was stopped before."""

from collections import Counter

import numpy as np
import pytest
from made import WORKLOAD, ListStore, completed, failed, make_space, surface
from made_records import plain, trial

from raytune_eagle.errors import NodeError
from raytune_eagle.nodes.simulated import Answer, SimulatedFleet
from raytune_eagle.ranking import confirming
from raytune_eagle.report.verdict import sides, verdict, winner
from raytune_eagle.study import Study

HELD_OUT = WORKLOAD.model_copy(
    update={"prompts": tuple(p.model_copy(update={"id": "h" + p.id}) for p in WORKLOAD.prompts)}
)


def measured(node, job):
    return Answer(completed(surface(job.config)), 30.0)


def run(store, nodes, respond=measured, space=None):
    study = Study(space or make_space(confirm={}), WORKLOAD, store, held_out=HELD_OUT)
    study.run(SimulatedFleet(nodes, respond))
    return study


def confirmations(store):
    return [record for record in store.records if record.kind == "confirm"]


def in_words(record):
    spec = record.config.speculative
    plain = "plain" if spec is None else f"{spec.num_steps}/{spec.eagle_topk}/{spec.num_draft_tokens}"
    return f"{plain}{'+LL' if record.config.env.get('NCCL_PROTO') == 'LL' else ''}"


def test_one_node_goes_through_its_second_round_backwards():
    """Plain decoding, plain decoding under the winner's settings and the best three; then the same from behind."""
    store = ListStore()
    run(store, ["a"])
    names = [in_words(record) for record in confirmations(store)]
    assert len(names) == 10
    assert names[:2] == ["plain", "plain+LL"]
    assert names[5:] == names[4::-1]
    trials = sorted((r for r in store.records if r.kind == "trial"), key=lambda r: -surface(r.config))
    assert [r.key for r in confirmations(store)[2:5]] == [r.key for r in trials[:3]]


def test_each_of_two_nodes_takes_a_round():
    """A round stays on its node, the second runs against the order of the first, and both at once."""
    store = ListStore()
    run(store, ["a", "b"])
    rounds = {node: [in_words(r) for r in confirmations(store) if r.node == node] for node in ("a", "b")}
    assert len(rounds["a"]) == 5
    assert rounds["b"] == rounds["a"][::-1]


def test_confirmations_get_the_prompts_that_the_search_never_saw():
    """Every confirmation is sent the held-out set, and nothing else is."""
    seen = {"confirm": set(), "trial": set(), "baseline": set()}

    def respond(node, job):
        seen[job.kind].add(job.workload.prompts[0].id)
        return measured(node, job)

    run(ListStore(), ["a"], respond)
    assert seen == {"confirm": {"hp0"}, "trial": {"p0"}, "baseline": {"p0"}}


@pytest.mark.parametrize("after", range(14, 26))
def test_a_stopped_confirmation_goes_on_where_it_was(after):
    """However many launches were kept before the plug was pulled, exactly two whole rounds stand at the end."""
    store, calls = ListStore(), []

    def stops(node, job):
        calls.append(job.number)
        if len(calls) > after:
            raise RuntimeError("pulled the plug")
        return measured(node, job)

    if after < 24:
        with pytest.raises(RuntimeError):
            run(store, ["a"], stops)
    study = run(store, ["a"])
    assert set(Counter(r.key for r in confirmations(store)).values()) == {2}
    assert len(confirmations(store)) == 10
    assert study.done()
    launched = len(store.records)
    run(store, ["a"])
    assert len(store.records) == launched


def test_a_round_whose_node_went_is_begun_anew_elsewhere():
    """Half a round on a node that is gone is nothing to compare with: the node that is left does two whole ones."""
    store = ListStore()

    def respond(node, job):
        if sum(r.node == "b" for r in confirmations(store)) == 2:
            fleet.present = ["a"]
        return measured(node, job)

    fleet = SimulatedFleet(["a", "b"], respond)
    Study(make_space(confirm={}), WORKLOAD, store, held_out=HELD_OUT).run(fleet)
    on_a = Counter(r.key for r in confirmations(store) if r.node == "a")
    assert list(on_a.values()) == [2] * 5


def test_another_winner_gets_plain_decoding_under_its_own_settings():
    """When the second best of the search comes out ahead under other settings, that plain decoding is measured too."""

    def respond(node, job):
        lucky = job.kind == "trial" and job.config.env.get("NCCL_PROTO") == "Simple"
        return Answer(completed(surface(job.config) * (1.3 if lucky else 1.0)), 30.0)

    store = ListStore()
    run(store, ["a"], respond, make_space(confirm={}, search__seed=6))
    found = sides(store.records, 1)
    assert found.best.config.env == {"NCCL_PROTO": "LL"}
    assert found.same.config.env == {"NCCL_PROTO": "LL"}
    assert found.over_same.value == pytest.approx(surface(found.best.config) / 90, rel=1e-6)
    late = [in_words(r) for r in confirmations(store)][10:]
    assert sorted(late) == sorted([in_words(found_record(store, found.best.key)), "plain+LL"] * 2)


def found_record(store, key):
    return next(r for r in store.records if r.key == key)


def test_a_study_that_goes_on_is_confirmed_anew():
    """What a longer search finds is launched beside plain decoding again; the verdict is from those launches alone."""
    store = ListStore()
    first = run(store, ["a"])
    early, trials = confirmations(store), first.spec.budget.trials

    def faster(node, job):
        return Answer(completed(surface(job.config) * (3 if job.kind == "trial" else 1)), 30.0)

    longer = first.spec.budget.model_copy(update={"trials": trials + 1})
    space = make_space(confirm={}, budget=longer.model_dump())
    run(store, ["a"], faster, space)
    late = confirmations(store)[len(early) :]
    assert Counter(record.key for record in late).most_common()[0][1] == 2, "two whole rounds"
    assert {in_words(record) for record in late} >= {"plain"}
    assert next(r for r in store.records if r.kind == "trial" and r.number > early[-1].number).key in {
        r.key for r in late
    }
    assert confirming(store.records) == late
    assert sides(store.records, 1).confirmed
    going_on = [*store.records[: -len(late)]]
    assert not sides(going_on, 1).confirmed, "confirmations from before the search went on are not of its end"


def test_without_a_trial_to_confirm_the_study_just_ends():
    """Every trial failed: nothing is launched again, and the study is done."""
    store = ListStore()
    study = run(
        store, ["a"], lambda node, job: Answer(failed(), 5.0) if job.config.speculative else measured(node, job)
    )
    assert confirmations(store) == []
    assert study.done()


def test_a_machine_that_fails_under_a_confirmation():
    """It is launched again after a pause; one that takes its machine down three times is recorded as lost."""
    store, lost = ListStore(), Counter()

    def respond(node, job):
        if job.kind == "confirm" and job.config.speculative:
            lost[job.config.uid] += 1
            if len(lost) == 1 or lost[job.config.uid] == 1:
                return Answer(NodeError("no GPU"), 5.0)
        return measured(node, job)

    run(store, ["a"], respond)
    statuses = {key: [r.status for r in confirmations(store) if r.config.uid == key] for key in lost}
    first, *others = statuses.values()
    assert "lost" in first
    assert all(set(found) == {"completed"} for found in others)
    assert len(others) == 2


def test_machines_that_stay_broken_do_not_keep_a_study_for_ever():
    """When all nodes fail after the search the study waits for them until its hours are over, and ends."""
    store = ListStore()

    def respond(node, job):
        broken = sum(r.kind == "trial" for r in store.records) == 12
        return Answer(NodeError("GPU 3 keeps 20 GiB"), 5.0) if broken else measured(node, job)

    study = run(store, ["a"], respond, make_space(confirm={}, budget={"trials": 12, "hours": 1}))
    assert len(study.trials) == 12
    assert [e.name for e in store.events][-1] == "study_done"
    assert store.events[-1].at < 2 * 3600
    assert not study.done()


def test_a_constraint_broken_only_in_confirmation_does_not_win():
    """What keeps its limit in the search and breaks it on new prompts is no winner."""

    def respond(node, job):
        fast = job.config.speculative is not None and job.config.speculative.num_steps >= 4
        return Answer(completed(surface(job.config), itl_p95_ms=50 if fast and job.kind == "confirm" else 15), 30.0)

    store = ListStore()
    run(store, ["a"], respond, make_space(confirm={}, objective={"constraints": {"itl_p95_ms": 40}}))
    broken = [r for r in confirmations(store) if r.violations]
    chosen = winner(store.records, 1)
    assert not broken or chosen.key not in {r.key for r in broken}


def test_hours_keep_time_for_the_confirmation():
    """No trial starts when what is left is needed to confirm; the confirmation ends about when the hours do."""
    store = ListStore()
    run(store, ["a"], space=make_space(confirm={}, budget={"trials": 100, "hours": 0.2}))
    last_trial = max(r.ended_at for r in store.records if r.kind == "trial")
    assert last_trial == pytest.approx(720 - 10 * 30, abs=31)
    assert max(r.ended_at for r in store.records) == pytest.approx(720, abs=61)


def test_every_concurrency_has_its_best_confirmed():
    """With two concurrencies the best of each is launched again, whatever the other ranks it."""

    def respond(node, job):
        spec = job.config.speculative
        high = 900.0 if spec is None else 1000.0 - 100 * spec.num_steps
        low, figures = surface(job.config), completed(1.0, concurrency=(1, 8))
        speeds = {1: low, 8: high}
        return Answer(
            figures.model_copy(
                update={"measurements": tuple(completed(speeds[c], (c,)).measurements[0] for c in (1, 8))}
            ),
            30.0,
        )

    store = ListStore()
    run(store, ["a"], respond, make_space(confirm={"top": 1}, workload={"concurrency": [1, 8]}))
    keys = {r.key for r in confirmations(store)}
    for level in (1, 8):
        assert sides(store.records, level).confirmed
        assert sides(store.records, level).best.key in keys
    assert verdict(store.records, 1) != verdict(store.records, 8)


def test_equals_are_not_told_apart_and_a_true_gain_is_found():
    """Of 100 studies of launches with 1 % noise: equals win in at most 6, a true 10 % is found in at least 90."""
    found = {gain: sum(is_faster(gain, seed, 0.01) for seed in range(100)) for gain in (1.0, 1.1)}
    assert found[1.0] <= 6
    assert found[1.1] >= 90


@pytest.mark.parametrize("noise", [0.03, 0.05])
def test_launches_that_differ_by_more_than_expected_widen_the_verdict(noise):
    """Noise of 3 and 5 % from launch to launch, seen only in two rounds: equals win in at most 6 of 100 studies."""
    assert sum(is_faster(1.0, seed, noise) for seed in range(100)) <= 6


def is_faster(gain, seed, noise):
    return sides(noisy_confirmation(gain, np.random.default_rng(seed), noise), 1).over_plain.low > 1


def noisy_confirmation(gain, rng, noise):
    """Two rounds on one node; every launch `noise` beside its truth, its interval ± 1 %, the second hour 3 % slower."""

    def speed(true, number):
        return float(true * (0.97 if number > 12 else 1.0) * np.exp(rng.normal(0, noise)))

    rounds = []
    for number in (10, 15):
        one, other, third = speed(100, number), speed(100 * gain, number + 1), speed(98, number + 2)
        rounds += [
            plain(number, one, one * 0.01, kind="confirm"),
            trial(number + 1, other, other * 0.01, kind="confirm"),
            trial(number + 2, third, third * 0.01, kind="confirm", key="other"),
        ]
    return [plain(0, 100.0), trial(1, 100.0 * gain), *rounds]
