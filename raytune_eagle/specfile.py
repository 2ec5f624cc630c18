"""Reads search_spaces/*.yaml; every mistake is told at once, as ``path.to.key[index]: what to write instead``."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from raytune_eagle.errors import SpecError
from raytune_eagle.spec import Spec

_SHOWN = 60
"""Characters of a value."""
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
"""What to write instead, by pydantic's kind of error."""


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses what people write by accident: duplicate keys and aliases (anchor bombs)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not accepted", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                hint = "quote it" if key is not None else "empty"
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is not text: {hint}", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def number(self, node: yaml.ScalarNode) -> int | float:
        """YAML 1.1 reads 1:30 in base 60 and 010 in base 8, which nobody means."""
        text = str(self.construct_scalar(node))
        whole = node.tag.endswith(":int")
        value: int | float = self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)
        if ":" in text or (whole and re.fullmatch(r"[-+]?0[0-7_]+", text)):
            hint = f"{text} would be read as {value}: write a plain number, or quote a text"
            raise yaml.MarkedYAMLError(problem=hint, problem_mark=node.start_mark)
        return value


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.number)


def load(path: str | Path) -> Spec:
    """Read and check a spec file.

    Raises:
        SpecError: with every mistake found; a file that is no YAML gives one line with line and column.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as exc:
        raise SpecError(f"{path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise SpecError(f"{path}: not UTF-8 (byte {exc.start}): save it as UTF-8") from exc
    try:
        tree = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as exc:
        raise SpecError(f"{path}: {_yaml_problem(exc)}") from exc
    except (ValueError, RecursionError) as exc:  # a date that is none, a number of thousands of digits; too many [
        why = "nested too deeply" if isinstance(exc, RecursionError) else str(exc)
        raise SpecError(f"{path}: not YAML: {why}") from exc
    if not isinstance(tree, dict):
        raise SpecError(f"{path}: expected a mapping that starts with `name:`, found {type(tree).__name__}")
    return parse(tree)


def parse(tree: dict[str, Any]) -> Spec:
    """Check a spec that is already a mapping; raises `SpecError` with every mistake.

    Pydantic looks at what hangs together only where all its parts are sound: so what is wrong is taken out, a slip in
    a name mended, and the rest looked at again, until nothing new is found.
    """
    told: list[str] = []
    seen: list[Any] = []
    rest = tree
    while True:
        try:
            spec = Spec.model_validate(rest)
        except ValidationError as exc:
            seen += exc.errors()
            errors = [error for error in exc.errors() if not _echo(error, seen)]
            found = dict.fromkeys(line for error in errors for line in _lines(error, tree))
            new = [line for line in found if not any(_about_the_same(line, other) for other in told)]
            if not new:
                break
            told += new
            rest = _mended(rest, errors)
        else:
            if not told:
                return spec
            break
    raise SpecError(told)


def _about_the_same(line: str, other: str) -> bool:
    """Whether the place of one holds the place of the other."""
    one, two = sorted((line.partition(": ")[0], other.partition(": ")[0]), key=len)
    return two.startswith(one) and two[len(one) : len(one) + 1] in {"", ".", "["}


def _mended(tree: dict[str, Any], errors: list[Any]) -> dict[str, Any]:
    """The tree without the innermost keys of these errors; a list goes whole, or its numbers would move.

    What was meant by a misspelt key stands under its name, or it would be missed next.
    """
    kept = copy.deepcopy(tree)
    for error in errors:
        inner, path, place = kept, [], error["loc"]
        for part in place:
            if not isinstance(inner, dict) or part not in inner:
                break
            path.append((inner, part))
            inner = inner[part]
        if path:
            mapping, key = path[-1]
            value, meant = mapping.pop(key), _nearest(place)
            if error["type"] == "extra_forbidden" and key == place[-1] and meant:
                mapping.setdefault(meant, value)
    return kept


def _yaml_problem(exc: yaml.YAMLError) -> str:
    if not isinstance(exc, yaml.MarkedYAMLError) or exc.problem_mark is None:
        return f"not YAML: {exc}".replace("\n", " ")
    mark = exc.problem_mark
    problem = exc.problem or "cannot be read"
    if "\\t" in problem:
        problem = "a tab is no indentation: use spaces"
    elif "another document" in problem:
        problem = "a second document begins here: a spec is one, so take out the line ---"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _echo(error: Any, others: list[Any]) -> bool:
    """Whether this only repeats another: too short for want of a bad item, or missing for a misspelt key."""
    place = error["loc"]
    if error["type"] == "too_short":
        return any(other["loc"][: len(place)] == place and len(other["loc"]) > len(place) for other in others)
    if error["type"] == "missing":
        unknown = [o["loc"] for o in others if o["type"] == "extra_forbidden" and o["loc"][:-1] == place[:-1]]
        return any(place[-1] == _nearest(loc) or _known_names(loc) == [place[-1]] for loc in unknown)
    return False


def _nearest(loc: tuple[str | int, ...]) -> str | None:
    return next(iter(difflib.get_close_matches(str(loc[-1]), _known_names(loc), 1)), None)


def _lines(error: Any, tree: Any) -> Iterator[str]:
    """Spell one pydantic error as our own lines."""
    path = _spell_path(error["loc"], tree)
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":
        for line in str(context["error"]).split("\n"):
            yield f"{path}{line}" if line[:1] in {".", "["} else f"{path}: {line}" if path else line
    elif kind == "extra_forbidden":
        near = _nearest(error["loc"])
        known = ", ".join(_known_names(error["loc"]))
        yield f"{path}: unknown key; {f'did you mean {near!r}?' if near else f'known: {known}'}"
    elif kind == "missing":
        yield f"{path}: missing"
    elif kind == "literal_error":
        alike = difflib.get_close_matches(str(error["input"]), re.findall(r"'([^']*)'", context["expected"]), 1)
        meant = f"; did you mean {alike[0]!r}?" if alike else ""
        yield f"{path}: {error['input']!r} is not one of {context['expected'].replace(' or ', ', ')}{meant}"
    elif kind == "string_pattern_mismatch":
        yield f"{path}: {_short(error['input'])}: use letters, digits, '.', '_' and '-' only, 100 at most"
    elif kind in _EXPECTED:
        alone = kind == "tuple_type" and isinstance(error["input"], int | float)
        better = f": write [{error['input']}]" if alone else ""
        yield f"{path}: expected {_EXPECTED[kind]}, found {_short(error['input'])}{better}"
    elif kind in {"too_short", "string_too_short"}:
        yield f"{path}: empty: {'write a text' if error['input'] == '' else 'give at least one'}"
    else:
        yield f"{path}: {error['msg'][:1].lower()}{error['msg'][1:]} (found {_short(error['input'])})"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _spell_path(loc: tuple[str | int, ...], tree: Any) -> str:
    """``space.nccl.NCCL_PROTO[2]``, without the names of union members that pydantic puts between."""
    path = ""
    for part in loc:
        if isinstance(part, int) and isinstance(tree, list | tuple):
            path += f"[{part}]"
            tree = tree[part] if part < len(tree) else None
        elif isinstance(tree, dict) and (part in tree or _looks_like_a_key(part)):
            path += f".{part}" if path else str(part)
            tree = tree.get(part)
    return path


def _looks_like_a_key(part: str | int) -> bool:
    return isinstance(part, str) and part.isidentifier()


def _known_names(loc: tuple[str | int, ...]) -> list[str]:
    """Field names of the model that the unknown key was given to."""
    model: Any = Spec
    for part in loc[:-1]:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        found = list(_models(field.annotation)) if field else []
        model = found[0] if found else model
    return sorted(field.alias or name for name, field in model.model_fields.items())


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models(inner)
