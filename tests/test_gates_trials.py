"""The gates in whole trials, of the fake server."""

from __future__ import annotations

import pytest
from made_servers import EAGLE3, TOOK, verdicts
from rigs import FAKE

from raytune_eagle import gates
from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.sglang import SglangEngine
from raytune_eagle.model.config import Config
from raytune_eagle.model.measurement import Gate
from raytune_eagle.model.trial import Completed, Failed, Job
from raytune_eagle.model.workload import Prompt, Workload
from raytune_eagle.nodes.turns import FreeForAll
from raytune_eagle.trial import run_trial

PROMPTS = tuple(Prompt(id=str(n), category="code", text=f"def f{n}(x):") for n in range(10))


def trial(folder, env, *, speculative=True):
    """What comes of a trial on the fake server, and the events that it told."""
    config = Config(
        model="builtin:tiny",
        launcher=("python3", str(FAKE)),
        speculative=EAGLE3.model_copy(update={"num_draft_tokens": 12}) if speculative else None,
        env={"RAYTUNE_FAKE": env},
    )
    workload = Workload(prompts=PROMPTS, max_new_tokens=60, max_passes=2)
    job = Job(study="s", number=0, kind="trial", config=config, workload=workload)
    told = []
    engine = SglangEngine(Settings(work_dir=folder))
    return run_trial(engine, job, lambda *event: told.append(event), FreeForAll()), told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "name", "measured"),
    [
        ("info={info}", "algorithm", False),
        ("draft_class=LlamaForCausalLM", "draft_class", False),
        ("reject", "accept_len", True),
    ],
)
def test_gate_fails_the_trial(tmp_path, env, name, measured):
    """A failed gate is the trial's failure, told as an event; what the start shows is judged before the bench."""
    (tmp_path / "info.json").write_text('{"speculative_algorithm": "EAGLE"}')
    outcome, told = trial(tmp_path, env.format(info=tmp_path / "info.json"))
    assert isinstance(outcome, Failed)
    assert (outcome.failure_class, outcome.failure_phase) == (name, "gate")
    assert verdicts(outcome.gates)[name] == "failed"
    assert bool(outcome.requests) == measured
    assert outcome.server_log
    assert outcome.server.version == "0.5.20"
    assert [event for event in told if event[0] == "gate" and event[1].startswith(f"failed {name}: ")]


@pytest.mark.slow
def test_draft_that_guesses_nothing_costs_no_passes(tmp_path):
    """The warm-up shows it: the trial ends there, its rows kept, and the passes that would take minutes are not run."""
    outcome, told = trial(tmp_path, "reject")
    assert {row.repeat for row in outcome.requests if row.error is None} == {-1}
    assert "in the warm-up" in outcome.failure_detail
    assert not [event for event in told if event[0] == "pass"]


@pytest.mark.slow
def test_gates_of_a_good_trial_are_kept(tmp_path):
    """Passed ones too: who reads the record sees what was looked at."""
    (tmp_path / "lines").write_text(TOOK)
    outcome, told = trial(tmp_path, f"say={tmp_path / 'lines'}")
    assert isinstance(outcome, Completed)
    found = verdicts(outcome.gates)
    assert found["algorithm"] == found["draft_class"] == found["accept_len"] == found["resolved_args"] == "passed"
    assert all(Gate.of(gate.line) == gate for gate in outcome.gates)
    assert not [event for event in told if event[0] == "gate" and "failed" in event[1]]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "name"), [("garble", "text"), ("loop", "repetition")])
def test_answers_of_a_broken_server_are_caught_by_the_baseline(tmp_path, fault, name):
    """A server that speculates into another text, or into one word over and over, is fast, and must not win."""
    plain, _ = trial(tmp_path, fault, speculative=False)
    broken, _ = trial(tmp_path, fault)
    assert isinstance(broken, Completed), "alone it looks fine"
    judged = gates.judged(broken, plain, 0.0)
    assert verdicts(judged.gates)[name] == "failed"
    assert isinstance(judged, Failed)
    good, _ = trial(tmp_path, "")
    assert isinstance(gates.judged(good, plain, 0.0), Completed)
