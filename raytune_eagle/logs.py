"""SGLang's log: how far a start is, what a decode line says, and what a failure was.

Written after the formats of 0.4.1 to 0.5.23. Failures are told from the text: a failed scheduler and an orderly end
both give -9.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Fault = Literal["configuration", "machine", "spec"]
Stage = Literal["arguments", "distributed", "weights", "kv_cache", "graph_capture", "serving"]

STAGES: tuple[tuple[re.Pattern[str], Stage], ...] = (
    (re.compile(r"Init torch distributed begin"), "distributed"),
    (re.compile(r"Load weight begin"), "weights"),
    (re.compile(r"Load weight end|KV Cache is allocated|Memory pool end"), "kv_cache"),
    (re.compile(r"Capture .*(?:cuda|CUDA) graph begin"), "graph_capture"),
    (re.compile(r"Uvicorn running on|The server is fired up"), "serving"),
)

EVENTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"shards:.*\| (\d+/\d+)"), "weights"),
    (re.compile(r"Load weight end\..* type=(\w+)"), "weights"),
    (re.compile(r"KV Cache is allocated\..*#tokens: (\d+)"), "kv_cache"),
    (re.compile(r"Capturing batches.*\| (\d+/\d+)"), "graph_capture"),
    (re.compile(r"Capture (.*?) ?(?:cuda|CUDA) graph begin"), "graph_capture"),
    (re.compile(r"Capture (.*?(?:cuda|CUDA) graph end\. elapsed=[\d.]+ s)"), "graph_capture"),
)

BAR = re.compile(r"(?=Capturing batches|Multi-thread loading|Loading safetensors)")
OTHER_RANK = re.compile(r"^\[[^]]*\b(?:TP|DP|PP|EP)[1-9]\d*\b[^]]*\]")  # all but the first, who say the same


def lines(text: str) -> Iterator[str]:
    """Lines of a log; progress bars, which return the carriage or write on, give one per step."""
    for line in re.split(r"[\r\n]+", text):
        yield from filter(None, BAR.split(line))


def progress(line: str) -> tuple[str, str] | None:
    """Event name and detail (``weights 3/64``, ``graph_capture target verify``) of a line, if it is one of progress."""
    if OTHER_RANK.match(line):
        return None
    for pattern, name in EVENTS:
        if match := pattern.search(line):
            return name, match.group(1).strip()
    return None


def stage(text: str) -> Stage:
    """How far the server came."""
    reached: Stage = "arguments"
    for line in lines(text):
        reached = next((name for pattern, name in STAGES if pattern.search(line)), reached)
    return reached


@dataclass(frozen=True)
class DecodeLine:
    """One ``Decode batch`` line: means since the line before it. The first after idle times is off (0.39 tok/s).

    Attributes:
        accept_rate: as printed: accepted tokens with bonus / draft tokens up to 0.5.10, without bonus from 0.5.12.
        cuda_graph: None where the version does not say.
    """

    running: int
    throughput: float
    tokens: int | None = None
    token_usage: float | None = None
    accept_len: float | None = None
    accept_rate: float | None = None
    queued: int | None = None
    cuda_graph: bool | None = None


FIELD = re.compile(r"(?:^|, |\. |\] )([#\w][\w #()/-]*): ([^,\s]+)")
THROUGHPUT = "gen throughput (token/s)"


def decode_line(line: str) -> DecodeLine | None:
    """Read a decode line of any version; None for anything else and for torn ones."""
    _, found, rest = line.partition("Decode batch")
    fields = dict(FIELD.findall(rest)) if found else {}

    def number(*names: str) -> float | None:
        return next((float(fields[name]) for name in names if name in fields), None)

    try:
        tokens, queued = number("#token", "#full token"), number("#queue-req")
        graph = fields.get("cuda graph", fields.get("cpu graph"))
        return DecodeLine(
            running=int(fields["#running-req"]),
            throughput=float(fields[THROUGHPUT]),
            tokens=None if tokens is None else int(tokens),
            token_usage=number("token usage", "full token usage"),
            accept_len=number("accept len"),
            accept_rate=number("accept rate"),
            queued=None if queued is None else int(queued),
            cuda_graph=None if graph is None else graph == "True",
        )
    except (KeyError, ValueError):
        return None


def decode_lines(text: str) -> Iterator[DecodeLine]:
    """Every whole decode line of a log."""
    for line in lines(text):
        if found := decode_line(line):
            yield found


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
        "CUDA graph capture failed",
        transient=True,
    ),
    Rule(
        "nccl_invalid_usage",
        r"NCCL error.*invalid usage|ncclInvalidUsage|no algorithm/protocol available",
        "NCCL has no algorithm for a collective under these NCCL_ALGO/NCCL_PROTO: "
        "limit them to one function (ring,tree;allreduce:tree) or leave them unset",
    ),
    Rule(
        "nccl_timeout",
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|send)|ncclRemoteError",
        "a collective never ended: an NCCL setting that hangs here, or a rank that died",
    ),
    Rule(
        "scheduler_stuck",
        r"Watchdog timeout \(|[Ww]atchdog timeout",
        "a forward pass took longer than SGLang's watchdog allows",
    ),
    Rule(
        "port_taken",
        r"\[Errno 98\]|[Aa]ddress already in use|EADDRINUSE|Port is already in use|[Pp]ort \d+ is not available",
        "a port was taken between our choice and the server's use",
        transient=True,
    ),
    Rule(
        "bad_argument",
        r"error: (?:unrecognized arguments|argument |ambiguous option|the following arguments|expected ).*",
        "the server does not take this argument",
        "spec",
    ),
    Rule(
        "bad_argument",
        rf"{IN_ARGUMENTS}(?:.*\n)*?{CONFIG_ERROR}\b(?!: No accelerator).*",
        "the server refuses this combination of arguments",
        stages=("arguments",),
    ),
    Rule(
        "model_missing",
        r"Repo id must be in the form|not a local folder and is not a valid model identifier|RepositoryNotFoundError"
        r"|GatedRepoError|LocalEntryNotFoundError|OfflineModeIsEnabled|[Cc]annot find any model weights"
        r"|does not appear to have a file named (?:config\.json|model|pytorch_model)"
        r"|No such file or directory: '.*config\.json'"
        r"|couldn't connect to 'https://huggingface|no such built-in model",
        "the model or draft is not where the spec says",
        "spec",
    ),
    Rule(
        "sglang_missing",
        r"No module named '?sglang'?\b(?!\.)|needs sglang \d|works with sglang \d",
        "engine.python names an interpreter without a usable SGLang",
        "spec",
    ),
    Rule(
        "shape_mismatch",
        r"shapes cannot be multiplied|size mismatch for|The size of tensor a \(\d+\) must match"
        r"|exceeds dimension size|Attempted to load weight \(.*into parameter"
        r"|param.*\.(?:size\(\)|shape) == loaded_weight",
        "the draft (or a weight file) was not made for this model",
    ),
    Rule(
        "cuda_ima",
        r"illegal memory access|CUDA error: misaligned address|device-side assert",
        "a kernel left its memory: seen with 64 and more draft tokens, and with batches above the captured ones",
    ),
    Rule(
        "gpu_lost",
        r"[Uu]ncorrectable (?:ECC|NVLink)|fallen off the bus|no CUDA-capable device|CUDA_ERROR_SYSTEM_NOT_READY"
        r"|system not yet initialized|Found no NVIDIA driver|library version mismatch|unspecified launch failure"
        r"|No accelerator \(CUDA",
        "a GPU or its driver failed",
        "machine",
    ),
    Rule("disk_full", r"No space left on device", "a disk is full", "machine"),
)

UNBOUND = "error while attempting to bind on address"
KILLED = re.compile(r"(?:crashed with exit code|exit code:) -9\b")
EXCEPTION = re.compile(r"^(?:\[[^]]*\] )?(\w[\w.]*(?:Error|Exception)\b.*)", re.MULTILINE)
SECRET_WORDS = re.compile(r"((?:admin_)?api_key'?[=:]\s*)'[^']*'")


def matching(text: str) -> list[Failure]:
    """Every class that the text is of; the first is the answer, and more than one means that patterns overlap."""
    reached = stage(text)
    found = []
    for rule in RULES:
        if line := rule.match(text, reached):
            detail = f"{rule.advice}: {line[:300]}"
            found.append(Failure(rule.name, reached, detail, rule.fault, rule.transient, line))
    return found


def classify(text: str, exit_code: int | None) -> Failure:
    """Tell from its log what a server died of."""
    if found := matching(text):
        return found[0]
    reached = stage(text)
    said = EXCEPTION.findall(text)
    if KILLED.search(text) or (exit_code in {-9, 137} and not said):
        advice = (
            "a process of the server was killed from outside, most often by the kernel for want of memory: see dmesg"
        )
        return Failure("killed_by_os", reached, advice)
    last = said[-1] if said else next(iter(reversed([line for line in lines(text) if line.strip()])), "an empty log")
    how = "" if exit_code is None else f" with {exit_code}"
    return Failure("unknown", reached, f"the server ended{how} during {reached}: {last[:300]}", line=last)


def hangs(text: str) -> bool:
    """Whether the server said that it gave up although its processes live on, busy: a bind that failed (0.5.16)."""
    return UNBOUND in text


def tail(text: str, count: int = 40) -> str:
    """The last lines, for people."""
    return "\n".join(text.splitlines()[-count:])


def redact(text: str, secret: str) -> str:
    """Take out a secret, and whatever SGLang prints as its API keys."""
    return SECRET_WORDS.sub(r"\1'***'", text.replace(secret, "***") if secret else text)
