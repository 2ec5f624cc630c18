"""What a server died of is told from its log: of one class, with what to do and whose fault it is."""

from __future__ import annotations

import time

import pytest
from sglang_logs import ASSETS, FAILURES, read

from raytune_eagle import failures
from raytune_eagle.failures.classes import RULES


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


@pytest.mark.slow
def test_a_long_log_is_classified_in_seconds():
    """Start and end of 100 MB say what happened; a line of half a megabyte is cut."""
    line = "[2026-01-01 00:00:00 TP0] Decode batch, #running-req: 3, gen throughput (token/s): 5.50, #queue-req: 2"
    healthy = f"{line}\n" * 1_000_000
    begun = time.process_time()
    assert failures.classify(healthy + read("made_disk_full.log"), 1).name == "disk_full"
    failures.classify("Capture cuda graph failed: " * 20_000, 1)
    failures.classify("[2026-01-01 00:00:00] Receive: obj=torn\nand on\n" * 100_000, 1)
    assert time.process_time() - begun < 20


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


def test_every_class_has_a_fixture():
    """No class is there without a log that it is told from."""
    assert {rule.name for rule in RULES} == set(FAILURES.values())


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
