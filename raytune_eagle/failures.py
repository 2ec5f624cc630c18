"""What a server died of, told from its log and laid to the configuration, the machine or the spec.

Exit codes say little: a failed scheduler and an orderly end both give -9. What a fault leads to: a configuration's is a
failed trial that the search learns from; a machine's is a `NodeError`, and the trial is asked again elsewhere; the
spec's ends the study with the reason, since nothing in it can run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from raytune_eagle.logs import Stage, clean, lines, stage

Fault = Literal["configuration", "machine", "spec"]


@dataclass(frozen=True)
class Failure:
    """What a server died of.

    Attributes:
        name: the class, for example ``tree_too_small``.
        phase: how far it had come.
        detail: one line for people: what it said and, where known, what to do.
        fault: whose: of this configuration, of the machine, or of the whole spec.
        transient: worth one more try as it is.
        line: the words of the log that decided.
    """

    name: str
    phase: Stage
    detail: str
    fault: Fault = "configuration"
    transient: bool = False
    line: str = ""


@dataclass(frozen=True)
class Rule:
    """A class of failures: its pattern, in which stages it is meant, and what to tell."""

    name: str
    pattern: str
    advice: str
    fault: Fault = "configuration"
    transient: bool = False
    stages: tuple[Stage, ...] = ()

    def match(self, text: str, reached: Stage) -> str | None:
        """The line that this class is told from, if the text is of this class."""
        if self.stages and reached not in self.stages:
            return None
        if not (found := list(re.finditer(self.pattern, text, re.MULTILINE))):
            return None
        start, end = text.rfind("\n", 0, found[-1].start()) + 1, text.find("\n", found[-1].end())
        return text[start : end if end >= 0 else None].strip().splitlines()[-1]


OOM = r"OutOfMemoryError|(?:CUDA|HIP) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
NOT_CAPTURE = r"selected index k out of range|.*(?:out of memory|illegal memory|misaligned|device-side|NCCL error)"
CONFIG_ERROR = r"(?:TypeError|ValueError|AssertionError|NotImplementedError|KeyError|RuntimeError)"
IN_ARGUMENTS = r"in (?:prepare_server_args|from_cli_args|resolve_once|check_server_args|run_server)\n"

RULES = (
    Rule(
        "tree_too_small",
        r"selected index k out of range",
        "more draft tokens than the tree has: keep num_draft_tokens - 1 <= topk + (num_steps - 1) * topk**2 "
        "(the log's advice to lower mem-fraction-static does not help)",
    ),
    Rule(
        "tree_too_shallow",
        r"in _compact_accept_to_front\n(?:.*\n){1,3}RuntimeError: The expanded size of the tensor",
        "with topk above 1 num_draft_tokens must be num_steps + 1 or more",
    ),
    Rule(
        "oom_weights", OOM, "the weights do not fit: more GPUs (tp-size) or a smaller quantization", stages=("weights",)
    ),
    Rule(
        "oom_kv",
        r"leave no GPU memory for the KV cache|Not enough memory\. Please try|No available memory for the cache",
        "no room for the KV cache: raise mem-fraction-static, or use more GPUs",
    ),
    Rule(
        "oom_kv", OOM, "no room for the KV cache: lower mem-fraction-static or max-total-tokens", stages=("kv_cache",)
    ),
    Rule(
        "oom_graph_capture",
        OOM,
        "no room for the CUDA graphs: lower mem-fraction-static or cuda-graph-max-bs(-decode)",
        stages=("graph_capture",),
    ),
    Rule("oom_serving", OOM, "out of GPU memory at work: lower mem-fraction-static", stages=("serving",)),
    Rule(
        "graph_capture_failed",
        rf"Capture (?:cuda|CUDA) graph failed: (?!{NOT_CAPTURE}).*",
        "CUDA graph capture failed: lower cuda-graph-max-bs(-decode), or see if it serves with disable-cuda-graph",
        transient=True,
    ),
    Rule(
        "nccl_invalid_usage",
        r"NCCL error.*invalid usage|ncclInvalidUsage|no algorithm/protocol available",
        "NCCL has no algorithm for a collective under these NCCL_ALGO/NCCL_PROTO: "
        "limit them to one function (ring,tree;allreduce:tree) or leave them unset",
    ),
    Rule(
        "nccl_error",
        r"NCCL error.*(?:unhandled|internal error)|nccl(?:SystemError|UnhandledCudaError|InternalError)\b",
        "NCCL could not set up its connections: engine.env NCCL_DEBUG=WARN says where; a wrong NCCL_SOCKET_IFNAME, a "
        "full /dev/shm, or an NCCL setting that needs more memory than there is",
    ),
    Rule(
        "nccl_timeout",
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|send)|ncclRemoteError",
        "a collective never ended: an NCCL setting that hangs here (leave it unset), or a rank that died",
    ),
    Rule(
        "scheduler_stuck",
        r"Watchdog timeout \(|[Ww]atchdog timeout",
        "a forward pass took longer than SGLang's watchdog allows: raise watchdog-timeout if it may",
    ),
    Rule(
        "port_taken",
        r"\[Errno 98\]|[Aa]ddress already in use|EADDRINUSE|Port is already in use|[Pp]ort \d+ is not available",
        "a port was taken between our choice and the server's use (tried again on another)",
        transient=True,
    ),
    Rule(
        "bad_argument",
        r"error: (?:unrecognized arguments|argument |ambiguous option|the following arguments|expected ).*",
        "the server does not take this argument: correct it in engine.args, space.args or start_from",
        "spec",
    ),
    Rule(
        "bad_argument",
        rf"{IN_ARGUMENTS}(?:.*\n)*?{CONFIG_ERROR}\b(?!: No accelerator).*",
        "the server refuses this combination of arguments: leave out what it names",
        stages=("arguments",),
    ),
    Rule(
        "model_missing",
        r"Repo id must be in the form|not a local folder and is not a valid model identifier|RepositoryNotFoundError"
        r"|GatedRepoError|LocalEntryNotFoundError|OfflineModeIsEnabled|[Cc]annot find any model weights"
        r"|does not appear to have a file named (?:config\.json|model|pytorch_model)"
        r"|No such file or directory: '.*config\.json'"
        r"|couldn't connect to 'https://huggingface|no such built-in model",
        "the model or draft is not where the spec says: correct engine.model or engine.draft, or copy it there",
        "spec",
    ),
    Rule(
        "model_unsupported",
        r"Model architectures? .*(?:is|are) not supported",
        "this SGLang does not know the architecture in config.json: correct it there, or use a later SGLang",
        "spec",
    ),
    Rule(
        "sglang_missing",
        r"No module named '?sglang'?\b(?!\.)|needs sglang \d|works with sglang \d",
        "engine.python names an interpreter without a usable SGLang: name one that has it",
        "spec",
    ),
    Rule(
        "shape_mismatch",
        r"shapes cannot be multiplied|size mismatch for|The size of tensor a \(\d+\) must match"
        r"|exceeds dimension size|Attempted to load weight \(.*into parameter"
        r"|param.*\.(?:size\(\)|shape) == loaded_weight|loaded_weight\.shape\[output_dim\]=\d",
        "the draft (or a weight file) was not made for this model: name a draft that was trained for it",
    ),
    Rule(
        "cuda_ima",
        r"illegal memory access|CUDA error: misaligned address|device-side assert",
        "a kernel left its memory: seen with 64 and more draft tokens, and with batches above the captured ones: keep "
        "num_draft_tokens below 64, and set cuda-graph-max-bs(-decode) to the highest concurrency",
    ),
    Rule(
        "gpu_lost",
        r"[Uu]ncorrectable (?:ECC|NVLink)|fallen off the bus|no CUDA-capable device|CUDA_ERROR_SYSTEM_NOT_READY"
        r"|system not yet initialized|Found no NVIDIA driver|library version mismatch|unspecified launch failure"
        r"|NVIDIA driver on your system is too old"
        r"|No accelerator \(CUDA",
        "a GPU or its driver failed: see dmesg and nvidia-smi -q on that node",
        "machine",
    ),
    Rule("disk_full", r"No space left on device", "a disk is full: see df -h on that node", "machine"),
    Rule(
        "weights_torn",
        r"SafetensorError|Error while deserializing header|not fully covered",
        "a weight file is cut off or damaged on that node: copy the model or draft there again",
        "machine",
    ),
    Rule(
        "host_limits",
        r"Too many open files|can't start new thread|Resource temporarily unavailable",
        "a limit of the machine was reached: raise ulimit -n and -u for Ray on that node",
        "machine",
    ),
    Rule(
        "oom_host",
        r"DefaultCPUAllocator: can't allocate memory|\[Errno 12\]|Cannot allocate memory|ArrayMemoryError",
        "the machine's own memory did not suffice: lower what the server keeps there, or use more nodes",
    ),
    Rule(  # last: a rank that had something to say has said it above
        "rank_lost",
        r"gloo/transport/tcp/pair\.cc:\d+\] (?:Connection closed by peer|(?:Read|Write) error)",
        "a rank of the server ended without a word: killed from outside, or crashed: see dmesg on that node",
        "machine",
    ),
)

_MOST = 2_000_000
"""Characters of either end of a log that a failure is looked for in."""
_LONG_LINE = re.compile(r"^(.{20000}).+$", re.MULTILINE)
READY = "The server is fired up and ready to roll"
"""What went wrong before this (a warm-up's ``/freeze_gc`` that nobody heard, 0.5.20) did not keep it from serving."""
UNBOUND = "error while attempting to bind on address"
KILLED = re.compile(r"(?:crashed with exit code|exit code:) -9\b")
EXCEPTION = re.compile(r"^(?:\[[^]]*\] )?(\w[\w.]*(?:Error|Exception)\b.*)", re.MULTILINE)


def _readable(text: str) -> str:
    """The log with its lines alone on them, and so long that reading it takes a second: start and end say all."""
    if len(text) > 2 * _MOST:
        text = f"{text[:_MOST]}\n{text[-_MOST:]}"
    return _LONG_LINE.sub(r"\1", clean(text))


def matching(text: str) -> list[Failure]:
    """Every class that the text is of; the first is the answer, and more than one means that patterns overlap."""
    text = _readable(text)
    reached = stage(text)
    found = []
    for rule in RULES:
        if line := rule.match(text, reached):
            detail = f"{rule.advice}: {line[:300]}"
            found.append(Failure(rule.name, reached, detail, rule.fault, rule.transient, line))
    return found


def classify(text: str, exit_code: int | None) -> Failure:
    """Tell from its log what a server died of.

    A process that was killed is the machine's fault; where the kernel did it for want of memory, `killed_for_memory`
    says so in its place.
    """
    text = _readable(text)
    if found := matching(text):
        return found[0]
    reached = stage(text)
    said = EXCEPTION.findall(text[text.rfind(READY) :] if READY in text else text)
    if KILLED.search(text) or (exit_code in {-9, 137} and not said):
        advice = "a process of the server was killed from outside, and not for want of memory: see who did (dmesg)"
        return Failure("killed_by_os", reached, advice, "machine")
    last = said[-1] if said else next(iter(reversed([line for line in lines(text) if line.strip()])), "an empty log")
    how = "" if exit_code is None else f" with {exit_code}"
    detail = f"the server ended{how} during {reached}: {last[:300]}"
    return Failure("unknown", reached, detail, line=last)


def killed_for_memory(killed: Failure) -> Failure:
    """What `killed_by_os` is where the kernel ended processes for want of memory meanwhile: the configuration's."""
    advice = (
        "the kernel killed a process of the server for want of memory: lower what it keeps there, or use more nodes"
    )
    return Failure("oom_host", killed.phase, f"{advice} (oom_kill in /proc/vmstat rose)")


def hangs(text: str) -> bool:
    """Whether the server said that it gave up although its processes live on, busy: a bind that failed (0.5.16)."""
    return UNBOUND in text
