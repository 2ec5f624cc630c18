"""Prompt sets: what is read, what is refused and in which words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytune_eagle import specfile
from raytune_eagle.cli.input import workload_of
from raytune_eagle.cli.run import _held_out
from raytune_eagle.errors import Mistakes, SpecError
from raytune_eagle.model.workload import Prompt
from raytune_eagle.workload import builtin_names, drawn, held_out_prompts, load_prompts, told_if_many

SPEC = {
    "name": "some",
    "engine": {"model": "builtin:tiny", "draft": "builtin:tiny"},
    "node": {"gpus": 0},
    "space": {"speculative": {"num_steps": [2], "eagle_topk": [2], "num_draft_tokens": [4]}},
}


def write(path: Path, text: str | bytes) -> str:
    """Write a file; its name, as a user would give it."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def problem(source: str, **kind: bool) -> str:
    """The one line with which a source is refused."""
    with pytest.raises(SpecError) as caught:
        load_prompts(source, **kind)
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


@pytest.mark.parametrize(("name", "least", "categories"), [("mixed", 96, 6), ("tiny", 24, 4)])
def test_bundled_sets_are_large_mixed_and_partly_held_out(name, least, categories):
    """Each bundled set has its size, its categories in both parts, a third held out, and no prompt twice."""
    everything = load_prompts(f"builtin:{name}", held_out=None)
    search, held_out = load_prompts(f"builtin:{name}"), load_prompts(f"builtin:{name}", held_out=True)
    assert len(everything) >= least
    assert len({prompt.text for prompt in everything}) == len(everything)
    assert {prompt.id for prompt in search} | {prompt.id for prompt in held_out} == {prompt.id for prompt in everything}
    assert not {prompt.id for prompt in search} & {prompt.id for prompt in held_out}
    assert 0.28 <= len(held_out) / len(everything) <= 0.38
    for part in (search, held_out):
        assert len({prompt.category for prompt in part}) >= categories


def test_mixed_spans_short_and_long():
    """The bundled general set has one-liners and prompts of more than 400 words."""
    lengths = [len(prompt.text.split()) for prompt in load_prompts("builtin:mixed", held_out=None)]
    assert min(lengths) <= 12
    assert max(lengths) > 400


def test_json_lines_survive_bom_crlf_and_blank_lines(tmp_path):
    """Both names of the text, ids of either type, defaults, a BOM, CRLF and odd line separators are all read right."""
    lines = ['{"text": "a\\u2028b", "id": 7, "category": "code"}', "", '{"prompt": " two "}', '{"text": "x\x85y"}']
    source = write(tmp_path / "p.jsonl", b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    prompts = load_prompts(source)
    assert [(p.id, p.category, p.text) for p in prompts] == [
        ("7", "code", "a\u2028b"),
        ("line-3", "all", " two "),
        ("line-4", "all", "x\x85y"),
    ]


def test_conversations_that_nobody_opens_are_left_out(tmp_path):
    """As the public ShareGPT files have them: without turns, of the model alone, or with an empty question."""
    talks = [
        {"id": "a", "conversations": []},
        {"id": "b", "conversations": [{"from": "gpt", "value": "Hi."}]},
        {"id": "c", "conversations": [{"from": "human", "value": ""}]},
        {"id": "d", "conversations": [{"from": "human", "value": "Why?"}]},
    ]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(talks))
    assert [(prompt.id, prompt.text) for prompt in load_prompts(str(path))] == [("d", "Why?")]


def test_sharegpt_gives_the_first_human_turn(tmp_path):
    """A ShareGPT list becomes its first human turns, also after a system turn and under the newer key names."""
    talks = [
        {"id": "t1", "conversations": [{"from": "gpt", "value": "Hi."}, {"from": "human", "value": "Hello?"}]},
        {"conversations": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "And now?"}]},
    ]
    prompts = load_prompts(write(tmp_path / "talks.json", json.dumps(talks, indent=1)))
    assert [(p.id, p.text) for p in prompts] == [("t1", "Hello?"), ("item-1", "And now?")]


def test_plain_text_is_a_prompt_a_line_even_with_brackets(tmp_path):
    """In a .txt file every line is a prompt, and a first bracket makes no JSON of it."""
    prompts = load_prompts(write(tmp_path / "p.txt", "[INST] Hi [/INST]\n\n{braces}\r\n"))
    assert [(p.id, p.text) for p in prompts] == [("line-1", "[INST] Hi [/INST]"), ("line-3", "{braces}")]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.jsonl", "", ": empty; write one JSON object per line"),
        ("blank.txt", " \n\n", ": empty; write"),
        ("words.jsonl", '{"text": "a"}\nhello\n', ":2: not JSON; write one JSON object per line"),
        ("list.json", '[{"text": "a"},\n oops]', ":2: not JSON, though it starts like a list"),
        ("latin1.txt", "gut\nschön".encode("latin-1"), ":2: not UTF-8; save the file as UTF-8"),
        ("number.jsonl", "{}\n".replace("{}", '{"text": 3}'), ':1: "text" is a JSON int; write a string'),
        ("array.jsonl", '{"text": "a"}\n[1]\n', ":2: a JSON list, not an object"),
        ("notext.jsonl", '{"question": "a"}\n', ':1: no "text" (or "prompt")'),
        ("spaces.jsonl", '{"text": "  "}\n', ':1: "text" is empty'),
        ("half.jsonl", '{"text": "\\ud800"}\n', ":1: half of a UTF-16 pair"),
        ("id.jsonl", '{"text": "a", "id": {}}\n', ':1: "id" must be a text or a number'),
        ("category.jsonl", '{"text": "a", "category": 1}\n', ':1: "category" must be a text'),
        ("heldout.jsonl", '{"text": "a", "held_out": "yes"}\n', ':1: "held_out" must be true or false'),
        ("long.jsonl", '{"text": "' + "ab " * 3_500_000 + '"}\n', ":1: a prompt of 10,500,000 characters; at most"),
        ("deep.jsonl", '{"text": "a"}\n' + "[" * 100_000 + "\n", ":2: not JSON"),
        ("talk.json", '[{"conversations": []}]', '[0]: no "text"'),
    ],
)
def test_bad_files_are_refused_in_one_line_with_their_place(tmp_path, name, content, said):
    """Each mistake names the file, the line where there is one, and what to write instead."""
    source = write(tmp_path / name, content)
    assert problem(source).startswith(source + said)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("heldout", "held_out"), ("held-out", "held_out"), ("Held_Out", "held_out"), ("categorie", "category")],
)
def test_a_misspelt_key_is_one_line(tmp_path, key, meant):
    """However many lines have it: with nothing held out the end would be confirmed on the prompts of the search."""
    lines = [json.dumps({"text": f"write a poem of {n} lines", key: "x", "answer": n}) for n in range(30)]
    path = write(tmp_path / "p.jsonl", "\n".join(lines))
    assert problem(path) == f'{path}:1: "{key}": nobody reads that; did you mean "{meant}"? (and 29 more like it)'


def test_other_keys_are_the_users_own(tmp_path):
    """Data sets carry answers, sources and more, which nobody has to take out."""
    entry = {"text": "sum a list", "held": 1, "hold": 2, "source": "mt-bench", "answer": "x", "cat": "b", "idx": 3}
    assert [prompt.category for prompt in load_prompts(write(tmp_path / "p.jsonl", json.dumps(entry)))] == ["all"]


def test_double_ids_name_both_lines(tmp_path):
    """The same id twice is refused, since results are paired by it; the message names both places."""
    source = write(tmp_path / "p.jsonl", '{"text": "a", "id": 1}\n{"text": "b"}\n{"text": "c", "id": "1"}\n')
    assert problem(source) == f"{source}:3: id '1' is taken by {source}:1; give it another"


def test_all_mistakes_are_told_at_once_but_not_thousands(tmp_path):
    """Several bad lines give as many problems, and a file of another format gives no flood."""
    with pytest.raises(SpecError) as caught:
        load_prompts(write(tmp_path / "p.jsonl", '{"text": 1}\n{"text": "b"}\nnope\n'))
    assert len(caught.value.problems) == 2
    with pytest.raises(SpecError) as caught:
        load_prompts(write(tmp_path / "q.jsonl", "nope\n" * 500))
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1] == "… and 480 more"


@pytest.mark.parametrize("source", ["builtin:nope", "/nowhere/prompts.jsonl", "builtin:../tiny/target/config"])
def test_what_is_not_there_is_answered_with_what_is(source):
    """An unknown bundled set or a missing file is refused with the names of the bundled ones."""
    line = problem(source)
    assert line.startswith(source)
    assert all(name in line for name in builtin_names())


def test_folders_and_nul_names_are_no_crash(tmp_path):
    """A folder, or a name that no file can have, is a mistake of the user and not a bug."""
    assert "cannot be read" in problem(str(tmp_path))
    assert "cannot be read" in problem("a\0b")
    assert problem("~nobody7/p.jsonl") == "~nobody7/p.jsonl: no such user; write the whole path"


def test_asking_for_a_part_that_is_empty_says_how_to_fill_it(tmp_path):
    """Without held-out prompts, asking for them is refused with what to write; likewise without any others."""
    source = write(tmp_path / "p.jsonl", '{"text": "a"}\n')
    assert 'write "held_out": true' in problem(source, held_out=True)
    source = write(tmp_path / "q.jsonl", '{"text": "a", "held_out": true}\n')
    assert 'not "held_out": true' in problem(source)


def test_so_many_prompts_are_drawn_by_seed():
    """The same seed draws the same of the same set, in its order; another draws others; none is drawn twice."""
    everything = load_prompts("builtin:mixed")
    some = drawn(everything, 10, 3)
    assert some == drawn(load_prompts("builtin:mixed"), 10, 3) != drawn(everything, 10, 4)
    assert list(some) == [prompt for prompt in everything if prompt in some]
    assert len({prompt.id for prompt in some}) == 10
    assert [prompt.id for prompt in some][:3] == ["code-07", "arithmetic-09", "chat-13"], (
        "on every machine, in every version"
    )
    for most in (None, len(everything), 10**6):
        assert drawn(everything, most, 3) == everything


def test_a_spec_takes_so_many_prompts_of_either_part():
    """`workload.num_prompts` holds for the search and for the confirmation, whose prompts stay held out."""
    spec = specfile.parse({**SPEC, "workload": {"num_prompts": 7}, "search": {"seed": 5}})
    mistakes = Mistakes()
    workload = workload_of(spec, mistakes)
    mistakes.tell()
    assert workload.prompts == drawn(load_prompts("builtin:mixed"), 7, 5)
    assert _held_out(spec, workload).prompts == drawn(held_out_prompts("builtin:mixed"), 7, 5)
    with pytest.raises(SpecError, match=r"workload\.num_prompts: "):
        specfile.parse({**SPEC, "workload": {"num_prompts": 0}})


def test_many_prompts_are_told_with_what_takes_fewer():
    """A thousand and one, not a thousand."""
    prompts = tuple(Prompt(id=str(n), category="c", text="t") for n in range(1001))
    assert told_if_many(prompts[1:], "--num-prompts N") == []
    assert told_if_many(prompts, "--num-prompts N") == [
        "1,001 prompts are sent in each pass; --num-prompts N takes fewer"
    ]
