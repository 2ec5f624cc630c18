"""Are this target and this draft whole, and made for each other? Known from their folders, without loading either.

What SGLang does with a pair was read in 0.5.20: ``models/llama_eagle3.py`` and ``kimi_k25_eagle3.py`` (the draft),
``model_runner_components/spec_aux_hidden_state.py`` and ``set_eagle3_layers_to_capture`` of the target.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytune_eagle.findings import Finding, ok, problem, warning
from raytune_eagle.weights import Checkpoint, UnreadableError

TARGET, DRAFT = "engine.model", "engine.draft"
CAPTURED = 3
"""Layers captured where the draft names none."""
LEAST_LAYERS = 7
"""Of a target whose captured layers are the default [2, n/2, n-3]: with fewer they coincide (0.5.20: 7 layers serve, 6
end at the first request with "mat1 and mat2 shapes cannot be multiplied")."""
_SHOWN = 5
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_LENGTHEN = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


@dataclass(frozen=True)
class Demand:
    """What the study asks of the context.

    Attributes:
        tokens: longest prompt and its answer together.
        estimated: `tokens` was estimated from characters, for want of a tokenizer.
        context_length: the server flag; None leaves the target's own.
        lengthen: SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN is set.
    """

    tokens: int = 0
    estimated: bool = False
    context_length: int | None = None
    lengthen: bool = False


def is_hub_id(name: str) -> bool:
    """Whether a name can only be an id of a model hub: it has the form of one and there is no such folder here."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()


def check_target(target: str) -> list[Finding]:
    """Is the target there and whole? `target` is a folder or a hub id."""
    if is_hub_id(target):
        return [_elsewhere(TARGET, target)]
    try:
        found = Checkpoint(target)
    except UnreadableError as exc:
        return [problem(TARGET, str(exc))]
    return [*_described(TARGET, found), *_whole(TARGET, found), *_tokenizer(found)]


def check_draft(draft: str, target: str, demand: Demand | None = None, subject: str = DRAFT) -> list[Finding]:
    """Is the draft there, whole, an EAGLE-3 one and made for this target?

    Without a readable target (it is told by `check_target`) only what the draft alone shows is checked.
    """
    if is_hub_id(draft):
        return [_elsewhere(subject, draft)]
    try:
        found = Checkpoint(draft)
    except UnreadableError as exc:
        return [problem(subject, str(exc))]
    pair = _Pair(found, _readable(target), demand or Demand())
    told = [(problem if bad else warning)(subject, text) for bad, text in _told(pair)]
    return [*_described(subject, found), *_whole(subject, found), *told]


def _told(pair: _Pair) -> Told:
    """Every mistake once: what is no EAGLE-3 draft, or one for another target, is wrong in all else as well."""
    wrong_kind = list(_architecture(pair))
    yield from wrong_kind
    if wrong_kind and not pair.looks_right:
        return
    other_target = list(_width(pair))
    yield from other_target
    if not other_target:
        yield from _layers(pair)
        yield from _vocabularies(pair)
    yield from _context(pair)


def _elsewhere(subject: str, name: str) -> Finding:
    return warning(
        subject, f"{name}: no folder here, so taken for a hub id, which cannot be checked; download it first"
    )


def _readable(target: str) -> Checkpoint | None:
    try:
        return None if is_hub_id(target) else Checkpoint(target)
    except UnreadableError:
        return None


# ------------------------------------------------------------------------------------------------------ any checkpoint
def _described(subject: str, found: Checkpoint) -> Iterator[Finding]:
    sizes = [f"{found.number(name)} {word}" for name, word in _SIZES if found.number(name) is not None]
    quantised = f", quantised: {found.quantisation}" if found.quantisation else ""
    yield ok(subject, f"{found.folder}: {', '.join(found.architectures) or 'no architecture named'}; "
             f"{', '.join(sizes)}{quantised}")  # fmt: skip


_SIZES = (("num_hidden_layers", "layers"), ("hidden_size", "wide"), ("vocab_size", "tokens"))


def _whole(subject: str, found: Checkpoint) -> Iterator[Finding]:
    weights = found.weights
    if weights.form == "none" and not any(found.folder.glob("*.gguf")):
        yield problem(subject, f"{found.folder}: no weights (*.safetensors) in it; copy it again")
    elif weights.form != "safetensors":
        yield warning(subject, f"{found.folder}: weights are not safetensors, so their shapes cannot be checked here")
    elif not weights.problems:
        yield ok(subject, f"{weights.files} safetensors file{'s' * (weights.files != 1)}, all complete")
    for line in weights.problems[:_SHOWN]:
        yield problem(subject, line)
    if len(weights.problems) > _SHOWN:
        yield problem(subject, f"{found.folder}: and {len(weights.problems) - _SHOWN} more broken weight files")


def _tokenizer(found: Checkpoint) -> Iterator[Finding]:
    if found.tokenizer is None:
        yield warning(TARGET, f"{found.folder}: no tokenizer file that is known; copy tokenizer.json there")
    else:
        yield ok(TARGET, f"tokenizer: {found.tokenizer}")


# -------------------------------------------------------------------------------------------------- draft beside target
Told = Iterator[tuple[bool, str]]
"""Whether it is a problem (else a warning), and the line."""


def _bad(text: str) -> tuple[bool, str]:
    return True, text


def _doubt(text: str) -> tuple[bool, str]:
    return False, text


@dataclass(frozen=True)
class _Pair:
    draft: Checkpoint
    target: Checkpoint | None
    demand: Demand

    @property
    def target_width(self) -> int | None:
        """Hidden size of the target."""
        return self.target.number("hidden_size") if self.target else None

    @property
    def eagle_config(self) -> dict[str, Any]:
        """The draft's own section; empty when it has none."""
        found = self.draft.config.get("eagle_config")
        return found if isinstance(found, dict) else {}

    @property
    def layer_ids(self) -> list[int] | None:
        """Captured layers as the draft names them; None when it names none."""
        name = "eagle_aux_hidden_state_layer_ids"
        ids = self.eagle_config.get(name) or self.draft.config.get(name)
        return ids if isinstance(ids, list) and all(isinstance(each, int) for each in ids) else None

    @property
    def captured(self) -> int:
        """How many layers are captured."""
        given = self.draft.number("num_aux_hidden_states")
        return given or (len(self.layer_ids) if self.layer_ids else CAPTURED)

    @property
    def looks_right(self) -> bool:
        """Whether it has what only EAGLE-3 drafts have, whatever its architecture says."""
        return bool(self.draft.number("draft_vocab_size") or self.shape("d2t") or self.eagle_config)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the draft's tensor of this name, with or without ``model.`` in front."""
        shapes = self.draft.weights.shapes
        return shapes.get(name) or shapes.get(f"model.{name}")


def _architecture(pair: _Pair) -> Told:
    names = pair.draft.architectures
    if any("Eagle3" in name for name in names):
        return
    shown = ", ".join(names) or "none"
    if pair.looks_right:
        yield _bad(
            f"{pair.draft.folder}/config.json: looks like EAGLE-3, but architectures is [{shown}], which "
            "SGLang loads as something else: write LlamaForCausalLMEagle3 there"
        )
    else:
        kind = "an EAGLE draft of the first kind" if any("Eagle" in name for name in names) else "no EAGLE-3 draft"
        yield _bad(f"{pair.draft.folder}: {kind} (architectures: {shown}): EAGLE3 needs one with Eagle3 in its name")


def _width(pair: _Pair) -> Told:
    """What a fc layer of another width does: SGLang fails when it loads it, after minutes of loading the target."""
    width, fc = pair.target_width, pair.shape("fc.weight")
    own = pair.draft.number("target_hidden_size") or pair.draft.number("hidden_size")
    if width is None or pair.eagle_config.get("use_aux_hidden_state") is False:
        return
    wanted = pair.captured * width
    if fc is not None and len(fc) == 2 and fc[1] != wanted:  # noqa: PLR2004 - a matrix
        yield _bad(
            f"{pair.draft.folder}: fc takes {fc[1]} inputs, but {pair.captured} captured layers of a target "
            f"{width} wide give {wanted}: name a draft that was trained for this target"
        )
    elif own is not None and own != width:
        yield _bad(
            f"{pair.draft.folder}: made for a target {own} wide, this one is {width} wide: name a draft trained "
            f"for this target (or, if it was, write target_hidden_size: {width} into its config.json)"
        )


def _layers(pair: _Pair) -> Told:
    count = pair.target.number("num_hidden_layers") if pair.target else None
    if pair.layer_ids is None:
        yield from _default_layers(count)
        return
    ids = pair.layer_ids
    if len(set(ids)) != len(ids):
        yield _bad(f"captured layers {ids}: the same one twice; correct eagle_aux_hidden_state_layer_ids")
    if min(ids) < 0:
        llama = pair.target is not None and "LlamaForCausalLM" in pair.target.architectures
        why = (
            "LlamaForCausalLM does not give it (TypeError at the first request)"
            if llama
            else "not every target gives it"
        )
        yield llama or min(ids) < -1, f"captured layers {ids}: {min(ids)} asks for the embedding, and {why}"
    if count is not None and max(_captured(pair, ids)) >= count:
        yield _bad(
            f"captured layers {ids}: the target has {count} layers, and the output of layer {max(ids)} reaches "
            "none after it: name a draft that was trained for this target"
        )


def _captured(pair: _Pair, ids: list[int]) -> list[int]:
    """Layers at whose entry SGLang listens: one further, but for DeepSeek-like targets if the first is not 1."""
    names = " ".join(pair.target.architectures if pair.target else ())
    as_they_are = ("Deepseek" in names or "Kimi" in names) and ids[0] != 1
    return ids if as_they_are else [each + 1 for each in ids]


def _default_layers(count: int | None) -> Told:
    if count is None:
        yield _doubt("no captured layers named: SGLang takes [2, n/2, n-3] of the target")
        return
    default = [2, count // 2, count - 3]
    if count < LEAST_LAYERS:
        yield _bad(
            f"no captured layers named, and SGLang's choice [2, n/2, n-3] needs a target of {LEAST_LAYERS} layers; "
            f"this one has {count}: write eagle_config.eagle_aux_hidden_state_layer_ids into its config.json"
        )
    else:
        yield _doubt(f"no captured layers named: SGLang takes {default}; right only if it was trained on those")


def _vocabularies(pair: _Pair) -> Told:
    small, own = pair.draft.number("draft_vocab_size"), pair.draft.number("vocab_size")
    large = (pair.target.number("vocab_size") if pair.target else None) or own
    d2t, t2d, head = pair.shape("d2t"), pair.shape("t2d"), pair.shape("lm_head.weight")
    if small and d2t and d2t[0] != small:
        yield _bad(f"d2t maps {d2t[0]} tokens, draft_vocab_size is {small}: copy the draft again")
    if large and t2d and t2d[0] != large:
        yield _bad(f"t2d covers {t2d[0]} tokens, the target has {large}: name a draft trained for this target")
    if small and large and small > large:
        yield _bad(f"draft_vocab_size {small} is more than the target's {large}: name a draft trained for this target")
    if small and head and head[0] != small:
        yield _bad(f"lm_head gives {head[0]} tokens, draft_vocab_size is {small}: copy the draft again")
    if small and large and small < large and pair.draft.weights.shapes and not d2t:
        yield _bad(f"draft_vocab_size {small} of {large} tokens, but no d2t says which: copy the draft again")
    if own and large and own != large:
        yield _doubt(f"vocab_size {own}, the target's is {large}: right only if the difference is padding")


def _context(pair: _Pair) -> Told:
    draft, demand = pair.draft.context, pair.demand
    served = demand.context_length or (pair.target.context if pair.target else None)
    about = "about " if demand.estimated else ""
    why = " (estimated: no tokenizer could be used)" if demand.estimated else ""
    if served is not None and draft < served and not demand.lengthen:
        yield _bad(
            f"its context is {draft} tokens, the target's {served}: SGLang refuses that; write engine.env."
            f'{_LENGTHEN}: "1", or engine.args.context-length: {draft}'
        )
    if demand.tokens > draft:
        yield _doubt(
            f"the longest prompt and its answer take {about}{demand.tokens} tokens{why}, more than the draft's "
            f"context of {draft}: past it the draft guesses badly; shorten them, or expect less"
        )
    if served is not None and demand.tokens > served:
        yield _doubt(f"prompts up to {about}{demand.tokens} tokens{why} do not fit the context of {served}")
