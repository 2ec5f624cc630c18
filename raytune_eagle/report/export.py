"""A launch, spelt for use elsewhere."""

from __future__ import annotations

import json
import re
import shlex

from raytune_eagle.errors import SpecError
from raytune_eagle.model.config import Config

FORMS = ("command", "env", "json")
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def export(config: Config, form: str) -> str:
    """Spell a launch for use elsewhere, host and port left out.

    * ``command``: one line for a POSIX shell (longer only where a value holds a line break).
    * ``env``: a file for a POSIX shell: one line per variable, then ``RAYTUNE_EAGLE_ARGS``, the launcher and its words
      quoted once more. Run it with ``set -a; . ./FILE; set +a; eval "exec $RAYTUNE_EAGLE_ARGS"``.
    * ``json``: ``{"argv": [launcher and words], "env": {…}}``; no shell reads it, so ``~`` is this machine's.

    Raises:
        SpecError: `form` is none of these, or a variable's name cannot be written in it.
    """
    if form == "json":
        config = config.at_home()
        argv = [*config.launcher, *config.argv()]
        return json.dumps({"argv": argv, "env": config.env}, indent=2, ensure_ascii=False) + "\n"
    if form not in FORMS:
        raise SpecError(f"--export: {form!r} is not one of {', '.join(FORMS)}")
    bad = [name for name in config.env if not _SHELL_NAME.fullmatch(name)]
    if bad:
        raise SpecError(f"--export {form}: {bad[0]!r} is no name for a shell variable; use json")
    if form == "command":
        return config.command() + "\n"
    lines = {**config.env, "RAYTUNE_EAGLE_ARGS": config.shell_words()}
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in lines.items())
