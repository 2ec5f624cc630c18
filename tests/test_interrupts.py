"""Ctrl-C, whenever it comes: exit 130, no traceback, and a last line that is true of the command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
from openai_server import OpenAI

COMMAND = [sys.executable, "-m", "raytune_eagle"]


def bench(url, folder, *words):
    """The command on its way, with few prompts."""
    (folder / "p.txt").write_text("def main():\nimport os\n")
    line = [*COMMAND, "bench", url, "--workload", str(folder / "p.txt"), "--max-new-tokens", "24", *words]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def interrupted_when(server, streams, run):
    """End it with Ctrl-C as soon as the server has had so many streams at once."""
    deadline = time.monotonic() + 60
    while server.most < streams:
        assert time.monotonic() < deadline
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=30)
    assert "Traceback" not in err
    return out, err.splitlines()[-1]


@pytest.mark.slow
def test_an_interrupted_bench_prints_what_it_has(tmp_path):
    """The concurrency that was measured is printed whole; the others are named; it does not say that it goes on."""
    with OpenAI(together="slow").running() as server:
        run = bench(server.url, tmp_path, "--concurrency", "1,2,4", "--format", "json")
        out, last = interrupted_when(server, 2, run)
    assert run.returncode == 130
    report = json.loads(out)
    assert [m["concurrency"] for m in report["measurements"]] == [1]
    assert report["left_out"] == [2, 4]
    assert last == "raytune-eagle: interrupted; what is above is whole, left out: --concurrency 2,4"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["table", "json"])
def test_whole_passes_of_an_interrupted_concurrency_are_printed(tmp_path, form):
    """Its first concurrency, in the second pass: the first is printed and marked, the exit code is 130."""
    with OpenAI().running() as server:
        run = bench(server.url, tmp_path, "--concurrency", "1,2", "--format", form, "--max-new-tokens", "600")
        for line in run.stderr:
            if line.startswith("pass: 1 of at most 8"):
                break
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=30)
    assert run.returncode == 130
    last = "raytune-eagle: interrupted; --concurrency 1 is above with its whole passes (1), left out: --concurrency 2"
    assert err.splitlines()[-1] == last
    if form == "table":
        assert "org/model (interrupted)" in " ".join(out.split())
        return
    report = json.loads(out)
    assert (report["why"], report["left_out"]) == ("interrupted", [1, 2])
    ((measured, category),) = zip(report["measurements"], report["categories"], strict=True)
    assert (measured["concurrency"], measured["passes"], measured["completion_tokens"]) == (1, 1, 1200)
    assert (measured["stable"], category["requests"]) == (False, 2)


@pytest.mark.slow
def test_a_bench_interrupted_at_its_first_has_nothing(tmp_path):
    """Nothing is printed as a result, and the last line says that a bench does not go on where it stopped."""
    with OpenAI(together="slow").running() as server:
        run = bench(server.url, tmp_path, "--concurrency", "2")
        out, last = interrupted_when(server, 2, run)
    assert (run.returncode, out) == (130, "")
    assert last == "raytune-eagle: interrupted; nothing was measured to its end, and a bench begins anew"


@pytest.mark.slow
def test_a_bench_that_fails_later_prints_what_it_has(tmp_path):
    """More streams than the server bears: the figures before it are printed, and exit 1 says that not all is there."""
    with OpenAI(together="fail").running() as server:
        run = bench(server.url, tmp_path, "--concurrency", "1,4")
        out, err = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "OpenAI's format" in out
    last = err.splitlines()[-1]
    assert "requests failed at concurrency 4" in last
    assert last.endswith("left out: --concurrency 4")


@pytest.mark.slow
def test_other_commands_do_not_say_that_they_go_on(tmp_path):
    """What only reads says that it was interrupted, and no more."""
    run = subprocess.Popen(
        [*COMMAND, "query", "select count(*) from range(100000000) a, range(100000) b", "--results", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(3)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=30)
    assert (run.returncode, err) == (130, "raytune-eagle: interrupted\n")
