"""Gates on what the bench showed: tokens per verify round, graphs, lengths, failed requests, steadiness."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from raytune_eagle.figures import counted
from raytune_eagle.gates.base import (
    LEAST_ACCEPT_LEN,
    LOW_SHARE,
    Seen,
    draft_folder,
    failed,
    looked,
    passed,
    unknown,
    warned,
)
from raytune_eagle.gates.server import captured_batches
from raytune_eagle.gates.steadiness import cause
from raytune_eagle.logs import decode_lines
from raytune_eagle.model.measurement import Gate, Request

_MOST_WITHOUT_GRAPH = 0.5
_SHORT_S = 2.0
"""Three passes of 0.6 s on two H200s gave 1336 and 1826 tok/s for one point, each within 2 % from pass to pass."""
KNOWN_PROMPTS = "from the second pass on it knows the prompts, and times to first token are those of known ones"
_FEW_ROUNDS = 4
"""Of an answer: the last is cut where the answer ends, so that answers of 2 tokens would show 1.0 for any draft."""
_ROUNDS = 200
"""Verify rounds from which a warm-up is believed: a draft of 1.2 gives 1.05 in fewer than 1 of 10,000."""


def after(seen: Seen) -> tuple[Gate, ...]:
    """What only the bench shows."""
    return looked(seen, _accept_len, _cuda_graph, _context, _tokens, _requests, _passes, _stable)


def _accept_len(seen: Seen) -> Iterator[Gate]:
    """Of each concurrency; from the server's log where its answers do not tell (OpenAI's format before 0.5.20)."""
    if seen.config.speculative is None:
        return
    levels, rows = [m.concurrency for m in seen.measurements], counted(seen.requests)
    found = {level: per_round(row for row in rows if row.concurrency == level) for level in levels}
    lengths = {level: length for level, length in found.items() if length is not None}
    if not lengths and (logged := logged_accept_len(seen.log)) is not None:
        lengths = {seen.streams: logged}
    low = [f"{length:.2f} at {streams}" for streams, length in lengths.items() if length <= LEAST_ACCEPT_LEN]
    if not lengths:
        yield unknown("accept_len", f"the server tells no verify rounds, or fewer than {_FEW_ROUNDS} of an answer")
    elif low:
        yield _guesses_nothing(", ".join(low))
    elif min(lengths.values()) < (least := 1 + LOW_SHARE * min(3, seen.config.speculative.num_steps)):
        yield warned(
            "accept_len",
            f"{min(lengths.values()):.2f} tokens per verify round are few ({least:.2f} and more are usual): see if the "
            "captured layers in the draft's eagle_config are those of its training, and if prompts are as its own were",
        )
    else:
        yield passed("accept_len")


def _guesses_nothing(lengths: str) -> Gate:
    why = (
        "the draft guesses nothing: it was trained for another target, its captured layers (eagle_config) are not "
        "those of its training, or the algorithm is not EAGLE3"
    )
    return failed("accept_len", f"tokens per verify round and streams: {lengths}: {why}")


def draft_that_guesses_nothing(warm_up: Sequence[Request]) -> Iterator[Gate]:
    """The gate that failed, if a warm-up is long enough to say so."""
    told = [row for row in warm_up if row.error is None and row.verify_rounds]
    length = per_round(told)
    if length is not None and length <= LEAST_ACCEPT_LEN and sum(row.verify_rounds or 0 for row in told) >= _ROUNDS:
        yield _guesses_nothing(f"{length:.2f} at {told[0].concurrency} in the warm-up")


def per_round(rows: Iterable[Request]) -> float | None:
    """Tokens that one verify round gives, the target's own among them; None where nothing tells.

    Not the recorded accept_len: the first token of an answer comes from the prefill, which is no round (SGLang 0.5.20,
    ``req.spec_verify_ct`` in batch_result_processor.py), so that N tokens of a draft that guesses nothing make
    N / (N - 1). Drafts accepted are told by round, those that the end of an answer cut off among them; where they are
    not, tokens behind the first are counted. In 18,000 kept answers (0.5.16, 0.5.20) tokens are one, the rounds and the
    drafts accepted, less what was cut off.
    """
    told = [row for row in rows if row.verify_rounds]
    rounds = sum(row.verify_rounds or 0 for row in told)
    if told and all(row.accept_histogram for row in told):
        drafts = sum(accepted * times for row in told for accepted, times in enumerate(row.accept_histogram))
        return 1 + drafts / sum(sum(row.accept_histogram) for row in told)
    if rounds < _FEW_ROUNDS * len(told) or not told:
        return None
    return (sum(row.completion_tokens for row in told) - len(told)) / rounds


def logged_accept_len(log: str) -> float | None:
    """Mean of the decode lines, weighted by their requests; None where they do not say."""
    told = [(line.accept_len, line.running) for line in decode_lines(log) if line.accept_len and line.running]
    weight = sum(running for _, running in told)
    return sum(length * running for length, running in told) / weight if weight else None


def _cuda_graph(seen: Seen) -> Iterator[Gate]:
    if not captured_batches(seen):
        return
    told = [line.cuda_graph for line in decode_lines(seen.log) if line.running and line.cuda_graph is not None]
    without = told.count(False)
    if not told:
        yield unknown("cuda_graph", "no decode line says whether a graph was used")
    elif without > _MOST_WITHOUT_GRAPH * len(told):
        detail = f"{without} of {len(told)} decode lines without a graph, though graphs are enabled: see captured_batch"
        yield warned("cuda_graph", detail)
    else:
        yield passed("cuda_graph")


def _context(seen: Seen) -> Iterator[Gate]:
    """Past its context a draft guesses badly; past the target's SGLang refuses the prompt."""
    prompts = {row.prompt_id: row.prompt_tokens for row in seen.requests if row.prompt_tokens}
    limits: dict[str, int | None] = {"the target's": seen.number("context_length")}
    if seen.config.speculative:
        draft = draft_folder(seen)
        limits["the draft's"] = draft.context if draft else None
    found = []
    for whose, limit in limits.items():
        if limit and (longer := [n for n in prompts.values() if n + seen.workload.max_new_tokens > limit]):
            found.append(
                f"{len(longer)} of {len(prompts)} prompts with their answers are longer than {whose} context of "
                f"{limit} tokens (the longest: {max(longer)} + {seen.workload.max_new_tokens})"
            )
    if found:
        yield warned("context", "; ".join(found))
    elif prompts:
        yield passed("context")


def _tokens(seen: Seen) -> Iterator[Gate]:
    """Whether the server counts its tokens (`Request.prompt_tokens` is 0 where it does not), and its counts can be."""
    rows = [row for row in seen.requests if row.error is None]
    if wrong := next(_miscounted(seen, rows), ""):
        yield failed("tokens", wrong)
    elif not all(row.prompt_tokens for row in rows):
        yield warned("tokens", "the server gives no usage: chunks are counted, too few tokens where one brings several")
    elif rows:
        yield passed("tokens")


def _miscounted(seen: Seen, rows: Sequence[Request]) -> Iterator[str]:
    """Counts that cannot be.

    A verify round gives at most the drafted path and one token more, the first token of an answer is the prefill's, and
    the last round may go beyond what was asked for (0.5.20 cuts that off: ``finished_len``, batch_result_processor.py).
    """
    most, steps = seen.number("speculative_num_draft_tokens"), seen.number("speculative_num_steps")
    each = max(most, (steps or 0) + 1) if seen.config.speculative and most else None
    asked = seen.workload.max_new_tokens
    if over := [row.completion_tokens for row in rows if row.completion_tokens > asked + (each or 0)]:
        yield f"{len(over)} of {len(rows)} answers have more tokens than asked for: {max(over)}, not {asked}"
    rounds = [(row.completion_tokens, row.verify_rounds) for row in rows if each and row.verify_rounds]
    if each and (fast := [(tokens, count) for tokens, count in rounds if tokens > count * each + 1]):
        told = f"{fast[0][0]} in {fast[0][1]} verify rounds of at most {each}"
        yield f"{len(fast)} of {len(rows)} answers have more tokens than can be: {told}"
    told_least = [(row.completion_tokens, row.least_tokens) for row in rows if row.least_tokens is not None]
    if few := [(tokens, least) for tokens, least in told_least if tokens < least]:
        tokens, least = min(few, key=lambda pair: pair[0] / pair[1])
        yield (
            f"{len(few)} of {len(rows)} answers have fewer tokens than came: {tokens}, says the server's usage, where "
            f"{least} chunks with text or token ids came"
        )


def prefix_cache(seen: Seen) -> Iterator[Gate]:
    """SGLang and vLLM have one unless told otherwise; what others have cannot be asked."""
    sglang, vllm = (seen.info.get(name) for name in ("disable_radix_cache", "enable_prefix_caching"))
    if sglang is False or vllm is True:
        without = "--disable-radix-cache" if sglang is False else "--no-enable-prefix-caching"
        yield warned(
            "prefix_cache",
            f"the server has a prefix cache: {KNOWN_PROMPTS}; launch it with {without} to measure prefill",
        )


def fewer_prompts(prompts: int, streams: int) -> str:
    """Why passes do not come one after the other; empty where they do."""
    few = f"{prompts} prompts are fewer than the {streams} streams: passes run at the same time"
    return few if prompts < streams else ""


def _passes(seen: Seen) -> Iterator[Gate]:
    prompts, found = len(seen.workload.prompts), []
    for m in seen.measurements:
        spans = [
            (row.started_s, row.started_s + row.latency_s)
            for row in seen.requests
            if row.concurrency == m.concurrency and row.repeat >= 0
        ]
        if few := fewer_prompts(prompts, m.concurrency):
            found.append(few)
        elif spans and (lasted := max(end for _, end in spans) - min(start for start, _ in spans)) < _SHORT_S:
            found.append(f"all passes at {m.concurrency} took {lasted:.1f} s")
    if found:
        yield warned("passes", f"{'; '.join(found)}: too little to trust its interval; give more prompts or tokens")
    elif seen.measurements:
        yield passed("passes")


def _requests(seen: Seen) -> Iterator[Gate]:
    rows = [row for row in seen.requests if row.repeat >= 0]
    errors = [row.error for row in rows if row.error]
    if errors:
        yield warned("requests", f"{len(errors)} of {len(rows)} requests failed, for example: {errors[0]}")
    else:
        yield passed("requests")


def _stable(seen: Seen) -> Iterator[Gate]:
    """One line for all concurrencies that are not known as precisely as asked for."""
    found = []
    for m in seen.measurements:
        if not m.stable:
            width = (m.ci_high - m.ci_low) / 2 / m.output_throughput if m.output_throughput else 0.0
            found.append(f"±{width:.1%} at {m.concurrency} after {m.passes} passes: {_cause(seen, m.concurrency)}")
    yield warned("stable", "; ".join(found)) if found else passed("stable")


def _cause(seen: Seen, concurrency: int) -> str:
    rows = [row for row in seen.requests if row.concurrency == concurrency]
    return cause(rows, [sample for sample in seen.samples if sample.concurrency == concurrency])
