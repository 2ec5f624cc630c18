"""The command as a user types it: output, exit codes, one line for each mistake."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pandas as pd
import psutil
import pyarrow.dataset as ds
import pytest
from made import WORKLOAD, completed, failed, make_space, surface

from raytune_eagle.nodes.simulated import Answer, SimulatedFleet
from raytune_eagle.store import ParquetStore
from raytune_eagle.study import Study

ROOT = Path(__file__).parent.parent
FAKE = ROOT / "tests" / "fakes" / "launch_server.py"


def cli(*words, cwd=ROOT, check=None, timeout=120):
    """Run the installed command; returns the finished process."""
    done = subprocess.run(
        [sys.executable, "-m", "raytune_eagle", *map(str, words)],
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check is not None:
        assert done.returncode == check, done.stderr + done.stdout
    return done


def made_study(folder, respond=lambda node, job: Answer(completed(surface(job.config)), 60.0), **changes):
    """A small study in virtual time, kept as Parquet."""
    space, store = make_space(**changes), ParquetStore(str(folder))
    store.declare(space.spec.name, {d.column: d.kind for d in space.dimensions})
    study = Study(space, WORKLOAD, store)
    study.run(SimulatedFleet(["a", "b"], respond))
    return study


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    made_study(folder)
    return folder


def test_plan_prints_the_published_kimi_launch():
    """`plan` shows the size, what the rules removed, and the published launch word for word."""
    out = cli("plan", "search_spaces/kimi_k25_8gpu.yaml", "--show", 1, check=0).stdout
    assert "924,480 valid points" in out
    assert "565 invalid (tree_holds_draft_tokens)" in out
    assert (
        "NCCL_PROTO=LL NCCL_ALGO=Ring NCCL_P2P_LEVEL=SYS NCCL_MAX_NCHANNELS=16 NCCL_BUFFSIZE=16777216 "
        "NCCL_NTHREADS=512 SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python3 -m sglang.launch_server --model-path "
        "/shared/kimi-k2.5-int4 --trust-remote-code --tp-size 8 --mem-fraction-static 0.85 --speculative-algorithm "
        "EAGLE3 --speculative-draft-model-path /data/eagle3/output_10k_sglang/4 --speculative-num-steps 2 "
        "--speculative-eagle-topk 4 --speculative-num-draft-tokens 5 --num-continuous-decode-steps 4 "
        "--disable-custom-all-reduce\n"
    ) in out


def test_query_csv(results):
    """The issue's own query answers as CSV, fastest first, on stdout alone."""
    sql = (
        "select num_steps, eagle_topk, num_draft_tokens, output_throughput, accept_len from trials "
        "where kind = 'trial' order by 4 desc"
    )
    done = cli("query", sql, "--format", "csv", "--results", results, check=0)
    lines = done.stdout.splitlines()
    assert lines[0] == "num_steps,eagle_topk,num_draft_tokens,output_throughput,accept_len"
    figures = [float(line.split(",")[3]) for line in lines[1:]]
    assert len(figures) == 12
    assert figures == sorted(figures, reverse=True)
    assert done.stderr == ""


def test_records_are_read_without_this_package(results):
    """pandas, DuckDB and pyarrow.dataset read the folder with nothing of ours."""
    folder = f"{results}/study=s/trials"
    assert len(pd.read_parquet(folder)) == 16
    assert duckdb.sql(f"select count(*) from '{results}/study=*/trials/*.parquet'").fetchall() == [(16,)]
    table = ds.dataset(folder, format="parquet").to_table(columns=["number", "nccl_proto", "speedup"])
    assert sorted(table["number"].to_pylist()) == list(range(16))


def test_best_names_the_fastest(results):
    """`best` shows the table and the verdict; its winner is the one with the highest throughput."""
    out = cli("best", "s", "--results", results, check=0).stdout
    assert "Verdict at concurrency 1: EAGLE3 " in out
    frame = pd.read_parquet(f"{results}/study=s/trials")
    fastest = frame[frame.output_throughput == frame.output_throughput.max()]
    assert out.splitlines()[-1] in set(fastest.launch_command)


def test_exports_are_one_launch(results):
    """The three exports spell the same launch."""
    command, env, data = (
        cli("best", "s", "--results", results, "--export", form, check=0).stdout for form in ("command", "env", "json")
    )
    spelled = json.loads(data)
    words = shlex.split(command)
    assert words == [f"{k}={v}" for k, v in spelled["env"].items()] + spelled["argv"]
    assert shlex.join(spelled["argv"]) in shlex.split(env.splitlines()[-1])[0]


def test_no_study_of_that_name(results):
    """A wrong name is told with those that there are."""
    done = cli("best", "nothere", "--results", results, check=2)
    assert done.stderr == f"raytune-eagle: no study 'nothere' under {results}; there are: s\n"


def test_nodes_says_who_does_what(results):
    """`nodes` lists each node with its state."""
    out = cli("nodes", "--results", results, check=0).stdout
    assert re.search(r"│ a +│ idle", out)
    assert re.search(r"│ b +│ idle", out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["run", "nowhere.yaml"], 2, "raytune-eagle: nowhere.yaml: No such file or directory"),
        (["run", "search_spaces/tiny_cpu.yaml", "--nodes", "0"], 2, "raytune-eagle: --nodes 0: give 1 or more"),
        (["run", "search_spaces/tiny_cpu.yaml", "--study", "a/b"], 2, "raytune-eagle: name: 'a/b': use letters"),
        (["run", "search_spaces/tiny_cpu.yaml", "--study", "2024"], 2, "raytune-eagle: name: '2024' cannot name"),
        (["run", "search_spaces/tiny_cpu.yaml", "--nodes", "999"], 2, "raytune-eagle: --nodes 999: this machine has"),
        (["run", "search_spaces/kimi_k25_8gpu.yaml"], 2, "raytune-eagle: node.gpus: 1 node(s) of 8 GPUs need 8"),
        (["query", "drop table trials"], 2, "raytune-eagle: "),
        (["query"], 2, "raytune-eagle: query: give one SQL statement, or --schema"),
        (["best", "s", "--export", "toml"], 2, "Usage: "),
        (["bogus"], 2, "Usage: "),
    ],
)
def test_bad_usage(tmp_path, words, code, line):
    """Bad usage and bad input: exit 2, one line, no traceback, nothing written."""
    words = [str(ROOT / word) if word.startswith("search_spaces") else word for word in words]
    done = cli(*words, cwd=tmp_path, check=code)
    assert done.stderr.startswith(line)
    assert "Traceback" not in done.stderr
    assert line.startswith("Usage") or done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("results/study=*/trials/*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["--help"], ["query", "--schema"], ["query", "select repeat('x', 1000000)", "--format", "csv"], ["best", "s"]],
    ids=["help", "table", "large", "best"],
)
def test_stdout_that_cannot_be_written(results, words):
    """A full disk under stdout: exit 1 and one line, also for what is larger than any buffer."""
    where = [] if words == ["--help"] else ["--results", str(results)]
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "raytune_eagle", *words, *where]
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "raytune-eagle: stdout: No space left on device\n"


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_mistake(results):
    """As with `| head`: nothing on stderr."""
    command = [sys.executable, "-m", "raytune_eagle", "query", "select repeat('x', 1000000)", "--results", str(results)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        run.stdout.close()
        assert run.stderr.read() == b""
        assert run.wait(timeout=60) == 1


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams(results, closed):
    """What nobody can hear is not said, and no other file takes the place of a stream."""
    words = shlex.join([sys.executable, "-m", "raytune_eagle", "query", "select 1", "--results", str(results)])
    done = subprocess.run(["sh", "-c", f"{words} {closed}"], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (closed == "2>&-")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["click", "pyarrow", "duckdb"])
def test_interrupted_while_it_is_imported(module):
    """Ctrl-C before the command has begun: exit 130 and nothing said."""
    command = [sys.executable, "-X", "importtime", "-m", "raytune_eagle", "plan", "nowhere.yaml"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in run.stderr:
        if line.rstrip().endswith(f" {module}"):
            break
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (130, "")
    assert [line for line in err.splitlines() if not line.startswith("import time:")] == []


def test_study_without_a_completed_trial_is_no_success(tmp_path):
    """If every trial fails, the table says so and `best --export` exits 1."""

    def respond(node, job):
        return Answer(failed() if job.config.speculative else completed(90), 1.0)

    made_study(tmp_path, respond)
    assert "no trial completed (12 launched" in cli("best", "s", "--results", tmp_path, check=0).stdout
    assert cli("best", "s", "--results", tmp_path, "--export", "json", check=1).stdout == ""


FAKE_SPEC = """
name: faked
engine:
  model: builtin:tiny
  draft: builtin:tiny
node: {{gpus: 0}}
workload: {{prompts: builtin:tiny, max_new_tokens: 8, max_passes: 2, min_passes: 2}}
space: {{speculative: {{num_steps: {{int: [1, 5]}}, eagle_topk: [1, 2], num_draft_tokens: {{int: [2, 8]}}}}}}
search: {{sampler: random}}
confirm: {{top: 0}}
budget: {{trials: {trials}}}
"""


@pytest.fixture
def faked(tmp_path):
    """A folder in which the CPU layer is the fake server: another program under the module name that is launched."""
    package = tmp_path / "fake" / "faked_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    spec = tmp_path / "spec.yaml"
    spec.write_text(FAKE_SPEC.format(trials=6))
    wrapper = tmp_path / "python"
    wrapper.write_text(
        "#!/bin/sh\n"  # engine.python: an interpreter that serves the fake where SGLang's CPU layer is asked for
        f'if [ "$1 $2" = "-m raytune_eagle.engines.cpu" ]; then shift 2; exec {sys.executable} {FAKE} "$@"; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    wrapper.chmod(0o755)
    spec.write_text(spec.read_text().replace("  draft:", f"  python: {wrapper}\n  draft:"))
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
    deadline = time.monotonic() + 5
    while ours()[0] - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ours()[0] - before == set()
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_waits_ends_on_a_signal(number):
    """Also where it was started in a script's background, which ignores SIGINT; only what nohup ignores stays so."""
    ignoring = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    if number == signal.SIGHUP:
        ignoring += "signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    words = [sys.executable, "-c", ignoring + "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"]
    words += ["-m", "raytune_eagle", "dashboard", "--results", str(ROOT / "results"), "--port", "0"]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "http" in run.stdout.readline()
    run.send_signal(number)
    if number == signal.SIGHUP:
        with pytest.raises(subprocess.TimeoutExpired):
            run.wait(timeout=2)
        run.send_signal(signal.SIGTERM)
    run.communicate(timeout=20)
    assert run.returncode == 0


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
    assert ours()[0] - before == set()
    assert len(list(ParquetStore(str(faked / "results")).read("faked"))) >= 2


@pytest.mark.ray
def test_second_run_of_one_study_is_refused(faked):
    """Two `run` of one study at once: the second names the first and exits 2."""
    run = start(faked)
    await_trials(faked, 1)
    done = cli("run", "spec.yaml", cwd=faked, check=2)
    assert str(run.pid) in done.stderr
    assert done.stderr.count("\n") == 1
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=30)


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
