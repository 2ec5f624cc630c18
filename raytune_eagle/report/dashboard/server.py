"""The server of the live page: loopback only, server-sent events, and buttons that ask for a token.

It reads the files that `run` writes and wishes by files that `run` looks at: ending it changes nothing.
"""

from __future__ import annotations

import asyncio
import gzip
import hmac
import json
import re
from collections.abc import AsyncIterator, Callable
from importlib import resources
from pathlib import Path
from typing import Any

from aiohttp import web

from raytune_eagle.errors import RaytuneEagleError, SpecError
from raytune_eagle.live import STOP, aside
from raytune_eagle.report.dashboard.watch import Watch

HOST = "127.0.0.1"
_EVERY_S = 1.0
_LOG_NAME = re.compile(r"\d{5,}-[0-9a-f]{12}")
_MOST_LOG = 4 * 1024 * 1024
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_PAGES = {
    "/": ("live.html", "text/html"),
    "/live.css": ("live.css", "text/css"),
    "/live.js": ("live.js", "text/javascript"),
}


class Dashboard:
    """One study's live page.

    Args:
        watch: what it shows.
        token: what the buttons must send.
    """

    def __init__(self, watch: Watch, token: str) -> None:
        self._watch, self._token = watch, token
        self._latest, self._changed = "", asyncio.Condition()

    def application(self) -> web.Application:
        """The routes; a task that looks at the study once a second runs as long as it does."""
        application = web.Application(middlewares=[_guard])
        application.on_response_prepare.append(_with_headers)
        for path in _PAGES:
            application.router.add_get(path, _page)
        application.router.add_get("/state", self._state)
        application.router.add_get("/events", self._events)
        application.router.add_get("/log/{name}", self._log)
        application.router.add_post("/wish", self._wish)
        application.cleanup_ctx.append(self._looking)
        return application

    async def _looking(self, application: web.Application) -> AsyncIterator[None]:
        del application
        task = asyncio.create_task(self._look_on())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _look_on(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(_EVERY_S)

    async def _look(self) -> None:
        try:
            state = await asyncio.to_thread(self._watch.look)
        except RaytuneEagleError as error:  # a file that was being replaced: the next look finds the new one
            state = {"error": str(error)}
        async with self._changed:
            self._latest = json.dumps(state)
            self._changed.notify_all()

    async def _state(self, request: web.Request) -> web.Response:
        del request
        return web.Response(text=self._latest or "{}", content_type="application/json")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        told = ""
        try:
            while True:
                if self._latest and self._latest != told:
                    told = self._latest
                    await response.write(f"data: {told}\n\n".encode())
                async with self._changed:
                    await self._changed.wait()
        except ConnectionError:
            return response

    async def _log(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        path = self._watch.live.folder / "logs" / f"{name}.log.gz"
        if not _LOG_NAME.fullmatch(name) or not path.is_file():
            raise web.HTTPNotFound(text="no such log")
        text = await asyncio.to_thread(_unpacked, path)
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def _wish(self, request: web.Request) -> web.Response:
        given = request.headers.get("X-Token", "")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise web.HTTPForbidden(text="wrong token: open the address that `raytune-eagle dashboard` printed")
        try:
            asked = await request.json()
            name = STOP if asked["what"] == "stop" else aside(str(asked["node"]))
            granted = asked["what"] in {"stop", "aside"}
        except (ValueError, KeyError, TypeError) as error:
            raise web.HTTPBadRequest(text='send {"what": "stop", "aside" or "back", "node": …}') from error
        if self._watch.live.writer() is None:
            raise web.HTTPConflict(text="no run goes on")
        await asyncio.to_thread(self._watch.live.wish, name, granted=granted)
        await self._look()
        return web.Response(text="asked")


def _unpacked(path: Path) -> str:
    """Its last megabytes; a log that was cut off while it was written gives what there is."""
    data = b""
    try:
        with gzip.open(path) as file:
            while piece := file.read(1 << 20):
                data = (data + piece)[-_MOST_LOG:]
    except (OSError, EOFError):
        data += b"\n(the rest of this log is torn)\n"
    return data.decode(errors="replace")


async def _page(request: web.Request) -> web.Response:
    name, kind = _PAGES[request.path]
    text = (resources.files(__package__) / name).read_text(encoding="utf-8")
    return web.Response(text=text, content_type=kind, charset="utf-8")


@web.middleware
async def _guard(request: web.Request, handler: Any) -> web.StreamResponse:
    """Only pages of this address may ask: a foreign name that was made to point here (DNS rebinding) may not."""
    host = request.headers.get("Host", "").rsplit(":", 1)[0]
    if host not in {HOST, "localhost"}:
        raise web.HTTPForbidden(text="this page is for this machine alone")
    response: web.StreamResponse = await handler(request)
    return response


async def _with_headers(request: web.Request, response: web.StreamResponse) -> None:
    del request
    response.headers.update(_HEADERS)


async def serve(dashboard: Dashboard, port: int, ready: Callable[[int], None]) -> None:
    """Serve until cancelled; `ready` is called with the port.

    Raises:
        SpecError: the port is taken or may not be used.
    """
    runner = web.AppRunner(dashboard.application(), handle_signals=False, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        try:
            await site.start()
        except OSError as error:
            raise SpecError(f"--port {port}: {error.strerror or error}; give another, or 0 for any") from error
        ready(runner.addresses[0][1])
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
