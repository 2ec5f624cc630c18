"""In place of NVML on machines without a GPU: put this folder on PYTHONPATH.

FAKE_NVML names a folder: ``gpus`` there holds how many there are, and ``used-I`` the MiB in use on GPU I (0 where it
is missing). A file ``used-I`` that a test leaves there is a GPU that keeps memory, with no process to show for it.
"""

import os
from pathlib import Path
from types import SimpleNamespace

TOTAL_MIB = 81920


class NVMLError(Exception):
    """What NVML raises."""


def _folder():
    return Path(os.environ["FAKE_NVML"])


def nvmlInit():
    if not _folder().is_dir():
        raise NVMLError("Driver Not Loaded")


def nvmlShutdown():
    """Nothing to give back."""


def nvmlDeviceGetCount():
    return int((_folder() / "gpus").read_text())


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetIndex(handle):
    return handle


def nvmlDeviceGetUUID(handle):
    return f"GPU-{handle:08d}"


def nvmlDeviceGetName(_handle):
    return "Made-up GPU"


def nvmlSystemGetDriverVersion():
    return "1.0"


def nvmlDeviceGetComputeRunningProcesses(_handle):
    return []


def nvmlDeviceGetMemoryInfo(handle):
    path = _folder() / f"used-{handle}"
    used = int(path.read_text()) if path.exists() else 0
    return SimpleNamespace(used=used << 20, total=TOTAL_MIB << 20)
