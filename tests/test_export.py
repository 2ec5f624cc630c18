"""Exports: whatever is in a launch comes back the same from a real shell and from JSON."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_records import TUNED

from raytune_eagle.errors import SpecError
from raytune_eagle.model.config import Config
from raytune_eagle.report.export import export

NASTY = [
    "a b",
    "it's",
    'say "hi"',
    "$HOME `id` $(id)",
    "two\nlines",
    "back\\slash",
    "*?[a]",
    "-",
    "",
    "ünï",
    "#no",
    "~/x",
]
SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], {k: os.environ.get(k) for k in ('NCCL_A', 'B_2')}]))"


def nasty(first: str, second: str) -> Config:
    """A configuration full of what a shell could take for its own, whose launcher shows what it was given."""
    return Config(
        model=first,
        speculative=TUNED.model_copy(update={"draft": second}),
        args={"tp-size": 8, "list": [1, second], "flag": True},
        tuned_args={"chat-template": first},
        env={"NCCL_A": first, "B_2": second},
        launcher=(sys.executable, "-c", SHOW),
    )


def shell(script: str, *words: str) -> list:
    """What the launcher saw when /bin/sh ran a script."""
    ran = subprocess.run(["/bin/sh", "-c", script, *words], capture_output=True, check=True, text=True)
    return json.loads(ran.stdout)


@pytest.mark.parametrize(("first", "second"), list(zip(NASTY, reversed(NASTY), strict=True)))
def test_a_real_shell_gives_back_argv_and_env(tmp_path, first, second):
    """The command pasted into /bin/sh, and the env file sourced by it, start exactly what `run` starts."""
    config = nasty(first, second)
    expected = [config.at_home().argv(), config.env]
    assert shell(export(config, "command")) == expected
    path = tmp_path / "launch.env"
    path.write_text(export(config, "env"), encoding="utf-8")
    assert shell('set -a; . "$0"; set +a; eval "exec $RAYTUNE_EAGLE_ARGS"', str(path)) == expected


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@given(first=TEXT, second=TEXT)
def test_every_export_is_parsed_back(first, second):
    """Whatever the texts, each form holds the same words and environment."""
    config = nasty(first, second)
    words, env = [*config.launcher, *config.argv()], config.env
    here = config.at_home()
    assert json.loads(export(config, "json")) == {"argv": [*here.launcher, *here.argv()], "env": env}
    assert shlex.split(export(config, "command")) == [*(f"{name}={value}" for name, value in env.items()), *words]
    lines = dict(word.split("=", 1) for word in shlex.split(export(config, "env")))
    assert shlex.split(lines.pop("RAYTUNE_EAGLE_ARGS")) == words
    assert lines == env


def test_paths_under_home_can_be_pasted(tmp_path, monkeypatch):
    """Interpreter, model and draft under ``~`` are started from a shell as `run` starts them; other words stay."""
    home = tmp_path / "my home"
    (home / "my env").mkdir(parents=True)
    (home / "my env" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("HOME", str(home))
    config = nasty("~/a model", "~/draft").model_copy(update={"launcher": ("~/my env/python", "-c", SHOW)})
    words, _ = shell(export(config, "command"))
    assert words == config.at_home().argv()
    assert words[1] == f"{home}/a model"
    assert words[words.index("--chat-template") + 1] == "~/a model"
    assert json.loads(export(config, "json"))["argv"][0] == f"{home}/my env/python"


def test_a_command_is_one_line():
    """Without line breaks in its values the command is a single line."""
    assert export(nasty("a b", "c"), "command").count("\n") == 1


@pytest.mark.parametrize("form", ["command", "env"])
def test_a_name_that_no_shell_takes_is_refused(form):
    """An environment name that a shell could not assign is told, and JSON holds it all the same."""
    config = Config(model="m", env={"A-B": "1"})
    with pytest.raises(SpecError, match="'A-B' is no name for a shell variable; use json"):
        export(config, form)
    assert json.loads(export(config, "json"))["env"] == {"A-B": "1"}


def test_an_unknown_form_is_refused():
    """The forms are named when another is asked for."""
    with pytest.raises(SpecError, match="'yaml' is not one of command, env, json"):
        export(Config(model="m"), "yaml")
