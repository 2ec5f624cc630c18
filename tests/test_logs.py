"""SGLang's log is read right: progress, and decode lines of every version."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_logs import ASSETS, read

from raytune_eagle import failures, logs

PREFIX = "[2026-01-01 00:00:00 TP0] Decode batch"

FORMATS = {
    "0.4.1": ". #running-req: 3, #token: 9, token usage: 0.10, gen throughput (token/s): 5.50, #queue-req: 2",
    "0.4.3": ". #running-req: 3, #token: 9, token usage: 0.10, accept len: 2.50, "
    "gen throughput (token/s): 5.50, #queue-req: 2",
    "0.4.6": ". #running-req: 3, #token: 9, token usage: 0.10, accept len: 2.50, pre-allocated usage: 0.00, "
    "cuda graph: True, gen throughput (token/s): 5.50, #queue-req: 2",
    "0.4.9": ". #running-req: 3, #full token: 9, full token usage: 0.10, #swa token: 4, swa token usage: 0.20, "
    "cuda graph: True, gen throughput (token/s): 5.50, #queue-req: 2, ",
    "0.5.4": " [40], #running-req: 3, #token: 9, token usage: 0.10, accept len: 2.50, accept rate: 0.62, "
    "cuda graph: True, gen throughput (token/s): 5.50, #queue-req: 2, ",
    "0.5.10": ", #running-req: 3, #token: 9, token usage: 0.10, accept len: 2.50, accept rate: 0.62, cuda graph: True, "
    "gen throughput (token/s): 5.50, #queue-req: 2, est. decode TFLOPS/s (per GPU): 1.00, "
    "est. read BW (GB/s per GPU): 2.00",
    "0.5.20": ", #running-req: 3, #token: 9, token usage: 0.10, accept len: 2.50, cap len: 3.00, accept rate: 0.62, "
    "cuda graph: True, gen throughput (token/s): 5.50, #queue-req: 2, fwd occupancy: 91.00%",
}

WORDS = (
    "\r", "\n", "[2026-01-01 00:00:00 TP1] ", "Decode batch", ", ", ". ", "#running-req: ", "1", "nan", "-9", ": ", "]",
    "gen throughput (token/s): ", "accept len: ", "Traceback", "RuntimeError: CUDA out of memory", "exit code: -9",
    "Load weight end. type=", "Capturing batches", "\x1b[0m", "(a pid=1) ",
)  # fmt: skip


def test_a_decode_line_that_is_cut_in_its_throughput_is_none():
    """17 of 178.86 tokens per second are no figure, and neither is nan."""
    line = f"{PREFIX}{FORMATS['0.5.20']}"
    assert logs.decode_line(line.replace("5.50", "178.86")).throughput == 178.86
    for torn in ("17", "178.8", "nan"):
        assert logs.decode_line(line.partition("5.50")[0] + torn) is None


@pytest.mark.parametrize("name", [path.name for path in ASSETS.glob("*.log")])
def test_log_cut_anywhere_is_still_read(name):
    """A log that ends in the middle of a line, as a dying server's does, never raises, and no line is invented."""
    text = read(name)
    whole = {(line.throughput, line.running) for line in logs.decode_lines(text)}
    for end in range(0, len(text), max(1, len(text) // 20)):
        torn = text[:end]
        logs.stage(torn)
        failures.classify(torn, -9)
        *sound, _ = [None, *logs.decode_lines(torn)]
        assert all((line.throughput, line.running) in whole for line in sound if line)


@given(st.text() | st.lists(st.sampled_from(WORDS)).map("".join))
def test_nothing_that_is_in_a_log_raises(text):
    """Whatever a server or its libraries write, and in whatever order."""
    failures.classify(text, None)
    for line in logs.lines(text):
        logs.progress(line)
        logs.decode_line(line)


def test_lines_of_two_processes_on_one_line_are_two():
    """Ranks write to one file without waiting for each other's end of line."""
    glued = f"{PREFIX}{FORMATS['0.5.10']}{PREFIX.replace('TP0', 'TP1')}{FORMATS['0.5.20']}"
    assert [line.accept_len for line in logs.decode_lines(glued)] == [2.5, 2.5]
    assert len(list(logs.lines(glued))) == 2


@pytest.mark.parametrize(
    ("version", "bonus"),
    [("0.4.6", None), ("0.5.4", True), ("0.5.10.post1", True), ("0.5.11", None), ("0.5.12", False), ("0.5.23", False),
     ("", None)],
)  # fmt: skip
def test_what_accept_rate_means(version, bonus):
    """It was redefined; real lines of both kinds agree with what is said of them."""
    assert logs.accept_rate_has_bonus(version) is bonus


def test_accept_rate_of_real_lines_is_as_told():
    """4 draft tokens and the old meaning: rate = length / 4. 16 and the new one: rate = (length - 1) / 15."""
    old = [line for line in logs.decode_lines(read("sglang_issue_11948_2025-10_eagle3_oldrate.log")) if line.accept_len]
    new = [line for line in logs.decode_lines(read("ok_0516_h200_eagle3_3_4_16.log")) if line.accept_len]
    assert len(old) >= 2
    assert len(new) > 50
    assert all(abs(line.accept_len / 4 - line.accept_rate) < 0.006 for line in old)
    assert all(abs((line.accept_len - 1) / 15 - line.accept_rate) < 0.006 for line in new)


@pytest.mark.parametrize("path", sorted(ASSETS.glob("*.*")), ids=lambda path: path.name)
def test_every_whole_decode_line_is_read(path):
    """Each line with a throughput gives a value for each field that it has; anything else gives None."""
    for line in path.read_text(encoding="utf-8").splitlines():
        whole = "Decode batch" in line and "gen throughput" in line and not line.startswith(("#", "|"))
        read_line = logs.decode_line(line)
        assert (read_line is not None) == whole, line
        if read_line:
            assert f"(token/s): {read_line.throughput:.2f}" in line
            assert (read_line.accept_len is None) == ("accept len" not in line)
            assert (read_line.queued is None) == ("#queue-req" not in line)
            assert (read_line.cuda_graph is None) == (" graph: " not in line)
            assert read_line.tokens == int(re.search(r"#(?:full )?token: (\d+)", line).group(1))


@pytest.mark.parametrize("version", FORMATS)
def test_decode_line_of_each_version(version):
    """The fields come out the same whatever the version wrote around them."""
    line = logs.decode_line(PREFIX + FORMATS[version])
    assert (line.running, line.tokens, line.token_usage, line.throughput, line.queued) == (3, 9, 0.1, 5.5, 2)
    assert line.accept_len == (2.5 if "accept len" in FORMATS[version] else None)
    assert line.accept_rate == (0.62 if "accept rate" in FORMATS[version] else None)


def events(text):
    """Progress of a log, repetitions left out."""
    found = []
    for line in logs.lines(text):
        event = logs.progress(line)
        if event and found[-1:] != [event]:
            found.append(event)
    return found


def test_progress_of_a_start():
    """Weights, draft, KV cache and each capture are told, with n/m out of the progress bars on one line."""
    assert events(read("ok_0520_cpu_eagle3.log")) == [
        ("weights", "0/1"),
        ("weights", "1/1"),
        ("weights", "LlamaForCausalLM"),
        ("weights", "0/1"),
        ("weights", "1/1"),
        ("weights", "LlamaForCausalLMEagle3"),
        ("kv_cache", "16384"),
    ]
    captured = [detail for name, detail in events(read("fail_0516_h200_tree_too_small.log")) if name == "graph_capture"]
    assert captured[0] == "target verify"
    assert "3/8" in captured
    assert "target verify CUDA graph end. elapsed=43.00 s" in captured
    assert "draft decode" in captured


def test_other_ranks_are_not_told_again():
    """Of eight ranks that say the same, one is enough; the first is TP0."""
    line = "[2026-01-01 00:00:00 TP{}] Capture target verify CUDA graph begin. backend=full"
    assert logs.progress(line.format(0)) == ("graph_capture", "target verify")
    assert logs.progress(line.format(1)) is None
    assert logs.progress(line.format("0 PP1")) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "arguments"),
        ("Init torch distributed begin.", "distributed"),
        ("Load weight begin. avail", "weights"),
        ("Load weight begin.\nLoad weight end.", "kv_cache"),
        ("Load weight end.\nLoad weight begin.", "weights"),
        ("Capture target decode CUDA graph begin.", "graph_capture"),
        ("The server is fired up and ready to roll!", "serving"),
    ],
)
def test_stage(text, expected):
    """How far a server came is told by the last line that says so."""
    assert logs.stage(text) == expected


def test_secrets_are_taken_out():
    """The key goes wherever it stands, and so do others that SGLang prints as its keys."""
    text = "server_args={'api_key': 'sk-1', 'admin_api_key': 'sk-2'} api_key='sk-3', Bearer secret"
    kept = logs.redact(text, "secret")
    assert not re.search(r"sk-\d|secret", kept)
    assert logs.redact("nothing", "") == "nothing"


def test_tail_is_the_end():
    """The last lines, as many as asked for."""
    assert logs.tail("a\nb\nc\n", 2) == "b\nc"
