#!/usr/bin/env python3
"""Breaks real servers on a GPU machine, one way after the other, and writes down what the engine made of it.

usage: gpu_faults.py SPEC.yaml OUT [--only NAME,...] [--until EPOCH] [--fake SERVER.py]

Each fault is one trial through `run_trial` and `SglangEngine`, as a node runs it. OUT gets faults.jsonl (one line per
fault: what was reported, when, and how long the GPU's memory took to come back by NVML), NAME.log.gz (the server's
log), NAME.nvml.gz (memory in use, ten looks a second) and NAME.events. With --fake a stand-in server is launched.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from raytune_eagle import specfile
from raytune_eagle.engines import gpus, launch, sglang
from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.sglang import SglangEngine
from raytune_eagle.errors import RaytuneEagleError
from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.trial import Completed, Failed, Job
from raytune_eagle.model.workload import Workload
from raytune_eagle.nodes.turns import FreeForAll
from raytune_eagle.space import Space
from raytune_eagle.trial import run_trial
from raytune_eagle.workload import load_prompts

HOLD = """
import sys, time, pathlib
mib, leave, trigger = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
import torch
print("imported", flush=True)
while trigger != "-" and not pathlib.Path(trigger).exists():
    time.sleep(0.02)
free = torch.cuda.mem_get_info()[0] >> 20
block = torch.empty((mib or free - leave) << 20, dtype=torch.uint8, device="cuda")
print(f"holding {block.numel() >> 20} MiB of {free} MiB free", flush=True)
time.sleep(600)
"""
FAKE_HOLD = "import sys, time; print('imported\\nholding', flush=True); time.sleep(600)"
LOOK_S = 0.1
SETTLE_S = 20.0
"""How long the memory is watched after a fault for coming back."""


@dataclass
class Watch:
    """Memory in use over time; a thread of its own."""

    count: int
    seen: list[tuple[float, int, list[int]]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Look until told to stop."""
        nvml = gpus.Nvml(self.count)
        while not self.over.wait(LOOK_S):
            with suppress(RaytuneEagleError):
                looked = nvml.look()
                pids = sorted(pid for gpu in looked for pid in gpu.processes)
                self.seen.append((time.monotonic(), sum(gpu.used_mib for gpu in looked), pids))

    def back(self, since: float, level: int) -> float | None:
        """Seconds after `since` from which on memory stays at `level` or below."""
        high = [at for at, used, _ in self.seen if at >= since and used > level]
        after = [at for at, _, _ in self.seen if at > (high[-1] if high else since)]
        return round(after[0] - since, 2) if after else None


@dataclass
class Bench:
    """What every fault has at hand."""

    spec: Any
    spec_file: str
    space: Space
    settings: Settings
    out: Path
    fake: str | None
    events: list[tuple[float, str, str]] = field(default_factory=list)
    hooks: dict[str, Callable[[], None]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def workload(self, passes: int) -> Workload:
        """The spec's, at concurrency 1 and with so many passes."""
        settings = self.spec.workload.settings()
        settings |= {"concurrency": (1,), "min_passes": passes, "max_passes": passes}
        return Workload(prompts=load_prompts(self.spec.workload.prompts), **settings)

    def config(self, triple: tuple[int, int, int] | None, **changes: Any) -> Config:
        """Plain decoding, or a triple; `changes` are flags of this launch alone."""
        base = self.space.baseline()
        draft = self.spec.engine.draft[0]
        names = ("num_steps", "eagle_topk", "num_draft_tokens")
        spec = Speculative(draft=draft, **dict(zip(names, triple, strict=True))) if triple else None
        update: dict[str, Any] = {"speculative": spec, "tuned_args": {**base.tuned_args, **changes}}
        if self.fake:
            update["launcher"] = ("python3", self.fake)
        return base.model_copy(update=update)

    def progress(self, name: str, detail: str) -> None:
        """Note an event; the first of its name sets off what waits for it."""
        self.events.append((time.monotonic(), name, detail))
        if hook := self.hooks.pop(name, None):
            threading.Thread(target=hook, daemon=True).start()

    def note(self, name: str) -> None:
        """When something was first done to the server."""
        self.notes.setdefault(name, time.monotonic())

    def trial(self, config: Config, passes: int = 1, **settings: Any) -> Completed | Failed:
        """One trial, as a node runs it."""
        job = Job(study="faults", number=0, kind="trial", config=config, workload=self.workload(passes))
        engine = SglangEngine(replace(self.settings, **settings))
        return run_trial(engine, job, self.progress, FreeForAll())


@contextmanager
def holder(bench: Bench, mib: int = 0, leave: int = 0, trigger: str = "-") -> Iterator[subprocess.Popen[str]]:
    """A foreign process that holds GPU memory: at once, or all but `leave` MiB once the file `trigger` is there."""
    code = FAKE_HOLD if bench.fake else HOLD
    words = [sys.executable, "-c", code, str(mib), str(leave), trigger]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        rest = process.communicate()[0]
        bench.notes["holder_said"] = bench.notes.get("holder_said", "") + rest


def lines_until(process: subprocess.Popen[str], word: str) -> str:
    """Read what it says up to a line with this word."""
    said = ""
    for line in process.stdout or ():
        said += line
        if word in line:
            break
    return said


@contextmanager
def patched(module: Any, name: str, value: Any) -> Iterator[None]:
    """Another value in a module, for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


# --------------------------------------------------------------------------------------------------------- the faults
def foreign_memory(bench: Bench) -> Any:
    """20 GB held by another process before the launch."""
    with holder(bench, mib=20_000) as process:
        bench.notes["holder_said"] = lines_until(process, "holding")
        bench.notes["holder_pid"] = process.pid
        bench.note("injected")
        return bench.trial(bench.config(None))


def start_cut(bench: Bench) -> Any:
    """A start is cut at its deadline."""
    return bench.trial(bench.config((3, 1, 4)), start_timeout_s=15.0)


def port_listened(bench: Bench) -> Any:
    """A stranger listens on the chosen port, at both tries."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        free = launch.free_ports
        with patched(launch, "free_ports", lambda host, count: [taken, *free(host, count - 1)]):
            return bench.trial(bench.config(None))


def port_bound(bench: Bench) -> Any:
    """A stranger holds the chosen port but does not listen: the server fails to bind after loading, and hangs."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        taken = stranger.getsockname()[1]
        free = launch.free_ports
        with (
            patched(launch, "free_ports", lambda host, count: [taken, *free(host, count - 1)]),
            patched(sglang, "PATIENCE", 1),
        ):
            return bench.trial(bench.config(None), start_stall_s=12.0, start_timeout_s=45.0)


def tree_too_small(bench: Bench) -> Any:
    """64 draft tokens from a tree of 37 (the rules would refuse it)."""
    return bench.trial(bench.config((3, 4, 64)))


def oom_at_capture(bench: Bench) -> Any:
    """The KV cache takes 98 % of the GPU; the graphs of large batches do not fit beside it."""
    flags = {
        "mem-fraction-static": 0.98,
        "cuda-graph-max-bs-decode": 1024,
        "max-running-requests": 1024,
        "max-total-tokens": None,
    }
    base = bench.config((5, 8, 32), **flags)
    args = {name: value for name, value in base.args.items() if name not in flags}
    return bench.trial(base.model_copy(update={"args": args}))


def foreign_growth(bench: Bench) -> Any:
    """Another process takes what is left of the GPU while graphs are captured, and keeps it."""
    trigger = bench.out / "grow"
    trigger.unlink(missing_ok=True)
    holding: list[Any] = []

    def grow() -> None:
        bench.note("injected")
        trigger.touch()

    def begin() -> None:
        context = holder(bench, leave=32, trigger=str(trigger))
        holding.append((context, context.__enter__()))

    bench.hooks = {"launch": begin, "graph_capture": grow, "ready": grow}
    try:
        with patched(gpus, "RELEASE_S", 12.0), patched(sglang, "PATIENCE", 1):
            return bench.trial(bench.config((3, 4, 16)), start_timeout_s=90.0)
    finally:
        for context, _ in holding:
            context.__exit__(None, None, None)
        bench.note("holder_ended")


def scheduler_killed(bench: Bench) -> Any:
    """SIGKILL of every scheduler 4 s into the bench."""
    return killed(bench, "sglang::scheduler")


def rank_killed(bench: Bench) -> Any:
    """SIGKILL of one tensor parallel rank alone, not the first, 4 s into the bench."""
    return killed(bench, f"sglang::scheduler_TP{bench.settings.gpus - 1}")


def killed(bench: Bench, title: str) -> Any:
    """A trial whose processes of this title are killed."""

    def kill() -> None:
        time.sleep(4)
        for process in psutil.process_iter(["cmdline"]):
            if title in " ".join(process.info["cmdline"] or []) and of_bench(process, bench):
                bench.notes.setdefault("killed_pids", []).append(process.pid)
                bench.note("injected")
                process.send_signal(signal.SIGKILL)

    bench.hooks = {"ready": kill}
    return bench.trial(bench.config((3, 1, 4)), passes=20)


def eagle_flag(bench: Bench) -> Any:
    """The EAGLE3 draft under the algorithm EAGLE: starts without a word (the last flag wins)."""
    return bench.trial(bench.config((3, 4, 16), **{"speculative-algorithm": "EAGLE"}), passes=1)


def owner_killed(bench: Bench) -> Any:
    """SIGKILL of a whole `raytune-eagle run` while its server is up: its guards have to free the GPU."""
    results, log = bench.out / "killed", bench.out / "killed.run"
    words = [sys.executable, "-m", "raytune_eagle", "run", bench.spec_file, "--study", "killed", "--trials", "1"]
    with log.open("wb") as out:
        words += ["--results", str(results), "--cluster", "local"]
        driver = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while b" ready " not in log.read_bytes() and time.monotonic() < deadline and driver.poll() is None:
            time.sleep(LOOK_S)
        bench.notes["servers"] = leftovers()
        bench.note("injected")
    finally:
        driver.kill()
        driver.wait(10)
    deadline = time.monotonic() + SETTLE_S
    while leftovers() and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    bench.note("processes_gone")
    return {"outcome": "killed", "detail": f"driver {driver.pid} ended with {driver.returncode}"}


FAULTS = (
    foreign_memory,
    start_cut,
    port_listened,
    scheduler_killed,
    rank_killed,
    tree_too_small,
    oom_at_capture,
    port_bound,
    foreign_growth,
    eagle_flag,
    owner_killed,
)


# ------------------------------------------------------------------------------------------------------- writing down
def observe(bench: Bench, fault: Callable[[Bench], Any]) -> dict[str, Any]:
    """Run one fault and tell what came of it."""
    bench.events, bench.hooks, bench.notes = [], {}, {}
    shutil.rmtree(bench.settings.work_dir, ignore_errors=True)
    watch = Watch(bench.settings.gpus)
    thread = threading.Thread(target=watch.run, daemon=True)
    thread.start()
    time.sleep(3 * LOOK_S)
    before = watch.seen[-1][1] if watch.seen else 0
    began = time.monotonic()
    told = outcome_of(fault, bench)
    ended = time.monotonic()
    while watch.back(ended, before + gpus.SLACK_MIB) is None and time.monotonic() < ended + SETTLE_S:
        time.sleep(LOOK_S)
    since = bench.notes.get("injected", began)
    told |= {
        "fault": fault.__name__,
        "at": time.time(),
        "seconds": round(ended - began, 2),
        "injected_s": round(since - began, 2),
        "injection_to_verdict_s": round(ended - since, 2),
        "used_mib_before": before,
        "used_mib_peak": max((used for _, used, _ in watch.seen), default=0),
        "memory_back_after_injection_s": watch.back(since, before + gpus.SLACK_MIB),
        "memory_back_after_verdict_s": watch.back(ended, before + gpus.SLACK_MIB),
        "left": leftovers(bench),
        "notes": {k: round(v - began, 2) if isinstance(v, float) else v for k, v in bench.notes.items()},
    }
    watch.over.set()
    thread.join(5)
    keep(bench, fault.__name__, watch, began)
    return told


def outcome_of(fault: Callable[[Bench], Any], bench: Bench) -> dict[str, Any]:
    """What the trial came to, in words."""
    try:
        outcome = fault(bench)
    except RaytuneEagleError as exc:
        inner = getattr(exc, "outcome", None)
        told = {"outcome": type(exc).__name__, "detail": str(exc)}
        return told | ({"inner": described(inner)} if inner is not None else {})
    except Exception as exc:  # noqa: BLE001 - a bug is a finding here
        return {"outcome": f"BUG {type(exc).__name__}", "detail": str(exc)}
    return outcome if isinstance(outcome, dict) else described(outcome)


def described(outcome: Completed | Failed) -> dict[str, Any]:
    """An outcome without its rows and logs."""
    told: dict[str, Any] = {"outcome": outcome.status, "phases": outcome.phases.model_dump()}
    if isinstance(outcome, Failed):
        told |= {"class": outcome.failure_class, "phase": outcome.failure_phase, "detail": outcome.failure_detail}
        return told | {"requests": len(outcome.requests)}
    return told | {"measured": [m.model_dump() for m in outcome.measurements]}


def leftovers(bench: Bench | None = None) -> list[str]:
    """Processes of servers that are still there: of this bench's, or of any."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        serves = ("sglang::" in line or "launch_server" in line) and "gpu_faults" not in line
        if serves and (bench is None or of_bench(process, bench)):
            found.append(f"{process.pid} {line[:120]}")
    return found


def of_bench(process: psutil.Process, bench: Bench) -> bool:
    """Whether it is, or has above it, a server or guard that names this bench's folder: others may serve beside us."""
    with suppress(psutil.Error):
        lines = [" ".join(each.cmdline()) for each in (process, *process.parents())]
        return any(str(bench.settings.work_dir) in line for line in lines)
    return False


def keep(bench: Bench, name: str, watch: Watch, began: float) -> None:
    """Logs, events and memory of one fault."""
    for place, log in enumerate(sorted(bench.settings.work_dir.glob("*.log"))):
        target = bench.out / f"{name}{f'.{place}' if place else ''}.log.gz"
        target.write_bytes(gzip.compress(log.read_bytes()))
    rows = "".join(f"{at - began:.2f} {used} {pids}\n" for at, used, pids in watch.seen)
    (bench.out / f"{name}.nvml.gz").write_bytes(gzip.compress(rows.encode()))
    events = "".join(f"{at - began:.2f} {what}: {detail}\n" for at, what, detail in bench.events)
    (bench.out / f"{name}.events").write_text(events)


def main() -> None:
    """Read the command line; run the faults."""
    parser = argparse.ArgumentParser(usage=str(__doc__).split("\n\n")[1].removeprefix("usage: "))
    parser.add_argument("spec")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only")
    parser.add_argument("--until", type=float, default=float("inf"))
    parser.add_argument("--fake")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    spec = specfile.load(asked.spec)
    settings = Settings(
        work_dir=asked.out / "work",
        python=spec.engine.python,
        start_stall_s=spec.engine.start_stall_s,
        start_timeout_s=spec.engine.start_timeout_s,
        gpus=spec.node.gpus,
    )
    bench = Bench(spec, asked.spec, Space(spec), settings, asked.out, asked.fake)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(spec.node.gpus))))
    wanted = asked.only.split(",") if asked.only else [fault.__name__ for fault in FAULTS]
    for fault in FAULTS:
        if fault.__name__ not in wanted or (fault is rank_killed and spec.node.gpus == 1):
            continue
        if time.time() > asked.until:
            print(f"no time for {fault.__name__}", flush=True)
            continue
        told = observe(bench, fault)
        with (asked.out / "faults.jsonl").open("a") as out:
            out.write(json.dumps(told) + "\n")
        print(json.dumps(told), flush=True)
    shutil.rmtree(bench.settings.work_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
