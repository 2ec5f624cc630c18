"""What makes two studies the same study: their spec but for what may be spent, and what their prompts say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from raytune_eagle.errors import SpecError
from raytune_eagle.model.trial import Event
from raytune_eagle.model.workload import Workload
from raytune_eagle.spec import Spec, differences

STARTED = "study_started"
_PROMPTS = "workload.prompts (contents)"


def written(spec: Spec, workload: Workload) -> str:
    """JSON that a study is known by later: the detail of its first event."""
    return json.dumps(spec.model_dump(mode="json", by_alias=True) | {_PROMPTS: digest(workload)})


def check_same(spec: Spec, workload: Workload, events: Iterable[Event]) -> None:
    """Raise `SpecError` with the differences when the events of a study tell of another spec or other prompts."""
    started = next((event for event in events if event.name == STARTED), None)
    if started is None:
        return
    tree = json.loads(started.detail)
    prompts = tree.pop(_PROMPTS, digest(workload))  # studies of the first days did not keep it
    old = _spec(tree, spec.name).identity() | {_PROMPTS: prompts}
    changed = differences(old, spec.identity() | {_PROMPTS: digest(workload)})
    if changed:
        head = f"name: study {spec.name!r} exists with another spec: use another name (--study). What changed:"
        raise SpecError([head, *(f"  {line}" for line in changed)])


def spec_of(events: Iterable[Event]) -> tuple[Spec, str | None] | None:
    """Spec that a study was first started with, and the digest of its prompts; None without that event."""
    started = next((event for event in events if event.name == STARTED), None)
    if started is None:
        return None
    tree = json.loads(started.detail)
    prompts = tree.pop(_PROMPTS, None)
    return _spec(tree, started.study), prompts


def _spec(tree: dict[str, Any], study: str) -> Spec:
    try:
        return Spec.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "spec"
        line = f"study {study!r}: this version cannot read the spec that it was run with: {place}: {first['msg']}"
        raise SpecError(line) from error


def digest(workload: Workload) -> str:
    """What the prompts say, not where they lie: a changed file makes other figures."""
    text = json.dumps([prompt.model_dump() for prompt in workload.prompts], sort_keys=True)
    return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()
