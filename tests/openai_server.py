"""A server of OpenAI's chat format, in a thread of the test: vLLM's answers, or those of one that does not say so.

What it sends has the shape of what vLLM 0.32.0 sent (assets/vllm); test_bench.py holds the one against the other.
"""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

ASSETS = Path(__file__).parent / "assets" / "vllm"
REFUSALS = json.loads((ASSETS / "refusals.json").read_text())
MODEL = "org/model"
FINGERPRINT = {"system_fingerprint": "vllm-0.32.0-1fb6afd5"}


def choice(delta, finish=None, **more):
    """The only choice of a chunk."""
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}


def chunk(*choices, tokens=None, **more):
    """One chunk; `tokens` are those of the answer so far, where the client asked to be told."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1796043602, "model": MODEL}
    told = {} if tokens is None else {"usage": {**usage(tokens), "completion_tokens_details": None}}
    return {**head, "choices": choices, **told, **more}


def usage(tokens):
    """After so many tokens of an answer to a prompt of seven."""
    return {"prompt_tokens": 7, "total_tokens": 7 + tokens, "completion_tokens": tokens}


def refusal(name):
    """As vLLM refused it."""
    return web.json_response(REFUSALS[name]["body"], status=REFUSALS[name]["status"])


@dataclass
class OpenAI:
    """A server of the chat format in a thread.

    `vllm`: it says what it is. `counts`, `usage`: it knows ``continuous_usage_stats`` and ``include_usage``, which it
    obeys. `thoughts`: its name for what is thought aloud. `together`: it is ``slow`` or does ``fail`` while it has more
    than one stream; `most` is how many it had. `dies_after`: chunks of an answer, then its engine is dead. `short`:
    of so many tokens one is counted. `finish`: why each tenth answer ends, halfway through.
    """

    vllm: bool = False
    counts: bool = True
    key: str = ""
    usage: bool = True
    short: int = 1
    thoughts: str = ""
    models_page: str = ""
    info_page: str = ""
    together: str = ""
    dies_after: int = 0
    finish: str = ""
    most: int = 0
    streams: int = 0
    dead: bool = False
    bodies: list[dict] = field(default_factory=list)
    url: str = ""

    def chunks(self, tokens, options, step=3):
        """Of one answer: who speaks, tokens by threes, and the total."""
        total = self.usage and options.get("include_usage")
        counted = total and self.counts and options.get("continuous_usage_stats")
        broken_off = self.finish and len(self.bodies) % 10 == 0
        tokens = tokens // 2 if broken_off else tokens
        yield chunk(
            choice({"role": "assistant", "content": ""}),
            **({"tokens": 0} if counted else {}),
            prompt_token_ids=None,
            prompt_text=None,
        )
        for number in range(step, tokens + 1, step):
            delta = {self.thoughts: "hm "} if self.thoughts and number == step else {"content": "w" * step}
            last = number == tokens
            end = {"finish": self.finish if broken_off else "length", "stop_reason": None} if last else {}
            more = FINGERPRINT if last and not total else {}
            yield chunk(choice(delta, **end, token_ids=None), tokens=number // self.short if counted else None, **more)
        if total:
            yield {**chunk(), "usage": usage(tokens // self.short), **FINGERPRINT}

    async def answer(self, request):
        """One stream, or why there is none."""
        body = await request.json()
        self.bodies.append(body)
        if refused := self.refused(request, body):
            return refused
        self.streams += 1
        self.most = max(self.most, self.streams)
        try:
            return await self.stream(request, body)
        finally:
            self.streams -= 1

    def refused(self, request, body):
        """In the order in which vLLM looks."""
        if self.locked(request):
            return refusal("no_key")
        if self.dead:
            return refusal("dead_engine")
        if self.vllm and body["model"] != MODEL:
            return refusal("unknown_model")
        if self.vllm and body["max_tokens"] > 2048:
            return refusal("too_many_tokens")
        if self.vllm and len(body["messages"][0]["content"]) > 4096:
            return refusal("too_long")
        return None

    async def stream(self, request, body):
        """Chunks, in their time."""
        if self.together == "fail" and self.streams > 1:
            return web.Response(status=500, text="no room")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for number, part in enumerate(self.chunks(body["max_tokens"], body["stream_options"])):
            if self.dies_after and number == self.dies_after:
                self.dead = True
            if self.dead:
                part = REFUSALS["dead_engine"]["body"]  # noqa: PLW2901
            await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
            if self.dead:
                break
            await asyncio.sleep(5 if self.together == "slow" and self.streams > 1 else 0.002)
        await response.write(b"data: [DONE]\n\n")
        return response

    def locked(self, request):
        """Whether it lacks the key."""
        return self.key and request.headers.get("Authorization") != f"Bearer {self.key}"

    async def models(self, request):
        """What clients ask first."""
        if self.locked(request):
            return refusal("no_key")
        page = json.loads((ASSETS / "models.json").read_text())
        page["data"][0] |= {"id": MODEL} if self.vllm else {"id": MODEL, "owned_by": "somebody", "max_model_len": None}
        return web.Response(text=self.models_page or json.dumps(page), content_type="application/json")

    async def info(self, request):
        """Of SGLang alone; others may answer anything."""
        if not self.info_page:
            return refusal("no_such_page")
        return web.Response(text=self.info_page, content_type="text/html")

    async def told(self, request):
        """What vLLM tells anybody of itself."""
        name = {"/version": "version.json", "/metrics": "metrics.txt"}[request.path]
        return web.Response(text=(ASSETS / name).read_text()) if self.vllm else refusal("no_such_page")

    @contextmanager
    def running(self):
        """Until the block ends."""
        loop = asyncio.new_event_loop()
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/server_info", self.info)
        app.router.add_get("/version", self.told)
        app.router.add_get("/metrics", self.told)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        loop.run_until_complete(runner.setup())
        loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.run_until_complete(runner.cleanup())
            loop.close()
