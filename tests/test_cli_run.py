"""`run` on a local Ray: killed, interrupted and started twice, nothing is left and nothing is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
from command import cli, made_study
from fake_study import fake_study
from made import completed, failed

from raytune_eagle.nodes.simulated import Answer
from raytune_eagle.store import ParquetStore


@pytest.mark.slow
def test_study_without_a_completed_trial_is_no_success(tmp_path):
    """If every trial fails, the table says so and `best --export` exits 1."""

    def respond(node, job):
        return Answer(failed() if job.config.speculative else completed(90), 1.0)

    made_study(tmp_path, respond)
    assert "no trial completed (12 launched" in cli("best", "s", "--results", tmp_path, check=0).stdout
    assert cli("best", "s", "--results", tmp_path, "--export", "json", check=1).stdout == ""


@pytest.fixture
def faked(tmp_path):
    """A folder with the spec of a study whose server is the fake one."""
    fake_study(tmp_path, trials=6)
    return tmp_path


def started_by(process):
    return psutil.Process(process.pid).children(recursive=True)


def start(folder, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "raytune_eagle", "run", "spec.yaml", "--nodes", "2", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def await_trials(folder, count, seconds=90):
    deadline = time.monotonic() + seconds
    while len(found := list(folder.glob("results/study=faked/trials/*.parquet"))) < count:
        assert time.monotonic() < deadline, f"{len(found)} trials after {seconds} s"
        time.sleep(0.1)


def ours():
    """Folders and processes of a local Ray of ours."""
    folders = {
        path for name in ("rte-*", "raytune-eagle-*") for path in Path("/tmp").glob(name) if "guards" not in path.name
    }
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR", "").startswith("/tmp/rte-"):
                processes.append(process)
        except psutil.Error:
            continue
    return folders, processes


def left_since(before):
    """Folders that are still there after 5 s: who guards a server removes them once all of it is dead."""
    deadline = time.monotonic() + 5
    while (left := ours()[0] - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.mark.ray
def test_killed_run_leaves_nothing_and_goes_on(faked):
    """SIGKILL in the middle: servers and Ray gone within 15 s; the same command ends with exactly the budget."""
    before, others = ours()
    run = start(faked)
    await_trials(faked, 3)
    tree = started_by(run)
    rays = [process for process in ours()[1] if process not in others]
    assert len(rays) > 4
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=10)
    _, alive = psutil.wait_procs([*tree, *rays], timeout=15)
    assert alive == []
    assert left_since(before) == set()
    again = start(faked)
    out, err = again.communicate(timeout=180)
    assert again.returncode == 0, err
    frame = pd.read_parquet(faked / "results" / "study=faked" / "trials")
    assert sorted(frame.number) == list(range(len(frame)))
    assert (frame.kind == "trial").sum() == 6
    assert frame[frame.kind == "trial"].key.is_unique
    assert "Verdict at concurrency 1" in out
    began = time.monotonic()
    third = start(faked)
    _, err = third.communicate(timeout=60)
    assert (third.returncode, "nothing to launch" in err) == (0, True)
    assert time.monotonic() - began < 20
    assert len(pd.read_parquet(faked / "results" / "study=faked" / "trials")) == len(frame)


@pytest.fixture
def no_nohup():
    """What these tests start may be hung up, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.ray
@pytest.mark.usefixtures("no_nohup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_in_order(faked, number):
    """Ctrl-C, kill and a closed terminal: exit 130, one line, what was measured is kept, nothing is left."""
    before, _ = ours()
    run = start(faked)
    await_trials(faked, 2)
    tree = started_by(run)
    run.send_signal(number)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 130
    assert err.splitlines()[-1] == "raytune-eagle: interrupted; run the same command again to go on"
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(tree, timeout=15)
    assert alive == []
    assert left_since(before) == set()
    assert len(list(ParquetStore(str(faked / "results")).read("faked"))) >= 2


@pytest.mark.slow
def test_changed_spec_is_refused_with_the_difference(tmp_path):
    """Another spec under the same name: exit 2, the difference shown, nothing launched."""
    made_study(tmp_path / "results")
    text = (
        "name: s\nengine: {model: /other, draft: /d}\nspace:\n"
        "  speculative: {num_steps: {int: [1, 6]}, eagle_topk: [1, 2, 4], num_draft_tokens: {int: [2, 16]}}\n"
        "  nccl: {NCCL_PROTO: [null, Simple, LL]}\nsearch: {sampler: random, seed: 0}\nnode: {gpus: 0}\n"
    )
    (tmp_path / "s.yaml").write_text(text)
    done = cli("run", "s.yaml", cwd=tmp_path, check=2)
    assert 'engine.model: "/m" -> "/other"' in done.stderr
    assert "node.gpus: 8 -> 0" in done.stderr
