"""Do target, drafts, prompts and flags of a spec fit one another, and the SGLang in hand?"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from raytune_eagle.checkpoints import DRAFT, check_draft, check_quantisation, check_target, readable
from raytune_eagle.checkpoints.drafts import Demand
from raytune_eagle.engines.builtin import builtin_path
from raytune_eagle.engines.flags import Flags, mistakes
from raytune_eagle.errors import SpecError
from raytune_eagle.findings import Finding, ok, problem, warning
from raytune_eagle.model.workload import Workload
from raytune_eagle.spec import Spec, flags_written

_BYTES_PER_TOKEN = 3.5
"""Of UTF-8, where there is no tokenizer: English takes 4 to 5, code and Chinese 3."""
_LONGEST = 8
"""Prompts that are tokenized: the one with most tokens is among those with most bytes."""


def check_builtin(spec: Spec) -> list[Finding]:
    """Names ``builtin:…`` that nothing has, which is known on every machine."""
    found = []
    for place, name in [("engine.model", spec.engine.model), *((DRAFT, draft) for draft in spec.engine.draft)]:
        try:
            builtin_path(name, "target")
        except SpecError as exc:
            found += [problem(place, line) for line in exc.problems]
    return found


def check_models(spec: Spec, workload: Workload | None, flags: Flags | None, arch: int | None) -> list[Finding]:
    """Target and drafts, how they fit each other and the workload, and whether this SGLang knows their quantisation."""
    if unknown := check_builtin(spec):
        return unknown
    target = builtin_path(spec.engine.model, "target")
    drafts = [builtin_path(draft, "draft") for draft in spec.engine.draft]
    findings, demand = check_target(target), _demand(spec, workload, target)
    findings += _too_long(spec, workload, target)
    if flags is not None:
        given = spec.engine.args.get("quantization")
        findings += check_quantisation(target, str(given) if given else None, flags.choices("quantization"), arch)
    for index, draft in enumerate(drafts):
        subject = DRAFT if len(drafts) == 1 else f"{DRAFT}[{index}]"
        findings += check_draft(draft, target, demand, subject)
        if flags is not None:
            findings += check_quantisation(draft, None, flags.choices("quantization"), arch, subject)
    return findings


def _demand(spec: Spec, workload: Workload | None, target: str) -> Demand:
    texts = _texts(workload)
    tokens, estimated = longest_prompt(texts, target) if texts else (0, False)
    return Demand(
        tokens=tokens + spec.workload.max_new_tokens,
        estimated=estimated,
        context_length=_context_length(spec),
        lengthen=_is_on(spec.engine.env.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "")),
    )


def _texts(workload: Workload | None) -> list[str]:
    return [prompt.text for prompt in workload.prompts] if workload else []


def _context_length(spec: Spec) -> int | None:
    length = spec.engine.args.get("context-length")
    return length if isinstance(length, int) and not isinstance(length, bool) else None


def _too_long(spec: Spec, workload: Workload | None, target: str) -> Iterator[Finding]:
    """Requests that SGLang refuses, each with HTTP 400: prompt and answer beyond the context (seen in 0.5.20)."""
    found, answer = readable(target), spec.workload.max_new_tokens
    served = _context_length(spec) or (found.context if found else None)
    if served is None:
        return
    if answer >= served:
        text = f"{answer} tokens do not fit the context of {served}: every request would be refused; write fewer"
        yield problem("workload.max_new_tokens", text)
        return
    # A token is a byte or more: most prompts need not be tokenized to be known to fit.
    texts, room = _texts(workload), served - answer
    lengths, estimated = prompt_lengths([text for text in texts if len(text.encode()) >= room], target)
    if not (refused := sum(length > room for length in lengths)):
        return
    about = " (estimated: no tokenizer could be used)" if estimated else ""
    text = (
        f"{refused} of {len(texts)} prompts, of up to {max(lengths)} tokens{about}, and answers of {answer} do not fit "
        f"the context of {served}: each such request is refused; shorten them, or workload.max_new_tokens"
    )
    fails = not estimated and refused > spec.workload.max_failed_share * len(texts)
    yield (problem if fails else warning)("workload", text)


def _is_on(text: str) -> bool:
    return text.lower() in {"1", "true", "yes", "y"}


def longest_prompt(texts: list[str], target: str) -> tuple[int, bool]:
    """Tokens of the longest prompt, and whether they are an estimate."""
    lengths, estimated = prompt_lengths(sorted(texts, key=lambda text: len(text.encode()))[-_LONGEST:], target)
    return max(lengths), estimated


def prompt_lengths(texts: list[str], target: str) -> tuple[list[int], bool]:
    """Tokens of each prompt, and whether they are an estimate: no tokenizer, or none that can be used here."""
    with suppress(ImportError, ValueError, OSError, RuntimeError):  # the last: ~nobody
        tokenizers, path = importlib.import_module("tokenizers"), Path(target).expanduser() / "tokenizer.json"
        tokenizer = _tokenizer(tokenizers, path.read_text(encoding="utf-8")) if path.is_file() else None
        if tokenizer is not None:
            return [len(tokenizer.encode(text).ids) for text in texts], False
    return [int(len(text.encode()) / _BYTES_PER_TOKEN) + 1 for text in texts], True


def _tokenizer(tokenizers: Any, text: str) -> Any:
    try:
        json.loads(text)
        return tokenizers.Tokenizer.from_str(text)
    except Exception:  # noqa: BLE001 - tokenizers raises plain Exception for what it does not understand
        return None


def flag_findings(spec: Spec, flags: Flags) -> list[Finding]:
    """Each flag of the spec that this SGLang would not take; one line that all are known where there is none."""
    lines = [line.partition(": ") for line in mistakes(flags, flags_written(spec))]
    known = ok("engine.args", f"all flags are known to SGLang {flags.version} ({len(flags.flags)})")
    return [problem(place, text) for place, _, text in lines] or [known]
