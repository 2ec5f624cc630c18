"""Answers over HTTP/1.1, handed on piece by piece as the socket has them.

A load generator must cost little against what it measures. Here a piece goes from the socket through httptools' parser
to its reader within one callback of the event loop; buffering it in a stream and waking a task for it cost 0.059 s of
processor for 1,000 chunks, this 0.038 (benchmarks/load_client.py on 4 cores, asyncio's loop, one run each).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from http import HTTPStatus
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

import httptools

from raytune_eagle.measure.wire import error_message

Take = Callable[[bytes, float], None]
"""Is given each piece of a body, and when it came in seconds of `perf_counter`; what it raises ends the request."""
_SHOWN = 300


class RefusedError(Exception):
    """The server answered with another status than 200; the text says which, and what the server said."""


class Connections:
    """Connections to one server, kept for the next request; of one event loop.

    Args:
        url: ``http://`` or ``https://``, with or without a path in front of those of `post`.
        headers: go with each request.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._host, self._path = parts.hostname or "", parts.path
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        lines = {"Host": parts.netloc, "Content-Type": "application/json", **headers}
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, take: Take) -> None:
        """Send JSON, and hand the answer's body to `take` until its end, or until the server hangs up on it.

        A kept connection that ends without a byte of the answer had been closed meanwhile: it is asked once more, anew.

        Raises:
            RefusedError: for another status than 200.
            OSError: nobody listens, the connection broke, or what came is not HTTP.
            Exception: whatever `take` raised.
        """
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._lines}Content-Length: {len(body)}\r\n\r\n"
        message = head.encode() + body
        connection = self._kept() or await self._new()
        try:
            await connection.request(message, take)
        except ConnectionError:
            if not connection.stale:
                raise
            connection = await self._new()
            await connection.request(message, take)
        self._idle.append(connection)

    def _kept(self) -> _Connection | None:
        while self._idle:
            if (kept := self._idle.pop()).alive:
                return kept
        return None

    async def _new(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return made

    def close(self) -> None:
        """Hang up."""
        while self._idle:
            self._idle.pop().close()


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time; also what httptools' parser calls."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None  # of the request under way
        self._parser = httptools.HttpResponseParser(self)
        self._take: Take = lambda _piece, _now: None
        self._status = 0
        self._refusal = b""
        self._there = ""  # where a redirection points
        self._now = 0.0
        self._asked = 0
        self._heard = False  # anything of the answer under way

    @property
    def stale(self) -> bool:
        """Whether the server hung up on a kept connection just as it was used again; a new one may be asked."""
        return self._asked > 1 and not self._heard

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def request(self, message: bytes, take: Take) -> None:
        """See `Connections.post`; a request that does not come to its end closes the connection."""
        self._parser = httptools.HttpResponseParser(self)
        self._take, self._status, self._refusal, self._there = take, 0, b"", ""
        self._asked, self._heard = self._asked + 1, False
        self._ended = asyncio.get_running_loop().create_future()
        cast("asyncio.Transport", self._transport).write(message)
        try:
            await self._ended
        except BaseException:
            self.close()
            raise
        finally:
            self._ended = None
        if self._status != HTTPStatus.OK:
            self.close()
            text = " ".join((error_message(self._refusal) or self._refusal.decode(errors="replace")).split())
            moved = f"moved to {self._there[:_SHOWN]}: give that address; " if self._there else ""
            raise RefusedError(f"HTTP {self._status}: {moved}{text[:_SHOWN]}".rstrip(": ;"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._ended is None or self._ended.done():
            self.close()  # nobody asked for it
            return
        self._now, self._heard = perf_counter(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._ended.set_exception(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._ended.set_exception(ConnectionError(f"what came is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if exc is None and self._status:  # the end of an answer without a length, or of one cut short: its text tells
            self._ended.set_result(None)
        else:
            self._ended.set_exception(exc or ConnectionResetError("the server closed the connection without an answer"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"location":
            self._there = value.decode(errors="replace")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._status = status if status >= HTTPStatus.OK else 0  # 100 to 199 announce another

    def on_body(self, body: bytes) -> None:
        if self._status == HTTPStatus.OK:
            self._take(body, self._now)
        elif len(self._refusal) < 4 * _SHOWN:
            self._refusal += body[: 4 * _SHOWN]

    def on_message_complete(self) -> None:
        if self._status and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
            if not self._parser.should_keep_alive():
                self.close()
