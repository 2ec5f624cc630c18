"""Times all-reduces on this machine under many NCCL environments, seconds each; a launch would take minutes.

The work is done by ``allreduce.py`` in the interpreter that serves, under a guard.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raytune_eagle import failures
from raytune_eagle.engines.gpus import Nvml, await_release, require_free
from raytune_eagle.engines.guarded import Guarded
from raytune_eagle.engines.launch import Settings
from raytune_eagle.errors import NodeError

PROGRAM = Path(__file__).with_name("allreduce.py")
SGLANG_SETS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What SGLang sets where it is unset (``_set_envs_and_config``, entrypoints/engine.py, 0.5.16:1260, 0.5.20:1677)."""
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
"""Or gloo listens on the outward address."""
_IMPORT_S = 180.0
"""For torch to be imported from a cold file system."""
_OVERHEAD_S = 5.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class Question:
    """What to time.

    Attributes:
        ranks: processes that reduce together, one GPU each.
        gpu: NCCL on GPUs; else gloo.
        bytes: sizes of the reduced tensor of bfloat16 values.
        environments: variables beside the inherited ones, one set after the other.
        limit_s: one environment is killed, as hanging, after so long.
    """

    ranks: int
    gpu: bool
    bytes: tuple[int, ...]
    environments: tuple[dict[str, str], ...]
    limit_s: float = 30.0


@dataclass(frozen=True)
class Timing:
    """What came of one environment.

    Attributes:
        index: of the environment.
        at: seconds since the epoch.
        seconds: that it took, processes and set-up of NCCL included.
        times_us: samples by size; empty when it failed.
        chosen: what NCCL says it took, by size (``RING LL 1``: algorithm, protocol, channels); may be empty.
        error: class and reason of a failure, else None.
    """

    index: int
    at: float
    seconds: float
    times_us: dict[int, tuple[float, ...]]
    chosen: dict[int, str]
    error: str | None = None


def probe(settings: Settings, question: Question) -> Iterator[Timing]:
    """Time every environment, and give each as it comes; a setting that fails or hangs is a `Timing` with an error.

    Raises:
        NodeError: this machine cannot do it: its GPUs are in use, or its interpreter has no torch.
    """
    gpus = Nvml(settings.gpus) if question.gpu else None
    before = require_free(gpus, {}) if gpus else []
    with tempfile.TemporaryDirectory(prefix="rte-probe-", ignore_cleanup_errors=True) as name:
        yield from _ask(settings, question, Path(name))
    if gpus:
        await_release(gpus, before, ())


def _ask(settings: Settings, question: Question, folder: Path) -> Iterator[Timing]:
    asked, answers = folder / "question.json", folder / "answers"
    asked.write_text(json.dumps(asdict(question)), encoding="utf-8")
    argv = [settings.interpreter, str(PROGRAM), str(asked)]
    env = {**_LOOPBACK, **SGLANG_SETS, **os.environ}
    left = len(question.environments)
    deadline = time.monotonic() + _IMPORT_S + left * (question.limit_s + _OVERHEAD_S)
    with answers.open("wb") as out, _guarded(argv, env, out, folder) as running, answers.open(errors="replace") as text:
        while left:
            over = running.poll() is not None or time.monotonic() > deadline
            for timing in _read(text, question):
                left -= 1
                yield timing
            if over and left:
                text.seek(0)  # the guard may have removed the file already
                words = text.read().strip().splitlines()
                raise NodeError(f"{settings.interpreter}: cannot time all-reduces: {(words or ['no answer'])[-1]}")
            time.sleep(_LOOK_S)


def _guarded(argv: list[str], env: dict[str, str], out: Any, folder: Path) -> Guarded:
    try:
        return Guarded(argv, env=env, stdout=out, grace_s=0.0, remove=[folder])
    except OSError as exc:
        raise NodeError(f"{argv[0]} cannot be run: {exc.strerror}") from exc


def _read(text: Any, question: Question) -> Iterator[Timing]:
    """Answers that have come, whole lines only; what else a library prints is passed over."""
    while True:
        at = text.tell()
        line = text.readline()
        if not line.endswith("\n"):
            text.seek(at)
            return
        if line.startswith('{"index":'):
            yield _timing(json.loads(line), question)


def _timing(answer: dict[str, Any], question: Question) -> Timing:
    return Timing(
        index=answer["index"],
        at=time.time(),
        seconds=answer["seconds"],
        times_us={int(size): tuple(times) for size, times in answer["times"].items()},
        chosen={int(size): choice for size, choice in answer["chosen"].items()},
        error=_error(answer["code"], answer["said"], question.limit_s),
    )


def _error(code: int | None, said: str, limit_s: float) -> str | None:
    """Class and reason: of a failure of NCCL the one that a launch would have, too."""
    if code == 0:
        return None
    if known := next(iter(failures.matching(said)), None):
        return f"{known.name}: {known.line}"
    if code is None:
        return f"hang: not over after {limit_s:g} s, killed"
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "it says nothing")
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
    return f"failed: {ended}: {last}"
