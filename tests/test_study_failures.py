"""Launches that fail in a study: what stops it, what stops nothing, and what never wins."""

import pytest
from made import WORKLOAD, ListStore, completed, failed, make_space, surface
from virtual_studies import kinds, run

from raytune_eagle.errors import SpecError
from raytune_eagle.model.trial import Failed
from raytune_eagle.model.workload import Prompt
from raytune_eagle.nodes.simulated import Answer, SimulatedFleet
from raytune_eagle.study import Study


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
