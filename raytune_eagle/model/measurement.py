"""What is seen of a server that runs: its requests, the machine meanwhile, the figures, and whether they hold."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from raytune_eagle.model import Value


class Vitals(Value):
    """What a machine does at one moment, beside serving; None where nobody can tell.

    Attributes:
        other_cores: CPU cores kept busy by processes that are neither the server nor its client.
        clock_mhz: of the slowest of its GPUs (SM clock).
        temperature_c: of the hottest, degrees Celsius.
    """

    other_cores: float | None = None
    clock_mhz: float | None = None
    temperature_c: float | None = None


class Sample(Value):
    """Vitals during a pass; `repeat` as in `Request`, but counting from the first: the warm-up belongs to pass 0."""

    concurrency: int
    repeat: int
    vitals: Vitals


class Gate(Value):
    """One check of whether a server really does what its configuration says; see `raytune_eagle.gates`.

    Attributes:
        name: one word, for example ``accept_len``.
        verdict: *failed*: the figures are not what they claim to be, and the trial fails with this name as its
            failure class; *warning*: they stand, with what `detail` says; *unknown*: nothing told it.
        detail: what was found and, unless it passed, what to do.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    verdict: Literal["passed", "warning", "failed", "unknown"]
    detail: str = ""

    @property
    def line(self) -> str:
        """As one text: ``verdict name: detail``."""
        return f"{self.verdict} {self.name}" + (f": {self.detail}" if self.detail else "")

    @classmethod
    def of(cls, line: str) -> Self:
        """The gate that `line` spells."""
        head, _, detail = line.partition(": ")
        verdict, _, name = head.partition(" ")
        return cls.model_validate({"name": name, "verdict": verdict, "detail": detail})


class Request(Value):
    """One request as the client saw it.

    Attributes:
        repeat: the pass, from 0; -1 is the warm-up and -2 what kept the last streams company, which no figure counts.
        started_s: when it was sent, after the first request of its concurrency.
        ttft_s: to the first token; None when none came.
        completion_tokens: by the server's count.
        least_tokens: that it has for sure, whatever the server counts: ids that came, or else chunks that brought text.
            None where it is not whole, or is of a record older than this.
        verify_rounds: verify rounds of this request; None without speculation.
        accept_histogram: how many verify rounds accepted 0, 1, 2, … draft tokens.
        output_hash: 16 hex digits of the text; equal hashes are equal answers.
        prefix_hashes: 8 hex digits of its first 16, 64, 256, 1024 characters, as far as it goes beyond them; they tell
            how far two answers agree.
        compression: bytes of the text / bytes that zlib makes of it; above 5 it repeats itself. None for short texts.
        error: why it failed, else None.
    """

    concurrency: int
    repeat: int
    prompt_id: str
    category: str
    started_s: float
    latency_s: float
    ttft_s: float | None = None
    itl_p50_ms: float | None = None
    itl_p95_ms: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    least_tokens: int | None = None
    verify_rounds: int | None = None
    accept_histogram: tuple[int, ...] = ()
    output_hash: str | None = None
    prefix_hashes: tuple[str, ...] = ()
    compression: float | None = None
    error: str | None = None


class Measurement(Value):
    """Figures of one configuration at one concurrency, over all passes but the warm-up.

    Attributes:
        output_throughput, ci_low, ci_high: tokens per second and its 95 % interval (bootstrap over prompts and passes).
        stable: the interval came within the asked precision before `max_passes`.
        accept_len: completion tokens / verify rounds, bonus token included; None without speculation.
        accept_rate: accepted draft tokens / proposed draft tokens; None without speculation.
        cycle_ms: wall milliseconds per verify round and stream; without speculation, per token and stream.
        burst_throughput: tokens in the best one-second window.
    """

    concurrency: int
    passes: int
    output_throughput: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    ci_low: Annotated[float, Field(ge=0)]
    ci_high: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    stable: bool
    completion_tokens: int
    accept_len: float | None
    accept_rate: float | None
    verify_rounds: int | None
    cycle_ms: float
    burst_throughput: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    itl_p50_ms: float
    itl_p95_ms: float
    failed_share: float
