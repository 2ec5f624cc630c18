"""Are this target and this draft there, whole, and made for each other? Known without loading either."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from raytune_eagle.drafts import Demand, Pair, told
from raytune_eagle.findings import Finding, ok, problem, warning
from raytune_eagle.weights import Checkpoint, UnreadableError

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
    pair = Pair(found, readable(target), demand or Demand())
    findings = [(problem if bad else warning)(subject, text) for bad, text in told(pair)]
    return [*_described(subject, found), *_whole(subject, found), *findings]


def fingerprint(name: str) -> str | None:
    """12 hex digits, equal for equal checkpoints; None where there is no folder of that name.

    Of the names and sizes of the files and of the first and last 64 KiB of each: whole weights would take hours to
    read, and copies go wrong at their ends.
    """
    if not Path(name).expanduser().is_dir():
        return None
    digest = hashlib.blake2s(digest_size=6)
    for path in sorted(path for path in Path(name).expanduser().iterdir() if path.is_file()):
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
    target: str, given: str | None, known: tuple[str, ...] | None, arch: int | None
) -> Iterator[Finding]:
    """Does this SGLang know the target's quantisation, and do its GPUs?

    Args:
        target: its folder.
        given: ``--quantization``.
        known: what that flag takes in the SGLang that serves; None when that is not known.
        arch: compute capability of the GPUs; None when there are none, or it is not known.
    """
    found = readable(target)
    own = (found.quantisation or "").lower().replace("compressed_tensors", "compressed-tensors") if found else ""
    method = given or own
    if found is None or not method:
        return
    if known and method not in known and f"{method}_marlin" not in known:
        said = f"{found.folder}: quantised as {method}, which this SGLang does not know: it knows {', '.join(known)}"
        yield problem(TARGET, said)
    elif given and own and not _suits(given, own):
        said = f"{given}, but the target is quantised as {own}: leave the flag out"
        yield problem("engine.args.quantization", said)
    elif arch is not None and arch < (least := _LEAST_ARCH.get(method, 0)):
        said = f"quantised as {method}, which needs GPUs of compute capability {least / 10}; these have {arch / 10}"
        yield problem(TARGET, said)
    else:
        yield ok(TARGET, f"quantised as {method}, which this SGLang knows")


def _suits(given: str, own: str) -> bool:
    """Whether SGLang takes this flag for a checkpoint of that method: AWQ and GPTQ have Marlin forms, and moe_wna16."""
    return given == own or given in {f"{own}_marlin", "moe_wna16"} or own in _COMPATIBLE.get(given, ())


def _elsewhere(subject: str, name: str) -> Finding:
    return warning(
        subject, f"{name}: no folder here, so taken for a hub id, which cannot be checked; download it first"
    )


def readable(target: str) -> Checkpoint | None:
    """The target's folder, where there is one that can be read."""
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
