"""`explain`: what a study has learned, held against the cost model that its figures came from."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raytune_eagle import specfile
from raytune_eagle.errors import SpecError
from raytune_eagle.identity import spec_of
from raytune_eagle.model.workload import Workload
from raytune_eagle.nodes.cost_model import Shape
from raytune_eagle.nodes.presets import KIMI_K25
from raytune_eagle.reference import Reference
from raytune_eagle.report.explain import Explanation, lines, relaunch_noise
from raytune_eagle.search import Search
from raytune_eagle.simulation import fleet
from raytune_eagle.space import Space
from raytune_eagle.store import ParquetStore
from raytune_eagle.study import Study
from raytune_eagle.workload import load_prompts

pytestmark = pytest.mark.slow  # what they ask is a study of seconds

SPEC = """
name: learned
engine: {model: /m, draft: /d/golden, args: {tp-size: 8, disable-custom-all-reduce: true}}
space:
  speculative: {num_steps: {int: [1, 8]}, eagle_topk: [1, 2], num_draft_tokens: {int: [2, 16]}}
  nccl: {NCCL_PROTO: [null, Simple, LL], NCCL_ALGO: [null, Ring]}
search: {sampler: random, seed: 1, end_hopeless: false}
confirm: {top: 0}
budget: {trials: 30, hours: 1000}
"""
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    space, store = Space(specfile.parse(yaml.safe_load(SPEC))), ParquetStore(str(folder))
    store.declare("learned", {d.column: d.kind for d in space.dimensions})
    workload = Workload(prompts=load_prompts("builtin:mixed"))
    Study(space, workload, store).run(fleet(space.spec, "simulated:kimi-k25", 2))
    return folder


@pytest.fixture(scope="module")
def explanation(results):
    return Explanation(specfile.parse(yaml.safe_load(SPEC)), list(ParquetStore(str(results)).read("learned")))


def test_accept_len_by_steps(explanation):
    """Every chain's accept_len, launched or not, within 2 % of the draft's own, and inside a narrow interval."""
    draft, found = KIMI_K25.drafts["golden"], list(explanation.accept_lens())
    assert [steps for steps, *_ in found] == list(range(1, 9))
    for steps, value, low, high, _ in found:
        assert value == pytest.approx(draft.accept_len(Shape(steps, 1, steps + 1)), rel=0.02)
        assert low < value < high < 1.1 * low


def test_parts_of_a_cycle(explanation):
    """A draft step costs what the model says, within its interval, the fixed part within 10 %; first tokens apart."""
    env = {name.upper(): str(value) for name, value in explanation.best.items() if "nccl" in name and value}
    fixed, _, step, first = explanation.cycle()
    assert 3 < first.ms < 15  # 842 ms over the rounds of 256 tokens
    machine, draft = KIMI_K25.machine, KIMI_K25.drafts["golden"]
    one = machine.cycle_ms(draft, Shape(5, 1, 8), env) - machine.cycle_ms(draft, Shape(4, 1, 8), env)
    assert step.low < one < step.high
    assert step.high - step.low < 0.6
    assert fixed.ms == pytest.approx(machine.verify_step_ms(Shape(1, 1, 2), env), rel=0.1)


def test_worth_of_settings(explanation):
    """What NCCL_PROTO left unset costs beside LL is within its interval, and the settings are ranked right."""
    worth = {(column, value): (ratio, low, high) for column, value, ratio, low, high in explanation.worth()}
    assert explanation.best["nccl_proto"] == "LL"
    _, low, high = worth["nccl_proto", None]
    best, bare = {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Ring"}
    shape, draft = Shape(4, 1, 5), KIMI_K25.drafts["golden"]
    per_token = [
        KIMI_K25.machine.cycle_ms(draft, shape, env) / 3.24 + KIMI_K25.machine.ttft_ms / 256 for env in (best, bare)
    ]
    assert low < per_token[0] / per_token[1] < high < 1


def relaunched(record, factor):
    """The same launch once more, to confirm: every figure of speed times `factor`, on prompts of its own."""
    names = ("output_throughput", "ci_low", "ci_high")
    figures = tuple(
        m.model_copy(update={**{name: getattr(m, name) * factor for name in names}, "cycle_ms": m.cycle_ms / factor})
        for m in record.outcome.measurements
    )
    outcome = record.outcome.model_copy(update={"measurements": figures, "requests": ()})
    return record.model_copy(update={"kind": "confirm", "number": record.number + 1000, "outcome": outcome})


def test_launches_that_disagree_widen_every_interval(results, explanation):
    """Where launches of one configuration differ by a fifth every interval is wider, and the text says why."""
    records = list(ParquetStore(str(results)).read("learned"))
    trials = [record for record in records if record.kind == "trial" and record.status == "completed"][:8]
    again = [relaunched(record, factor) for record, factor in zip(trials, [0.8, 1.2] * 4, strict=True)]
    told = Explanation(specfile.parse(yaml.safe_load(SPEC)), [*records, *again])
    assert explanation.noise.variance**0.5 < 0.03
    assert 0.08 < told.noise.variance**0.5 < 0.25
    assert len(told.again) == 8
    before, after = (
        {row[:2]: math.log(row[4] / row[3]) for row in found.worth() if row[:2] == ("nccl_proto", None)}
        for found in (explanation, told)
    )
    assert after["nccl_proto", None] > 3 * before["nccl_proto", None]
    assert "8 that confirmed" in next(lines(told))


def test_a_single_launch_is_not_believed():
    """What one launch gave the kept study's tree list, 1.19x, its confirming launch did not: the interval holds 1."""
    store = ParquetStore(str(ROOT / "results"))
    records, (spec, _) = list(store.read("random7b-h200x4")), spec_of(store.read_events("random7b-h200x4"))
    found = Explanation(spec, records)
    worth = {(column, value): (low, high) for column, value, _, low, high in found.worth()}
    worth |= {(column, found.best[column]): (1.0, 1.0) for column in ("nccl_algo",)}
    low, high = worth["nccl_algo", "ring,tree;allreduce:tree"]
    assert low <= 1 <= high


def test_next_points_are_new(explanation):
    """Five points that no launch had, best first, each with its chances."""
    chosen = explanation.next_points()
    launched = [launch.params for launch in explanation.launches]
    assert len(chosen) == 5
    assert all(choice.params not in launched for choice in chosen)
    assert all(0 <= choice.better <= 1 and 0 <= choice.runs <= 1 for choice in chosen)
    assert [choice.score for choice in chosen] == sorted((choice.score for choice in chosen), reverse=True)


def test_the_first_of_the_next_points_is_what_the_search_asks_for(results):
    """The order is the search's own: a study that went on with two factors would launch the first of them."""
    records = list(ParquetStore(str(results)).read("learned"))
    spec = specfile.parse(yaml.safe_load(SPEC.replace("sampler: random", "sampler: two-factor")))
    asked = Search(Space(spec), records, Reference(records), relaunch_noise(records).variance).ask()
    assert Explanation(spec, records).next_points()[0].params.items() >= asked.params.items()


def test_few_launches_say_nothing(results):
    """With fewer than five launches it says so instead."""
    records = list(ParquetStore(str(results)).read("learned"))[:4]
    with pytest.raises(SpecError, match="launches have figures, fewer than 5"):
        Explanation(specfile.parse(yaml.safe_load(SPEC)), records)


def test_command(results):
    """`explain STUDY` prints it, marked as simulated; an unknown study is bad input."""
    command = [sys.executable, "-m", "raytune_eagle", "explain", "--results", str(results)]
    done = subprocess.run([*command, "learned"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith("SIMULATED from kimi-k25")
    assert "draft, per step" in done.stdout
    assert "in the order in which the search would launch them" in done.stdout
    assert re.findall(r"^  (\d)\. expected gain", done.stdout, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    other = subprocess.run([*command, "other"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert other.returncode == 2


def test_text(explanation):
    """Every part is told, with intervals."""
    text = "\n".join(lines(explanation))
    for part in ("A cycle under", "accept_len of chains", "Speed with one setting changed", "never launched"):
        assert part in text
    assert "nccl_proto=unset" in text
