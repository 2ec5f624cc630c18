"""`results check` and `compact`: what is wrong in a folder of records, and many files made one."""

from __future__ import annotations

import re
import shutil

import optuna
import pandas as pd
import pyarrow.parquet as pq
import pytest
from command import ROOT, invoked
from made_results import Made, write
from made_store import doctored

from raytune_eagle import results
from raytune_eagle.errors import SpecError
from raytune_eagle.schema import SCHEMA_VERSION
from raytune_eagle.store import ParquetStore


def test_check_finds_what_is_wrong(tmp_path):
    """Sound studies pass with 0; a torn file, a duplicate and lost requests are named, with exit 1."""
    write(str(tmp_path), Made(trials=8, requests=16, passes=2))
    assert invoked("results", "check", "--results", tmp_path).exit_code == 0
    trials = sorted((tmp_path / "study=made/trials").iterdir())
    trials[0].write_bytes(b"torn")
    trials[1].with_name(trials[1].name[:6] + "aaaaaaaaaaaa.parquet").write_bytes(trials[1].read_bytes())
    next(path for path in (tmp_path / "study=made/requests").iterdir() if path.name == trials[2].name).unlink()
    done = invoked("results", "check", "--results", tmp_path)
    assert done.exit_code == 1
    assert "torn or unreadable" in done.output
    assert "is in another file already" in done.output
    assert "made: 3 problems" in done.output


def test_check_goes_on_after_a_study_that_cannot_be_read(tmp_path):
    """A study whose folder is a file inside is a problem of its own; the next is looked at all the same."""
    for study in ("a", "b"):
        write(str(tmp_path), Made(study=study, trials=4, requests=8, passes=2))
    shutil.rmtree(tmp_path / "study=a/trials")
    (tmp_path / "study=a/trials").write_bytes(b"")
    done = invoked("results", "check", "--results", tmp_path)
    assert done.exit_code == 1
    assert "study=a/trials: cannot be listed: Not a directory" in done.stdout
    assert done.stderr == "raytune-eagle: a: 1 problem\nraytune-eagle: b: no problems\n"


@pytest.mark.parametrize(
    "words",
    [
        ["best", "made"],
        ["explain", "made"],
        ["report", "made"],
        ["compare", "made", "other"],
        ["query", "select 1"],
        ["dashboard"],
        ["nodes"],
        ["nodes", "--study", "made"],
        ["results", "check"],
        ["results", "compact"],
        ["export", "optuna", "sqlite:///x.db"],
        ["probe", str(ROOT / "search_spaces" / "tiny_cpu.yaml")],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_results_that_are_a_file(tmp_path, words):
    """Bad input, exit 2, as where there is no such folder."""
    (tmp_path / "file").write_text("theirs")
    done = invoked(*words, "--results", tmp_path / "file")
    assert (done.exit_code, done.stdout) == (2, "")
    assert re.fullmatch(r"raytune-eagle: .*/file\b.* a file.*; name another\n", done.stderr)
    assert (tmp_path / "file").read_text() == "theirs"


def test_a_folder_that_no_study_can_be_called_stops_nothing(tmp_path):
    """`study=a b` or `study=2024` is somebody else's: every command goes on without it, and `check` names it."""
    write(str(tmp_path), Made(trials=6, requests=16, passes=2))
    for name in ("study=a b", "study=2024", "study="):
        (tmp_path / name).mkdir()
    for words in (["query", "select count(*) from trials"], ["nodes"], ["best", "made"], ["results", "compact"]):
        done = invoked(*words, "--results", tmp_path)
        assert done.exit_code == 0, done.stderr
    checked = invoked("results", "check", "--results", tmp_path)
    assert checked.exit_code == 1
    assert [line.split(":")[0] for line in checked.stdout.splitlines()] == ["study=", "study=2024", "study=a b"]


@pytest.fixture
def one_of_a_later_version(tmp_path):
    """Studies a, b and c, the files of b written by a later version of this package."""
    for study in "abc":
        write(str(tmp_path), Made(study=study, trials=4, requests=8, passes=2))
    for path in (tmp_path / "study=b").rglob("*.parquet"):
        doctored(path, pq.read_table(path), schema=str(SCHEMA_VERSION + 1))
    return tmp_path


@pytest.mark.parametrize("words", ["export optuna sqlite:///{}/x.db", "results compact", "results check"])
def test_a_study_of_a_later_version_keeps_no_other_back(one_of_a_later_version, words):
    """What is asked of all studies is done to the others; the one is named, and exit 1 says that it was left out."""
    done = invoked(*words.format(one_of_a_later_version).split(), "--results", one_of_a_later_version)
    assert done.exit_code == 1
    told = [line for line in done.output.splitlines() if f"results schema {SCHEMA_VERSION + 1}" in line]
    assert len(told) == 1
    assert "study=b" in told[0]
    others = [line for line in done.output.splitlines() if line not in told and "b: 1 problem" not in line]
    assert [line.removeprefix("raytune-eagle: ")[:2] for line in others] == ["a:", "c:"]
    alone = invoked(*words.format(one_of_a_later_version).split(), "--results", one_of_a_later_version, *_only(words))
    assert alone.exit_code == 1
    assert len([line for line in alone.output.splitlines() if "upgrade raytune_eagle" in line]) == 1


def _only(words):
    return ["--study", "b"] if words.startswith("export") else ["b"]


def test_the_latest_study_is_found_beside_one_of_a_later_version(one_of_a_later_version):
    """`nodes` without a name passes over what it cannot read, and says so."""
    done = invoked("nodes", "--results", one_of_a_later_version)
    assert done.exit_code == 0
    assert "study a" in done.stdout
    assert "study=b" in done.stderr


@pytest.mark.parametrize("words", [["best", "made"], ["nodes"], ["results", "check"], ["query", "select 1 as one"]])
def test_results_that_are_the_folder_of_a_study(tmp_path, words):
    """The folder above it is told; a query is answered all the same, from empty views, but not without a word."""
    write(str(tmp_path), Made(trials=4, requests=8, passes=2))
    done = invoked(*words, "--results", tmp_path / "study=made")
    assert done.exit_code == (0 if words[0] == "query" else 2)
    assert done.stderr == f"raytune-eagle: no study under {tmp_path}/study=made: give --results {tmp_path}/\n"
    assert "one" in done.stdout or words[0] != "query"


def test_a_renamed_folder_is_told(tmp_path):
    """Rows keep the name of their study: `check` and `load` say what the folder holds, where they said nothing."""
    write(str(tmp_path), Made(trials=4, requests=8, passes=2))
    (tmp_path / "study=made").rename(tmp_path / "study=mine")
    done = invoked("results", "check", "--results", tmp_path)
    assert done.exit_code == 1
    assert done.stdout == "study=mine: holds records of study 'made': give it that name again\n"
    with pytest.raises(SpecError, match=r"study=mine under .* holds records of study 'made': give it that name again"):
        results.load(str(tmp_path), "mine")
    assert invoked("export", "optuna", f"sqlite:///{tmp_path}/x.db", "--results", tmp_path).output == "mine: 4 trials\n"
    assert optuna.get_all_study_names(f"sqlite:///{tmp_path}/x.db") == ["mine"]


def test_nodes_of_a_study_given_by_its_folder(tmp_path):
    """The folder says where its records are, whatever --results says; a study without events is told as that."""
    write(str(tmp_path), Made(trials=4, requests=8, passes=2))
    with ParquetStore(str(tmp_path)).lock("made"):
        done = invoked("nodes", "--study", tmp_path / "study=made")
    assert "study made" in done.stdout
    assert "nobody runs" not in done.stderr
    shutil.rmtree(tmp_path / "study=made/events")
    done = invoked("nodes", "--study", tmp_path / "study=made")
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert f"no events of study 'made' under {tmp_path}/" in done.output


def test_compact_by_command(tmp_path):
    """The command says what it did, and the second time that there is nothing to do."""
    write(str(tmp_path), Made(trials=8, requests=16, passes=2))
    assert "trials: 10 files" in invoked("results", "compact", "--results", tmp_path).output
    assert invoked("results", "compact", "--results", tmp_path).output == "made: nothing to do\n"
    assert len(pd.read_parquet(tmp_path / "study=made/trials").number.unique()) == 10


def test_thousands_of_files_are_advised_to_be_compacted(tmp_path):
    """Who asks many single files hears what would make it quick, on stderr; compacted, nothing is said."""
    write(str(tmp_path), Made(trials=6, requests=16, passes=2))
    folder = tmp_path / "study=made/trials"
    for number in range(1001):  # no more than names: they are passed over as torn
        (folder / f"{number + 100:05d}-aaaaaaaaaaaa.parquet").touch()
    sql = "select count(*) from requests"
    said = invoked("query", sql, "--results", tmp_path, "--format", "csv")
    assert "1,009 files: `raytune-eagle results compact made` would make reading them faster" in said.stderr
    assert "faster" not in said.stdout
    for path in folder.glob("*-aaaaaaaaaaaa.parquet"):
        path.unlink()
    assert invoked("query", sql, "--results", tmp_path).stderr == ""
