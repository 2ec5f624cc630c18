"""The command as a user types it: output, exit codes, one line for each mistake."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import duckdb
import pandas as pd
import pyarrow.dataset as ds
import pytest
from command import ROOT, cli, invoked, made_study

from raytune_eagle.cli import main


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    made_study(folder)
    return folder


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_best_names_the_fastest(results):
    """`best` shows the table and the verdict; its winner is the one with the highest throughput."""
    out = cli("best", "s", "--results", results, check=0).stdout
    assert "Verdict at concurrency 1: EAGLE3 " in out
    frame = pd.read_parquet(f"{results}/study=s/trials")
    fastest = frame[frame.output_throughput == frame.output_throughput.max()]
    assert out.splitlines()[-1] in set(fastest.launch_command)


@pytest.mark.slow
def test_exports_are_one_launch(results):
    """The three exports spell the same launch."""
    command, env, data = (
        cli("best", "s", "--results", results, "--export", form, check=0).stdout for form in ("command", "env", "json")
    )
    spelled = json.loads(data)
    words = shlex.split(command)
    assert words == [f"{k}={v}" for k, v in spelled["env"].items()] + spelled["argv"]
    assert shlex.join(spelled["argv"]) in shlex.split(env.splitlines()[-1])[0]


@pytest.mark.slow
def test_no_study_of_that_name(results):
    """A wrong name is told with those that there are."""
    done = cli("best", "nothere", "--results", results, check=2)
    assert done.stderr == f"raytune-eagle: no study 'nothere' under {results}; there are: s\n"


@pytest.mark.slow
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
        (["run", "search_spaces/tiny_cpu.yaml", "--nodes", "0"], 2, "raytune-eagle: run --nodes 0: write a whole"),
        (["run", "search_spaces/tiny_cpu.yaml", "--study", "a/b"], 2, "raytune-eagle: name: 'a/b': use letters"),
        (["run", "search_spaces/tiny_cpu.yaml", "--study", "2024"], 2, "raytune-eagle: name: '2024' cannot name"),
        (["run", "search_spaces/tiny_cpu.yaml", "--nodes", "999"], 2, "raytune-eagle: --nodes 999: this machine has"),
        (["run", "search_spaces/kimi_k25_8gpu.yaml"], 2, "raytune-eagle: node.gpus: 1 node(s) of 8 GPUs need 8"),
        (["query", "drop table trials"], 2, "raytune-eagle: "),
        (["query"], 2, "raytune-eagle: query: give one SQL statement, or --schema"),
        (["best", "s", "--export", "toml"], 2, "raytune-eagle: best --export toml: write one of command, env, json"),
    ],
)
def test_bad_usage(tmp_path, words, code, line):
    """Bad usage and bad input: exit 2, one line, no traceback, nothing written."""
    words = [str(ROOT / word) if word.startswith("search_spaces") else word for word in words]
    done = cli(*words, cwd=tmp_path, check=code)
    assert done.stderr.startswith(line)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("results/study=*/trials/*"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rnu"], "rnu: no such command; did you mean run?"),
        (["results", "chek"], "results chek: no such command; did you mean check?"),
        (["export", "csv"], "export csv: no such command; there are optuna"),
        (["--versoin"], "--versoin: no such option; did you mean --version?"),
        (["run", "s", "--trails", "3"], "run --trails: no such option; did you mean --trials?"),
        (["results", "check", "--reslts", "r"], "results check --reslts: no such option; did you mean --results?"),
        (["run", "s", "--trials"], "run --trials: needs a value"),
        (["run", "s", "--detach=1"], "run --detach: takes no value"),
        (["run", "s", "--trials", "x"], "run --trials x: write a whole number, 1 or more"),
        (["run", "s", "--nodes", "0"], "run --nodes 0: write a whole number, 1 or more"),
        (["doctor", "s", "--nodes", "-1"], "doctor --nodes -1: write a whole number, 1 or more"),
        (["run", "s", "--nodes", "2", "--cluster", "auto"],
         "--nodes 2: with --cluster auto all nodes of the cluster are used; leave it out"),
        (["doctor", "s", "--nodes", "1", "--cluster", "head:6379"],
         "--nodes 1: with --cluster head:6379 all nodes of the cluster are used; leave it out"),
        (["best", "s", "--mix", ""], "best --mix is empty; write a value"),
        (["report", "s", "-o", " "], "report --output is empty; write a value"),
        (["export", "optuna", ""], "export optuna sqlite:///FILE.db is empty; write a value"),
        (["nodes", "--cluster", ""], '--cluster "": give `auto` or HOST:PORT'),
        (["run", "s", "--hours", "0"], "run --hours 0.0: write a number, more than 0"),
        (["run", "s", "--patience", "nan"], "run --patience nan: write a number, 0 or more"),
        (["probe", "s", "--limit", "-1"], "probe --limit -1.0: write a number, more than 0"),
        (["bench", "u", "--temperature", "inf"], "bench --temperature inf: write a number, 0 or more"),
        (["dashboard", "--port", "99999"], "dashboard --port 99999: write a whole number, 0 to 65535"),
        (["query", "x", "--format", "tabel"],
         "query --format tabel: write one of table, csv, json, parquet; did you mean table?"),
        (["run"], "run SPEC.yaml: missing; write raytune-eagle run [OPTIONS] SPEC.yaml"),
        (["compare", "a"], "compare STUDY_B: missing; write raytune-eagle compare [OPTIONS] STUDY_A STUDY_B"),
        (["plan", "a", "b"],
         "plan: got unexpected extra argument (b); write raytune-eagle plan [OPTIONS] SPEC.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_usage_is_one_line_with_what_to_write(words, line):
    """Whatever is wrong with a command line, of whichever command: exit 2 and one line in our own form."""
    done = invoked(*words)
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"raytune-eagle: {line}\n")


def test_every_command_tells_its_usage_alike():
    """No command is left to click's four lines."""
    for words in leaves(main):
        done = invoked(*words, "--no-such-option")
        said = f"raytune-eagle: {' '.join(words)} --no-such-option: no such option; "
        assert (done.exit_code, done.stderr.count("\n"), done.stderr.startswith(said)) == (2, 1, True), done.stderr


def test_no_text_may_be_empty():
    """An option or argument that an unset variable left empty is told in one line, whichever it is."""
    for words in leaves(main):
        command, given = main, []
        for word in words:
            command = command.commands[word]
        for param in command.params:
            if isinstance(param, click.Argument):
                given = [*given, ""]
            elif not param.is_flag:
                done = invoked(*words, param.opts[-1], "")
                told = f"raytune-eagle: {' '.join(words)} {max(param.opts, key=len)} "
                assert (done.exit_code, done.stderr.count("\n")) == (2, 1), (words, param.opts, done.output)
                assert done.stderr.startswith(told) or "--cluster" in param.opts, done.stderr
        if given:
            done = invoked(*words, *given)
            assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
            assert "empty; write a value" in done.stderr


def test_a_number_out_of_the_range_of_a_spec_is_told_of_its_option(tmp_path):
    """What is written behind a sound file is named as it was written, not as the file would have it."""
    words = ["run", ROOT / "search_spaces" / "tiny_cpu.yaml", "--results", tmp_path / "r"]
    done = invoked(*words, "--seed", "-4", "--trials", "9999999", "--hours", "1e9")
    assert done.exit_code == 2
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["--seed", "--trials", "--hours"]


def leaves(group, before=()):
    """The words of every command."""
    for name, command in group.commands.items():
        yield from leaves(command, (*before, name)) if isinstance(command, click.Group) else [(*before, name)]


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
def test_an_encoding_without_our_signs_loses_no_table(results):
    """A terminal or pipe of ASCII alone gets the figures, with what it lacks spelt out."""
    command = [sys.executable, "-m", "raytune_eagle", "best", "s", "--results", str(results)]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2013" in done.stdout
    assert "Verdict at concurrency 1: " in done.stdout


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
@pytest.mark.parametrize("module", ["click", "pydantic", "pyarrow"])
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


@pytest.mark.slow
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
