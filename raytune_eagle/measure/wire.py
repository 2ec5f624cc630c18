"""How a server is asked for a stream, and how its chunks are read: SGLang's own way, and OpenAI's chat.

`Generate` sends a prompt as it stands to SGLang's ``/generate``. `Chat` sends it as a user's message to
``/v1/chat/completions``, so that the server puts its own chat template around it: an instruct model answers another
text without it, and a draft that was trained on such answers is then believed less.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from raytune_eagle.model.workload import Prompt, Workload

_COUNT = b'"completion_tokens":'  # cannot occur inside a JSON string: its quotes would be escaped there
_DIGITS = re.compile(rb"\s*(\d+)")
_NO_CHOICES = re.compile(rb'"choices":\s*\[\]')
SHOWN = 300
"""Characters of a server's complaint that are kept."""


class StreamError(Exception):
    """This request failed; the text is what its row keeps as ``error``."""


class Answer(NamedTuple):
    """A whole answer: its text, and what the server says of it under SGLang's names (``spec_verify_ct``, …).

    `least` tokens it has for sure: ids that came, or else chunks that brought text.
    """

    text: str
    meta: dict[str, Any]
    least: int


class Wire(Protocol):
    """One way to ask; its methods know nothing of time."""

    path: str

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """What is sent."""
        ...

    def count(self, payload: bytes, before: int) -> int:
        """Tokens of the answer after this chunk, `before` of them known. Raises `StreamError` for a complaint."""
        ...

    def repeats(self, first: bytes, second: bytes) -> bool:
        """Whether each chunk holds the whole answer so far, told from the first two."""
        ...

    def answer(self, chunks: Sequence[bytes]) -> Answer:
        """The answer; of chunks that repeat, the last is enough."""
        ...


def token_count(payload: bytes) -> int | None:
    """``completion_tokens`` of a chunk without parsing it; None where the chunk has none."""
    at = payload.rfind(_COUNT)
    if at < 0:
        return None
    digits = _DIGITS.match(payload, at + len(_COUNT))
    return int(digits[1]) if digits else None


def error_message(payload: bytes) -> str:
    """What an error object says, of SGLang, vLLM or FastAPI; empty where the payload is none."""
    try:
        found = json.loads(payload)
    except ValueError:
        return ""
    found = found.get("error", found) if isinstance(found, dict) else None
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail")
    return str(found) if found else ""


def complaint(payload: bytes) -> str:
    """The message of an error object in a stream, or the payload itself."""
    if message := error_message(payload):
        return f"the server reported an error: {message[:SHOWN]}"
    return f"not a chunk of an answer: {payload[:SHOWN].decode(errors='replace')}"


class Generate:
    """SGLang's ``/generate``: a text in, tokens out; stable over 0.5.16-0.5.23."""

    path = "/generate"

    def __init__(self, workload: Workload) -> None:
        self._sampling = {
            "temperature": workload.temperature,
            "max_new_tokens": workload.max_new_tokens,
            "ignore_eos": workload.ignore_eos,
        }

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """See `Wire`."""
        return {"text": prompt.text, "sampling_params": self._sampling, "stream": True}

    def count(self, payload: bytes, before: int) -> int:
        """See `Wire`."""
        del before
        count = token_count(payload)
        if count is None:
            raise StreamError(complaint(payload))
        return count

    def repeats(self, first: bytes, second: bytes) -> bool:
        """It does unless ``--incremental-streaming-output`` is set."""
        before, after = json.loads(first), json.loads(second)
        if "output_ids" in after:
            return len(after["output_ids"]) >= int(after["meta_info"]["completion_tokens"])
        return str(after.get("text") or "").startswith(before.get("text") or "")

    def answer(self, chunks: Sequence[bytes]) -> Answer:
        """See `Wire`."""
        parsed = [json.loads(chunk) for chunk in chunks]
        texts = [chunk.get("text") or "" for chunk in parsed]
        ids = sum(len(chunk.get("output_ids") or ()) for chunk in parsed)
        return Answer("".join(texts), parsed[-1]["meta_info"] if parsed else {}, ids or sum(map(bool, texts)))


class Chat:
    """OpenAI's ``/v1/chat/completions``, of SGLang, vLLM and others.

    Asks for the token count with each chunk (``continuous_usage_stats``: SGLang 0.5.20, vLLM 0.32.0); a server that
    gives none has its tokens spread evenly over the chunks once the total is known. Of SGLang the verify rounds are
    asked for too (``return_spec_tokens_details``, seen in 0.5.20); others may refuse what they do not know.
    """

    path = "/v1/chat/completions"

    def __init__(self, workload: Workload, model: str, *, sglang: bool = True) -> None:
        self._fields: dict[str, Any] = {
            "model": model,
            "temperature": workload.temperature,
            "max_tokens": workload.max_new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if workload.ignore_eos:
            self._fields["ignore_eos"] = True
        if sglang:
            self._fields["return_spec_tokens_details"] = True

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """See `Wire`."""
        return {**self._fields, "messages": [{"role": "user", "content": prompt.text}]}

    def count(self, payload: bytes, before: int) -> int:
        """A chunk that does not say counts as one token if it has text; the total that comes last is none."""
        if _NO_CHOICES.search(payload):
            _parsed(payload)
            return before
        count = token_count(payload)
        if count is not None:
            return max(count, before)
        chunk = _parsed(payload)
        return before + bool(_text(chunk))

    def repeats(self, first: bytes, second: bytes) -> bool:
        """Never."""
        del first, second
        return False

    def answer(self, chunks: Sequence[bytes]) -> Answer:
        """See `Wire`.

        No token gives text twice: SGLang 0.5.20 and vLLM send a chunk, or one of thoughts and one behind them, for each
        step's new tokens. What is held back (half a character, the mark at the end of thoughts) makes fewer of them.
        """
        parsed = [_parsed(chunk) for chunk in chunks]
        meta: dict[str, Any] = {}
        for chunk in parsed:
            if reasons := [r for choice in chunk["choices"] or () if (r := choice.get("finish_reason"))]:
                meta["finish_reason"] = reasons[-1]
            meta |= {name: n for name, n in (chunk.get("usage") or {}).items() if name in _USAGE and n is not None}
            meta |= _speculation(chunk)
        texts = [_text(chunk) for chunk in parsed]
        return Answer("".join(texts), meta, sum(map(bool, texts)))


_USAGE = ("prompt_tokens", "completion_tokens")


def _parsed(payload: bytes) -> dict[str, Any]:
    chunk = json.loads(payload)
    if not isinstance(chunk, dict) or "choices" not in chunk:
        raise StreamError(complaint(payload))
    return chunk


def _text(chunk: dict[str, Any]) -> str:
    """What a model thinks aloud is made of tokens like all else (SGLang calls it reasoning_content, vLLM reasoning)."""
    deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
    return "".join(delta.get(name) or "" for delta in deltas for name in ("reasoning_content", "reasoning", "content"))


def _speculation(chunk: dict[str, Any]) -> dict[str, Any]:
    details = (chunk.get("sglext") or {}).get("spec_tokens_details") or {}
    first = details[0] if isinstance(details, list) and details else details
    found = first if isinstance(first, dict) else {}
    return {name: value for name, value in found.items() if value} if found.get("spec_verify_ct") else {}


def wire_of(workload: Workload, model: str = "default", *, sglang: bool = True) -> Wire:
    """The way that a workload is sent; `model` is its name in OpenAI's format (SGLang takes any)."""
    return Chat(workload, model, sglang=sglang) if workload.chat else Generate(workload)
