"""A trial: what a node is asked to do, what comes of it, and how it is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytune_eagle.model import Value
from raytune_eagle.model.config import Config, FlagValue
from raytune_eagle.model.measurement import Gate, Measurement, Request
from raytune_eagle.model.workload import Workload

Kind = Literal["baseline", "trial", "confirm"]


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
        version: the server's; "" when unknown.
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
        failure_class: a name from `raytune_eagle.failures.classes`; of the gate that failed, with `failure_phase`
            ``gate``; ``node_lost`` with status ``lost``.
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
