"""Other tools on the same records: pandas, Optuna, SGLang's adaptive file, another mix, two studies, a check."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import textwrap
from importlib.metadata import distribution
from pathlib import Path

import optuna
import pytest
from command import invoked
from made_results import CATEGORIES, WINNER, Made, write

from raytune_eagle import results as api
from raytune_eagle.errors import SpecError
from raytune_eagle.model.trial import Completed
from raytune_eagle.report.adaptive import adaptive
from raytune_eagle.report.to_optuna import to_optuna
from raytune_eagle.report.verdict import sides
from raytune_eagle.rescore import limited, parse_mix, remixed
from raytune_eagle.store import ParquetStore

MADE = Made(trials=60, requests=32, passes=4)

SPEC = Path(__file__).parent.parent / "search_spaces" / "tiny_cpu.yaml"

ADAPTIVE_PARAMS = "speculative/adaptive_spec_params.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    write(str(folder), MADE)
    write(str(folder), Made(study="other", trials=20, requests=16, passes=2, gain=1.9, seed=1))
    return folder


@pytest.fixture(scope="module")
def records(folder):
    return list(ParquetStore(str(folder)).read("made"))


def test_load_gives_a_frame(folder, records):
    """One row per trial and concurrency, in order, with its types; the environment is a dictionary."""
    frame = api.load(str(folder), study="made")
    expected = [(r.number, m.concurrency) for r in records for m in getattr(r.outcome, "measurements", [])]
    with_figures = frame.dropna(subset=["output_throughput"])
    assert list(zip(with_figures.number, with_figures.concurrency, strict=True)) == expected
    assert frame.env.map(type).eq(dict).all()
    assert set(api.load(str(folder)).study) == {"made", "other"}
    assert len(api.load(str(folder), "made", "requests")) == sum(len(r.outcome.requests) for r in records)


def test_load_says_what_there_is(folder, tmp_path):
    """A wrong name of a study or table is told with those that there are; nothing at all gives an empty frame."""
    with pytest.raises(SpecError, match=r"no study 'maid' under .*; there are: made, other"):
        api.load(str(folder), "maid")
    with pytest.raises(SpecError, match="'trial' is not one of trials, requests"):
        api.load(str(folder), table="trial")
    assert api.load(str(tmp_path)).empty
    assert "output_throughput" in api.load(str(tmp_path)).columns


def test_a_mix_by_hand(records):
    """Throughput of a mix is tokens over seconds, each category weighted by its share of the requests."""
    mix = {"code": 0.7, "chat": 0.3}
    record = next(r for r in records if r.params == WINNER)
    (again,) = remixed([record], mix)
    rows = [r for r in record.outcome.requests if r.concurrency == 8 and r.repeat >= 0]
    mean = {name: [r for r in rows if r.category == name] for name in mix}
    tokens = sum(share * sum(r.completion_tokens for r in mean[name]) / len(mean[name]) for name, share in mix.items())
    seconds = sum(share * sum(r.latency_s for r in mean[name]) / len(mean[name]) for name, share in mix.items())
    figures = {m.concurrency: m for m in again.outcome.measurements}
    assert figures[8].output_throughput == pytest.approx(8 * tokens / seconds)
    assert figures[8].ci_low < figures[8].output_throughput < figures[8].ci_high


def test_a_mix_moves_the_verdict(records):
    """Code, which speculation serves best here, gives more over plain decoding than summaries do."""
    over = {n: sides(remixed(records, {n: 1.0}), 1).over_plain.value for n in ("code", "summarising")}
    expected = CATEGORIES["code"] / CATEGORIES["summarising"]
    assert over["code"] / over["summarising"] == pytest.approx(expected, rel=0.05)


def test_the_measured_mix_changes_nothing(records):
    """Equal shares of all categories, which is how they were measured, give back the figures."""
    again = remixed(records, dict.fromkeys(CATEGORIES, 1 / len(CATEGORIES)))
    for one, other in zip(records, again, strict=True):
        if isinstance(one.outcome, Completed):
            for mine, theirs in zip(one.outcome.measurements, other.outcome.measurements, strict=True):
                assert theirs.output_throughput == pytest.approx(mine.output_throughput)


@pytest.mark.parametrize("text", ["", "code", "code=0", "code=x", "code=1,code=1", "=1", "code=inf"])
def test_a_mix_that_is_none(text):
    """What is no list of shares is told with an example."""
    with pytest.raises(SpecError, match=r"as in code=0\.7,chat=0\.3"):
        parse_mix(text)


@pytest.mark.slow
def test_mixes_and_limits_by_command(folder):
    """The command takes both, says which categories there are, and which limits."""
    assert "EAGLE3 5/4/16" in invoked("best", "made", "--results", folder, "--mix", "code=7,chat=3").output
    wrong = invoked("best", "made", "--results", folder, "--mix", "cod=1")
    assert wrong.exit_code == 2
    assert "no prompts of 'cod' were measured; there are: arithmetic, chat, code, summarising" in wrong.output
    wrong = invoked("best", "made", "--results", folder, "--limit", "itl=40")
    assert wrong.exit_code == 2
    assert "write NAME=NUMBER in ms" in wrong.output


def test_limits_judge_again(records):
    """A limit that the winner breaks makes it infeasible, and limits of the study itself no longer count."""
    winner = next(r for r in records if r.params == WINNER)
    worst = max(m.itl_p95_ms for m in winner.outcome.measurements)
    strict = limited(records, [f"itl_p95_ms={worst * 0.99}"])
    assert next(r for r in strict if r.number == winner.number).status == "infeasible"
    assert any(r.violations for r in records)
    assert not any(r.violations for r in limited(records, ["itl_p95_ms=1e9"]))


def test_adaptive_is_what_sglang_reads(tmp_path):
    """SGLang 0.5.20's own loader takes the file, and routes each batch size to the steps of its winner."""
    write(str(tmp_path), Made(trials=60, requests=16, passes=2, gain=3.0))
    records = list(ParquetStore(str(tmp_path)).read("made"))
    found = adaptive(records, [1, 8])
    path = tmp_path / "adaptive.json"
    path.write_text(found.text)
    code = f"""
        import importlib.util, sys, types
        helpers = types.SimpleNamespace(resolved_view=print, resolving_view=print, log_info_on_rank0=lambda *_: None)
        for name in ("", ".srt", ".srt.arg_groups", ".srt.arg_groups.overrides", ".srt.utils"):
            sys.modules["sglang" + name] = helpers  # what its package imports besides needs a GPU build
        spec = importlib.util.spec_from_file_location("adaptive", {str(_sglang() / ADAPTIVE_PARAMS)!r})
        adaptive = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(adaptive)
        params = adaptive.AdaptiveSpeculativeParams(initial_steps=1, cfg_path={str(path)!r})
        print([params.get_steps_for_batch(size) for size in (1, 7, 8, 64)])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    one, eight = (slot["candidate_steps"][0] for slot in json.loads(found.text).values())
    assert json.loads(done.stdout) == [one, one, eight, eight]
    chain = [r for r in records if r.config.speculative and r.config.speculative.eagle_topk == 1]
    assert one in {r.config.speculative.num_steps for r in chain}
    assert "--speculative-eagle-topk 1" in found.command
    assert found.command.endswith("--speculative-adaptive --speculative-adaptive-config FILE")


def _sglang() -> Path:
    """Folder of the installed SGLang, without importing it."""
    return Path(distribution("sglang").locate_file("sglang/srt"))


def test_adaptive_needs_chains(records):
    """A study without eagle_topk 1, or with plain decoding ahead everywhere, is told so."""
    trees = [r for r in records if not r.config.speculative or r.config.speculative.eagle_topk > 1]
    with pytest.raises(SpecError, match="no launch with eagle_topk 1"):
        adaptive(trees, [1, 8])
    with pytest.raises(SpecError, match="plain decoding is fastest at every concurrency"):
        adaptive(records, [1, 8])


@pytest.mark.slow
def test_optuna_opens_the_export(folder, records, tmp_path):
    """Optuna reads back every searched launch: parameters, values, states, what failed and why."""
    url = f"sqlite:///{tmp_path / 'x.db'}"
    assert invoked("export", "optuna", url, "--results", folder).output == "made: 60 trials\nother: 20 trials\n"
    study = optuna.load_study(study_name="made", storage=url)
    searched = [r for r in records if r.kind == "trial"]
    assert len(study.trials) == len(searched)
    for trial, record in zip(study.trials, searched, strict=True):
        assert trial.user_attrs["number"] == record.number
        assert trial.params["num_steps"] == record.params["num_steps"]
        assert trial.params["nccl_proto"] == (record.params["nccl_proto"] or "unset")
        assert trial.state.name == {"completed": "COMPLETE", "infeasible": "PRUNED", "failed": "FAIL"}[record.status]
        assert trial.user_attrs["launch_command"] == record.config.command()
    best = max((r for r in searched if r.status == "completed"), key=lambda r: math.prod(r.speedup.values()))
    assert study.best_trial.user_attrs["number"] == best.number


@pytest.mark.slow
def test_an_export_overwrites_nothing(folder, records, tmp_path):
    """A storage that has the study already, or is none, is refused in one line."""
    url = f"sqlite:///{tmp_path / 'x.db'}"
    to_optuna(records, url, "made")
    again = invoked("export", "optuna", url, "--results", folder, "--study", "made")
    assert again.exit_code == 2
    assert "holds a study 'made' already: name another file" in again.output
    for bad in ("nothing", "sqlite:////nowhere/at/all/x.db", "foo://x"):
        done = invoked("export", "optuna", bad, "--results", folder, "--study", "made")
        assert done.exit_code == 2, done.output
        assert len(done.output.splitlines()) == 1


def test_two_studies_side_by_side(folder):
    """What differs is said first; then plain decoding, the fastest, and the points in both, with ratios."""
    out = invoked("compare", "made", "other", "--results", folder).output
    assert "differs: budget" not in out
    assert "concurrency 8" in out
    assert "EAGLE3 5/4/16" in out
    assert "points in both" in out


def test_a_ratio_of_two_studies_counts_what_launches_differ_by(folder):
    """Studies alike to a hair in their passes, of one launch each, are not told apart to a hair."""
    out = invoked("compare", "made", "made", "--results", folder).output
    low, high = map(float, re.search(r"fastest.*1\.00x \((.*?)–(.*?)\)", out).groups())
    assert low <= 0.96
    assert high >= 1.04


def test_a_launch_is_told_once(folder):
    """Where the fastest is the same at every concurrency its command comes once, and intervals say what they are of."""
    out = invoked("best", "made", "--results", folder).output
    assert out.count("sglang.launch_server") == 1
    assert "Launch command of the fastest: as above" in out
    assert "over the passes of a launch" in out


def test_a_study_is_its_own_equal(folder):
    """Against itself every ratio is 1 and nothing differs."""
    out = invoked("compare", "made", "made", "--results", folder).output
    assert "differs" not in out
    assert out.count("1.00x (") == 4


def test_report_by_command(folder, tmp_path):
    """The command writes where it is told, says where, and refuses a folder that is not there."""
    done = invoked("report", "made", "--results", folder, "-o", tmp_path / "page.html")
    assert done.output == f"{tmp_path / 'page.html'}\n"
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    done = invoked("report", "made", "--results", folder, "-o", tmp_path / "no/page.html")
    assert done.exit_code == 2
    assert done.output == f"raytune-eagle: --output {tmp_path / 'no/page.html'}: No such file or directory\n"
    assert "there are: made, other" in invoked("report", "maid", "--results", folder).output


@pytest.mark.slow
def test_report_to_stdout(folder, tmp_path, monkeypatch):
    """`-o -` is stdout, as everywhere: the page alone, and no file of that name."""
    monkeypatch.chdir(tmp_path)
    done = invoked("report", "made", "--results", folder, "-o", "-")
    assert done.stdout.startswith("<!doctype html>")
    assert done.stdout.rstrip().endswith("</html>")
    assert list(tmp_path.iterdir()) == []
