"""What a server can die of: the classes, the words of its log that tell each, what to do, and whose fault it is.

How one is chosen where a log has the words of several is in `raytune_eagle.failures`.
"""

from __future__ import annotations

from dataclasses import dataclass
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, Signals
from typing import Literal, get_args

from raytune_eagle.logs import Stage

Fault = Literal["configuration", "machine", "spec"]
Kind = Literal["cause", "symptom", "end"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Rule:
    """A class of failures: its pattern, where it is meant, and what to tell.

    Attributes:
        said: what to tell before the advice, where it is not the same for all of a class.
        stages: how far the rank that said it had come; any where empty.
        start: only said by a server that was not ready yet; later the words are of something else.
        kind: a cause; a symptom, which a cause on another rank has, too; or the end of a process, seen from itself, its
            parent or another rank, which may have either before it.
    """

    name: str
    pattern: str
    advice: str
    fault: Fault = "configuration"
    transient: bool = False
    stages: tuple[Stage, ...] = ()
    start: bool = False
    kind: Kind = "cause"
    said: str = ""


OOM = r"OutOfMemoryError|(?:CUDA|HIP) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
IMA = r"illegal memory access|CUDA error: misaligned address|device-side assert|unspecified launch failure"
"""The last is what CUDA (cudaErrorLaunchFailure) calls a kernel's invalid pointer, shared memory's included."""
GPU_BROKEN = r"[Uu]ncorrectable (?:ECC|NVLink)|fallen off the bus|GPU is lost"
NO_GPU = (
    r"[Nn]o CUDA-capable device|No CUDA GPUs are available|No accelerator \(CUDA|is/are busy or unavailable"
    r"|CUDA_ERROR_SYSTEM_NOT_READY|system not yet initialized|unsupported display driver"
    r"|Found no NVIDIA driver|NVIDIA driver on your system is too old|CUDA driver version is insufficient"
    r"|CUDA driver initialization failed|library version mismatch|nvidia-smi not found"
)
"""Of torch, of CUDA's and NVML's error strings, and of SGLang's ``get_nvgpu_memory_capacity``."""
GPU_ADVICE = "a GPU or its driver failed: see dmesg and nvidia-smi -q on that node"
DISK_FULL = r"No space left on device"
HOST_LIMITS = r"Too many open files|can't start new thread|Resource temporarily unavailable"
TREE = r"selected index k out of range"
MACHINE = rf"{GPU_BROKEN}|{NO_GPU}|{DISK_FULL}|{HOST_LIMITS}"
CONFIG_ERROR = r"(?:TypeError|ValueError|AssertionError|NotImplementedError|KeyError|RuntimeError)"
IN_ARGUMENTS = r"in (?:prepare_server_args|from_cli_args|resolve_once|check_server_args|run_server)\n"

CRASHES: dict[Signals, str] = {
    SIGSEGV: r"Fatal Python error: Segmentation fault",
    SIGABRT: r"Fatal Python error: Aborted|^terminate called (?:after|without|recursively).*(?:\n  what\(\):.*)?",
    SIGBUS: r"Fatal Python error: Bus error",
    SIGILL: r"Fatal Python error: Illegal instruction",
    SIGFPE: r"Fatal Python error: Floating[ -]point exception",
}
"""Signals that a process gets for what it did itself, and what it says then: CPython's faulthandler, and C++."""


def crashed(signal: Signals) -> Rule:
    """The class of a process that ended by this signal; with it the innermost line of Python, where it is told."""
    frame = r"(?:\n(?!\[\d{4}-|Fatal)(?:.*\n(?!\[\d{4}-|Fatal))*?Current thread .*\n.*)?"
    return Rule(
        "crashed",
        rf"(?:{CRASHES[signal]}){frame}|[Ee]xit code:? {-signal}\b",
        "native code failed (a kernel, NCCL, a driver): leave out what sets this configuration apart from those that "
        "run; if others crash there, too, see dmesg on that node",
        said=f"a process of the server crashed: {signal.name}: ",
        kind="end",
    )


RULES = (
    Rule("gpu_lost", GPU_BROKEN, GPU_ADVICE, "machine"),
    Rule(
        "tree_too_small",
        TREE,
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
        start=True,
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
        "bad_argument",
        r"error: (?:unrecognized arguments|argument |ambiguous option|the following arguments|expected ).*",
        "the server does not take this argument: correct it in engine.args, space.args or start_from",
        "spec",
        start=True,
    ),
    Rule(
        "bad_argument",
        rf"{IN_ARGUMENTS}(?:.*\n)*?{CONFIG_ERROR}\b(?!.*(?:{MACHINE})).*",
        "the server refuses this combination of arguments: leave out what it names",
        stages=("arguments",),
        start=True,
    ),
    Rule(
        "model_missing",
        r"Repo id must be in the form|not a local folder and is not a valid model identifier|RepositoryNotFoundError"
        r"|GatedRepoError|LocalEntryNotFoundError(?!: An error happened)|OfflineModeIsEnabled"
        r"|[Cc]annot find any model weights"
        r"|does not appear to have a file named (?:config\.json|model|pytorch_model)"
        r"|No such file or directory: '.*config\.json'|no such built-in model",
        "the model or draft is not where the spec says: correct engine.model or engine.draft, or copy it there",
        "spec",
        start=True,
    ),
    Rule(
        "hub_unreachable",  # after model_missing: transformers says the same where HF_HUB_OFFLINE forbids to ask
        r"couldn't connect to 'https?://|An error happened while trying to locate the files? on the Hub",
        "that node cannot reach the hub, and has no copy: copy model and draft there, or see to its network",
        "machine",
        start=True,
    ),
    Rule(
        "model_unsupported",
        r"Model architectures? .*(?:is|are) not supported",
        "this SGLang does not know the architecture in config.json: correct it there, or use a later SGLang",
        "spec",
        start=True,
    ),
    Rule(
        "sglang_missing",
        r"No module named '?sglang'?\b(?!\.)|needs sglang \d|works with sglang \d",
        "engine.python names an interpreter without a usable SGLang: name one that has it",
        "spec",
        start=True,
    ),
    Rule(
        "shape_mismatch",  # also at work: where no graph is captured the first request is the first forward pass
        r"shapes cannot be multiplied|size mismatch for|The size of tensor a \(\d+\) must match"
        r"|exceeds dimension size|Attempted to load weight \(.*into parameter"
        r"|param.*\.(?:size\(\)|shape) == loaded_weight|loaded_weight\.shape\[output_dim\]=\d",
        "the draft (or a weight file) was not made for this model: name a draft that was trained for it",
    ),
    Rule(
        "cuda_ima",
        IMA,
        "a kernel left its memory: seen with 64 and more draft tokens, and with batches above the captured ones: keep "
        "num_draft_tokens below 64, and set cuda-graph-max-bs(-decode) to the highest concurrency",
    ),
    Rule(
        "gpu_lost",
        rf"^(?!.*Warning: ).*(?:{NO_GPU})",
        GPU_ADVICE,
        "machine",
    ),
    Rule("disk_full", DISK_FULL, "a disk is full: see df -h on that node (/dev/shm, too)", "machine"),
    Rule(
        "weights_torn",
        r"SafetensorError|Error while deserializing header|not fully covered",
        "a weight file is cut off or damaged on that node: copy the model or draft there again",
        "machine",
        start=True,
    ),
    Rule(
        "host_limits",
        HOST_LIMITS,
        "a limit of the machine was reached: raise ulimit -n and -u for Ray on that node",
        "machine",
    ),
    Rule(
        "oom_host",
        r"DefaultCPUAllocator: can't allocate memory|\[Errno 12\]|Cannot allocate memory|ArrayMemoryError",
        "the machine's own memory did not suffice: lower what the server keeps there, or use more nodes",
    ),
    Rule(
        "nccl_invalid_usage",
        r"NCCL error.*invalid usage|ncclInvalidUsage|no algorithm/protocol available",
        "NCCL has no algorithm for a collective under these NCCL_ALGO/NCCL_PROTO: "
        "limit them to one function (ring,tree;allreduce:tree) or leave them unset",
    ),
    Rule(
        "graph_capture_failed",
        rf"Capture (?:cuda|CUDA) graph failed: (?!.*(?:{TREE}|{OOM}|out of memory|{IMA}|{MACHINE}|NCCL error)).*",
        "CUDA graph capture failed: lower cuda-graph-max-bs(-decode), or see if it serves with disable-cuda-graph",
        transient=True,
        start=True,
    ),
    Rule(
        "port_taken",
        r"\[Errno 98\]|[Aa]ddress already in use|EADDRINUSE|Port is already in use|[Pp]ort \d+ is not available",
        "a port was taken between our choice and the server's use (tried again on another)",
        transient=True,
        start=True,
        kind="symptom",
    ),
    Rule(
        "nccl_error",
        r"NCCL error.*(?:unhandled|internal error)|nccl(?:SystemError|UnhandledCudaError|InternalError)\b",
        "NCCL could not set up its connections: engine.env NCCL_DEBUG=WARN says where; a wrong NCCL_SOCKET_IFNAME, a "
        "full /dev/shm, or an NCCL setting that needs more memory than there is",
        kind="symptom",
    ),
    Rule(
        "nccl_timeout",
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|send)|ncclRemoteError",
        "a collective never ended: an NCCL setting that hangs here (leave it unset), or a rank that died",
        kind="symptom",
    ),
    Rule(
        "scheduler_stuck",
        r"Watchdog timeout \(|[Ww]atchdog timeout",
        "a forward pass took longer than SGLang's watchdog allows: raise watchdog-timeout if it may",
        kind="symptom",
    ),
    *map(crashed, CRASHES),
    Rule(
        "killed_by_os",
        r"(?:crashed with exit code|exit code:) -9\b",
        "a process of the server was killed from outside, and not for want of memory: see who did (dmesg)",
        "machine",
        kind="end",
    ),
    Rule(
        "rank_lost",
        r"gloo/transport/tcp/pair\.cc:\d+\] (?:Connection closed by peer|(?:Read|Write) error)",
        "a rank of the server ended without a word: killed from outside, or crashed: see dmesg on that node",
        "machine",
        kind="end",
    ),
)
"""The first cause here that a log has is the answer; else the symptom or end that it has first, and of the ends the
first here."""
