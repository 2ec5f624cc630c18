"""What this machine is, for the record: hardware in one line, and the versions that a figure depends on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from raytune_eagle import __version__
from raytune_eagle.engines.gpus import Nvml
from raytune_eagle.engines.launch import Settings
from raytune_eagle.errors import SpecError
from raytune_eagle.model.trial import NodeFacts

PACKAGES = (
    "sglang",
    "torch",
    "transformers",
    "triton",
    "sgl-kernel",
    "sglang-kernel",
    "flashinfer-python",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "ray",
    "optuna",
)
_ASK_S = 60.0
# Asks package metadata only: importing SGLang would take seconds and touch the GPUs.
_QUESTION = """
import json, sys
from importlib import metadata
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
found = {name: version(name) for name in sys.argv[1:]}
found["python"] = ".".join(map(str, sys.version_info[:3]))
print(json.dumps({name: value for name, value in found.items() if value}))
"""


def describe(settings: Settings) -> NodeFacts:
    """Facts of this machine and of the interpreter that serves.

    Raises:
        SpecError: `engine.python` cannot be run.
        NodeError: GPUs are missing, or their driver cannot tell.
    """
    driver: dict[str, str] = {}
    ids: tuple[str, ...] = ()
    if settings.gpus:
        (hardware, driver), ids = _gpus(settings.gpus), Nvml(settings.gpus).ids()
    else:
        cores = settings.cores or tuple(os.sched_getaffinity(0))
        hardware = f"{len(cores)} core{'s' if len(cores) > 1 else ''} of {_cpu_name()}"
    return NodeFacts(hardware=hardware, versions=_versions(settings) | driver, gpu_ids=ids)


def _versions(settings: Settings) -> dict[str, str]:
    command = [settings.interpreter, "-c", _QUESTION, *PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ASK_S)
    except (OSError, subprocess.SubprocessError) as exc:
        why = getattr(exc, "stderr", None) or exc
        raise SpecError(f"engine.python: {settings.interpreter} cannot be run: {str(why).strip()[-200:]}") from exc
    found: dict[str, str] = json.loads(done.stdout)
    if settings.interpreter != sys.executable:  # the driver's own packages count as well
        found |= {name: metadata.version(name) for name in ("ray", "optuna")}
    return found | {"raytune-eagle": __version__}  # by itself: it may run from a folder, without metadata


def _gpus(count: int) -> tuple[str, dict[str, str]]:
    import pynvml  # noqa: PLC0415 - only machines with GPUs need it

    pynvml.nvmlInit()
    try:
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        return f"{count}x {name}", {"driver": pynvml.nvmlSystemGetDriverVersion()}
    finally:
        pynvml.nvmlShutdown()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def gpu_count() -> int:
    """GPUs of this machine that are visible to us; 0 where there is no driver."""
    import pynvml  # noqa: PLC0415 - likewise

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        count = int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else len([word for word in visible.split(",") if word.strip()])
