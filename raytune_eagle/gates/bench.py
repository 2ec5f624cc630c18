"""Gates on what the bench showed: tokens per verify round, graphs, lengths, failed requests, steadiness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from raytune_eagle.gates.base import LEAST_ACCEPT_LEN, Seen, failed, passed, unknown, warned
from raytune_eagle.gates.server import captured_batches
from raytune_eagle.gates.steadiness import cause
from raytune_eagle.logs import decode_lines
from raytune_eagle.model import Gate, Request
from raytune_eagle.weights import Checkpoint, UnreadableError

_MOST_WITHOUT_GRAPH = 0.5


def after(seen: Seen) -> tuple[Gate, ...]:
    """What only the bench shows."""
    return (*_accept_len(seen), *_cuda_graph(seen), *_context(seen), _requests(seen), _stable(seen))


def _accept_len(seen: Seen) -> Iterator[Gate]:
    """Of each concurrency; from the server's log where its answers do not tell (OpenAI's format before 0.5.20)."""
    if seen.config.speculative is None:
        return
    lengths = {m.concurrency: m.accept_len for m in seen.measurements if m.accept_len is not None}
    if not lengths and (logged := logged_accept_len(seen.log)) is not None:
        lengths = {seen.streams: logged}
    low = [f"{length:.2f} at {streams}" for streams, length in lengths.items() if length <= LEAST_ACCEPT_LEN]
    if not lengths:
        yield unknown("accept_len", "the server does not tell its verify rounds")
    elif low:
        yield failed(
            "accept_len",
            f"tokens per verify round and streams: {', '.join(low)}: the draft guesses nothing; it was trained for "
            "another target, its captured layers (eagle_config) are others, or the algorithm is not EAGLE3",
        )
    else:
        yield passed("accept_len")


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
    limits = {"the target's": seen.number("context_length")}
    if seen.config.speculative:
        limits["the draft's"] = _draft_context(str(seen.info.get("speculative_draft_model_path") or ""))
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


def _draft_context(folder: str) -> int | None:
    if folder and Path(folder).is_dir():
        with suppress(UnreadableError):
            return Checkpoint(folder).context
    return None


def _requests(seen: Seen) -> Gate:
    rows = [row for row in seen.requests if row.repeat >= 0]
    errors = [row.error for row in rows if row.error]
    if not errors:
        return passed("requests")
    return warned("requests", f"{len(errors)} of {len(rows)} requests failed, for example: {errors[0]}")


def _stable(seen: Seen) -> Gate:
    """One line for all concurrencies that are not known as precisely as asked for."""
    found = []
    for m in seen.measurements:
        if not m.stable:
            width = (m.ci_high - m.ci_low) / 2 / m.output_throughput if m.output_throughput else 0.0
            found.append(f"±{width:.1%} at {m.concurrency} after {m.passes} passes: {cause(_of(seen, m.concurrency))}")
    return warned("stable", "; ".join(found)) if found else passed("stable")


def _of(seen: Seen, concurrency: int) -> list[Request]:
    return [row for row in seen.requests if row.concurrency == concurrency]
