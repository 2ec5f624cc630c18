"""A place for results that is away: waited for, told once, and nothing is lost when it stays away."""

import threading
import time

import pytest
from made_records import plain

from raytune_eagle.errors import StoreError
from raytune_eagle.patience import PatientStore
from raytune_eagle.store import ParquetStore


def record(number=0):
    return plain(number, 9.0)


def away(folder):
    """Make the folder of a study impossible to write, also for root: a file lies in its place."""
    path = folder / "study=s"
    path.write_text("")
    return path


@pytest.fixture
def patient(tmp_path):
    (tmp_path / "results").mkdir()
    lines = []

    def make(patience_s):
        store, rescue = ParquetStore(str(tmp_path / "results")), ParquetStore(str(tmp_path / "rescued"))
        return PatientStore(store, rescue, "RESCUED", lines.append, patience_s), lines

    return make


def test_outage_that_passes_loses_nothing(patient, tmp_path):
    """The write waits, says so once at the start and once at the end, and is there afterwards."""
    store, lines = patient(20.0)
    path = away(tmp_path / "results")
    threading.Timer(0.5, path.unlink).start()
    began = time.monotonic()
    store.append(record())
    assert time.monotonic() - began >= 0.5
    assert [r.number for r in store.read("s")] == [0]
    assert len(lines) == 2
    assert lines[0].endswith("trials go on")
    assert "written again" in lines[1]


def test_outage_that_stays_is_an_error_with_everything_rescued(patient, tmp_path):
    """After its patience the record in hand lies in the rescue, the error says where; the next write does not wait."""
    store, _ = patient(1.0)
    path = away(tmp_path / "results")
    with pytest.raises(StoreError, match="RESCUED"):
        store.append(record(0))
    began = time.monotonic()
    with pytest.raises(StoreError, match="cp -r"):
        store.append(record(1))
    assert time.monotonic() - began < 0.5
    path.unlink()
    assert [r.number for r in ParquetStore(str(tmp_path / "rescued")).read("s")] == [0, 1]


def test_mistake_is_not_waited_for(patient):
    """What would be refused again at once is raised at once."""
    store, lines = patient(60.0)
    store.append(record())
    began = time.monotonic()
    with pytest.raises(StoreError, match="kept already"):
        store.append(record())
    assert time.monotonic() - began < 1
    assert lines == []
