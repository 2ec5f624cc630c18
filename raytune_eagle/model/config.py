"""A configuration: one launch of the server, whole but for its address."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from typing import Annotated, ClassVar

from pydantic import Field

from raytune_eagle.model import Value

FlagValue = bool | int | float | str | list[int | float | str] | None
"""One server flag: True is the bare flag, False and None leave it out, a list is several words."""


class Speculative(Value):
    """EAGLE-3 settings under SGLang's own names (``--speculative-…``).

    Only the exact algorithm ``EAGLE3`` captures the hidden states that the draft was trained on (an EAGLE-3 draft
    under ``EAGLE`` starts without a warning and accepts next to nothing), so no other can be expressed.
    """

    ALGORITHM: ClassVar[str] = "EAGLE3"

    draft: str
    num_steps: Annotated[int, Field(ge=1)]
    eagle_topk: Annotated[int, Field(ge=1)]
    num_draft_tokens: Annotated[int, Field(ge=2)]

    def argv(self) -> list[str]:
        """The five flags, in the order of SGLang's documentation."""
        return [
            "--speculative-algorithm",
            self.ALGORITHM,
            "--speculative-draft-model-path",
            self.draft,
            "--speculative-num-steps",
            str(self.num_steps),
            "--speculative-eagle-topk",
            str(self.eagle_topk),
            "--speculative-num-draft-tokens",
            str(self.num_draft_tokens),
        ]


def flag_words(flags: dict[str, FlagValue]) -> list[str]:
    """Spell flags (their names without dashes in front) as command-line words, in the order given."""
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, list):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(str(value))
    return words


_PATHS = ("--model-path", "--speculative-draft-model-path")
_HOME = re.compile(r"(~[A-Za-z0-9_.-]*)(?:/(.*))?", re.DOTALL)


def _word(word: str, *, at_home: bool) -> str:
    """Quote a word for a POSIX shell, but for the ``~`` or ``~user`` in front of a path."""
    found = _HOME.fullmatch(word) if at_home else None
    if found is None:
        return shlex.quote(word)
    return found[1] + (f"/{shlex.quote(found[2]) if found[2] else ''}" if found[2] is not None else "")


class Config(Value):
    """One launch of ``sglang.launch_server``, whole but for its address: what a trial tries.

    Attributes:
        launcher: the interpreter and module that start the server.
        model: path, hub id or ``builtin:…``.
        args: server flags common to the study, by their own names without dashes in front.
        speculative: EAGLE-3 settings; None is plain decoding (the baseline).
        tuned_args: server flags of this configuration alone; they come last on the command line.
        env: environment of this launch beside the inherited one (NCCL_*, SGLANG_*, …).
    """

    model: str
    speculative: Speculative | None = None
    args: dict[str, FlagValue] = {}
    tuned_args: dict[str, FlagValue] = {}
    env: dict[str, str] = {}
    launcher: tuple[str, ...] = ("python3", "-m", "sglang.launch_server")

    def argv(self) -> list[str]:
        """Words after the launcher; host, port and key are the engine's to add."""
        speculative = self.speculative.argv() if self.speculative else []
        return ["--model-path", self.model, *flag_words(self.args), *speculative, *flag_words(self.tuned_args)]

    def command(self) -> str:
        """The launch as one line for a POSIX shell, environment first."""
        env = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*env, self.shell_words()])

    def shell_words(self) -> str:
        """Launcher and words for a POSIX shell; a ``~`` that `at_home` would expand is left for the shell to expand."""
        words = [*self.launcher, *self.argv()]
        at_home = {0, *(place + 1 for place, word in enumerate(words) if word in _PATHS)}
        return " ".join(_word(word, at_home=place in at_home) for place, word in enumerate(words))

    def at_home(self) -> Config:
        """With the ``~`` of interpreter, model and draft as it is here: SGLang would take it for part of a name."""
        spec = self.speculative
        changed = {
            "launcher": (os.path.expanduser(self.launcher[0]), *self.launcher[1:]),  # noqa: PTH111  keep bare names bare
            "model": os.path.expanduser(self.model),  # noqa: PTH111
            "speculative": spec and spec.model_copy(update={"draft": os.path.expanduser(spec.draft)}),  # noqa: PTH111
        }
        return self.model_copy(update=changed)

    @property
    def uid(self) -> str:
        """12 hex digits: equal for launches that are equal whatever the order of their flags."""
        # Not cached: a copy with changes would inherit it.
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2s(text.encode(), digest_size=6).hexdigest()
