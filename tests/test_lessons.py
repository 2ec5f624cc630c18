"""What launches teach the search when they were ended before every concurrency was measured."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from raytune_eagle import specfile
from raytune_eagle.lessons import Lessons, figures_of
from raytune_eagle.model.trial import TrialRecord
from raytune_eagle.ranking import leaderboard
from raytune_eagle.reference import Reference
from raytune_eagle.search import Search
from raytune_eagle.space import Space
from raytune_eagle.store import ParquetStore

ROOT = Path(__file__).parent.parent
STUDY = "smollm2-h200-two-factor"
"""Real: two concurrencies, and eleven of its twelve trials were ended at the first of them."""


@pytest.fixture(scope="module")
def records() -> list[TrialRecord]:
    """Its records."""
    return list(ParquetStore(str(ROOT / "results")).read(STUDY))


@pytest.fixture(scope="module")
def trials(records: list[TrialRecord]) -> list[TrialRecord]:
    """Those of the search."""
    return [record for record in records if record.kind == "trial"]


def test_what_was_not_measured_is_told_from_what_was(records, trials):
    """A launch that was 5 times slower at one concurrency is taken to be so at the other, and as little known."""
    lessons = Lessons(2, trials, Reference(records))
    whole, early = lessons.of(trials[0]), lessons.of(trials[1])
    assert (trials[0].status, trials[1].status) == ("completed", "hopeless")
    assert len(trials[1].outcome.measurements) == 1
    assert whole == figures_of(trials[0], Reference(records))
    assert early[0] == figures_of(trials[1], Reference(records))[0]
    slower = [math.log(after["cycle_ms"] / before["cycle_ms"]) for before, after in zip(whole, early, strict=True)]
    assert slower[1] == pytest.approx(slower[0])
    assert early[1]["accept_len"] == pytest.approx(early[0]["accept_len"])
    assert early[1]["variance"] > 100 * early[0]["variance"]


def test_nothing_is_told_where_nothing_was_measured_whole(records, trials):
    """Without a launch at both concurrencies, no figure stands for the missing one."""
    assert Lessons(2, trials[1:3], Reference(records)).of(trials[2]) == []


@pytest.mark.slow
def test_a_night_does_not_launch_the_hopeless_again_and_again(records, trials):
    """Every trial but the first was without CUDA graphs, and 5 to 7 times slower: from the fourth on, none would be."""
    settings = "cuda_graph_backend_decode"
    spec = specfile.load(ROOT / "search_spaces" / "smollm2_h200.yaml")
    search = spec.search.model_copy(update={"sampler": "two-factor"})
    space = Space(spec.model_copy(update={"search": search, "start_from": ()}))
    asked = [Search(space, trials[:many], Reference(records)).ask() for many in (4, 8, 12)]
    assert [proposal.params[settings] for proposal in asked] == [None] * 3


def test_a_launch_ended_at_one_concurrency_has_not_failed_at_another(records):
    """It is told as hopeless at both."""
    for concurrency in (1, 8):
        rows = leaderboard(records, concurrency)
        assert [row.status for row in rows].count("hopeless") == 11
        assert "failed" not in {row.status for row in rows}
