"""How commands find a study: by its name, its folder, or the name in its spec."""

from __future__ import annotations

import gc
import shutil

import optuna
import pytest
from click.testing import CliRunner
from made_results import Made, write
from sqlalchemy import event
from sqlalchemy.orm import Session

from raytune_eagle.cli import main
from raytune_eagle.cli.studies import chosen, records_of, uncollected
from raytune_eagle.errors import SpecError
from raytune_eagle.identity import spec_of
from raytune_eagle.model.trial import Event
from raytune_eagle.report.to_optuna import to_optuna


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A study under its spec's name, and two copies of it under others, as `run --study` makes them."""
    place = tmp_path_factory.mktemp("results")
    write(str(place), Made(trials=3, requests=8, passes=2))
    return place


def test_by_name_and_by_folder(folder):
    """The name, the folder as a shell completes it, and its last part are the same study."""
    for given in ("made", "study=made", f"{folder}/study=made/", f"{folder}/study=made"):
        found = chosen(str(folder), given)
        assert found.name == "made"
        assert len(records_of(found)) == 5
    assert chosen("nowhere", f"{folder}/study=made").name == "made"


def test_by_the_name_in_its_spec(folder, tmp_path, capsys):
    """A study of another name than its spec's is found by that one, and said; of several none is guessed."""
    shutil.copytree(folder / "study=made", tmp_path / "study=second")
    assert chosen(str(tmp_path), "made").name == "second"
    assert "the study of spec 'made' is 'second'" in capsys.readouterr().err
    shutil.copytree(folder / "study=made", tmp_path / "study=third")
    with pytest.raises(SpecError, match=r"no study 'made' under .*; of that spec there are: second, third"):
        chosen(str(tmp_path), "made")


@pytest.mark.parametrize("given", ["none", "study=none", "", "study=", "../made"])
def test_none_of_that_name(folder, given):
    """What is no study is told in one line, with those that there are where the name could be one."""
    with pytest.raises(SpecError) as raised:
        chosen(str(folder), given)
    (line,) = raised.value.problems
    assert "there are: made" in line or "cannot name a study" in line


def test_a_home_that_is_nobodys():
    """The folder of a user that there is not is told as that."""
    with pytest.raises(SpecError, match="~nobody-here/results: no such user; write the whole path"):
        chosen("~nobody-here/results", "made")


def test_collecting_goes_on_afterwards():
    """Garbage is collected again after the reading, also when it failed."""
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), uncollected():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_spec_of_another_version_is_told():
    """A kept spec that this version cannot read is one line with its place, not a traceback."""
    started = Event(at=0.0, study="old", name="study_started", detail='{"name": "old", "engine": {"modle": "m"}}')
    with pytest.raises(SpecError, match="study 'old': this version cannot read the spec that it was run with: engine"):
        spec_of([started])


@pytest.mark.parametrize("words", ["results check", "results compact", "export optuna sqlite:///x.db", "dashboard"])
def test_a_folder_without_studies(words, tmp_path, monkeypatch):
    """Commands over all studies say that there is none, instead of nothing, and make no file."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, [*words.split(), "--results", "nothing"])
    assert done.exit_code == 2
    assert done.output == "raytune-eagle: no study under nothing: run one first\n"
    assert list(tmp_path.iterdir()) == []


def test_an_optuna_copy_that_breaks_off_leaves_nothing(folder, tmp_path):
    """A copy that is interrupted is taken back, so that the same command can be given again."""
    url, records = f"sqlite:///{tmp_path}/x.db", records_of(chosen(str(folder), "made"), brief=True)

    def interrupted(session, *_):
        if len(session.new) > 1:  # the study itself is one, and in by then
            raise KeyboardInterrupt

    event.listen(Session, "before_flush", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            to_optuna(records, url, "made")
    finally:
        event.remove(Session, "before_flush", interrupted)
    assert optuna.get_all_study_names(url) == []
    assert to_optuna(records, url, "made") == 3
