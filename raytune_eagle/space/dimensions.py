"""What is searched, one dimension each: its column, its word on the command line or in the environment, its values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from raytune_eagle import rules
from raytune_eagle.spec import IntRange, Spec, values


@dataclass(frozen=True)
class Dimension:
    """One searched parameter: its column, its name on the command line or in the environment, its values.

    Attributes:
        dropped: kind of a parameter that is left unset everywhere, because it could not act in this study.
    """

    column: str
    word: str
    group: Literal["speculative", "nccl", "args"]
    values: tuple[Any, ...]
    is_range: bool = False
    dropped: str | None = None

    @property
    def distribution(self) -> BaseDistribution:
        """Optuna's form of it; integer ranges keep their order, all else is categorical."""
        if self.is_range:
            return IntDistribution(self.values[0], self.values[-1])
        return CategoricalDistribution(self.values)

    @property
    def kind(self) -> str:
        """Type of its Parquet column: int, float, bool or str (also where values are of several types)."""
        if self.dropped:
            return self.dropped
        kinds = {type(value).__name__ for value in self.values if value is not None}
        if kinds == {"int", "float"}:
            return "float"
        return kinds.pop() if len(kinds) == 1 else "str"


def dropped(dimension: Dimension) -> Dimension:
    """Left unset everywhere; its column stays, so that records of nodes that differ in this have the same ones."""
    return replace(dimension, values=(None,), is_range=False, dropped=dimension.kind)


def dimensions_of(spec: Spec) -> Iterator[Dimension]:
    """Every searched parameter of a spec; eagle_topk comes first, for num_draft_tokens depends on it."""
    space = spec.space
    if space.speculative is not None:
        if len(spec.engine.draft) > 1:
            yield Dimension("draft", "speculative-draft-model-path", "speculative", spec.engine.draft)
        for name in ("eagle_topk", "num_steps", "num_draft_tokens"):
            written = getattr(space.speculative, name)
            yield Dimension(name, f"speculative-{name}", "speculative", values(written), isinstance(written, IntRange))
    for word, choices in space.nccl.items():
        yield Dimension(word.lower(), word, "nccl", values(choices), isinstance(choices, IntRange))
    for word, choices in space.args.items():
        yield Dimension(word.replace("-", "_"), word, "args", values(choices), isinstance(choices, IntRange))


def meant(dimension: Dimension, text: str | None) -> Any:
    """Environment values are text; give back the choice that was meant, however it is spelt, or a value of its kind."""
    if text is None:
        return None
    word, given = dimension.word, [value for value in dimension.values if value is not None]
    for value in given:
        if rules.spelling(word, str(value)) == rules.spelling(word, text):
            return value
    return int(text) if dimension.kind == "int" and text.lstrip("-").isdigit() else text


def among(value: Any, choices: tuple[Any, ...]) -> bool:
    """Membership that does not take True for 1."""
    return any(type(value) is type(choice) and value == choice for choice in choices)
