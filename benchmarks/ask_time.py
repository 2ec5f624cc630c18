"""CPU seconds that the next proposal takes when 500 launches over 174,150 points are known.

    python benchmarks/ask_time.py            # 10 asks of each sampler, Optuna's GP 2
    python benchmarks/ask_time.py --quick    # 3 asks, no GP: under a minute

Every sampler is told the same launches of random points (seed 0); each ask is answered before the next. The first ask
stands apart: there two-factor learns its variances, as it does again after each tenth more launches. Needs numpy, scipy
and optuna; torch for Optuna's GP. One thread. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # CPU seconds, not those of idling threads

import numpy as np
import optuna

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from search_methods import METHODS, missing
from surfaces import SETTINGS, SHAPES, surface

TOLD = 500
SAMPLERS = ("two-factor", "tpe flat", "tpe conditional", "gp flat")
ASKS, GP_ASKS = 10, 2
BAR_S = 0.5


def asks(method: str, told: int, count: int) -> list[float]:
    """CPU seconds of each of `count` asks after `told` launches of random points."""
    truth, rng = surface(0), np.random.default_rng(17)
    ask, tell = METHODS[method](0, truth)

    def launch() -> tuple[float, object]:
        began = time.process_time()
        handle, shape, setting = ask()
        spent = time.process_time() - began
        tell(handle, shape, setting, truth.launch(shape, setting, rng))
        return spent, handle

    trial = launch()[1]
    assert isinstance(trial, optuna.Trial)
    study, sampler = trial.study, trial.study.sampler
    study.sampler = optuna.samplers.RandomSampler(seed=0)
    while len(study.get_trials(deepcopy=False)) < told:
        launch()
    study.sampler = sampler
    return [launch()[0] for _ in range(count)]


def main() -> None:
    """Time each sampler and print the figures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="3 asks of each, no Optuna GP")
    quick = options.parse_args().quick
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    found: dict[str, float] = {}
    print(f"{TOLD} launches told, {len(SHAPES) * len(SETTINGS):,} points; CPU seconds of an ask")
    print(f"{'sampler':16} {'asks':>4} {'first':>8} {'median':>8} {'slowest':>8} {'two-factor over it':>19}")
    for name in SAMPLERS:
        gp = name.startswith("gp")
        if name in missing() or (gp and quick):
            print(f"NOT RUN: {name} ({missing().get(name, 'left out by --quick')})")
            continue
        first, *later = asks(name, TOLD, 1 + (GP_ASKS if gp else 3 if quick else ASKS))
        found[name] = statistics.median(later)
        over = found["two-factor"] / found[name]
        print(f"{name:16} {len(later):4d} {first:8.3f} {found[name]:8.3f} {max(later):8.3f} {over:19.2f}", flush=True)
    own = found["two-factor"]
    print(json.dumps({"ask_s": round(own, 4), "bar_s": BAR_S, "met": own <= BAR_S, "told": TOLD, "median_s": found}))


if __name__ == "__main__":
    main()
