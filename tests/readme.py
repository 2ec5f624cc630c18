"""The blocks of README.md, each with the tier that a comment before it names (``<!-- tier: demo -->``)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
RUN_BY = {
    "quick": "test_readme.py",
    "demo": "test_end_to_end.py",
    "lab": "lab/ray_cluster.py",
    "develop": "test_readme.py",
    "gpu": None,
}
"""Tiers, and which file in tests/ runs their blocks word for word; nobody here has 8 GPUs."""
_BLOCK = re.compile(
    r"^(?:<!-- tier: (?P<tier>[a-z]+) -->\n\n?)?"
    r"(?:```(?P<kind>\w*)\n(?P<fenced>.*?)^```$|(?<=\n\n)(?P<indented>(?:    \S[^\n]*\n)+))",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """What a reader would copy; `kind` is ``shell`` where it is indented."""

    tier: str | None
    kind: str
    text: str

    @property
    def lines(self) -> list[str]:
        """Its commands, without the comments at their ends."""
        return [line.split("  #")[0].strip() for line in self.text.splitlines()]


def blocks(text: str = TEXT) -> list[Block]:
    """All of them, in order."""
    return [
        Block(found["tier"], "shell" if found["indented"] else found["kind"], found["indented"] or found["fenced"])
        for found in _BLOCK.finditer(text)
    ]


def eagle_lines(text: str) -> list[str]:
    """Lines that call the command, of every tier, indented however deep, without the comments at their ends."""
    return [line.split("  #")[0].strip() for line in re.findall(r"^ +(raytune-eagle .*)$", text, re.MULTILINE)]


def commands(tier: str) -> list[str]:
    """Every command of a tier."""
    return [line for block in blocks() if block.tier == tier and block.kind == "shell" for line in block.lines]
