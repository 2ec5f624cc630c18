"""Gates on what a bench showed: figures that cannot be, benches too short to believe, servers of another shape."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from made import completed
from made_servers import DECODE, READY, detail, seen, verdicts

from raytune_eagle import gates
from raytune_eagle.gates.bench import draft_that_guesses_nothing
from raytune_eagle.model.measurement import Request

LOG = READY + DECODE.format(1, 2.5, "True")


def row(**values):
    """An answer of 16 tokens in 8 rounds, in a bench of 10 seconds."""
    like = {"concurrency": 1, "repeat": 0, "prompt_id": "p", "category": "c", "started_s": 0.0, "latency_s": 10.0}
    return Request(**(like | {"prompt_tokens": 5, "completion_tokens": 16, "verify_rounds": 8} | values))


def after(*rows, log=LOG, **server):
    """What is said of these answers."""
    outcome = completed(100).model_copy(update={"requests": rows})
    return gates.after(seen(log=log, outcome=outcome, **server))


@pytest.mark.parametrize(
    ("values", "verdict", "words"),
    [
        ({}, "passed", ""),
        ({"completion_tokens": 273, "verify_rounds": 200}, "failed", "1 of 2 answers have more tokens than asked for"),
        ({"completion_tokens": 272, "verify_rounds": 200}, "passed", ""),  # the last round goes beyond
        ({"completion_tokens": 130}, "failed", "130 in 8 verify rounds of at most 16"),
        ({"completion_tokens": 129}, "passed", ""),  # 8 rounds of 16, and the prefill's
        ({"completion_tokens": 257, "error": "timed out"}, "passed", ""),
        ({"prompt_tokens": 0}, "warning", "gives no usage"),
        ({"least_tokens": 16}, "passed", ""),
        ({"least_tokens": 17}, "failed", "1 of 2 answers have fewer tokens than came: 16, says the server's usage"),
    ],
)
def test_tokens_that_cannot_have_been_sent(values, verdict, words):
    """A server's own count is believed as far as it can be true; figures of more are nobody's."""
    found = after(row(), row(**values))
    assert verdicts(found)["tokens"] == verdict
    assert words in detail(found, "tokens")


@pytest.mark.parametrize("tokens", [6, 8, 20, 21, 256])
@pytest.mark.parametrize("histogram", [True, False])
def test_a_draft_that_accepts_nothing_fails_however_short_its_answers(tokens, histogram):
    """The prefill gives the first token, so that N tokens come in N - 1 rounds: that is nobody's guess."""
    rounds = tokens - 1
    rows = [row(completion_tokens=tokens, verify_rounds=rounds, accept_histogram=(rounds,) if histogram else ())] * 300
    found = after(*rows)
    assert verdicts(found)["accept_len"] == "failed"
    assert "1.00 at 1" in detail(found, "accept_len")
    early = verdicts(draft_that_guesses_nothing(rows))
    assert early == {"accept_len": "failed"}, "and the passes are not spent on it"


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({"completion_tokens": 2, "verify_rounds": 1, "accept_histogram": (0, 0, 0, 1)}, "passed"),  # 3 of 4 cut off
        ({"completion_tokens": 2, "verify_rounds": 1, "accept_histogram": (1,)}, "failed"),
        ({"completion_tokens": 2, "verify_rounds": 1}, "unknown"),
        ({"completion_tokens": 16, "verify_rounds": 8}, "passed"),
        ({"verify_rounds": None}, "unknown"),
    ],
)
def test_answers_too_short_to_tell_do_not_fail_a_draft(values, verdict):
    """The end of an answer cuts its last round off: where drafts are not told by round, two tokens say nothing."""
    assert verdicts(after(row(**values), log=READY))["accept_len"] == verdict


KEPT = sorted((Path(__file__).parent.parent / "results").glob("study=*"))


@pytest.mark.parametrize("study", KEPT, ids=lambda study: study.name)
def test_no_kept_answer_has_more_tokens_than_its_prefill_and_its_rounds_gave(study):
    """SGLang 0.5.16 on H200s, 0.5.20 on a CPU: one token, one of each round, and the drafts that it accepted."""
    columns = ["completion_tokens", "verify_rounds", "accept_histogram", "error"]
    rows = pd.read_parquet(study / "requests", columns=columns)
    rows = rows[rows.error.isna() & (rows.verify_rounds > 0)]
    drafts = [sum(n * times for n, times in enumerate(each)) for each in rows.accept_histogram]
    cut_off = 1 + rows.verify_rounds + drafts - rows.completion_tokens
    assert len(rows) > 100
    assert (cut_off >= 0).all()
    assert (cut_off == 0).mean() > 0.1


def test_a_bench_too_short_or_with_fewer_prompts_than_streams_is_told():
    """Its passes agree by being one moment."""
    assert verdicts(after(row()))["passes"] == "passed"
    short = after(row(latency_s=0.4))
    assert verdicts(short)["passes"] == "warning"
    assert "all passes at 1 took 0.4 s" in detail(short, "passes")
    many = seen(log=LOG, outcome=completed(100, (1, 64)), streams=64)
    assert "prompts are fewer than the 64 streams" in detail(gates.after(many), "passes")


@pytest.mark.parametrize(
    "info", [{"cuda_graph_bs": "abc", "cuda_graph_config": None}, {"cuda_graph_config": {"decode": {"bs": 5}}}]
)
def test_a_server_that_tells_in_another_shape_takes_no_figures_along(info):
    """One gate says that it could not look; the others say what they say."""
    whole = seen(log="", info=info, outcome=completed(100))
    found = verdicts((*gates.before(whole), *gates.after(whole)))
    assert found["capacity"] == "unknown"
    assert found["algorithm"] == "passed"
    assert found["stable"] == "passed"


@pytest.mark.parametrize(("off", "told"), [(False, True), (True, False), (None, False)])
def test_a_prefix_cache_is_told_to_who_benches_a_running_server(off, told):
    """Times to first token are then those of prompts that the server knows."""
    found = gates.standing(seen(log=LOG, info={"disable_radix_cache": off}, outcome=completed(100)))
    assert ("prefix_cache" in verdicts(found)) == told


@pytest.mark.parametrize(("on", "told"), [(True, True), (False, False)])
def test_the_prefix_cache_of_vllm_is_told_with_its_own_flag(on, told):
    """The advice can be followed there."""
    found = gates.standing(seen(log=LOG, info={"enable_prefix_caching": on}, outcome=completed(100)))
    details = [gate.detail for gate in found if gate.name == "prefix_cache"]
    assert bool(details) == told
    assert all("--no-enable-prefix-caching" in detail for detail in details)
