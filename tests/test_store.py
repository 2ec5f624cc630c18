"""The Parquet store beyond its port: files that any reader understands, durability, locks, and what goes wrong."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from raytune_eagle.errors import SpecError, StoreError
from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.measurement import Measurement, Request
from raytune_eagle.model.trial import Completed, Event, Failed, TrialRecord
from raytune_eagle.schema import RESERVED_COLUMNS, SCHEMA_VERSION, VERSION_KEY, parameter_kind
from raytune_eagle.store import ParquetStore

PARAMETERS = {"num_steps": "int", "nccl_proto": "str", "fast": "bool", "share": "float", "tp_size": "mixed"}
PARAMS = {"num_steps": 3, "nccl_proto": None, "fast": True, "share": 1, "tp_size": [1, "a"]}
REQUEST = Request(concurrency=1, repeat=0, prompt_id="p", category="code", started_s=0.0, latency_s=1.0)
CONCURRENCY = (1, 4)


def measured(concurrency: int) -> Measurement:
    """Figures that differ by concurrency."""
    names = "output_throughput ci_low ci_high cycle_ms burst_throughput ttft_p50_ms ttft_p95_ms itl_p50_ms itl_p95_ms"
    figures = {name: 10.0 * concurrency + place for place, name in enumerate(names.split())}
    counts = {"passes": 2, "stable": True, "completion_tokens": 9, "verify_rounds": 3, "failed_share": 0.0}
    return Measurement(concurrency=concurrency, accept_len=3.0, accept_rate=0.5, **figures, **counts)


def record(number: int = 0, study: str = "x", **changes: object) -> TrialRecord:
    """A completed trial with two concurrencies, a request and a log."""
    outcome = Completed(
        measurements=tuple(measured(c) for c in CONCURRENCY), requests=(REQUEST,), server_log=gzip.compress(b"log")
    )
    fields = {
        "study": study,
        "number": number,
        "kind": "trial",
        "node": "n1",
        "config": Config(
            model="m",
            speculative=Speculative(draft="d", num_steps=3, eagle_topk=4, num_draft_tokens=12),
            env={"NCCL_PROTO": "LL"},
        ),
        "key": "k",
        "params": PARAMS,
        "started_at": 1_700_000_000.125,
        "ended_at": 1_700_000_060.5,
        "facts": {"hardware": "8x H200", "versions": {"sglang": "0.5.20"}},
        "outcome": outcome,
        "speedup": {1: 1.5, 4: 1.25},
    }
    return TrialRecord.model_validate(fields | changes)


FAILURE = Failed(failure_class="oom", failure_phase="launch", failure_detail="no memory")
BASELINE = {"kind": "baseline", "params": {}, "config": Config(model="m"), "outcome": FAILURE, "speedup": {}}


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """Studies x (three trials, the first a failed baseline) and y (other parameters) under ./results."""
    monkeypatch.chdir(tmp_path)
    store = ParquetStore("results")
    store.declare("x", PARAMETERS)
    store.append(record(0, **BASELINE))
    store.append(record(1))
    store.append(record(2))
    store.declare("y", {"eagle_topk": "int"})
    store.append(record(0, "y", params={"eagle_topk": 4}))
    return Path("results")


def trial_files(results: Path, study: str = "x") -> list[Path]:
    """Visible files of trials/."""
    return sorted((results / f"study={study}" / "trials").glob("*.parquet"))


def doctored(path: Path, table: pa.Table, **metadata: str | None) -> None:
    """Write a table over `path` with its metadata changed."""
    kept = dict(table.schema.metadata or {}) | {f"raytune_eagle.{key}".encode(): v for key, v in metadata.items()}
    pq.write_table(table.replace_schema_metadata({key: v for key, v in kept.items() if v is not None}), path)


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


def test_torn_and_foreign_files_are_passed_over_and_named(results):
    """Empty, truncated, rotten, foreign and misnamed files cost no other trial, and each has its line."""
    folder = results / "study=x/trials"
    good = trial_files(results)[1].read_bytes()
    rotten = bytearray(good)
    rotten[60] ^= 0xFF
    uid = record().config.uid
    for number, data in enumerate((b"", good[: len(good) // 2], bytes(rotten), good), start=3):
        (folder / f"0000{number}-{uid}.parquet").write_bytes(data)
    pq.write_table(pa.table({"a": [1]}), folder / "theirs.parquet")
    doctored(folder / f"00007-{uid}.parquet", pq.read_table(folder / trial_files(results)[0].name).drop(["status"]))
    store = ParquetStore("results")
    assert [one.number for one in store.read("x")] == [0, 1, 2]
    told = "\n".join(store.problems("x"))
    assert len(store.problems("x")) == 6
    for name in ("theirs", *(f"0000{number}-{uid}" for number in range(3, 8))):
        assert name in told


def test_names_that_are_no_files_are_passed_over_and_named(results):
    """A link in a circle, a dangling one, a folder and a pipe cost no trial, and each has its line, in every table."""
    for table in ("trials", "requests", "events"):
        folder = results / f"study=x/{table}"
        folder.mkdir(exist_ok=True)
        (folder / "loop.parquet").symlink_to("loop.parquet")
        (folder / "dangling.parquet").symlink_to("/no/such/file")
        (folder / "folder.parquet").mkdir()
        os.mkfifo(folder / "pipe.parquet")
    store = ParquetStore("results")
    assert [one.number for one in store.read("x")] == [0, 1, 2]
    told = store.problems("x")
    for table in ("trials", "events"):
        for name in ("loop", "dangling", "folder", "pipe"):
            assert sum(f"/{table}/{name}.parquet: torn or unreadable: " in line for line in told) == 1
    store.append(record(3))
    with store.lock("x"):
        assert [one.number for one in ParquetStore("results").read("x")] == [0, 1, 2, 3]


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path):
    """Results that are a file, or would be inside of one: bad input for who asks for the studies."""
    (tmp_path / "file").write_text("theirs")
    for place in ("file", "file/in"):
        with pytest.raises(SpecError, match=f"{place}: a file, or in a file, and no folder of records; name another"):
            ParquetStore(str(tmp_path / place)).studies()


def test_a_number_in_two_files_is_read_once(results):
    """Two writers without a lock may both have kept a number: one is read, the other named."""
    path = trial_files(results)[1]
    shutil.copy(path, path.with_name("00001-ffffffffffff.parquet"))
    assert [one.number for one in ParquetStore("results").read("x")] == [0, 1, 2]
    assert "in another file already" in ParquetStore("results").problems("x")[-1]


def test_lost_requests_are_named_and_the_trial_kept(results):
    """A trial whose requests are gone still counts; the loss is told."""
    (results / "study=x/requests" / trial_files(results)[1].name).unlink()
    store = ParquetStore("results")
    assert [len(one.outcome.requests) for one in store.read("x")] == [0, 0, 1]
    assert "requests/00001" in store.problems("x")[0]


def test_a_torn_trial_can_be_run_again(results):
    """The number of a torn file is free: a study goes on after a machine lost the end of a file."""
    trial_files(results)[2].write_bytes(b"")
    ParquetStore("results").append(record(2))
    assert [one.number for one in ParquetStore("results").read("x")] == [0, 1, 2]


@pytest.mark.parametrize(
    "call", [lambda s: list(s.read("x")), lambda s: s.append(record(3)), lambda s: s.problems("x")]
)
def test_a_newer_schema_asks_for_an_upgrade(results, call):
    """A file of a later version is neither skipped nor guessed at nor mixed with older ones."""
    path = trial_files(results)[2]
    doctored(path, pq.read_table(path), schema=str(SCHEMA_VERSION + 1))
    newer = f"results schema {SCHEMA_VERSION + 1}, .* reads up to {SCHEMA_VERSION}: upgrade raytune_eagle"
    with pytest.raises(StoreError, match=newer):
        call(ParquetStore("results"))


def test_files_carry_the_schema_version(results):
    """Every file says which version of the schema it follows."""
    ParquetStore("results").append_events("x", [Event(at=1.5, study="x", name="ready")])
    for path in results.rglob("*.parquet"):
        assert pq.read_schema(path).metadata[VERSION_KEY] == str(SCHEMA_VERSION).encode()


def test_a_study_of_schema_1_is_read_whole(results):
    """Columns that came later hold their defaults; nothing is passed over."""
    shutil.copytree(Path(__file__).parent.parent / "results" / "study=smollm2-h200", results / "study=smollm2-h200")
    store = ParquetStore("results")
    records = list(store.read("smollm2-h200"))
    assert [one.number for one in records] == list(range(13)), "the last four were added under schema 2"
    old = records[:9]
    assert all(len(one.outcome.requests) > 100 and not one.outcome.gates for one in old)
    assert all(one.outcome.gates for one in records[9:])
    assert {request.prefix_hashes for one in old for request in one.outcome.requests} == {()}
    assert store.problems("smollm2-h200") == []


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


FILL = """
import resource, signal, sys
sys.path[:0] = {path!r}
from raytune_eagle.errors import StoreError
from raytune_eagle.model import TrialRecord
from raytune_eagle.store import ParquetStore
record = TrialRecord.model_validate_json(sys.stdin.read())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    ParquetStore("results").append(record)
except StoreError as error:
    print(error)
"""


def test_a_full_disk_leaves_nothing_visible(results):
    """When the last file of a trial does not fit, StoreError names it and none of the trial's files stays."""
    before = sorted(str(path) for path in results.rglob("*"))
    requests_size = (results / "study=x/requests" / trial_files(results)[1].name).stat().st_size
    assert requests_size < trial_files(results)[1].stat().st_size - 500
    script = FILL.format(path=[str(Path(__file__).parents[1])], limit=requests_size + 200)
    text = record(3).model_copy(update={"outcome": record().outcome.model_copy(update={"server_log": b""})})
    ran = subprocess.run(
        [sys.executable, "-c", script], input=text.model_dump_json(), text=True, capture_output=True, check=True
    )
    assert ran.stdout.strip().endswith(f"trials/00003-{record().config.uid}.parquet: cannot be written: File too large")
    assert sorted(str(path) for path in results.rglob("*")) == before


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    """A results folder that is a file gives StoreError with the path, for writing, locking and listing."""
    (tmp_path / "results").write_text("a file")
    store = ParquetStore(str(tmp_path / "results"))
    with pytest.raises(StoreError, match=r"study=x/trials: cannot be listed: Not a directory"):
        store.append(record(params={}))
    with pytest.raises(StoreError, match=r"\.lock: cannot be opened"), store.lock("x"):
        pytest.fail("locked")


def test_an_unknown_uri_is_a_store_error():
    """A scheme that pyarrow does not know is told with the URI."""
    with pytest.raises(StoreError, match=r"nope://bucket: cannot be opened"):
        ParquetStore("nope://bucket")


HOLD = """
import sys, time
sys.path[:0] = {path!r}
from raytune_eagle.store import ParquetStore
with ParquetStore("results").lock("x"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_writer_is_told_of_the_first_and_a_killed_one_leaves_no_lock(results):
    """The lock names its holder's pid, keeps other studies free, and ends with a SIGKILL of the holder."""
    script = HOLD.format(path=[str(Path(__file__).parents[1])])
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            store = ParquetStore("results")
            with pytest.raises(SpecError, match=rf"study 'x': process {holder.pid} on .* since 20"), store.lock("x"):
                pytest.fail("locked twice")
            with store.lock("y"):
                pass
        finally:
            holder.send_signal(signal.SIGKILL)
    with ParquetStore("results").lock("x"):
        assert json.loads((results / "study=x/.lock").read_text())["pid"] == os.getpid()


def test_one_process_cannot_lock_twice(tmp_path):
    """Two studies of one name in one process exclude each other too, and the lock is free afterwards."""
    store = ParquetStore(str(tmp_path))
    with store.lock("x"), pytest.raises(SpecError, match="wait for it or stop it"), store.lock("x"):
        pytest.fail("locked twice")
    with store.lock("x"):
        pass


def test_opening_for_writing_clears_what_a_killed_writer_left(results):
    """Temporary files and requests without a trial go; finished records, foreign files and logs stay."""
    study = results / "study=x"
    stale = [study / "trials/.00009-aaaaaaaaaaaa.parquet.1-b.tmp", study / "requests/00009-aaaaaaaaaaaa.parquet"]
    for path in stale:
        path.write_bytes(b"half")
    (study / "requests/theirs.parquet").write_bytes(b"")
    before = sorted(path for path in results.rglob("*") if path not in stale)
    with ParquetStore("results").lock("x"):
        assert sorted(path for path in results.rglob("*") if path.name != ".lock") == before
