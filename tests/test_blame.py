"""Where a log has the words of several failures, the cause is the answer, and the blame goes where it belongs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from sglang_logs import FAILURES, read

from raytune_eagle import failures, logs
from raytune_eagle.engines.sglang import whose
from raytune_eagle.failures.classes import RULES, Fault
from raytune_eagle.model.config import Config, Speculative

KINDS = {rule.name: rule.kind for rule in RULES}
CAUSES = [name for name, told in FAILURES.items() if KINDS[told] == "cause"]
FOLLOWING = [name for name, told in FAILURES.items() if KINDS[told] != "cause"]
START_ONLY = sorted({rule.name for rule in RULES} - {rule.name for rule in RULES if not rule.start})
STARTED = """[2026-11-30 10:00:00 TP0] Init torch distributed begin.
[2026-11-30 10:00:01 TP0] Load weight begin. avail mem=78 GB
[2026-11-30 10:00:02 TP0] Load weight end. elapsed=2 s, type=LlamaForCausalLM, avail mem=60 GB
[2026-11-30 10:00:03 TP0] Memory pool end. avail mem=10 GB
[2026-11-30 10:00:04 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=9 GB
"""
SERVING = f"""{STARTED}[2026-11-30 10:00:06] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)
[2026-11-30 10:00:08] {failures.READY}!
"""
IMA = """[2026-11-30 10:00:09 TP3] Scheduler hit an exception: Traceback
RuntimeError: CUDA error: an illegal memory access was encountered
"""
NCCL_TIMEOUT = "[rank0]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=22)\n"
NCCL_CUDA = (
    "[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\n"
)
NCCL = "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)\n"
ECC = "CUDA error: uncorrectable ECC error encountered\n"
UNKNOWN = "[2026-11-30 10:00:09 TP3] Scheduler hit an exception: Traceback\nKeyError: 'embed'\n"


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("then", FOLLOWING)
def test_a_cause_is_told_whatever_follows_it(cause, then):
    """Ranks die of one another: what others say, before or after, changes neither class nor fault nor stage."""
    said, also = read(cause), read(then)
    others = "\n".join(line for line in also.split("\n") if not any(words.search(line) for words, _ in logs.STAGES))
    alone = failures.classify(said, 1)
    for text in (f"{said}\n{also}", f"{others}\n{said}"):
        both = failures.classify(text, 1)
        assert (both.name, both.fault, both.phase) == (alone.name, alone.fault, alone.phase)


@pytest.mark.parametrize("then", FOLLOWING)
@pytest.mark.parametrize("first", FOLLOWING)
def test_without_a_cause_the_first_is_told(first, then):
    """A rank that was lost makes others wait for it, and one that waited too long ends: the first of them is told."""
    told = failures.classify(f"{read(first)}\n{read(then)}", 1)
    ends = [rule.name for rule in RULES if rule.name in {FAILURES[first], FAILURES[then]} and rule.kind == "end"]
    assert told.name == (ends[0] if KINDS[FAILURES[first]] == "end" else FAILURES[first])


@pytest.mark.parametrize(
    ("text", "name", "fault"),
    [
        (f"{STARTED}Exception: Capture cuda graph failed: {ECC}", "gpu_lost", "machine"),
        (f"{STARTED}Exception: Capture cuda graph failed: [Errno 28] No space left on device", "disk_full", "machine"),
        (f"{SERVING}{ECC}{NCCL_CUDA}", "gpu_lost", "machine"),
        (f"{SERVING}{NCCL_CUDA}{ECC}", "gpu_lost", "machine"),
        (f"{SERVING}{IMA}{ECC}", "gpu_lost", "machine"),
        (
            f"{STARTED}NCCL WARN Error: failed to extend /dev/shm/x, No space left on device\n{NCCL}",
            "disk_full",
            "machine",
        ),
        (f"{STARTED}NCCL WARN Call to socket failed : Too many open files\n{NCCL}", "host_limits", "machine"),
        (f"{SERVING}{IMA}{NCCL_TIMEOUT}", "cuda_ima", "configuration"),
        (
            f"{SERVING}{IMA}[2026-11-30 10:05:09 TP0] Watchdog timeout (self.watchdog_timeout=300)\n",
            "cuda_ima",
            "configuration",
        ),
        (f"{SERVING}RuntimeError: CUDA error: unspecified launch failure\n", "cuda_ima", "configuration"),
        (f"{SERVING}{UNKNOWN}{NCCL_TIMEOUT}", "unknown", "configuration"),
        (f"{SERVING}{UNKNOWN}Fatal Python error: Segmentation fault\n", "unknown", "configuration"),
        (f"{SERVING}{UNKNOWN}Subprocess scheduler_0 (pid=1) crashed with exit code -9.\n", "killed_by_os", "machine"),
        (f"{SERVING}Fatal Python error: Segmentation fault\n{NCCL_TIMEOUT}", "crashed", "configuration"),
        (f"{SERVING}{NCCL_TIMEOUT}Fatal Python error: Aborted\n", "nccl_timeout", "configuration"),
    ],
)
def test_mixtures(text, name, fault):
    """What happened first, or to the machine, is told, not what it led to; an exception of no class is told, too."""
    told = failures.classify(text, -9)
    assert (told.name, told.fault) == (name, fault)
    assert name != "unknown" or "KeyError: 'embed'" in told.detail


@pytest.mark.parametrize("exit_code", [None, -9, 137, 1])
def test_a_segfault_is_no_kill(exit_code):
    """The launcher kills itself after its scheduler crashed: the crash is told, by its signal and where it was."""
    told = failures.classify(read("fail_0520_cpu_segfault.log"), exit_code)
    assert (told.name, told.fault, told.phase) == ("crashed", "configuration", "serving")
    assert "SIGSEGV" in told.detail
    assert "zmq/sugar/poll.py" in told.line


@pytest.mark.parametrize(
    ("number", "signal"), [(4, "SIGILL"), (6, "SIGABRT"), (7, "SIGBUS"), (8, "SIGFPE"), (11, "SIGSEGV")]
)
@pytest.mark.parametrize(
    "said",
    [
        "[2026-11-30 10:00:10] Subprocess scheduler_0 (pid=12) crashed with exit code -{}. Triggering SIGQUIT",
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -{}). If exit code is -9 (SIGKILL), a …",
        "[2026-11-30 10:00:10] Rank 0 scheduler is dead. Please check …\n[2026-11-30 10:00:10] Exit code: -{}",
    ],
    ids=["0.5.20", "0.5.20 at its start", "0.4"],
)
def test_signals_of_crashes(number, signal, said):
    """Each version's words for a child that crashed, before those for the children that were killed for it."""
    killed = "[2026-11-30 10:00:11] Subprocess scheduler_1 (pid=13) crashed with exit code -9.\n"
    told = failures.classify(f"{STARTED}{said.format(number)}\n{killed}", -9)
    assert told.name == "crashed"
    assert f"crashed: {signal}" in told.detail


def test_what_a_library_threw_is_told():
    """C++ says why it gave up in the line after."""
    threw = "terminate called after throwing an instance of 'c10::Error'\n  what():  no kernel image\n"
    told = failures.classify(f"{STARTED}{threw}Fatal Python error: Aborted\n", -9)
    assert (told.name, told.line) == ("crashed", "what():  no kernel image")


def test_what_to_do_about_crashes_is_the_same_for_all():
    """The report tells the advice of a class once, whatever the signals of its launches were."""
    assert len({rule.advice for rule in RULES if rule.name == "crashed"}) == 1


@pytest.mark.parametrize("exit_code", [-11, 139, -6, 134])
def test_launcher_that_crashed_without_a_word(exit_code):
    """Its exit code is all there is, by itself or through a shell."""
    told = failures.classify(STARTED, exit_code)
    assert told.name == "crashed"
    assert "crashed: SIG" in told.detail


def test_last_words_are_not_the_launchers():
    """What 0.5.20 writes after any death says nothing: the line before is quoted."""
    after = "[t] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"
    told = failures.classify(f"{STARTED}libfoo: bad thing\n{after}[t] Sleeping 5 seconds before crash diagnostics\n", 1)
    assert told.detail.endswith("libfoo: bad thing")


@pytest.mark.parametrize(
    "error",
    [
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "The NVIDIA driver on your system is too old (found version 11040).",
        "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        "Failed to initialize NVML: Driver/library version mismatch",
        "No CUDA GPUs are available",
        "nvidia-smi not found. Ensure NVIDIA drivers are installed and accessible.",
        "CUDA driver initialization failed, you might not have a CUDA gpu.",
    ],
)
def test_a_machine_that_cannot_is_no_bad_argument(error):
    """SGLang looks at the GPUs while it reads its arguments; a machine without any is not the configuration's fault."""
    log = read("fail_0516_h200_bad_argument.log").partition("TypeError:")[0]
    told = failures.classify(f"{log}RuntimeError: {error}\n", 1)
    assert (told.name, told.fault) == ("gpu_lost", "machine")


def test_a_warning_of_a_driver_is_no_cause():
    """Torch warns that there is no driver where the CPU serves: what the server died of is another thing."""
    warning = "cuda.py:1: UserWarning: CUDA initialization: Found no NVIDIA driver on your system.\n"
    assert failures.classify(f"{warning}{STARTED}ImportError: x\n", 1).name == "unknown"


QUOTES = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
    "pip: error: unrecognized arguments: --foo",
    "why RepositoryNotFoundError?",
    "CUDA error: an illegal memory access",
    "Fatal Python error: Segmentation fault",
]


@pytest.mark.parametrize("quote", QUOTES)
@pytest.mark.parametrize(
    "line",
    [
        "Receive: obj=GenerateReqInput(rid='a', text='{}', stream=True)",
        "Receive: obj=GenerateReqInput(rid='a', text='{}', stream=True), headers={{'x-smg-routing-key': 'a'}}",
        "Receive OpenAI: obj={{'messages': ['{}']}}",
        "Finish: obj=GenerateReqInput(text='a'), out={{'text': '{}', 'meta_info': {{'id': 'a'}}}}",
        'Receive: obj=GenerateReqInput(text="first line\n{}\nlast", stream=True)',
        '{{"timestamp": "2026-11-30T10:00:09", "event": "request.finished", "out": {{"text": "{}"}}}}',
    ],
    ids=["0.5", "headers", "openai", "finish", "0.4.1 over lines", "json"],
)
def test_what_users_ask_is_not_searched(line, quote):
    """A server under --log-requests that is killed did not die of what its users asked about."""
    log = f"{SERVING}[2026-11-30 10:00:09] {line.format(quote)}\n"
    killed = "[2026-11-30 10:00:10] Subprocess scheduler_0 (pid=1) crashed with exit code -9.\n"
    assert failures.classify(log + killed, -9).name == "killed_by_os"
    assert failures.classify(log + IMA, -9).name == "cuda_ima"


def test_what_follows_a_torn_request_is_searched():
    """A request that was cut off, by a death or a full pipe, does not hide the next stamped line."""
    torn = "[2026-11-30 10:00:09] Receive: obj=GenerateReqInput(text='cut\n"
    assert failures.classify(f"{SERVING}{torn}{IMA}", -9).name == "cuda_ima"


@pytest.mark.parametrize("name", START_ONLY)
def test_what_only_a_start_can_have_is_looked_for_in_starts_only(name):
    """A server that is ready has its arguments, model and port: later such words are somebody else's."""
    fixture = next(log for log, told in FAILURES.items() if told == name)
    assert failures.classify(read(fixture), -9).name == name
    ready = f"[2026-11-30 10:00:08] {failures.READY}!\n"
    assert name not in {found.name for found in failures.matching(ready + read(fixture))}


def test_stage_is_of_the_rank_that_failed():
    """TP3 lags behind: where TP0 runs out of memory while it captures, it is not TP3's KV cache."""
    lags = "[2026-11-30 10:00:05 TP3] Memory pool end. avail mem=10 GB\n"
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    assert logs.stage(STARTED + lags) == "graph_capture"
    for rank, name in (("TP0", "oom_graph_capture"), ("TP3", "oom_kv")):
        hit = f"[2026-11-30 10:00:06 {rank}] Scheduler hit an exception: Traceback (most recent call last):\n"
        assert failures.classify(STARTED + lags + hit + error, -9).name == name
    ranks = (STARTED + lags).replace("TP3", "DP1 TP3").replace("TP0", "DP0 TP0")
    assert failures.classify(f"{ranks}[2026-11-30 10:00:06 DP1 TP3] {error}", -9).name == "oom_kv"


def test_network_of_the_machine_is_not_the_specs():
    """A node that cannot reach the hub is put aside; a model that is nowhere while nobody may ask is the spec's."""
    told = failures.classify(read("made_hub_unreachable.log"), 1)
    assert (told.name, told.fault) == ("hub_unreachable", "machine")
    offline = "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder\n"
    asked = "OSError: We couldn't connect to 'https://huggingface.co' to load the files\n"
    assert failures.classify(offline + asked, 1).name == "model_missing"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("OSError: /d does not appear to have a file named config.json", "configuration"),
        ("FileNotFoundError: No such file or directory: '/d/config.json'", "configuration"),
        ("OSError: Repo id must be in the form 'a/b': '/d2'.", "spec"),
        ("OSError: Repo id must be in the form 'a/b': '/d-old/d'.", "spec"),
        ("OSError: Repo id must be in the form 'a/b': '/models/d'.", "spec"),
        ("error: argument --attention-backend/--attn: invalid choice: 'fa9'", "configuration"),
        ("error: argument --attention-backend-x: invalid choice: 'fa9'", "spec"),
        ("error: argument --speculative-eagle-topk: invalid int value", "configuration"),
    ],
)
def test_what_only_this_configuration_says_is_matched_whole(line, fault):
    """A draft's path or a flag that is the beginning of another is not that other."""
    eagle = Speculative(draft="/d", num_steps=3, eagle_topk=1, num_draft_tokens=4)
    tried = Config(model="/m", args={}, speculative=eagle, tuned_args={"attention-backend": "fa9"})
    failure = failures.Failure("x", "arguments", "", "spec", line=line)
    assert whose(failure, tried) == fault


def test_every_class_is_in_the_documentation_under_its_fault():
    """The table of docs/reliability.md has each class, and whose it is."""
    page = Path(__file__).parents[1] / "docs" / "reliability.md"
    rows = {fault: next(line for line in page.read_text().split("\n") if line.startswith(f"| the {fault}'s |"))
            for fault in get_args(Fault)}  # fmt: skip
    told = {fault: set(re.findall(r"`(\w+)`", row.split("|")[2])) for fault, row in rows.items()}
    ours = {fault: {rule.name for rule in RULES if rule.fault == fault} for fault in told}
    ours["configuration"] |= {"stalled", "start_timeout", "unknown"}
    assert told == ours
