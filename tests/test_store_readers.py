"""Files that any reader understands: pandas, DuckDB and Arrow need nothing of this package."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pandas as pd
import pyarrow.dataset as ds
import pytest
from made_store import keep_two_studies, trial_files

from raytune_eagle.schema import RESERVED_COLUMNS
from raytune_eagle.store import ParquetStore


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """Studies x and y under ./results."""
    monkeypatch.chdir(tmp_path)
    return keep_two_studies()


def test_pandas_reads_a_folder_and_a_file(results):
    """Pandas needs nothing from this package, and a path with study=x in it does not clash with the study column."""
    folder = pd.read_parquet("results/study=x/trials")
    assert folder["study"].tolist() == ["x"] * 5
    assert folder["output_throughput"].dropna().tolist() == [10.0, 40.0] * 2
    assert pd.read_parquet(str(trial_files(results)[1]))["study"].tolist() == ["x", "x"]


@pytest.mark.parametrize("by_name", ["", ", union_by_name=true"])
@pytest.mark.parametrize("hive", ["", ", hive_partitioning=true", ", hive_partitioning=false"])
def test_duckdb_reads_all_studies(results, by_name, hive):
    """DuckDB reads files of studies with different parameters under each of its options."""
    source = f"read_parquet('results/study=*/trials/*.parquet'{by_name}{hive})"
    found = duckdb.sql(f"select study, count(*), max(output_throughput) from {source} group by 1 order by 1").fetchall()
    assert found == [("x", 5, 40.0), ("y", 2, 40.0)]
    if by_name:
        assert duckdb.sql(f"select max(num_steps), max(eagle_topk), max(env) from {source}").fetchall() == [
            (3, 4, {"NCCL_PROTO": "LL"})
        ]


def test_duckdb_reads_a_bare_glob(results):
    """The plainest spelling works too."""
    assert duckdb.sql("select distinct study from 'results/study=*/trials/*.parquet' order by 1").fetchall() == [
        ("x",),
        ("y",),
    ]


def test_arrow_dataset_reads_a_folder_and_all_studies(results):
    """pyarrow.dataset reads one study, and all of them with the partition inferred beside the column of that name."""
    one = ds.dataset("results/study=x/trials", format="parquet").to_table()
    assert one["study"].to_pylist() == ["x"] * 5
    files = [str(path) for study in "xy" for path in trial_files(results, study)]
    every = ds.dataset(files, format="parquet", partitioning="hive").to_table(filter=ds.field("study") == "y")
    assert every["study"].to_pylist() == ["y", "y"]


def test_readers_pass_over_what_is_being_written(results):
    """A half-written file and the lock have dots in front of their names, and no reader trips over them."""
    with ParquetStore("results").lock("x"):
        (results / "study=x/trials/.00003-0123456789ab.parquet.1-a.tmp").write_bytes(b"PAR1 half")
        assert len(pd.read_parquet("results/study=x/trials")) == 5
        assert duckdb.sql("select count(*) from 'results/study=x/trials/*.parquet'").fetchall() == [(5,)]
        assert ds.dataset("results/study=x/trials", format="parquet").count_rows() == 5
        assert len(list(ParquetStore("results").read("x"))) == 3
        assert ParquetStore("results").problems("x") == []


def test_no_column_is_named_like_a_server_flag():
    """Any flag of SGLang 0.5.20 can be searched: none has the name of a fixed column."""
    flags = (Path(__file__).parent / "assets/sglang_0520_flag_names.txt").read_text().split()
    assert len(flags) > 500
    assert not RESERVED_COLUMNS & set(flags)
