"""The Parquet store beyond its port: files that any reader understands, durability, locks, and what goes wrong."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_store import FAILURE, PARAMETERS, PARAMS, keep_two_studies, record, trial_files

from raytune_eagle.errors import StoreError
from raytune_eagle.schema import parameter_kind
from raytune_eagle.store import ParquetStore


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """Studies x and y under ./results."""
    monkeypatch.chdir(tmp_path)
    return keep_two_studies()


def test_layout_and_names(results):
    """Every part of a trial lies where DESIGN.md says, under one stem of number and uid."""
    stem = f"00001-{record().config.uid}"
    assert (results / "study=x/trials" / f"{stem}.parquet").is_file()
    assert (results / "study=x/requests" / f"{stem}.parquet").is_file()
    assert gzip.decompress((results / "study=x/logs" / f"{stem}.log.gz").read_bytes()) == b"log"


def test_a_plain_log_is_compressed(tmp_path):
    """A log that is not gzip yet is what its file name says all the same."""
    ParquetStore(str(tmp_path)).append(record(outcome=FAILURE.model_copy(update={"server_log": b"plain"})))
    (path,) = (tmp_path / "study=x/logs").iterdir()
    assert gzip.decompress(path.read_bytes()) == b"plain"


def test_rows_of_a_trial(results):
    """One row per concurrency with its own figures and comparisons; one row with none for a trial without figures."""
    rows = pq.read_table(trial_files(results)[1]).to_pylist()
    assert [(r["concurrency"], r["output_throughput"], r["speedup"]) for r in rows] == [(1, 10.0, 1.5), (4, 40.0, 1.25)]
    assert rows[0]["started_at"].isoformat() == "2023-11-14T22:13:20.125000+00:00"
    (failed,) = pq.read_table(trial_files(results)[0]).to_pylist()
    assert (failed["concurrency"], failed["status"], failed["failure_class"]) == (None, "failed", "oom")
    assert (failed["num_steps"], failed["tp_size"], failed["gates"]) == (None, None, [])


def test_parameter_columns_have_declared_types(results):
    """Kinds give the column types, mixed values are text spelled as JSON, and all files of a study agree."""
    schemas = [pq.read_schema(path) for path in trial_files(results)]
    assert schemas[0].equals(schemas[1], check_metadata=True)
    types = [schemas[0].field(name).type for name in PARAMETERS]
    assert types == [pa.int64(), pa.string(), pa.bool_(), pa.float64(), pa.string()]
    row = pq.read_table(trial_files(results)[1]).to_pylist()[0]
    assert {name: row[name] for name in PARAMETERS} == PARAMS | {"tp_size": '[1, "a"]'}


def test_exact_parameters_come_back(results):
    """Values that a column can only hold converted (1 as 1.0, a list as text) are read back as they were."""
    (_, one, _) = ParquetStore("results").read("x")
    assert one.params == PARAMS
    assert type(one.params["share"]) is int


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([None, 1, 2], "int"),
        ([1, 2.5], "float"),
        ([True, None], "bool"),
        ([True, 1], "mixed"),
        (["a", 1], "mixed"),
        ([[1]], "mixed"),
        ([None], "str"),
        (["a"], "str"),
    ],
)
def test_kind_of_a_parameter(values, kind):
    """The kind covers every value that the space lists; only int and float share a number column."""
    assert parameter_kind(values) == kind


@pytest.mark.parametrize("name", ["status", "Concurrency", ""])
def test_a_parameter_cannot_be_named_like_a_column(tmp_path, name):
    """Neither a declaration nor an undeclared record can shadow a fixed column, in any case."""
    with pytest.raises(StoreError, match="column of that name"):
        ParquetStore(str(tmp_path)).declare("x", {name: "int"})
    with pytest.raises(StoreError, match="column of that name"):
        ParquetStore(str(tmp_path)).append(record(params={name: 1}))


def test_declarations_are_checked(results):
    """Unknown kinds, names equal but for case and another declaration than the files' are refused; the same is not."""
    store = ParquetStore("results")
    for parameters, message in (
        ({"a": "list"}, "not one of int, float"),
        ({"a": "int", "A": "int"}, "column of that name"),
        ({"num_steps": "int"}, "recorded with the parameters"),
    ):
        with pytest.raises(StoreError, match=message):
            store.declare("x", parameters)
    store.declare("x", PARAMETERS)


def test_values_that_break_the_declaration_are_refused(results):
    """A value of another kind and a parameter that was not declared raise; nothing is written."""
    store = ParquetStore("results")
    store.declare("x", PARAMETERS)
    for params, message in (({"num_steps": "three"}, "does not fit"), ({"other": 1}, "'other' is no parameter")):
        with pytest.raises(StoreError, match=message):
            store.append(record(3, params=params))
    assert len(trial_files(results)) == 3


def test_a_reopened_study_keeps_its_columns(results):
    """Without a new declaration an append follows the files that are there, columns in their order."""
    ParquetStore("results").append(record(3, params={}))
    first, *_, last = (pq.read_schema(path) for path in trial_files(results))
    assert last.equals(first, check_metadata=True)


def test_probes_are_kept_by_column(results):
    """Timings land under their columns with the study's name, and an unknown column is refused."""
    store = ParquetStore("results")
    store.append_probes("x", [{"node": "n", "step": "verify", "env": {"NCCL_PROTO": "LL"}, "p50_us": 12.5}])
    found = pd.read_parquet("results/study=x/probes")
    assert found[["study", "step", "p50_us"]].to_numpy().tolist() == [["x", "verify", 12.5]]
    with pytest.raises(StoreError, match="no column 'speed'"):
        store.append_probes("x", [{"speed": 1}])


def test_each_file_is_synced_then_named_then_its_folder_synced(tmp_path, monkeypatch):
    """Log, requests and trial are each on disk before the next is begun, the trial last."""
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append(f"sync {path.parent.name}/*" if path.is_file() else f"sync {path.name}")
        sync(descriptor)

    def rename(path: Path, target: str) -> Path:
        done.append(f"name {Path(target).parent.name}")
        return replace(path, target)

    store = ParquetStore(str(tmp_path))
    store.append(record(0))
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", rename)
    store.append(record(1))
    parts = ("logs", "requests", "trials")
    assert done == [step for part in parts for step in (f"sync {part}/*", f"name {part}", f"sync {part}")]


def test_new_folders_are_synced_into_their_parents(tmp_path, monkeypatch):
    """A study's first trial survives a power cut: the entry of each new folder is synced."""
    synced: set[str] = set()
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(str(Path(f"/proc/self/fd/{fd}").readlink())), sync(fd)))
    ParquetStore(str(tmp_path / "results")).append(record())
    assert {str(tmp_path), str(tmp_path / "results"), str(tmp_path / "results/study=x")} <= synced
