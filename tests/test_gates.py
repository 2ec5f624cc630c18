"""Each gate sees what it is for, on facts and logs that real servers gave."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from made import WORKLOAD, completed
from made_servers import DECODE, EAGLE3, READY, detail, seen, verdicts

from raytune_eagle import gates, specfile
from raytune_eagle.errors import GateError
from raytune_eagle.gates.foreseen import foreseen
from raytune_eagle.model.config import Config
from raytune_eagle.model.trial import ServerFacts
from raytune_eagle.model.workload import Prompt


def guessed(length, outcome):
    """Its answers, told by a server whose verify rounds gave so many tokens: 100 rounds behind the prefill's token."""
    rows = [
        row.model_copy(update={"verify_rounds": 100, "completion_tokens": 1 + round(100 * length)})
        for row in outcome.requests
    ]
    return outcome.model_copy(update={"requests": tuple(rows)})


def test_right_server_passes_every_gate():
    """A real EAGLE3 server on an H200, with what was asked of it, passes all."""
    outcome = completed(100)
    told = [row.model_copy(update={"latency_s": 9.0, "prompt_tokens": 5}) for row in outcome.requests]
    outcome = guessed(2.5, outcome.model_copy(update={"requests": tuple(told)}))
    log = READY + DECODE.format(1, 2.5, "True")
    whole = seen(log=log, outcome=outcome, args={"max-running-requests": 16, "mem-fraction-static": 0.5, "tp-size": 1})
    found = (*gates.before(whole), *gates.after(whole))
    assert set(verdicts(found).values()) == {"passed"}
    names = "resolved_args algorithm draft_class captured_batch max_running_requests accept_len cuda_graph requests"
    assert set(names.split()) < set(verdicts(found))
    plain = seen("0516_h200_baseline", READY.replace("Eagle3", ""), speculative=None)
    assert set(verdicts(gates.before(plain)).values()) == {"passed"}


@pytest.mark.parametrize("version", ["0516_h200", "0520_cpu"])
def test_eagle_flag_with_an_eagle3_draft(version):
    """It starts silently, and on an H200 accepts up to 1.8 tokens by chance: only its arguments give it away."""
    found = gates.before(seen(f"{version}_eagle_flag"))
    assert verdicts(found)["algorithm"] == "failed"
    assert "EAGLE3 was asked for, EAGLE runs" in detail(found, "algorithm")
    with pytest.raises(GateError) as caught:
        gates.enforce(found)
    assert (caught.value.failure_class, caught.value.phase, caught.value.gates) == ("algorithm", "gate", found)


def test_speculation_in_the_baseline_or_none_where_asked():
    """Plain decoding that speculates would be no baseline, and a trial without speculation no trial."""
    assert verdicts(gates.before(seen(speculative=None)))["algorithm"] == "failed"
    found = gates.before(seen("0516_h200_baseline"))
    assert "plain decoding runs" in detail(found, "algorithm")


def test_arguments_that_sglang_made_others_of():
    """Each flag that differs is named with both values; equal ones in another spelling are not."""
    args = {"page-size": 64, "attention-backend": "triton", "mem-fraction-static": "0.50", "chunked-prefill-size": None}
    args |= {"tp": 1, "data-parallel-size": 1, "dtype": "auto", "disable-cuda-graph": False}
    eight = EAGLE3.model_copy(update={"num_draft_tokens": 8})
    found = gates.before(seen(speculative=eight, args=args, tuned_args={"no-such-flag": 1}))
    assert verdicts(found)["resolved_args"] == "warning"
    said = detail(found, "resolved_args")
    assert said.startswith("page-size: 64 asked, 1 runs; speculative-num-draft-tokens: 8 asked, 16 runs; ")
    assert said.endswith("the server does not tell no-such-flag")


GRAPHS = {"decode": {"backend": "full", "max_bs": 4, "bs": [1, 2, 4]}, "prefill": {"max_bs": 2048}}


@pytest.mark.parametrize(
    ("flags", "info", "verdict", "said"),
    [
        ({"disable-custom-all-reduce": False}, {"disable_custom_all_reduce": True}, "warning", "False asked, True"),
        ({"disable-custom-all-reduce": False}, {"disable_custom_all_reduce": False}, "passed", ""),
        ({"attention-backend": False}, {"attention_backend": "fa3"}, "passed", ""),  # left out, not switched off
        ({"num-such-steps": 4}, {}, "unknown", "the server does not tell num-such-steps"),
        ({"num-such-steps": None, "enable-such": False}, {}, "passed", ""),
        ({"cuda-graph-max-bs-decode": 8}, {"cuda_graph_config": GRAPHS}, "warning", "8 asked, 4 runs"),
        ({"cuda-graph-max-bs-decode": 4}, {"cuda_graph_config": GRAPHS, "cuda_graph_max_bs_decode": 4}, "passed", ""),
        ({"cuda-graph-bs-decode": [1, 8]}, {"cuda_graph_config": GRAPHS, "cuda_graph_bs_decode": [1, 8]},
         "warning", "[1, 8] asked, [1, 2, 4] runs"),
        ({"cuda-graph-backend-decode": "disabled"},
         {"cuda_graph_config": GRAPHS, "cuda_graph_backend_decode": "disabled"}, "warning", "disabled asked, full"),
        ({"cuda-graph-config": '{"decode": {"max_bs": 8}}'}, {"cuda_graph_config": GRAPHS}, "warning", "asked"),
        ({"cuda-graph-config": '{"decode": {"max_bs": 4}}'}, {"cuda_graph_config": GRAPHS}, "passed", ""),
        ({"fp8-gemm-backend": "triton"}, {"fp8_gemm_runner_backend": "cutlass"}, "warning", "triton asked, cutlass"),
    ],
)  # fmt: skip
def test_a_flag_is_looked_for_wherever_the_server_tells_it(flags, info, verdict, said):
    """A switch that SGLang put on, a size inside of an object, a flag of which nothing is said: none passes unseen."""
    found = gates.before(seen(info=info, tuned_args=flags))
    assert verdicts(found)["resolved_args"] == verdict, detail(found, "resolved_args")
    assert said in detail(found, "resolved_args")


REAL = sorted((Path(__file__).parent.parent / "results").glob("study=*"))


@pytest.mark.parametrize("study", REAL, ids=lambda study: study.name)
def test_kept_real_servers_ran_what_was_asked(study):
    """SGLang 0.5.16 on H200s and 0.5.20 on a CPU: no flag of theirs differs or is left untold."""
    rows = pd.read_parquet(study / "trials", columns=["number", "config_json", "resolved_args"])
    told = 0
    for row in rows.drop_duplicates("number").itertuples():
        info = json.loads(row.resolved_args or "{}")
        if info:
            told += 1
            config = Config.model_validate_json(row.config_json)
            found = gates.before(gates.Seen(config, WORKLOAD, ServerFacts(resolved_args=row.resolved_args)))
            assert verdicts(found)["resolved_args"] == "passed", (row.number, detail(found, "resolved_args"))
    assert told >= 4


def test_server_that_cannot_be_asked():
    """What nobody told is unknown: neither passed nor failed."""
    whole = gates.Seen(config=Config(model="m", speculative=EAGLE3), workload=WORKLOAD, facts=ServerFacts())
    assert set(verdicts(gates.before(whole)).values()) == {"unknown"}
    assert set(verdicts(gates.before(whole))) == {"resolved_args", "algorithm", "draft_class", "max_running_requests"}


def test_draft_loaded_as_another_class():
    """SGLang loads what config.json names: a draft that became a plain Llama guesses from nothing."""
    found = gates.before(seen(log=READY.replace("LlamaForCausalLMEagle3", "LlamaForCausalLM")))
    assert verdicts(found)["draft_class"] == "failed"
    half = READY.partition("[2026-11-29 18:10:23] Load weight begin. avail mem=130.46")[0]
    assert verdicts(gates.before(seen(log=half)))["draft_class"] == "unknown"
    ranks = "".join(line.replace("] ", f" TP{n}] ", 1) + "\n" for line in half.splitlines() for n in range(8))
    assert verdicts(gates.before(seen(log=ranks)))["draft_class"] == "unknown", "eight ranks load one target"


def test_more_streams_than_graphs_or_places():
    """Both limits are told with the flag that raises them; without graphs there is no batch to capture."""
    found = gates.before(seen(streams=24))
    assert verdicts(found)["captured_batch"] == verdicts(found)["max_running_requests"] == "warning"
    assert "24 streams, graphs for at most 8" in detail(found, "captured_batch")
    assert "24 streams, but 16 run at once" in detail(found, "max_running_requests")
    assert verdicts(gates.before(seen(streams=8)))["captured_batch"] == "passed"
    assert "captured_batch" not in verdicts(gates.before(seen("0520_cpu_eagle3", log="")))
    by_arguments = gates.before(seen(log="", streams=16))
    assert "graphs for at most 8" in detail(by_arguments, "captured_batch")


@pytest.mark.parametrize(
    ("info", "verdict"),
    [
        ({}, "passed"),  # each of 2 ranks told that it runs 16
        ({"internal_states": [], "max_running_requests": 16}, "passed"),  # replicas have the argument each
        ({"internal_states": [], "max_running_requests": 16, "enable_dp_attention": True}, "warning"),
        ({"internal_states": [], "max_running_requests": 24, "enable_dp_attention": True}, "passed"),
        ({"internal_states": [], "max_running_requests": 25, "enable_dp_attention": True}, "passed"),
        ({"internal_states": [], "max_running_requests": None}, "unknown"),
    ],
)
def test_places_of_data_parallel_ranks(info, verdict):
    """Ranks of --enable-dp-attention divide the argument among themselves, replicas have it each."""
    found = gates.before(seen(streams=24, info={"dp_size": 2, **info}))
    assert verdicts(found)["max_running_requests"] == verdict
    assert ("24 streams, but 16 run at once" in detail(found, "max_running_requests")) is (verdict == "warning")


def test_a_draft_that_guesses_nothing():
    """At any concurrency; what the answers do not tell, the decode lines do."""
    found = gates.after(seen(outcome=guessed(1.04, completed(100, (1, 8)))))
    assert verdicts(found)["accept_len"] == "failed"
    assert "1.04 at 1, 1.04 at 8" in detail(found, "accept_len")
    silent = completed(100)
    logged = READY + DECODE.format(4, 1.00, "True") + DECODE.format(1, 1.2, "True") + DECODE.format(0, 9, "True")
    assert "1.04 at 1" in detail(gates.after(seen(log=logged, outcome=silent)), "accept_len")
    assert verdicts(gates.after(seen(outcome=silent)))["accept_len"] == "unknown"
    assert "accept_len" not in verdicts(gates.after(seen("0516_h200_baseline", outcome=silent, speculative=None)))


@pytest.mark.parametrize(("steps", "length", "verdict"), [(3, 1.7, "warning"), (3, 1.8, "passed"), (1, 1.3, "passed")])
def test_a_draft_that_guesses_little_is_told(steps, length, verdict):
    """Captured layers that are not those of the training cost half of the guesses, and nothing else shows it."""
    few = EAGLE3.model_copy(update={"num_steps": steps})
    found = gates.after(seen(outcome=guessed(length, completed(100)), speculative=few))
    assert verdicts(found)["accept_len"] == verdict


def test_graphs_that_are_not_used():
    """Enabled, and most batches without: told. Where graphs are off as asked there is nothing to tell."""
    without = READY + DECODE.format(9, 2, "False") * 3 + DECODE.format(8, 2, "True")
    assert "3 of 4 decode lines" in detail(gates.after(seen(log=without, outcome=completed(1))), "cuda_graph")
    assert verdicts(gates.after(seen(log=READY, outcome=completed(1))))["cuda_graph"] == "unknown"
    off = DECODE.replace("cuda graph", "cpu graph").format(1, 2, "False")
    assert "cuda_graph" not in verdicts(gates.after(seen("0520_cpu_eagle3", log=off, outcome=completed(1))))
    assert "cuda_graph" not in verdicts(gates.after(seen(log=off, info={"device": "cpu"}, outcome=completed(1))))


def test_prompts_beyond_a_context(tmp_path):
    """Past the draft's context acceptance falls, past the target's the prompt is refused: both are told."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 300}))
    rows = completed(1).requests
    lengths = dict(zip((row.prompt_id for row in rows), (10, 100, 1990), strict=True))
    rows = tuple(row.model_copy(update={"prompt_tokens": lengths[row.prompt_id]}) for row in rows)
    info = {"speculative_draft_model_path": str(tmp_path)}
    whole = seen(info=info, outcome=completed(1).model_copy(update={"requests": rows}))
    said = detail(gates.after(whole), "context")
    assert "1 of 3 prompts with their answers are longer than the target's context of 2048 tokens" in said
    assert "2 of 3 prompts with their answers are longer than the draft's context of 300 tokens" in said
    short = tuple(row.model_copy(update={"prompt_tokens": 10}) for row in rows)
    fits = gates.after(seen(outcome=completed(1).model_copy(update={"requests": short})))
    assert verdicts(fits)["context"] == "passed"


def test_failed_requests_are_told():
    """Even those that the study allows."""
    outcome = completed(1)
    rows = (outcome.requests[0].model_copy(update={"error": "timed out after 120 s"}), *outcome.requests[1:])
    found = gates.after(seen(outcome=outcome.model_copy(update={"requests": rows})))
    assert "1 of 3 requests failed, for example: timed out" in detail(found, "requests")


SPEC = {
    "name": "s",
    "engine": {"model": "/m", "draft": "/d"},
    "space": {"speculative": {"num_steps": [3], "eagle_topk": [1], "num_draft_tokens": [4]}},
}


PROMPTS = tuple(Prompt(id=str(n), category="c", text="t") for n in range(1001))


def warnings(spec, model, prompts=PROMPTS[:8]):
    """Lines of what would be warned of."""
    return [each.line for each in foreseen(spec, prompts, model) if each.level == "warning"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"space": {"nccl": {"NCCL_PROTO": ["LL"]}}, "engine": {"args": {"tp-size": 8}}}, ["NCCL_DEBUG: INFO"]),
        ({"space": {"nccl": {"NCCL_PROTO": ["LL"]}},
          "engine": {"args": {"tp-size": 8}, "env": {"NCCL_DEBUG": "INFO"}}}, []),
        ({"workload": {"chat": True}}, ["no chat template in it"]),
        ({"engine": {"args": {"chat-template": "chatml"}}}, ["prompts are sent without it"]),
        ({"engine": {"args": {"chat-template": "chatml"}}, "workload": {"chat": True}}, []),
        ({"engine": {"env": {"SGLANG_SIMULATE_ACC_LEN": "3"}}}, ["acceptance is pinned"]),
        ({"workload": {"max_failed_share": 1}}, ["100% of the requests may fail"]),
        ({"workload": {"temperature": 0.8}}, []),
    ],
)  # fmt: skip
def test_what_would_be_gated_is_foreseen(tmp_path, changes, said):
    """`doctor` tells from the spec alone what each launch would be told, with what to write."""
    tree = {**SPEC, **{part: {**SPEC.get(part, {}), **changed} for part, changed in changes.items()}}
    found = warnings(specfile.parse(tree), str(tmp_path))
    assert len(found) == len(said), found
    assert all(words in line for words, line in zip(said, found, strict=True))


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
def test_model_with_a_template_is_not_measured_without_it_unsaid(tmp_path, where):
    """An instruct model's draft is believed less on text without the template: told before the night is spent."""
    (tmp_path / where).write_text('{"chat_template": "{{ messages }}"}')
    (line,) = warnings(specfile.parse(SPEC), str(tmp_path))
    assert "write workload.chat: true" in line
    assert warnings(specfile.parse(SPEC), "org/model") == [], "nothing is said of what cannot be looked at"


TTFT = {"constraints": {"ttft_p95_ms": 90}}


def test_too_few_prompts_and_too_many_are_foreseen():
    """As the gate `passes` says it after a launch, of each concurrency; a pass over 1,001 prompts is long."""
    spec = specfile.parse({**SPEC, "workload": {"concurrency": [1, 3, 4, 8]}})
    line, beside = warnings(spec, "org/model", PROMPTS[:3])
    assert "3 prompts: gates text and repetition need 8" in beside
    few = "3 prompts are fewer than the {} streams: passes run at the same time"
    assert f"{few.format(4)}; {few.format(8)}: too little to trust its interval; give more prompts" in line
    assert warnings(spec, "org/model", PROMPTS[:8]) == warnings(spec, "org/model", PROMPTS[:1000]) == []
    assert (
        "1,001 prompts are sent in each pass; workload.num_prompts takes fewer"
        in warnings(spec, "org/model", PROMPTS)[0]
    )


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, "ok"),
        ({"objective": TTFT}, "warning"),
        ({"objective": TTFT, "engine": {"args": {"disable-radix-cache": True}}}, None),
        ({"objective": TTFT, "engine": {"args": {"disable-radix-cache": False}}}, "warning"),
        (
            {"objective": TTFT, "space": {"args": {"disable-radix-cache": [True, False]}}},
            "warning",
        ),
    ],
)
def test_a_prefix_cache_is_foreseen(changes, level):
    """Said of every spec that leaves it on, in the words of `bench`; a warning where those times have a limit."""
    tree = {**SPEC, **{part: {**SPEC.get(part, {}), **changed} for part, changed in changes.items()}}
    found = [each for each in foreseen(specfile.parse(tree), WORKLOAD.prompts, "org/model") if "cache" in each.line]
    assert [each.level for each in found] == ([level] if level else [])
    assert all("times to first token are those of known ones" in each.line for each in found)


def test_every_gate_is_in_the_table():
    """The table of gates in the docstring names each gate that the code can give, and no other."""
    package = Path(gates.__file__).parent
    code = "".join(path.read_text() for path in package.glob("*.py"))
    given = set(re.findall(r'\b(?:passed|warned|failed|unknown)\(\s*"([a-z_]+)"', code))
    listed = set(re.findall(r"^([a-z_]+) +(?:fails|warns) ", gates.__doc__, re.MULTILINE))
    assert given == listed
