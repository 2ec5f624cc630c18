"""Nodes of several GPUs, as far as a machine without any goes: NVML and the server are stand-ins, all else is real."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from raytune_eagle.checkpoints import check_draft, check_target
from raytune_eagle.findings import problems
from raytune_eagle.nodes.local_ray import gpu_indices
from raytune_eagle.nodes.owner import gpus_in_order
from raytune_eagle.store import ParquetStore

ROOT = Path(__file__).parent.parent
FAKES = ROOT / "tests" / "fakes"
SERVES = """#!/bin/sh
if [ "$1" = -m ] && [ "$2" = sglang.launch_server ]; then
  shift 2
  echo "$CUDA_VISIBLE_DEVICES" >>"{seen}"
  exec {python} {server} "$@"
fi
if [ "$1" = -c ] && [ "$3" = cuda ]; then
  printf %s "$4"
  exec cat {flags}
fi
exec {python} "$@"
"""
"""An interpreter whose SGLang is the fake server and tells the flags of 0.5.20; it notes each server's GPUs."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target that shards over 8 GPUs, and its draft, written by the tool that writes the large ones."""
    folder = tmp_path_factory.mktemp("pair")
    shape = ["--layers", "8", "--hidden", "128", "--heads", "8", "--kv-heads", "8", "--intermediate", "256"]
    tokenizer = ROOT / "raytune_eagle" / "builtin" / "tiny" / "target"
    subprocess.run([sys.executable, ROOT / "tools" / "random_pair.py", tokenizer, folder, *shape], check=True)
    return folder


def cli(folder, *words, gpus=8):
    """The command on a machine of so many idle GPUs."""
    machine = folder / "gpus.json"
    free = {"used": 0, "total": 143771, "pids": {}}
    machine.write_text(json.dumps({"arch": [9, 0], "nvlink": True, "gpus": [free] * gpus}))
    path = os.pathsep.join(filter(None, [str(FAKES / "nvml"), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, "NVML_FAKE": str(machine), "XDG_CACHE_HOME": str(folder)}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    return subprocess.run(
        [sys.executable, "-m", "raytune_eagle", *map(str, words)],
        env=env, cwd=ROOT, check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def spec(folder, pair, name, **changes):
    """A spec of search_spaces/ with this pair and the fake server."""
    interpreter = folder / "python"
    server = FAKES / "launch_server.py"
    flags = ROOT / "tests" / "assets" / "sglang_0520_flags.json"
    interpreter.write_text(SERVES.format(seen=folder / "seen", python=sys.executable, server=server, flags=flags))
    interpreter.chmod(0o755)
    tree = yaml.safe_load((ROOT / "search_spaces" / name).read_text())
    tree["engine"] |= {"model": str(pair / "target"), "draft": str(pair / "draft"), "python": str(interpreter)}
    tree["workload"] |= {"max_new_tokens": 8, "min_passes": 1, "max_passes": 1}
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(tree | changes, sort_keys=False))
    return path


@pytest.mark.slow
def test_plan_of_the_eight_gpu_node(tmp_path, pair):
    """The spec for 8 GPUs is sound: NCCL is on the serving path, and plain decoding is launched under Simple too."""
    done = cli(tmp_path, "plan", spec(tmp_path, pair, "random7b_h200x8.yaml"))
    assert done.returncode == 0, done.stderr
    assert "--tp-size 8 --disable-custom-all-reduce" in done.stdout
    assert "note:" not in done.stdout
    plain = [line for line in done.stdout.splitlines() if "NCCL_PROTO=Simple" in line and "EAGLE3" not in line]
    assert plain


@pytest.mark.slow
def test_the_random_pair_fits(pair):
    """What tools/random_pair.py writes is whole, and draft and target are made for each other."""
    found = [*check_target(str(pair / "target")), *check_draft(str(pair / "draft"), str(pair / "target"))]
    assert problems(found) == []
    assert {finding.level for finding in found} == {"ok"}


def test_local_nodes_share_the_gpus_out():
    """Each local node has its own slice of what this process may see."""
    assert [gpu_indices(index, 2) for index in range(3)] == ["0,1", "2,3", "4,5"]


@pytest.mark.parametrize(("given", "put"), [("2,10,0", "0,2,10"), ("GPU-5f,GPU-0a", "GPU-5f,GPU-0a"), ("", "")])
def test_the_gpus_of_a_node_are_in_order(monkeypatch, given, put):
    """Whatever order Ray hands them out in; names other than indices are left as they are."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    gpus_in_order()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == put


@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "nodes", "given"),
    [("random7b_h200x8.yaml", 1, ["0,1,2,3,4,5,6,7"]), ("random7b_h200x2.yaml", 2, ["0,1", "2,3"])],
)
def test_a_study_over_nodes_of_several_gpus(tmp_path, pair, name, nodes, given):
    """One actor owns all GPUs of its node, and its servers see those alone; NCCL settings reach the records.

    What an earlier probe of the study saw hang is told, and not launched.
    """
    changes = {"confirm": {"top": 0}, "budget": {"trials": 2, "hours": 1}}
    path, results = spec(tmp_path, pair, name, **changes), tmp_path / "results"
    study, ranks = yaml.safe_load(path.read_text())["name"], len(given[0].split(","))
    rows = [
        {"measured_unix_s": 1.0, "node": "local-0", "step": "verify", "tokens": 16, "env": env, "ranks": ranks,
         "backend": "nccl", "message_bytes": 4096, "p50_us": p50, "error": None if p50 else "hang: killed"}
        for env, p50 in (({}, 20.0), ({"NCCL_MAX_NCHANNELS": "2"}, None))
    ]  # fmt: skip
    ParquetStore(str(results)).append_probes(study, rows)
    done = cli(tmp_path, "run", path, "--cluster", "local", "--nodes", nodes, "--results", results)
    assert done.returncode == 0, done.stderr
    assert sorted(set((tmp_path / "seen").read_text().split())) == given
    assert "probe: failed or hung, so not launched: NCCL_MAX_NCHANNELS=2" in " ".join(done.stderr.split())
    trials = pd.read_parquet(results / f"study={study}" / "trials")
    assert set(trials["status"]) == {"completed"}
    assert set(trials["hardware"]) == {f"{len(given[0].split(','))}x NVIDIA Fake"}
    every = {gpu for ids in trials["gpu_ids"] for gpu in ids}
    assert every == {f"GPU-{int(index):08d}" for visible in given for index in visible.split(",")}
    assert {"LL"} == set(trials["nccl_proto"].dropna())
    assert set(trials["node"]) == {f"local-{index}" for index in range(nodes)}
