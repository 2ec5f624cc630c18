"""What is tuned, measured and kept: frozen values that know how to spell themselves, and nothing else.

Times are seconds since the epoch where the name ends in ``_at``, durations in the unit that the name ends in
(``_s``, ``_ms``); throughput is output tokens per second over all streams together.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

FlagValue = bool | int | float | str | list[int | float | str] | None
"""One server flag: True is the bare flag, False and None leave it out, a list is several words."""

Kind = Literal["baseline", "trial", "confirm"]


class Value(BaseModel):
    """Base of all values here: frozen, and unknown fields are mistakes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Speculative(Value):
    """EAGLE-3 settings under SGLang's own names (``--speculative-…``).

    Only the exact algorithm ``EAGLE3`` captures the hidden states that the draft was trained on (an EAGLE-3 draft
    under ``EAGLE`` starts without a warning and accepts next to nothing), so no other can be expressed.
    """

    ALGORITHM: ClassVar[str] = "EAGLE3"

    draft: str
    num_steps: Annotated[int, Field(ge=1)]
    eagle_topk: Annotated[int, Field(ge=1)]
    num_draft_tokens: Annotated[int, Field(ge=2)]

    def argv(self) -> list[str]:
        """The five flags, in the order of SGLang's documentation."""
        return [
            "--speculative-algorithm",
            self.ALGORITHM,
            "--speculative-draft-model-path",
            self.draft,
            "--speculative-num-steps",
            str(self.num_steps),
            "--speculative-eagle-topk",
            str(self.eagle_topk),
            "--speculative-num-draft-tokens",
            str(self.num_draft_tokens),
        ]


def flag_words(flags: dict[str, FlagValue]) -> list[str]:
    """Spell flags (their names without dashes in front) as command-line words, in the order given."""
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, list):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(str(value))
    return words


class Config(Value):
    """One launch of ``sglang.launch_server``, whole but for its address: what a trial tries.

    Attributes:
        launcher: the interpreter and module that start the server.
        model: path, hub id or ``builtin:…``.
        args: server flags common to the study, by their own names without dashes in front.
        speculative: EAGLE-3 settings; None is plain decoding (the baseline).
        tuned_args: server flags of this configuration alone; they come last on the command line.
        env: environment of this launch beside the inherited one (NCCL_*, SGLANG_*, …).
    """

    model: str
    speculative: Speculative | None = None
    args: dict[str, FlagValue] = {}
    tuned_args: dict[str, FlagValue] = {}
    env: dict[str, str] = {}
    launcher: tuple[str, ...] = ("python3", "-m", "sglang.launch_server")

    def argv(self) -> list[str]:
        """Words after the launcher; host, port and key are the engine's to add."""
        speculative = self.speculative.argv() if self.speculative else []
        return ["--model-path", self.model, *flag_words(self.args), *speculative, *flag_words(self.tuned_args)]

    def command(self) -> str:
        """The launch as one line for a POSIX shell, environment first."""
        env = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*env, shlex.join([*self.launcher, *self.argv()])])

    @property
    def uid(self) -> str:
        """12 hex digits: equal for launches that are equal whatever the order of their flags."""
        # Not cached: a copy with changes would inherit it.
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2s(text.encode(), digest_size=6).hexdigest()


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
        request_timeout_s: a stream that takes longer counts as failed.
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
    output_throughput: float
    ci_low: float
    ci_high: float
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


class Phases(Value):
    """Seconds that the parts of a trial took; None for those not reached."""

    launch_s: float | None = None
    ready_s: float | None = None
    warmup_s: float | None = None
    bench_s: float | None = None
    teardown_s: float | None = None


class ServerFacts(Value):
    """What the running server said of itself, read from it and not from what was asked.

    Attributes:
        resolved_args: JSON object of its resolved arguments, secrets redacted; "{}" when it could not be asked.
        version: of SGLang; "" when unknown.
    """

    resolved_args: str = "{}"
    version: str = ""


HOPELESS = "hopeless"
"""Gate of a trial that was ended early: it could not be the best any more."""


class Completed(Value):
    """A trial that was measured: one `Measurement` per concurrency, or up to that at which it was found hopeless."""

    status: Literal["completed"] = "completed"
    measurements: tuple[Measurement, ...]
    requests: tuple[Request, ...]
    gates: tuple[Gate, ...] = ()
    server: ServerFacts = ServerFacts()
    phases: Phases = Phases()
    server_log: bytes = b""

    @property
    def hopeless(self) -> str:
        """Why it was not measured to its end; empty where it was."""
        return next((gate.detail for gate in self.gates if gate.name == HOPELESS), "")


class Failed(Value):
    """A trial without figures: its *configuration* failed, or it was lost with every machine that it ran on.

    Attributes:
        failure_class: a name from `raytune_eagle.logs`; of the gate that failed, with `failure_phase` ``gate``;
            ``node_lost`` with status ``lost``.
    """

    status: Literal["failed", "lost"] = "failed"
    failure_class: str
    failure_phase: str
    failure_detail: str
    log_tail: str = ""
    requests: tuple[Request, ...] = ()
    gates: tuple[Gate, ...] = ()
    server: ServerFacts = ServerFacts()
    phases: Phases = Phases()
    server_log: bytes = b""


Outcome = Annotated[Completed | Failed, Field(discriminator="status")]


class NodeFacts(Value):
    """What a node is.

    Attributes:
        hardware: one line, for example ``8x NVIDIA H200`` or ``1 core of Intel(R) Xeon(R)``.
        versions: of sglang, torch, nccl, driver, …, as far as they are there.
        gpu_ids: UUIDs of its GPUs, sorted; empty without GPUs and in records from before they were kept.
    """

    hardware: str = ""
    versions: dict[str, str] = {}
    gpu_ids: tuple[str, ...] = ()


class Best(Value):
    """The best launch so far at one concurrency, as the node that is told of it would have given it.

    Attributes:
        prompts: id, output tokens and seconds of each prompt, over as many passes for each.
    """

    concurrency: int
    output_throughput: float
    prompts: tuple[tuple[str, float, float], ...]


class Job(Value):
    """What a node is asked to do: one trial; it may end when it can no longer be better than `to_beat`."""

    study: str
    number: int
    kind: Kind
    config: Config
    workload: Workload
    to_beat: tuple[Best, ...] = ()


class TrialRecord(Value):
    """One finished trial, as it is kept.

    Attributes:
        number: of the launch in its study, from 0, over all kinds; it never comes twice.
        key: uid of the canonical form of the configuration; launches with one key are the same point.
        params: the searched parameters by column name; empty for a baseline.
        facts: of its node.
        speedup: output_throughput over that of the same node's baseline, by concurrency.
        matches_baseline: share of prompts whose text equals the baseline's, by concurrency.
        violations: constraints of the objective that it breaks, one line each.
    """

    study: str
    number: int
    kind: Kind
    node: str
    config: Config
    key: str
    params: dict[str, FlagValue] = {}
    started_at: float
    ended_at: float
    facts: NodeFacts = NodeFacts()
    outcome: Outcome
    speedup: dict[int, float] = {}
    matches_baseline: dict[int, float] = {}
    violations: tuple[str, ...] = ()

    @property
    def status(self) -> Literal["completed", "infeasible", "hopeless", "failed", "lost"]:
        """How it ended; ``infeasible``: measured, breaks a constraint; ``hopeless``: not measured to its end."""
        if not isinstance(self.outcome, Completed):
            return self.outcome.status
        if self.violations:
            return "infeasible"
        return "hopeless" if self.outcome.hopeless else "completed"


class Event(Value):
    """Something that happened to a study, a node or a trial.

    Attributes:
        name: for example ``study_started``, ``launch``, ``weights``, ``graph_capture``, ``ready``, ``pass``,
            ``trial_done``, ``node_lost``.
        detail: free text, or JSON for ``study_started`` (the spec).
    """

    at: float
    study: str
    name: str
    node: str | None = None
    number: int | None = None
    detail: str = ""
