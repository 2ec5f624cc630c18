"""SGLang's log is read right: progress, decode lines of every version, and what a failure was."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytune_eagle import failures, logs

ASSETS = Path(__file__).parent / "assets" / "logs"
FAILURES = {
    "fail_0516_h200_bad_argument.log": "bad_argument",
    "fail_0516_h200_model_missing.log": "model_missing",
    "fail_0516_h200_oom_graph_capture.log": "oom_graph_capture",
    "fail_0516_h200_port_taken.log": "port_taken",
    "fail_0516_h200_oom_kv.log": "oom_kv",
    "fail_0516_h200_tree_too_small.log": "tree_too_small",
    "fail_0516_h200x2_rank_lost.log": "rank_lost",
    "fail_0516_h200x4_rank_lost.log": "rank_lost",
    "fail_0520_cpu_tree_too_small.log": "tree_too_small",
    "fail_0520_cpu_draft_as_llama.log": "shape_mismatch",
    "fail_0520_cpu_tree_too_shallow.log": "tree_too_shallow",
    "tensorrt-llm_issue_953_2024-01_nccl218_error.log": "nccl_invalid_usage",
    **{
        f"made_{rule.name}.log": rule.name
        for rule in failures.RULES
        if rule.name not in ("tree_too_small", "tree_too_shallow", "oom_kv", "rank_lost")
    },
}


PREFIX = "[2026-01-01 00:00:00 TP0] Decode batch"
# one line per row of the table in FORMATS.md, written after SGLang's own format strings
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


def read(name):
    """A log of tests/assets."""
    return (ASSETS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "expected"), FAILURES.items())
def test_failure_is_of_exactly_one_class(name, expected):
    """Each failed start is of its class and of no other: the order of the rules decides nothing."""
    assert [failure.name for failure in failures.matching(read(name))] == [expected]
    assert failures.classify(read(name), -9).name == expected


def test_killed_scheduler_is_told_from_its_exit_code():
    """A scheduler that the system killed says nothing itself; SGLang's line with its exit code does."""
    text = read("fail_0516_h200_killed_by_os.log")
    assert failures.classify(text, None).name == "killed_by_os"
    assert failures.classify(text.partition("crashed with exit code")[0], None).name == "unknown"


def test_the_rank_that_failed_is_told_not_those_that_lost_it():
    """The other ranks of a server see a closed connection, whatever ended the first: its own words decide."""
    lost = read("fail_0516_h200x4_rank_lost.log")
    assert failures.classify(lost + read("made_oom_serving.log"), None).name == "oom_serving"


def test_server_that_gave_up_but_lives_on_is_known():
    """0.5.16 hangs after a bind that failed, GPU held: the log tells it, no deadline need be waited for."""
    assert failures.hangs(read("fail_0516_h200_port_taken.log"))
    assert not any(failures.hangs(read(name)) for name in FAILURES if "port_taken" not in name)


def test_a_healthy_server_that_is_killed_is_not_blamed_for_its_start():
    """0.5.20 logs a ConnectionError of its warm-up before it is ready; it served all the same, then was killed."""
    warm_up = "requests.exceptions.ConnectionError: Max retries exceeded with url: /freeze_gc"
    served = f"{warm_up}\n[2026-01-01 00:00:01] The server is fired up and ready to roll!\n"
    assert failures.classify(served, -9).name == "killed_by_os"
    assert failures.classify(f"{served}RuntimeError: of its own\n", -9).name == "unknown"


def test_a_long_log_is_classified_in_seconds():
    """Start and end of 100 MB say what happened; a line of half a megabyte is cut."""
    begun = time.process_time()
    lines_ = f"{PREFIX}{FORMATS['0.5.20']}\n" * 400_000
    assert failures.classify(lines_ + read("made_disk_full.log"), 1).name == "disk_full"
    failures.classify("Capture cuda graph failed: " * 20_000, 1)
    assert time.process_time() - begun < 20


def test_a_decode_line_that_is_cut_in_its_throughput_is_none():
    """17 of 178.86 tokens per second are no figure, and neither is nan."""
    line = f"{PREFIX}{FORMATS['0.5.20']}"
    assert logs.decode_line(line.replace("5.50", "178.86")).throughput == 178.86
    for torn in ("17", "178.8", "nan"):
        assert logs.decode_line(line.partition("5.50")[0] + torn) is None


def test_killed_is_the_machines_fault_unless_memory_ran_out():
    """A kill from outside says nothing of a configuration; the kernel's for want of memory does."""
    killed = failures.classify(read("made_killed_by_os.log"), None)
    assert (killed.name, killed.fault) == ("killed_by_os", "machine")
    memory = failures.killed_for_memory(killed)
    assert (memory.name, memory.fault, memory.phase) == ("oom_host", "configuration", killed.phase)


AROUND = {
    "Ray": ("\x1b[36m(server pid=4711, ip=10.0.0.7)\x1b[0m ", " [repeated 3x across cluster]"),
    "an actor": ("(_Owner pid=12) ", ""),
    "kubectl": ("[pod/sglang-0/server] 2026-11-30T10:00:00.123456789Z ", ""),
    "a container": ("2026-11-30T10:00:00.123456789+00:00 stderr F ", ""),
    "compose": ("sglang-1  | ", ""),
    "journald": ("Nov 30 10:00:00 node7 sglang[4711]: ", ""),
    "Windows": ("", "\r"),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize(("front", "end"), AROUND.values(), ids=AROUND)
def test_failure_is_told_through_what_others_write_around_it(name, front, end):
    """Whoever passed the log on, the class, the stage and the fault stay the same."""
    text = read(name)
    through = "".join(f"{front}{line}{end}\n" for line in text.split("\n"))
    plain, prefixed = failures.classify(text, 1), failures.classify(through, 1)
    assert (prefixed.name, prefixed.phase, prefixed.fault) == (plain.name, plain.phase, plain.fault)


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


def test_every_class_has_a_fixture():
    """No class is there without a log that it is told from."""
    assert {rule.name for rule in failures.RULES} == set(FAILURES.values())


@pytest.mark.parametrize(
    "name",
    [path.name for path in ASSETS.glob("*.log") if path.name not in FAILURES and "killed_by_os" not in path.name],
)
def test_log_without_a_known_failure_matches_no_class(name):
    """Healthy logs, with their harmless tracebacks, and foreign ones are of no class."""
    assert failures.matching(read(name)) == []


def test_details_tell_what_to_do():
    """The advice is ours, not SGLang's misleading one, and quotes the line that decided."""
    failure = failures.classify(read("fail_0516_h200_tree_too_small.log"), -9)
    assert failure.phase == "graph_capture"
    assert "topk + (num_steps - 1) * topk**2" in failure.detail
    assert "selected index k out of range" in failure.detail
    assert failures.classify(read("fail_0516_h200_bad_argument.log"), 1).line.startswith("TypeError: '>' not supported")


@pytest.mark.parametrize(
    ("name", "fault", "transient"),
    [
        ("made_model_unsupported.log", "spec", False),
        ("made_model_missing.log", "spec", False),
        ("made_port_taken.log", "configuration", True),
        ("made_graph_capture_failed.log", "configuration", True),
        ("made_oom_graph_capture.log", "configuration", False),
        ("made_gpu_lost.log", "machine", False),
        ("made_disk_full.log", "machine", False),
        ("made_bad_argument.log", "spec", False),
        ("made_sglang_missing.log", "spec", False),
    ],
)
def test_fault_and_second_chance(name, fault, transient):
    """Whose fault it was, and whether one more try makes sense."""
    failure = failures.classify(read(name), 1)
    assert (failure.fault, failure.transient) == (fault, transient)


def test_killed_processes():
    """SGLang's watchdog names a child that was killed; -9 without any error said is a kill, with one it is not."""
    assert failures.classify(read("made_killed_by_os.log"), None).name == "killed_by_os"
    assert failures.classify("[2026-01-01 00:00:00] Load weight begin.\n", -9).name == "killed_by_os"
    unknown = failures.classify(read("made_unknown.log"), -9)
    assert unknown.name == "unknown"
    assert "ZeroDivisionError" in unknown.detail
    assert failures.classify("", 3).detail == "the server ended with 3 during arguments: an empty log"


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
