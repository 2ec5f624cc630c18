"""The main job for real: SGLang with EAGLE-3 on the CPU, two Ray nodes, Parquet, a verdict."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from readme import ROOT, commands


@pytest.fixture
def clone(tmp_path) -> Path:
    """A clone after `make setup`, with this environment for its own; its demo has two trials of two passes."""
    program = tmp_path / ".venv" / "bin" / "raytune-eagle"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m raytune_eagle "$@"\n')
    program.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "requirements-cpu.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv" / ".ready").touch()
    (tmp_path / "search_spaces").mkdir()
    text = (ROOT / "search_spaces" / "tiny_cpu.yaml").read_text(encoding="utf-8")
    for whole, short in (("_passes: 3", "_passes: 2"), ("trials: 8", "trials: 2")):
        assert whole in text
        text = text.replace(whole, short)
    (tmp_path / "search_spaces" / "tiny_cpu.yaml").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.ray
@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_study_on_the_real_engine(clone):
    """The README's demo, word for word: two nodes, the better trial confirmed, plain decoding's text, and faster."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    (line,) = commands("demo")
    words = ["bash", "-c", line]
    done = subprocess.run(words, cwd=clone, capture_output=True, text=True, timeout=860, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    study = clone / "results" / "study=tiny-cpu"
    frame = pd.read_parquet(study / "trials")
    trials, baselines, again = (frame[frame.kind == kind] for kind in ("trial", "baseline", "confirm"))
    assert (len(trials), len(baselines), len(again)) == (2, 4, 2)
    assert len(set(again.node)) == 1
    assert again.matches_baseline.dropna().eq(1.0).all()
    assert set(frame.status) == {"completed"}
    assert set(frame.node) == {"local-0", "local-1"}
    assert set(trials.matches_baseline) == {1.0}
    assert (trials.accept_len > 2).all()
    assert baselines.accept_len.isna().all()
    assert (trials.speedup > 1).all(), "EAGLE-3 beats plain decoding by half on this pair; noise is far smaller"
    assert set(frame.sglang_version) == {"0.5.20"}
    assert len(list((study / "logs").glob("*.log.gz"))) == 8
    assert "x (" in done.stdout
    assert "python3 -m raytune_eagle.engines.cpu --model-path builtin:tiny" in done.stdout
    assert "not confirmed" not in done.stdout
    requests = pd.read_parquet(study / "requests")
    eagle = requests[(requests.trial == trials.number.iloc[0]) & (requests["repeat"] >= 0)]
    assert (eagle.completion_tokens == 16).all()
    assert eagle.verify_rounds.sum() * trials.accept_len.iloc[0] == pytest.approx(eagle.completion_tokens.sum())
