"""Prompt sets: what is read, what is refused and in which words."""

from __future__ import annotations

import json
import random
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest

from raytune_eagle.errors import SpecError
from raytune_eagle.workload import builtin_names, load_prompts, looks_random

ENGLISH = (
    "The old mill stands at the bend of the river, where the water is slow and the willows hang over it. Nobody has "
    "ground any corn there for sixty years, but the wheel still turns, since the grandson of the last miller oils it "
    "each spring. He says that a wheel which stands will rot, and that he does not want to be the one who let it. In "
    "the summer the children of the village swim below the weir, and the bravest of them dive under the wheel and come "
    "up on the other side. Their mothers did the same, and forbid it. When the river rises in November, the house "
    "trembles, and in the morning there is a line of foam and leaves on the wall, a little higher in some years and a "
    "little lower in others. The grandson marks it with chalk and writes the year beside it, and the oldest of the "
    "marks, which is his own, is at the height of his knee. The one of last year is at the height of his chest."
)
GERMAN = (
    "Der Zug hielt mitten auf der Strecke, und niemand wusste warum. Draußen lag ein Feld, auf dem Feld stand ein "
    "Mann mit einem Hund, und der Hund sah den Zug an, als hätte er ihn bestellt. Nach einer Weile kam der Schaffner "
    "durch den Wagen und sagte, es sei ein Signal, und das Signal sei rot. Ob es auch einmal grün werde, fragte eine "
    "Frau, die einen Kuchen auf den Knien hielt. Das wisse er nicht, sagte der Schaffner, er sei erst seit dem Herbst "
    "auf dieser Strecke. Da lachten die Leute, und die Frau schnitt den Kuchen an, denn der Kuchen war für ihre "
    "Schwester, und die Schwester, sagte sie, komme sowieso immer zu spät. Als der Zug wieder fuhr, war von dem Kuchen "
    "nur noch ein Stück übrig, und das bekam der Schaffner, der es nicht essen durfte und es trotzdem aß. Der Mann auf "
    "dem Feld hob die Hand, und der Hund lief ein Stück neben dem Zug her, bis das Feld zu Ende war."
)
FINNISH = (
    "Talo on vanha ja se on mäellä. Mäen alla on järvi, ja järven rannalla on sauna, jonka isoisä rakensi sodan "
    "jälkeen. Kesällä sauna lämmitetään joka ilta, talvella vain lauantaina. Kun sauna on lämmin, isoisä istuu "
    "ylimmällä lauteella ja sanoo, että nyt on hyvä. Lapset istuvat alimmalla lauteella ja sanovat, että nyt on kuuma. "
    "Sitten juostaan järveen. Vesi on kylmää, mutta kukaan ei sano, että se on kylmää, koska isoisä sanoo aina, että "
    "järvi on lämmin. Saunan jälkeen syödään leipää ja juodaan maitoa, ja isoisä kertoo, miten sauna rakennettiin. "
    "Hirret tuotiin jään yli hevosella, ja hevonen oli viisas: se ei mennyt jäälle, jos jää oli heikko. Kerran jää "
    "oli heikko, ja hevonen seisoi rannalla koko päivän. Isoisä oli vihainen, mutta illalla jää petti, ja silloin "
    "hän antoi "
    "hevoselle leipää. Tämä tarina kerrotaan joka kesä, ja joka kesä hevonen on vähän viisaampi kuin ennen. Nyt sauna "
    "on vanha ja isoisä on vanha, mutta järvi on sama, ja kun sauna on lämmin, hän sanoo vielä, että nyt on hyvä."
)
RUSSIAN = (
    "На краю деревни стоит дом, и в этом доме живёт старик, который чинит часы. Часы приносят ему со всей округи, и он "
    "чинит их все, но сам никогда не знает, который час. Когда его спрашивают, почему, он говорит, что у него в доме "
    "сорок часов и все они показывают разное время, и каждый час прав по-своему. Дети любят приходить в полдень, "
    "потому что в полдень начинают бить часы, одни за другими, и бьют они до самого вечера. Старик даёт детям чай и "
    "говорит, что, когда он был маленьким, в доме были только одни часы, и они стояли. Это было хорошее время, говорит "
    "он, потому что его было много. А теперь, говорит он, часов стало больше, а времени меньше. Дети смеются и не "
    "верят ему, и пьют чай, и часы бьют, и старик смотрит в окно на дорогу, по которой кто-то опять несёт часы. Он "
    "знает, что эти часы он уже чинил, и что он будет чинить их опять, и что это не беда, и он ставит чай на стол."
)
CHINESE = (
    "村子的东边有一条小河，河上有一座桥。桥很老，是用石头做的，桥上的石头已经很滑了。每天早上，孩子们从桥上走过去上学，"
    "老人们在桥上坐着说话。春天的时候，河里的水很多，有时候水会到桥上来。那时候孩子们不能上学，他们很高兴，老人们不能到桥上来，"
    "他们不高兴。村里的人说，要做一座新的桥，新的桥要比老的桥高。老人们说，新的桥没有地方坐，他们不要新的桥。孩子们说，"
    "有了新的桥，他们就每天都要上学，他们也不要新的桥。所以桥还是老的桥，水还是会到桥上来。只有送信的人不高兴，因为他每天都要过桥，"
    "他的鞋子是湿的，信也是湿的。他说，总有一天他会自己做一座桥。大家都笑了，可是第二年的春天，他真的做了一座小小的木头桥。"
)
CODE = '''
import argparse
import csv
import sys


def read(path, delimiter):
    """Rows of a file as dictionaries."""
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle, delimiter=delimiter))


def group(rows, column):
    groups = {}
    for row in rows:
        groups.setdefault(row[column], []).append(row)
    return groups


def total(rows, column):
    return sum(float(row[column]) for row in rows)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Sum a column by another column.")
    parser.add_argument("path")
    parser.add_argument("--by", required=True, help="column to group by")
    parser.add_argument("--sum", required=True, help="column to add up")
    parser.add_argument("--delimiter", default=",")
    args = parser.parse_args(argv)
    rows = read(args.path, args.delimiter)
    if not rows:
        print("no rows", file=sys.stderr)
        return 1
    for column in (args.by, args.sum):
        if column not in rows[0]:
            print(f"no column {column}", file=sys.stderr)
            return 2
    groups = group(rows, args.by)
    for name in sorted(groups):
        print(name, total(groups[name], args.sum))
    return 0


if __name__ == "__main__":
    sys.exit(main())
'''
SHUFFLED_ALPHABETS = "abcdefghijklmnopqrstuvwxyz", "абвгдежзиклмнопрстуфхцчшщыэюя", "αβγδεζηθικλμνξοπρστυφχψω"


@cache
def tiny_vocabulary() -> list[str]:
    """The bundled tokenizer's pieces, spelled as text."""
    text = (files("raytune_eagle") / "builtin" / "tiny" / "target" / "tokenizer.json").read_text()
    return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece in json.loads(text)["model"]["vocab"]]


def soup(seed: int, tokens: int) -> str:
    """Tokens drawn at random from the bundled tokenizer's vocabulary, as `--dataset-name random` would."""
    return "".join(random.Random(seed).choices(tiny_vocabulary(), k=tokens))


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


def test_sharegpt_gives_the_first_human_turn(tmp_path):
    """A ShareGPT list becomes its first human turns, also after a system turn and under the newer key names."""
    talks = [
        {"id": "t1", "conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Yes."}]},
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


def test_asking_for_a_part_that_is_empty_says_how_to_fill_it(tmp_path):
    """Without held-out prompts, asking for them is refused with what to write; likewise without any others."""
    source = write(tmp_path / "p.jsonl", '{"text": "a"}\n')
    assert 'write "held_out": true' in problem(source, held_out=True)
    source = write(tmp_path / "q.jsonl", '{"text": "a", "held_out": true}\n')
    assert 'not "held_out": true' in problem(source)


@pytest.mark.parametrize("text", [ENGLISH, GERMAN, FINNISH, RUSSIAN, CHINESE, CODE])
def test_real_text_is_not_random(text):
    """Prose in five languages, one of them strongly inflected and one without spaces, and code all pass."""
    assert not looks_random([text])
    assert not looks_random(text.split("\n"))


def test_bundled_sets_are_not_random():
    """The bundled sets pass their own test by far, category by category."""
    for name in builtin_names():
        prompts = load_prompts(name, held_out=None)
        for category in {prompt.category for prompt in prompts}:
            assert not looks_random(prompt.text for prompt in prompts if prompt.category == category)


@pytest.mark.parametrize("seed", range(20))
def test_token_soup_is_random(seed):
    """Tokens drawn from a vocabulary are found out: as one prompt, and as many short ones."""
    assert looks_random([soup(seed, 1500)])
    assert looks_random(soup(seed * 100 + part, 60) for part in range(25))


@pytest.mark.parametrize("letters", SHUFFLED_ALPHABETS)
def test_invented_words_are_random(letters):
    """Words of random letters are found out in any alphabet."""
    rng = random.Random(3)
    assert looks_random(" ".join("".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(400)).split("\n"))


def test_consecutive_token_ids_are_random():
    """The soup of benchmarks that count token ids upwards is found out too."""
    vocabulary = tiny_vocabulary()
    assert looks_random("".join(vocabulary[start : start + 200]) for start in range(300, 3300, 200))


def test_repeating_a_random_prompt_does_not_make_it_text():
    """The same soup a hundred times is still soup."""
    assert looks_random([soup(1, 1500)] * 100)


def test_few_words_are_not_judged():
    """Below 150 words there is too little to tell, and nobody is refused."""
    assert not looks_random(["zebra quilt moss", "orbit lamp"])


def test_random_prompts_are_refused_with_the_reason(tmp_path):
    """A file of token soup is refused with why, and with what to use."""
    lines = "".join(json.dumps({"text": soup(seed, 200)}) + "\n" for seed in range(10))
    assert "look like random tokens" in problem(write(tmp_path / "soup.jsonl", lines))
