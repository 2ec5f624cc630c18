"""What a study's `probe` says before its first launch: slow NCCL settings, and settings not to launch at all."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytune_eagle.model.config import Config
from raytune_eagle.rules.base import Launch
from raytune_eagle.samplers.probed import Probed
from raytune_eagle.space import Params, Space

Env = frozenset[tuple[str, str]]


def nccl(env: Mapping[str, str]) -> dict[str, str]:
    """NCCL's variables but those that only change what it logs."""
    return {name: value for name, value in env.items() if name.startswith("NCCL_") and "NCCL_DEBUG" not in name}


@dataclass(frozen=True)
class Prior:
    """What is known before.

    Attributes:
        probed: all-reduce times for the two-factor sampler; None where too little was timed.
        failing: NCCL environments under which all-reduces failed or hung on every node that tried.
        notes: what a person should know of it.
    """

    probed: Probed | None = None
    failing: frozenset[Env] = frozenset()
    notes: tuple[str, ...] = ()

    def refuses(self, config: Config) -> bool:
        """Whether a launch would fail or hang."""
        return frozenset(nccl(config.env).items()) in self.failing


def prior_of(space: Space, rows: Iterable[Mapping[str, Any]]) -> Prior:
    """Read the rows of the view ``probes`` of this study; of a node's timings of one kind the latest counts.

    Timings over gloo, which reads no NCCL setting, or of other numbers of ranks say nothing.
    """
    ranks = Launch(space.baseline(), space.facts).ranks
    latest = {
        (_env(row), row["node"], row["step"], row["tokens"]): row
        for row in rows
        if row["backend"] == "nccl" and row["ranks"] == ranks
    }
    found = latest.values()
    good = {_env(row) for row in found if row["p50_us"]}
    failing = frozenset({_env(row) for row in found if row["error"]} - good)
    plain = frozenset(nccl(space.baseline().env).items())
    if not good or plain in failing:
        why = "not one environment could be timed" if not good else "plain decoding's own environment failed"
        return Prior(notes=(f"probe: {why}, so nothing of it is used",) if latest else ())
    probed = _probed(space, _times(found), failing)
    return Prior(probed, failing, tuple(_notes(good, failing)))


def _env(row: Mapping[str, Any]) -> Env:
    return frozenset(row["env"].items())


def _times(rows: Iterable[Mapping[str, Any]]) -> dict[Env, float]:
    """All-reduce time of each environment over a middling one's, the geometric mean over nodes and verify sizes."""
    by_size: dict[tuple[str, int], dict[Env, float]] = defaultdict(dict)
    for row in rows:
        if row["step"] == "verify" and row["p50_us"]:
            by_size[row["node"], row["tokens"]][_env(row)] = math.log(row["p50_us"])
    logs: dict[Env, list[float]] = defaultdict(list)
    for each in by_size.values():
        middle = float(np.median(list(each.values())))
        for env, log in each.items():
            logs[env].append(log - middle)
    return {env: math.exp(math.fsum(found) / len(found)) for env, found in logs.items()}


def _probed(space: Space, times: Mapping[Env, float], failing: Iterable[Env]) -> Probed | None:
    columns = [d.column for d in space.dimensions if d.group == "nccl" and not d.dropped]
    settings: list[tuple[Params, float | None]] = []
    known: dict[Env, float | None] = {**times, **dict.fromkeys(failing)}
    for point in {tuple(point.get(c) for c in columns): point for _, rest in space.blocks for point in rest}.values():
        env = frozenset(nccl(space.config(point).env).items())
        if env in known:
            settings.append(({column: point.get(column) for column in columns}, known[env]))
    return Probed(settings) if columns and any(time for _, time in settings) else None


def _notes(good: Iterable[Env], failing: Iterable[Env]) -> Iterable[str]:
    yield f"probe: all-reduces were timed under {len(set(good))} NCCL environments; the search begins with that"
    names = sorted(" ".join(f"{name}={value}" for name, value in sorted(env)) for env in failing)
    if names:
        yield f"probe: failed or hung, so not launched: {'; '.join(names)}"
