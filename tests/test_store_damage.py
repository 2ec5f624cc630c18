"""What goes wrong on disk: torn and foreign files, other versions, full disks, two writers. Nothing else is lost."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_store import doctored, keep_two_studies, record, trial_files

from raytune_eagle.errors import SpecError, StoreError
from raytune_eagle.model.trial import Event
from raytune_eagle.schema import SCHEMA_VERSION, VERSION_KEY
from raytune_eagle.store import ParquetStore


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """Studies x and y under ./results."""
    monkeypatch.chdir(tmp_path)
    return keep_two_studies()


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


@pytest.mark.parametrize("figure", [0.0, -5.0, math.inf, math.nan])
def test_a_figure_that_is_none_is_named(results, figure):
    """A throughput that no bench gives is a line that names the file, and the trial is passed over."""
    path = trial_files(results)[1]
    table = pq.read_table(path)
    place = table.schema.get_field_index("output_throughput")
    column = pa.array([figure] * table.num_rows, table.schema.field(place).type)
    pq.write_table(table.set_column(place, table.schema.field(place), column), path)
    store = ParquetStore("results")
    assert [one.number for one in store.read("x")] == [0, 2]
    (told,) = store.problems("x")
    assert path.name in told
    assert "output_throughput" in told


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


FILL = """
import resource, signal, sys
sys.path[:0] = {path!r}
from raytune_eagle.errors import StoreError
from raytune_eagle.model.trial import TrialRecord
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


def test_a_lock_under_which_nothing_was_kept_leaves_no_folder(tmp_path):
    """Neither the study's nor one made for it; what was there before stays, and so does a study with records."""
    store = ParquetStore(str(tmp_path / "new" / "results"))
    with store.lock("x"):
        assert (tmp_path / "new/results/study=x/.lock").is_file()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "new").mkdir()
    with pytest.raises(SpecError, match="refused"), store.lock("x"):
        raise SpecError("refused")
    assert list((tmp_path / "new").iterdir()) == []
    with store.lock("x"):
        store.append(record(params={}))
    with store.lock("x"):
        pass
    assert [one.number for one in store.read("x")] == [0]


def test_a_lock_that_is_taken_away_holds_nobody_else_out_of_step(tmp_path):
    """Many at once, each of whom takes the folder away again: never two inside, and everybody gets in."""
    inside, most, entered = [], [], []

    def enter(name: int) -> None:
        for _ in range(25):
            while True:
                with contextlib.suppress(SpecError, StoreError), ParquetStore(str(tmp_path)).lock("x"):
                    inside.append(name)
                    most.append(len(inside))
                    time.sleep(0.0005)
                    inside.remove(name)
                    entered.append(name)
                    break

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(4)))
    assert (max(most), len(entered)) == (1, 100)


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
