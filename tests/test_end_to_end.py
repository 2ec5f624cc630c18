"""The main job for real: SGLang with EAGLE-3 on the CPU, two Ray nodes, Parquet, a verdict."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

SPEC = Path(__file__).parent.parent / "search_spaces" / "tiny_cpu.yaml"


@pytest.mark.ray
@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_study_on_the_real_engine(tmp_path):
    """Two trials over two nodes, the better confirmed: the text of plain decoding, faster than it, everything kept."""
    text = SPEC.read_text().replace("_passes: 3", "_passes: 2")
    (tmp_path / "spec.yaml").write_text(text)
    words = [sys.executable, "-m", "raytune_eagle", "run", "spec.yaml", "--nodes", "2", "--trials", "2"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=860, check=False)
    assert done.returncode == 0, done.stderr
    study = tmp_path / "results" / "study=tiny-cpu"
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
