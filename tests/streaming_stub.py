"""An HTTP server that streams in SGLang's shape and fails on demand, and benches of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from raytune_eagle.errors import BenchError
from raytune_eagle.measure import MeasureResult, measure
from raytune_eagle.model.measurement import Request, Vitals
from raytune_eagle.model.trial import ServerFacts
from raytune_eagle.model.workload import Prompt, Workload


@dataclass(frozen=True)
class Act:
    """What the stub does with one request: `tokens` in chunks of `step`, one each `pace_s`; or it fails as `fail`."""

    tokens: int = 12
    step: int = 3
    pace_s: float = 0.002
    fail: str = ""
    delta: bool = False
    raw: tuple[bytes, ...] = ()


@dataclass
class Stub:
    """An HTTP server in a thread; `act` decides on each request by its number and its text.

    Attributes:
        bodies, headers: of the requests, in the order of their coming.
        spans: begin and end of each request that was answered, `time.perf_counter`.
    """

    act: Callable[[int, str], Act] = lambda number, text: Act()
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    facts: ServerFacts = field(default_factory=ServerFacts)
    launch_s: float = 0.0
    ready_s: float = 0.0
    bodies: list[dict] = field(default_factory=list)
    seen_headers: list[dict] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    checks: int = 0
    dead_at: float = float("inf")

    def check(self) -> None:
        """Dead from `dead_at` on."""
        self.checks += 1
        if time.perf_counter() >= self.dead_at:
            raise BenchError("cuda_ima", "the scheduler died of an illegal memory access")

    def vitals(self) -> Vitals:
        """A machine whose other load rises by a core a second."""
        return Vitals(other_cores=time.perf_counter() % 1000)

    def log(self) -> bytes:
        """Nothing: the bench never asks for it."""
        raise AssertionError

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """One request to /generate."""
        body, began = await request.json(), time.perf_counter()
        act = self.act(len(self.bodies), body["text"])
        self.bodies.append(body)
        self.seen_headers.append(dict(request.headers))
        if act.fail == "500":
            return web.Response(status=500, text="Internal\n  Server Error")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the client may have had enough
            for part in act.raw or stream_parts(act):
                await response.write(part)
                await asyncio.sleep(act.pace_s)
        if act.fail == "stall":
            await asyncio.sleep(1.0)
        if act.fail == "drop":
            request.transport.abort()
        self.spans.append((began, time.perf_counter()))
        return response

    def serve(self, started: threading.Event, loops: list[asyncio.AbstractEventLoop], ended: asyncio.Event) -> None:
        """Body of the thread."""

        async def run() -> None:
            loops.append(asyncio.get_running_loop())
            app = web.Application()
            app.router.add_post("/generate", self.answer)
            runner = web.AppRunner(app, shutdown_timeout=0.0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            started.set()
            await ended.wait()
            await runner.cleanup()

        asyncio.run(run())


def chunk(act: Act, tokens: int, meta: dict) -> bytes:
    """One event; the text so far, or only what is new."""
    words = [f'w{n}"é ' for n in range(tokens)]
    first = max(0, tokens - act.step) if act.delta else 0
    head = {"text": "".join(words[first:]), "output_ids": list(range(first, tokens))}
    return b"data: " + json.dumps({**head, "meta_info": {"completion_tokens": tokens, **meta}}).encode() + b"\n\n"


def stream_parts(act: Act) -> list[bytes]:
    """The whole stream of a request, with whatever failure was asked for."""
    if act.fail == "error":
        return [
            b'data: {"error": {"message": "input is longer than the context", "code": 400}}\n\n',
            b"data: [DONE]\n\n",
        ]
    if act.fail == "garbage":
        return [b"data: <html>\n\n"]
    counts = [] if act.fail == "zero" else list(range(act.step, act.tokens, act.step))
    parts = [b": hello\r\n\r\n"] + [chunk(act, count, {"finish_reason": None}) for count in counts]
    if act.fail in {"drop", "stall", "cut"}:
        return parts[:3]
    reason = {"type": "abort", "message": "out of memory"} if act.fail == "abort" else {"type": "length"}
    rounds = act.tokens // act.step
    meta = {"finish_reason": reason, "prompt_tokens": 5, "spec_verify_ct": rounds}
    meta |= {"spec_accept_histogram": [0, 0, rounds], "spec_accepted_drafts": 2 * rounds}
    meta |= {"spec_proposed_drafts": 5 * rounds}
    return [*parts, chunk(act, 0 if act.fail == "zero" else act.tokens, meta), b"data: [DONE]\n\n"]


@contextlib.contextmanager
def running() -> Iterator[Stub]:
    """A running stub."""
    server, started, loops, ended = Stub(), threading.Event(), [], asyncio.Event()
    thread = threading.Thread(target=server.serve, args=(started, loops, ended))
    thread.start()
    assert started.wait(10)
    yield server
    loops[0].call_soon_threadsafe(ended.set)
    thread.join(10)
    assert not thread.is_alive()


def work(prompts: int = 4, **values) -> Workload:
    """A workload of short prompts in two categories."""
    texts = tuple(Prompt(id=f"p{n}", category="ab"[n % 2], text=f"prompt {n}") for n in range(prompts))
    return Workload(prompts=texts, **({"max_new_tokens": 12, "max_passes": 2, "request_timeout_s": 5.0} | values))


def run(server: Stub, workload: Workload) -> MeasureResult:
    """Measure without listening to the progress."""
    return measure(server, workload, lambda name, detail: None)


def refused(server: Stub, workload: Workload) -> BenchError:
    """The error of a bench that fails."""
    with pytest.raises(BenchError) as caught:
        run(server, workload)
    return caught.value


def passes(rows: tuple[Request, ...]) -> list[list[str]]:
    """Prompt ids of each counted pass, in the order of sending."""
    return [[row.prompt_id for row in rows if row.repeat == n] for n in range(max(row.repeat for row in rows) + 1)]
