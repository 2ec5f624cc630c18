"""Starts SGLang's server on the CPU, with the shim in every one of its processes.

SGLang spawns its scheduler and detokenizer; here they are forked, so that they inherit the imports (a start takes 12 s
instead of 22 s on two cores, and 8 s of CPU instead of 21 s). Should anything be spawned all the same, this module is
imported there as ``__mp_main__`` and installs the shim; as anything else it installs nothing until `main` is called.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pkgutil
import sys
from importlib import import_module, metadata, util
from pathlib import Path

from raytune_eagle.engines.builtin import Role, builtin_path
from raytune_eagle.engines.cpu import shim
from raytune_eagle.errors import SpecError

VERSION = "0.5.20"
"""The one version that the shim is proven with: it stands in for private names."""

MODEL_FLAGS: dict[str, Role] = {
    "--model-path": "target",
    "--model": "target",
    "--tokenizer-path": "target",
    "--speculative-draft-model-path": "draft",
    "--speculative-draft-model": "draft",
}
MODULES = {"LlamaForCausalLM": "llama", "LlamaForCausalLMEagle3": "llama_eagle3"}

if __name__ == "__mp_main__":
    shim.install()


def resolve(argv: list[str]) -> list[str]:
    """Replace ``builtin:…`` after the flags that name a model, written ``--flag value`` or ``--flag=value``."""
    words = list(argv)
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag not in MODEL_FLAGS:
            continue
        if equals:
            words[at] = f"{flag}={builtin_path(value, MODEL_FLAGS[flag])}"
        elif at + 1 < len(words):
            words[at + 1] = builtin_path(words[at + 1], MODEL_FLAGS[flag])
    return words


def refusal() -> str | None:
    """Why this interpreter cannot run the server, in one line; None when it can."""
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return f"raytune_eagle.engines.cpu needs sglang {VERSION}, which {sys.executable} does not have"
    if found != VERSION:
        return f"raytune_eagle.engines.cpu works with sglang {VERSION} only; {sys.executable} has {found}"
    return None


def unused_models(argv: list[str]) -> list[str]:
    """Model modules of SGLang that this server will not need; empty when one of its models is not a known one.

    Each scheduler imports some 240 modules to learn their classes; leaving out the rest saves seconds per start.
    """
    folders = [Path(argv[at + 1]) for at, word in enumerate(argv[:-1]) if word in MODEL_FLAGS]
    needed = set()
    for folder in folders:
        config = folder / "config.json"
        needed |= set(json.loads(config.read_text())["architectures"]) if config.is_file() else {""}
    package = util.find_spec("sglang")
    if not needed or not needed <= MODULES.keys() or package is None or not package.submodule_search_locations:
        return []
    models = [str(Path(root) / "srt/models") for root in package.submodule_search_locations]
    return sorted({module.name for module in pkgutil.iter_modules(models)} - set(MODULES.values()))


def main(argv: list[str]) -> int:
    """Serve until told to stop; 2 when the interpreter or an argument cannot do."""
    reason = refusal()
    try:
        argv = resolve(argv)
    except SpecError as error:
        reason = str(error)
    if reason:
        sys.stderr.write(f"error: {reason}\n")
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # many small operations: more threads only spin, 25 times slower
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(unused_models(argv)))
    shim.install()
    serve(argv)
    return 0


def serve(argv: list[str]) -> None:
    """What ``sglang.launch_server`` does, once the shim is in."""
    # only now, and by name: the shim must be installed first
    launch_server = import_module("sglang.launch_server")
    server_args, utils = import_module("sglang.srt.server_args"), import_module("sglang.srt.utils")
    choose, multiprocessing.set_start_method = multiprocessing.set_start_method, lambda *_, **__: None
    choose("fork", force=True)  # SGLang's later choice, spawn, is ignored: see above
    try:
        launch_server.run_server(server_args.prepare_server_args(argv))
    finally:
        utils.kill_process_tree(os.getpid(), include_parent=False)
