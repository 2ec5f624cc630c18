"""Prompt sets: read from where the user has them, and refused where they would measure nothing.

How long a draft is believed depends on the text: what a prompt set contains decides what a benchmark says. So prompts
are real texts, in categories, some of them held out of the search to confirm its winner on.
"""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterator, Sized
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

from raytune_eagle.errors import SpecError
from raytune_eagle.model.workload import Prompt
from raytune_eagle.workload.randomness import looks_random

_BUILTIN = "builtin:"
_LONGEST = 4_000_000  # characters of one prompt: beyond every model's context
_SHOWN = 20  # mistakes
_MANY = 1000
"""Prompts; as many as sglang.bench_serving sends where it is not told (0.5.20)."""
_LIKE = 0.8
"""As alike as categories and category."""
_HUMAN = ("human", "user", None)
"""Who says what a model is asked, by ShareGPT's and OpenAI's names; None where nobody is named."""
_KEYS = ("held_out", "category")
"""Keys without which a line is a prompt all the same."""
_SHAPE = 'write one JSON object per line: {"text": "…", "id": "…", "category": "…"}; id and category may be left out'


class _Line(NamedTuple):
    """A prompt and where it stands, for messages."""

    place: str
    prompt: Prompt
    held_out: bool


class _Entry(NamedTuple):
    """What stands at a place of a source, before it is known to be a prompt."""

    place: str
    fallback_id: str
    item: Any


def load_prompts(source: str, *, held_out: bool | None = False) -> tuple[Prompt, ...]:
    """Read a prompt set.

    `source` is ``builtin:NAME``; or a file of JSON lines (``text`` or ``prompt``; optional ``id``, ``category``,
    ``held_out``), of ShareGPT conversations (a JSON list; the first human turn counts), or of plain text, one prompt a
    line. Byte order marks, CRLF and empty lines are no mistake. `held_out` asks for the prompts that are kept out of
    the search (True), for all others (False) or for all (None).

    Raises:
        SpecError: the file is missing, is no UTF-8, is empty, has lines that are no prompts (each is named), the same
            id twice, a misspelt key or random tokens for prompts, or has none of the kind asked for.
    """
    lines = _checked_lines(source)
    chosen = tuple(line.prompt for line in lines if held_out is None or line.held_out == held_out)
    if not chosen:
        raise SpecError(_none_chosen(source, held_out=bool(held_out)))
    return chosen


def held_out_prompts(source: str) -> tuple[Prompt, ...]:
    """The prompts of a set that are kept out of the search; empty where none is. Raises as `load_prompts` does."""
    return tuple(line.prompt for line in _checked_lines(source) if line.held_out)


def drawn(prompts: tuple[Prompt, ...], most: int | None, seed: int) -> tuple[Prompt, ...]:
    """At most `most` of them (None: all), drawn by `seed`, in their own order: the same of the same, each time."""
    if most is None or most >= len(prompts):
        return prompts
    places = random.Random(seed).sample(range(len(prompts)), most)  # noqa: S311 - nothing secret is drawn
    return tuple(prompts[place] for place in sorted(places))


def told_if_many(prompts: Sized, option: str) -> list[str]:
    """One line where a pass over so many prompts takes long, with the option that takes fewer."""
    count = len(prompts)
    return [f"{count:,} prompts are sent in each pass; {option} takes fewer"] if count > _MANY else []


def _checked_lines(source: str) -> list[_Line]:
    lines = _lines(_entries(source, _read(source)))
    if looks_random(line.prompt.text for line in lines):
        raise SpecError(
            f"{source}: these prompts look like random tokens (words, or characters in a row, come again as rarely as "
            "by chance); no draft is trained on such text, so its acceptance would mean nothing: give texts like those "
            "to be served, or builtin:mixed"
        )
    return lines


def _none_chosen(name: str, *, held_out: bool) -> str:
    if held_out:
        return f'{name}: no prompt is held out; write "held_out": true into some of its JSON lines'
    return f'{name}: no prompts to measure with; give at least one that is not "held_out": true'


def builtin_names() -> tuple[str, ...]:
    """Names of the bundled prompt sets, for example ``builtin:mixed``."""
    names = (item.name for item in _bundled().iterdir())
    return tuple(sorted(_BUILTIN + name.removesuffix(".jsonl") for name in names if name.endswith(".jsonl")))


def _bundled() -> Traversable:
    return files("raytune_eagle") / "builtin" / "prompts"


def _read(source: str) -> str:
    """The text of a source."""
    if source.startswith(_BUILTIN):
        if source not in builtin_names():
            raise SpecError(f"{source}: no such bundled prompt set; write one of {', '.join(builtin_names())}")
        data = (_bundled() / f"{source.removeprefix(_BUILTIN)}.jsonl").read_bytes()
    else:
        data = _read_file(source)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise SpecError(f"{source}:{line}: not UTF-8; save the file as UTF-8 (iconv -t UTF-8 does)") from exc
    if not text.strip():
        raise SpecError(f"{source}: empty; {_SHAPE}")
    return text


def _read_file(source: str) -> bytes:
    try:
        return Path(source).expanduser().read_bytes()
    except FileNotFoundError as exc:
        bundled = ", ".join(builtin_names())
        raise SpecError(f"{source}: no such file; write the path of a prompt file, or one of {bundled}") from exc
    except RuntimeError as exc:  # of expanduser
        raise SpecError(f"{source}: no such user; write the whole path") from exc
    except (OSError, ValueError) as exc:  # the latter: a NUL in the name
        reason = getattr(exc, "strerror", None) or str(exc)
        raise SpecError(f"{source}: cannot be read ({reason}); write the path of a prompt file") from exc


def _entries(source: str, text: str) -> list[_Entry]:
    """What stands in a source, read as the format that its name, or else its first character, says."""
    suffix, start = Path(source).suffix.lower(), text.lstrip()[0]
    plain = suffix in {".txt", ".md"} or (suffix not in {".json", ".jsonl"} and start not in "[{")
    if source.startswith(_BUILTIN):
        plain = False
    if not plain and start == "[":
        return _json_list(source, text)
    # not splitlines: it would also cut at form feeds and Unicode's own separators, which a prompt may hold
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    return [
        _Entry(f"{source}:{number}", f"line-{number}", line if plain else _json(line)) for number, line in lines if line
    ]


def _json(line: str) -> Any:
    """A line's JSON value; the error, as a value, where it has none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as exc:
        return exc


def _json_list(source: str, text: str) -> list[_Entry]:
    items = _json(text)
    if isinstance(items, Exception):
        place = f"{source}:{items.lineno}" if isinstance(items, json.JSONDecodeError) else source
        raise SpecError(f"{place}: not JSON, though it starts like a list; write ShareGPT conversations, or {_SHAPE}")
    return [_Entry(f"{source}[{index}]", f"item-{index}", item) for index, item in enumerate(items)]


def _lines(entries: list[_Entry]) -> list[_Line]:
    """The prompts; raises all mistakes at once."""
    lines, problems, seen = [], list(_slips(entries)), dict[str, str]()
    for entry in [entry for entry in entries if not _nobody_asks(entry.item)] or entries:
        try:
            line = _line(entry)
        except ValueError as exc:
            problems.append(f"{entry.place}: {exc}")
            continue
        lines.append(line)
        if line.prompt.id in seen:
            problems.append(f"{line.place}: id {line.prompt.id!r} is taken by {seen[line.prompt.id]}; give it another")
        seen.setdefault(line.prompt.id, line.place)
    if problems:
        more = [f"… and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise SpecError([*problems[:_SHOWN], *more])
    return lines


def _slips(entries: list[_Entry]) -> Iterator[str]:
    """One line for each key that is one of ours misspelt: nothing would be held out, or all be of one category.

    Keys that look like none of ours are the user's own.
    """
    places: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        for key in entry.item if isinstance(entry.item, dict) else ():
            near = difflib.get_close_matches(key.casefold(), _KEYS, 1, _LIKE)
            if near and key not in _KEYS and near[0] not in entry.item:
                places.setdefault((key, near[0]), []).append(entry.place)
    for (key, meant), found in places.items():
        more = f" (and {len(found) - 1} more like it)" if len(found) > 1 else ""
        yield f'{found[0]}: "{key}": nobody reads that; did you mean "{meant}"?{more}'


def _line(entry: _Entry) -> _Line:
    """An entry as a prompt. Raises ValueError: what is wrong and what to write instead."""
    item = _first_turn(entry.item)
    if isinstance(item, Exception):
        raise ValueError(f"not JSON; {_SHAPE}")  # noqa: TRY004 - one kind of error for the caller
    if not isinstance(item, dict):
        raise ValueError(f"a JSON {type(item).__name__}, not an object; {_SHAPE}")  # noqa: TRY004 - likewise
    name, category, held_out = item.get("id", entry.fallback_id), item.get("category", "all"), item.get("held_out")
    if not isinstance(name, str | int) or name == "":
        raise ValueError('"id" must be a text or a number')
    if not isinstance(category, str) or not category:
        raise ValueError('"category" must be a text, for example "code"')
    if held_out not in (True, False, None):
        raise ValueError('"held_out" must be true or false')
    prompt = Prompt(id=str(name), category=category, text=_checked(item.get("text", item.get("prompt"))))
    return _Line(entry.place, prompt, bool(held_out))


def _checked(text: Any) -> str:
    if text is None:
        raise ValueError(f'no "text" (or "prompt"); {_SHAPE}')
    if not isinstance(text, str):
        raise ValueError(f'"text" is a JSON {type(text).__name__}; write a string')  # noqa: TRY004 - see _line
    if not text.strip():
        raise ValueError('"text" is empty; write the prompt, or take the line out')
    if len(text) > _LONGEST:
        raise ValueError(f"a prompt of {len(text):,} characters; at most {_LONGEST:,} can be sent, split it")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ValueError("half of a UTF-16 pair (\\ud800…\\udfff) in its text; write the whole character") from exc
    return text


def _first_turn(item: Any) -> Any:
    """An entry with its text: a string as it is, a ShareGPT conversation by its first human turn."""
    if isinstance(item, str):
        return {"text": item}
    turns = item.get("conversations") if isinstance(item, dict) else None
    return {**item, "text": _asked(turns)} if isinstance(turns, list) else item


def _asked(turns: list[Any]) -> Any:
    human = (turn for turn in turns if isinstance(turn, dict) and turn.get("from", turn.get("role")) in _HUMAN)
    first = next(human, {})
    return first.get("value", first.get("content"))


def _nobody_asks(item: Any) -> bool:
    """Whether it is a conversation that no human opens: the public ShareGPT files have some, which no tool sends."""
    turns = item.get("conversations") if isinstance(item, dict) else None
    return isinstance(turns, list) and _asked(turns) in (None, "")
