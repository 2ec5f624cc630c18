"""Measure a server that runs already: SGLang, vLLM, or whatever else speaks OpenAI's chat format."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from raytune_eagle import gates
from raytune_eagle.engines.proof import facts
from raytune_eagle.errors import BenchError, SpecError
from raytune_eagle.figures import CategorySummary, by_category
from raytune_eagle.measure import InterruptedBench, MeasureResult, measure
from raytune_eagle.measure.wire import wire_of
from raytune_eagle.model import Value
from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.measurement import Gate, Measurement, Request, Vitals
from raytune_eagle.model.trial import ServerFacts
from raytune_eagle.model.workload import Workload
from raytune_eagle.ports import Progress

_ASK_S = 10.0
_STRAIGHT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Past any proxy, as the load goes."""
_INFO = ("/server_info", "/get_server_info")
"""The second before SGLang 0.5.16."""
_MODELS = "/v1/models"
_SGLANG, _VLLM, _OTHER = "SGLang", "vLLM", "OpenAI's format"
_PREFIX_CACHE = re.compile(r'vllm:cache_config_info\{[^}]*enable_prefix_caching="(True|False)"')
_NAMED = 8
"""Models that are named where another was asked for."""
_TAIL = re.compile(r"(/v1)?((/chat)?/completions|/models|/generate)?/*$")


STOPPED = "interrupted"


class _Figures(NamedTuple):
    measurements: tuple[Measurement, ...]
    requests: tuple[Request, ...]


@dataclass
class Running:
    """A server that somebody else looks after; a `raytune_eagle.ports.Server`.

    Attributes:
        model: as OpenAI's format calls it.
        kind: ``SGLang``, ``vLLM``, or that it speaks OpenAI's format.
    """

    url: str
    headers: dict[str, str]
    facts: ServerFacts
    model: str
    kind: str
    launch_s: float = 0.0
    ready_s: float = 0.0

    @property
    def sglang(self) -> bool:
        """Whether it has SGLang's own ``/generate``."""
        return self.kind == _SGLANG

    def check(self) -> None:
        """Its processes are not ours to look at: a dead server shows in its requests."""

    def vitals(self) -> Vitals:
        """Its machine is not ours to look at either."""
        return Vitals()

    def log(self) -> bytes:
        """None that we could read."""
        return b""


class BenchReport(Value):
    """What a bench of a running server came to.

    Attributes:
        server: what it is, for example ``SGLang 0.5.20`` or ``vLLM 0.32.0``.
        chat: prompts were sent in the model's chat template.
        categories: figures by concurrency and category of prompts.
        gates: what was seen of it; see `raytune_eagle.gates`.
        left_out: numbers of streams that were not measured to the end, all behind those that were. The first of them
            has figures all the same where some of its passes were whole when it was interrupted.
        why: they were not; `STOPPED`, or what failed.
    """

    url: str
    server: str
    model: str
    chat: bool
    measurements: tuple[Measurement, ...]
    categories: tuple[CategorySummary, ...]
    gates: tuple[Gate, ...]
    left_out: tuple[int, ...] = ()
    why: str = ""


def connect(address: str, key: str = "", model: str = "") -> Running:
    """Find out what answers there.

    Args:
        address: ``http://HOST:PORT``, with or without a path of its API behind it; ``http://`` may be left out.
        key: its API key; empty for none.
        model: which of its models; empty for the first that it lists.

    Raises:
        SpecError: nobody answers, the key is refused, it has no such model, or what answers is no such server.
    """
    url = _TAIL.sub("", address if "://" in address else f"http://{address}")
    if urllib.parse.urlsplit(url).scheme not in {"http", "https"} or "?" in url:
        raise SpecError(f"{address}: give http://HOST:PORT or https://…, without a question mark and what follows it")
    url, user = _user(url)
    headers = {"Authorization": f"Bearer {key}" if key else user} if key or user else {}
    info = next((found for path in _INFO if (found := _ask(url + path, headers)) is not None), None)
    models = (_ask(url + _MODELS, headers) or {}).get("data")
    models = [one for one in models if isinstance(one, dict) and "id" in one] if isinstance(models, list) else []
    name = _chosen([str(one["id"]) for one in models], model)
    if info is not None and ("model_path" in info or "internal_states" in info):
        name = model or str(info.get("served_model_name") or info.get("model_path") or name)
        return Running(url, headers, facts(info, key), name, _SGLANG)
    if not models:
        raise SpecError(
            f"{address}: answers neither {_INFO[0]} (SGLang) nor {_MODELS} (OpenAI): give the address of a server"
        )
    if models[0].get("owned_by") == "vllm":
        return Running(url, headers, _vllm(url, headers, models[0]), name, _VLLM)
    return Running(url, headers, ServerFacts(), name, _OTHER)


def _chosen(names: Sequence[str], model: str) -> str:
    if names and model and model not in names:
        more = " …" if len(names) > _NAMED else ""
        raise SpecError(f"--model {model}: the server has {', '.join(names[:_NAMED])}{more}; write one of its models")
    return model or next(iter(names), "")


def _vllm(url: str, headers: Mapping[str, str], model: Mapping[str, Any]) -> ServerFacts:
    """What vLLM tells of itself (0.32.0), as far as gates look at it; behind a gateway it may not."""
    told: dict[str, Any] = {"context_length": model.get("max_model_len")}
    version: dict[str, Any] | None = None
    with suppress(SpecError):
        version = _ask(f"{url}/version", headers)
        if cache := _PREFIX_CACHE.search(_page(f"{url}/metrics", headers)):
            told["enable_prefix_caching"] = cache[1] == "True"
    return ServerFacts(resolved_args=json.dumps(told), version=str((version or {}).get("version") or ""))


def _user(url: str) -> tuple[str, str]:
    """The address without ``USER:PASSWORD@``, and what that is as a header; empty where there is none."""
    parts = urllib.parse.urlsplit(url)
    if parts.username is None:
        return url, ""
    pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), f"Basic {b64encode(pair.encode()).decode()}"


def _ask(url: str, headers: Mapping[str, str]) -> dict[str, Any] | None:
    """A JSON object; None where there is no such page, or one for people."""
    text = _page(url, headers)
    try:
        found = json.loads(text) if text.lstrip().startswith(("{", "[")) else None
    except ValueError as exc:
        raise SpecError(f"{url}: {exc}: give the address of a server that runs, http://HOST:PORT") from exc
    return found if isinstance(found, dict) else None


def _page(url: str, headers: Mapping[str, str]) -> str:
    """Its text; empty where there is no such page."""
    try:
        with _STRAIGHT.open(urllib.request.Request(url, headers=dict(headers)), timeout=_ASK_S) as response:  # noqa: S310 - the user's address
            content: bytes = response.read()
    except urllib.error.HTTPError as exc:
        if exc.code in {http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN}:
            wish = ("refuses this key", "another") if headers else ("wants a key", "one")
            raise SpecError(
                f"{url}: {wish[0]} ({exc.code}): name the variable of {wish[1]} with --api-key-env"
            ) from exc
        return ""
    except (OSError, http.client.HTTPException, ValueError) as exc:
        reason = getattr(exc, "reason", None) or exc
        raise SpecError(f"{url}: {reason}: give the address of a server that runs, http://HOST:PORT") from exc
    return content.decode(errors="replace")


def bench(running: Running, workload: Workload, progress: Progress) -> BenchReport:
    """Measure it at each concurrency; what was measured before an interruption or a failure is kept.

    A server without ``/generate`` is asked in OpenAI's chat format, whatever `workload` says.

    Raises:
        BenchError: too many requests failed at the first concurrency.
        KeyboardInterrupt: before the first pass was whole.
    """
    workload = workload.model_copy(update={"chat": workload.chat or not running.sglang})
    result, whole, why = _measured(running, workload, progress)
    return BenchReport(
        url=running.url,
        server=f"{running.kind} {running.facts.version}".strip(),
        model=running.model,
        chat=workload.chat,
        measurements=result.measurements,
        categories=by_category(result.requests),
        gates=gates.standing(_seen(running, workload, result)),
        left_out=workload.concurrency[whole:],
        why=why,
    )


def _measured(running: Running, workload: Workload, progress: Progress) -> tuple[_Figures, int, str]:
    """Figures so far, of how many concurrencies to their end, and why not of all."""
    results, whole, why = list[MeasureResult](), 0, ""
    wire = wire_of(workload, running.model, sglang=running.sglang)
    for level in workload.concurrency:
        one = workload.model_copy(update={"concurrency": (level,)})
        try:
            results.append(measure(running, one, progress, wire=wire))
        except (KeyboardInterrupt, BenchError) as exc:
            why = str(exc) or STOPPED
            if isinstance(exc, InterruptedBench) and exc.kept.measurements:
                results.append(exc.kept)
            if not results:
                raise
            break
        whole += 1
    measurements = tuple(one for result in results for one in result.measurements)
    return _Figures(measurements, tuple(row for result in results for row in result.requests)), whole, why


def _seen(running: Running, workload: Workload, result: _Figures) -> gates.Seen:
    seen = gates.Seen(Config(model=running.model), workload, running.facts)
    config = seen.config.model_copy(update={"speculative": _speculative(seen.info, result.requests)})
    return gates.Seen(config, workload, running.facts, measurements=result.measurements, requests=result.requests)


def _speculative(info: Mapping[str, Any], requests: Sequence[Request]) -> Speculative | None:
    """What it says, or its answers show, that it speculates with; a number in no known shape is the least there is."""
    if not info.get("speculative_algorithm") and not any(row.verify_rounds for row in requests):
        return None
    return Speculative(
        draft=str(info.get("speculative_draft_model_path")),
        num_steps=_whole(info.get("speculative_num_steps"), 1),
        eagle_topk=_whole(info.get("speculative_eagle_topk"), 1),
        num_draft_tokens=_whole(info.get("speculative_num_draft_tokens"), 2),
    )


def _whole(value: Any, least: int) -> int:
    with suppress(TypeError, ValueError, OverflowError):
        return max(int(value), least)
    return least
