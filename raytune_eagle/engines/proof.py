"""Proof that a server is ready and ours: it answers from our process, names our model and generates with our key."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

from raytune_eagle.engines.launch import Launch
from raytune_eagle.failures import Failure
from raytune_eagle.logs import redact
from raytune_eagle.model.trial import ServerFacts

LOOK_S = 0.1
ASK_S = 10.0
GENERATE_S = 600.0
"""First generations compile kernels; the engine's own limits on a start come before this one."""
TOKENS = 8
REFUSALS = 3
"""So many refused generations (a 4xx or 5xx each) and the server is taken at its word."""
HTTP_ERRORS = (OSError, ValueError, http.client.HTTPException)
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a node's proxy is not for its own servers


@dataclass
class Answer:
    """What came of it; `trouble` is why the server will never do."""

    answered_at: float | None = None
    ready_at: float | None = None
    facts: ServerFacts = field(default_factory=ServerFacts)
    trouble: Failure | None = None


class Proof(Thread):
    """Asks on and on in a thread of its own, so that a hanging server cannot keep the engine from seeing it die.

    `ours` tells whether the port is listened on by our own processes: True, False, or None when nobody listens.
    """

    def __init__(self, launch: Launch, ours: Callable[[], bool | None]) -> None:
        super().__init__(name=f"proof-{launch.port}", daemon=True)
        self.launch, self.ours = launch, ours
        self.answer = Answer()
        self.over = Event()
        self.refused = 0

    def run(self) -> None:
        """Until ready, in trouble or told to stop."""
        while not self.over.is_set():
            try:
                if self._step():
                    return
            except HTTP_ERRORS:
                pass  # not yet; should it never be, the engine's limits on a start end this
            self.over.wait(LOOK_S)

    def stop(self) -> None:
        """Give up."""
        self.over.set()

    def ask(self, path: str, body: Any = None, timeout_s: float = ASK_S) -> bytes:
        """One request with our key; raises for anything but a 2xx answer."""
        headers = {"Content-Type": "application/json", **self.launch.headers}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.launch.url + path, data, headers)  # noqa: S310  always http
        with OPENER.open(request, timeout=timeout_s) as response:
            content: bytes = response.read()
            return content

    def _step(self) -> bool:
        """Once through; False while the server is not that far."""
        try:
            up = self._up()
        except HTTP_ERRORS as error:  # where somebody listens after all, it may be one who never answers
            if not isinstance(getattr(error, "reason", None), ConnectionRefusedError) and self._foreign():
                return True
            raise
        if self._foreign():
            return True
        self.answer.answered_at = self.answer.answered_at or time.monotonic()
        if not up:
            return False
        self.answer.facts = facts(self.info(), self.launch.key)
        return self.answer.trouble is not None or self._generated()

    def _up(self) -> bool:
        """Whether the server says that it is through with starting; raises while nothing answers."""
        try:
            self.ask("/health")
        except urllib.error.HTTPError as error:
            return error.code == http.HTTPStatus.NOT_FOUND
        return True

    def _generated(self) -> bool:
        """One generation; noted as trouble when refused again and again."""
        body = {
            "text": "def main(",
            "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
        }
        try:
            generated = json.loads(self.ask("/generate", body, GENERATE_S))
        except urllib.error.HTTPError as error:
            self.refused += 1
            if self.refused >= REFUSALS:
                said = error.read(300).decode(errors="replace")
                self.answer.trouble = Failure("generation_failed", "serving", f"a generation got {error.code}: {said}")
            return self.answer.trouble is not None
        if not generated.get("meta_info", {}).get("completion_tokens"):
            return False
        self.answer.ready_at = time.monotonic()
        return True

    def _foreign(self) -> bool:
        """Note, and tell, that another process listens on our port; once it is ours it stays so while we live."""
        if not self.answer.answered_at and self.ours() is False:
            self.answer.trouble = not_ours(f"port {self.launch.port} is listened on by a process that is not ours")
        return self.answer.trouble is not None

    def info(self) -> dict[str, Any]:
        """Resolved arguments; notes when they are of another model than ours."""
        try:
            content = self.ask("/server_info")
        except urllib.error.HTTPError:  # before 0.5.16
            content = self.ask("/get_server_info")
        info: dict[str, Any] = json.loads(content)
        if self.launch.model not in (info.get("model_path"), info.get("served_model_name")):
            said = f"port {self.launch.port} serves {info.get('model_path')}, not {self.launch.model}"
            self.answer.trouble = not_ours(said)
        return info


def not_ours(detail: str) -> Failure:
    """Another server has our port: like any port that was taken, worth another try on another."""
    return Failure("port_taken", "serving", detail, transient=True)


def facts(info: dict[str, Any], key: str) -> ServerFacts:
    """What to keep of ``/server_info``, keys out."""
    kept = {name: "***" if name.endswith("api_key") and value else value for name, value in info.items()}
    return ServerFacts(
        resolved_args=redact(json.dumps(kept, sort_keys=True), key), version=str(info.get("version") or "")
    )
