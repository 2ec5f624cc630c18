"""`run --cluster simulated:…` through the command: virtual nights whose records nobody can take for measured ones."""

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from made import WORKLOAD, ListStore, completed, make_space

from raytune_eagle.cli import main
from raytune_eagle.errors import SpecError
from raytune_eagle.model.trial import Job
from raytune_eagle.model.workload import Workload
from raytune_eagle.nodes.replay import RecordedNodes, TableNodes
from raytune_eagle.simulation import fleet, refuse_mixture
from raytune_eagle.study import Study

SPEC = """
name: night
engine: {model: /m, draft: /d/golden}
workload: {prompts: builtin:tiny, precision: 0.05}
space:
  speculative: {num_steps: {int: [1, 8]}, eagle_topk: [1, 2], num_draft_tokens: {int: [2, 8]}}
  nccl: {NCCL_PROTO: [null, LL]}
search: {sampler: random}
budget: {trials: 6}
"""
TABLE = """model,benchmark,batch_size,steps,topk,num_draft_tokens,draft,\
output_throughput,accept_length,baseline_throughput
org/M,gsm8k,8,3,1,4,baseline,100.0,1.0,100.0
org/M,gsm8k,8,3,1,4,org/D,150.0,2.0,100.0
org/M,math,8,3,1,4,org/D,300.0,4.0,100.0
"""


def command(folder, *words, spec=SPEC):
    path = folder / "spec.yaml"
    path.write_text(spec)
    return CliRunner().invoke(main, ["run", str(path), "--results", str(folder / "results"), *words])


def records(folder):
    return pq.read_table(folder / "results" / "study=night" / "trials").to_pylist()


def trials(folder):
    return {row["number"]: row["output_throughput"] for row in records(folder) if row["kind"] == "trial"}


def test_a_night_in_virtual_time(tmp_path):
    """Baselines on two nodes, the whole budget, figures and hours told as simulated, and each record marked."""
    result = command(tmp_path, "--cluster", "simulated:kimi-k25", "--nodes", "2")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("SIMULATED from kimi-k25: no server ran")
    assert "Simulated time: " in result.stdout
    assert "those of the simulation, not of the clock" in result.stderr
    clocks = [line.split()[0] for line in result.stderr.splitlines() if " done " in line]
    assert clocks[0] > "05:00"
    assert clocks == sorted(clocks, key=lambda clock: (len(clock), clock))
    nodes = CliRunner().invoke(main, ["nodes", "--results", str(tmp_path / "results")])
    assert nodes.stderr.endswith("its nodes are simulated: times are those of the simulation\n")
    rows = records(tmp_path)
    assert [row["kind"] for row in rows].count("trial") == 6
    assert {row["node"] for row in rows} == {"simulated-0", "simulated-1"}
    for row in rows:
        assert row["hardware"] == "simulated: kimi-k25"
        assert dict(row["versions"]) == {"simulated": "kimi-k25"}
        assert row["sglang_version"] is None
        assert row["ended_unix_s"] - row["started_unix_s"] > 300


@pytest.mark.slow
def test_a_night_in_which_no_trial_keeps_the_constraints_is_no_success(tmp_path):
    """A script that calls `run` in the night hears of it by exit 1 and the last line; the records are all there."""
    spec = SPEC + "objective: {constraints: {itl_p95_ms: 0.001}}\n"
    done = command(tmp_path, "--cluster", "simulated:kimi-k25", spec=spec)
    assert done.exit_code == 1
    last = "raytune-eagle: study night has nothing to recommend: no trial kept the constraints"
    assert done.stderr.splitlines()[-1] == last
    assert len(trials(tmp_path)) == 6
    again = command(tmp_path, "--cluster", "simulated:kimi-k25", spec=spec)
    assert (again.exit_code, again.stderr.splitlines()[-1]) == (1, last)


@pytest.mark.slow
def test_goes_on_and_repeats_nothing(tmp_path):
    """A second run with a larger budget adds what is missing; the first launches stand as they were."""
    command(tmp_path, "--cluster", "simulated:kimi-k25", "--trials", "3")
    before = trials(tmp_path)
    assert command(tmp_path, "--cluster", "simulated:kimi-k25").exit_code == 0
    after = trials(tmp_path)
    assert len(before) == 3
    assert len(after) == 6
    assert after.items() >= before.items()


@pytest.mark.slow
def test_measured_and_simulated_never_in_one_study(tmp_path):
    """Going on for real, or with another model, is refused with one line; so is the other way round."""
    command(tmp_path, "--cluster", "simulated:kimi-k25")
    for where in ("auto", "simulated:kimi-k25:golden"):
        result = command(tmp_path, "--cluster", where)
        assert result.exit_code == 2
        assert "study 'night' holds figures simulated from kimi-k25: give this one a name of its own" in result.stderr
    store = ListStore()
    space = make_space()
    Study(space, WORKLOAD, store).run(fleet(space.spec, "simulated:kimi-k25", 1))
    real = [record.model_copy(update={"facts": type(record.facts)(hardware="8x H200")}) for record in store.records]
    with pytest.raises(SpecError, match="holds measured figures"):
        refuse_mixture(real, "simulated:kimi-k25")
    refuse_mixture(real, "auto")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("simulated:nothing", "neither a preset (kimi-k25) nor a file ending in .csv nor a results/study=NAME folder"),
        ("simulated:results/study=gone", "no records there"),
        ("simulated:gone.csv", "No such file"),
    ],
)
def test_what_is_not_there(tmp_path, where, said):
    """A WHAT that does not exist is bad input: exit 2 and one line that says what there is."""
    result = command(tmp_path, "--cluster", where)
    assert result.exit_code == 2
    assert said in result.stderr


def table_answer(tmp_path, shape, benchmark=""):
    path = tmp_path / "table.csv"
    path.write_text(TABLE)
    names = {"num_steps": shape[0], "eagle_topk": shape[1], "num_draft_tokens": shape[2]}
    space = make_space(engine={"model": "org/M", "draft": "/local/D"})
    config = space.config(names)
    job = Job(study="s", number=0, kind="trial", config=config, workload=Workload(prompts=(), concurrency=(8,)))
    return TableNodes(str(path), "org/M", "/local/D", benchmark)("node", job).outcome


def test_what_is_not_there_leaves_no_folder(tmp_path):
    """A preset that is none is told before the place of the results is made."""
    done = command(tmp_path, "--cluster", "simulated:nothing", "--results", str(tmp_path / "new"))
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_table_replay(tmp_path):
    """Rows answer word for word; over two benchmarks times and rounds add up; a launch not listed is a failure."""
    one = table_answer(tmp_path, (3, 1, 4), "math").measurements[0]
    assert (one.output_throughput, one.accept_len, one.cycle_ms) == (300.0, 4.0, pytest.approx(4 * 8000 / 300))
    both = table_answer(tmp_path, (3, 1, 4)).measurements[0]
    assert (both.output_throughput, both.accept_len) == (pytest.approx(200.0), pytest.approx(2 / (1 / 2 + 1 / 4)))
    assert table_answer(tmp_path, (5, 1, 6)).failure_class == "not_recorded"


def test_table_without_the_model(tmp_path):
    """A table that has nothing of the spec says what it has."""
    path = tmp_path / "table.csv"
    path.write_text(TABLE)
    with pytest.raises(SpecError, match=r"no launch of other[\s\S]*org/M, org/D, gsm8k"):
        TableNodes(str(path), "other", None)
    path.write_text("model,benchmark\n")
    with pytest.raises(SpecError, match="no column 'batch_size'"):
        TableNodes(str(path), "org/M", None)


def test_recorded_replay():
    """A study's own launches come back with their figures and times; repeated launches take turns."""
    store, space = ListStore(), make_space()
    Study(space, WORKLOAD, store).run(fleet(space.spec, "simulated:kimi-k25", 1))
    first = store.records[1]
    again = first.model_copy(update={"outcome": completed(7.0)})
    nodes = RecordedNodes([*store.records, again])
    job = Job(study="t", number=9, kind="trial", config=first.config, workload=WORKLOAD)
    answers = [nodes("node", job) for _ in range(3)]
    assert [answer.outcome for answer in answers] == [first.outcome, again.outcome, first.outcome]
    assert answers[0].seconds == first.ended_at - first.started_at
