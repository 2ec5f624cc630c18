"""In place of torch and NCCL on a machine with GPUs, as far as ``engines/allreduce.py`` goes; put on PYTHONPATH.

Each process is one rank. An all-reduce takes 10 µs and 1 µs per 4 KiB, under NCCL_PROTO=Simple 15 µs more. Faults by
NCCL's own variables: NCCL_MAX_NCHANNELS=3 is invalid usage, NCCL_PROTO=LL128 gives wrong sums, NCCL_P2P_LEVEL=LOC
hangs, NCCL_MIN_NCHANNELS=2 kills a rank.
"""

import os
import signal
import sys
import time
import types
from pathlib import Path

bfloat16 = "bfloat16"
INVALID = "NCCL error in: NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9"
_made = []


class device:
    def __init__(self, kind, index=0):
        self.type = kind


class Tensor:
    """All its values are one value."""

    def __init__(self, count, on):
        self.count, self.device, self.value = count, on, 1

    def __eq__(self, other):
        return self.value == other

    __hash__ = None

    def zero_(self):
        self.value = 0


def ones(count, dtype, device):
    return Tensor(count, device)


def all(truth):
    return truth


def _cost_us(tensor):
    slow = 15 if os.environ.get("NCCL_PROTO") == "Simple" else 0
    return 10 + slow + tensor.count * 2 / 4096


class _Distributed(types.SimpleNamespace):
    def FileStore(self, path, count):
        return _Store(Path(path))

    def init_process_group(self, backend, store, rank, world_size):
        assert backend == "nccl", backend
        self.ranks = world_size
        if os.environ.get("NCCL_MAX_NCHANNELS") == "3":
            raise RuntimeError(INVALID)
        if os.environ.get("NCCL_P2P_LEVEL") == "LOC":
            time.sleep(600)
        if os.environ.get("NCCL_MIN_NCHANNELS") == "2" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def get_world_size(self):
        return self.ranks

    def all_reduce(self, tensor):
        tensor.value *= self.ranks + (os.environ.get("NCCL_PROTO") == "LL128")
        graph = _made[-1] if _made else None
        if graph is not None and graph.recording:
            graph.cost_us += _cost_us(tensor)
        if log := os.environ.get("NCCL_DEBUG_FILE"):
            proto = os.environ.get("NCCL_PROTO", "LL").upper()
            line = f"h:1:1 [0] NCCL INFO AllReduce: {tensor.count * 2} Bytes -> Algo RING proto {proto}"
            with Path(log).open("a") as file:
                file.write(f"{line} channel{{Lo..Hi}}={{0..7}}\n")


class _Store:
    def __init__(self, path):
        self.path = path

    def add(self, name, count):
        with self.path.open("a") as file:
            file.write("x" * count)
        return len(self.path.read_text())


class CUDAGraph:
    def __init__(self):
        self.recording, self.cost_us = False, 0.0
        _made.append(self)

    def replay(self):
        cuda.clock_us += self.cost_us


class graph:
    def __init__(self, made, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.made = made

    def __enter__(self):
        self.made.recording = True

    def __exit__(self, *_):
        self.made.recording = False


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = cuda.clock_us

    def synchronize(self):
        """Nothing runs beside us."""

    def elapsed_time(self, other):
        return (other.at - self.at) / 1000


cuda = types.SimpleNamespace(
    clock_us=0.0,
    CUDAGraph=CUDAGraph,
    Event=Event,
    graph=graph,
    is_initialized=lambda: True,
    set_device=lambda device: None,
    synchronize=lambda: None,
)
distributed = _Distributed()
sys.modules["torch.distributed"] = distributed
