"""Gates on NCCL: is it on the path of decoding at all, and did it take its settings?

NCCL tells what it took where NCCL_DEBUG=INFO is set (``NCCL_PROTO set by environment to LL``, subsystem ENV), and
what it chose with the subsystem TUNING: ``AllReduce: 4096 Bytes -> Algo RING proto LL`` from 2.24 on, before that
``4096 Bytes -> Algo 1 proto 0`` without the function (seen with 2.28.9; src/enqueue.cc and src/include/param.h).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from raytune_eagle.gates.base import Seen, passed, unknown, warned
from raytune_eagle.model.measurement import Gate
from raytune_eagle.rules.nccl_lists import named, spelling

_TAKEN = re.compile(r"NCCL INFO (NCCL_\w+) set by environment to (\S+?)\.?(?=\s|$)")
_INVALID = re.compile(r"Invalid (?:value \S+ for )?(NCCL_\w+)")
_OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")
"""What NCCL makes of a number for NCCL_P2P_LEVEL and NCCL_NET_GDR_LEVEL (``ncclGetLevel``, src/graph/paths.cc)."""
_CHOSEN = re.compile(r"(?:(\w+): )?\d+ Bytes -> Algo (\w+) proto (\w+)")
_NUMBERED = {
    "NCCL_ALGO": ("tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat"),
    "NCCL_PROTO": ("ll", "ll128", "simple"),
}
_NO_CUSTOM = re.compile(r"Setup Custom allreduce failed|Custom\w*[Aa]ll[Rr]educe\w* is disabled")
_FUSION = ("enable_flashinfer_allreduce_fusion", "flashinfer_allreduce_fusion_backend")
"""Set by SGLang itself for some models on Hopper and later: the first up to 0.5.16, the second in 0.5.20."""
_NUMBER = re.compile(r"[-+]?((0[xX])[0-9a-fA-F]+|(0)[0-7]+|[0-9]+)")
_WITHOUT = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")


def knobs(seen: Seen) -> dict[str, str]:
    """NCCL settings of this launch that could change its speed."""
    return {name: value for name, value in seen.config.env.items() if name.startswith("NCCL_") and name not in _WITHOUT}


def on_path(seen: Seen) -> Iterator[Gate]:
    """Do the all-reduces of decoding go through NCCL? Asked only where its settings are tuned."""
    if not knobs(seen) or not seen.info:
        return
    if other := _other_path(seen):
        yield warned("nccl_path", f"{other}: NCCL settings change nothing in decoding")
    else:
        yield passed("nccl_path")


def _other_path(seen: Seen) -> str | None:
    """What takes the messages in NCCL's place (SGLang 0.5.20, ``custom_all_reduce.py``, ``communicator.py``)."""
    if (seen.number("tp_size") or 1) == 1:
        return "one GPU serves the model, nothing is reduced"
    if any(seen.info.get(name) for name in _FUSION):
        return "FlashInfer fuses the all-reduces: set enforce-disable-flashinfer-allreduce-fusion to tune NCCL"
    if any(function == "AllReduce" for function, *_ in _CHOSEN.findall(seen.log)):
        return None
    if not seen.info.get("disable_custom_all_reduce") and not _NO_CUSTOM.search(seen.log):
        return "SGLang's custom all-reduce takes messages up to 8 MB: set disable-custom-all-reduce to tune NCCL"
    return None


def took(seen: Seen) -> Iterator[Gate]:
    """Did NCCL take each setting, with its value, and does it choose as told?

    SGLang writes some over before NCCL reads them: its deterministic mode sets NCCL_ALGO (``server_args.py``, 0.5.16).
    """
    if not (asked := knobs(seen)):
        return
    if "NCCL INFO" not in seen.log:
        yield unknown("nccl_knobs", "NCCL says nothing: set NCCL_DEBUG: INFO in engine.env to know")
        return
    taken, refused = _taken(seen.log), set(_INVALID.findall(seen.log))
    problems = [f"{name}={asked[name]} is invalid, NCCL took another" for name in asked if name in refused]
    for name in (name for name in asked if taken and name not in refused):
        problems += _against_taken(name, asked[name], taken.get(name, ()))
    problems += [line for name in _NUMBERED if name in asked and (line := _against_choice(seen, name, asked[name]))]
    if problems:
        yield warned("nccl_knobs", "; ".join(problems))
    elif not taken and not (_CHOSEN.search(seen.log) and set(asked) <= set(_NUMBERED)):
        yield unknown("nccl_knobs", "NCCL does not say what it read: leave NCCL_DEBUG_SUBSYS out, or name ENV in it")
    else:
        yield passed("nccl_knobs")


def _taken(log: str) -> dict[str, list[str]]:
    """What NCCL says that it read, by name; each value once, since every process says it."""
    found: dict[str, list[str]] = {}
    for name, value in dict.fromkeys(_TAKEN.findall(log)):
        found.setdefault(name, []).append(value)
    return found


def _against_taken(name: str, asked: str, values: Sequence[str]) -> Iterator[str]:
    """Values that NCCL read and nobody asked for."""
    if not values:
        yield f"{name}={asked} was not read"
    elif others := [value for value in values if _read(name, value) != _read(name, asked)]:
        yield f"{name}={asked} was asked for, NCCL took {', '.join(others)}: something set it over"


def _read(name: str, text: str) -> str | int:
    """A value as NCCL reads it: lists in any order and case, numbers as C writes them, old numbers of levels."""
    if name.endswith("_LEVEL") and text.isdecimal():
        return _OLD_LEVELS[min(int(text), len(_OLD_LEVELS) - 1)]
    if number := _NUMBER.fullmatch(text):
        return int(number[0], 16 if number[2] else 8 if number[3] else 10)
    return spelling(name, text)


def _against_choice(seen: Seen, name: str, asked: str) -> str | None:
    """What NCCL chose for all-reduces that `asked` does not allow."""
    allowed = named(name, asked).get("allreduce")
    place = list(_NUMBERED).index(name) + 1
    chosen = {_word(name, found[place]) for found in _CHOSEN.findall(seen.log) if found[0] in {"", "AllReduce"}}
    others = sorted(chosen - allowed) if allowed else []
    return f"{name}={asked}, but all-reduces run with {', '.join(others)}" if others else None


def _word(name: str, text: str) -> str:
    """An algorithm or protocol as `raytune_eagle.rules` spells it."""
    known = _NUMBERED[name]
    return known[int(text)] if text.isdigit() and int(text) < len(known) else text.lower().replace("_", "")
