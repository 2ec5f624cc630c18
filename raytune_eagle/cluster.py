"""Where a study runs: the only module that knows every adapter (engine, nodes, Ray)."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from raytune_eagle.engines.describe import gpu_count
from raytune_eagle.engines.guarded import Guarded
from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.sglang import SglangEngine
from raytune_eagle.errors import NodeError, SpecError
from raytune_eagle.model.trial import Event
from raytune_eagle.nodes import local_ray
from raytune_eagle.nodes.address import SIMULATED
from raytune_eagle.nodes.owner import Setup
from raytune_eagle.nodes.turns import FileTurns, FreeForAll
from raytune_eagle.ports import Engine, Fleet
from raytune_eagle.simulation import fleet as simulated_fleet
from raytune_eagle.spec import Spec

Listener = Callable[[Event], None]
LOCAL = "local"
_RAY_START_S = 120.0
# Removes what a killed run left; a folder in use is held open by its guard's pid file.
_PREFIX = "rte-"


@contextmanager
def open_fleet(spec: Spec, where: str, nodes: int, on_event: Listener) -> Iterator[Fleet]:
    """The nodes of a study; on exit nothing that was started for them is left.

    Args:
        spec: its node and engine settings.
        where: ``local`` starts a Ray here with `nodes` nodes; ``auto`` joins the one that runs; ``simulated:…`` needs
            none (see `raytune_eagle.simulation`); else its address.
        nodes: how many local or simulated nodes.
        on_event: called with every event of a trial.

    Raises:
        SpecError: this machine cannot carry so many nodes.
        NodeError: Ray did not start, or cannot be reached.
    """
    if where.startswith(SIMULATED):
        yield simulated_fleet(spec, where, nodes)
    elif where == LOCAL:
        with local_ray_of(spec, nodes) as (address, folder):
            yield from _join(spec, address, _local_engines(spec, nodes, folder), folder, on_event)
    else:
        yield from _join(spec, where, {}, None, on_event)


def _join(
    spec: Spec, address: str, engines: dict[str, Settings], folder: Path | None, on_event: Listener
) -> Iterator[Fleet]:
    os.environ.update(local_ray.environment_for(address))
    nodes_ray = importlib.import_module("raytune_eagle.nodes.ray")  # after the environment: Ray reads it once
    shared = not spec.node.gpus and any(settings.cores for settings in engines.values())
    turns = FileTurns(str(folder)) if shared else FreeForAll()
    make = partial(make_engine, engines, node_settings(spec))
    setup = Setup(spec.name, make, turns, spec.node.grace_s, spool=folder is None)
    fleet: Fleet = nodes_ray.RayFleet(address, setup, spec.node.gpus, on_event)
    try:
        yield fleet
    finally:
        fleet.close()


def live_nodes(where: str) -> list[tuple[str, str, int, str, float, str, int | None, str]]:
    """What each node of a running cluster does now; see `report.console.live_table`, and those put aside by a study."""
    os.environ.update(local_ray.environment_for(where))
    joining = importlib.import_module("raytune_eagle.nodes.joining")
    rows = []
    for view in joining.look(where):
        study, number = (view.job.study, view.job.number) if view.job else ("", None)
        rows.append((view.name, view.address, view.gpus, view.state, view.since, study, number, view.detail))
    return rows


def make_engine(engines: dict[str, Settings], otherwise: Settings, name: str) -> Engine:
    """Engine of the node of this name; called on that node."""
    settings = engines.get(name, otherwise)
    return SglangEngine(settings)


def node_settings(spec: Spec) -> Settings:
    """How a node of this study launches, unless it shares its machine."""
    return Settings(
        work_dir=Path(tempfile.gettempdir()) / f"raytune-eagle-{os.getuid()}",
        python=spec.engine.python,
        start_stall_s=spec.engine.start_stall_s,
        start_timeout_s=spec.engine.start_timeout_s,
        gpus=spec.node.gpus,
        only_draft=spec.engine.draft[0] if len(spec.engine.draft) == 1 else None,
    )


def _local_engines(spec: Spec, nodes: int, folder: Path) -> dict[str, Settings]:
    """Disjoint cores for each; a node that has the machine to itself takes all."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // nodes
    slices = [tuple(cores[i * share : (i + 1) * share]) if nodes > 1 else None for i in range(nodes)]
    base = replace(node_settings(spec), work_dir=folder / "logs")
    return {local_ray.node_name(i): replace(base, cores=slices[i]) for i in range(nodes)}


def check_local(spec: Spec, nodes: int) -> None:
    """Raise `SpecError` when this machine cannot carry so many nodes."""
    cores, gpus = len(os.sched_getaffinity(0)), gpu_count()
    if nodes > cores:
        raise SpecError(
            f"--nodes {nodes}: this machine has {cores} cores, and each node needs one: give at most {cores}"
        )
    needed = nodes * spec.node.gpus
    if needed > gpus:
        raise SpecError(
            f"node.gpus: {nodes} node(s) of {spec.node.gpus} GPUs need {needed}, this machine has {gpus}: "
            "use --cluster auto on a cluster that has them, or 0 GPUs with the CPU layer"
        )


@contextmanager
def local_ray_of(spec: Spec, nodes: int) -> Iterator[tuple[str, Path]]:
    """A Ray of our own under a guard: its processes and its folder go with us, however we go."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    ready, log_path = folder / "address", folder / "ray.log"
    argv = [sys.executable, "-m", local_ray.__name__, str(nodes), str(ready), str(spec.node.gpus)]
    env = {**os.environ, **local_ray.ENVIRONMENT, "RAY_TMPDIR": str(folder)}
    try:
        with log_path.open("wb") as log, Guarded(argv, env=env, stdout=log, grace_s=1.0, remove=[folder]) as guarded:
            yield _await_address(guarded, ready, log_path), folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the guard has done it already, unless it was killed


def _await_address(guarded: Guarded, ready: Path, log_path: Path) -> str:
    deadline = time.monotonic() + _RAY_START_S
    while not ready.exists():
        if guarded.poll() is not None or time.monotonic() > deadline:
            tail = log_path.read_text(errors="replace").strip()[-2000:]
            raise NodeError(f"the local Ray did not start; its last words:\n{tail}")
        time.sleep(0.05)
    return ready.read_text()
