"""The gates of NCCL: whether its settings took, on lines that real servers wrote."""

from __future__ import annotations

import gzip
from pathlib import Path

import pandas as pd
import pytest
from made_servers import INFO_LINE, READY, TOOK, detail, seen, verdicts

from raytune_eagle import gates
from raytune_eagle.model.config import Config


@pytest.mark.parametrize(
    ("info", "log", "verdict", "why"),
    [
        ({"tp_size": 1}, "", "warning", "one GPU serves the model"),
        ({"tp_size": 8}, "", "warning", "disable-custom-all-reduce"),
        ({"tp_size": 8, "disable_custom_all_reduce": True}, "", "passed", ""),
        ({"tp_size": 8}, "CustomAllReduceV2 is disabled because it's not supported on more than two", "passed", ""),
        ({"tp_size": 8}, "Setup Custom allreduce failed with . To silence", "passed", ""),
        ({"tp_size": 8}, INFO_LINE.format("AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}"),
         "passed", ""),
        ({"tp_size": 8, "disable_custom_all_reduce": True, "flashinfer_allreduce_fusion_backend": "auto"}, "",
         "warning", "FlashInfer"),
    ],
)  # fmt: skip
def test_nccl_that_is_not_on_the_path(info, log, verdict, why):
    """NCCL settings are worth a launch only where decoding's all-reduces go through NCCL."""
    found = gates.before(seen(info=info, log=READY + log, env={"NCCL_PROTO": "LL"}))
    assert verdicts(found)["nccl_path"] == verdict
    assert why in detail(found, "nccl_path")


def test_nccl_path_is_no_matter_without_nccl_settings():
    """A study that tunes no NCCL is told nothing of it, and its debug output is no setting."""
    found = gates.before(seen(env={"NCCL_DEBUG": "INFO"}))
    assert not {"nccl_path", "nccl_knobs"} & set(verdicts(found))


@pytest.mark.parametrize(
    ("env", "log", "verdict", "why"),
    [
        ({"NCCL_PROTO": "LL"}, "", "unknown", "set NCCL_DEBUG: INFO"),
        ({"NCCL_PROTO": "LL"}, INFO_LINE.format("Bootstrap: Using eth0"), "unknown", "name ENV in it"),
        ({"NCCL_PROTO": "LL", "NCCL_NTHREADS": "96"}, TOOK, "passed", ""),
        ({"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}, TOOK, "warning", "NCCL_ALGO=Ring was not read"),
        ({"NCCL_NTHREADS": "96"}, TOOK + INFO_LINE.format("Invalid NCCL_NTHREADS 96 (must be a multiple of 32)"),
         "warning", "NCCL_NTHREADS=96 is invalid"),
        ({"NCCL_PROTO": "LL"}, TOOK + INFO_LINE.format("AllReduce: 4096 Bytes -> Algo RING proto SIMPLE channel{}"),
         "warning", "all-reduces run with simple"),
        ({"NCCL_PROTO": "LL"}, TOOK + INFO_LINE.format("4096 Bytes -> Algo 1 proto 2 time 13.2"),
         "warning", "all-reduces run with simple"),
        ({"NCCL_PROTO": "LL"}, TOOK + INFO_LINE.format("AllGather: 4096 Bytes -> Algo RING proto SIMPLE channel{}")
         + INFO_LINE.format("AllReduce: 4096 Bytes -> Algo RING proto LL channel{}"), "passed", ""),
        ({"NCCL_ALGO": "ring,tree;allreduce:tree"}, INFO_LINE.format("AllReduce: 8 Bytes -> Algo TREE proto LL c"),
         "passed", ""),
        ({"NCCL_PROTO": "Simple"}, TOOK, "warning", "NCCL_PROTO=Simple was asked for, NCCL took LL"),
        ({"NCCL_PROTO": "ll"}, TOOK, "passed", ""),
        ({"NCCL_PROTO": "LL128,LL"}, TOOK, "warning", "NCCL took LL:"),
        ({"NCCL_PROTO": "^LL128,Simple"}, TOOK, "passed", ""),
        ({"NCCL_PROTO": "LL", "NCCL_NTHREADS": "128"}, TOOK, "warning", "NCCL_NTHREADS=128 was asked for, NCCL"),
        ({"NCCL_PROTO": "LL", "NCCL_NTHREADS": "0x60"}, TOOK, "passed", ""),
        ({"NCCL_PROTO": "LL"}, TOOK + INFO_LINE.format("NCCL_PROTO set by environment to Simple"),
         "warning", "NCCL took Simple"),
        ({"NCCL_ALGO": "Ring"}, INFO_LINE.format("NCCL_ALGO set by environment to allreduce:tree"),
         "warning", "NCCL_ALGO=Ring was asked for, NCCL took allreduce:tree"),
        ({"NCCL_ALGO": "allreduce:Tree;broadcast:ring"},
         INFO_LINE.format("NCCL_ALGO set by environment to broadcast:ring;allreduce:tree"), "passed", ""),
        ({"NCCL_MAX_NCHANNELS": "16"}, INFO_LINE.format("NCCL_MAX_NCHANNELS set by environment to 4."),
         "warning", "NCCL took 4"),
        ({"NCCL_P2P_LEVEL": "3"}, INFO_LINE.format("NCCL_P2P_LEVEL set by environment to PHB"), "passed", ""),
        ({"NCCL_P2P_LEVEL": "SYS"}, INFO_LINE.format("NCCL_P2P_LEVEL set by environment to PHB"),
         "warning", "NCCL took PHB"),
        ({"NCCL_BUFFSIZE": "4MB"}, INFO_LINE.format("NCCL_BUFFSIZE set by environment to 4."),
         "warning", "NCCL_BUFFSIZE=4MB was asked for, NCCL took 4"),
        ({"NCCL_PROTO": "LL", "NCCL_BUFFSIZE": "99999999999999999999"},
         TOOK + INFO_LINE.format("Invalid value 99999999999999999999 for NCCL_BUFFSIZE, using default -2."),
         "warning", "NCCL_BUFFSIZE=99999999999999999999 is invalid"),
        ({"NCCL_PROTO": "^LL"}, TOOK + INFO_LINE.format("AllReduce: 8 Bytes -> Algo NVLS_TREE proto LL c"),
         "warning", "run with ll"),
    ],
)  # fmt: skip
def test_nccl_settings_that_did_not_take(env, log, verdict, why):
    """NCCL says in its INFO and TUNING lines what it took and what it chose, in the form of each version.

    It reads lists in any order and case, and numbers in C's spelling; another value than the asked one is told.
    """
    found = gates.before(seen(info={"tp_size": 8}, log=READY + log, env=env))
    assert verdicts(found)["nccl_knobs"] == verdict
    assert why in detail(found, "nccl_knobs")


REAL = sorted((Path(__file__).parent.parent / "results").glob("study=random7b-h200x*"))

TUNING = Path(__file__).parent / "assets" / "nccl" / "0516_h200x4_tuning.log"
"""From a launch on four H200s, November 2026, with NCCL_DEBUG_SUBSYS=ENV,TUNING and no setting but the defaults."""


@pytest.mark.parametrize("study", REAL, ids=lambda study: study.name)
def test_real_servers_took_their_nccl_settings(study):
    """What real servers on H200s said of NCCL's settings passes as asked, and not if another one had been asked for."""
    frame = pd.read_parquet(study / "trials").drop_duplicates("number")
    tuned = 0
    for row in frame.itertuples():
        config = Config.model_validate_json(row.config_json)
        log = gzip.decompress((study / "logs" / f"{row.number:05d}-{row.uid}.log.gz").read_bytes()).decode()
        env = {name: value for name, value in config.env.items() if name.startswith("NCCL_") and "DEBUG" not in name}
        if not env:
            continue
        tuned += 1
        found = gates.before(seen(info={"tp_size": 2, "disable_custom_all_reduce": True}, log=log, env=env))
        assert verdicts(found) | {"nccl_path": "passed", "nccl_knobs": "passed"} == verdicts(found), row.number
        other = gates.before(seen(info={"tp_size": 2}, log=log, env=env | {"NCCL_BUFFSIZE": "1048576"}))
        assert "NCCL_BUFFSIZE=1048576 was not read" in detail(other, "nccl_knobs")
        changed = env | {name: "Simple" if value == "LL" else "LL" for name, value in env.items()}
        told = detail(gates.before(seen(info={"tp_size": 2}, log=log, env=changed)), "nccl_knobs")
        assert all(f"{name}={changed[name]} was asked for, NCCL took {env[name]}:" in told for name in env), told
    assert tuned >= 4


@pytest.mark.parametrize(
    ("env", "verdict"),
    [
        ({"NCCL_PROTO": "LL"}, "passed"),
        ({"NCCL_PROTO": "Simple"}, "warning"),
        ({"NCCL_ALGO": "ring,tree;allreduce:tree"}, "warning"),
    ],
)
def test_real_choices_of_nccl_are_held_against_what_was_asked(env, verdict):
    """The same real lines, Ring with LL for every all-reduce: right for who asked for LL, wrong for the others."""
    log = (
        READY + TUNING.read_text() + "".join(INFO_LINE.format(f"{n} set by environment to {v}") for n, v in env.items())
    )
    found = gates.before(seen(info={"tp_size": 4, "disable_custom_all_reduce": True}, log=log, env=env))
    assert verdicts(found)["nccl_knobs"] == verdict
    assert ("all-reduces run with" in detail(found, "nccl_knobs")) is (verdict == "warning")
