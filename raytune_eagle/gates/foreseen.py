"""What the gates would say of a study before any launch, as far as its spec tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from raytune_eagle.findings import Finding, problem, warning
from raytune_eagle.spec import Spec, values
from raytune_eagle.weights import UnreadableError, read_json

DEFAULT_RUNNING = 48
"""Requests that SGLang runs at once with EAGLE-3 unless told otherwise (0.5.16-0.5.23, ``speculative_hook.py``)."""
_RUNNING = "max-running-requests"
_GRAPHS = ("cuda-graph-max-bs-decode", "cuda-graph-max-bs")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def foreseen(spec: Spec, model: str) -> Iterator[Finding]:
    """One finding for each gate that would warn or fail.

    Args:
        spec: the study.
        model: folder of the target; where it is none, nothing is said of its chat template.
    """
    yield from _streams(spec)
    yield from _nccl(spec)
    yield from _template(spec, Path(model))


def _flag(spec: Spec, name: str) -> list[object]:
    """Every value that a flag has somewhere in the study; none where it is left to SGLang."""
    found = [spec.engine.args[name]] if name in spec.engine.args else []
    return [*found, *(values(spec.space.args[name]) if name in spec.space.args else ())]


def _streams(spec: Spec) -> Iterator[Finding]:
    streams = max(spec.workload.concurrency)
    running = [value for value in _flag(spec, _RUNNING) if isinstance(value, int)]
    most = min(running, default=DEFAULT_RUNNING if spec.space.speculative else streams)
    if most < streams:
        why = "is set" if running else "is SGLang's default with EAGLE3"
        yield warning(
            "workload.concurrency",
            f"{streams} streams, but {most} run at once ({most} {why}): set engine.args.{_RUNNING}: {streams}",
        )
    graphs = [value for name in _GRAPHS for value in _flag(spec, name) if isinstance(value, int)]
    if graphs and min(graphs) < streams:
        yield warning(
            "workload.concurrency",
            f"{streams} streams, CUDA graphs for at most {min(graphs)}: set cuda-graph-max-bs-decode to {streams}",
        )


def _nccl(spec: Spec) -> Iterator[Finding]:
    if not spec.space.nccl:
        return
    if set(_flag(spec, "tp-size") or _flag(spec, "tp") or [1]) == {1}:
        yield warning(
            "space.nccl", "one GPU serves the model (tp-size 1), NCCL settings change nothing: leave them out"
        )
    elif True not in _flag(spec, "disable-custom-all-reduce"):
        yield warning(
            "space.nccl",
            "where NVLink joins all GPUs of a node, SGLang's custom all-reduce takes decoding's messages, and NCCL "
            "settings change nothing: set engine.args.disable-custom-all-reduce: true, or search over it in space.args",
        )
    if "NCCL_DEBUG" not in spec.engine.env:
        yield warning("space.nccl", "whether NCCL takes its settings is only known with engine.env.NCCL_DEBUG: INFO")


def _template(spec: Spec, folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        return
    has = "chat-template" in spec.engine.args or has_template(folder)
    if has and not spec.workload.chat:
        yield warning(
            "workload.chat",
            "the model has a chat template, and prompts are sent without it: acceptance is then of other text than "
            "its users'; write workload.chat: true, unless the prompts have the template in them",
        )
    elif spec.workload.chat and not has:
        yield problem("workload.chat", f"{folder}: no chat template: write false, or set engine.args.chat-template")


def has_template(folder: Path) -> bool:
    """Whether the tokenizer of a model folder brings a chat template."""
    if any((folder / name).is_file() for name in _TEMPLATES):
        return True
    try:
        return bool(read_json(folder / "tokenizer_config.json").get("chat_template"))
    except UnreadableError:
        return False
