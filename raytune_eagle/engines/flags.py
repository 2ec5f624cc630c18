"""The server flags of the SGLang in hand: the interpreter that serves is asked, so no launch meets an unknown one.

To ask takes some 5 s, most of it imports, so that the answer is kept under XDG_CACHE_HOME (else ~/.cache) for that
interpreter and version. Nothing of SGLang is imported here: the question runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.machine import Installed
from raytune_eagle.errors import NodeError
from raytune_eagle.home import home

_ASK_S = 240.0
_LIKE = 0.6
_SHOWN_CHOICES = 12
_MARK = "raytune-eagle-flags "
# allow_abbrev is left to SGLang's own parser: only whole names are taken from this one.
_QUESTION = """
import argparse, json, sys
if sys.argv[1] == "cpu":
    from raytune_eagle.engines.cpu import shim
    shim.install()
import sglang
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
flags = {}
for action in parser._actions:
    for name in action.option_strings if action.dest != "help" else ():
        flags[name.removeprefix("--")] = {
            "bare": action.nargs == 0,
            "kind": getattr(action.type, "__name__", None),
            "choices": sorted(map(str, action.choices)) if action.choices else None,
        }
print(sys.argv[2] + json.dumps({"version": sglang.__version__, "flags": flags}))
"""

RENAMED = {
    "cuda-graph-max-bs": "cuda-graph-max-bs-decode",
    "cuda-graph-bs": "cuda-graph-bs-decode",
    "speculative-draft-model": "speculative-draft-model-path",
}
"""What SGLang calls now what it has renamed: by 0.5.20, ``--cuda-graph-max-bs`` and ``--cuda-graph-bs``."""


@dataclass(frozen=True)
class Flag:
    """One server flag.

    Attributes:
        bare: takes no value.
        kind: name of the function that reads its value (``int``, ``str`` …).
        choices: the values that it takes; None for any.
    """

    bare: bool
    kind: str | None
    choices: tuple[str, ...] | None


@dataclass(frozen=True)
class Flags:
    """All server flags of one version, by their names without dashes."""

    version: str
    flags: Mapping[str, Flag]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; raises ValueError, KeyError or TypeError for anything else."""
        found = json.loads(text)
        flags = {
            name: Flag(each["bare"], each["kind"], tuple(each["choices"]) if each["choices"] else None)
            for name, each in found["flags"].items()
        }
        return cls(str(found["version"]), flags)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({"version": self.version, "flags": {name: asdict(flag) for name, flag in self.flags.items()}})

    def choices(self, name: str) -> tuple[str, ...] | None:
        """What a flag takes; None for anything, and for a flag that there is not."""
        flag = self.flags.get(name)
        return flag.choices if flag else None

    def mistake(self, name: str, value: Any) -> str | None:
        """Why the server would not take ``--name value``, and what to write instead; None when it would."""
        flag = self.flags.get(name)
        if flag is None:
            return self._unknown(name)
        if value is None or value is False:
            return None  # left out of the command line
        if flag.bare:
            return None if value is True else f"takes no value: write true or false, not {value!r}"
        if value is True:
            return "needs a value" + (f": one of {_few(flag.choices)}" if flag.choices else "")
        return _bad_value(flag, value)

    def _unknown(self, name: str) -> str:
        longer = [known for known in self.flags if known.startswith(name)]
        if len(longer) == 1:
            return f"short for {longer[0]!r}: write that, so that the rules know it too"
        near = RENAMED.get(name)
        if near not in self.flags:
            near = next(iter([*longer, *difflib.get_close_matches(name, self.flags, 1, _LIKE)]), None)
        return f"SGLang {self.version} has no such flag" + (f"; did you mean {near!r}?" if near else "")


def _bad_value(flag: Flag, value: Any) -> str | None:
    for item in value if isinstance(value, list) else [value]:
        if flag.choices and str(item) not in flag.choices:
            near = difflib.get_close_matches(str(item), flag.choices, 1, _LIKE)
            return f"{item!r} is not one of {_few(tuple(dict.fromkeys([*near, *flag.choices])))}"
        if flag.kind in {"int", "float"}:
            try:
                (int if flag.kind == "int" else float)(str(item))
            except ValueError:
                return f"{item!r} is no {'whole number' if flag.kind == 'int' else 'number'}"
    return None


def _few(choices: tuple[str, ...]) -> str:
    more = ", …" if len(choices) > _SHOWN_CHOICES else ""
    return ", ".join(choices[:_SHOWN_CHOICES]) + more


def mistakes(flags: Flags, written: Iterable[tuple[str, str, Any]]) -> Iterator[str]:
    """One line per mistake; `written`: where a flag stands (``engine.args.tp-size``), its name and its value."""
    for place, name, value in written:
        if wrong := flags.mistake(name, value):
            yield f"{place}: {wrong}"


def ask(settings: Settings, there: Installed) -> Flags:
    """All flags of the node's own SGLang, from the cache or from itself.

    Raises:
        NodeError: it could not be asked.
    """
    known = cached(settings, there)
    if known is not None:
        return known
    kind = "cuda" if settings.gpus else "cpu"
    command = [settings.interpreter, "-c", _QUESTION, kind, _MARK]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ASK_S)
        line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith(_MARK))
        flags = Flags.from_json(line.removeprefix(_MARK))
    except (OSError, subprocess.SubprocessError, StopIteration, ValueError, KeyError, TypeError) as exc:
        why = str(getattr(exc, "stderr", None) or exc).strip().splitlines()
        raise NodeError(
            f"{settings.interpreter}: SGLang does not tell its flags: {(why or ['no answer'])[-1]}"
        ) from exc
    _keep(_file(settings, there), flags)
    return flags


def cached(settings: Settings, there: Installed) -> Flags | None:
    """What this interpreter's SGLang of this version answered before; None when it was not asked yet."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = Flags.from_json(_file(settings, there).read_text(encoding="utf-8"))
        return found if found.version == there.sglang else None
    return None


def _file(settings: Settings, there: Installed) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache").expanduser()
    kind = "cuda" if settings.gpus else "cpu"
    name = hashlib.blake2s(f"{there.home}\n{there.sglang}\n{kind}".encode(), digest_size=8).hexdigest()
    return cache / "raytune-eagle" / f"flags-{name}.json"


def _keep(path: Path, flags: Flags) -> None:
    """Whole or not at all; without a place to keep it the next one asks again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(flags.to_json())
        Path(file.name).replace(path)
