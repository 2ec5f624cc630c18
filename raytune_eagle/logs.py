"""SGLang's log: how far a start is, and what a decode line says. Written after the formats of 0.4.1 to 0.5.23.

What a failure was is in `raytune_eagle.failures`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Stage = Literal["arguments", "distributed", "weights", "kv_cache", "graph_capture", "serving"]

STAGES: tuple[tuple[re.Pattern[str], Stage], ...] = (
    (re.compile(r"Init torch distributed begin"), "distributed"),
    (re.compile(r"Load weight begin"), "weights"),
    (re.compile(r"Load weight end|KV Cache is allocated|Memory pool end"), "kv_cache"),
    (re.compile(r"Capture .*(?:cuda|CUDA) graph begin"), "graph_capture"),
    (re.compile(r"Uvicorn running on|The server is fired up"), "serving"),
)

EVENTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"shards:.*\| (\d+/\d+)"), "weights"),
    (re.compile(r"Load weight end\..* type=(\w+)"), "weights"),
    (re.compile(r"KV Cache is allocated\..*#tokens: (\d+)"), "kv_cache"),
    (re.compile(r"Capturing batches.*\| (\d+/\d+)"), "graph_capture"),
    (re.compile(r"Capture (.*?) ?(?:cuda|CUDA) graph begin"), "graph_capture"),
    (re.compile(r"Capture (.*?(?:cuda|CUDA) graph end\. elapsed=[\d.]+ s)"), "graph_capture"),
)

BAR = re.compile(r"(?=Capturing batches|Multi-thread loading|Loading safetensors|(?<!^)\[\d{4}-\d\d-\d\d \d\d:)")
"""Where a line begins that stands behind another without an end: a step of a progress bar, or another process."""
OTHER_RANK = re.compile(r"^\[?[^][]*\b(?:TP|DP|PP|EP)[1-9]\d*\b[^][]*\]")
RANK = re.compile(r"^\[[^][]*?\b((?:(?:TP|DP|PP|EP)\d+ ?)+)[^][]*\]")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SECRET_WORDS = re.compile(r"((?:admin_)?api_key'?[=:]\s*)'[^']*'")
IN_FRONT = re.compile(
    r"^(?:\([^()\n]*\bpid=\d+[^()\n]*\) ?"  # Ray
    r"|\[pod/[^\]\n]+\] "  # kubectl logs --prefix
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?"  # its --timestamps, CRI
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ [^\s:\[]+\[\d+\]: "  # journald
    r"|[\w.-]+ +\| )+",  # docker compose
    re.MULTILINE,
)
BEHIND = re.compile(r" ?\[repeated \d+x across cluster\][^\n]*$", re.MULTILINE)
"""Ray's, where it left lines out."""
REQUEST = re.compile(
    r"^\[\d{4}-[^]\n]*\] (?:"
    r"(?:Receive|Finish)(?: OpenAI)?: obj=(?:.*[)}]$|(?:.*\n(?!\[\d{4}-))+?.*[)}]$|.*)"
    r'|\{"timestamp": .*"event": "request\..*)',
    re.MULTILINE,
)
"""A request or an answer under ``--log-requests``, as text or JSON (0.5.20 ``utils/request_logger.py``); 0.4.1 wrote
texts as they were, over several lines."""


def clean(text: str) -> str:
    """The log as SGLang wrote it: without a terminal's colours and ends of line, and what others put around lines."""
    return BEHIND.sub("", IN_FRONT.sub("", ANSI.sub("", text).replace("\r\n", "\n")))


def lines(text: str) -> Iterator[str]:
    """Lines of a log; progress bars, which return the carriage or write on, give one per step."""
    for line in re.split(r"[\r\n]+", clean(text)):
        yield from filter(None, BAR.split(line))


def progress(line: str) -> tuple[str, str] | None:
    """Event name and detail (``weights 3/64``, ``graph_capture target verify``) of a line, if it is one of progress."""
    if OTHER_RANK.match(line):
        return None
    for pattern, name in EVENTS:
        if match := pattern.search(line):
            return name, match.group(1).strip()
    return None


def without_requests(text: str) -> str:
    """A cleaned log without what users asked and were answered."""
    return REQUEST.sub("", text)


def stage(text: str) -> Stage:
    """How far the server came: its first rank."""
    return _reached(lines(text), None)


def stage_of_last(text: str) -> Stage:
    """How far the rank had come that wrote the last words of a log; the first, where no rank is told."""
    said = list(lines(text))
    writer = next((line for line in reversed(said) if line.startswith("[")), "")
    return _reached(said, _rank(writer))


def _reached(said: Iterable[str], rank: str | None) -> Stage:
    reached: Stage = "arguments"
    for line in said:
        name = next((name for pattern, name in STAGES if pattern.search(line)), None)
        if name and (_rank(line) in {None, rank} or (rank is None and not OTHER_RANK.match(line))):
            reached = name
    return reached


def _rank(line: str) -> str | None:
    """Who wrote the line: ``TP3``, ``DP0 TP1``; None where there is one rank, or it is of the whole server."""
    found = RANK.match(line)
    return found[1].strip() if found else None


@dataclass(frozen=True)
class DecodeLine:
    """One ``Decode batch`` line: means since the line before it. The first after idle times is off (0.39 tok/s).

    Attributes:
        accept_rate: as printed: accepted tokens with bonus / draft tokens up to 0.5.10, without bonus from 0.5.12.
        cuda_graph: None where the version does not say.
    """

    running: int
    throughput: float
    tokens: int | None = None
    token_usage: float | None = None
    accept_len: float | None = None
    accept_rate: float | None = None
    queued: int | None = None
    cuda_graph: bool | None = None


FIELD = re.compile(r"(?:^|, |\. |\] )([#\w][\w #()/-]*): ([^,\s]+)")
THROUGHPUT = "gen throughput (token/s)"


def decode_line(line: str) -> DecodeLine | None:
    """Read a decode line of any version; None for anything else and for torn ones.

    Throughput has two decimals in every version: with fewer, the line was cut off within it.
    """
    _, found, rest = line.partition("Decode batch")
    fields = dict(FIELD.findall(rest)) if found else {}

    def number(*names: str) -> float | None:
        return next((float(fields[name]) for name in names if name in fields), None)

    try:
        tokens, queued = number("#token", "#full token"), number("#queue-req")
        graph = fields.get("cuda graph", fields.get("cpu graph"))
        return DecodeLine(
            running=int(fields["#running-req"]),
            throughput=_whole(fields[THROUGHPUT]),
            tokens=None if tokens is None else int(tokens),
            token_usage=number("token usage", "full token usage"),
            accept_len=number("accept len"),
            accept_rate=number("accept rate"),
            queued=None if queued is None else int(queued),
            cuda_graph=None if graph is None else graph == "True",
        )
    except (KeyError, ValueError):
        return None


def _whole(text: str) -> float:
    if not re.fullmatch(r"\d+\.\d\d", text):
        raise ValueError(text)
    return float(text)


def decode_lines(text: str) -> Iterator[DecodeLine]:
    """Every whole decode line of a log."""
    for line in lines(text):
        if found := decode_line(line):
            yield found


def accept_rate_has_bonus(version: str) -> bool | None:
    """What ``accept rate`` in this SGLang's decode lines counts; None where there is none, or nobody looked.

    True: accepted tokens with the bonus token / draft tokens (0.5.4-0.5.10); False: without it, over one draft token
    less (0.5.12 and later; 0.5.11 was not looked at). ``accept len`` has the bonus token in every version.
    """
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    number = tuple(map(int, found.groups())) if found else (0, 0, 0)
    return None if number < (0, 5, 4) or number == (0, 5, 11) else number < (0, 5, 12)


def tail(text: str, count: int = 40) -> str:
    """The last lines, for people."""
    return "\n".join(text.splitlines()[-count:])


def redact(text: str, secret: str) -> str:
    """Take out a secret, and whatever SGLang prints as its API keys."""
    return SECRET_WORDS.sub(r"\1'***'", text.replace(secret, "***") if secret else text)
