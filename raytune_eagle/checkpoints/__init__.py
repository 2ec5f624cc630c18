"""Are this target and this draft there, whole, and made for each other? Known without loading either."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from raytune_eagle.checkpoints.configs import mistakes
from raytune_eagle.checkpoints.drafts import Demand, Pair, told
from raytune_eagle.checkpoints.weights import Checkpoint, UnreadableError, read_json
from raytune_eagle.findings import Finding, ok, problem, warning

TARGET, DRAFT = "engine.model", "engine.draft"
_SHOWN = 5
_EDGE = 1 << 16
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


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
    return [*_sound(TARGET, found), *_gaps(found), *_tokenizer(found)]


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
    pair = Pair(found, readable(target), demand or Demand())
    findings = [(problem if bad else warning)(subject, text) for bad, text in told(pair)]
    return [*_sound(subject, found), *findings]


def fingerprint(name: str) -> str | None:
    """12 hex digits, equal for equal checkpoints; None where there is no folder of that name, or none to be read.

    Of the names and sizes of the files and of the first and last 64 KiB of each: whole weights would take hours to
    read, and copies go wrong at their ends.
    """
    try:
        return _digest(Path(name).expanduser())
    except (OSError, RuntimeError):  # the latter: ~nobody
        return None


def _digest(folder: Path) -> str:
    digest = hashlib.blake2s(digest_size=6)
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as file:
            size = file.seek(0, 2)
            digest.update(f"{path.name} {size}\n".encode())
            for at in (0, max(0, size - _EDGE)):
                file.seek(at)
                digest.update(file.read(_EDGE))
    return digest.hexdigest()


_COMPATIBLE = {
    "modelopt_fp8": ("modelopt",),
    "modelopt_fp4": ("modelopt", "fp8"),
    "modelopt_mixed": ("modelopt",),
    "nvfp4_online": ("fp8", "modelopt_fp8"),
    "petit_nvfp4": ("modelopt",),
    "w8a8_int8": ("compressed-tensors",),
    "w8a8_fp8": ("compressed-tensors",),
    "auto-round-int8": ("compressed-tensors",),
}
"""--quantization that may be given for a checkpoint of another method (model_config.py 0.5.20:1757)."""

_LEAST_ARCH = {"modelopt_fp8": 89, "w8a8_fp8": 89, "w4afp8": 90, "nvfp4_online": 100, "w8a8_int8": 75, "fp8": 80}
"""Compute capability that a method needs (``get_min_capability``, layers/quantization 0.5.20)."""


def check_quantisation(
    model: str, given: str | None, known: tuple[str, ...] | None, arch: int | None, subject: str = TARGET
) -> Iterator[Finding]:
    """Does this SGLang know the quantisation of the target or of a draft, and do its GPUs?

    Args:
        model: its folder.
        given: ``--quantization``; None for a draft.
        known: what that flag takes in the SGLang that serves; None when that is not known.
        arch: compute capability of the GPUs; None when there are none, or it is not known.
        subject: place in the spec that names the folder.
    """
    found = readable(model)
    own = (found.quantisation or "").lower().replace("compressed_tensors", "compressed-tensors") if found else ""
    method = given or own
    if found is None or not method:
        return
    if known and method not in known and f"{method}_marlin" not in known:
        said = f"{found.folder}: quantised as {method}, which this SGLang does not know: it knows {', '.join(known)}"
        yield problem(subject, said)
    elif given and own and not _suits(given, own):
        said = f"{given}, but the target is quantised as {own}: leave the flag out"
        yield problem("engine.args.quantization", said)
    elif arch is not None and arch < (least := _LEAST_ARCH.get(method, 0)):
        said = f"quantised as {method}, which needs GPUs of compute capability {least / 10}; these have {arch / 10}"
        yield problem(subject, said)
    else:
        yield ok(subject, f"quantised as {method}, which this SGLang knows")


def _suits(given: str, own: str) -> bool:
    """Whether SGLang takes this flag for a checkpoint of that method: AWQ and GPTQ have Marlin forms, and moe_wna16."""
    return given == own or given in {f"{own}_marlin", "moe_wna16"} or own in _COMPATIBLE.get(given, ())


def _elsewhere(subject: str, name: str) -> Finding:
    return warning(
        subject, f"{name}: no folder here, so taken for a hub id, which cannot be checked; download it first"
    )


def readable(model: str) -> Checkpoint | None:
    """A model's folder, where there is one that can be read."""
    try:
        return None if is_hub_id(model) else Checkpoint(model)
    except UnreadableError:
        return None


# ------------------------------------------------------------------------------------------------------ any checkpoint
def _sound(subject: str, found: Checkpoint) -> Iterator[Finding]:
    yield from _described(subject, found)
    yield from _whole(subject, found)
    yield from (problem(subject, line) for line in mistakes(found))


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
    elif not weights.problems and not weights.shapes:
        yield problem(subject, f"{found.folder}: no tensor in its safetensors files; copy it again")
    elif not weights.problems:
        yield ok(subject, f"{weights.files} safetensors file{'s' * (weights.files != 1)}, all complete")
    for line in weights.problems[:_SHOWN]:
        yield problem(subject, line)
    if len(weights.problems) > _SHOWN:
        yield problem(subject, f"{found.folder}: and {len(weights.problems) - _SHOWN} more broken weight files")


def _gaps(found: Checkpoint) -> Iterator[Finding]:
    """What a target's config.json does not name, though SGLang or a check of ours needs it."""
    place = found.folder / "config.json"
    if not found.config.get("architectures"):
        yield problem(TARGET, f'{place}: names no architectures: write them as a list, as ["LlamaForCausalLM"]')
    for name, what in _NEEDED:
        if found.text.get(name) is None:
            yield warning(TARGET, f"{place}: no {name}, nor in its text_config, so {what} cannot be checked")


_NEEDED = (("hidden_size", "the draft's width"), ("num_hidden_layers", "whether its captured layers exist"))


def _tokenizer(found: Checkpoint) -> Iterator[Finding]:
    torn = [line for name in _TOKENIZER_FILES for line in _torn(found.folder / name)]
    yield from (problem(TARGET, line) for line in torn)
    if torn:
        return
    if found.tokenizer is None:
        yield warning(TARGET, f"{found.folder}: no tokenizer file that is known; copy tokenizer.json there")
    else:
        yield ok(TARGET, f"tokenizer: {found.tokenizer}")


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def _torn(path: Path) -> Iterator[str]:
    """Why a JSON file that is there cannot be read."""
    if path.is_symlink() or path.exists():
        try:
            read_json(path)
        except UnreadableError as exc:
            yield str(exc)
