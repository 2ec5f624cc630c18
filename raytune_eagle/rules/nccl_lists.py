"""The list syntax of NCCL_PROTO and NCCL_ALGO, and what a pair of lists leaves to run (NCCL 2.24-2.31)."""

from __future__ import annotations

from functools import lru_cache

from raytune_eagle.rules.base import Version

PROTOCOLS = ("LL", "LL128", "Simple")
"""Tokens of NCCL_PROTO (docs/userguide/source/env.rst)."""

ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")
"""Tokens of NCCL_ALGO (likewise; NVLS from 2.17, NVLSTree from 2.18, PAT from 2.23)."""

FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
"""Prefixes of NCCL_PROTO and NCCL_ALGO from 2.24 on."""

_TOKENS = {"NCCL_PROTO": PROTOCOLS, "NCCL_ALGO": ALGORITHMS}
_LOWER = {name: tuple(token.lower() for token in tokens) for name, tokens in _TOKENS.items()}
_FUNCTIONS = tuple(name.lower() for name in FUNCTIONS)
_ALGORITHMS_OF = {
    "broadcast": {"ring"},
    "reduce": {"ring"},
    "allgather": {"ring", "pat", "nvls", "collnetdirect"},
    "reducescatter": {"ring", "pat", "nvls", "collnetdirect"},
    "allreduce": {"ring", "tree", "collnetdirect", "collnetchain", "nvls", "nvlstree"},
}
_NEEDED = ("broadcast", "allgather", "allreduce")
_ANY_PROTOCOL = {"ring", "tree"}
_MANY_NODES = {"nvlstree", "pat", "collnetdirect", "collnetchain"}
Lists = dict[str, frozenset[str]]


@lru_cache(maxsize=4096)
def parse(name: str, text: str) -> Lists | str:
    """Elements per function that a list names, in lower case; a string is what is wrong with it.

    ``parseList``: ``[function:]element,…;…``, ``^`` in front of a list excludes, only the first list stands without a
    function, case does not matter and blanks are not skipped (2.24-2.31: anything else is ncclInvalidUsage).
    """
    lists: Lists = {}
    for index, entry in enumerate(part for part in text.split(";") if part):
        prefix, colon, elements = entry.partition(":")
        if not colon:
            prefix, elements = "", entry
        if not prefix and index:
            return f"{entry!r}: only the first list may stand without a function"
        if prefix and prefix.lower() not in _FUNCTIONS:
            return f"{prefix!r} is not one of {', '.join(FUNCTIONS)}"
        found = _elements(name, elements)
        if isinstance(found, str):
            return found
        lists |= dict.fromkeys((prefix.lower(),) if prefix else _FUNCTIONS, found)
    return lists or f"{text!r} names none of {', '.join(_TOKENS[name])}"


def _elements(name: str, text: str) -> frozenset[str] | str:
    known = _LOWER[name]
    tokens = [token for token in text.removeprefix("^").split(",") if token]
    for token in tokens:
        if token.lower() not in known:
            return f"{token!r} is not one of {', '.join(_TOKENS[name])}"
    named = frozenset(token.lower() for token in tokens)
    return frozenset(known) - named if text.startswith("^") else named


def spelling(name: str, text: str) -> str:
    """One text for all spellings that NCCL reads as the same; values of other variables as they are."""
    if name not in _TOKENS:
        return text
    lists = parse(name, text)
    if isinstance(lists, str):
        return text
    within = {f: e & _ALGORITHMS_OF[f] if name == "NCCL_ALGO" else e for f, e in lists.items()}
    return ";".join(f"{function}:{','.join(sorted(within[function]))}" for function in sorted(within))


def unusable(algo: str | None, proto: str | None, nccl: Version, *, nvls: bool = False, nodes: int = 1) -> str | None:
    """What NCCL would refuse, at start or at the first broadcast, all-gather or all-reduce of a server."""
    for name, text in (("NCCL_ALGO", algo), ("NCCL_PROTO", proto)):
        lists = parse(name, text) if text is not None else {}
        if isinstance(lists, str):
            return f"{name}={text}: {lists}"
    algos = named("NCCL_ALGO", algo)
    protos = named("NCCL_PROTO", proto)
    set_ = " ".join(f"{n}={v}" for n, v in (("NCCL_ALGO", algo), ("NCCL_PROTO", proto)) if v is not None)
    for function in _NEEDED:
        allowed = algos.get(function, frozenset(_LOWER["NCCL_ALGO"]))
        if nccl >= (2, 31) and algos and function not in algos and function in protos:
            allowed = frozenset()
        usable = {a for a in allowed & _ALGORITHMS_OF[function] if _runs(a, protos.get(function), nvls, nodes)}
        if not usable:
            name = next(f for f in FUNCTIONS if f.lower() == function)
            return f"{set_} leaves {name} without an algorithm: {_portable(algo, function)}"
    return None


def named(name: str, text: str | None) -> Lists:
    """Elements per function; none for a list that is not set, or that NCCL would refuse."""
    lists = {} if text is None else parse(name, text)
    return {} if isinstance(lists, str) else lists


def _runs(algorithm: str, protocols: frozenset[str] | None, nvls: bool, nodes: int) -> bool:  # noqa: FBT001
    if algorithm == "nvls" and not nvls:
        return False
    if algorithm in _MANY_NODES and nodes == 1:
        return False
    return protocols is None or bool(protocols if algorithm in _ANY_PROTOCOL else protocols & {"simple"})


def _portable(algo: str | None, function: str) -> str:
    only = (algo or "").rpartition(":")[2]
    if function == "allreduce":
        return "add Ring"
    return f"write ring,{only.lower()};allreduce:{only.lower()}" if only and ";" not in (algo or "") else "add Ring"
