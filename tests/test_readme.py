"""The README: its commands run word for word, and it names what `--help` names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from readme import ROOT, RUN_BY, TEXT, blocks, commands, eagle_lines

from raytune_eagle import specfile
from raytune_eagle.cli import main
from raytune_eagle.errors import SpecError

HERE = Path(__file__).parent
QUICK = commands("quick")


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


def test_every_block_is_run_somewhere():
    """Each block says its tier, and a file of tests runs that tier's blocks word for word; only GPUs are not here."""
    assert [block.text for block in blocks() if block.tier not in RUN_BY] == []
    assert {block.tier for block in blocks()} == set(RUN_BY)
    assert len(QUICK) >= 8
    for tier, file in RUN_BY.items():
        assert file is None or f'commands("{tier}")' in (HERE / file).read_text(encoding="utf-8"), tier


def test_a_block_without_a_tier_is_found():
    """A block that somebody adds and forgets to mark is one, of no tier."""
    found = blocks(
        "Text:\n\n    make it\n\n<!-- tier: quick -->\n```python\nx = 1\n```\n\n<!-- tier: lab -->\n\n    a  # b\n"
    )
    assert [(block.tier, block.kind) for block in found] == [(None, "shell"), ("quick", "python"), ("lab", "shell")]
    assert found[2].lines == ["a"]


@pytest.mark.parametrize("line", commands("develop"))
def test_targets_for_who_works_on_it(line):
    """They run this test, or for minutes, so that it cannot run them: each is a target that leads to what it says."""
    words = [*line.split(), "--dry-run"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    scripts = re.findall(r"benchmarks/\w+\.py", done.stdout)
    assert "pytest" in done.stdout or (scripts and all((ROOT / script).is_file() for script in scripts))


def parsed(line):
    """What the command's own parser makes of a line: the command that would run, and its arguments and options."""
    context = main.make_context("raytune-eagle", shlex.split(line)[1:])
    name, command, rest = main.resolve_command(context, [*context._protected_args, *context.args])
    while isinstance(command, click.Group):
        context = command.make_context(name, rest, parent=context)
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    return command.make_context(name, rest, parent=context)


IN_DOCS = [line for page in sorted((ROOT / "docs").glob("*.md")) for line in eagle_lines(page.read_text("utf-8"))]
"""Commands that stand on lines of their own in docs/."""


@pytest.mark.parametrize("line", [*eagle_lines(TEXT), *IN_DOCS])
def test_every_command_is_one_to_the_parser(line):
    """Of every tier, and in docs/: each value is of its option's kind, each spec is there and reads well."""
    given = parsed(line).params
    spec = given.get("spec_file", "SPEC.yaml")
    assert spec == "SPEC.yaml" or specfile.load(str(ROOT / spec))


def test_the_parser_knows_a_wrong_command():
    """The test above would see an option that is gone, a value of another kind, and a command that there never was."""
    for line in (
        "run S.yaml --gpus 8",
        "run S.yaml --nodes many",
        "runs S.yaml",
        "results compat",
        "best s --export x",
    ):
        with pytest.raises(click.UsageError):
            parsed(f"raytune-eagle {line}")
    with pytest.raises(SpecError):
        parsed("raytune-eagle run S.yaml --cluster nowhere")


def test_what_pip_is_asked_for_exists():
    """Extras that the README installs are extras of the package, and those that it names in words too."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    asked = re.findall(r"raytune-eagle\[(\w+)\]|the extra `(\w+)`", TEXT)
    assert {"gpu", "gp"} == {one or other for one, other in asked} <= set(extras)


@pytest.mark.parametrize("text", [block.text for block in blocks() if block.kind == "yaml"])
def test_specs(text):
    """The spec that the README shows reads as it stands."""
    assert specfile.parse(yaml.safe_load(text)).name == "kimi-k25-8gpu"


@pytest.mark.slow
@pytest.mark.parametrize("line", QUICK)
def test_command(clone, line):
    """Word for word it ends with 0 and says something, on the study that comes with the clone."""
    done = shell(clone, line)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("code", [block.text for block in blocks() if block.kind == "python"])
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
