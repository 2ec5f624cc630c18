"""A server of OpenAI's chat format, in a thread of the test."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web


def delta(text=None, usage=None, finish=None, **more):
    """One chunk in OpenAI's shape."""
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": finish}] if text is not None else []
    return {"object": "chat.completion.chunk", "choices": choices, "usage": usage, **more}


@dataclass
class OpenAI:
    """A server of the chat format in a thread.

    `counts`: each chunk says how many tokens there are so far. `together`: it is ``slow`` or does ``fail`` while it has
    more than one stream; `most` is how many it had. Of so many tokens as `short` says one is counted.
    """

    counts: bool = True
    key: str = ""
    usage: bool = True
    short: int = 1
    thoughts: str = "reasoning_content"
    models_page: str = '{"object": "list", "data": [{"id": "org/model"}]}'
    info_page: str = ""
    together: str = ""
    most: int = 0
    streams: int = 0
    bodies: list[dict] = field(default_factory=list)
    url: str = ""

    def chunks(self, tokens, step=3):
        """Of one answer; a thought first, the total last."""
        for number in range(step, tokens + 1, step):
            usage = {"prompt_tokens": 7, "completion_tokens": number // self.short} if self.counts else None
            chunk = delta("w" * step, usage, "length" if number == tokens else None)
            if number == step:
                chunk["choices"][0]["delta"] = {self.thoughts: "hm "}
            yield chunk
        if not self.usage:
            return
        counted = tokens // self.short
        yield delta(usage={"prompt_tokens": 7, "completion_tokens": counted, "total_tokens": 7 + counted})

    async def answer(self, request):
        """One stream."""
        body = await request.json()
        self.bodies.append(body)
        self.streams += 1
        self.most = max(self.most, self.streams)
        try:
            return await self.stream(request, body)
        finally:
            self.streams -= 1

    async def stream(self, request, body):
        """Chunks, in their time."""
        if self.together == "fail" and self.streams > 1:
            return web.Response(status=500, text="no room")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in self.chunks(body["max_tokens"]):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(5 if self.together == "slow" and self.streams > 1 else 0.002)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(self, request):
        """What clients ask first."""
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        return web.Response(text=self.models_page, content_type="application/json")

    async def info(self, request):
        """Of SGLang alone; others may answer anything."""
        return web.Response(text=self.info_page, content_type="text/html", status=200 if self.info_page else 404)

    @contextmanager
    def running(self):
        """Until the block ends."""
        loop = asyncio.new_event_loop()
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/server_info", self.info)
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
