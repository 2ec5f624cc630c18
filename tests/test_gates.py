"""Each gate sees what it is for, on facts and logs that real servers gave; and through whole trials of the fake one."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from made import WORKLOAD, completed
from rigs import FAKE

from raytune_eagle import gates, specfile
from raytune_eagle.engines.launch import Settings
from raytune_eagle.engines.sglang import SglangEngine
from raytune_eagle.errors import GateError
from raytune_eagle.gates.foreseen import foreseen
from raytune_eagle.model.config import Config, Speculative
from raytune_eagle.model.measurement import Gate
from raytune_eagle.model.trial import Completed, Failed, Job, ServerFacts
from raytune_eagle.model.workload import Prompt, Workload
from raytune_eagle.nodes.turns import FreeForAll
from raytune_eagle.trial import run_trial

SERVERS = Path(__file__).parent / "assets" / "servers"
READY = """[2026-11-29 18:10:23] Load weight begin. avail mem=131.87 GB
[2026-11-29 18:10:23] Load weight end. elapsed=0.26 s, type=LlamaForCausalLM, avail mem=130.69 GB, mem usage=1.18 GB.
[2026-11-29 18:10:23] Load weight begin. avail mem=130.46 GB
[2026-11-29 18:10:23] Load weight end. elapsed=0.02 s, type=LlamaForCausalLMEagle3, avail mem=130.44 GB
[2026-11-29 18:10:24] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=16, bs=[1, 2, 3, 4, 5, 6, 7, 8], avail mem=129.74 GB
[2026-11-29 18:11:05] Capture draft decode CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[1, 2, 4], avail mem=127.83 GB
"""  # noqa: E501
DECODE = (
    "[2026-11-29 18:11:44] Decode batch, #running-req: {}, #token: 91, token usage: 0.00, accept len: {:.2f}, "
    "accept rate: 0.17, cuda graph: {}, gen throughput (token/s): 836.93, #queue-req: 0\n"
)
INFO_LINE = "node:1:2 [0] NCCL INFO {}\n"


EAGLE3 = Speculative(draft="builtin:tiny", num_steps=3, eagle_topk=4, num_draft_tokens=16)


def seen(server="0516_h200_eagle3", log=READY, *, streams=1, info=(), speculative=EAGLE3, outcome=None, **config):
    """A captured server, asked for what the arguments say."""
    facts = json.loads((SERVERS / f"{server}.json").read_text()) | dict(info)
    return gates.Seen(
        config=Config(model="builtin:tiny", speculative=speculative, **config),
        workload=Workload(prompts=WORKLOAD.prompts, concurrency=(1, streams) if streams > 1 else (1,)),
        facts=ServerFacts(resolved_args=json.dumps(facts)),
        log=log,
        measurements=outcome.measurements if outcome else (),
        requests=outcome.requests if outcome else (),
    )


def verdicts(found):
    """By name."""
    return {gate.name: gate.verdict for gate in found}


def detail(found, name):
    """What the gate of this name says."""
    return next(gate.detail for gate in found if gate.name == name)


def test_right_server_passes_every_gate():
    """A real EAGLE3 server on an H200, with what was asked of it, passes all."""
    outcome = completed(100)
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
    assert said == "page-size: 64 asked, 1 runs; speculative-num-draft-tokens: 8 asked, 16 runs"


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
    ranks = gates.before(seen(streams=24, info={"dp_size": 2}))
    assert verdicts(ranks)["max_running_requests"] == "passed", "16 in each of two data-parallel ranks"


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


TOOK = INFO_LINE.format("NCCL_PROTO set by environment to LL.") + INFO_LINE.format(
    "NCCL_NTHREADS set by environment to 96"
)


@pytest.mark.parametrize(
    ("env", "log", "verdict", "why"),
    [
        ({"NCCL_PROTO": "LL"}, "", "unknown", "set NCCL_DEBUG: INFO"),
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
        ({"NCCL_PROTO": "^LL"}, TOOK + INFO_LINE.format("AllReduce: 8 Bytes -> Algo NVLS_TREE proto LL c"),
         "warning", "run with ll"),
    ],
)  # fmt: skip
def test_nccl_settings_that_did_not_take(env, log, verdict, why):
    """NCCL says in its INFO and TUNING lines what it took and what it chose, in the form of each version."""
    found = gates.before(seen(info={"tp_size": 8}, log=READY + log, env=env))
    assert verdicts(found)["nccl_knobs"] == verdict
    assert why in detail(found, "nccl_knobs")


def test_a_draft_that_guesses_nothing():
    """At any concurrency; what the answers do not tell, the decode lines do."""
    found = gates.after(seen(outcome=completed(100, (1, 8), accept_len=1.04)))
    assert verdicts(found)["accept_len"] == "failed"
    assert "1.04 at 1, 1.04 at 8" in detail(found, "accept_len")
    silent = completed(100, accept_len=None)
    logged = READY + DECODE.format(4, 1.00, "True") + DECODE.format(1, 1.2, "True") + DECODE.format(0, 9, "True")
    assert "1.04 at 1" in detail(gates.after(seen(log=logged, outcome=silent)), "accept_len")
    assert verdicts(gates.after(seen(outcome=silent)))["accept_len"] == "unknown"
    assert "accept_len" not in verdicts(gates.after(seen("0516_h200_baseline", outcome=silent, speculative=None)))


@pytest.mark.parametrize(("steps", "length", "verdict"), [(3, 1.7, "warning"), (3, 1.8, "passed"), (1, 1.3, "passed")])
def test_a_draft_that_guesses_little_is_told(steps, length, verdict):
    """Captured layers that are not those of the training cost half of the guesses, and nothing else shows it."""
    few = EAGLE3.model_copy(update={"num_steps": steps})
    found = gates.after(seen(outcome=completed(100, accept_len=length), speculative=few))
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"space": {"nccl": {"NCCL_PROTO": ["LL"]}}, "engine": {"args": {"tp-size": 8}}}, ["NCCL_DEBUG: INFO"]),
        ({"space": {"nccl": {"NCCL_PROTO": ["LL"]}},
          "engine": {"args": {"tp-size": 8}, "env": {"NCCL_DEBUG": "INFO"}}}, []),
        ({"workload": {"chat": True}}, ["no chat template in it"]),
        ({"engine": {"args": {"chat-template": "chatml"}}}, ["prompts are sent without it"]),
        ({"engine": {"args": {"chat-template": "chatml"}}, "workload": {"chat": True}}, []),
    ],
)  # fmt: skip
def test_what_would_be_gated_is_foreseen(tmp_path, changes, said):
    """`doctor` tells from the spec alone what each launch would be told, with what to write."""
    tree = {**SPEC, **{part: {**SPEC.get(part, {}), **changed} for part, changed in changes.items()}}
    found = [each.line for each in foreseen(specfile.parse(tree), str(tmp_path))]
    assert len(found) == len(said), found
    assert all(words in line for words, line in zip(said, found, strict=True))


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
def test_model_with_a_template_is_not_measured_without_it_unsaid(tmp_path, where):
    """An instruct model's draft is believed less on text without the template: told before the night is spent."""
    (tmp_path / where).write_text('{"chat_template": "{{ messages }}"}')
    (line,) = [each.line for each in foreseen(specfile.parse(SPEC), str(tmp_path))]
    assert "write workload.chat: true" in line
    assert list(foreseen(specfile.parse(SPEC), "org/model")) == [], "nothing is said of what cannot be looked at"


# ------------------------------------------------------------------------------------------ beside plain decoding
def answered(texts, compression=1.5, prefix="p"):
    """An outcome with these answers, by prompt."""
    outcome = completed(100)
    first = outcome.requests[0]
    rows = tuple(
        first.model_copy(
            update={
                "prompt_id": f"p{n}",
                "output_hash": text,
                "prefix_hashes": ("x", f"{prefix}{n}", text),
                "compression": compression,
            }
        )
        for n, text in enumerate(texts)
    )
    return outcome.model_copy(update={"requests": rows})


def test_text_that_parts_at_once_is_not_the_models():
    """Whole answers may differ on a GPU; beginnings that differ in most answers are no rounding."""
    plain = answered("abcdefghij")
    assert verdicts(gates.judged(answered("ABCDEFGHIJ"), plain, 0.0).gates)["text"] == "passed"
    garbled = gates.judged(answered("ABCDEFGHIJ", prefix="q"), plain, 0.0)
    assert isinstance(garbled, Failed)
    assert (garbled.failure_class, garbled.failure_phase) == ("text", "gate")
    assert "0% of 10 answers begin (64 characters) as plain decoding's do" in garbled.failure_detail
    assert len(garbled.requests) == 10, "what was measured stays in the record"
    three = answered("abcdefg").requests + answered("ABCDEFGHIJ", prefix="q").requests[7:]
    some = gates.judged(plain.model_copy(update={"requests": three}), plain, 0.0)
    assert verdicts(some.gates)["text"] == "warning"


def test_plain_decoding_that_parts_from_itself_is_asked_no_more_of_others():
    """Where kernels round so differently by batch that plain decoding's own passes part, a trial may part as well."""
    first, ours = answered("abcdefghij"), answered("ABCDEFGHIJ")
    half = ours.requests[:4] + answered("ABCDEFGHIJ", prefix="q").requests[4:]
    trial_ = ours.model_copy(update={"requests": half})
    assert gates.judged(trial_, first, 0.0).failure_class == "text"
    again = tuple(row.model_copy(update={"repeat": 1}) for row in half)
    noisy = first.model_copy(update={"requests": (*first.requests, *again)})
    assert verdicts(gates.judged(trial_, noisy, 0.0).gates)["text"] == "warning"


def test_text_is_compared_only_where_it_can_be():
    """Sampled text, too few prompts, and records that kept no beginnings are not judged."""
    plain, other = answered("abcdefghij"), answered("ABCDEFGHIJ", prefix="q")
    assert "text" not in verdicts(gates.judged(other, plain, 0.7).gates)
    assert "text" not in verdicts(gates.judged(other, None, 0.0).gates)
    assert verdicts(gates.judged(answered("ABC", prefix="q"), plain, 0.0).gates)["text"] == "unknown"
    old = tuple(row.model_copy(update={"prefix_hashes": ()}) for row in plain.requests)
    without = [answered("ABCDEFGHIJ").model_copy(update={"requests": old}), plain.model_copy(update={"requests": old})]
    changed = tuple(row.model_copy(update={"output_hash": row.output_hash.upper()}) for row in old)
    without[0] = without[0].model_copy(update={"requests": changed})
    assert verdicts(gates.judged(*without, 0.0).gates)["text"] == "unknown"


def test_pinned_acceptance_is_told_and_its_text_not_judged():
    """SGLang's simulated acceptance puts made-up tokens into the answers: a warning, instead of a failed trial."""
    found = gates.before(seen(env={"SGLANG_SIMULATE_ACC_LEN": "3.0"}))
    assert verdicts(found)["simulated"] == "warning"
    assert "SGLANG_SIMULATE_ACC_LEN=3.0 pins acceptance" in detail(found, "simulated")
    outcome = answered("ABCDEFGHIJ", compression=20.0, prefix="q").model_copy(update={"gates": found})
    assert gates.judged(outcome, answered("abcdefghij"), 0.0) == outcome
    plain = seen("0516_h200_baseline", speculative=None, env={"SGLANG_SIMULATE_ACC_LEN": "3.0"})
    assert verdicts(gates.before(plain))["simulated"] == "warning", "nor is the text of plain decoding beside it"


def test_repetition_fails_only_beyond_plain_decodings_own():
    """A small model repeats itself by nature: told. A configuration that makes it do so has broken it: failed."""
    fine, looping = answered("abcdefghij"), answered("abcdefghij", compression=20.0)
    assert verdicts(gates.judged(fine, looping, 0.0).gates)["repetition"] == "passed"
    assert gates.judged(looping, fine, 0.0).failure_class == "repetition"
    both = gates.judged(looping, looping, 0.0)
    assert isinstance(both, Completed)
    assert verdicts(both.gates)["repetition"] == "warning"
    assert verdicts(gates.judged(looping, None, 0.0).gates)["repetition"] == "warning", "plain decoding itself"
    assert verdicts(gates.judged(answered("abc"), fine, 0.0).gates)["repetition"] == "unknown"


# -------------------------------------------------------------------------------- whole trials, fake server
PROMPTS = tuple(Prompt(id=str(n), category="code", text=f"def f{n}(x):") for n in range(10))


def trial(folder, env, *, speculative=True):
    """What comes of a trial on the fake server, and the events that it told."""
    config = Config(
        model="builtin:tiny",
        launcher=("python3", str(FAKE)),
        speculative=EAGLE3.model_copy(update={"num_draft_tokens": 12}) if speculative else None,
        env={"RAYTUNE_FAKE": env},
    )
    workload = Workload(prompts=PROMPTS, max_new_tokens=60, max_passes=2)
    job = Job(study="s", number=0, kind="trial", config=config, workload=workload)
    told = []
    engine = SglangEngine(Settings(work_dir=folder))
    return run_trial(engine, job, lambda *event: told.append(event), FreeForAll()), told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "name", "measured"),
    [
        ("info={info}", "algorithm", False),
        ("draft_class=LlamaForCausalLM", "draft_class", False),
        ("reject", "accept_len", True),
    ],
)
def test_gate_fails_the_trial(tmp_path, env, name, measured):
    """A failed gate is the trial's failure, told as an event; what the start shows is judged before the bench."""
    (tmp_path / "info.json").write_text('{"speculative_algorithm": "EAGLE"}')
    outcome, told = trial(tmp_path, env.format(info=tmp_path / "info.json"))
    assert isinstance(outcome, Failed)
    assert (outcome.failure_class, outcome.failure_phase) == (name, "gate")
    assert verdicts(outcome.gates)[name] == "failed"
    assert bool(outcome.requests) == measured
    assert outcome.server_log
    assert outcome.server.version == "0.5.20"
    assert [event for event in told if event[0] == "gate" and event[1].startswith(f"failed {name}: ")]


@pytest.mark.slow
def test_draft_that_guesses_nothing_costs_no_passes(tmp_path):
    """The warm-up shows it: the trial ends there, its rows kept, and the passes that would take minutes are not run."""
    outcome, told = trial(tmp_path, "reject")
    assert {row.repeat for row in outcome.requests if row.error is None} == {-1}
    assert "in the warm-up" in outcome.failure_detail
    assert not [event for event in told if event[0] == "pass"]


@pytest.mark.slow
def test_gates_of_a_good_trial_are_kept(tmp_path):
    """Passed ones too: who reads the record sees what was looked at."""
    (tmp_path / "lines").write_text(TOOK)
    outcome, told = trial(tmp_path, f"say={tmp_path / 'lines'}")
    assert isinstance(outcome, Completed)
    found = verdicts(outcome.gates)
    assert found["algorithm"] == found["draft_class"] == found["accept_len"] == found["resolved_args"] == "passed"
    assert all(Gate.of(gate.line) == gate for gate in outcome.gates)
    assert not [event for event in told if event[0] == "gate" and "failed" in event[1]]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "name"), [("garble", "text"), ("loop", "repetition")])
def test_answers_of_a_broken_server_are_caught_by_the_baseline(tmp_path, fault, name):
    """A server that speculates into another text, or into one word over and over, is fast, and must not win."""
    plain, _ = trial(tmp_path, fault, speculative=False)
    broken, _ = trial(tmp_path, fault)
    assert isinstance(broken, Completed), "alone it looks fine"
    judged = gates.judged(broken, plain, 0.0)
    assert verdicts(judged.gates)[name] == "failed"
    assert isinstance(judged, Failed)
    good, _ = trial(tmp_path, "")
    assert isinstance(gates.judged(good, plain, 0.0), Completed)


def test_every_gate_is_in_the_table():
    """The table of gates in the docstring names each gate that the code can give, and no other."""
    package = Path(gates.__file__).parent
    code = "".join(path.read_text() for path in package.glob("*.py"))
    given = set(re.findall(r'\b(?:passed|warned|failed|unknown)\(\s*"([a-z_]+)"', code))
    listed = set(re.findall(r"^([a-z_]+) +(?:fails|warns) ", gates.__doc__, re.MULTILINE))
    assert given == listed


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
