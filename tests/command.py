"""The command as a user runs it, and a small study to run it on."""

import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner
from made import WORKLOAD, completed, make_space, surface

from raytune_eagle.cli import main
from raytune_eagle.nodes.simulated import Answer, SimulatedFleet
from raytune_eagle.store import ParquetStore
from raytune_eagle.study import Study

ROOT = Path(__file__).parent.parent


def cli(*words, cwd=ROOT, check=None, timeout=120):
    """Run the installed command; returns the finished process."""
    done = subprocess.run(
        [sys.executable, "-m", "raytune_eagle", *map(str, words)],
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check is not None:
        assert done.returncode == check, done.stderr + done.stdout
    return done


def made_study(folder, respond=lambda node, job: Answer(completed(surface(job.config)), 60.0), **changes):
    """A small study in virtual time, kept as Parquet."""
    space, store = make_space(**changes), ParquetStore(str(folder))
    store.declare(space.spec.name, {d.column: d.kind for d in space.dimensions})
    study = Study(space, WORKLOAD, store)
    study.run(SimulatedFleet(["a", "b"], respond))
    return study


def invoked(*words):
    """The command in this process."""
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="raytune-eagle")
