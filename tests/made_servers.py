"""What a server said of itself, for the gates: captured facts and lines of real servers, and readers of verdicts."""

from __future__ import annotations

import json
from pathlib import Path

from made import WORKLOAD

from raytune_eagle import gates
from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.trial import ServerFacts
from raytune_eagle.model.workload import Workload

SERVERS = Path(__file__).parent / "assets" / "servers"

READY = """[2026-11-29 18:10:23] Load weight begin. avail mem=131.87 GB
[2026-11-29 18:10:23] Load weight end. elapsed=0.26 s, type=LlamaForCausalLM, avail mem=130.69 GB, mem usage=1.18 GB.
[2026-11-29 18:10:23] Load weight begin. avail mem=130.46 GB
[2026-11-29 18:10:23] Load weight end. elapsed=0.02 s, type=LlamaForCausalLMEagle3, avail mem=130.44 GB
[2026-11-29 18:10:24] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=16, bs=[1, 2, 3, 4, 5, 6, 7, 8], avail mem=129.74 GB
[2026-11-29 18:11:05] Capture draft decode CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[1, 2, 4], avail mem=127.83 GB
"""  # noqa: E501

DECODE = (
    "[2026-11-29 18:11:44] Decode batch, #running-req: {}, #token: 91, token usage: 0.00, accept len: {:.2f}, "
    "accept rate: 0.17, cuda graph: {}, gen throughput (token/s): 836.93, #queue-req: 0\n"
)

INFO_LINE = "node:1:2 [0] NCCL INFO {}\n"

EAGLE3 = Speculative(draft="builtin:tiny", num_steps=3, eagle_topk=4, num_draft_tokens=16)


def seen(server="0516_h200_eagle3", log=READY, *, streams=1, info=(), speculative=EAGLE3, outcome=None, **config):
    """A captured server, asked for what the arguments say."""
    facts = json.loads((SERVERS / f"{server}.json").read_text()) | dict(info)
    return gates.Seen(
        config=Config(model="builtin:tiny", speculative=speculative, **config),
        workload=Workload(prompts=WORKLOAD.prompts, concurrency=(1, streams) if streams > 1 else (1,)),
        facts=ServerFacts(resolved_args=json.dumps(facts)),
        log=log,
        measurements=outcome.measurements if outcome else (),
        requests=outcome.requests if outcome else (),
    )


def verdicts(found):
    """By name."""
    return {gate.name: gate.verdict for gate in found}


def detail(found, name):
    """What the gate of this name says."""
    return next(gate.detail for gate in found if gate.name == name)


TOOK = INFO_LINE.format("NCCL_PROTO set by environment to LL.") + INFO_LINE.format(
    "NCCL_NTHREADS set by environment to 96"
)
