"""Does this draft fit this target? What SGLang does with the pair, known from their configs and shapes.

Read in SGLang 0.5.20: ``models/llama_eagle3.py`` and ``kimi_k25_eagle3.py`` (the draft),
``model_runner_components/spec_aux_hidden_state.py`` and ``set_eagle3_layers_to_capture`` of the target. Seen there too,
on the CPU: too few layers, the last layer, layer -1, a shorter context and a wrong architecture each end the start or
the first request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raytune_eagle.checkpoints.configs import shown
from raytune_eagle.checkpoints.weights import Checkpoint

CAPTURED = 3
"""Layers captured where the draft names none."""
LEAST_LAYERS = 7
"""Of a target whose captured layers are the default [2, n/2, n-3]: with fewer they coincide (0.5.20: 7 layers serve, 6
end at the first request with "mat1 and mat2 shapes cannot be multiplied")."""
_IDS = "eagle_aux_hidden_state_layer_ids"
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


Told = Iterator[tuple[bool, str]]
"""Whether it is a problem (else a warning), and the line."""


def _bad(text: str) -> tuple[bool, str]:
    return True, text


def _doubt(text: str) -> tuple[bool, str]:
    return False, text


@dataclass(frozen=True)
class Pair:
    """A draft beside its target (None: it cannot be read), and what is asked of them."""

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
    def named(self) -> Any:
        """What stands where the draft names its captured layers, right or wrong; None where nothing does."""
        section = self.draft.config.get("eagle_config")
        if not isinstance(section, dict | None):
            return {"eagle_config": section}
        return self.eagle_config.get(_IDS) or self.draft.config.get(_IDS) or None

    @property
    def layer_ids(self) -> list[int] | None:
        """Captured layers as the draft names them; None when it names none, or not as whole numbers."""
        ids = self.named
        return ids if isinstance(ids, list) and all(type(each) is int for each in ids) else None

    @property
    def captured(self) -> int:
        """How many layers are captured."""
        given = self.draft.number("num_aux_hidden_states")
        return given or (len(self.named) if isinstance(self.named, list) else CAPTURED)

    @property
    def looks_right(self) -> bool:
        """Whether it has what only EAGLE-3 drafts have, whatever its architecture says."""
        own = self.draft.config.get("draft_vocab_size"), self.draft.config.get("eagle_config"), self.shape("d2t")
        return any(own)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the draft's tensor of this name, with or without ``model.`` in front."""
        shapes = self.draft.weights.shapes
        return shapes.get(name) or shapes.get(f"model.{name}")


def _architecture(pair: Pair) -> Told:
    names = pair.draft.architectures
    written = pair.draft.config.get("architectures")
    if any("Eagle3" in name for name in names) or (written and not names):  # what is no list of names is told already
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


def _width(pair: Pair) -> Told:
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


def _parts(pair: Pair) -> Told:
    """What every EAGLE-3 draft has, whatever its target."""
    config, weights = f"{pair.draft.folder}/config.json", pair.draft.weights
    if pair.draft.text.get("hidden_size") is None:
        fc = pair.shape("fc.weight") or ("the width of its layers",)
        yield _bad(f"{config}: names no hidden_size: write it there ({fc[0]})")
    whole = weights.shapes and not weights.problems and pair.eagle_config.get("use_aux_hidden_state") is not False
    if whole and not any(name.removeprefix("model.").startswith("fc.") for name in weights.shapes):
        yield _bad(f"{pair.draft.folder}: its weights lack fc.weight, so it would guess from noise: copy it again")


def _layers(pair: Pair) -> Told:
    if pair.named is not None and pair.layer_ids is None:
        yield _bad(
            f"{pair.draft.folder}/config.json: captured layers {shown(pair.named)}: they must be a list of whole "
            f"numbers; write eagle_config.{_IDS} as [1, 29, 57], with those of its training"
        )
        return
    listened = len(pair.layer_ids or range(CAPTURED))
    if pair.captured != listened:
        yield _bad(
            f"num_aux_hidden_states is {pair.captured}, but {listened} layers are captured: name as many in "
            "eagle_config.eagle_aux_hidden_state_layer_ids"
        )
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


def _captured(pair: Pair, ids: list[int]) -> list[int]:
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


def _vocabularies(pair: Pair) -> Told:
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


def _context(pair: Pair) -> Told:
    if any(each.unusable("max_position_embeddings") for each in (pair.draft, pair.target) if each):
        return
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


def told(pair: Pair) -> Told:
    """Every mistake once: what is no EAGLE-3 draft, or one for another target, is wrong in all else as well."""
    wrong_kind = list(_architecture(pair))
    yield from wrong_kind
    if wrong_kind and not pair.looks_right:
        return
    other_target = list(_width(pair))
    yield from other_target
    if not other_target:
        yield from _parts(pair)
        yield from _layers(pair)
        yield from _vocabularies(pair)
    yield from _context(pair)
