"""Is a configuration that is measured twice ever called different from itself? A/A pairs on the real CPU server.

    python benchmarks/same_twice.py [--pairs 5] [--first 0]

Each pair is two launches of one configuration (the bundled tiny pair, EAGLE-3, one stream), compared as two
configurations are in a verdict: by prompts and passes (`raytune_eagle.statistics.compare`), with what launches are
expected to differ by (`launch_noise`). Odd pairs are compared the other way round. A pair takes about a minute;
`--first 2 --pairs 2` runs the third and the fourth alone. Printed: the ratio of each pair with its interval, and in
brackets the interval by the passes alone. Last line: one JSON object; `different` should be 0 of 5.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path

from raytune_eagle import specfile
from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.sglang import SglangEngine
from raytune_eagle.model.measurement import Request
from raytune_eagle.model.trial import Completed, Job
from raytune_eagle.model.workload import Workload
from raytune_eagle.nodes.turns import FreeForAll
from raytune_eagle.space import Space
from raytune_eagle.statistics import compare, launch_noise
from raytune_eagle.trial import run_trial
from raytune_eagle.workload import load_prompts

SPEC = Path(__file__).parent.parent / "search_spaces" / "tiny_cpu.yaml"
PROMPTS, PASSES = 8, 5


def launch(number: int, seed: int, folder: Path) -> tuple[Request, ...]:
    """Rows of one launch."""
    space = Space(specfile.load(SPEC))
    workload = Workload(
        prompts=load_prompts("builtin:tiny")[:PROMPTS],
        max_new_tokens=24,
        ignore_eos=True,
        min_passes=PASSES,
        max_passes=PASSES,
        seed=seed,
    )
    job = Job(study="aa", number=number, kind="trial", config=space.starts[0].config, workload=workload)
    outcome = run_trial(SglangEngine(Settings(work_dir=folder)), job, lambda *_: None, FreeForAll())
    assert isinstance(outcome, Completed), outcome
    return outcome.requests


def half_width(by_passes: float) -> float:
    """Half of an interval of the log of a ratio of two launches, given its half by the passes alone."""
    return math.hypot(by_passes, launch_noise(()).half_width(1, 1))


def main() -> None:
    """Run the pairs and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="number of the first pair")
    args = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(args.first, args.first + args.pairs):
            rows = [launch(2 * pair + side, pair, Path(folder)) for side in range(2)]
            ratio = compare(rows[pair % 2], rows[1 - pair % 2], seed=pair)
            low = ratio.value / math.exp(half_width(math.log(ratio.value / ratio.low)))
            high = ratio.value * math.exp(half_width(math.log(ratio.high / ratio.value)))
            different += low > 1 or high < 1
            print(
                f"pair {pair}: {ratio.value:.3f} ({low:.3f}-{high:.3f}) [{ratio.low:.3f}-{ratio.high:.3f}]", flush=True
            )
    print(json.dumps({"pairs": args.pairs, "different": different}))


if __name__ == "__main__":
    main()
