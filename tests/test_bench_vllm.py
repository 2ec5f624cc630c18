"""`bench URL` on vLLM: what 0.32.0 sent (assets/vllm) is read right, and the stand-in of the tests sends the same."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from openai_server import ASSETS, MODEL, REFUSALS, OpenAI

from raytune_eagle.bench import bench, connect
from raytune_eagle.errors import BenchError, SpecError
from raytune_eagle.measure.client import data_lines
from raytune_eagle.measure.wire import Chat, StreamError, error_message
from raytune_eagle.model.workload import Prompt, Workload

PROMPTS = tuple(Prompt(id=f"p{n}", category="code", text=f"def f{n}(x):") for n in range(4))
WORKLOAD = Workload(prompts=PROMPTS, chat=True, max_new_tokens=12, concurrency=(2,), min_passes=2, max_passes=2)


def ignore(name, detail):
    """Progress that nobody looks at."""


def captured(name):
    """Payloads of a stream as it came."""
    return [line for line in data_lines(bytearray(), (ASSETS / name).read_bytes()) if line != b"[DONE]"]


def shape(value):
    """Its keys and types; of a list, its items'. A number is a number."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return "number" if type(value) in {int, float} else type(value).__name__


def post(server, **changes):
    """One request as `bench` sends it: status and body."""
    body = {**Chat(WORKLOAD, MODEL, sglang=False).body(PROMPTS[0]), **changes}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read()


@pytest.mark.parametrize(
    ("name", "counts", "prompt_tokens"),
    [
        ("chat.sse", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 12], 7),
        ("chat_ngram.sse", [0, 1, 2, 6, 11, 16, 21, 24, 24], 16),
        ("chat_eagle3.sse", [0, 1, 4, 6, 7, 9, 10, 11, 12, 13, 16, 16], 7),
    ],
)
def test_streams_of_vllm_are_counted_by_chunk(name, counts, prompt_tokens):
    """With speculation a chunk brings several tokens, and says so; the chunk with the total brings none."""
    wire, chunks, found = Chat(WORKLOAD, "tiny", sglang=False), captured(name), [0]
    for chunk in chunks:
        found.append(wire.count(chunk, found[-1]))
    assert found[1:] == counts
    text, meta, least = wire.answer(chunks)
    assert text.startswith("\n")
    assert 0 < least <= counts[-1]
    assert meta == {"finish_reason": "length", "prompt_tokens": prompt_tokens, "completion_tokens": counts[-1]}


def test_thoughts_of_vllm_are_counted():
    """What its reasoning parser takes out of the answer is text under another name."""
    wire, chunks = Chat(WORKLOAD, "tiny", sglang=False), captured("chat_reasoning.sse")
    assert b'"reasoning":"' in chunks[1]
    text, meta, _ = wire.answer(chunks)
    assert (text, meta["completion_tokens"]) == (wire.answer(captured("chat.sse")).text, 12)


def test_an_engine_that_dies_fails_its_streams():
    """Such a stream comes to its end in good order, with an error for its last chunk."""
    wire, chunks = Chat(WORKLOAD, "tiny", sglang=False), captured("engine_killed.sse")
    assert wire.count(chunks[-2], 0) > 0
    with pytest.raises(StreamError, match="the server reported an error: EngineCore encountered an issue"):
        wire.count(chunks[-1], 0)


def test_refusals_of_vllm_say_why():
    """One line of words out of each JSON body."""
    said = {name: error_message(json.dumps(each["body"]).encode()) for name, each in REFUSALS.items()}
    assert said["unknown_model"] == "The model `nope` does not exist. Valid aliases: tiny."
    assert said["no_key"] == "Unauthorized"
    assert said["no_such_page"] == "Not Found"
    assert said["too_long"].startswith("This model's maximum context length is 2048 tokens.")
    assert said["too_many_tokens"].startswith("max_tokens=4000 cannot be greater than max_model_len=2048.")


@pytest.mark.parametrize(
    ("name", "options"),
    [("chat.sse", {"include_usage": True, "continuous_usage_stats": True}), ("chat_without_usage.sse", {})],
)
def test_the_stand_in_streams_as_vllm_does(name, options):
    """First, middle, last and total: same fields of the same types."""
    with OpenAI(vllm=True).running() as server:
        status, text = post(server, stream_options=options)
    assert status == 200
    assert text.endswith(b"\n\ndata: [DONE]\n\n")
    ours = [json.loads(line) for line in data_lines(bytearray(), text) if line != b"[DONE]"]
    real = [json.loads(line) for line in captured(name)]
    ends = (-2, -1) if options else (-1,)
    for place in (0, 1, *ends):
        assert shape(ours[place]) == shape(real[place])
    assert ("usage" in real[1]) == bool(options)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model": "nope"}, "unknown_model"),
        ({"max_tokens": 4000}, "too_many_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "too_long"),
    ],
)
def test_the_stand_in_refuses_as_vllm_does(changes, name):
    """With the status and the body that came from vLLM."""
    with OpenAI(vllm=True).running() as server:
        status, text = post(server, **changes)
    assert (status, json.loads(text)) == (REFUSALS[name]["status"], REFUSALS[name]["body"])


def test_vllm_is_named_with_its_version_and_what_it_caches():
    """Its context is known, its prefix cache warned of, and no field of speculation is made up."""
    with OpenAI(vllm=True).running() as server:
        found = connect(server.url)
        report = bench(found, WORKLOAD, ignore)
    assert (report.server, report.model, report.chat) == ("vLLM 0.32.0", MODEL, True)
    assert json.loads(found.facts.resolved_args) == {"context_length": 2048, "enable_prefix_caching": True}
    warned = {gate.name: gate.detail for gate in report.gates if gate.verdict == "warning"}
    assert "--no-enable-prefix-caching" in warned["prefix_cache"]
    assert "context" not in warned
    measured = report.measurements[0]
    assert (measured.completion_tokens, measured.accept_len, measured.verify_rounds) == (12 * 4 * 2, None, None)


def test_a_model_of_the_server_is_chosen_by_name():
    """Any that it lists; another is refused before anything is sent, with those that it has."""
    page = json.dumps({"data": [{"id": MODEL, "owned_by": "vllm"}, {"id": "adapter", "owned_by": "vllm"}]})
    with OpenAI(models_page=page).running() as server:
        assert connect(server.url).model == MODEL
        assert connect(server.url, model="adapter").model == "adapter"
        with pytest.raises(SpecError, match=f"--model nope: the server has {MODEL}, adapter; write one of its models"):
            connect(server.url, model="nope")
        assert not server.bodies


def test_prompts_beyond_the_context_end_a_bench_in_the_words_of_vllm():
    """They are refused one by one, and the bench says which context they are too long for."""
    long = WORKLOAD.model_copy(update={"prompts": (Prompt(id="long", category="code", text="x = 1\n" * 1000),)})
    with OpenAI(vllm=True).running() as server, pytest.raises(BenchError) as failed:
        bench(connect(server.url), long, ignore)
    assert "HTTP 400: This model's maximum context length is 2048 tokens." in failed.value.detail
    assert "{" not in failed.value.detail


def test_an_engine_that_dies_in_mid_bench_ends_it():
    """At once, with what vLLM said of it."""
    with OpenAI(vllm=True, dies_after=3).running() as server, pytest.raises(BenchError) as failed:
        bench(connect(server.url), WORKLOAD, ignore)
    assert failed.value.failure_class == "requests_failed"
    assert "EngineCore encountered an issue" in failed.value.detail
