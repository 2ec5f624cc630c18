"""The cost model: trees as SGLang builds them, and each published figure of the Kimi-K2.5 account within 5 %."""

import numpy as np
import pytest

from raytune_eagle.errors import SpecError
from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.trial import Completed, Failed, Job
from raytune_eagle.model.workload import Workload
from raytune_eagle.nodes.answers import CostModelNodes
from raytune_eagle.nodes.cost_model import Draft, Shape
from raytune_eagle.nodes.presets import KIMI_K25, preset
from raytune_eagle.workload import load_prompts

PUBLISHED = {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS"}
MACHINE, FIRST, SECOND = KIMI_K25.machine, KIMI_K25.drafts["first"], KIMI_K25.drafts["second"]
GOLDEN = {1: 1.83, 2: 2.43, 3: 2.88, 4: 3.24, 5: 3.46, 6: 3.62, 7: 3.71, 8: 3.77}


@pytest.fixture(scope="module")
def workload():
    return Workload(prompts=load_prompts("builtin:mixed"))


def serve(workload, shape=None, draft="first", **config):
    spec = shape and Speculative(draft=draft, num_steps=shape[0], eagle_topk=shape[1], num_draft_tokens=shape[2])
    config = Config(model="/m", speculative=spec, **{"env": PUBLISHED, **config})
    outcome = CostModelNodes(KIMI_K25)("node", Job(study="s", number=0, kind="trial", config=config, workload=workload))
    assert isinstance(outcome.outcome, Completed)
    return outcome.outcome.measurements[0]


@pytest.mark.parametrize(
    ("published", "shape", "draft", "args"),
    [
        (90.0, None, "first", {}),
        (53.2, (3, 4, 16), "first", {"disable-cuda-graph": True}),
        (74.9, (3, 4, 16), "first", {}),
        (82.3, (3, 4, 5), "first", {}),
        (71.3, (5, 1, 6), "second", {}),
    ],
)
def test_published_throughput(workload, published, shape, draft, args):
    """Tokens per second of each published launch, as a bench of whole answers would find them."""
    assert serve(workload, shape, draft, args=args).output_throughput == pytest.approx(published, rel=0.05)


def test_published_acceptance(workload):
    """13 % of 16 drafted tokens (accept_len over draft tokens, as logs of that version gave it); accept_len 2.1."""
    assert serve(workload, (3, 4, 16)).accept_len / 16 == pytest.approx(0.13, rel=0.05)
    assert serve(workload, (5, 1, 6), "second").accept_len == pytest.approx(2.1, rel=0.05)


def test_published_range_of_accept_len():
    """3/4/5 accepts 2.0 to 2.4 tokens, 38 to 47 % of its 5, from the hardest to the easiest prompts."""
    lens = [FIRST.accept_len(Shape(3, 4, 5), category) for category in FIRST.categories]
    assert (min(lens), max(lens)) == (pytest.approx(2.0, rel=0.05), pytest.approx(2.4, rel=0.05))
    assert (min(lens) / 5, max(lens) / 5) == (pytest.approx(0.38, rel=0.05), pytest.approx(0.47, rel=0.05))


def test_published_step_acceptance():
    """The second draft's steps are accepted in 39 % of the cases, each given those before it."""
    reached = SECOND.reached(Shape(5, 1, 6))
    assert np.mean(reached / np.array([1.0, *reached[:-1]])) == pytest.approx(0.39, rel=0.05)


def test_published_bursts(workload):
    """3/4/5 comes to 113 tokens per second in its best moments."""
    assert serve(workload, (3, 4, 5)).burst_throughput == pytest.approx(113, rel=0.05)


@pytest.mark.parametrize(("shape", "draft"), [((3, 4, 16), FIRST), ((3, 4, 5), FIRST), ((5, 1, 6), SECOND)])
def test_published_verify_step(shape, draft):
    """Verify is 95 % of a cycle, 21-28 ms without the settings, which take 27 % off."""
    bare, tuned = (MACHINE.verify_step_ms(Shape(*shape), env) for env in ({}, PUBLISHED))
    assert 21 / 1.05 < bare < 28 * 1.05
    assert 1 - tuned / bare == pytest.approx(0.27, rel=0.05)
    assert tuned / MACHINE.cycle_ms(draft, Shape(*shape), PUBLISHED) > 0.945


def test_golden_draft():
    """The third draft accepts what InferenceX published for chains of 1 to 8 tokens."""
    draft = KIMI_K25.drafts["golden"]
    for tokens, accept_len in GOLDEN.items():
        assert draft.accept_len(Shape(tokens, 1, tokens + 1)) == pytest.approx(accept_len, rel=1e-6)


def test_tree_by_hand():
    """Two steps, two choices, four tokens: the three likeliest of six candidates are verified."""
    draft = Draft((0.6, 0.5), ranks=0.5)
    second = 0.4 * 0.6 * 0.5
    assert draft.reached(Shape(2, 2, 4)) == pytest.approx([0.6 + second, 0.3])
    with pytest.raises(ValueError, match="holds 7 tokens at most"):
        draft.reached(Shape(2, 2, 8))


def test_more_is_never_less():
    """A larger tree accepts no less: more tokens, more steps at as many tokens per path, more choices."""
    draft = Draft.falling(0.6, 0.95, ranks=0.4, spread=0.8)
    assert np.all(np.diff([draft.accept_len(Shape(4, 4, n)) for n in range(5, 50)]) >= 0)
    assert np.all(np.diff([draft.accept_len(Shape(s, 1, s + 1)) for s in range(1, 10)]) > 0)
    assert np.all(np.diff([draft.accept_len(Shape(4, k, 15)) for k in (2, 4, 8)]) > -0.02)


def test_histogram_says_what_fewer_steps_accept(workload):
    """The rounds of a chain of 6 that accepted at least 3 drafts are those that a chain of 3 accepts whole."""
    spec = Speculative(draft="golden", num_steps=6, eagle_topk=1, num_draft_tokens=7)
    job = Job(study="s", number=1, kind="trial", config=Config(model="/m", speculative=spec), workload=workload)
    answer = CostModelNodes(KIMI_K25)("node", job).outcome
    counts = np.sum([row.accept_histogram for row in answer.requests], axis=0)
    shorter = 1 + sum(counts[i:].sum() for i in range(1, 4)) / counts.sum()
    assert shorter == pytest.approx(GOLDEN[3], rel=0.02)


def test_same_answer_twice_and_noise_between_launches(workload):
    """A job has one answer; launches of one configuration differ by about as much as the model says."""
    config = Config(model="/m", env=PUBLISHED)
    jobs = [Job(study="s", number=n, kind="trial", config=config, workload=workload) for n in range(40)]
    nodes = CostModelNodes(KIMI_K25, seed=3)
    figures = [nodes("node", job).outcome.measurements[0].cycle_ms for job in jobs]
    assert nodes("node", jobs[0]) == nodes("node", jobs[0])
    assert 0.004 < np.std(np.log(figures)) < 0.016


def test_too_many_tokens_fail(workload):
    """64 draft tokens end at graph capture, as a value with its class and time."""
    spec = Speculative(draft="first", num_steps=3, eagle_topk=8, num_draft_tokens=64)
    job = Job(study="s", number=0, kind="trial", config=Config(model="/m", speculative=spec), workload=workload)
    answer = CostModelNodes(KIMI_K25)("node", job)
    assert isinstance(answer.outcome, Failed)
    assert answer.outcome.failure_class == "graph_capture_failed"
    assert answer.seconds == answer.outcome.phases.launch_s > 0


def test_unknown_preset_says_what_there_is():
    """A slip in the preset's or the draft's name gives one line with those that exist."""
    with pytest.raises(SpecError, match=r"simulated:kimi: neither a preset \(kimi-k25\)"):
        preset("kimi")
    with pytest.raises(SpecError, match="no draft 'third'; kimi-k25 has first, second, golden"):
        preset("kimi-k25:third")
    assert preset("kimi-k25:golden").default == "golden"
