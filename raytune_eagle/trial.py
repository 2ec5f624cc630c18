"""One trial: serve, gate, measure, gate again, put away. Runs wherever the node is."""

from __future__ import annotations

import gzip
import time
from contextlib import AbstractContextManager

from raytune_eagle import gates
from raytune_eagle.errors import LaunchError, NodeError, TrialError
from raytune_eagle.measure import MeasureResult, measure
from raytune_eagle.measure.early_end import Judge
from raytune_eagle.model.measurement import Gate, Request
from raytune_eagle.model.trial import HOPELESS, Completed, Failed, Job, Phases, ServerFacts
from raytune_eagle.ports import Engine, Progress, Server, Turns


def run_trial(engine: Engine, job: Job, progress: Progress, turns: Turns) -> Completed | Failed:
    """Serve a configuration, measure it and put it away.

    Raises:
        NodeError: the machine failed; its `outcome` holds what the trial had come to, if it was judged before.
    """
    serving = engine.serve(job, progress)
    began = time.monotonic()
    try:
        with turns.busy():
            began = time.monotonic()  # a neighbour's turn is not this launch
            server = serving.__enter__()
    except LaunchError as exc:
        return _failed(exc, ServerFacts(), Phases(launch_s=time.monotonic() - began))
    outcome: Completed | Failed | None = None
    try:
        outcome = _measure(server, job, progress, turns)
    finally:
        seconds = _put_away(serving, turns, outcome)
    return _with_teardown(outcome, seconds)


def _measure(server: Server, job: Job, progress: Progress, turns: Turns) -> Completed | Failed:
    phases = Phases(launch_s=server.launch_s, ready_s=server.ready_s)
    found: tuple[Gate, ...] = ()
    rows: tuple[Request, ...] = ()
    try:
        found = _passed(gates.before(_seen(server, job)), progress)
        with turns.quiet():
            result = measure(server, job.workload, progress, early=gates.early(job.config), judge=Judge(job.to_beat))
        phases, rows = _measured(phases, result), result.requests
        found += _passed(gates.after(_seen(server, job, result)), progress)
    except TrialError as exc:
        exc.server_log, exc.requests = exc.server_log or server.log(), exc.requests or rows
        _tell(exc.gates, "failed", progress)
        exc.gates = (*found, *exc.gates)
        return _failed(exc, server.facts, phases)
    return Completed(
        measurements=result.measurements,
        requests=result.requests,
        gates=(*found, *_hopeless(result)),
        server=server.facts,
        phases=phases,
        server_log=server.log(),
    )


def _hopeless(result: MeasureResult) -> tuple[Gate, ...]:
    return (Gate(name=HOPELESS, verdict="warning", detail=result.hopeless),) if result.hopeless else ()


def _seen(server: Server, job: Job, result: MeasureResult | None = None) -> gates.Seen:
    return gates.Seen(
        config=job.config,
        workload=job.workload,
        facts=server.facts,
        log=gzip.decompress(server.log()).decode(errors="replace"),
        measurements=result.measurements if result else (),
        requests=result.requests if result else (),
        samples=result.samples if result else (),
    )


def _passed(found: tuple[Gate, ...], progress: Progress) -> tuple[Gate, ...]:
    """The same, unless one failed; what the others warn of is told."""
    _tell(found, "warning", progress)
    gates.enforce(found)
    return found


def _tell(found: tuple[Gate, ...], verdict: str, progress: Progress) -> None:
    for gate in found:
        if gate.verdict == verdict:
            progress("gate", gate.line)


def _measured(phases: Phases, result: MeasureResult) -> Phases:
    return phases.model_copy(update={"warmup_s": result.warmup_s, "bench_s": result.bench_s})


def _put_away(serving: AbstractContextManager[Server], turns: Turns, outcome: Completed | Failed | None) -> float:
    """Stop the server and say how long it took; should the machine fail at that, the outcome goes with the error."""
    try:
        with turns.busy():
            began = time.monotonic()
            serving.__exit__(None, None, None)
            return time.monotonic() - began
    except NodeError as exc:
        raise NodeError(str(exc), exc.outcome or outcome) from exc


def _failed(exc: TrialError, facts: ServerFacts, phases: Phases) -> Failed:
    return Failed(
        failure_class=exc.failure_class,
        failure_phase=exc.phase,
        failure_detail=exc.detail,
        log_tail=exc.log_tail,
        requests=exc.requests,
        gates=exc.gates,
        server=facts,
        phases=phases,
        server_log=exc.server_log,
    )


def _with_teardown(outcome: Completed | Failed, seconds: float) -> Completed | Failed:
    return outcome.model_copy(update={"phases": outcome.phases.model_copy(update={"teardown_s": seconds})})
