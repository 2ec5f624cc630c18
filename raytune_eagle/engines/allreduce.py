"""Times all-reduces under one environment after the other: a program for the interpreter that serves.

``python allreduce.py QUESTION.json`` prints one JSON line per environment. Nothing of this package is imported, so
that any interpreter with torch runs it. Each environment gets new processes, one per rank, since NCCL reads its
environment once per process; they are forked from this one, which has imported torch and has not touched a GPU. Those
that have not ended by the deadline are killed.

QUESTION.json: ``ranks``, ``gpu`` (NCCL in CUDA graphs, as SGLang decodes; else gloo), ``bytes`` (sizes, ascending),
``environments`` (a list of objects), ``limit_s`` (seconds for each).
A line: ``index``, ``seconds``, ``times`` (per size its samples in µs), ``chosen`` (per size what NCCL says it takes),
``code`` (0, else what the first failing rank ended with; null: killed at the deadline) and ``said`` (its last words).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

Job = dict[str, Any]
cuda: Any = torch.cuda  # annotated in part only, like the next
dist: Any = torch.distributed
IN_A_GRAPH = 20
"""All-reduces in one CUDA graph; a sample is the time of one replay divided by this."""
SAMPLES, WARM_UP = 40, 4
_LOOK_S = 0.02
_LAST_S = 1.0
"""How long the other ranks may go on once one has failed."""
_SAID = 4000
# NCCL 2.27-2.31, at NCCL_DEBUG_SUBSYS=TUNING: "AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}"
_CHOICE = re.compile(r"AllReduce: (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")
_TALK = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING,ENV"}


def main(argv: list[str]) -> None:
    """Answer the question in the file."""
    file = Path(argv[0])
    question: Job = json.loads(file.read_text(encoding="utf-8"))
    for index, environment in enumerate(question["environments"]):
        folder = Path(tempfile.mkdtemp(dir=file.parent))  # goes with that folder when this program is killed
        try:
            answer = ask(question, environment, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps({"index": index, **answer}), flush=True)  # noqa: T201 - the output is the answer


def ask(question: Job, environment: dict[str, str], folder: Path) -> Job:
    """Time every size under one environment."""
    began = time.monotonic()
    pids = [_fork(question, environment, folder, rank) for rank in range(question["ranks"])]
    code, guilty = _await(pids, began + question["limit_s"])
    answer: Job = {"seconds": time.monotonic() - began, "code": code, "times": {}, "chosen": {}, "said": ""}
    if code == 0:
        answer["times"] = json.loads((folder / "times").read_text(encoding="utf-8"))
        answer["chosen"] = _chosen(folder / "nccl")
    else:
        warnings = [line for line in _read(folder / "nccl").splitlines() if " NCCL INFO " not in line]
        answer["said"] = "\n".join([*warnings, _read(folder / f"{guilty}.err")])[-_SAID:]
    return answer


def _fork(question: Job, environment: dict[str, str], folder: Path, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with (folder / f"{rank}.err").open("w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        talk = {**_TALK, "NCCL_DEBUG_FILE": str(folder / "nccl")} if rank == 0 else {}
        os.environ.update(talk | environment)
        _rank(question, folder, rank)
        code = 0
    except BaseException:  # noqa: BLE001 - told to whoever asked
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _await(pids: list[int], deadline: float) -> tuple[int | None, int]:
    """The first exit code that is not 0, and its rank; kills whoever is late."""
    left, code, guilty = dict(enumerate(pids)), 0, 0
    while left and time.monotonic() < deadline:
        for rank, pid in list(left.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del left[rank]
            if status and not code:
                code, guilty = os.waitstatus_to_exitcode(status), rank
                deadline = min(deadline, time.monotonic() + _LAST_S)
        time.sleep(_LOOK_S)
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
    for pid in left.values():
        os.waitpid(pid, 0)
    return (None, guilty) if left and not code else (code, guilty)


def _rank(question: Job, folder: Path, rank: int) -> None:
    gpu = question["gpu"]
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), question["ranks"])
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=question["ranks"])
    times = {size: _time(size, device) for size in question["bytes"]}
    if rank == 0:
        written = folder / "times.new"
        written.write_text(json.dumps(times), encoding="utf-8")
        written.rename(folder / "times")
    _leave_together(store, question["ranks"])


def _leave_together(store: Any, ranks: int) -> None:
    """A rank's memory goes with it, and the kernel of another may still look there."""
    if cuda.is_initialized():
        cuda.synchronize()
    store.add("done", 1)
    while store.add("done", 0) < ranks:
        time.sleep(_LOOK_S)


def _time(size: int, device: torch.device) -> list[float]:
    """Microseconds of one all-reduce of bfloat16 values, `SAMPLES` times; raises when the sum is wrong."""
    tensor = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
    dist.all_reduce(tensor)
    if not bool(torch.all(tensor == dist.get_world_size())):
        raise ArithmeticError(f"wrong sum: {size} bytes of ones over {dist.get_world_size()} ranks")
    tensor.zero_()
    sample = _on_gpu(tensor) if device.type == "cuda" else _on_cpu(tensor)
    return [sample() for _ in range(WARM_UP + SAMPLES)][WARM_UP:]


def _on_gpu(tensor: torch.Tensor) -> Callable[[], float]:
    """By CUDA events around a replay, as the host's own time per call would hide what NCCL takes."""
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own threads go on working meanwhile
        for _ in range(IN_A_GRAPH):
            dist.all_reduce(tensor)
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / IN_A_GRAPH

    return sample


def _on_cpu(tensor: torch.Tensor) -> Callable[[], float]:
    def sample() -> float:
        began = time.perf_counter()
        dist.all_reduce(tensor)
        return (time.perf_counter() - began) * 1e6

    return sample


def _chosen(log: Path) -> dict[str, str]:
    """What NCCL took for each size, for example ``RING LL 1`` (algorithm, protocol, channels)."""
    found = _CHOICE.findall(_read(log))
    return {size: f"{algo} {proto} {int(high) - int(low) + 1}" for size, algo, proto, low, high in found}


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
