"""`compare`: like beside like, of the search and of what confirmed it, and names that tell configurations apart."""

from __future__ import annotations

import io

from made_records import TUNED, plain, trial
from rich.console import Console

from raytune_eagle.model.config import Config
from raytune_eagle.report.comparison import compare_studies

LL = Config(model="m", speculative=TUNED, env={"NCCL_PROTO": "LL"})


def searched(study, plain_tok_s, best_tok_s):
    """Plain decoding, one point twice as its environment has it, the second the faster."""
    tuned = [trial(1, best_tok_s - 20, study=study), trial(2, best_tok_s, key="ll", config=LL, study=study)]
    return [plain(0, plain_tok_s, study=study), *tuned]


def confirmation(study, plain_tok_s, best_tok_s):
    """Two rounds of plain decoding and the fastest point."""
    return [
        record
        for number in (3, 5)
        for record in (
            plain(number, plain_tok_s, kind="confirm", study=study),
            trial(number + 1, best_tok_s, kind="confirm", key="ll", config=LL, study=study),
        )
    ]


def compared(one, other):
    """The table's rows, each as its cells."""
    out = io.StringIO()
    compare_studies((one, []), (other, []), Console(file=out, width=200))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
    return {row[0]: row[1:] for row in rows if row[0]}, out.getvalue()


def test_like_stands_beside_like():
    """Plain decoding of the search and of the confirmation are rows of their own, and so are the fastest."""
    one = [*searched("a", 100.0, 150.0), *confirmation("a", 200.0, 280.0)]
    other = [*searched("b", 110.0, 300.0), *confirmation("b", 180.0, 210.0)]
    rows, _ = compared(one, other)
    assert list(rows) == [
        "search: plain decoding",
        "search: fastest",
        "search: points in both",
        "confirmed: plain decoding",
        "confirmed: fastest",
    ]
    ratios = {name: cells[2].split("x")[0] for name, cells in rows.items()}
    assert ratios["search: plain decoding"] == "1.10"
    assert ratios["search: fastest"] == "2.00"
    assert ratios["confirmed: plain decoding"] == "0.90"
    assert ratios["confirmed: fastest"] == "0.75"


def test_what_one_study_alone_confirmed_has_no_ratio():
    """It is shown, beside a dash: the search of the other had other prompts and circumstances."""
    rows, _ = compared([*searched("a", 100.0, 150.0), *confirmation("a", 200.0, 280.0)], searched("b", 110.0, 300.0))
    assert rows["confirmed: plain decoding"][1:] == ["–", "–"]
    assert rows["confirmed: plain decoding"][0].startswith("200.0")
    assert rows["search: plain decoding"][0].startswith("100.0")


def test_nothing_confirmed_is_no_row():
    """Of two studies without a confirmation there is the search alone."""
    rows, _ = compared(searched("a", 100.0, 150.0), searched("b", 110.0, 300.0))
    assert not [name for name in rows if name.startswith("confirmed")]


def test_the_fastest_is_told_from_its_like():
    """Two points of one tree and different environments: the name says which of them is the fastest."""
    rows, text = compared(searched("a", 100.0, 150.0), searched("b", 110.0, 300.0))
    assert rows["search: fastest"][:2] == ["EAGLE3 3/4/12 NCCL_PROTO=LL"] * 2
    assert "300.0 (299.0–301.0)" in text
