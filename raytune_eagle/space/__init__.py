"""From a spec to Optuna's parameters and to launches, and back.

The space is conditional: with eagle_topk 1 the draft is a chain and num_draft_tokens follows from num_steps. Every
point goes by its canonical form (`raytune_eagle.rules`); a launch from ``start_from`` is kept word for word.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution

from raytune_eagle import rules
from raytune_eagle.errors import SpecError
from raytune_eagle.model.config import Config, FlagValue, Speculative
from raytune_eagle.space.dimensions import Dimension, among, dimensions_of, dropped, meant
from raytune_eagle.space.grid import GroupSize, Params, Parts
from raytune_eagle.spec import Spec
from raytune_eagle.spec import settings as spec_settings

__all__ = ["CPU_MODULE", "GPU_MODULE", "Dimension", "GroupSize", "Params", "Space", "Start"]

_MOST_COMBINATIONS = 500_000
CPU_MODULE = "raytune_eagle.engines.cpu"
GPU_MODULE = "sglang.launch_server"


@dataclass(frozen=True)
class Start:
    """One entry of ``start_from``: the launch word for word, and its parameters."""

    config: Config
    params: Params


class Space:
    """Everything that a study may launch.

    Args:
        spec: what was written.
        facts: what is known of the nodes; without, what `spec` says of them.

    Raises:
        SpecError: an entry of ``start_from`` is invalid, no point at all is valid, or there is nothing to search.
    """

    def __init__(self, spec: Spec, facts: rules.Assumptions | None = None) -> None:
        self.spec = spec
        self.facts = facts or assumed(spec)
        self.dimensions = tuple(dimensions_of(spec))
        self.without_nccl: str | None = None
        self._drop_nccl()
        self._by_column = {dimension.column: dimension for dimension in self.dimensions}
        self._check_countable()
        self.starts = tuple(self._starts())
        if not self.size:
            removed = [f"{rule} ({verdict})" for group in self.groups for rule, verdict in group.removed]
            raise SpecError(f"space: no valid point is left; the rules that removed them: {', '.join(removed)}")

    def _drop_nccl(self) -> None:
        """Leave unset what no launch of this study has a use for, and note why."""
        deciding = [d for d in self.dimensions if d.group == "args" and d.word in rules.BESIDE_NCCL]
        words = [d.word for d in deciding]
        combinations = itertools.product(*(d.values for d in deciding))
        configs = [self._config(None, {}, dict(zip(words, each, strict=True))) for each in combinations]
        kept = []
        for dimension in self.dimensions:
            in_vain = dimension.group == "nccl" and all(
                reasons := [rules.bypasses_nccl(config, self.facts, dimension.word) for config in configs]
            )
            self.without_nccl = reasons[0] if in_vain else self.without_nccl
            kept.append(dropped(dimension) if in_vain else dimension)
        self.dimensions = tuple(kept)
        if self.without_nccl and all(d.dropped for d in kept):
            raise SpecError(f"space.nccl: {self.without_nccl}; nothing else is searched")

    def _check_countable(self) -> None:
        """Every combination of a group is judged one by one: past a few hundred thousand that takes minutes."""
        for name, ours in (("speculative", True), ("nccl and args", False)):
            group = [d for d in self.dimensions if (d.group == "speculative") == ours]
            count = math.prod(len(d.values) for d in group)
            if count > _MOST_COMBINATIONS:
                widest = max(group, key=lambda d: len(d.values))
                raise SpecError(
                    f"space: {count:,} combinations of {name} settings, more than {_MOST_COMBINATIONS:,}: give fewer "
                    f"values, first of all of {widest.word} ({len(widest.values)})"
                )

    # ------------------------------------------------------------------------------------------- points and launches
    def baseline(self) -> Config:
        """Plain decoding under the settings common to the study."""
        return self._config(None, {}, {})

    def config(self, params: Params) -> Config:
        """The launch of these parameters, as they are; columns that are missing or None are left unset."""
        words = {d.word: params.get(d.column) for d in self.dimensions if d.group == "nccl"}
        nccl = {word: str(value) for word, value in words.items() if value is not None}
        args = {d.word: params.get(d.column) for d in self.dimensions if d.group == "args"}
        return self._config(self._speculative(params), nccl, {k: v for k, v in args.items() if v is not None})

    def suggest(self, trial: optuna.Trial) -> Params:
        """Let Optuna choose; num_draft_tokens follows from num_steps when eagle_topk is 1."""
        params: Params = {}
        for dimension in self.dimensions:
            if dimension.column == "num_draft_tokens" and params["eagle_topk"] == 1:
                params["num_draft_tokens"] = params["num_steps"] + 1
            else:
                params[dimension.column] = self._suggest_one(trial, dimension)
        return params

    def settle(self, params: Params) -> tuple[Config, Params] | None:
        """Launch and parameters of the point that a proposal is; None when the rules refuse it.

        What is common to the study stays as it was written, also where a rule finds it without effect.
        """
        form = self.judge(self.config(params)).canonical
        if form is None:
            return None
        return self.config(found := self.params(form)), found

    def judge(self, config: Config) -> rules.Judgement:
        """What the rules say of a launch in this study."""
        return rules.judge(config, self.facts)

    def key(self, config: Config) -> str:
        """Name of the point that a launch is; a launch that would be refused stands for itself."""
        return rules.key(config, self._word_for_word)

    @cached_property
    def _word_for_word(self) -> rules.Assumptions:
        """What holds for ``start_from``: nothing is refused that somebody may know to work by now."""
        return replace(self.facts, most_draft_tokens=None)

    def params(self, config: Config) -> Params:
        """Parameters of a launch, read back from it; None for what is left unset."""
        spec = config.speculative
        found: Params = {} if spec is None else {**spec.model_dump(), "draft": spec.draft}
        for dimension in self.dimensions:
            if dimension.group == "nccl":
                found[dimension.column] = meant(dimension, config.env.get(dimension.word))
            elif dimension.group == "args":
                unset = False if False in dimension.values else None  # a switch that is off is not written
                found[dimension.column] = {**config.args, **config.tuned_args}.get(dimension.word, unset)
        return {dimension.column: found.get(dimension.column) for dimension in self.dimensions}

    def told(self, config: Config) -> tuple[Params, dict[str, BaseDistribution]] | None:
        """Parameters and distributions as Optuna would have asked for them; None for a launch outside the space."""
        params, fitted = self.params(config), Params()
        for dimension in self.dimensions:
            value = params[dimension.column]
            if dimension.column == "num_draft_tokens" and params["eagle_topk"] == 1:
                continue
            if dimension.dropped:
                value = None
            elif value is None and None not in dimension.values:
                value = dimension.values[0]  # right for a knob without effect; the comparison below finds the others
            if not among(value, dimension.values):
                return None
            fitted[dimension.column] = value
        if self.key(self.config({**params, **fitted})) != self.key(config):
            return None
        return fitted, {column: self._by_column[column].distribution for column in fitted}

    def notes(self) -> Iterator[str]:
        """What no rule forbids and a person should know before the study, one line each."""
        params = next(self.points())
        for dimension in self.dimensions:
            if dimension.kind == "bool" and True in dimension.values:
                params[dimension.column] = True  # searched: nothing to say of its absence
        yield from rules.notes(self.config(params), self.facts, max(self.spec.workload.concurrency))
        if self.without_nccl:
            yield f"space.nccl: not searched: {self.without_nccl}"

    # ----------------------------------------------------------------------------------------------------- enumeration
    @cached_property
    def groups(self) -> tuple[GroupSize, GroupSize]:
        """Speculative settings, with the server flags that their rules read; NCCL and all other server settings.

        No rule of one part changes what the other tunes, so each is judged apart, and a point is one of each.
        """
        return self._parts.speculative, self._parts.server

    @property
    def size(self) -> int:
        """Number of valid points, each counted once."""
        return self._parts.ends[-1] if self._parts.ends else 0

    def count(self, meets: Callable[[Config], bool]) -> int:
        """Number of valid points of whose NCCL and server settings, as a launch, something holds."""
        return sum(len(first) * sum(meets(self.config(point)) for point in rest) for first, rest in self._parts.blocks)

    def points(self, seed: int | None = None) -> Iterator[Params]:
        """Every valid point once, in the order written (speculative settings change fastest) or a seeded one."""
        order = range(self.size) if seed is None else np.random.default_rng(seed).permutation(self.size)
        for index in order:
            yield self._parts.point(int(index))

    @property
    def blocks(self) -> list[tuple[list[Params], list[Params]]]:
        """The valid points as halves that go together (speculative settings, all others), as Optuna would ask for them.

        A knob without effect beside another has no value in a canonical point; here it has the first of its values.
        """
        return [([*map(self._asked, first)], [*map(self._asked, rest)]) for first, rest in self._parts.blocks]

    def _asked(self, half: Params) -> Params:
        values = {column: self._by_column[column].values for column in half}
        return {
            column: values[column][0] if value is None and None not in values[column] else value
            for column, value in half.items()
        }

    @cached_property
    def _parts(self) -> Parts:
        beside = {d.column for d in self.dimensions if d.group == "args" and d.word in rules.BESIDE_SPECULATION}
        first = [d for d in self.dimensions if d.group == "speculative" or d.column in beside]
        rest = [d for d in self.dimensions if d not in first]
        read = [d.column for d in first if d.word in rules.BESIDE_NCCL]
        flags = "" if not beside else f", {', '.join(d.word for d in first if d.column in beside)}"
        speculative = self._judge_group(f"speculative settings{flags}", first, {}, "speculative")
        classes: dict[tuple[Any, ...], list[Params]] = {}
        for params in speculative.left:
            classes.setdefault(tuple(params[column] for column in read), []).append(params)
        blocks, server = [], GroupSize("NCCL and server")
        for members in classes.values():
            one = self._judge_group(server.name, rest, members[0], "server")
            server.add(one)
            blocks.append((members, one.left))
        return Parts(speculative, server, blocks)

    def _judge_group(self, name: str, dimensions: list[Dimension], fixed: Params, part: rules.Part) -> GroupSize:
        group, seen = GroupSize(name), set[str]()
        columns = [d.column for d in dimensions]
        for combination in itertools.product(*(d.values for d in dimensions)):
            group.raw += 1
            params = {**fixed, **dict(zip(columns, combination, strict=True))}
            judgement = rules.judge(self.config(params), self.facts, part)
            group.count(judgement)
            if judgement.canonical is None:
                continue
            point = rules.name(judgement.canonical)
            if point not in seen:
                seen.add(point)
                params = self.params(judgement.canonical)
                group.left.append({column: params[column] for column in columns})
        return group

    # ------------------------------------------------------------------------------------------------------- launches
    def _config(self, spec: Speculative | None, nccl: dict[str, str], tuned: dict[str, FlagValue]) -> Config:
        engine = self.spec.engine
        module = GPU_MODULE if self.spec.node.gpus else CPU_MODULE
        return Config(
            model=engine.model,
            speculative=spec,
            args=engine.args,
            tuned_args=tuned,
            env=nccl | {name: value for name, value in engine.env.items() if name not in nccl},
            launcher=(engine.python or "python3", "-m", module),
        )

    def _speculative(self, params: Params) -> Speculative | None:
        if params.get("num_steps") is None:
            return None
        draft = params.get("draft") or (self.spec.engine.draft or ("",))[0]
        return Speculative(draft=draft, **{name: params[name] for name in rules.SPECULATIVE_NAMES})

    def _suggest_one(self, trial: optuna.Trial, dimension: Dimension) -> Any:
        if dimension.is_range:
            return trial.suggest_int(dimension.column, dimension.values[0], dimension.values[-1])
        return trial.suggest_categorical(dimension.column, dimension.values)

    def _starts(self) -> Iterator[Start]:
        problems = []
        for index, entry in enumerate(self.spec.start_from):
            config = self._start_config(entry)
            judgement = rules.judge(config, self._word_for_word)
            if judgement.canonical is None:
                problems.append(f"start_from[{index}]: {judgement.reasons}")
            else:
                yield Start(config, self.params(config))
        if problems:
            raise SpecError(problems)

    def _start_config(self, entry: dict[str, FlagValue]) -> Config:
        """Names in capitals are environment, the three numbers and `draft` speculative, all else server flags."""
        env = {name: str(value) for name, value in entry.items() if name.isupper() and value is not None}
        return self._config(self._speculative(dict(entry)), env, spec_settings.start_flags(entry))


def assumed(spec: Spec) -> rules.Assumptions:
    """What a spec says of its nodes, where none can be asked; that their GPUs are joined by NVLink is a guess."""
    return rules.Assumptions(rules.version(spec.engine.version), gpus=spec.node.gpus, custom_all_reduce=True)
