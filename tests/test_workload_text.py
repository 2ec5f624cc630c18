"""What is text and what is random tokens: on the latter no draft guesses anything."""

from __future__ import annotations

import base64
import json
import random
import string
import uuid
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest

from raytune_eagle.errors import SpecError
from raytune_eagle.workload import builtin_names, load_prompts
from raytune_eagle.workload.randomness import looks_random

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


NOISE = {
    "hex": lambda rng, size: rng.randbytes(size // 2).hex(),
    "base64": lambda rng, size: base64.b64encode(rng.randbytes(size * 3 // 4)).decode(),
    "digits": lambda rng, size: "".join(rng.choices(string.digits, k=size)),
    "token ids": lambda rng, size: " ".join(str(rng.randrange(128_000)) for _ in range(size // 6)),
    "bytes": lambda rng, size: rng.randbytes(size // 3).hex(" "),
    "printable": lambda rng, size: "".join(rng.choices(string.printable, k=size)),
}


@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize(("prompts", "size"), [(1, 2_500), (40, 80), (8, 4_000), (30, 4_000)])
def test_characters_in_a_row_by_chance_are_random(kind, prompts, size):
    """Hex, base64, numbers: few short prompts, or many long ones, have hardly a word and no favourites."""
    for seed in range(5):
        rng = random.Random(f"{kind} {seed}")
        assert looks_random([NOISE[kind](rng, size) for _ in range(prompts)])


def cut(text, size):
    """Pieces of a text, all of one size."""
    return [text[start : start + size] for start in range(0, len(text) - size + 1, size)]


def table(rows):
    """A CSV of measurements, most of it digits."""
    rng = random.Random(1)
    lines = (f"2026-03-{n % 28 + 1:02},{20 + rng.gauss(0, 2):.2f},{rng.randrange(900, 1100)},ok" for n in range(rows))
    return "date,celsius,hectopascal,state\n" + "\n".join(lines)


def log(rows):
    """Lines of a server that are mostly ids."""
    rng = random.Random(2)
    lines = (f"INFO request {uuid.UUID(bytes=rng.randbytes(16))} took {rng.randrange(999)} ms" for _ in range(rows))
    return "\n".join(lines)


def test_what_is_mostly_numbers_or_ids_is_not_random():
    """Tables, logs with ids, arithmetic and JSON to extract from, cut into pieces that are judged alone."""
    rng = random.Random(3)
    sums = "\n".join(f"What is {rng.randrange(10_000)} * {rng.randrange(10_000)}?" for _ in range(200))
    records = json.dumps([{"id": rng.randbytes(8).hex(), "price": rng.randrange(9_999) / 100} for _ in range(200)])
    for text in (table(300), log(100), sums, records):
        assert not any(looks_random([piece]) for piece in cut(text, 2_500))


def test_files_of_this_project_are_not_random():
    """Code, prose, YAML and logs of real servers, each piece of 2,500 characters alone."""
    here = Path(__file__).parent
    paths = [
        *here.glob("*.py"),
        *here.parent.glob("*.md"),
        *(here / "assets" / "logs").glob("*.log"),
        here.parent / "cluster.yaml",
    ]
    pieces = [piece for path in paths for piece in cut(path.read_text(errors="replace"), 2_500)]
    assert len(pieces) > 300
    assert not [piece for piece in pieces if looks_random([piece])]


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
    path = tmp_path / "soup.jsonl"
    path.write_text("".join(json.dumps({"text": soup(seed, 200)}) + "\n" for seed in range(10)))
    with pytest.raises(SpecError, match="look like random tokens"):
        load_prompts(str(path))
