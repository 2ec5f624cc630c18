"""A long study of the whole command: 64 simulated nodes, 2,000 trials of the Kimi space, and the driver's memory.

Answers have all the requests of a real launch (the cost model's), records go to disk as always, and `run` is the
program that users start. Its resident memory and the seconds per trial are read as trials come in; the last line is
JSON. Exit 1 if the budget was not met or memory grew by more than `FLAT` from trial 500 to the last.

    python benchmarks/soak.py [--nodes 64] [--trials 2000]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "search_spaces" / "kimi_k25_8gpu.yaml"
FLAT = 1.2
"""Memory at the end over that at trial 500."""
STEP = 250
MIB = 1 << 20


def spec_in(folder: Path) -> Path:
    """The Kimi space with NCCL searched, and with a sampler whose own cost does not grow."""
    tree = yaml.safe_load(SPEC.read_text(encoding="utf-8"))
    tree["engine"]["args"]["enforce-disable-flashinfer-allreduce-fusion"] = True
    tree |= {"name": "soak", "search": {"sampler": "random"}, "budget": {"trials": 1, "hours": 100_000}}
    path = folder / "soak.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def soak(nodes: int, trials: int, folder: Path) -> list[tuple[int, float, float]]:
    """Launches with speculation, seconds since the start, resident MiB; every `STEP` launches and at the end."""
    words = [sys.executable, "-m", "raytune_eagle", "run", spec_in(folder), "--cluster", "simulated:kimi-k25", "--json"]
    words += ["--nodes", nodes, "--trials", trials, "--results", folder / "results"]
    done, seen, began = 0, [], time.monotonic()
    run = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    process = psutil.Process(run.pid)
    for line in run.stdout or ():
        event = json.loads(line)
        one_more = event["name"] == "trial_started" and "--speculative-algorithm" in event["detail"]
        done += one_more
        if event["name"] == "study_done" or (one_more and done % STEP == 0):
            seen.append((done, time.monotonic() - began, process.memory_info().rss / MIB))
            print("{:5d} launches {:7.1f} s {:7.1f} MiB".format(*seen[-1]), flush=True)
    if run.wait() or not seen:
        sys.exit(f"run ended with {run.returncode}")
    return seen


def main() -> None:
    """Run it; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--trials", type=int, default=2000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rte-soak-") as folder:
        seen = soak(asked.nodes, asked.trials, Path(folder))
    (early, early_s, early_mib), (late, late_s, late_mib) = seen[len(seen) // 4], seen[-1]
    per_trial = 1000 * (late_s - early_s) / max(1, late - early)
    figures = {"launches": late, "mib_early": round(early_mib, 1), "mib_late": round(late_mib, 1)}
    print(json.dumps({**figures, "growth": round(late_mib / early_mib, 3), "ms_per_launch": round(per_trial, 2)}))
    sys.exit(late_mib > FLAT * early_mib)


if __name__ == "__main__":
    main()
