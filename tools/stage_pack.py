#!/usr/bin/env python3
"""Packs what an air-gapped machine needs into pieces that each stay under a size.

usage: stage_pack.py OUT MEGABYTES AREA=FOLDER|AREA=FILE.tar.xz ...

An AREA is one word for what belongs together; tools/gpu_unpack.py says where each goes. The order of the arguments is
the order in which the machine gets them, as far as sizes allow. Each piece, OUT/part_N.tar, is a plain tar of archives
that stand alone (AREA/NAME.tar.xz), small enough to be decoded side by side, so a machine can start on a piece while
the next one travels. Large files are cut (AREA/NAME.at_OFFSET.xz). Every piece holds `contents.json`: the numbers of
the pieces that each area is in.
"""

import io
import json
import lzma
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MB = 1_000_000
LARGE_BYTES = MB
CHUNK_BYTES = MB  # small, to fill a piece to its end
GROUP_BYTES = 24 * MB  # of unpacked files in one archive
ROOM_BYTES = 64 * 1024  # for a tar's headers and its end

PLAIN = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
CODE = [{"id": lzma.FILTER_X86}, *PLAIN]  # jumps made absolute first: libraries get a tenth smaller


@dataclass
class Piece:
    """One file that travels."""

    size: int = ROOM_BYTES
    items: list[tuple[str, Path]] = field(default_factory=list)


def is_library(path: Path) -> bool:
    """Whether a file is a program or a shared library."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def grouped(folder: Path) -> Iterator[list[Path]]:
    """The files of a folder: large ones and libraries by themselves, the rest in order, GROUP_BYTES at a time."""
    group: list[Path] = []
    size = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        bytes_here = path.stat().st_size
        if bytes_here > LARGE_BYTES:
            yield [path]
            continue
        if size + bytes_here > GROUP_BYTES and group:
            yield group
            group, size = [], 0
        group.append(path)
        size += bytes_here
    if group:
        yield group


def cut(area: str, source: Path, path: Path, work: Path) -> Iterator[tuple[str, Path]]:
    """Compresses a large file of numbers piecewise."""
    with path.open("rb") as file:
        for offset in range(0, path.stat().st_size, CHUNK_BYTES):
            out = work / f"{area}_{path.name}_{offset}.xz"
            out.write_bytes(lzma.compress(file.read(CHUNK_BYTES), filters=PLAIN))
            yield f"{area}/{path.relative_to(source)}.at_{offset}.xz", out


def archives(area: str, source: Path, work: Path) -> Iterator[tuple[str, Path]]:
    """Compresses one area; gives the name and the file of each archive."""
    if source.is_file():
        yield f"{area}/{source.name}", source
        return
    for number, group in enumerate(grouped(source)):
        if group[0].suffix == ".gguf":
            yield from cut(area, source, group[0], work)
            continue
        out = work / f"{area}_{number}.tar.xz"
        alone = len(group) == 1 and is_library(group[0])
        with (
            lzma.open(out, "wb", filters=CODE if alone else PLAIN) as packed,
            tarfile.open(fileobj=packed, mode="w") as tar,
        ):
            for path in group:
                tar.add(path, str(path.relative_to(source)), filter=nobody)
        yield f"{area}/{number:03d}_{group[0].name}.tar.xz", out


def nobody(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leaves out who made a file and when, so that the same content gives the same piece."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def place(pieces: list[Piece], name: str, path: Path, limit: int) -> None:
    """Puts an archive into the first piece with room."""
    size = path.stat().st_size + 1024
    if size + ROOM_BYTES > limit:
        sys.exit(f"{name} alone is {size / MB:.1f} MB")
    piece = next((piece for piece in pieces if piece.size + size <= limit), None)
    if piece is None:
        piece = Piece()
        pieces.append(piece)
    piece.items.append((name, path))
    piece.size += size


def write(pieces: list[Piece], out: Path) -> None:
    """Writes all pieces."""
    contents: dict[str, list[int]] = {}
    for number, piece in enumerate(pieces, 1):
        for area in {name.split("/")[0] for name, _ in piece.items}:
            contents.setdefault(area, []).append(number)
    text = json.dumps(contents, sort_keys=True).encode()
    for number, piece in enumerate(pieces, 1):
        path = out / f"part_{number}.tar"
        with tarfile.open(path, "w") as tar:
            note = tarfile.TarInfo("contents.json")
            note.size = len(text)
            tar.addfile(note, io.BytesIO(text))
            for name, archive in piece.items:
                tar.add(archive, name, filter=nobody)
        print(f"{path}  {path.stat().st_size / MB:.1f} MB")


def main() -> None:
    """Reads the command line and writes the pieces."""
    if len(sys.argv) < 4:  # noqa: PLR2004
        sys.exit(str(__doc__).split("\n\n")[1])
    out, limit = Path(sys.argv[1]), int(float(sys.argv[2]) * MB)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    pieces: list[Piece] = []
    with tempfile.TemporaryDirectory() as work:
        for argument in sys.argv[3:]:
            area, _, source = argument.partition("=")
            before = sum(piece.size for piece in pieces)
            for name, path in archives(area, Path(source), Path(work)):
                place(pieces, name, path, limit)
            print(f"{area:28} {(sum(piece.size for piece in pieces) - before) / MB:6.1f} MB", flush=True)
        write(pieces, out)


if __name__ == "__main__":
    main()
