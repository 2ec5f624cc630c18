"""In place of nvidia-ml-py, for a program that is started with this folder on its PYTHONPATH: GPUs as a file says.

NVML_FAKE names a JSON file, ``{"arch": [9, 0], "nvlink": true, "gpus": [GPU, …]}``, with
``{"used": MIB, "total": MIB, "pids": {PID: MIB}, "clock": MHZ, "heat": CELSIUS}`` for each GPU; ``"name"`` is theirs,
and ``"broken"`` what the driver says when it is asked how many there are. A GPU without clock or heat refuses to tell.
Without the file there is no driver, as on a machine without GPUs.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

MIB = 1 << 20
NVML_P2P_CAPS_INDEX_NVLINK = 2
NVML_P2P_STATUS_OK = 0
NVML_P2P_STATUS_NOT_SUPPORTED = 5
NVML_CLOCK_SM = 1
NVML_TEMPERATURE_GPU = 0


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
    if broken := _said().get("broken"):
        raise NVMLError(broken)
    return len(_said()["gpus"])


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetIndex(handle):
    return handle


def nvmlDeviceGetUUID(handle):
    return f"GPU-{handle:08d}"


def nvmlDeviceGetName(handle):
    return _said().get("name", "NVIDIA Fake")


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


def nvmlDeviceGetClockInfo(handle, what):
    return _told(handle, "clock")


def nvmlDeviceGetTemperature(handle, what):
    return _told(handle, "heat")


def _told(handle, word):
    gpu = _said()["gpus"][handle]
    if word not in gpu:
        raise NVMLError("Not Supported")
    return gpu[word]
