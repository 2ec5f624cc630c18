#!/usr/bin/env python3
"""Unpacks the pieces of tools/stage_pack.py that have arrived and were not unpacked before.

usage: gpu_unpack.py PIECES PREFIX

Archives are decoded side by side. Writes PREFIX/state/part_N for each piece done and PREFIX/state/AREA once all pieces
of an area are.
"""

import json
import lzma
import multiprocessing
import os
import re
import sys
import tarfile
import time
from pathlib import Path

# Where each area goes, under PREFIX; Triton's cache goes to the place where Triton looks by itself.
PLACES = {
    "engine": "site",
    "project": "site",
    "aot": "site/flashinfer/data/aot",
    "jitcache": "jitcache",
    "draft": "models/smollm2_135m/draft",
    "target": "gguf",
}


def place(area: str, prefix: Path) -> Path:
    """The folder for an area."""
    return Path.home() / ".triton" if area == "triton" else prefix / PLACES[area]


def relocate_triton(folder: Path) -> None:
    """Triton's cache names its own files by absolute path: make these ours."""
    for group in folder.rglob("__grp__*.json"):
        names = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: str(group.parent / name) for name in names}}))


def unpack(job: tuple[Path, str, Path]) -> None:
    """Unpacks one archive of a piece, or puts one part of a large file where it belongs."""
    piece, name, prefix = job
    area, inside = name.split("/", 1)
    folder = place(area, prefix)
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(piece) as tar:
        packed = tar.extractfile(name)
        if packed is None:
            raise ValueError(f"{piece}: {name} is no file")
        if found := re.fullmatch(r"(.*)\.at_(\d+)\.xz", inside):
            handle = os.open(folder / found[1], os.O_CREAT | os.O_WRONLY, 0o644)
            os.pwrite(handle, lzma.decompress(packed.read()), int(found[2]))
            os.close(handle)
            return
        with tarfile.open(fileobj=packed, mode="r:xz") as archive:
            archive.extractall(folder, filter="tar")
    if area == "triton":
        relocate_triton(folder)


def jobs(piece: Path, prefix: Path) -> list[tuple[Path, str, Path]]:
    """The archives in a piece, large ones first."""
    with tarfile.open(piece) as tar:
        members = [member for member in tar.getmembers() if member.name != "contents.json"]
    return [(piece, member.name, prefix) for member in sorted(members, key=lambda member: -member.size)]


def mark(pieces: list[Path], prefix: Path) -> None:
    """Notes which pieces and which areas are complete."""
    state = prefix / "state"
    state.mkdir(parents=True, exist_ok=True)
    for piece in pieces:
        (state / piece.stem).touch()
    with tarfile.open(pieces[0]) as tar:
        contents = json.load(tar.extractfile("contents.json"))  # type: ignore[arg-type]
    for area, numbers in contents.items():
        if all((state / f"part_{number}").exists() for number in numbers):
            (state / area).touch()


def main() -> None:
    """Reads the command line, unpacks what is new."""
    if len(sys.argv) != 3:  # noqa: PLR2004
        sys.exit(str(__doc__).split("\n\n")[1])
    start, prefix = time.monotonic(), Path(sys.argv[2]).absolute()
    pieces = [
        path for path in sorted(Path(sys.argv[1]).glob("part_*.tar")) if not (prefix / "state" / path.stem).exists()
    ]
    if not pieces:
        return
    work = [job for piece in pieces for job in jobs(piece, prefix)]
    with multiprocessing.Pool(min(len(work), os.cpu_count() or 1)) as pool:
        pool.map(unpack, work, chunksize=1)
    mark(pieces, prefix)
    print(f"unpacked {', '.join(piece.stem for piece in pieces)}: {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
