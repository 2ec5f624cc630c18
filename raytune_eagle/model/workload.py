"""What is sent to a server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raytune_eagle.model import Value


class Prompt(Value):
    """One prompt of a workload; `category` groups figures ("code", "chat", …)."""

    id: str
    category: str
    text: str


class Workload(Value):
    """What is sent to a server, and when a figure counts as known.

    Attributes:
        prompts: sent once each per pass, in a new seeded order each pass.
        max_new_tokens: tokens asked for per prompt.
        ignore_eos: go on past an end-of-sequence token, so that every answer has `max_new_tokens` tokens.
        chat: send each prompt as a user's message, in the model's own chat template, and not as it stands.
        concurrency: numbers of simultaneous streams, measured one after the other on one launch.
        precision: half-width of the 95 % interval of throughput, as a share of it, at which passes stop.
        min_passes, max_passes: passes over the prompts per concurrency, the warm-up not counted.
        request_timeout_s: a stream that brings no token for so long counts as failed. A steady one may take as much and
            half a second for each of `max_new_tokens`.
        max_failed_share: more failed requests than this share fail the trial.
        seed: of the orders.
    """

    prompts: tuple[Prompt, ...]
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    temperature: Annotated[float, Field(ge=0)] = 0.0
    ignore_eos: bool = False
    chat: bool = False
    concurrency: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    precision: Annotated[float, Field(gt=0, lt=1)] = 0.02
    min_passes: Annotated[int, Field(ge=1)] = 2
    max_passes: Annotated[int, Field(ge=1)] = 8
    request_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    max_failed_share: Annotated[float, Field(ge=0, le=1)] = 0.02
    seed: int = 0
