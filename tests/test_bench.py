"""`bench URL` on running servers: SGLang's own way, OpenAI's chat format with and without token counts, and nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai_server import OpenAI
from rigs import FAKE

from raytune_eagle.bench import bench, connect
from raytune_eagle.errors import SpecError
from raytune_eagle.measure.client import data_lines
from raytune_eagle.measure.wire import Chat, StreamError
from raytune_eagle.model.workload import Prompt, Workload

PROMPTS = tuple(Prompt(id=f"p{n}", category="code" if n % 2 else "chat", text=f"def f{n}(x):") for n in range(4))
WORKLOAD = Workload(prompts=PROMPTS, max_new_tokens=12, concurrency=(1, 2), min_passes=2, max_passes=2)


def ignore(name, detail):
    """Progress that nobody looks at."""


@contextmanager
def sglang(*flags, faults=""):
    """The fake SGLang on a port of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, str(FAKE), "--model-path", "/m", "--host", "127.0.0.1", "--port", str(port), *flags]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, env={**os.environ, "RAYTUNE_FAKE": faults}) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(200):
                with_answer = _answers(url)
                if with_answer:
                    break
                time.sleep(0.05)
            yield url
        finally:
            process.terminate()


def _answers(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


SPECULATIVE = [
    "--speculative-algorithm",
    "EAGLE3",
    "--speculative-draft-model-path",
    "/d",
    "--speculative-num-steps",
    "3",
    "--speculative-eagle-topk",
    "4",
    "--speculative-num-draft-tokens",
    "12",
]


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/chat/completions", "/v1/completions", "/v1/models"])
def test_address_is_taken_as_it_is_pasted(path):
    """With the path of an API behind it, or without http:// in front."""
    with OpenAI().running() as server:
        assert connect(server.url + path).url == server.url
        assert connect(server.url.removeprefix("http://") + path).url == server.url


def test_a_user_in_the_address_and_no_proxy(monkeypatch):
    """It is asked with that user's password, first and under load; a proxy of the shell is in nobody's way."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with OpenAI().running() as server:
        found = connect(server.url.replace("://", "://me:pa%40ss@"))
    assert found.url == server.url
    assert found.headers == {"Authorization": "Basic bWU6cGFAc3M="}


@pytest.mark.parametrize("counts", [True, False])
def test_openai_server_is_measured(counts):
    """Tokens are the server's own count, by chunk or else spread over them; no field of speculation is made up."""
    with OpenAI(counts=counts).running() as server:
        found = connect(server.url)
        report = bench(found, WORKLOAD, ignore)
    assert (found.sglang, found.model, report.chat) == (False, "org/model", True)
    assert report.server == "OpenAI's format"
    assert [m.concurrency for m in report.measurements] == [1, 2]
    assert [m.completion_tokens for m in report.measurements] == [12 * 4 * 2] * 2
    assert all(m.accept_len is None and m.itl_p50_ms > 0.3 and m.failed_share == 0 for m in report.measurements)
    assert {each.category for each in report.categories} == {"code", "chat"}
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["stream_options"]["include_usage"]) == ("org/model", 12, True)
    assert body["messages"] == [{"role": "user", "content": body["messages"][0]["content"]}]
    assert not {"ignore_eos", "return_spec_tokens_details"} & body.keys(), "strict servers refuse what they do not know"


def test_a_server_without_usage_has_its_chunks_counted_and_says_so():
    """Three words come in a chunk, and one token is all that it can be taken for: a gate warns of it."""
    with OpenAI(counts=False, usage=False).running() as server:
        found = bench(connect(server.url), WORKLOAD, ignore)
    assert [gate.verdict for gate in found.gates if gate.name == "tokens"] == ["warning"]
    with OpenAI().running() as server:
        found = bench(connect(server.url), WORKLOAD, ignore)
    assert [gate.verdict for gate in found.gates if gate.name == "tokens"] == ["passed"]


@pytest.mark.parametrize("counts", [True, False])
def test_a_usage_below_the_chunks_that_came_fails(counts):
    """Each chunk with text has a token in it: of twelve tokens in four chunks it says two, by chunk or at the end."""
    with OpenAI(counts=counts, short=6).running() as server:
        found = bench(connect(server.url), WORKLOAD, ignore)
    told = [gate for gate in found.gates if gate.name == "tokens"]
    assert [gate.verdict for gate in told] == ["failed"]
    assert " answers have fewer tokens than came: 2, says the server's usage, where 4 chunks" in told[0].detail


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_an_answer_that_the_server_broke_off_is_a_failed_request(finish):
    """In OpenAI's format a word says so, and the half of an answer is no answer."""
    workload = WORKLOAD.model_copy(
        update={"concurrency": (1,), "max_passes": 5, "min_passes": 5, "max_failed_share": 0.5}
    )
    with OpenAI(finish=finish).running() as server:
        report = bench(connect(server.url), workload, ignore)
    (gate,) = [gate for gate in report.gates if gate.name == "requests"]
    assert gate.verdict == "warning"
    assert f"for example: aborted by the server: finish_reason {finish} after 6 tokens" in gate.detail
    assert report.measurements[0].failed_share == pytest.approx(0.1)


@pytest.mark.parametrize("thoughts", ["reasoning", "reasoning_content"])
def test_thoughts_are_tokens_under_either_name(thoughts):
    """The first chunk brings three tokens, whichever name a server has for what is thought aloud."""
    with OpenAI(counts=False, thoughts=thoughts).running() as server:
        found = bench(connect(server.url), WORKLOAD, ignore)
    assert found.measurements[0].completion_tokens == 12 * len(PROMPTS) * 2


def test_a_page_for_people_in_front_of_a_server_is_passed_over():
    """A web page under SGLang's address does not hide the server of OpenAI's format behind it."""
    with OpenAI(info_page="<html>hello</html>").running() as server:
        assert connect(server.url).model == "org/model"


@pytest.mark.parametrize("page", ['{"data": {"id": "m"}}', '{"data": ["m"]}', '{"data": null}', "[]", "null"])
def test_a_list_of_models_in_another_shape_is_told(page):
    """One line, whatever it is."""
    with OpenAI(models_page=page).running() as server, pytest.raises(SpecError, match="answers neither"):
        connect(server.url)


@pytest.mark.parametrize("address", ["ftp://127.0.0.1:9", "http://127.0.0.1:9/v1?api-version=1"])
def test_an_address_that_is_none_of_http_is_told_at_once(address):
    """Nobody is asked."""
    with pytest.raises(SpecError, match="give http://HOST:PORT"):
        connect(address)


def test_sglang_is_asked_in_its_own_way():
    """Verify rounds come with it, and what it says of itself is looked at."""
    with sglang(*SPECULATIVE) as url:
        found = connect(url)
        report = bench(found, WORKLOAD, ignore)
    assert (found.sglang, report.server, report.chat) == (True, "SGLang 0.5.20", False)
    assert all(m.accept_len > 1.5 for m in report.measurements)
    assert {gate.name: gate.verdict for gate in report.gates}["accept_len"] == "passed"


@pytest.mark.parametrize(
    "told",
    [
        {"speculative_algorithm": "EAGLE3", "speculative_num_steps": "3", "speculative_eagle_topk": "x"},
        {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": 1, "speculative_num_steps": [3]},
        {"speculative_algorithm": ["EAGLE3"]},
        {},
    ],
)
def test_a_draft_is_judged_whatever_the_server_tells_of_it(told):
    """Numbers as strings, fields of another shape, or none: verify rounds in the answers are enough to fail it."""
    with sglang(*SPECULATIVE, faults="reject") as url:
        found = connect(url)
        found.facts = found.facts.model_copy(update={"resolved_args": json.dumps(told)})
        report = bench(found, WORKLOAD, ignore)
    assert {gate.name: gate.verdict for gate in report.gates}["accept_len"] == "failed"


def test_eagle_with_a_draft_that_is_not_here_is_told():
    """Whether it is an EAGLE-3 draft only its folder says; what follows, if it is one, is said beside the figures."""
    with sglang(*SPECULATIVE) as url:
        found = connect(url)
        told = json.loads(found.facts.resolved_args) | {"speculative_algorithm": "EAGLE"}
        found.facts = found.facts.model_copy(update={"resolved_args": json.dumps(told)})
        report = bench(found, WORKLOAD, ignore)
    (gate,) = [gate for gate in report.gates if gate.name == "algorithm"]
    assert gate.verdict == "warning"
    assert "EAGLE runs, not EAGLE3, and the draft (/d) cannot be read here" in gate.detail


@pytest.mark.slow
def test_draft_that_guesses_nothing_fails_the_bench(tmp_path):
    """Exit 1, and the reason beside the figures; the JSON on stdout is whole all the same."""
    (tmp_path / "p.txt").write_text("def main():\nimport os\n")
    with sglang(*SPECULATIVE, faults="reject") as url:
        done = command(url, tmp_path, "--format", "json", "--concurrency", "1,2")
        table = command(url, tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == table.returncode == 1
    assert [m["concurrency"] for m in report["measurements"]] == [1, 2]
    assert "accept_len" in [gate["name"] for gate in report["gates"] if gate["verdict"] == "failed"]
    assert "failed accept_len: tokens per verify round" in table.stdout
    assert "pass: 1 of at most 2" in done.stderr


def command(url, folder, *words):
    """The installed command, on two prompts."""
    line = [sys.executable, "-m", "raytune_eagle", "bench", url, "--workload", str(folder / "p.txt")]
    line += ["--max-new-tokens", "24", "--max-passes", "2", *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.slow
def test_a_model_is_not_chosen_where_nothing_reads_it(tmp_path):
    """``/generate`` would measure the base model under the name of an adapter."""
    (tmp_path / "p.txt").write_text("def main():\nimport os\n")
    with sglang(*SPECULATIVE) as url:
        done = command(url, tmp_path, "--model", "/m")
    assert done.returncode == 2
    assert done.stderr == (
        "raytune-eagle: --model /m: SGLang's own /generate has one model only; add --chat, or leave it out\n"
    )


@pytest.mark.slow
def test_table_of_an_openai_server(tmp_path):
    """Figures for people on stdout, progress on stderr, exit 0."""
    (tmp_path / "p.txt").write_text("def main():\nimport os\n")
    with OpenAI().running() as server:
        done = command(server.url, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"OpenAI's format at {server.url}: org/model" in " ".join(done.stdout.split())
    assert "accept_len" in done.stdout


@pytest.mark.slow
def test_no_more_prompts_are_sent_than_asked_for(tmp_path):
    """Three of 1,001, the same three for the same seed; without the option how many there are is the first line."""
    (tmp_path / "p.txt").write_text("".join(f"def f{n}(x): return the sum of x and {n}\n" for n in range(1001)))
    sent = []
    for words in (["--num-prompts", "3"], ["--num-prompts", "3"], ["--num-prompts", "3", "--seed", "1"]):
        with OpenAI().running() as server:
            done = command(server.url, tmp_path, *words)
        assert done.returncode == 0, done.stderr
        assert "prompts are sent" not in done.stderr
        sent.append({body["messages"][0]["content"] for body in server.bodies})
    assert len(sent[0]) == len(sent[2]) == 3
    assert sent[0] == sent[1] != sent[2]
    all_of_them = command("http://127.0.0.1:1", tmp_path).stderr.splitlines()
    assert all_of_them[0] == "raytune-eagle: 1,001 prompts are sent in each pass; --num-prompts N takes fewer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["http://127.0.0.1:1"], "give the address of a server that runs"),
        (["http://127.0.0.1:1", "--concurrency", "1,x"], "--concurrency 1,x: write numbers above 0"),
        (["http://127.0.0.1:1", "--concurrency", "2,2"], "each once"),
        (["http://127.0.0.1:1", "--concurrency", "2, 02"], "each once"),
        (["http://127.0.0.1:1", "--concurrency", "99999999"], "--concurrency 99999999: this shell lets a process have"),
        (["http://127.0.0.1:1", "--api-key-env", "NO_SUCH"], "--api-key-env NO_SUCH: no such variable"),
        (["http://127.0.0.1:1", "--workload", "/no/such"], "/no/such: no such file"),
    ],
)
def test_bad_usage_is_one_line(words, said):
    """Exit 2, and what to write instead; nothing is sent anywhere."""
    done = subprocess.run(
        [sys.executable, "-m", "raytune_eagle", "bench", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_key_is_sent_and_a_refusal_is_told():
    """A server that wants a key says so in one line; with it, it is measured."""
    with OpenAI(key="secret").running() as server:
        with pytest.raises(SpecError, match=r"wants a key \(401\): name the variable of one with --api-key-env"):
            connect(server.url)
        with pytest.raises(
            SpecError, match=r"refuses this key \(401\): name the variable of another with --api-key-env"
        ):
            connect(server.url, "wrong")
        assert connect(server.url, "secret").headers == {"Authorization": "Bearer secret"}


def test_foreign_server_is_told():
    """What answers, but as neither, is not measured."""
    with OpenAI().running() as server, pytest.raises(SpecError, match=r"answers neither /server_info"):
        connect(f"{server.url}/elsewhere")


def test_real_chat_stream_of_sglang_is_read_whole():
    """SGLang 0.5.20 with EAGLE-3 on a CPU: counts by chunk, text, and the verify rounds from its last chunks."""
    path = Path(__file__).parent / "assets" / "streams" / "chat_eagle3_3_1_4.sse"
    chunks = [line for line in data_lines(bytearray(), path.read_bytes()) if line != b"[DONE]"]
    wire, counts = Chat(WORKLOAD, "m"), [0]
    for chunk in chunks:
        counts.append(wire.count(chunk, counts[-1]))
    assert counts == [0, 0, 1, 3, 5, 6, 7, 9, 12, 12, 12, 12]
    text, meta, least = wire.answer(chunks)
    assert least == 7, "chunks with text, of twelve tokens"
    assert text.startswith("\n#\n#  ")
    assert (meta["finish_reason"], meta["prompt_tokens"], meta["completion_tokens"]) == ("length", 13, 12)
    assert (meta["spec_verify_ct"], meta["spec_correct_drafts_histogram"]) == (6, [2, 3, 0, 1])
    assert not wire.repeats(chunks[1], chunks[2])


def test_errors_of_the_chat_format_are_kept():
    """A complaint in the stream, or what is no chunk at all, fails the request with the server's words."""
    wire = Chat(WORKLOAD, "m")
    with pytest.raises(StreamError, match="the server reported an error: too long"):
        wire.count(b'{"error": {"message": "too long"}}', 0)
    with pytest.raises(StreamError, match="not a chunk of an answer"):
        wire.count(b'{"odd": 1}', 0)
