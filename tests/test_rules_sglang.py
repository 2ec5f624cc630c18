"""SGLang 0.5.20's own resolution and our rules agree on 2,000 random launches of a wide space.

What SGLang said is kept (tests/assets/rules/sglang_0520.jsonl.gz), so that no SGLang is needed; one test asks it again
for a sample. ``python tests/test_rules_sglang.py`` makes the file anew.
"""

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import wide_space  # noqa: E402 - a sibling
from sglang_answers import ask  # noqa: E402 - likewise

from raytune_eagle import rules  # noqa: E402

ANSWERS = HERE / "assets/rules/sglang_0520.jsonl.gz"
COUNT, SAMPLE = 2000, 200
PAIR = HERE.parent / "raytune_eagle/builtin/tiny"
BEYOND_RESOLUTION = {
    "tree_holds_draft_tokens": "fails at graph capture or at the first request",
    "tree_holds_longest_path": "fails at the first verify",
    "mla_backends_take_chains_only": "fails when the draft's backend is built",
    "draft_has_a_backend": "fails when the draft's backend is built",
}
"""Rules of what goes wrong after SGLang has accepted its arguments, and when."""

BY_MEMORY = ("chunked-prefill-size", "cuda-graph-max-bs-decode", "disable-cuda-graph")


def draws():
    return list(wide_space.draws(COUNT))


def asked(drawn):
    return ask(wide_space.point(where, config, str(PAIR / "target"), str(PAIR / "draft")) for where, config in drawn)


@pytest.fixture(scope="module")
def told():
    """(platform, configuration, our judgement, SGLang's answer) of every launch."""
    with gzip.open(ANSWERS, "rt") as lines:
        answers = [json.loads(line) for line in lines]
    drawn = draws()
    assert len(answers) == len(drawn) == COUNT
    return told_of(drawn, answers)


def told_of(drawn, answers):
    return [(p, c, rules.judge(c, wide_space.FACTS[p]), a) for (p, c), a in zip(drawn, answers, strict=True)]


def shown(rows):
    return "\n".join(f"{p} {' '.join(c.argv()[8:])}\n    {j.reasons}\n    {a}" for p, c, j, a in rows[:5])


def test_agree_on_what_is_refused(told):
    """Whatever SGLang refuses is invalid here, and the other way round but for what fails later."""
    missed = [row for row in told if "refused" in row[3] and row[2].canonical is not None]
    assert not missed, f"{len(missed)} refused by SGLang only:\n{shown(missed)}"
    wrong = []
    for row in told:
        refusals = {finding.rule for finding in row[2].findings if finding.verdict == "invalid"}
        if "refused" not in row[3] and refusals - set(BEYOND_RESOLUTION):
            wrong.append(row)
    assert not wrong, f"{len(wrong)} refused by our rules only:\n{shown(wrong)}"
    assert sum("refused" in row[3] for row in told) > COUNT / 10


def test_agree_on_what_is_rewritten(told):
    """What the canonical form still says is what SGLang runs."""
    wrong = []
    for row in told:
        _, _, judgement, answer = row
        if judgement.canonical is None or "refused" in answer:
            continue
        flags = {**judgement.canonical.args, **judgement.canonical.tuned_args}
        spec = judgement.canonical.speculative.model_dump()
        mine = {f"speculative_{name}": value for name, value in spec.items() if name != "draft"}
        mine |= {name.replace("-", "_"): value for name, value in flags.items()}
        if any(name in answer and answer[name] != value for name, value in mine.items()):
            wrong.append(row)
    assert not wrong, f"{len(wrong)} said and not run:\n{shown(wrong)}"


def test_one_point_is_one_resolution(told):
    """Launches with one key resolve to the same arguments and environment, and those that do have one key."""
    by_key, by_hash = defaultdict(list), defaultdict(list)
    for platform, config, judgement, answer in told:
        if judgement.canonical is not None and "refused" not in answer:
            row = (platform, config, judgement, answer)
            by_key[platform, rules.name(judgement.canonical)].append(row)
            by_hash[platform, answer["hash"]].append(row)
    mixed = [rows for rows in by_key.values() if len({row[3]["hash"] for row in rows}) > 1]
    assert not mixed, f"{len(mixed)} keys with several resolutions:\n{shown(mixed[0])}"
    split = [rows for rows in by_hash.values() if len({but_for_memory(row[2].canonical) for row in rows}) > 1]
    assert not split, f"{len(split)} resolutions with several keys:\n{shown(split[0])}"
    assert sum(len(rows) > 1 for rows in by_key.values()) > COUNT / 20


def but_for_memory(config):
    """Key without what has a default by the memory of the machine, or acts on such a default: no rule can know it."""
    flags = {name: value for name, value in config.tuned_args.items() if name not in BY_MEMORY}
    return rules.name(config.model_copy(update={"tuned_args": flags}))


def test_canonical_forms_are_final(told):
    """Nothing is found in a canonical form."""
    for platform, _, judgement, _ in told:
        if judgement.canonical is not None:
            assert rules.judge(judgement.canonical, wide_space.FACTS[platform]).findings == ()


@pytest.mark.sglang
def test_sglang_still_says_so(told):
    """The kept answers are SGLang's: a sample is asked again, and its canonical forms resolve to the same."""
    sample = told[:: COUNT // SAMPLE]
    now = asked([row[:2] for row in sample])
    assert [without_hash(answer) for answer in now] == [without_hash(row[3]) for row in sample]
    accepted = [(row, answer) for row, answer in zip(sample, now, strict=True) if row[2].canonical and "hash" in answer]
    again = asked([(row[0], row[2].canonical) for row, _ in accepted])
    assert [answer.get("hash") for answer in again] == [answer["hash"] for _, answer in accepted]


def without_hash(answer):
    """Shares of memory, which the hash is over too, are those of the machine."""
    return {name: value for name, value in answer.items() if name != "hash"}


if __name__ == "__main__":
    with gzip.GzipFile(ANSWERS, "wb", mtime=0) as file:
        for answer in asked(draws()):
            file.write((json.dumps(answer, sort_keys=True) + "\n").encode())
