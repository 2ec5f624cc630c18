"""In place of nvidia-ml-py, for a program that is started with this folder on its PYTHONPATH: GPUs as a file says.

NVML_FAKE names a JSON file, ``{"arch": [9, 0], "nvlink": true, "gpus": [GPU, …]}``, with
``{"used": MIB, "total": MIB, "pids": {PID: MIB}}`` for each GPU.
Without it there is no driver, as on a machine without GPUs.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

MIB = 1 << 20
NVML_P2P_CAPS_INDEX_NVLINK = 2
NVML_P2P_STATUS_OK = 0
NVML_P2P_STATUS_NOT_SUPPORTED = 5


class NVMLError(Exception):
    """What the library raises."""


def _said():
    if not os.environ.get("NVML_FAKE"):
        raise NVMLError("Driver Not Loaded")
    return json.loads(Path(os.environ["NVML_FAKE"]).read_text())


def nvmlInit():
    _said()


def nvmlShutdown():
    _said()


def nvmlSystemGetDriverVersion():
    return "580.00"


def nvmlDeviceGetCount():
    return len(_said()["gpus"])


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetIndex(handle):
    return handle


def nvmlDeviceGetUUID(handle):
    return f"GPU-{handle:08d}"


def nvmlDeviceGetName(handle):
    return "NVIDIA Fake"


def nvmlDeviceGetCudaComputeCapability(handle):
    return tuple(_said()["arch"])


def nvmlDeviceGetP2PStatus(one, other, what):
    linked = _said()["nvlink"] and what == NVML_P2P_CAPS_INDEX_NVLINK
    return NVML_P2P_STATUS_OK if linked else NVML_P2P_STATUS_NOT_SUPPORTED


def nvmlDeviceGetMemoryInfo(handle):
    gpu = _said()["gpus"][handle]
    return SimpleNamespace(used=gpu["used"] * MIB, total=gpu["total"] * MIB)


def nvmlDeviceGetComputeRunningProcesses(handle):
    pids = _said()["gpus"][handle].get("pids", {})
    return [SimpleNamespace(pid=int(pid), usedGpuMemory=used * MIB) for pid, used in pids.items()]
