"""The README: its commands run word for word, and it names what `--help` names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from raytune_eagle.cli import main

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
ELSEWHERE = {
    "make demo": "test_end_to_end.py runs its study",
    "make lab": "several hosts, some 20 minutes",
    "make soak": "some minutes, and it proves no line of the README",
    "make test": "runs this",
    "make test-fast": "runs this",
    "pip install": "needs GPUs to be of use",
    "raytune-eagle run search_spaces/kimi_k25_8gpu.yaml --cluster auto": "needs 8 GPUs",
}
"""Commands of the README that cannot run in this test, and why."""


def commands():
    """Lines of the indented blocks, one command each."""
    blocks = re.findall(r"(?<=\n\n)((?:    \S.*\n)+)", TEXT)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]


QUICK = [line for line in commands() if not line.startswith(tuple(ELSEWHERE))]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder as after the clone, with the command on the path; what is written stays there."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("results", "search_spaces"):
        (folder / name).symlink_to(ROOT / name)
    program = folder / "bin" / "raytune-eagle"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m raytune_eagle "$@"\n')
    program.chmod(0o755)
    return folder


def shell(clone, line):
    """What a person sees who pastes the line."""
    script = f'export PATH="{clone}/bin:$PATH" PYTHONPATH="{ROOT}"; {line}'
    return subprocess.run(["bash", "-c", script], cwd=clone, capture_output=True, text=True, timeout=120, check=False)


def test_there_are_commands_to_run():
    """The blocks are found, each is run here or is said to run elsewhere, and none of the latter is stale."""
    assert len(QUICK) >= 8
    for prefix in ELSEWHERE:
        assert any(line.startswith(prefix) for line in commands()), prefix


@pytest.mark.slow
@pytest.mark.parametrize("line", QUICK)
def test_command(clone, line):
    """Word for word it ends with 0 and says something, on the study that comes with the clone."""
    done = shell(clone, line)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
def test_python(clone, code):
    """Examples in Python run as they stand."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(
        command, cwd=clone, capture_output=True, text=True, timeout=120, check=False, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def help_commands(group=main, before=""):
    """Every command that `--help` lists, groups opened."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from help_commands(command, f"{name} ")
        else:
            yield f"{before}{name}", command


def test_readme_and_help_name_the_same_commands():
    """The table of the README has every command of `--help` and no other."""
    named = set()
    for row in re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE):
        for words in re.findall(r"`([a-z ]+?)(?: [A-Z].*?)?`", row):
            named.add(words)
    assert named == {name for name, _ in help_commands()}


def test_options_in_the_readme_exist():
    """Each option that the README gives to a command is one of it."""
    known = dict(help_commands())
    for line in re.findall(r"raytune-eagle ([^`\n]+)", TEXT):
        words = line.split("  #")[0].split()
        name = next((n for n in (" ".join(words[:2]), words[0]) if n in known), None)
        if name is None:
            continue
        options = {option for parameter in known[name].params for option in parameter.opts}
        used = {word.split("=")[0] for word in words if word.startswith("-")}
        assert used <= options | {"--help"}, line


@pytest.mark.parametrize(("name", "command"), list(help_commands()))
def test_help_says_what_each_is_for(name, command):
    """Every command has one line of help, and every option words of its own."""
    assert command.help, name
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help or parameter.show_default, f"{name} {parameter.name}"
