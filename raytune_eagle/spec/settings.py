"""What may be written as a server flag or an environment variable in a spec, known without asking any SGLang.

Each function gives one line per mistake: ``.NAME: what to write instead``, to be put behind the place of its mapping.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from raytune_eagle import rules
from raytune_eagle.spec.flag_numbers import number_mistake, whole_number_mistake

# Flags that the engine or another part of the spec owns: given twice, they would disagree.
OWNED_FLAGS = {
    "model-path": "set engine.model",
    "model": "set engine.model",
    "speculative-algorithm": "set space.speculative (EAGLE3 is the only algorithm tuned)",
    "speculative-algo": "set space.speculative (EAGLE3 is the only algorithm tuned)",
    "speculative-draft-model-path": "set engine.draft",
    "speculative-draft-model": "set engine.draft",
    "speculative-num-steps": "set space.speculative.num_steps",
    "speculative-eagle-topk": "set space.speculative.eagle_topk",
    "speculative-num-draft-tokens": "set space.speculative.num_draft_tokens",
    "host": "each launch binds its node's address",
    "port": "each launch takes a free port",
    "nccl-port": "each launch takes a free port",
    "api-key": "each launch has a random key of its own",
    "admin-api-key": "each launch has a random key of its own",
    "config": "write its flags into engine.args",
}
SWITCHES = ("trust-remote-code", "skip-server-warmup", "skip-tokenizer-init", "sleep-on-idle")
"""Flags without a value, beside every ``enable-…`` and ``disable-…`` (parser of SGLang 0.5.20)."""

_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY)$", re.IGNORECASE)
_LIKE = 0.86
"""As alike as NCCL_PROTOCOL and NCCL_PROTO; NCCL_SYM_CTAS and NCCL_MAX_CTAS, which both exist, are less."""
_LEAST = {"num_steps": 1, "eagle_topk": 1, "num_draft_tokens": 2}
_STARTS = ("draft", *rules.SPECULATIVE_NAMES)


def flag_problems(flags: Mapping[str, Any]) -> Iterator[str]:
    """Of flags and their values; a tuple is several choices, each of which is looked at."""
    for name, written in flags.items():
        bare = name.lstrip("-").replace("_", "-")
        if name != bare:
            yield f"{name!r}: write the flag as {bare!r}"
        elif name in OWNED_FLAGS:
            yield f".{name}: does not belong here: {OWNED_FLAGS[name]}"
        elif isinstance(written, tuple):
            yield from (
                f".{name}[{index}]: {wrong}"
                for index, value in enumerate(written)
                if (wrong := _flag_value_mistake(name, value))
            )
        elif wrong := _flag_value_mistake(name, written):
            yield f".{name}: {wrong}"


def _flag_value_mistake(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and value.strip().lower() in {"true", "false"}:
        return f"{value!r} is a text: write {value.strip().lower()}, without quotes"
    if isinstance(value, str) and value.startswith("--"):
        return f"{value!r} would be read as a flag of its own"
    if (name in SWITCHES or name.startswith(("enable-", "disable-"))) and not isinstance(value, bool):
        return f"takes no value: write true or false, not {value!r}"
    return number_mistake(rules.ALIASES.get(name, name), value)


def env_problems(env: Mapping[str, Any]) -> Iterator[str]:
    """Of environment variables that every launch gets."""
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"{name!r} is no environment variable name"
        elif name != name.upper() and name.upper() in rules.NCCL_NAMES:
            yield f".{name}: nobody reads that: write {name.upper()}"
        elif _SECRET.search(name):
            yield f".{name}: a secret would be kept in every record: set it in the environment of the nodes"
        elif wrong := _misspelt(name) or _nccl_mistake(name, value):
            yield f".{name}: {wrong}"


def nccl_problems(space: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Of the choices for NCCL variables."""
    for name, choices in space.items():
        if not name.startswith("NCCL_"):
            near = difflib.get_close_matches(name, rules.NCCL_NAMES, 1, _LIKE)
            yield f"{name!r}: NCCL variables start with NCCL_" + (
                f"; did you mean {near[0]}?" if near else " (others belong in engine.env)"
            )
        elif slip := _misspelt(name):
            yield f".{name}: {slip}"
            continue
        for index, value in enumerate(choices):
            if wrong := _nccl_mistake(name, value):
                yield f".{name}[{index}]: {wrong}"


def _nccl_mistake(name: str, value: Any) -> str | None:
    if isinstance(value, bool) and name.startswith("NCCL_"):
        words = "on, yes and true" if value else "off, no and false"
        return f"YAML reads {words} as {value}: write a number, or quote a text"
    return None if value is None else rules.nccl_mistake(name, str(value))


def _misspelt(name: str) -> str | None:
    """What a name that is a slip should be; NCCL passes over what it does not know, so a launch would be wasted."""
    if not name.startswith("NCCL_") or name in rules.NCCL_NAMES:
        return None
    near = difflib.get_close_matches(name, rules.NCCL_NAMES, 1, _LIKE)
    return f"NCCL reads no such variable; did you mean {near[0]}?" if near else None


def start_flags(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The server flags of one launch of ``start_from``."""
    return {name: value for name, value in entry.items() if name not in _STARTS and not name.isupper()}


def start_problems(entry: Mapping[str, Any]) -> Iterator[str]:
    """Of one launch of ``start_from``: capitals are environment, the triple and `draft` ours, all else is flags."""
    mended = {_meant(name) or name: value for name, value in entry.items()}
    if (whole := rules.triple_is_whole(dict(entry))) and rules.triple_is_whole(mended):
        yield whole
    for name, value in entry.items():
        if name.isupper():
            yield from env_problems({name: value}) if not isinstance(value, list) else [f".{name}: give one value"]
        elif name in _STARTS:
            yield from _own_start_problems(name, value)
        elif name in OWNED_FLAGS:
            yield f".{name}: does not belong here: {OWNED_FLAGS[name]}"
        elif near := _meant(name):
            yield f".{name}: unknown; did you mean {near!r}?"
        elif "_" in name:
            yield f".{name}: unknown; a flag is {name.replace('_', '-')!r}"
        else:
            yield from flag_problems({name: value})


def _meant(name: str) -> str | None:
    """No flag has an underscore, so such a name is a slip; and no flag is called like one of the three numbers."""
    spelt = name.replace("-", "_")
    return next(iter(difflib.get_close_matches(spelt, _STARTS, 1, 0.6 if "_" in name else _LIKE)), None)


def _own_start_problems(name: str, value: Any) -> Iterator[str]:
    if name == "draft":
        if value is not None and (not isinstance(value, str) or not value):
            yield f".draft: {value!r} is no path of a draft"
    elif value is not None:
        if isinstance(value, bool) or not isinstance(value, int):
            yield f".{name}: {whole_number_mistake(value) or f'{value!r} is a text: write it without quotes'}"
        elif value < _LEAST[name]:
            yield f".{name}: {value} is too small: {_LEAST[name]} or more"
