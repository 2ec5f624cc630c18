"""One file in the place of many: every reader finds the same rows, at every moment, and nothing is lost."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_results import Made, write
from pyarrow import fs

from raytune_eagle.errors import SpecError, StoreError
from raytune_eagle.report.query import Query
from raytune_eagle.store import ParquetStore
from raytune_eagle.store.files import open_files

MADE = Made(trials=12, requests=16, passes=2)
TABLES = ("trials", "requests", "events")
KEPT = Path(__file__).parent.parent / "results"


@pytest.fixture
def results(tmp_path) -> Path:
    """A study of 12 trials and 2 baselines."""
    write(str(tmp_path), MADE)
    return tmp_path


def names(results: Path, table: str) -> list[str]:
    """Visible files of a table."""
    return sorted(path.name for path in (results / "study=made" / table).iterdir())


def test_every_reader_finds_the_same(results):
    """Records, events, pandas, DuckDB and `query` give the same before and after; each table is one file."""
    store = ParquetStore(str(results))
    order = ["number", "concurrency"]
    sql = "select * exclude (env, versions) from trials order by number, concurrency"

    def seen():
        frame = pd.read_parquet(results / "study=made/trials").sort_values(order).drop(columns=["env", "versions"])
        return [
            list(store.read("made")),
            store.read_events("made"),
            frame.to_json(orient="records", date_format="iso"),
            Query(str(results)).run(sql).to_pylist(),
            duckdb.sql(
                f"select trial, sum(latency_s) from '{results}/study=*/requests/*.parquet' group by all order by 1"
            ),
        ]

    before = seen()
    before[-1] = before[-1].fetchall()
    done = store.compact("made")
    assert {(each.table, each.files) for each in done} == {("trials", 14), ("requests", len(before[-1]))}
    after = seen()
    after[-1] = after[-1].fetchall()
    assert after == before
    assert names(results, "trials") == ["compact-00000-00013.parquet"]
    assert len(names(results, "requests")) == 1
    assert [path.name for path in (results / "study=made").iterdir() if path.name.startswith(".")] == [".lock"]


def test_a_large_file_is_in_groups_that_readers_pass_over(tmp_path):
    """What many trials are put into can be read in part: groups of rows, each with its least and largest trial."""
    files = open_files(str(tmp_path))
    files.write_table("requests", "compact-00000-01999.parquet", pa.table({"trial": np.arange(140_000) // 70}))
    meta = pq.read_metadata(tmp_path / "requests/compact-00000-01999.parquet")
    spans = [meta.row_group(place).column(0).statistics for place in range(meta.num_row_groups)]
    assert [(span.min, span.max) for span in spans] == [(0, 936), (936, 1872), (1872, 1999)]


def test_a_brief_reading_knows_both_kinds_of_files(results):
    """Figures, parameters and commands are there without the requests, and these where they are asked for."""
    store = ParquetStore(str(results))
    whole = list(store.read("made"))
    for _ in range(2):
        brief = store.reading("made", brief=True).records
        assert [r.config.command() for r in brief] == [r.config.command() for r in whole]
        assert [r.status for r in brief] == [r.status for r in whole]
        assert not any(r.outcome.requests for r in brief)
        full = store.with_requests(r for r in brief if r.kind == "baseline").records
        assert [r.outcome.requests for r in full] == [r.outcome.requests for r in whole if r.kind == "baseline"]
        store.compact("made")


def test_a_study_goes_on_and_is_compacted_again(results):
    """New trials stand beside the compacted ones, their numbers may not come again, and they are taken in next time."""
    store = ParquetStore(str(results))
    records = list(store.read("made"))
    store.compact("made")
    again = ParquetStore(str(results))
    with pytest.raises(StoreError, match="trial 3 is kept already"):
        again.append(records[3])
    again.append(records[3].model_copy(update={"number": 99}))
    assert len(names(results, "trials")) == 2
    assert again.compact("made")[0].files == 2
    assert [record.number for record in again.read("made")] == [*range(14), 99]
    assert again.compact("made") == []


def test_torn_and_foreign_files_are_kept(results):
    """What is no sound file of trials goes along untouched, hidden or not; what looks like one is still named."""
    folder = results / "study=made/trials"
    (folder / "why.txt").write_text("a note")
    (folder / ".notes").mkdir()
    (folder / ".notes" / "more").write_text("hidden")
    (folder / "00077-aaaaaaaaaaaa.parquet").write_bytes(b"torn")
    (folder / "notes.parquet").write_bytes(b"theirs")
    (folder / "loop.parquet").symlink_to("loop.parquet")
    (folder / "folder.parquet").mkdir()
    (folder / "folder.parquet" / "theirs").write_bytes(b"too")
    store = ParquetStore(str(results))
    store.compact("made")
    assert (folder / "00077-aaaaaaaaaaaa.parquet").read_bytes() == b"torn"
    assert (folder / "notes.parquet").read_bytes() == b"theirs"
    assert (folder / "loop.parquet").readlink() == Path("loop.parquet")
    assert (folder / "folder.parquet" / "theirs").read_bytes() == b"too"
    assert (folder / "why.txt").read_text() == "a note"
    assert (folder / ".notes" / "more").read_text() == "hidden"
    assert len(store.problems("made")) == 4
    assert len(list(store.read("made"))) == 14


@pytest.mark.parametrize("study", sorted(path.name.removeprefix("study=") for path in KEPT.glob("study=*")))
def test_kept_studies_of_any_schema(study, tmp_path):
    """The studies of the repository, some older than columns that there are now, are compacted to the same records."""
    shutil.copytree(KEPT / f"study={study}", tmp_path / f"study={study}")
    store = ParquetStore(str(tmp_path))

    def seen():
        return store.reading(study), store.read_events(study), store.read_probes(study)

    before = seen()
    assert before[0].problems == []
    assert store.compact(study)
    assert seen() == before


def test_not_while_someone_writes(results):
    """A study that a process writes is left alone, and so is a name that is none."""
    with ParquetStore(str(results)).lock("made"), pytest.raises(SpecError, match="writes it since"):
        ParquetStore(str(results)).compact("made")
    assert len(names(results, "trials")) == 14
    with pytest.raises(StoreError, match="no study 'maid' here; there are: made"):
        ParquetStore(str(results)).compact("maid")
    assert not (results / "study=maid").exists()


def test_remote_results_are_refused(results):
    """Object stores cannot exchange two folders: refused before anything is written."""
    store = ParquetStore("", fs.SubTreeFileSystem(str(results), fs.LocalFileSystem()))
    with pytest.raises(StoreError, match="only local folders can be compacted"):
        store.compact("made")
    assert len(names(results, "trials")) == 14


def test_what_a_killed_one_left_is_cleared_away(results):
    """A hidden folder of a compaction that was killed is no reader's business, and goes with the next writer."""
    left = results / "study=made" / ".trials.123-abcdef01.tmp"
    left.mkdir()
    (left / "compact-00000-00013.parquet").write_bytes(b"half")
    assert Query(str(results)).run("select count(distinct number) as n from trials").to_pylist() == [{"n": 14}]
    with ParquetStore(str(results)).lock("made"):
        assert not left.exists()


@pytest.mark.slow
def test_readers_never_see_half(results):
    """Queries that run all the while give every trial once, whichever files they meet."""
    store = ParquetStore(str(results))
    last = list(store.read("made"))[-1]
    over, seen = threading.Event(), []

    def look():
        while not over.is_set():
            sql = "select count(*) as n, count(distinct number) as d from trials where number < 14 and concurrency = 1"
            asked = ParquetStore(str(results))
            numbers = [record.number for record in asked.read("made") if record.number < 14]
            seen.append((*Query(str(results)).run(sql).to_pylist()[0].values(), len(numbers), len(set(numbers))))

    measured = Query(str(results)).run("select count(*) from trials where concurrency = 1")[0][0].as_py()
    reader = threading.Thread(target=look)
    reader.start()
    try:
        for number in range(20, 50):
            store.append(last.model_copy(update={"number": number}))
            store.compact("made")
    finally:
        over.set()
        reader.join()
    assert len(seen) > 10
    assert set(seen) == {(measured, measured, 14, 14)}
