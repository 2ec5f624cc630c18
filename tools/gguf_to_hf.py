#!/usr/bin/env python3
"""Writes a Llama model kept as GGUF in the Hugging Face layout: bf16 safetensors, config.json, tokenizer.json.

usage: gguf_to_hf.py MODEL.gguf FOLDER

A quantised GGUF is a third of its bf16 safetensors: it is what travels. Only numpy and the gguf package are needed (no
torch), and 135 M parameters take a few seconds. Every value is the dequantised one, rounded to nearest even, so the
result is bit for bit what transformers makes of the same file.
"""

import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

CONTROL_TOKEN = 3  # gguf's token type for tokens such as <|im_end|>

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Gguf:
    """The metadata and tensors of one GGUF file."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self.tensors: list[ReaderTensor] = list(self._reader.tensors)

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as a plain Python one."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def llama(self, key: str) -> Any:
        """A metadata value of the architecture."""
        return self.get(f"llama.{key}")


def config(source: Gguf) -> dict[str, Any]:
    """What config.json says."""
    hidden, heads = source.llama("embedding_length"), source.llama("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": source.llama("feed_forward_length"),
        "num_hidden_layers": source.llama("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.llama("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "vocab_size": source.llama("vocab_size"),
        "max_position_embeddings": source.llama("context_length"),
        "rms_norm_eps": float(source.llama("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(source.llama("rope.freq_base")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in source.tensors),
        "torch_dtype": "bfloat16",
        **token_ids(source),
    }


def token_ids(source: Gguf) -> dict[str, int]:
    """The ids of the tokens that begin, end and pad."""
    return {
        "bos_token_id": source.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": source.get("tokenizer.ggml.padding_token_id"),
    }


def hf_name(name: str) -> str:
    """A tensor's name in the Hugging Face layout."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, block, kind, suffix = name.split(".")
    return f"model.layers.{block}.{BLOCK_NAMES[kind]}.{suffix}"


def as_bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 values, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def weights(tensor: ReaderTensor, source: Gguf) -> np.ndarray:
    """A tensor's bf16 values; rotary pairs lie half a head apart in one layout and side by side in the other."""
    values = dequantize(tensor.data, tensor.tensor_type)
    heads = {
        "attn_q": source.llama("attention.head_count"),
        "attn_k": source.llama("attention.head_count_kv"),
    }.get(tensor.name.split(".")[-2])
    if heads:
        rows, columns = values.shape
        values = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return as_bf16(values)


def write_safetensors(source: Gguf, path: Path) -> None:
    """Header length, JSON header, then the tensors one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in source.tensors:
        size = 2 * int(tensor.n_elements)
        shape = [int(extent) for extent in reversed(tensor.shape)]
        header[hf_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in source.tensors:
            file.write(weights(tensor, source).tobytes())


def tokenizer(source: Gguf) -> dict[str, Any]:
    """What tokenizer.json says: byte-level BPE that keeps digits apart, as this family of models was trained."""
    if (kind := source.get("tokenizer.ggml.pre")) != "smollm":
        sys.exit(f"tokenizer.ggml.pre is {kind!r}; only 'smollm' is known here")
    tokens: list[str] = source.get("tokenizer.ggml.tokens")
    kinds: list[int] = source.get("tokenizer.ggml.token_type")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **flags}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[source.get("tokenizer.ggml.unknown_token_id")],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": source.get("tokenizer.ggml.merges"),
        },
    }


def tokenizer_config(source: Gguf) -> dict[str, Any]:
    """What tokenizer_config.json says."""
    tokens = source.get("tokenizer.ggml.tokens")
    ids = {**token_ids(source), "unk_token_id": source.get("tokenizer.ggml.unknown_token_id")}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.llama("context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": source.get("tokenizer.chat_template"),
        **{name.removesuffix("_id"): tokens[number] for name, number in ids.items()},
    }


def main() -> None:
    """Reads the command line and writes the folder; config.json comes last, so that it means 'complete'."""
    if len(sys.argv) != 3:  # noqa: PLR2004
        sys.exit(str(__doc__).split("\n\n")[1])
    start = time.monotonic()
    source, folder = Gguf(Path(sys.argv[1])), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(source, folder / "model.safetensors")
    for name, content in (
        ("tokenizer.json", tokenizer(source)),
        ("tokenizer_config.json", tokenizer_config(source)),
        ("generation_config.json", token_ids(source)),
        ("config.json", config(source)),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"{folder}: {len(source.tensors)} tensors in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
