"""What a command makes of a spec file before anything starts: every mistake is told at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytune_eagle.errors import Mistakes, SpecError, StoreError
from raytune_eagle.model.workload import Workload
from raytune_eagle.space import Space
from raytune_eagle.spec import Spec
from raytune_eagle.store import check_study_name
from raytune_eagle.workload import drawn, load_prompts

if TYPE_CHECKING:
    from raytune_eagle.survey import Survey


def workload_of(spec: Spec, mistakes: Mistakes) -> Workload | None:
    """What is sent to each server; None where that is a mistake."""
    with mistakes.noting():
        try:
            check_study_name(spec.name)
        except StoreError as exc:
            raise SpecError(f"name: {exc}") from exc
    with mistakes.noting():
        prompts = drawn(load_prompts(spec.workload.prompts), spec.workload.num_prompts, spec.search.seed)
        return Workload(prompts=prompts, seed=spec.search.seed, **spec.workload.settings())
    return None


def understood(spec: Spec, found: Survey, mistakes: Mistakes) -> tuple[Space, tuple[str, ...]]:
    """The space that the nodes leave, and what is to be said of them; every mistake so far is told here."""
    mistakes.problems += found.mistakes
    space = None
    with mistakes.noting():
        space = Space(spec, found.facts)
    mistakes.tell()
    assert space is not None  # noqa: S101 - else there was a mistake
    return space, found.notes
