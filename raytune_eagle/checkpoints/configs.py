"""What is wrongly written in a config.json, whatever the model: a value there that SGLang cannot use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from raytune_eagle.checkpoints.weights import Checkpoint

NUMBERS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"),
    *("draft_vocab_size", "target_hidden_size", "num_aux_hidden_states"),
)
"""What must be a positive whole number where it is there."""
_SHOWN = 60


def mistakes(found: Checkpoint) -> Iterator[str]:
    """One line for each value that cannot be used; null is as if it were not there (so too in SGLang 0.5.20)."""
    place = found.folder / "config.json"
    for name in filter(found.unusable, NUMBERS):
        yield f"{place}: {name} is {shown(found.text[name])}: write a positive whole number"
    names = found.config.get("architectures")
    if names and not found.architectures:
        as_list = f"a list: {shown([names])}" if isinstance(names, str) else "a list of names"
        yield f"{place}: architectures is {shown(names)}: write it as {as_list}"
    method = found.config.get("quantization_config")
    if method and not isinstance(method, dict):
        yield f'{place}: quantization_config is {shown(method)}: write it as a mapping, {{"quant_method": …}}'


def shown(value: Any) -> str:
    """A value as it stands in a config.json, but no longer than a line has room for."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
