"""What the rules accept starts and generates, what they refuse does not: asked of the real SGLang on the CPU.

    python benchmarks/rules_cpu.py [--seconds 280]

50 random launches of a space wider than any study's, 40 that the rules accept and 10 that they refuse, each from an
empty machine: a server is started and asked for 24 tokens of four prompts at once. About 12 s each on a quiet machine
of two cores. It goes on where it stopped; every answer is a line of tests/assets/rules/cpu_launches.jsonl, which
tests/test_rules_launches.py holds against the rules of the day. The draws are seeded: `--again` asks for all anew.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from raytune_eagle import rules
from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.sglang import RunningServer, SglangEngine
from raytune_eagle.errors import LaunchError, RaytuneEagleError
from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.trial import Job
from raytune_eagle.model.workload import Workload

KEPT = Path(__file__).parent.parent / "tests/assets/rules/cpu_launches.jsonl"
ACCEPTED, REFUSED, MOST_PER_RULE = 40, 10, 3
FACTS = rules.Assumptions(gpus=0, mla=False, amx=False, most_draft_tokens=None)
ARGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max-total-tokens": 16384,
    "mem-fraction-static": 0.3,
    "random-seed": 0,
    "skip-server-warmup": True,
    "sleep-on-idle": True,
}
FLAGS: dict[str, tuple[Any, ...]] = {
    "attention-backend": ("torch_native", "intel_amx", "flex_attention"),
    "page-size": (1, 16, 32, 48),
    "chunked-prefill-size": (-1, 512, 1000, 2048),
    "max-running-requests": (8, 48),
    "enable-mixed-chunk": (True,),
    "disable-overlap-schedule": (True,),
    "disable-radix-cache": (True,),
    "disable-cuda-graph": (True,),
    "sampling-backend": ("pytorch",),
    "schedule-policy": ("fcfs", "lpm"),
    "stream-interval": (1, 4),
    "num-continuous-decode-steps": (4,),
    "disable-custom-all-reduce": (True,),
    "pp-size": (1, 2),
    "enable-deterministic-inference": (True,),
}
PROMPTS = ("import os\n", "def add(a, b):\n", "class Point:\n", "for i in range(10):\n")


def drawn(seed: int = 0) -> Iterator[tuple[Config, rules.Judgement]]:
    """Launches in the order of their asking: 40 accepted and 10 refused, of each rule at most three."""
    chance, refusals = random.Random(seed), Counter[str]()
    accepted = refused = 0
    while accepted < ACCEPTED or refused < REFUSED:
        config = _one(chance)
        judgement = rules.judge(config, FACTS)
        if judgement.canonical is not None:
            accepted += 1
            if accepted <= ACCEPTED:
                yield config, judgement
            continue
        why = next(f.rule for f in judgement.findings if f.verdict == "invalid")
        if refused < REFUSED and refusals[why] < MOST_PER_RULE:
            refusals[why] += 1
            refused += 1
            yield config, judgement


def _one(chance: random.Random) -> Config:
    steps, topk, tokens = chance.randint(1, 8), chance.choice((1, 2, 4, 8)), chance.randint(2, 40)
    flags = {name: chance.choice(FLAGS[name]) for name in chance.sample(tuple(FLAGS), chance.randint(0, 4))}
    draft = Speculative(draft="builtin:tiny", num_steps=steps, eagle_topk=topk, num_draft_tokens=tokens)
    launcher = ("python3", "-m", "raytune_eagle.engines.cpu")
    return Config(model="builtin:tiny", speculative=draft, args=ARGS, tuned_args=flags, launcher=launcher)


def asked(engine: SglangEngine, number: int, config: Config) -> dict[str, Any]:
    """Whether it started and generated, and what was in the way."""
    job = Job(study="rules", number=number, kind="trial", config=config, workload=Workload(prompts=()))
    began = time.monotonic()
    answer: dict[str, Any] = {"generated": True, "detail": ""}
    try:
        with engine.serve(job, lambda *_: None) as server:
            _generate(server)
    except LaunchError as error:
        answer = {"generated": False, "detail": str(error)[:200]}
    except (RaytuneEagleError, OSError, ValueError) as error:
        answer = {"generated": False, "detail": f"{type(error).__name__}: {error}"[:200]}
    return answer | {"seconds": round(time.monotonic() - began, 1)}


def _generate(server: RunningServer) -> None:
    """Four answers at once, each of 24 tokens; anything less is an error."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for count in pool.map(lambda text: _tokens(server, text), PROMPTS):
            if count != 24:
                raise ValueError(f"{count} tokens instead of 24")
    server.check()


def _tokens(server: RunningServer, text: str) -> int:
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    body = json.dumps({"text": text, "sampling_params": sampling}).encode()
    headers = {"Content-Type": "application/json", **server.headers}
    with urlopen(Request(f"{server.url}/generate", body, headers), timeout=60) as response:
        return int(json.load(response)["meta_info"]["completion_tokens"])


def main() -> int:
    """Ask until all are answered or the time is over; 1 when an answer and the rules disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no launch after so long")
    parser.add_argument("--again", action="store_true", help="forget the answers that are kept")
    options = parser.parse_args()
    if options.again:
        KEPT.unlink(missing_ok=True)
    rows = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    began, wrong = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        engine = SglangEngine(Settings(work_dir=Path(folder), start_stall_s=90, start_timeout_s=180))
        for number, (config, judgement) in enumerate(drawn()):
            if number >= len(rows) and time.monotonic() - began < options.seconds:
                rows.append(_row(number, config, judgement) | asked(engine, number, config))
                with KEPT.open("a") as kept:
                    kept.write(json.dumps(rows[-1]) + "\n")
                print(json.dumps(rows[-1]), flush=True)
    wrong = sum(row["generated"] != row["accepted"] for row in rows)
    print(f"{len(rows)} of {ACCEPTED + REFUSED} launches asked, {wrong} not as the rules say", file=sys.stderr)
    return 1 if wrong else 0


def _row(number: int, config: Config, judgement: rules.Judgement) -> dict[str, Any]:
    spec = config.speculative
    triple = [getattr(spec, name) for name in rules.SPECULATIVE_NAMES]
    refusals = [finding.rule for finding in judgement.findings if finding.verdict == "invalid"]
    return {"number": number, "triple": triple, "flags": config.tuned_args, "accepted": not refusals, "rules": refusals}


if __name__ == "__main__":
    sys.exit(main())
