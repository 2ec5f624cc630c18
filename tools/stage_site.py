#!/usr/bin/env python3
"""Lays wheels out as one import folder, without what a tuning run on one GPU machine never touches.

usage: stage_site.py WHEELS SITE

WHEELS is a folder of wheels, SITE the folder to fill (it must not exist). Wheels are opened, not installed: they may
be for another interpreter than the one that runs this. The standard library is all it needs.
"""

import fnmatch
import shutil
import sys
import zipfile
from pathlib import Path

# Per distribution (as its wheel is named): what stays out, as patterns over paths inside the wheel. `*` crosses `/`.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "sglang": ("sglang/test/*", "sglang/multimodal_gen/*"),
    "ray": (
        "ray/jars/*",  # Java workers, 34 MB
        "ray/dashboard/client/*",  # the web page, and ours starts with include_dashboard=False
        "ray/data/*",
        "ray/llm/*",
        "ray/rllib/*",
        "ray/serve/*",
        "ray/train/*",
        "ray/tune/*",
        "ray/includes/*",
        "ray/core/libjemalloc.so",
        "ray/cpp/*",
        "*.pxd",
        "*.pyx",
    ),
    "sqlalchemy": ("*.pyx", "*.pxd"),
}
# sglang-kernel ships 1.2 GB for all GPU generations; Hopper needs one library, and a small one imported everywhere.
KERNEL_LIBRARIES = ("*/sm90/common_ops*.so", "*spatial*.so")
ALWAYS_LEFT_OUT = ("*/tests/*", "*/__pycache__/*", "*.dist-info/RECORD")
KEEPS_TESTS = ("sglang", "transformers", "flashinfer_python", "apache_tvm_ffi")  # some import theirs

# Imported when the server starts, never used by a dense text model with `--grammar-backend none`.
STUBS = {
    "IPython/__init__.py": "",
    "IPython/display.py": "def HTML(*args, **kwargs): return None\n\n\ndef display(*args, **kwargs): return None\n",
    "deep_gemm/__init__.py": "# needs SGLANG_ENABLE_JIT_DEEPGEMM=0\n",
    "soundfile.py": "",
    "xgrammar/__init__.py": (
        "from pydantic import BaseModel\n\n\n"
        "class StructuralTag(BaseModel): pass\n\n\n"
        "def get_model_structural_tag(*args, **kwargs):\n"
        "    raise NotImplementedError('no xgrammar here: start with --grammar-backend none')\n"
    ),
}


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether any of the patterns fits the path."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def is_kept(distribution: str, name: str) -> bool:
    """Whether a file of a wheel goes into the site."""
    if distribution == "sglang_kernel" and name.endswith(".so"):
        return matches(name, KERNEL_LIBRARIES)
    if name.endswith("/") or matches(name, LEFT_OUT.get(distribution, ())):
        return False
    return distribution in KEEPS_TESTS or not matches(name, ALWAYS_LEFT_OUT)


def target_path(name: str) -> str:
    """Where a path of a wheel belongs: `X.data/purelib/a.py` is `a.py`."""
    head, _, rest = name.partition("/")
    if not head.endswith(".data"):
        return name
    scheme, _, inner = rest.partition("/")
    return inner if scheme in {"purelib", "platlib"} else ""


def unpack(wheel: Path, site: Path) -> int:
    """Puts one wheel's wanted files into the site; returns how many bytes they hold."""
    size = 0
    distribution = wheel.name.split("-")[0].lower()
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            inside = target_path(info.filename)
            if not inside or not is_kept(distribution, info.filename):
                continue
            path = site / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            path.chmod(0o755 if (info.external_attr >> 16) & 0o111 else 0o644)
            size += info.file_size
    return size


def main() -> None:
    """Reads the command line and fills the site."""
    if len(sys.argv) != 3:  # noqa: PLR2004
        sys.exit(str(__doc__).split("\n\n")[1])
    wheels, site = Path(sys.argv[1]), Path(sys.argv[2])
    site.mkdir(parents=True)
    total = sum(unpack(wheel, site) for wheel in sorted(wheels.glob("*.whl")))
    for name, text in STUBS.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    print(f"{site}: {total / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
