"""What the gates would say of a study before any launch, beside what the rules say (`raytune_eagle.rules.notes`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from raytune_eagle.findings import Finding, warning
from raytune_eagle.spec import Spec
from raytune_eagle.weights import UnreadableError, read_json

_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def foreseen(spec: Spec, model: str) -> Iterator[Finding]:
    """What would be warned of at each launch, or could not be told there.

    Args:
        spec: the study.
        model: folder of the target; where it is none, nothing is said of its chat template.
    """
    if spec.space.nccl and "NCCL_DEBUG" not in spec.engine.env:
        yield warning("space.nccl", "whether NCCL takes its settings is only known with engine.env.NCCL_DEBUG: INFO")
    yield from _template(spec, Path(model))


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
        lacks = f"{folder}: no chat template in it: unless SGLang has one for this model, each request fails"
        yield warning("workload.chat", f"{lacks}; write false, or set engine.args.chat-template")


def has_template(folder: Path) -> bool:
    """Whether the tokenizer of a model folder brings a chat template."""
    if any((folder / name).is_file() for name in _TEMPLATES):
        return True
    try:
        return bool(read_json(folder / "tokenizer_config.json").get("chat_template"))
    except UnreadableError:
        return False
