"""A study as a person writes it in search_spaces/*.yaml: frozen values and what they must keep to.

`raytune_eagle.specfile` reads the file and tells the mistakes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Self

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
    field_validator,
    model_validator,
)

from raytune_eagle import rules, spec_settings
from raytune_eagle.model import FlagValue, Value

Sampler = Literal["tpe", "gp", "random", "grid"]
LowerIsBetter = Literal["ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms", "cycle_ms"]


def _text(value: Any) -> Any:
    """YAML reads 0.5.20 as text and 1 as a number; a name may look like either."""
    if isinstance(value, bool):
        raise ValueError("YAML reads on, yes, off and no as true and false: quote it")  # noqa: TRY004 - pydantic's way
    return str(value) if isinstance(value, int | float) else value


def _plain(value: Any) -> Any:
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(f"expected true, false, a number or a text, found a {type(value).__name__}")
    return value


def _plain_or_list(value: Any) -> Any:
    for item in value if isinstance(value, list) else [value]:
        _plain(item)
    return value


def _checked(problems: Callable[[Any], Iterator[str]]) -> AfterValidator:
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
Text = Annotated[str, BeforeValidator(_text), Field(min_length=1)]
Name = Annotated[str, BeforeValidator(_text), Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
Choice = Annotated[bool | int | float | str | None, BeforeValidator(_plain)]
Flag = Annotated[FlagValue, BeforeValidator(_plain_or_list)]
Env = Annotated[dict[str, Text], _checked(spec_settings.env_problems)]


class Written(Value):
    """Base of what a person writes: frozen, no unknown fields, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EngineSpec(Written):
    """What is served, and how a start is watched."""

    model: Text
    draft: tuple[Text, ...] = ()
    python: Text | None = None
    version: Text = "0.5.20"
    start_stall_s: Annotated[Float, Field(gt=0)] = 300
    start_timeout_s: Annotated[Float, Field(gt=0)] = 1800
    args: Annotated[dict[str, Flag], _checked(spec_settings.flag_problems)] = {}
    env: Env = {}

    @field_validator("draft", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if isinstance(value, list) and len(set(map(str, value))) != len(value):
            raise ValueError("the same draft twice")
        return value if isinstance(value, list | tuple) else (value,)


class NodeSpec(Written):
    """What one trial owns; 0 GPUs means the CPU layer."""

    gpus: Annotated[Int, Field(ge=0, le=64)] = 8
    cost_per_hour: Annotated[Float, Field(ge=0)] | None = None


class WorkloadSpec(Written):
    """What is sent to each server; see `raytune_eagle.model.Workload` for the meaning of each."""

    prompts: Text = "builtin:mixed"
    max_new_tokens: Annotated[Int, Field(ge=1)] = 256
    temperature: Annotated[Float, Field(ge=0)] = 0.0
    ignore_eos: Switch = False
    chat: Switch = False
    concurrency: Annotated[tuple[Annotated[Int, Field(ge=1, le=4096)], ...], Field(min_length=1)] = (1,)
    precision: Annotated[Float, Field(gt=0, lt=1)] = 0.02
    min_passes: Annotated[Int, Field(ge=1)] = 2
    max_passes: Annotated[Int, Field(ge=1)] = 8
    request_timeout_s: Annotated[Float, Field(gt=0)] = 120
    max_failed_share: Annotated[Float, Field(ge=0, le=1)] = 0.02

    @field_validator("concurrency", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return value if isinstance(value, list | tuple) else (value,)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_passes > self.max_passes:
            raise ValueError(f"min_passes {self.min_passes} is more than max_passes {self.max_passes}")
        if len(set(self.concurrency)) != len(self.concurrency):
            raise ValueError("concurrency: the same number twice")
        return self


class Objective(Written):
    """What is searched for, and what it must not cost (upper bounds)."""

    metric: Literal["output_throughput"] = "output_throughput"
    constraints: dict[LowerIsBetter, Annotated[Float, Field(gt=0)]] = {}


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
    if any(isinstance(v, float) and not math.isfinite(v) for v in values):
        raise ValueError("a choice must be finite")
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


class SpeculativeSpace(Written):
    """The three numbers of EAGLE-3: all together, or no speculation is searched."""

    num_steps: IntDimension
    eagle_topk: IntDimension
    num_draft_tokens: IntDimension

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        for name, least in (("num_steps", 1), ("eagle_topk", 1), ("num_draft_tokens", 2)):
            if min(values(getattr(self, name))) < least:
                raise ValueError(f"{name} must be {least} or more")
        problems = list(self._too_many())
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _too_many(self) -> Iterator[str]:
        """Numbers of draft tokens that no tree of this space holds; with eagle_topk 1 any number becomes steps + 1."""
        steps, topk = max(values(self.num_steps)), max(values(self.eagle_topk))
        most = rules.tree_capacity(steps, topk)
        if topk == 1:
            return
        why = f"no tree holds that: num_steps {steps}, eagle_topk {topk} hold {most}"
        if isinstance(self.num_draft_tokens, IntRange):
            low, high = self.num_draft_tokens.int_
            if high > most:
                better = f"[{low}, {most}]" if low <= most else f"{most} or fewer"
                yield f".num_draft_tokens: int range [{low}, {high}]: {why}: write {better}"
            return
        for index, tokens in enumerate(self.num_draft_tokens):
            if tokens > most:
                yield f".num_draft_tokens[{index}]: {tokens}: {why}"


def values(dimension: IntRange | tuple[Choice, ...]) -> tuple[Any, ...]:
    """All values of a dimension, in the order written."""
    return dimension.values() if isinstance(dimension, IntRange) else dimension


def _each(space: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {name: values(dimension) for name, dimension in space.items()}


def _nccl_problems(space: dict[str, Any]) -> Iterator[str]:
    return spec_settings.nccl_problems(_each(space))


def _flag_problems(space: dict[str, Any]) -> Iterator[str]:
    return spec_settings.flag_problems(_each(space))


class SpaceSpec(Written):
    """Where the search may look."""

    speculative: SpeculativeSpace | None = None
    nccl: Annotated[dict[str, Dimension], _checked(_nccl_problems)] = {}
    args: Annotated[dict[str, Dimension], _checked(_flag_problems)] = {}


class Search(Written):
    """How it looks."""

    sampler: Sampler = "tpe"
    seed: Int = 0
    stop_below: Annotated[Float, Field(gt=0, lt=1)] | None = None


class Baseline(Written):
    """Plain decoding again after so many trials on a node."""

    every: Annotated[Int, Field(ge=1)] = 10


class Confirm(Written):
    """The best `top` launched again at the end, beside plain decoding, in `rounds` rounds; `top: 0` leaves it out."""

    top: Annotated[int, Field(ge=0)] = 3
    rounds: Annotated[int, Field(ge=1)] = 2


class Budget(Written):
    """Launches (failed ones included; baselines and confirmations not), and hours after which none is searched."""

    trials: Annotated[Int, Field(ge=1)] = 60
    hours: Annotated[Float, Field(gt=0)] = 12


class Spec(Written):
    """A whole study, as written."""

    name: Name
    engine: EngineSpec
    node: NodeSpec = NodeSpec()
    workload: WorkloadSpec = WorkloadSpec()
    objective: Objective = Objective()
    space: SpaceSpec = SpaceSpec()
    start_from: tuple[Annotated[dict[str, Flag], _checked(spec_settings.start_problems)], ...] = ()
    search: Search = Search()
    baseline: Baseline = Baseline()
    confirm: Confirm = Confirm()
    budget: Budget = Budget()

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        problems = list(_cross_checks(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def identity(self) -> dict[str, Any]:
        """What makes two studies the same study: everything but what may be spent and the price of a node."""
        spent: dict[str, Any] = {"budget": True, "confirm": True, "node": {"cost_per_hour"}}
        whole = self.model_dump(mode="json", by_alias=True, exclude=spent)
        return dict(_leaves(whole))


def _cross_checks(spec: Spec) -> Iterator[str]:
    speculative = spec.space.speculative
    if speculative is not None and not spec.engine.draft:
        yield "engine.draft: missing: space.speculative needs the path of an EAGLE-3 draft"
    if speculative is None and not spec.space.nccl and not spec.space.args:
        yield "space: empty: give speculative, nccl or args something to search"
    both = sorted(set(spec.engine.env) & set(spec.space.nccl))
    yield from (f"space.nccl.{name}: also fixed in engine.env; keep one" for name in both)
    both = sorted(set(spec.engine.args) & set(spec.space.args))
    yield from (f"space.args.{name}: also fixed in engine.args; keep one" for name in both)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _leaves(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, tree


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line per leaf of `Spec.identity` that differs: ``path: old -> new``."""
    return [
        f"{path}: {json.dumps(old.get(path), ensure_ascii=False)} -> {json.dumps(new.get(path), ensure_ascii=False)}"
        for path in sorted({*old, *new})
        if old.get(path) != new.get(path)
    ]
