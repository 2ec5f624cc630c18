"""Model folders for tests: true headers, sparse data, no torch."""

import json
import struct

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "max_position_embeddings": 4096,
}
DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 7168,
    "num_hidden_layers": 1,
    "vocab_size": 129280,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 4096,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]},
}
SHAPES = {"fc.weight": [7168, 21504], "d2t": [32000], "t2d": [129280], "lm_head.weight": [32000, 7168]}


def write_weights(path, shapes):
    """A safetensors file (BF16) with these shapes; its data takes no disk."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2
        for side in shape:
            size *= side
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def make_target(folder, shards=1, **changes):
    """A target of some shards with an index; 200 tensors in each."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**TARGET, **changes}))
    (folder / "tokenizer.json").write_text("{}")
    placed = {}
    for number in range(1, shards + 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        shapes = {f"model.layers.{number}.experts.{i}.weight": [7168, 2048] for i in range(200)}
        write_weights(folder / name, shapes)
        placed |= dict.fromkeys(shapes, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def make_draft(folder, shapes=SHAPES, **changes):
    """A draft that fits `make_target`, but for the changes; None takes a key away."""
    folder.mkdir(parents=True)
    config = {name: value for name, value in {**DRAFT, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder / "model.safetensors", {name: shape for name, shape in shapes.items() if shape})
    return folder
