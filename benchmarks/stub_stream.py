"""A server that streams in SGLang's shape at a known pace and counts what it sends, to hold a load generator to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue

from aiohttp import web


class Counter:
    """Serves streams in SGLang's shape, the text so far in each chunk, and counts the tokens that it sent."""

    def __init__(self, tokens: int, pace: float) -> None:
        self.sent, self.pace = 0, pace
        self.chunks = [self.chunk(count, last=count == tokens) for count in range(1, tokens + 1)]

    @staticmethod
    def chunk(count: int, *, last: bool) -> bytes:
        """The event after `count` tokens."""
        meta = {"id": "53c4a2c7b71f483cb08adfab588ba9c8", "finish_reason": {"type": "length"} if last else None}
        meta |= {"prompt_tokens": 24, "weight_version": "default", "num_retractions": 0, "completion_tokens": count}
        body = {"text": "word " * count, "output_ids": list(range(count)), "meta_info": {**meta, "cached_tokens": 23}}
        return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """One stream, each chunk at its time."""
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # a client that has heard enough hangs up
            begun = time.perf_counter()
            for number, chunk in enumerate(self.chunks, 1):
                await response.write(chunk)
                self.sent += 1
                await asyncio.sleep(max(0.0, begun + number * self.pace - time.perf_counter()))
            await response.write(b"data: [DONE]\n\n")
        return response

    async def other(self, _request: web.Request) -> web.Response:
        """What bench_serving asks beside."""
        return web.json_response({"data": [{"id": "stub"}]})

    async def run(self, told: Queue[int], stop: Queue[None]) -> None:
        """Serve until told to stop; tells the port, then what was sent."""
        app = web.Application()
        app.router.add_post("/generate", self.answer)
        app.router.add_route("*", "/{path:.*}", self.other)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        told.put(runner.addresses[0][1])
        await asyncio.to_thread(stop.get)
        told.put(self.sent)
        await runner.cleanup()


def stub_process(tokens: int, pace: float, told: Queue[int], stop: Queue[None]) -> None:
    """Body of the stub's process."""
    asyncio.run(Counter(tokens, pace).run(told, stop))


@contextmanager
def stub_server(tokens: int, pace: float) -> Iterator[tuple[str, list[int]]]:
    """A stub in a process of its own; the list holds what it sent once it has ended."""
    told: Queue[int] = multiprocessing.Queue()
    stop: Queue[None] = multiprocessing.Queue()
    process = multiprocessing.Process(target=stub_process, args=(tokens, pace, told, stop))
    process.start()
    sent: list[int] = []
    try:
        yield f"http://127.0.0.1:{told.get(timeout=30)}", sent
    finally:
        stop.put(None)
        sent.append(told.get(timeout=30))
        process.join(30)
