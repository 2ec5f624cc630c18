"""What NVML knows of this machine's GPUs: the one module that talks to it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from raytune_eagle.errors import NodeError

MIB = 1 << 20
SLACK_MIB = 512
"""Memory that a driver may keep or another process may use without being in the way."""
RELEASE_S = 60.0


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment: memory in use, and by which processes (pid to MiB); 0 where nobody asked or can tell."""

    index: int
    used_mib: int
    processes: dict[int, int]
    total_mib: int = 0
    clock_mhz: int = 0
    temperature_c: int = 0


@dataclass(frozen=True)
class Traits:
    """What kind of GPUs a node has.

    Attributes:
        name: as NVML gives it, "NVIDIA H200".
        arch: compute capability, 90 for Hopper.
        nvlink: whether each two are joined by NVLink, as SGLang asks it (``is_full_nvlink``); None for a single one.
    """

    name: str
    arch: int
    nvlink: bool | None


class Gpus(Protocol):
    """Looks at the GPUs that are ours."""

    def look(self) -> list[Gpu]:
        """State of each of our GPUs; `NodeError` when the driver cannot tell."""
        ...


class Nvml:
    """The real thing: the first `count` of the GPUs that CUDA_VISIBLE_DEVICES, at that moment, leaves to us."""

    def __init__(self, count: int) -> None:
        self.count = count

    def look(self) -> list[Gpu]:
        """Ask NVML."""
        with _nvml() as nvml:
            return [self._state(nvml, handle) for handle in self._handles(nvml)]

    def _handles(self, nvml: Any) -> list[Any]:
        every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in every]
            every = [every[at] for at in visible_indices(visible, uuids)]
        if len(every) < self.count:
            raise NodeError(f"{self.count} GPUs asked for, {len(every)} visible (CUDA_VISIBLE_DEVICES={visible})")
        return every[: self.count]

    def ids(self) -> tuple[str, ...]:
        """Their UUIDs, sorted; `NodeError` when the driver cannot tell."""
        with _nvml() as nvml:
            return tuple(sorted(_text(nvml.nvmlDeviceGetUUID(handle)) for handle in self._handles(nvml)))

    def traits(self) -> Traits:
        """What kind of GPUs they are; `NodeError` when the driver cannot tell."""
        with _nvml() as nvml:
            handles = self._handles(nvml)
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handles[0])
            pairs = list(itertools.combinations(handles, 2))
            nvlink = all(_linked(nvml, *pair) for pair in pairs) if pairs else None
            return Traits(_text(nvml.nvmlDeviceGetName(handles[0])), 10 * major + minor, nvlink)

    @staticmethod
    def _state(nvml: Any, handle: Any) -> Gpu:
        processes = {
            process.pid: (process.usedGpuMemory or 0) // MIB  # None inside containers that hide it
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        }
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        used, total = memory.used // MIB, memory.total // MIB
        return Gpu(nvml.nvmlDeviceGetIndex(handle), used, processes, total, *_clock_and_heat(nvml, handle))


def _clock_and_heat(nvml: Any, handle: Any) -> tuple[int, int]:
    """SM clock in MHz and degrees Celsius; 0 for what this GPU (a MIG slice, say) or this binding does not tell."""
    clock = heat = 0
    with suppress(nvml.NVMLError, AttributeError):
        clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    with suppress(nvml.NVMLError, AttributeError):
        heat = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    return clock, heat


def _linked(nvml: Any, one: Any, other: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:  # what a machine without NVLink answers, too
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def visible_indices(visible: str, uuids: list[str]) -> list[int]:
    """Indices that CUDA_VISIBLE_DEVICES means; as in CUDA, the first unknown entry ends the list."""
    found = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        matches = [at for at, uuid in enumerate(uuids) if uuid.startswith(entry)]
        if entry.isdigit() and int(entry) < len(uuids):
            found.append(int(entry))
        elif len(matches) == 1:
            found.append(matches[0])
        else:
            break
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, initialised; its errors become `NodeError`."""
    import pynvml  # noqa: PLC0415  machines without a GPU need not have it work

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NodeError(f"NVML: {error}") from error


def require_free(gpus: Gpus, least: dict[int, int]) -> list[Gpu]:
    """State before a launch; `NodeError` when another process holds memory there, or nobody does and it is gone.

    Args:
        gpus: ours.
        least: the least that was ever seen in use (MiB), by index; kept up to date here.
    """
    before = gpus.look()
    for gpu in before:
        least[gpu.index] = min(gpu.used_mib, least.get(gpu.index, gpu.used_mib))
        if gpu.used_mib > least[gpu.index] + SLACK_MIB and not gpu.processes:
            raise NodeError(
                f"GPU {gpu.index}: {gpu.used_mib} MiB are in use by no process, {least[gpu.index]} at first: "
                "reset it (nvidia-smi --gpu-reset), or restart the machine"
            )
        if busy := {pid: used for pid, used in gpu.processes.items() if used > SLACK_MIB}:
            raise NodeError(f"GPU {gpu.index} is in use by {_holders(busy)}")
    return before


def _holders(processes: dict[int, int]) -> str:
    return ", ".join(f"pid {pid} ({used} MiB)" for pid, used in processes.items())


def await_release(
    gpus: Gpus, before: Iterable[Gpu], pids: Iterable[int], wait: Callable[[float], None] = time.sleep
) -> None:
    """Wait until `pids` are off the GPUs and their memory is as before; `NodeError` when that takes too long."""
    was, ours = {gpu.index: gpu.used_mib for gpu in before}, set(pids)
    deadline = time.monotonic() + RELEASE_S
    while held := _held(gpus.look(), was, ours):
        if time.monotonic() > deadline:
            raise NodeError(f"GPU memory was not given back within {RELEASE_S:g} s: {held}")
        wait(0.2)


def _held(now: list[Gpu], was: dict[int, int], ours: set[int]) -> str:
    """What is still held, in words; empty when nothing is."""
    parts = []
    for gpu in now:
        mine = sorted(ours & gpu.processes.keys())
        if mine or gpu.used_mib > was[gpu.index] + SLACK_MIB:
            others = {pid: mib for pid, mib in gpu.processes.items() if pid not in ours and mib > SLACK_MIB}
            theirs = f", others: {_holders(others)}" if others else ""
            parts.append(f"GPU {gpu.index}: {gpu.used_mib} MiB, {was[gpu.index]} before, ours: {mine}{theirs}")
    return "; ".join(parts)
