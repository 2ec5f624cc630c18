"""Server flags that are one number each, and between which numbers, known without asking any SGLang.

The flags are those of the parser of SGLang 0.5.20. Their limits are its own (arg_groups/validation_hook.py,
kv_cache_hook.py, lora_hook.py, serving_hook.py), or arithmetic: a share, a size, a port, a divisor.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple


class Limits(NamedTuple):
    """From `low` to `high`, both included unless they are `open`."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def hold(self, number: float) -> bool:
        """Whether a number keeps to them."""
        above = number > self.low if self.open_low else number >= self.low
        below = number < self.high if self.open_high else number <= self.high
        return above and below

    def __str__(self) -> str:
        """As what to write."""
        if self.high == math.inf:
            return f"more than {self.low:g}" if self.open_low else f"{self.low:g} or more"
        if not self.open_low:
            return f"{self.low:g} to {self.high:g}"
        return f"more than {self.low:g} and {'less than' if self.open_high else 'at most'} {self.high:g}"


_ANY, _ONE, _NONE, _POSITIVE = Limits(), Limits(1), Limits(0), Limits(0, open_low=True)
_PORT, _SHARE = Limits(1, 65535), Limits(0, 1)

WHOLE: dict[str, Limits] = {
    **dict.fromkeys(("tp-size", "pp-size", "dp-size", "ep-size", "nnodes", "decode-context-parallel-size"), _ONE),
    **dict.fromkeys(("attention-context-parallel-size", "moe-data-parallel-size", "page-size"), _ONE),
    **dict.fromkeys(("cuda-graph-max-bs", "cuda-graph-max-bs-decode", "cuda-graph-max-bs-prefill"), _ONE),
    **dict.fromkeys(("max-running-requests", "pp-max-micro-batch-size", "torch-compile-max-bs"), _ONE),
    **dict.fromkeys(("max-loras-per-batch", "max-lora-rank", "tokenizer-worker-num", "detokenizer-worker-num"), _ONE),
    **dict.fromkeys(("stream-interval", "decode-log-interval", "gpu-id-step", "max-queued-requests"), _ONE),
    **dict.fromkeys(("node-rank", "base-gpu-id", "cpu-offload-gb"), _NONE),
    **dict.fromkeys(("disaggregation-bootstrap-port", "grpc-port", "engine-info-bootstrap-port"), _PORT),
    **dict.fromkeys(("random-seed", "chunked-prefill-size", "num-continuous-decode-steps"), _ANY),
}
"""One whole number each."""

REAL: dict[str, Limits] = {
    "mem-fraction-static": Limits(0, 1, open_low=True, open_high=True),
    "swa-full-tokens-ratio": Limits(0, 1, open_low=True),
    "speculative-accept-threshold-single": _SHARE,
    "speculative-accept-threshold-acc": _SHARE,
    "schedule-conservativeness": _NONE,
    "watchdog-timeout": _POSITIVE,
    "mamba-full-memory-ratio": _NONE,
    "hicache-ratio": _NONE,
}
"""One number each, with a fraction or without."""

WITH_UNITS = dict.fromkeys(("context-length", "max-total-tokens", "max-prefill-tokens"), _ONE)
"""SGLang reads 32k and 1M there too (``human_readable_int``): only plain numbers are looked at."""


def number_mistake(name: str, value: Any) -> str | None:
    """What is wrong with the value of the flag `name`, and what to write; None where nothing is known to be."""
    if name in WHOLE:
        return whole_number_mistake(value) or _outside(value, WHOLE[name])
    if name in REAL:
        return _no_number(value) or _outside(value, REAL[name])
    if name in WITH_UNITS and _no_number(value) is None:
        return _outside(value, WITH_UNITS[name])
    return None


def whole_number_mistake(value: Any) -> str | None:
    """What is wrong with a value that must be a whole number."""
    if isinstance(value, float) and value.is_integer():
        return f"{value!r} is no whole number: write {int(value)}"
    number = isinstance(value, int) and not isinstance(value, bool)
    if number or (isinstance(value, str) and re.fullmatch(r"-?\d+", value)):
        return None
    return f"{value!r} is no whole number"


def _no_number(value: Any) -> str | None:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return None if math.isfinite(float(value)) else f"{value!r} is no finite number"
        except ValueError:
            pass
    return f"{value!r} is no number"


def _outside(value: Any, limits: Limits) -> str | None:
    return None if limits.hold(float(value)) else f"{value}: write {limits}"
