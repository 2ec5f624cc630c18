"""Is this server really doing what its configuration says? A name, a verdict and a reason for each thing looked at.

SGLang starts silently with the wrong algorithm, another draft class, fewer draft tokens or without its graphs, and NCCL
ignores what it does not like. So nothing is believed that the running server can be asked, that its log tells, or that
its answers show:

======================== ======== ======================================================================================
gate                     at worst what it looks at
======================== ======== ======================================================================================
algorithm                fails    EAGLE3 runs where it was asked for, and nothing where plain decoding was
draft_class              fails    the class that loaded the draft is an Eagle3 one
accept_len               fails    more than 1.05 tokens per verify round, the prefill's left out, at each concurrency
text                     fails    greedy answers begin as plain decoding's do (`judged`)
repetition               fails    answers do not repeat themselves, or no more often than plain decoding's (`judged`)
simulated                warns    acceptance is the draft's own, not pinned; where it is, text is not judged
resolved_args            warns    what runs is what was asked
captured_batch           warns    CUDA graphs were captured for as many streams as are measured
max_running_requests     warns    the server runs as many requests at once as are measured (default with EAGLE3: 48)
cuda_graph               warns    batches were decoded with graphs where those are enabled
nccl_path                warns    decoding goes through NCCL where its settings are tuned
nccl_knobs               warns    NCCL took each setting as given, and chooses as told (needs NCCL_DEBUG=INFO)
context                  warns    prompts and answers fit the contexts of target and draft
tokens                   fails    the server counts its tokens (warns where it does not), and none that cannot be
requests                 warns    no request failed
passes                   warns    passes come one after the other and are long enough to say something
stable                   warns    throughput is known as precisely as asked for; else the cause, where one is seen
prefix_cache             warns    prompts are not known to the server from the pass before (`standing`)
======================== ======== ======================================================================================

A gate *fails* a trial whose figures would be believed for what they are not: a draft that guesses nothing, or text that
is not the model's. It *warns* where the launch command, pasted, gives just these figures all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from raytune_eagle.errors import GateError
from raytune_eagle.gates.base import LEAST_ACCEPT_LEN, Seen, looked
from raytune_eagle.gates.baseline import against, repetition
from raytune_eagle.gates.bench import after, draft_that_guesses_nothing, prefix_cache
from raytune_eagle.gates.nccl import on_path, took
from raytune_eagle.gates.server import arguments, capacity, mistaken_draft
from raytune_eagle.model.config import Config
from raytune_eagle.model.measurement import Gate, Request
from raytune_eagle.model.trial import Completed, Failed

__all__ = ["LEAST_ACCEPT_LEN", "Seen", "after", "before", "early", "enforce", "judged", "standing"]


def before(seen: Seen) -> tuple[Gate, ...]:
    """What can be known before a bench is spent."""
    return looked(seen, arguments, capacity, on_path, took)


def standing(seen: Seen) -> tuple[Gate, ...]:
    """What can be said of a server that somebody else started, after a bench."""
    return (*looked(seen, mistaken_draft, capacity), *after(seen), repetition(seen.requests), *prefix_cache(seen))


def early(config: Config) -> Callable[[Sequence[Request]], None]:
    """Fails a trial after its warm-up, if its draft guesses nothing: the passes would take minutes and say the same."""

    def look(warm_up: Sequence[Request]) -> None:
        if config.speculative:
            enforce(draft_that_guesses_nothing(warm_up))

    return look


def enforce(gates: Iterable[Gate]) -> None:
    """Raise `GateError` for the first that failed; it carries all of them."""
    found = tuple(gates)
    for gate in found:
        if gate.verdict == "failed":
            raise GateError(gate.name, gate.detail, found)


def judged(outcome: Completed, baseline: Completed | None, temperature: float) -> Completed | Failed:
    """The outcome with the gates that hold it beside plain decoding on its node; failed if one of them is.

    `baseline` is None for plain decoding itself, and where there is none yet.
    """
    if any(gate.name == "simulated" for gate in outcome.gates):
        return outcome
    gates = against(outcome, baseline, temperature)
    outcome = outcome.model_copy(update={"gates": (*outcome.gates, *gates)})
    bad = next((gate for gate in gates if gate.verdict == "failed"), None)
    if bad is None:
        return outcome
    kept = {name: getattr(outcome, name) for name in ("requests", "gates", "server", "phases", "server_log")}
    return Failed(failure_class=bad.name, failure_phase=GateError.phase, failure_detail=bad.detail, **kept)
