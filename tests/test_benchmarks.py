"""The benchmarks start, and those that no other test asks give figures on little."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if "\nif __name__ ==" in path.read_text(encoding="utf-8"))

pytestmark = pytest.mark.slow  # a process of its own for each


def started(script, *words):
    """What it prints."""
    command = [sys.executable, str(FOLDER / script), *words]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_starts_and_says_how_it_is_called(script):
    """Its imports are there, and `--help` shows its options and what it measures."""
    shown, told = started(script, "--help"), (FOLDER / script).read_text(encoding="utf-8").split('"""')[1]
    assert f"usage: {script} [-h]" in shown
    assert told.split()[:4] == shown.partition("\n\n")[2].split()[:4]


def test_a_map_is_searched():
    """One seed of each sampler over the shipped map: a number of launches that its points allow."""
    last = json.loads(started("search_map.py", "results/study=tiny-cpu-map", "--seeds", "1").splitlines()[-1])
    assert 1 <= last["map_launches"] <= 44
    assert {"two-factor", "random", "tpe", "gp"} <= set(last["samplers"])


def test_an_ask_is_timed():
    """CPU seconds of two asks after a few launches, by the benchmark's own function."""
    program = "import ask_time; print(ask_time.asks('two-factor', 8, 2))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=FOLDER, check=True, capture_output=True, text=True, timeout=200
    )
    spent = json.loads(done.stdout)
    assert len(spent) == 2
    assert all(0 < seconds < 60 for seconds in spent)
