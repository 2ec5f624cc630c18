"""What is wrong with results, queries, other runs and disks, through the installed command: nothing is lost by it."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from bad_input import command, refused, write_spec
from fake_study import fake_study
from made import WORKLOAD, completed, make_space, surface
from made_interpreter import make_interpreter

from raytune_eagle.nodes.simulated import Answer, SimulatedFleet
from raytune_eagle.store import ParquetStore
from raytune_eagle.study import Study

pytestmark = pytest.mark.slow  # a process of its own for each


# ------------------------------------------------------------------------------------------------------------- results
def test_results_directory_not_writable(tmp_path):
    """Results that could not be written are refused before anything is launched."""
    path = write_spec(tmp_path, make_interpreter(tmp_path / "env"))
    (tmp_path / "file").touch()
    told = refused(tmp_path, path, "--results", tmp_path / "file" / "results")
    assert told == f"--results: {tmp_path}/file is a file, not a folder; name another"
    told = refused(tmp_path, path, "--results", "/proc/results")
    assert told.startswith("--results: /proc cannot be written (")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Records of a small study, made in virtual time."""
    folder = tmp_path_factory.mktemp("results")
    space, store = make_space(), ParquetStore(str(folder))
    store.declare(space.spec.name, {d.column: d.kind for d in space.dimensions})
    fleet = SimulatedFleet(["a"], lambda node, job: Answer(completed(surface(job.config)), 60.0))
    Study(space, WORKLOAD, store).run(fleet)
    return folder


@pytest.mark.parametrize("words", [("best", "s"), ("query", "select count(distinct number) as trials from trials")])
def test_foreign_and_torn_files_in_results(tmp_path, results, words):
    """A foreign file and a torn one are named and passed over; the rest is read as if they were not there."""
    folder = tmp_path / "results"
    shutil.copytree(results, folder)
    trials = sorted((folder / "study=s" / "trials").glob("*.parquet"))
    torn = trials[-1]
    torn.write_bytes(torn.read_bytes()[:300])
    foreign = torn.parent / "notes.parquet"
    foreign.write_text("not parquet at all")
    (torn.parent / "README.txt").write_text("a foreign file of another kind")
    done = command(*words, "--results", folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("raytune-eagle: ")]
    assert len(told) == 2
    assert {path.name for path in (torn, foreign) for line in told if path.name in line} == {torn.name, foreign.name}
    assert words[0] == "best" or str(len(trials) - 1) in done.stdout


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("selct 1", "Parser Error: syntax error at or near"),
        ("select numbr from trials", "no column 'numbr'; did you mean number"),
        ("select * from trails", "Table with name trails does not exist; there are trials, requests, events, probes"),
        ("drop table trials", "DROP is not for reading; use SELECT"),
        ("insert into trials select * from trials", "INSERT is not for reading; use SELECT"),
        ("copy trials to '{file}'", "COPY is not for reading; use SELECT"),
        ("select 1; select 2", "one statement is wanted, not 2"),
        (";", "one statement is wanted, not 0"),
        ("select * from read_csv('{file}')", "file system operations are disabled by configuration"),
        ("select * from '{file}'", "file system operations are disabled by configuration"),
        ("select content from read_text('{file}')", "file system operations are disabled by configuration"),
    ],
)
def test_queries_that_are_wrong_or_reach_out(tmp_path, results, sql, said):
    """SQL that is wrong, is no SELECT or reads a file is one line and exit 2; no file is read or written."""
    secret = tmp_path / "secret.csv"
    secret.write_text("word\nsesame\n")
    done = command("query", sql.format(file=secret), "--results", results, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("raytune-eagle: query: ")
    assert said in done.stderr
    assert "sesame" not in done.stderr
    assert secret.read_text() == "word\nsesame\n"


# ------------------------------------------------------------------------------------------------------ while it runs
@pytest.mark.ray
def test_two_runs_of_one_study(tmp_path):
    """The second `run` of a study is refused, naming the first; the first goes on to its end."""
    path = fake_study(tmp_path, trials=6)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    argv = [sys.executable, "-m", "raytune_eagle", "run", str(path)]
    first = subprocess.Popen(argv, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 180
        while not list(tmp_path.glob("results/study=faked/trials/*")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        done = command("run", path, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"study 'faked': process {first.pid} on " in done.stderr
        assert first.wait(timeout=120) == 0
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    frame = pd.read_parquet(tmp_path / "results/study=faked/trials")
    assert frame.kind.value_counts()["trial"] == 6
    assert frame.number.is_unique


FULL = """
mount -t tmpfs -o size=300m tmpfs {disk} && cp -r {kept}/. {disk}/ || exit 99
"$0" "$@" & run=$!
until ls {disk}/results/study=faked/trials/*.parquet || ! kill -0 $run; do sleep 0.1; done >/dev/null 2>&1
{fill}
wait $run; code=$?
rm -f {disk}/filler; cp -r {disk}/. {kept}/
exit $code
"""


def on_a_disk_of_its_own(folder, path, fill=""):
    """Run the study with results on a small file system, kept between runs; `fill` is done after its first trial."""
    kept, disk = folder / "kept", folder / "disk"
    for each in (kept, disk):
        each.mkdir(exist_ok=True)
    script = FULL.format(disk=disk, kept=kept, fill=fill.format(disk=disk))
    words = ("run", path, "--results", disk / "results", "--patience", "5")
    return command(*words, cwd=folder, first=("unshare", "-rm", "sh", "-c", script), HOME=str(folder))


@pytest.mark.ray
def test_disk_full_while_a_trial_is_written(tmp_path):
    """Waited for, then exit 1 with what was in hand put elsewhere, nothing torn; with room the next run goes on."""
    path = fake_study(tmp_path)
    full = on_a_disk_of_its_own(tmp_path, path, "cat /dev/zero > {disk}/filler 2>/dev/null")
    assert full.returncode == 1, full.stderr
    told = [line for line in full.stderr.splitlines() if line.startswith("raytune-eagle: ")]
    waiting = next(line for line in told if "waiting for it" in line)
    assert "study=faked/" in waiting
    assert "cannot be written: No space left on device" in waiting
    rescued = tmp_path / "raytune-eagle-rescued"
    assert f"what was in hand is in {rescued}" in told[-1]
    assert list(rescued.glob("*/study=faked/*/*"))
    store = ParquetStore(str(tmp_path / "kept" / "results"))
    before = [record.number for record in store.read("faked")]
    assert 1 <= len(before) < 4
    assert store.problems("faked") == []
    again = on_a_disk_of_its_own(tmp_path, path)
    assert again.returncode == 0, again.stderr
    numbers = [record.number for record in store.read("faked")]
    assert len(set(numbers)) == len(numbers)
    assert sum(record.kind == "trial" for record in store.read("faked")) == 3
    assert store.problems("faked") == []


@pytest.mark.ray
def test_the_only_draft_missing_on_the_node_costs_one_launch(tmp_path):
    """A draft that only the node can look for (a hub id) and does not find: the study stops at the first launch."""
    done = command("run", fake_study(tmp_path, draft="some/draft", faults="missing_draft"), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("raytune-eagle: engine: model_missing: the model or draft is not where the spec says: ")
    assert "some/draft is not a local folder" in last
    assert [record.kind for record in ParquetStore(str(tmp_path / "results")).read("faked")] == ["baseline"]
