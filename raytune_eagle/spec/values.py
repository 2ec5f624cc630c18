"""The kinds of values that a spec is written in: texts, numbers, switches, flags, ranges and choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    Tag,
    model_validator,
)

from raytune_eagle.model import Value
from raytune_eagle.model.config import FlagValue
from raytune_eagle.spec import settings as spec_settings


def _no_nul(value: Any) -> Any:
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a NUL character, which no program can be given: leave it out")
    return value


def _text(value: Any) -> Any:
    """YAML reads 0.5.20 as text and 1 as a number; a name may look like either."""
    _no_nul(value)
    if isinstance(value, bool):
        raise ValueError("YAML reads on, yes, off and no as true and false: quote it")  # noqa: TRY004 - pydantic's way
    return str(value) if isinstance(value, int | float) else value


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number that a server can be given: write a finite one")
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(f"expected true, false, a number or a text, found a {type(value).__name__}")
    return _no_nul(value)


def _plain_or_list(value: Any) -> Any:
    for item in value if isinstance(value, list) else [value]:
        _plain(item)
    return value


def checked(problems: Callable[[Any], Iterator[str]]) -> AfterValidator:
    """Every line that `problems` gives, told as one mistake each."""

    def check(value: Any) -> Any:
        if lines := list(problems(value)):
            raise ValueError("\n".join(lines))
        return value

    return AfterValidator(check)


# YAML's `on` and `true` are no numbers, and 1 is no switch.
Int = StrictInt
Float = StrictFloat
Switch = StrictBool
Seconds = Annotated[Float, Field(gt=0, le=604_800)]  # a week: no clock of Python waits for 1e300
Text = Annotated[str, BeforeValidator(_text), Field(min_length=1)]
Name = Annotated[str, BeforeValidator(_text), Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
Choice = Annotated[bool | int | float | str | None, BeforeValidator(_plain)]
Flag = Annotated[FlagValue, BeforeValidator(_plain_or_list)]
Env = Annotated[dict[str, Text], checked(spec_settings.env_problems)]


class Written(Value):
    """Base of what a person writes: frozen, no unknown fields, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


_MOST_VALUES = 1000


class IntRange(Written):
    """``{int: [low, high]}``, both included."""

    int_: Annotated[tuple[Int, Int], Field(alias="int")]

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        low, high = self.int_
        if low > high:
            raise ValueError(f"int range [{low}, {high}] is reversed: write [{high}, {low}]")
        if high - low >= _MOST_VALUES:
            raise ValueError(f"int range [{low}, {high}] has {high - low + 1:,} values: list those worth a launch")
        return self

    def values(self) -> tuple[int, ...]:
        """Every value, ascending."""
        return tuple(range(self.int_[0], self.int_[1] + 1))


def _distinct(values: tuple[Choice, ...]) -> tuple[Choice, ...]:
    seen = [(type(v), v) for v in values]
    if len(set(seen)) != len(seen):
        raise ValueError("the same choice twice")
    return values


Choices = Annotated[tuple[Choice, ...], Field(min_length=1), AfterValidator(_distinct)]
IntChoices = Annotated[tuple[Int, ...], Field(min_length=1), AfterValidator(_distinct)]


def _form(value: Any) -> str:
    """Which of the two ways to write a dimension this is, so that its mistakes are told for that way only."""
    return "<range>" if isinstance(value, dict | IntRange) else "<choices>"


Dimension = Annotated[Annotated[IntRange, Tag("<range>")] | Annotated[Choices, Tag("<choices>")], Discriminator(_form)]
IntDimension = Annotated[
    Annotated[IntRange, Tag("<range>")] | Annotated[IntChoices, Tag("<choices>")], Discriminator(_form)
]


def values(dimension: IntRange | tuple[Choice, ...]) -> tuple[Any, ...]:
    """All values of a dimension, in the order written."""
    return dimension.values() if isinstance(dimension, IntRange) else dimension
