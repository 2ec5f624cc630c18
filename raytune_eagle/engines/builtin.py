"""Models that come with the package: small enough to carry, real enough to speculate."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from raytune_eagle.errors import SpecError

PREFIX = "builtin:"
ROOT = Path(__file__).parent.parent / "builtin"

Role = Literal["target", "draft"]


def names() -> list[str]:
    """Names of the bundled pairs, each a folder that holds ``target`` and ``draft``."""
    return sorted(path.parent.parent.name for path in ROOT.glob("*/target/config.json"))


def builtin_path(name: str, role: Role) -> str:
    """Turn ``builtin:NAME`` into the path of that pair's target or draft; any other name is returned as it is."""
    if not name.startswith(PREFIX):
        return name
    pair = name.removeprefix(PREFIX)
    if pair not in names():
        known = ", ".join(PREFIX + known for known in names())
        raise SpecError(f"{name}: no such built-in model; known: {known}")
    return str(ROOT / pair / role)
