"""`raytune-eagle probe`: all-reduces timed in the interpreter that serves; without a GPU real ones, over gloo."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import duckdb
import psutil
import pytest
import yaml

from raytune_eagle import specfile
from raytune_eagle.engines.probe import PROGRAM
from raytune_eagle.errors import SpecError
from raytune_eagle.probes import plan
from raytune_eagle.space import Space

ROOT = Path(__file__).parent.parent
FAKES = ROOT / "tests" / "fakes"
GPU = {"used": 0, "total": 143771, "pids": {}}
TREE = {
    "name": "probed",
    "engine": {"model": "builtin:tiny", "draft": "builtin:tiny", "args": {"tp-size": 2}},
    "node": {"gpus": 0},
    "workload": {"prompts": "builtin:tiny", "concurrency": [1, 4]},
    "space": {"speculative": {"num_steps": [3, 5], "eagle_topk": [1, 4], "num_draft_tokens": [6, 8, 16]}},
}
WIDTH = 128
"""hidden_size of builtin:tiny."""


def command(tmp_path, tree, *words, fake=False, interrupt_at=None):
    """Run `probe` on a spec as a user does, who may press Ctrl-C when a line of its progress shows this text."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(tree))
    machine = tmp_path / "gpus.json"
    machine.write_text(json.dumps({"arch": [9, 0], "nvlink": True, "gpus": [GPU, GPU]}))
    fakes = [str(FAKES / "nvml"), str(FAKES / "nccl")] if fake else []
    path = os.pathsep.join(filter(None, [*fakes, os.environ.get("PYTHONPATH", "")]))
    argv = [sys.executable, "-m", "raytune_eagle", "probe", str(spec), "--results", str(tmp_path / "results"), *words]
    (tmp_path / "tmp").mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": path, "NVML_FAKE": str(machine), "TMPDIR": str(tmp_path / "tmp")}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, env=env, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        if interrupt_at:
            next(line for line in process.stderr if interrupt_at in line)
            await_running(tmp_path)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def running(folder):
    """Processes of the program that times, of a command with this folder: another test may run some beside."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):
            if str(PROGRAM) in (each.info["cmdline"] or []) and each.environ()["TMPDIR"].startswith(str(folder)):
                found.append(each)
    return found


def await_running(folder):
    """Until some run."""
    deadline = time.monotonic() + 20
    while not running(folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rows(tmp_path):
    """What was kept, by column."""
    found = duckdb.sql(f"select * from read_parquet('{tmp_path}/results/study=probed/probes/*.parquet')")
    return found.to_arrow_table().to_pylist()


def gpu_tree(**nccl):
    """The same study on a node of two GPUs."""
    space = {**TREE["space"], "nccl": nccl or {"NCCL_PROTO": [None, "Simple"]}}
    engine = {**TREE["engine"], "args": {"tp-size": 2, "disable-custom-all-reduce": True}}
    return {**TREE, "engine": engine, "node": {"gpus": 2}, "space": space}


@pytest.mark.slow
def test_two_ranks_really_reduce_on_a_cpu(tmp_path):
    """Without a GPU two processes reduce over gloo at the sizes of each step, and every size is kept with its time."""
    done = command(tmp_path, TREE)
    assert done.returncode == 0, done.stderr
    assert "there is no GPU: gloo is timed" in done.stderr
    kept = rows(tmp_path)
    assert {row["step"]: [] for row in kept} == {"decode": [], "draft": [], "verify": []}
    verify = {row["tokens"]: row["message_bytes"] for row in kept if row["step"] == "verify"}
    assert verify == {tokens: tokens * WIDTH * 2 for tokens in (4, 6, 8, 16, 24, 32, 64)}
    for row in kept:
        assert (row["ranks"], row["backend"], row["error"], row["node"]) == (2, "gloo", None, "local-0")
        assert 0 < row["p50_us"] <= row["p95_us"] < 1e6
    assert "default" in done.stdout


@pytest.mark.slow
def test_one_rank_has_nothing_to_reduce(tmp_path):
    """At tensor-parallel size 1 the command says that NCCL is not on the serving path, and starts nothing."""
    tree = {**gpu_tree(NCCL_PROTO=[None, "LL"]), "node": {"gpus": 1}, "engine": {**TREE["engine"], "args": {}}}
    done = command(tmp_path, tree)
    assert done.returncode == 0
    assert "NCCL is not on the serving path" in done.stderr
    assert not (tmp_path / "results").exists()
    alone = plan(Space(specfile.parse({**TREE, "engine": {**TREE["engine"], "args": {}}})))
    assert alone.notes == ("nothing to time: one rank (tp-size x pp-size) has no all-reduce",)


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """A probe of a fake machine of two GPUs, where one setting of each kind goes wrong; rows by environment."""
    folder = tmp_path_factory.mktemp("probed")
    starts = [{"NCCL_PROTO": "LL128"}, {"NCCL_P2P_LEVEL": "LOC"}, {"NCCL_MAX_NCHANNELS": 3}, {"NCCL_MIN_NCHANNELS": 2}]
    done = command(folder, gpu_tree(NCCL_PROTO=[None, "Simple"]) | {"start_from": starts}, "--limit", "1", fake=True)
    assert done.returncode == 0, done.stderr
    by_env = {}
    for row in rows(folder):
        by_env.setdefault(" ".join(f"{name}={value}" for name, value in dict(row["env"]).items()), []).append(row)
    return done, by_env, folder


@pytest.mark.slow
def test_every_environment_is_timed_at_every_size(probed):
    """NCCL is timed in CUDA graphs, with what it says it took; Simple costs what it costs."""
    _, by_env, _ = probed
    default, simple = by_env[""], by_env["NCCL_PROTO=Simple"]
    assert {(row["backend"], row["samples"], row["chosen"]) for row in default} == {("nccl", 40, "RING LL 8")}
    assert {row["chosen"] for row in simple} == {"RING SIMPLE 8"}
    differences = [slow["p50_us"] - fast["p50_us"] for fast, slow in zip(default, simple, strict=True)]
    assert differences == pytest.approx([15] * len(default))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "error"),
    [
        ("NCCL_PROTO=LL128", "failed: exit 1: ArithmeticError: wrong sum: 256 bytes of ones over 2 ranks"),
        ("NCCL_P2P_LEVEL=LOC", "hang: not over after 1 s, killed"),
        ("NCCL_MAX_NCHANNELS=3", "nccl_invalid_usage: RuntimeError: NCCL error in: NCCLUtils.cpp:94, invalid usage"),
        ("NCCL_MIN_NCHANNELS=2", "failed: ended by SIGKILL: it says nothing"),
    ],
)
def test_what_goes_wrong_is_classified(probed, environment, error):
    """A wrong sum, a hang, a refusal and a dead rank each have their own words, no time, and a place in the table."""
    done, by_env, _ = probed
    assert {row["p50_us"] for row in by_env[environment]} == {None}
    assert {row["error"][: len(error)] for row in by_env[environment]} == {error}
    assert error[:30] in " ".join(done.stderr.split())


@pytest.mark.slow
def test_nothing_is_left_of_what_hung(probed):
    """No process of the program outlives the command."""
    *_, folder = probed
    assert not running(folder)


@pytest.mark.slow
def test_the_default_comes_first_and_the_budget_is_kept(tmp_path):
    """`--most` times the default, then the starts, then what sets fewest variables."""
    tree = gpu_tree(NCCL_PROTO=[None, "Simple"], NCCL_MAX_NCHANNELS=[None, 8])
    tree |= {"start_from": [{"NCCL_PROTO": "LL", "NCCL_MAX_NCHANNELS": 4}]}
    done = command(tmp_path, tree, "--most", "3", fake=True)
    assert done.returncode == 0, done.stderr
    envs = list(dict.fromkeys(tuple(sorted(dict(row["env"]).items())) for row in rows(tmp_path)))
    assert envs[:2] == [(), (("NCCL_MAX_NCHANNELS", "4"), ("NCCL_PROTO", "LL"))]
    assert [len(env) for env in envs] == [0, 2, 1]


@pytest.mark.slow
def test_a_machine_that_cannot_is_told(tmp_path):
    """An interpreter without torch is the machine's trouble: one line with its last words, exit 1."""
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = command(tmp_path, {**TREE, "engine": {**TREE["engine"], "python": str(bare)}})
    assert done.returncode == 1
    assert "cannot time all-reduces: ModuleNotFoundError: No module named 'torch'" in done.stderr


@pytest.mark.slow
def test_the_view_answers(tmp_path):
    """What was probed is there for `query`."""
    command(tmp_path, TREE)
    done = subprocess.run(
        [sys.executable, "-m", "raytune_eagle", "query", "--results", str(tmp_path / "results"), "--format", "csv",
         "select step, count(*) as sizes from probes group by 1 order by 1"],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["step,sizes", "decode,2", "draft,3", "verify,7"]


@pytest.mark.slow
def test_an_interrupted_probe_keeps_what_it_has(tmp_path):
    """Ctrl-C while a setting hangs: exit 130, what was timed before is kept, and what hung is gone with its files."""
    tree = gpu_tree(NCCL_PROTO=[None, "Simple"]) | {"start_from": [{"NCCL_P2P_LEVEL": "LOC"}]}
    done = command(tmp_path, tree, "--limit", "100", fake=True, interrupt_at="default")
    assert done.returncode == 130, done.stderr
    assert {len(dict(row["env"])) for row in rows(tmp_path)} == {0}
    assert not running(tmp_path)
    assert not list((tmp_path / "tmp").iterdir())


def test_a_wide_space_is_thinned_evenly():
    """Of 59 tree sizes at two concurrencies eight are timed, the smallest and the largest among them."""
    tree = yaml.safe_load(yaml.safe_dump(TREE))
    tree["space"]["speculative"] = {
        "num_steps": {"int": [1, 10]},
        "eagle_topk": [8],
        "num_draft_tokens": {"int": [2, 60]},
    }
    tokens = plan(Space(specfile.parse(tree))).tokens["verify"]
    assert (len(tokens), tokens[0], tokens[-1]) == (8, 2, 240)
    assert all(after / before < 3 for before, after in itertools.pairwise(tokens))


def test_more_ranks_than_gpus_are_refused():
    """A node's own all-reduces are timed: tensor parallelism over several nodes is told, with its place."""
    tree = {**gpu_tree(), "engine": {**TREE["engine"], "args": {"tp-size": 16, "nnodes": 8}}}
    with pytest.raises(SpecError, match=r"node\.gpus: 2, but tp-size x pp-size is 16"):
        plan(Space(specfile.parse(tree)))


@pytest.mark.ray
def test_every_node_of_a_cluster_is_probed(tmp_path):
    """With a running cluster each node times its own all-reduces, at the same time, and its rows bear its name."""
    ready, script = tmp_path / "address", (
        "import os, sys; from raytune_eagle.nodes import local_ray; os.environ.update(local_ray.ENVIRONMENT)\n"
        "local_ray.main(sys.argv[1:])"
    )  # fmt: skip
    cluster = subprocess.Popen([sys.executable, "-c", script, "2", str(ready)], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        done = command(tmp_path, TREE, "--cluster", ready.read_text())
    finally:
        os.killpg(cluster.pid, signal.SIGKILL)
        cluster.wait()
    assert done.returncode == 0, done.stderr
    assert {(row["node"], row["error"]) for row in rows(tmp_path)} == {("local-0", None), ("local-1", None)}
