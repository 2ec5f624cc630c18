"""The installed command, and a spec for it with one thing wrong."""

import os
import subprocess
import sys

SPEC = """
name: s
engine: {{model: {model}, draft: {draft}, python: {python}, args: {{{args}}}}}
node: {{gpus: 0}}
workload: {{prompts: {prompts}, max_new_tokens: 8}}
space: {{speculative: {{num_steps: [1], eagle_topk: [1], num_draft_tokens: [2]}}, nccl: {{}}}}
"""
TEXTS = ["write a haiku", "sum a list", "name three rivers"]


def command(*words, cwd, first=(), **env):
    """Run the installed command; its answer must never be a traceback."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cwd / "cache"), **env}
    done = subprocess.run(
        [*first, sys.executable, "-m", "raytune_eagle", *map(str, words)],
        cwd=cwd,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def write_spec(folder, python, **changes):
    """A spec that is sound but for the changes."""
    known = {"model": "builtin:tiny", "draft": "builtin:tiny", "python": python, "prompts": "builtin:tiny", "args": ""}
    (folder / "s.yaml").write_text(SPEC.format(**{**known, **changes}))
    return folder / "s.yaml"


def refused(folder, path, *words, text=None):
    """The one line that `run` refuses a spec with, before anything is launched."""
    if text is not None:
        path.write_text(text)
    done = command("run", path, *words, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert not list(folder.glob("results/study=*/trials/*"))
    return done.stderr.removeprefix("raytune-eagle: ").rstrip("\n")
