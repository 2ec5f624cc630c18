"""A study as a person writes it in search_spaces/*.yaml: frozen values and what they must keep to.

`raytune_eagle.specfile` reads the file and tells the mistakes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from raytune_eagle import rules
from raytune_eagle.spec import settings as spec_settings
from raytune_eagle.spec.values import (
    Dimension,
    Env,
    Flag,
    Float,
    Int,
    IntDimension,
    IntRange,
    Name,
    Seconds,
    Switch,
    Text,
    Written,
    checked,
    values,
)

__all__ = ["IntRange", "Spec", "differences", "values"]

Sampler = Literal["two-factor", "tpe", "gp", "random", "grid", "one-at-a-time"]
LowerIsBetter = Literal["ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms", "cycle_ms"]


class EngineSpec(Written):
    """What is served, and how a start is watched."""

    model: Text
    draft: tuple[Text, ...] = ()
    python: Text | None = None
    version: Text = "0.5.20"
    start_stall_s: Seconds = 300
    start_timeout_s: Seconds = 1800
    args: Annotated[dict[str, Flag], checked(spec_settings.flag_problems)] = {}
    env: Env = {}

    @field_validator("version")
    @classmethod
    def _three_numbers(cls, value: str) -> str:
        if not re.fullmatch(r"\d+\.\d+\.\d+\S*", value):
            raise ValueError(f"{value!r} is no version of SGLang: write it like 0.5.20")
        return value

    @field_validator("draft", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if isinstance(value, list) and len(set(map(str, value))) != len(value):
            raise ValueError("the same draft twice")
        return value if isinstance(value, list | tuple) else (value,)


class NodeSpec(Written):
    """What one trial owns; 0 GPUs means the CPU layer.

    Attributes:
        grace_s: after so many seconds out of touch a node is given up, and its trial asked again elsewhere.
    """

    gpus: Annotated[Int, Field(ge=0, le=64)] = 8
    cost_per_hour: Annotated[Float, Field(ge=0)] | None = None
    grace_s: Annotated[Float, Field(ge=10, le=3600)] = 60.0


class WorkloadSpec(Written):
    """What is sent to each server; see `raytune_eagle.model.workload.Workload` for the meaning of each.

    `num_prompts`: at most so many of them are sent, drawn by ``search.seed``; likewise of those held out.
    """

    prompts: Text = "builtin:mixed"
    num_prompts: Annotated[Int, Field(ge=1)] | None = None
    max_new_tokens: Annotated[Int, Field(ge=1, le=1_000_000)] = 256
    temperature: Annotated[Float, Field(ge=0)] = 0.0
    ignore_eos: Switch = False
    chat: Switch = False
    concurrency: Annotated[tuple[Annotated[Int, Field(ge=1, le=4096)], ...], Field(min_length=1)] = (1,)
    precision: Annotated[Float, Field(gt=0, lt=1)] = 0.02
    min_passes: Annotated[Int, Field(ge=1)] = 2
    max_passes: Annotated[Int, Field(ge=1, le=1000)] = 8
    request_timeout_s: Seconds = 120
    max_failed_share: Annotated[Float, Field(ge=0, le=1)] = 0.02

    def settings(self) -> dict[str, Any]:
        """Of a `Workload`, whatever prompts it has."""
        return self.model_dump(exclude={"prompts", "num_prompts"})

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
        if problems := list(self._too_many()):
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


def _each(space: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {name: values(dimension) for name, dimension in space.items()}


def _nccl_problems(space: dict[str, Any]) -> Iterator[str]:
    return spec_settings.nccl_problems(_each(space))


def _flag_problems(space: dict[str, Any]) -> Iterator[str]:
    return spec_settings.flag_problems(_each(space))


class SpaceSpec(Written):
    """Where the search may look."""

    speculative: SpeculativeSpace | None = None
    nccl: Annotated[dict[str, Dimension], checked(_nccl_problems)] = {}
    args: Annotated[dict[str, Dimension], checked(_flag_problems)] = {}


class Search(Written):
    """How it looks."""

    sampler: Sampler = "two-factor"
    seed: Annotated[Int, Field(ge=0, le=2**32 - 1)] = 0  # what numpy takes
    stop_below: Annotated[Float, Field(gt=0, lt=1)] | None = None
    end_hopeless: Switch = True


class Baseline(Written):
    """Plain decoding again after so many trials on a node."""

    every: Annotated[Int, Field(ge=1)] = 10


class Confirm(Written):
    """The best `top` launched again at the end, beside plain decoding, in `rounds` rounds; `top: 0` leaves it out."""

    top: Annotated[Int, Field(ge=0)] = 3
    rounds: Annotated[Int, Field(ge=1)] = 2


class Budget(Written):
    """Launches (failed ones included; baselines and confirmations not), and hours after which none is searched."""

    trials: Annotated[Int, Field(ge=1, le=1_000_000)] = 60
    hours: Annotated[Float, Field(gt=0, le=87_600)] = 12


class Spec(Written):
    """A whole study, as written."""

    name: Name
    engine: EngineSpec
    node: NodeSpec = NodeSpec()
    workload: WorkloadSpec = WorkloadSpec()
    objective: Objective = Objective()
    space: SpaceSpec = SpaceSpec()
    start_from: tuple[Annotated[dict[str, Flag], checked(spec_settings.start_problems)], ...] = ()
    search: Search = Search()
    baseline: Baseline = Baseline()
    confirm: Confirm = Confirm()
    budget: Budget = Budget()

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        if problems := list(_cross_checks(self)):
            raise ValueError("\n".join(problems))
        return self

    def identity(self) -> dict[str, Any]:
        """What makes two studies the same study: everything but what may be spent and a node's price and grace."""
        spent: dict[str, Any] = {"budget": True, "confirm": True, "node": {"cost_per_hour", "grace_s"}}
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
    yield from _one_flag_twice(spec)
    yield from _more_ranks_than_gpus(spec)
    yield from _another_device(spec)
    if spec.search.stop_below is not None and spec.search.sampler != "two-factor":
        yield f"search.stop_below: sampler {spec.search.sampler} knows no expected gain: write sampler: two-factor"


def _one_flag_twice(spec: Spec) -> Iterator[str]:
    """SGLang would take the last of two spellings, and another last one tomorrow."""
    first: dict[str, str] = {}
    places = [(f"engine.args.{name}", name) for name in spec.engine.args]
    for place, name in [*places, *((f"space.args.{name}", name) for name in spec.space.args)]:
        other = first.setdefault(rules.ALIASES.get(name, name), place)
        if other != place and other.rpartition(".")[2] != name:
            yield f"{place}: the same flag as {other}; keep one"


def _more_ranks_than_gpus(spec: Spec) -> Iterator[str]:
    """A node hosts whole servers: what tensor and pipeline parallel ranks need, it must have."""
    sizes = {"tp-size": [(1, "")], "pp-size": [(1, "")]}
    for place, name, value in flags_written(spec):
        ranks = sizes.get(rules.ALIASES.get(name, name))
        if ranks is not None and value is not None and not place.startswith("start_from"):
            ranks.append((int(str(value)), place.partition("[")[0]))
    (tp, place), (pp, _) = max(sizes["tp-size"]), max(sizes["pp-size"])
    one_machine = str(spec.engine.args.get("nnodes") or 1) == "1"
    if spec.node.gpus and one_machine and tp * pp > spec.node.gpus:
        yield f"{place or 'engine.args.pp-size'}: {tp * pp} ranks need as many GPUs, node.gpus is {spec.node.gpus}"


def flags_written(spec: Spec) -> Iterator[tuple[str, str, Any]]:
    """Every server flag that the study would write: where it stands in the spec, its name, its value."""
    yield from ((f"engine.args.{name}", name, value) for name, value in spec.engine.args.items())
    for name, choices in spec.space.args.items():
        yield from ((f"space.args.{name}[{i}]", name, value) for i, value in enumerate(values(choices)))
    for index, entry in enumerate(spec.start_from):
        yield from (
            (f"start_from[{index}].{name}", name, value) for name, value in spec_settings.start_flags(entry).items()
        )


def _another_device(spec: Spec) -> Iterator[str]:
    """A node of GPUs would serve on its CPU, or one without on GPUs."""
    for place, name, value in flags_written(spec):
        if name == "device" and value is not None and (value == "cpu") != (spec.node.gpus == 0):
            better = "gpus: 0, or leave device out" if spec.node.gpus else "cpu, or how many GPUs a node has"
            yield f"{place}: {value}, but node.gpus is {spec.node.gpus}: write {better}"


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
