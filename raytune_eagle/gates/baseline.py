"""Gates that need plain decoding's answers beside them: is the text the model's own?

Speculation changes no text but by rounding: kernels for a batch of draft tokens add up in another order than those for
one token, and a close call between two tokens then falls the other way. On an H200 with SmolLM2-135M in bf16, 29 to
50 % of greedy answers of 128 tokens were plain decoding's to the last character, so about 0.7 % of tokens part; of
the first 16 tokens nine in ten answers are then the same. Text of a broken tree mask or of corrupted messages
(NCCL's LL128 where it is not supported) parts at once. So beginnings are compared, not whole answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from raytune_eagle.gates.base import failed, passed, unknown, warned
from raytune_eagle.model.measurement import Gate, Request
from raytune_eagle.model.trial import Completed

LOOPS = 5.0
"""`Request.compression` of an answer that repeats itself; prose and code of some hundred characters stay below 3.3."""
_MORE = 0.25
_LEAST_SAME = 0.5
_EXPECTED = 0.8
_BEGINNING = 1
"""Of `Request.prefix_hashes`: 64 characters, about 16 tokens."""
ENOUGH = 8
"""Prompts; a share of fewer says nothing."""
Answers = Mapping[tuple[int, str], Request]


def against(outcome: Completed, baseline: Completed | None, temperature: float) -> tuple[Gate, ...]:
    """Hold a trial's first answers beside those of plain decoding on the same node; both sides at `temperature`."""
    ours, plain = answers(outcome.requests), answers(baseline.requests) if baseline else {}
    gates = [_repetition(ours, plain)]
    if baseline and not temperature:
        gates.append(_text(ours, plain, itself=answers(baseline.requests, skip=1)))
    return tuple(gates)


def repetition(requests: Iterable[Request]) -> Gate:
    """Of answers with nothing beside them."""
    return _repetition(answers(requests), {})


def answers(requests: Iterable[Request], skip: int = 0) -> Answers:
    """Measured answer to each prompt, by concurrency and prompt: the first, or that after the `skip` first ones."""
    found: dict[tuple[int, str], list[Request]] = {}
    for row in requests:
        if row.repeat >= 0 and row.error is None:
            found.setdefault((row.concurrency, row.prompt_id), []).append(row)
    return {key: rows[skip] for key, rows in found.items() if len(rows) > skip}


def begins_alike(one: Request, other: Request) -> bool | None:
    """Whether two answers have their first 64 characters in common; None where this was not kept of one of them."""
    if one.output_hash == other.output_hash:
        return True
    if not one.prefix_hashes and not other.prefix_hashes:
        return None  # of a record from before they were kept, or answers of some letters
    both = [row.prefix_hashes[_BEGINNING] if len(row.prefix_hashes) > _BEGINNING else "" for row in (one, other)]
    return both[0] == both[1] != ""


def _text(ours: Answers, plain: Answers, itself: Answers) -> Gate:
    """As far as plain decoding agrees with itself, in batches of another make-up, it may be asked of others."""
    share, count = _alike(ours, plain)
    usual, counted = _alike(itself, plain)
    detail = f"{share:.0%} of {count} answers begin (64 characters) as plain decoding's do"
    if count < ENOUGH:
        return unknown("text", f"{detail}, too few to judge")
    if share < _LEAST_SAME * (usual if counted >= ENOUGH else 1.0):
        return failed("text", f"{detail}; rounding explains a tenth that differ, not this: the text is not the model's")
    return warned("text", detail) if share < _EXPECTED else passed("text")


def _alike(ours: Answers, plain: Answers) -> tuple[float, int]:
    """Share of answers that begin alike, and of how many that is known."""
    told = [begins_alike(row, plain[key]) for key, row in ours.items() if key in plain]
    known = [alike for alike in told if alike is not None]
    return (sum(known) / len(known) if known else 1.0), len(known)


def _repetition(ours: Answers, plain: Answers) -> Gate:
    """A target may repeat itself by its own nature (a small one, or a chat model without its template)."""
    share, count = _looping(ours)
    detail = f"{share:.0%} of {count} answers repeat themselves"
    if count < ENOUGH:
        return unknown("repetition", f"{detail}, too few are long enough to judge")
    before, counted = _looping(plain)
    if counted >= ENOUGH and share > before + _MORE:
        return failed("repetition", f"{detail}, {before:.0%} of plain decoding's: the text is not the model's")
    if share > _MORE:
        why = "a draft guesses them too well: give prompts that the model answers (a chat model: workload.chat)"
        return warned("repetition", f"{detail}; {why}")
    return passed("repetition")


def _looping(rows: Answers) -> tuple[float, int]:
    """Share of answers that repeat themselves, and of how many that could be told."""
    ratios = [row.compression for row in rows.values() if row.compression is not None]
    return (sum(ratio > LOOPS for ratio in ratios) / len(ratios) if ratios else 0.0), len(ratios)
