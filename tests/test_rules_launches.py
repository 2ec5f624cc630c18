"""What the real SGLang 0.5.20 made of 50 launches on the CPU, against the rules of the day.

The table is made by benchmarks/rules_cpu.py, which starts a server for each: 40 that the rules accept, 10 that they
refuse.
"""

import json
from pathlib import Path

import pytest

from raytune_eagle import rules
from raytune_eagle.model.config import Config, Speculative

TABLE = Path(__file__).parent / "assets/rules/cpu_launches.jsonl"
ROWS = [json.loads(line) for line in TABLE.read_text().splitlines()]
FACTS = rules.Assumptions(gpus=0, mla=False, amx=False, most_draft_tokens=None)


def judged(row):
    """What the rules say of a launch of the table."""
    triple = dict(zip(rules.SPECULATIVE_NAMES, row["triple"], strict=True))
    draft = Speculative(draft="builtin:tiny", **triple)
    args = {"device": "cpu", "dtype": "float32"}
    return rules.judge(Config(model="builtin:tiny", speculative=draft, args=args, tuned_args=row["flags"]), FACTS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["number"]))
def test_accepted_is_what_generates(row):
    """A launch that is accepted started and generated, and one that is refused did not."""
    assert (judged(row).canonical is not None) == row["generated"], row["detail"]


def test_the_table_is_whole():
    """40 launches that generate and 10 that do not, of at least four rules, no two the same."""
    assert [sum(row["generated"] for row in ROWS), len(ROWS)] == [40, 50]
    assert len({rule for row in ROWS for rule in row["rules"]}) >= 4
    assert len({json.dumps([row["triple"], row["flags"]]) for row in ROWS}) == 50
