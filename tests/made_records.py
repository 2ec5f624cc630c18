"""Records of a study as a store gives them back, made by hand."""

from __future__ import annotations

from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.measurement import Measurement, Request
from raytune_eagle.model.trial import Completed, Failed, TrialRecord

MEASURED = dict.fromkeys(Measurement.model_fields, 1) | {"stable": True}
TUNED = Speculative(draft="d", num_steps=3, eagle_topk=4, num_draft_tokens=12)
FAILURE = Failed(failure_class="oom", failure_phase="launch", failure_detail="no memory")


def figures(value: float, half: float, concurrency: int = 1) -> Measurement:
    """A throughput with its interval."""
    speed = {"output_throughput": value, "ci_low": value - half, "ci_high": value + half}
    return Measurement.model_validate(MEASURED | speed | {"concurrency": concurrency, "accept_len": 3.0})


def trial(number: int, value: float | None, half: float = 1.0, **changes: object) -> TrialRecord:
    """A searched launch on node n; None failed."""
    outcome = FAILURE if value is None else Completed(measurements=(figures(value, half),), requests=())
    fields = {
        "study": "s",
        "number": number,
        "kind": "trial",
        "node": "n",
        "key": "k",
        "config": Config(model="m", speculative=TUNED),
        "started_at": 0.0,
        "ended_at": 1.0,
        "outcome": outcome,
    }
    return TrialRecord.model_validate(fields | changes)


def plain(number: int, value: float, half: float = 1.0, **changes: object) -> TrialRecord:
    """A baseline launch."""
    return trial(number, value, half, **({"kind": "baseline", "key": "b", "config": Config(model="m")} | changes))


def requests(speed: dict[str, float], passes: int = 4) -> tuple[Request, ...]:
    """100 tokens per prompt at its speed, the passes a little apart."""
    return tuple(
        Request(
            concurrency=1,
            repeat=number,
            prompt_id=prompt,
            category="c",
            started_s=0.0,
            latency_s=100 / tokens_s * (1 + 0.01 * (number % 2)),
            completion_tokens=100,
        )
        for number in range(-1, passes)
        for prompt, tokens_s in speed.items()
    )
