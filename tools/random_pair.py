#!/usr/bin/env python3
"""Writes a Llama target of random weights and an EAGLE-3 draft that fits it, where no weights can be brought.

usage: random_pair.py TOKENIZER OUT [--layers N] [--hidden N] [--heads N] [--kv-heads N] [--intermediate N]

TOKENIZER is a folder with tokenizer.json, tokenizer_config.json and config.json; its vocabulary is the target's.
OUT gets target/ and draft/. By default the shape is Llama-2-7B's with 8 key-value heads: 6.1 billion parameters. The
times of its steps are those of a model of that shape; its text means nothing, so acceptance has to be pinned
(SGLANG_SIMULATE_ACC_LEN). Weights are made on the first GPU if there is one.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STD = 0.02
DRAFT_TOKENS = 8192
"""Of the draft's vocabulary, at most."""
SHARD_LAYERS = 4
Tensors = dict[str, torch.Tensor]


def matrix(rows: int, columns: int) -> torch.Tensor:
    """Random weights as a fresh model has them."""
    return torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE).normal_(0, STD)


def ones(size: int) -> torch.Tensor:
    """Weights of a norm."""
    return torch.ones(size, dtype=torch.bfloat16, device=DEVICE)


def layer(prefix: str, shape: argparse.Namespace, inputs: int) -> Tensors:
    """One decoder layer whose attention takes `inputs` values."""
    head = shape.hidden // shape.heads
    return {
        f"{prefix}.self_attn.q_proj.weight": matrix(shape.hidden, inputs),
        f"{prefix}.self_attn.k_proj.weight": matrix(shape.kv_heads * head, inputs),
        f"{prefix}.self_attn.v_proj.weight": matrix(shape.kv_heads * head, inputs),
        f"{prefix}.self_attn.o_proj.weight": matrix(shape.hidden, shape.hidden),
        f"{prefix}.mlp.gate_proj.weight": matrix(shape.intermediate, shape.hidden),
        f"{prefix}.mlp.up_proj.weight": matrix(shape.intermediate, shape.hidden),
        f"{prefix}.mlp.down_proj.weight": matrix(shape.hidden, shape.intermediate),
        f"{prefix}.input_layernorm.weight": ones(shape.hidden),
        f"{prefix}.post_attention_layernorm.weight": ones(shape.hidden),
    }


def target_shards(shape: argparse.Namespace, vocabulary: int) -> Iterator[Tensors]:
    """The target, some layers at a time."""
    yield {
        "model.embed_tokens.weight": matrix(vocabulary, shape.hidden),
        "model.norm.weight": ones(shape.hidden),
        "lm_head.weight": matrix(vocabulary, shape.hidden),
    }
    for first in range(0, shape.layers, SHARD_LAYERS):
        numbers = range(first, min(first + SHARD_LAYERS, shape.layers))
        yield {
            name: tensor
            for number in numbers
            for name, tensor in layer(f"model.layers.{number}", shape, shape.hidden).items()
        }


def draft_tensors(shape: argparse.Namespace, vocabulary: int) -> Tensors:
    """The draft: three captured layers in, one decoder layer, a vocabulary of the first tokens of the target's."""
    count = min(DRAFT_TOKENS, vocabulary)
    return {
        **layer("midlayer", shape, 2 * shape.hidden),
        "midlayer.hidden_norm.weight": ones(shape.hidden),
        "fc.weight": matrix(shape.hidden, 3 * shape.hidden),
        "norm.weight": ones(shape.hidden),
        "lm_head.weight": matrix(count, shape.hidden),
        "d2t": torch.zeros(count, dtype=torch.int64),
        "t2d": torch.arange(vocabulary) < count,
    }


def config(shape: argparse.Namespace, source: dict[str, Any]) -> dict[str, Any]:
    """What both have in their config.json."""
    ids = {name: source[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in source}
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "vocab_size": source["vocab_size"],
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **ids,
    }


def save(tensors: Tensors, path: Path) -> int:
    """Writes one file; gives its bytes of weights."""
    held = {name: tensor.cpu() for name, tensor in tensors.items()}
    save_file(held, str(path), metadata={"format": "pt"})
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


def write_target(shape: argparse.Namespace, source: dict[str, Any], tokenizer: Path, folder: Path) -> int:
    """Shards, their index, the tokenizer; config.json last, so that it means 'complete'. Gives the bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 1 + -(-shape.layers // SHARD_LAYERS)
    placed: dict[str, str] = {}
    with ThreadPoolExecutor(4) as pool:
        sizes = []
        for number, tensors in enumerate(target_shards(shape, source["vocab_size"]), 1):
            name = f"model-{number:05d}-of-{count:05d}.safetensors"
            placed |= dict.fromkeys(tensors, name)
            sizes.append(pool.submit(save, tensors, folder / name))
        total = sum(size.result() for size in sizes)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    whole = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": shape.layers, **config(shape, source)}
    (folder / "config.json").write_text(json.dumps(whole, indent=1))
    return total


def write_draft(shape: argparse.Namespace, source: dict[str, Any], folder: Path) -> None:
    """The draft; it captures the layers that SGLang takes by default (inputs of 2, n/2, n-3, named one lower)."""
    folder.mkdir(parents=True, exist_ok=True)
    save(draft_tensors(shape, source["vocab_size"]), folder / "model.safetensors")
    captured = [1, shape.layers // 2 - 1, shape.layers - 4]
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": min(DRAFT_TOKENS, source["vocab_size"]),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": captured, "use_aux_hidden_state": True},
    }
    (folder / "config.json").write_text(json.dumps({**config(shape, source), **own}, indent=1))


def main() -> None:
    """Reads the command line, writes both."""
    parser = argparse.ArgumentParser(usage=str(__doc__).split("\n\n")[1].removeprefix("usage: "))
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    for name, default in (("layers", 32), ("hidden", 4096), ("heads", 32), ("kv-heads", 8), ("intermediate", 11008)):
        parser.add_argument(f"--{name}", type=int, default=default)
    shape = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(0)
    source = json.loads((shape.tokenizer / "config.json").read_text())
    total = write_target(shape, source, shape.tokenizer, shape.out / "target")
    write_draft(shape, source, shape.out / "draft")
    print(f"{shape.out}: {total / 1e9:.1f} GB of target, {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
