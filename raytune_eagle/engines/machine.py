"""Can this machine serve? Its interpreter, versions, GPUs, ports, disk, limits and clock, each in one line."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raytune_eagle.engines.gpus import SLACK_MIB, Gpu, Gpus
from raytune_eagle.engines.launch import Settings, free_ports
from raytune_eagle.errors import NodeError
from raytune_eagle.findings import Finding, ok, problem, warning

PYTHON = "engine.python"
CPU_VERSION = "0.5.20"
"""The one that the CPU layer is proven with (engines/cpu/server.py)."""
_ASK_S = 60.0
_FILES, _LEAST_FILES = 4096, 1024
"""Open files: Ray and SGLang hold some hundred each, and one per stream."""
_DISK, _LEAST_DISK = 2 << 30, 200 << 20
"""Bytes free: logs and records of a long study; below the second even a short one ends early."""
_SHARED = 1 << 30
"""Bytes of /dev/shm that NCCL and SGLang's processes share their data through."""
_EPOCH = 1_735_689_600.0
"""2025-01-01: this program is younger."""
# Package metadata only; importing SGLang would take seconds and touch the GPUs.
_QUESTION = """
import json, re, sys
from importlib import metadata
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
found = {"python": ".".join(map(str, sys.version_info[:3])), "home": sys.prefix, "pins": {}}
found["sglang"] = version("sglang")
for package in ("sglang", "torch"):
    for line in (version(package) and metadata.requires(package)) or ():
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)(?:\\[.*\\])?==([^;, ]+)", line.partition(";")[0].strip())
        if match: found["pins"][match[1]] = [match[2], version(match[1])]
for name in ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12"):
    found[name] = version(name)
print(json.dumps(found))
"""
_PINNED = re.compile(r"torch|sglang-kernel|sgl-kernel|flashinfer[-_]python|transformers|nvidia-nccl-cu1[23]")
"""Those of SGLang's and torch's pins that decide what a launch does."""


@dataclass(frozen=True)
class Installed:
    """What the interpreter that serves has.

    Attributes:
        pins: what its SGLang and its torch want exactly, and what there is, by package.
        home: ``sys.prefix``: two names of one interpreter have the same.
    """

    python: str
    sglang: str | None
    torch: str | None
    nccl: str | None
    cudnn: str | None
    home: str
    pins: dict[str, tuple[str, str | None]]


def installed(settings: Settings) -> Installed:
    """Ask the interpreter (0.1 s); raises `NodeError` when it cannot be run."""
    command = [settings.interpreter, "-c", _QUESTION]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ASK_S)
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        why = str(getattr(exc, "stderr", None) or getattr(exc, "strerror", None) or exc).strip().splitlines()
        raise NodeError(f"{settings.interpreter} cannot be run: {(why or ['it says nothing'])[-1]}") from exc
    pins = {name: (wanted, there) for name, (wanted, there) in found["pins"].items()}
    nccl = found["nvidia-nccl-cu13"] or found["nvidia-nccl-cu12"]
    home = found.get("home") or settings.interpreter
    return Installed(found["python"], found["sglang"], found["torch"], nccl, found.get("nvidia-cudnn-cu12"), home, pins)


def check_interpreter(settings: Settings, assumed: str) -> tuple[list[Finding], Installed | None]:
    """Findings about the interpreter, and what it has, SGLang among it; `assumed` is the spec's ``engine.version``."""
    try:
        there = installed(settings)
    except NodeError as exc:
        return [problem(PYTHON, f"{exc}: name an interpreter that has SGLang")], None
    if there.sglang is None:
        return [problem(PYTHON, f"{settings.interpreter} has no sglang: install it there, or name another one")], None
    shown = f"{settings.interpreter}: Python {there.python}, SGLang {there.sglang}, torch {there.torch or 'missing'}"
    findings = [ok(PYTHON, f"{shown}, NCCL {there.nccl or 'none'}"), *_versions(settings, there, assumed)]
    return findings, there


def _versions(settings: Settings, there: Installed, assumed: str) -> Iterator[Finding]:
    if there.sglang != assumed:
        yield warning("engine.version", f"the rules were told {assumed}, this machine has {there.sglang}, which wins")
    if not settings.gpus:
        if there.sglang != CPU_VERSION:
            yield problem(PYTHON, f"SGLang {there.sglang}: the CPU layer (node.gpus: 0) works with {CPU_VERSION} only")
        return
    for name, (wanted, found) in there.pins.items():
        if _PINNED.fullmatch(name) and (found or "").partition("+")[0] != wanted:
            who = f"torch {there.torch}" if name.startswith("nvidia-") else f"SGLang {there.sglang}"
            yield warning(PYTHON, f"{who} was made for {name} {wanted}, found {found or 'none'}")
    yield from bad_pairs(there)


def bad_pairs(there: Installed) -> Iterator[Finding]:
    """Versions that are known to go wrong together, whatever is served."""
    nccl, torch, cudnn = (parse(each) for each in (there.nccl, there.torch, there.cudnn))
    if nccl >= (2, 31):
        yield warning(
            PYTHON,
            f"NCCL {there.nccl}: from 2.31 on a list that names one function leaves the others without an algorithm "
            "(vllm PR 58179): write NCCL_ALGO as ring,tree;allreduce:tree",
        )
    if torch[:3] == (2, 9, 1) and cudnn and cudnn < (9, 15):
        yield warning(
            PYTHON,
            f"torch 2.9.1 with cuDNN {there.cudnn}: its Conv3d is slow and takes much memory, and SGLang refuses "
            "multimodal models there (server_args.py 0.5.8:4939): install cuDNN 9.15 or newer",
        )


def parse(text: str | None) -> tuple[int, ...]:
    """The numbers of a version; none where there is none."""
    return tuple(int(part) for part in re.findall(r"\d+", text or "")[:3])


def check_gpus(settings: Settings, gpus: Gpus) -> Iterator[Finding]:
    """Each GPU, its memory, and who holds it; nothing for a node without."""
    if not settings.gpus:
        yield ok("node.gpus", "none asked for: the CPU layer serves")
        return
    try:
        for gpu in gpus.look():
            yield _gpu(gpu)
    except NodeError as exc:
        yield problem("node.gpus", str(exc))


def _gpu(gpu: Gpu) -> Finding:
    shown = f"GPU {gpu.index}: {gpu.used_mib} of {gpu.total_mib} MiB in use"
    held = {pid: used for pid, used in gpu.processes.items() if used > SLACK_MIB}
    if not held:
        return ok("node.gpus", shown)
    who = ", ".join(f"pid {pid} ({_name(pid)}, {used} MiB)" for pid, used in held.items())
    return problem("node.gpus", f"{shown}, held by {who}: end that, or leave the GPU out with CUDA_VISIBLE_DEVICES")


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "not to be seen from here"


def check_machine(settings: Settings) -> Iterator[Finding]:
    """Ports, disk, limits and clock."""
    yield _ports(settings.host)
    yield from check_folder("work dir", str(settings.work_dir))
    yield _open_files()
    yield from _shared_memory(settings)
    now = time.time()
    shown = time.strftime("%F %T %z", time.localtime(now))
    yield ok("clock", shown) if now > _EPOCH else problem("clock", f"{shown} cannot be: set it, or start chronyd")


def _ports(host: str) -> Finding:
    try:
        free_ports(host, 2)
    except OSError as exc:
        return problem("ports", f"none can be bound on {host}: {exc.strerror}; change that address")
    return ok("ports", f"free ones on {host}")


def check_folder(subject: str, folder: str) -> Iterator[Finding]:
    """Can it be made and written, and is there room?"""
    if not folder:
        yield problem(subject, "empty: name a folder")
        return
    try:
        path = Path(folder).expanduser().absolute()
    except RuntimeError:
        yield problem(subject, f"{folder}: no such user; write the whole path")
        return
    there = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
    if not there.is_dir():
        yield problem(subject, f"{there} is a file, not a folder; name another")
    elif reason := _unwritable(there):
        yield problem(subject, f"{there} cannot be written ({reason}); name another folder, or change its owner")
    else:
        free = shutil.disk_usage(there).free
        level = ok if free >= _DISK else warning if free >= _LEAST_DISK else problem
        yield level(subject, f"{path}: {free / 2**30:.1f} GiB free" + ("" if level is ok else "; make room"))


def _unwritable(folder: Path) -> str | None:
    """Found by writing: what a mount, an owner or a full disk allow is not all in the mode bits."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as exc:
        return exc.strerror or str(exc)
    return None


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    level = ok if soft >= _FILES else warning if soft >= _LEAST_FILES else problem
    return level("ulimit -n", f"{soft} open files" + ("" if level is ok else f"; raise it: ulimit -n {hard}"))


def _shared_memory(settings: Settings) -> Iterator[Finding]:
    shared = Path("/dev/shm")  # noqa: S108 - where NCCL puts its segments
    if settings.gpus > 1 and shared.is_dir():
        total = shutil.disk_usage(shared).total
        enough = total >= _SHARED
        advice = "" if enough else "; NCCL needs more: start the container with --shm-size 8g"
        yield (ok if enough else problem)(str(shared), f"{total / 2**30:.1f} GiB{advice}")
