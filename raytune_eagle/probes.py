"""What the all-reduces of a study's steps would take under each NCCL environment of its space, without a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from raytune_eagle.checkpoints.weights import Checkpoint, UnreadableError
from raytune_eagle.cluster import LOCAL, node_settings
from raytune_eagle.engines.builtin import builtin_path
from raytune_eagle.engines.probe import Question, Timing, probe
from raytune_eagle.errors import NodeError, SpecError
from raytune_eagle.nodes import local_ray
from raytune_eagle.prior import nccl
from raytune_eagle.rules.base import Launch
from raytune_eagle.space import Space
from raytune_eagle.spec import Spec
from raytune_eagle.survey import NODE_S, ask_nodes

Row = dict[str, Any]
"""One row of the view ``probes``, by column."""
Keep = Callable[[list[Row]], None]
_SIZES = 8
"""Sizes of one step that are timed: neighbours cost the same."""
_BYTES = 2
"""Per value: SGLang serves in bfloat16 or float16, float32 weights too (``--dtype auto``)."""


@dataclass(frozen=True)
class Plan:
    """What to time on each node.

    Attributes:
        tokens: of one forward pass, by step: ``decode`` (plain decoding), ``draft``, ``verify``.
        environments: of NCCL, the default first, then those of ``start_from``, then by how many variables they set.
        notes: what a person should know: where NCCL carries none or few of the messages.
    """

    tokens: dict[str, tuple[int, ...]]
    environments: tuple[dict[str, str], ...]
    ranks: int
    gpu: bool
    limit_s: float
    notes: tuple[str, ...]


def plan(space: Space, most: int | None = None, limit_s: float = 30.0) -> Plan:
    """What the space asks for; with no all-reduce on the serving path there is no environment to time."""
    launch = Launch(space.baseline(), space.facts)
    if not launch.on_cpu and launch.ranks > space.spec.node.gpus:
        raise SpecError(
            f"node.gpus: {space.spec.node.gpus}, but tp-size x pp-size is {launch.ranks}: "
            "one node's all-reduces can be timed only"
        )
    environments = [{}] if launch.on_cpu else list(_environments(space))
    if launch.ranks <= 1:
        environments = []
    notes = [note for note in space.notes() if "NCCL" in note]
    if not environments and not notes:
        notes = ["nothing to time: one rank (tp-size x pp-size) has no all-reduce"]
    if launch.on_cpu and environments:
        notes.append("there is no GPU: gloo is timed, which reads no NCCL setting")
    return Plan(_tokens(space), tuple(environments[:most]), launch.ranks, not launch.on_cpu, limit_s, tuple(notes))


def _environments(space: Space) -> Iterator[dict[str, str]]:
    """Each once; the spec's own variables of NCCL are in all of them."""
    fixed = nccl(space.spec.engine.env)
    points = [space.config(params) for params in space.groups[1].left]
    ordered = [*(start.config for start in space.starts), *sorted(points, key=lambda point: len(point.env))]
    seen = []
    for env in (fixed, *(nccl(config.env) for config in ordered)):
        if env not in seen:
            seen.append(env)
            yield env


def _tokens(space: Space) -> dict[str, tuple[int, ...]]:
    streams = space.spec.workload.concurrency
    points = [*space.groups[0].left, *(start.params for start in space.starts)]
    per_stream: dict[str, set[Any]] = {
        "decode": {1},
        "draft": {point.get("eagle_topk") for point in points},
        "verify": {point.get("num_draft_tokens") for point in points},
    }
    return {
        step: _thinned(sorted({each * count for each in found if each for count in streams}))
        for step, found in per_stream.items()
    }


def _thinned(values: Sequence[int]) -> tuple[int, ...]:
    """The first, the last, and some between, evenly by their ratio."""
    if len(values) <= _SIZES:
        return tuple(values)
    wanted = np.geomspace(values[0], values[-1], _SIZES)
    return tuple(sorted({min(values, key=lambda value: abs(value - want)) for want in wanted}))


def probe_here(spec: Spec, plan_: Plan, node: str, keep: Keep = lambda _: None) -> list[Row]:
    """Time all of it on the machine that this runs on; `keep` gets the rows of each environment as they come.

    Raises:
        NodeError: this machine cannot do it.
        SpecError: the target's config.json does not say how wide it is.
    """
    bytes_of, rows = _bytes(spec), list[Row]()
    sizes = sorted({tokens * bytes_of for step in plan_.tokens.values() for tokens in step})
    question = Question(plan_.ranks, plan_.gpu, tuple(sizes), plan_.environments, plan_.limit_s)
    for timing in probe(node_settings(spec), question):
        new = [row | {"node": node} for row in _rows(plan_, bytes_of, timing)]
        keep(new)
        rows += new
    return rows


def _bytes(spec: Spec) -> int:
    """Bytes that one token's hidden state has."""
    try:
        target = Checkpoint(builtin_path(spec.engine.model, "target"))
    except UnreadableError as exc:
        raise SpecError(f"engine.model: {exc}") from exc
    width = target.number("hidden_size")
    if width is None:
        raise SpecError(f"engine.model: {target.folder}/config.json: no hidden_size, so no message sizes")
    return width * (2 * _BYTES if spec.engine.args.get("dtype") in {"float32", "float"} else _BYTES)


def _rows(plan_: Plan, bytes_of: int, timing: Timing) -> Iterator[Row]:
    for step, counts in plan_.tokens.items():
        for tokens in counts:
            size = tokens * bytes_of
            times = timing.times_us.get(size, ())
            yield {
                "measured_unix_s": timing.at,
                "step": step,
                "tokens": tokens,
                "env": plan_.environments[timing.index],
                "ranks": plan_.ranks,
                "backend": "nccl" if plan_.gpu else "gloo",
                "message_bytes": size,
                "samples": len(times),
                "p50_us": float(np.percentile(times, 50)) if times else None,
                "p95_us": float(np.percentile(times, 95)) if times else None,
                "chosen": timing.chosen.get(size),
                "error": timing.error,
            }


def probe_all(spec: Spec, plan_: Plan, where: str, keep: Keep) -> list[str]:
    """Time all of it here (`where` is ``local``), or on every node of a cluster at once.

    Returns:
        One line for each node that could not do it; what the others found was kept.

    Raises:
        NodeError: there is no such cluster, or this machine, if it is meant, cannot do it.
    """
    if where == LOCAL:
        probe_here(spec, plan_, local_ray.node_name(0), keep)
        return []
    most = NODE_S + len(plan_.environments) * plan_.limit_s
    answers = ask_nodes(where, partial(probe_here, spec, plan_, ""), most, None)
    if not answers:
        raise NodeError(f"no node of {where} has the resource eagle_node; see cluster.yaml")
    for name, rows in answers.items():
        if not isinstance(rows, str):
            keep([row | {"node": name} for row in rows])
    return [f"{name}: {why}" for name, why in answers.items() if isinstance(why, str)]
