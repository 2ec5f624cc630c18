"""What each figure is believed to be made of, before any launch: kernels over the two halves of a point.

`first` are the columns of a point's first half beside its tree, `rest` those of its second half.
"""

from __future__ import annotations

from collections.abc import Sequence

from raytune_eagle.samplers.process import Part


def accept_parts(first: Sequence[str], rest: Sequence[str]) -> list[Part]:
    """Of accept_len: NCCL changes nothing here; a server flag may."""
    return [
        Part("trend", (("trend", "one"),), 0.5 if first else 1.0),
        Part("shape", (("wide", "one"),), 0.002),
        Part("detail", (("narrow", "one"),), 0.0003),
        *(Part(f"{name} by trend", ((f"{name} by trend", "one"),), 0.5) for name in first),
        *(Part(f"{name} by shape", ((f"{name} by shape", "one"),), 0.002) for name in first),
        *(Part(name, (("one", name),), 0.002) for name in rest if not is_nccl(name)),
    ]


def cycle_parts(first: Sequence[str], rest: Sequence[str], *, probed: bool) -> list[Part]:
    """Of the cycle time; where all-reduces were `probed`, their share of it may be another, and one by shape."""
    share = [Part("probed", (("one", "expected"),), 0.3), Part("probed by shape", (("wide", "expected"),), 0.05)]
    return [
        *any_parts(first, rest, 1.0, 0.002),
        Part("rough", (("narrow", "all"),), 0.0001),
        *(share if probed else ()),
    ]


def any_parts(first: Sequence[str], rest: Sequence[str], scale: float, shape: float) -> list[Part]:
    """Whatever a machine may do; without roughness, which little could be concluded from."""
    return [
        Part("level", (("one", "one"),), 1.0),
        Part("trend", (("trend", "one"),), scale),
        Part("shape", (("wide", "one"),), shape * scale),
        Part("detail", (("narrow", "one"),), 0.0003 * scale),
        *(Part(name, ((name, "one"),), 0.01 * scale) for name in first),
        *(Part(name, (("one", name),), 0.01 * scale) for name in rest),
        Part("pairs", (("one", "pairs"), ("columns", "columns"), ("pairs", "one")), 0.0002 * scale),
        Part("columns by shape", (("wide", "columns"),), 0.0003 * scale),
    ]


def is_nccl(column: str) -> bool:
    """Whether a column is a variable of NCCL, which no token depends on."""
    return column.lower().startswith("nccl_")
