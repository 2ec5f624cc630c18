"""One streamed request, timed chunk by chunk.

A chunk is not parsed when it comes: its time is taken and its token count is cut out of the end of its bytes. Without
``--incremental-streaming-output`` every chunk repeats the text so far, so that parsing each one costs the square of
the answer's length, and the load generator would be measured instead of the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from raytune_eagle.figures import token_gaps, weighted_percentile
from raytune_eagle.measure.http_stream import Connections, RefusedError
from raytune_eagle.measure.wire import SHOWN, StreamError, Wire
from raytune_eagle.model.measurement import Request
from raytune_eagle.model.workload import Prompt, Workload

_DONE = b"[DONE]"
_PREFIXES = (16, 64, 256, 1024)
_BROKEN_OFF = ("abort", "error")
"""Reasons to end that are no end of an answer; words in OpenAI's format (SGLang 0.5.20: the first, vLLM: both)."""
_ENDLESS = 2
"""Times the tokens asked for: more are an answer that does not end. A verify round goes a few beyond."""
_SLOWEST_S = 0.5
"""A token that takes longer on the average is no answer to wait for: a launch so slow would hold its node for hours."""
_COMPRESSIBLE = 100  # bytes: zlib's own frame weighs too much in less


def data_lines(buffer: bytearray, data: bytes) -> Iterator[bytes]:
    """Payloads of the server-sent events that `data` completes; what is not complete yet stays in `buffer`.

    SGLang writes one ``data:`` line per event. Comments, other fields and blank lines are passed over.
    """
    if buffer:
        buffer += data
        data = bytes(buffer)
        buffer.clear()
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        if data.startswith(b"data:", start):
            yield data[start + 5 : end].strip()
        start = end + 1
    buffer += data[start:]


def text_marks(text: str) -> dict[str, Any]:
    """What is kept of an answer in place of its text: fields of `Request`."""

    def digest(part: str, size: int) -> str:
        return hashlib.blake2s(part.encode(errors="replace"), digest_size=size).hexdigest()

    data = text.encode(errors="replace")
    return {
        "output_hash": digest(text, 8),
        "prefix_hashes": tuple(digest(text[:length], 4) for length in _PREFIXES if len(text) > length),
        "compression": len(data) / len(zlib.compress(data, 1)) if len(data) >= _COMPRESSIBLE else None,
    }


@dataclass(slots=True)
class Stream:
    """A request under way: what it has received so far.

    Attributes:
        concurrency, repeat: as in `Request`.
        sent, ended: of `perf_counter`, seconds; `ended` is None while it runs.
        times: when each chunk that brought tokens had arrived, seconds of `perf_counter`.
        counts: tokens of this request after each of these chunks.
    """

    prompt: Prompt
    concurrency: int
    repeat: int
    wire: Wire
    sent: float = field(default_factory=perf_counter)
    ended: float | None = None
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    error: str | None = None
    done: bool = False
    _chunks: list[bytes] = field(default_factory=list)
    _repeats: bool | None = None  # not known before the second chunk
    _final: dict[str, Any] = field(default_factory=dict)
    _least: int | None = None
    _marks: dict[str, Any] = field(default_factory=dict)
    _known_itl: tuple[float | None, float | None] | None = None  # of a stream that has ended

    @property
    def latency_s(self) -> float:
        """Seconds from sending to the end (to now while it runs)."""
        return (perf_counter() if self.ended is None else self.ended) - self.sent

    @property
    def tokens(self) -> int:
        """Tokens received so far, by the server's count."""
        return self.counts[-1] if self.counts else 0

    def receive(self, payload: bytes, now: float) -> None:
        """Take one event. Raises `StreamError` for one that says what went wrong."""
        if payload == _DONE:
            self.done = True
            return
        before = self.counts[-1] if self.counts else 0
        count = self.wire.count(payload, before)
        if count > before:
            self.times.append(now)
            self.counts.append(count)
        self._keep(payload)

    def _keep(self, payload: bytes) -> None:
        if self._chunks and self._repeats is None:
            self._repeats = self.wire.repeats(self._chunks[0], payload)
        if self._repeats:
            self._chunks.clear()  # this one has the whole text so far: those before it say nothing more
        self._chunks.append(payload)

    def finish(self) -> None:
        """Check the whole answer. Raises `StreamError` where it is cut off, refused or empty."""
        text, self._final, self._least = self.wire.answer(self._chunks)
        self._chunks.clear()
        self._marks = text_marks(text)
        self._spread(self._final.get("completion_tokens") or self.tokens)
        reason = self._final.get("finish_reason") or {}
        kind, why = (reason.get("type"), reason.get("message")) if isinstance(reason, dict) else (reason, None)
        if kind in _BROKEN_OFF:
            why = why or f"finish_reason {kind} after {self.tokens} tokens"
            raise StreamError(f"aborted by the server: {str(why)[:SHOWN]}")
        if not reason and not (self.done and self.tokens):
            cut = "ended without a token" if not self.tokens else f"was cut off after {self.tokens} tokens"
            raise StreamError(f"the stream {cut}")
        if not self.tokens:
            raise StreamError("the answer has 0 tokens")

    def _spread(self, total: int) -> None:
        """Where chunks did not say how many tokens they brought, each is taken to have brought as many."""
        if total == self.tokens or not self.tokens:
            return
        spread = {
            max(1, round(count * total / self.tokens)): at for count, at in zip(self.counts, self.times, strict=True)
        }
        self.counts, self.times = list(spread), list(spread.values())

    def row(self, epoch: float) -> Request:
        """What is kept of it; `epoch` is `perf_counter` at the first request of its concurrency."""
        p50, p95 = self._itl_ms()
        meta, ok = self._final, self.error is None
        histogram = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram") or ()
        return Request(
            concurrency=self.concurrency,
            repeat=self.repeat,
            prompt_id=self.prompt.id,
            category=self.prompt.category,
            started_s=self.sent - epoch,
            latency_s=self.latency_s,
            ttft_s=self.times[0] - self.sent if self.times else None,
            itl_p50_ms=p50,
            itl_p95_ms=p95,
            prompt_tokens=meta.get("prompt_tokens") or 0,
            completion_tokens=self.tokens,
            least_tokens=self._least,
            verify_rounds=meta.get("spec_verify_ct"),
            accept_histogram=tuple(histogram),
            error=self.error,
            **(self._marks if ok else {}),
        )

    def drafts(self) -> tuple[int, int]:
        """Accepted and proposed draft tokens of this request; zeros without speculation."""
        meta = self._final
        accepted = meta.get("spec_num_correct_drafts", meta.get("spec_accepted_drafts"))
        proposed = meta.get("spec_num_proposed_drafts", meta.get("spec_proposed_drafts"))
        return accepted or 0, proposed or 0

    def _itl_ms(self) -> tuple[float | None, float | None]:
        if self.ended is None:
            return self._percentiles_ms()
        if self._known_itl is None:
            self._known_itl = self._percentiles_ms()
        return self._known_itl

    def _percentiles_ms(self) -> tuple[float | None, float | None]:
        gaps, weights = token_gaps(self.times, self.counts)
        if not len(gaps):
            return None, None
        p50, p95 = weighted_percentile(np.asarray(gaps), np.asarray(weights), (50, 95)) * 1000
        return float(p50), float(p95)


@contextmanager
def _ended_by(limit: asyncio.Timeout, stream: Stream, quiet_s: float, most: int) -> Iterator[None]:
    """Let `limit` pass when no token has come for `quiet_s`, or more than `most` are there by then.

    A timer looks at the stream, and goes on for the rest: a chunk costs nothing, however many there are.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        quiet = perf_counter() - (stream.times[-1] if stream.times else stream.sent)
        if quiet >= quiet_s or stream.tokens > most:
            limit.reschedule(loop.time())
        else:
            timer = loop.call_later(quiet_s - quiet, look)

    timer = loop.call_later(quiet_s, look)
    try:
        yield
    finally:
        timer.cancel()


class Client:
    """Sends prompts of a workload to one server; one per event loop.

    Args:
        connections: to the server.
        wire: how it is asked.
        workload: says how long a request may be silent, and how many tokens it asks for.
    """

    def __init__(self, connections: Connections, wire: Wire, workload: Workload) -> None:
        self._wire, self._connections = wire, connections
        self._timeout, self._most = workload.request_timeout_s, _ENDLESS * workload.max_new_tokens
        self._longest = self._timeout + _SLOWEST_S * workload.max_new_tokens

    def stream(self, prompt: Prompt, concurrency: int, repeat: int) -> Stream:
        """A request that is about to be sent."""
        return Stream(prompt, concurrency, repeat, self._wire)

    async def send(self, stream: Stream) -> None:
        """Run one request to its end. Never raises for what the server does: `stream.error` says it."""
        try:
            await self._receive(stream)
            stream.finish()
        except asyncio.CancelledError:
            stream.error = f"not finished when the bench ended, {stream.tokens} tokens so far"
            raise
        except TimeoutError:
            stream.error = self._why_ended(stream)
        except (StreamError, RefusedError, OSError) as error:
            stream.error = str(error) or type(error).__name__
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            stream.error = f"the answer is not in the shape of {self._wire.path}: {error!r}"
        finally:
            stream.ended = perf_counter()

    def _why_ended(self, stream: Stream) -> str:
        if stream.tokens > self._most:
            return f"does not end: {stream.tokens} tokens are more than {_ENDLESS} times what was asked for"
        if stream.latency_s >= self._longest:
            return f"timed out after {self._longest:g} s with {stream.tokens} tokens: {_SLOWEST_S} s a token and more"
        return f"timed out after {self._timeout:g} s without a token, {stream.tokens} before"

    async def _receive(self, stream: Stream) -> None:
        body = json.dumps(self._wire.body(stream.prompt)).encode()
        buffer = bytearray()

        def take(piece: bytes, now: float) -> None:
            for payload in data_lines(buffer, piece):
                stream.receive(payload, now)

        stream.sent = perf_counter()
        async with asyncio.timeout(self._longest) as limit:
            with _ended_by(limit, stream, self._timeout, self._most):
                await self._connections.post(self._wire.path, body, take)
