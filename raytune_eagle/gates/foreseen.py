"""What the gates would say of a study before any launch, beside what the rules say (`raytune_eagle.rules.notes`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from raytune_eagle.checkpoints.weights import UnreadableError, read_json
from raytune_eagle.findings import Finding, ok, warning
from raytune_eagle.gates.baseline import ENOUGH
from raytune_eagle.gates.bench import KNOWN_PROMPTS, fewer_prompts
from raytune_eagle.gates.server import SIMULATED
from raytune_eagle.model.workload import Prompt
from raytune_eagle.spec import Spec, values
from raytune_eagle.workload import told_if_many

_NO_CACHE = "disable-radix-cache"
_MANY_FAILED = 0.1
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def foreseen(spec: Spec, prompts: Sequence[Prompt], model: str) -> Iterator[Finding]:
    """What would be warned of at each launch, or could not be told there.

    Args:
        spec: the study.
        prompts: of its search.
        model: folder of the target; where it is none, nothing is said of its chat template.
    """
    if spec.space.nccl and "NCCL_DEBUG" not in spec.engine.env:
        yield warning("space.nccl", "whether NCCL takes its settings is only known with engine.env.NCCL_DEBUG: INFO")
    yield from _passes(spec, prompts)
    yield from _without_text(spec, prompts)
    yield from _prefix_cache(spec)
    yield from _template(spec, Path(model))


def _passes(spec: Spec, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    few = [words for streams in spec.workload.concurrency if (words := fewer_prompts(len(prompts), streams))]
    if few:
        yield warning("workload.prompts", f"{'; '.join(few)}: too little to trust its interval; give more prompts")
    yield from (warning("workload.prompts", line) for line in told_if_many(prompts, "workload.num_prompts"))


def _without_text(spec: Spec, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """What keeps the gates from saying whether the text is the model's own, and a limit that lets all fail."""
    if len(prompts) < ENOUGH:
        few = f"{len(prompts)} prompts: gates text and repetition need {ENOUGH} to say whether the text is the model's"
        yield warning("workload.prompts", few)
    if spec.workload.temperature:
        sampled = "answers are drawn anew each time: none can be held against plain decoding's (gate text); 0 can"
        yield ok("workload.temperature", sampled)
    if SIMULATED in spec.engine.env:
        yield warning(
            f"engine.env.{SIMULATED}", "acceptance is pinned, the text is not the model's, and no gate judges it"
        )
    if (share := spec.workload.max_failed_share) > _MANY_FAILED:
        lost = f"{share:.0%} of the requests may fail, and the launch counts; a tenth is much already"
        yield warning("workload.max_failed_share", lost)


def _prefix_cache(spec: Spec) -> Iterator[Finding]:
    """A warning where times to first token are limited."""
    searched = spec.space.args.get(_NO_CACHE)
    tried = values(searched) if searched else (spec.engine.args.get(_NO_CACHE),)
    decides = any(name.startswith("ttft") for name in spec.objective.constraints)
    if not all(tried):
        cache = f"the server has a prefix cache unless told otherwise: {KNOWN_PROMPTS}"
        yield (warning if decides else ok)("engine.args", f"{cache}; write {_NO_CACHE}: true to measure prefill")


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
