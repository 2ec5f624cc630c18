"""How often a launch that is ended early would have won, and what is saved, in simulated launches.

    python benchmarks/early_end.py                # 3,000 launches at each of three noises, about a minute

A launch's true speed over the best's is drawn around 0.92; launches, passes, prompts and single answers differ by what
each noise says. Each is judged as a node does it, and also measured to its end. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import NamedTuple

import numpy as np

from raytune_eagle.measure.early_end import Judge
from raytune_eagle.model.measurement import Request
from raytune_eagle.model.trial import Best

PROMPTS, PASSES, TOKENS = 32, 4, 256


class Noise(NamedTuple):
    """Standard deviations of logarithms: between launches, passes, answers, and of a prompt from server to server."""

    launch: float
    one_pass: float
    answer: float
    taste: float


NOISES = {
    "quiet": Noise(0.01, 0.01, 0.03, 0.03),
    "usual": Noise(0.02, 0.02, 0.05, 0.05),
    "loud": Noise(0.03, 0.05, 0.1, 0.1),
}


def bench(ratio: float, noise: Noise, concurrency: int, rng: np.random.Generator) -> list[Request]:
    """All answers of a launch, in the order in which they came."""
    easy = np.random.default_rng(7).normal(0, 0.3, PROMPTS)
    own = easy + rng.normal(0, noise.launch) + rng.normal(0, noise.taste, PROMPTS)
    rows = []
    for repeat in range(PASSES):
        logs = own + rng.normal(0, noise.one_pass) + rng.normal(0, noise.answer, PROMPTS)
        rows += [
            Request.model_construct(  # unchecked, or most of the time would go into checks
                concurrency=concurrency,
                repeat=repeat,
                prompt_id=f"p{prompt}",
                latency_s=TOKENS / (100 * ratio * float(np.exp(logs[prompt]))),
                completion_tokens=TOKENS,
                error=None,
            )
            for prompt in rng.permutation(PROMPTS)
        ]
    return rows


def speed(rows: list[Request]) -> float:
    """Tokens per second."""
    return rows[0].concurrency * sum(r.completion_tokens for r in rows) / sum(r.latency_s for r in rows)


def best_of(rows: list[Request]) -> Best:
    """As a study tells a node of its best launch."""
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row.prompt_id] = seconds.get(row.prompt_id, 0.0) + row.latency_s
    prompts = tuple((name, float(TOKENS * PASSES), known) for name, known in seconds.items())
    return Best(concurrency=rows[0].concurrency, output_throughput=speed(rows), prompts=prompts)


class Came(NamedTuple):
    """What came of a launch: whether it was ended, whether it would have won, and the share of answers that it took."""

    ended: bool
    won: bool
    share: float


def launch(noise: Noise, rng: np.random.Generator) -> Came:
    """One launch against one best launch."""
    concurrency = int(rng.choice([1, 4]))
    best = bench(1.0, noise, concurrency, rng)
    rows = bench(float(np.exp(rng.normal(np.log(0.92), 0.12))), noise, concurrency, rng)
    judge = Judge([best_of(best)])
    won = speed(rows) > speed(best)
    for count in range(1, len(rows)):
        if judge(rows[:count]):
            return Came(True, won, count / len(rows))
    return Came(False, won, 1.0)


def figures(noise: Noise, launches: int, seed: int = 0) -> dict[str, float]:
    """Of many launches: shares ended, wrong among the ended, of winners ended, and of answers saved."""
    rng = np.random.default_rng(seed)
    came = [launch(noise, rng) for _ in range(launches)]
    ended = [one for one in came if one.ended]
    return {
        "launches": launches,
        "ended": len(ended),
        "ended_that_would_have_won": sum(one.won for one in ended),
        "wrong_share": round(sum(one.won for one in ended) / max(1, len(ended)), 5),
        "answers_saved": round(1 - float(np.mean([one.share for one in came])), 3),
    }


def main() -> None:
    """Print a line for each noise, and JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--launches", type=int, default=3000)
    given = options.parse_args()
    found = {name: figures(noise, given.launches) for name, noise in NOISES.items()}
    for name, one in found.items():
        print(f"{name:6}", *(f"{key} {value}" for key, value in one.items()))
    print(json.dumps({"worst_wrong_share": max(one["wrong_share"] for one in found.values()), **found}))


if __name__ == "__main__":
    main()
