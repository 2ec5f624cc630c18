"""What lies in a model's folder, without loading it: config.json and the headers of its safetensors files.

A safetensors file is 8 bytes (length of the header, little-endian), the header (JSON: per tensor dtype, shape and
offsets), then the data (https://huggingface.co/docs/safetensors). So a header and the file's size tell whether it is
whole: a model of 64 shards is read in well under a second.
"""

from __future__ import annotations

import errno
import json
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000
"""Bytes; safetensors itself refuses longer headers."""
_JSON_LIMIT = 64_000_000
"""Bytes of config.json or of an index: the largest public index has 16 MB."""
_LENGTH = 8
_READERS = 8
"""Shards read at once: shared file systems answer slowly, but many questions at a time."""
_NAMED = 3
_SHARD = re.compile(r"(.+)-\d+-of-(\d+)\.safetensors")
_MOST_SHARDS = 1000
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")


class UnreadableError(ValueError):
    """A file is missing, torn or no such file at all; the message names it and says what to do."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises `UnreadableError`."""
    if (size := _size(path)) > _JSON_LIMIT:
        raise UnreadableError(f"{path}: {size:,} bytes, too large for what it should be")
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as exc:
        raise UnreadableError(f"{path}: {_reason(exc)}") from exc
    except (ValueError, RecursionError) as exc:
        raise UnreadableError(f"{path}: not JSON; copy it again") from exc
    if not isinstance(found, dict):
        raise UnreadableError(f"{path}: not a JSON object; copy it again")
    return found


def _size(path: Path) -> int:
    """Bytes of a regular file; raises `UnreadableError` for anything else: to read from a pipe would wait for ever."""
    try:
        found = path.stat()
    except OSError as exc:
        raise UnreadableError(f"{path}: {_reason(exc)}") from exc
    except ValueError as exc:  # a name with a NUL, out of an index
        raise UnreadableError(f"{path}: no name of a file; copy the index again") from exc
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "no regular file"
        raise UnreadableError(f"{path}: {kind}; put the model's own file there")
    return found.st_size


def _reason(exc: OSError) -> str:
    if isinstance(exc, PermissionError):
        return f"{exc.strerror}; let the user that runs this read it"
    if exc.errno == errno.ELOOP:
        return "a link that leads back to itself; put the model's own file there"
    return "no such file" if isinstance(exc, FileNotFoundError) else exc.strerror or str(exc)


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor shapes by name; raises `UnreadableError` for a torn header and for data that is too short or too long."""
    size = _size(path)
    try:
        text = _header_text(path)
    except OSError as exc:
        raise UnreadableError(f"{path}: {_reason(exc)}") from exc
    try:
        tensors = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        raise UnreadableError(f"{path}: torn safetensors header; copy it again") from exc
    wanted = _LENGTH + len(text) + end
    if size != wanted:
        raise UnreadableError(f"{path}: {size:,} bytes, its header says {wanted:,}; copy it again")
    return shapes


def _header_text(path: Path) -> bytes:
    """The header as it stands, or what there is of it; nothing where its length cannot be true."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        return file.read(length) if length <= _HEADER_LIMIT else b""


@dataclass(frozen=True)
class Weights:
    """The weight files of a folder: shapes of what is sound, one line for each file that is not.

    Attributes:
        form: ``safetensors``, ``bin`` (shapes cannot be read without torch), or ``none``.
    """

    form: str
    files: int
    shapes: dict[str, tuple[int, ...]]
    problems: tuple[str, ...]


class Checkpoint:
    """A folder with a model or a draft.

    Raises:
        UnreadableError: there is no such folder, or it has no readable config.json.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            self.folder = Path(folder).expanduser()
            there = self.folder.exists()
        except RuntimeError as exc:
            raise UnreadableError(f"{folder}: no such user; write the whole path") from exc
        except OSError as exc:
            raise UnreadableError(f"{folder}: {_reason(exc)}") from exc
        if not there:
            raise UnreadableError(f"{self.folder}: no such directory")
        if not self.folder.is_dir():
            raise UnreadableError(f"{self.folder}: not a directory; name the folder that holds config.json")
        self.config = read_json(self.folder / "config.json")
        self.architectures = _texts(self.config.get("architectures"))

    @cached_property
    def text(self) -> dict[str, Any]:
        """The part of the config that describes the language model: vision models nest it."""
        for name in ("text_config", "llm_config", "language_config"):
            nested = self.config.get(name)
            if isinstance(nested, dict) and "hidden_size" in nested:
                return {**self.config, **nested}
        return self.config

    def number(self, name: str) -> int | None:
        """A positive whole number of the language model's config; None where it has none of that name."""
        value = self.text.get(name)
        return value if type(value) is int and value > 0 else None

    def unusable(self, name: str) -> bool:
        """Whether something else stands where a positive whole number should."""
        return self.text.get(name) is not None and self.number(name) is None

    @property
    def context(self) -> int:
        """Tokens; as SGLang 0.5.20 derives it (``get_context_length``, hf_transformers/common.py)."""
        scaling = self.text.get("rope_scaling")
        factor = scaling.get("factor", 1) if isinstance(scaling, dict) else 1
        if isinstance(scaling, dict) and (
            "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
        ):
            factor = 1
        keys = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
        found = next((self.text[key] for key in keys if self.text.get(key) is not None), 2048)
        try:
            return int(factor * found)
        except (TypeError, ValueError, OverflowError):
            return 2048

    @property
    def quantisation(self) -> str | None:
        """Method named in the config (``compressed-tensors``, ``fp8`` …); None for plain weights."""
        for config in (self.config, self.text):
            given = config.get("quantization_config") or config.get("compression_config")
            if isinstance(given, dict):
                return str(given.get("quant_method") or given.get("quant_algo") or "of an unnamed method")
        return "modelopt" if (self.folder / "hf_quant_config.json").is_file() else None

    @property
    def tokenizer(self) -> str | None:
        """Name of its tokenizer's file; None when there is none that is known."""
        return next((name for name in _TOKENIZERS if (self.folder / name).is_file()), None)

    @cached_property
    def weights(self) -> Weights:
        """Headers of all weight files, and what is wrong with them."""
        index = self.folder / INDEX
        if index.is_file():
            return self._sharded(index)
        names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if names:
            return _read_all(self.folder, sorted({*names, *_unlisted(names)}), {})
        form = "bin" if any(self.folder.glob("*.bin")) else "none"
        return Weights(form, len(list(self.folder.glob("*.bin"))), {}, ())

    def _sharded(self, index: Path) -> Weights:
        try:
            placed = {str(name): str(file) for name, file in read_json(index)["weight_map"].items()}
        except UnreadableError as exc:
            return Weights("safetensors", 0, {}, (str(exc),))
        except (KeyError, AttributeError):
            placed = {}
        if not placed:
            return Weights("safetensors", 0, {}, (f"{index}: no weight_map; copy it again",))
        return _read_all(self.folder, sorted(set(placed.values())), placed)


def _texts(value: Any) -> tuple[str, ...]:
    """The entries of a list of texts; none where it is anything else."""
    return tuple(value) if isinstance(value, list) and all(isinstance(each, str) for each in value) else ()


def _unlisted(names: list[str]) -> Iterator[str]:
    """Shards that the names of the others (``…-00002-of-00005.safetensors``) tell of, for want of an index."""
    for name in names:
        if match := _SHARD.fullmatch(name):
            stem, count = match[1], match[2]
            width, most = len(count), min(int(count), _MOST_SHARDS)
            yield from (f"{stem}-{number:0{width}d}-of-{count}.safetensors" for number in range(1, most + 1))


def _read_all(folder: Path, names: list[str], placed: dict[str, str]) -> Weights:
    """Read the headers of these files; `placed` says in which one the index wants each tensor."""
    with ThreadPoolExecutor(_READERS) as pool:
        results = dict(zip(names, pool.map(_header_or_error, [folder / name for name in names]), strict=True))
    headers = {name: found for name, found in results.items() if isinstance(found, dict)}
    errors = [found for found in results.values() if isinstance(found, str)]
    shapes = {name: shape for header in headers.values() for name, shape in header.items()}
    errors += _misplaced(folder, headers, placed)
    return Weights("safetensors", len(names), shapes, tuple(errors))


def _header_or_error(path: Path) -> dict[str, tuple[int, ...]] | str:
    try:
        return read_header(path)
    except UnreadableError as exc:
        return str(exc)


def _misplaced(folder: Path, headers: dict[str, dict[str, tuple[int, ...]]], placed: dict[str, str]) -> Iterator[str]:
    """One line per sound file that lacks tensors which the index puts there."""
    lacking: dict[str, list[str]] = {}
    for name, file in placed.items():
        if file in headers and name not in headers[file]:
            lacking.setdefault(file, []).append(name)
    for file, names in lacking.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"{folder / file}: lacks {', '.join(names[:_NAMED])}{more}, which the index puts there; copy it again"
