"""Names of configurations: of several drafts, of several environments; and speedups over what is not there."""

import io

import pytest
from made_records import TUNED, plain, trial
from rich.console import Console

from raytune_eagle.model.config import Config
from raytune_eagle.model.measurement import Gate
from raytune_eagle.model.trial import HOPELESS
from raytune_eagle.ranking import label, names_of
from raytune_eagle.report.console import summary
from raytune_eagle.report.facts import Facts
from raytune_eagle.report.verdict import verdict
from raytune_eagle.store import ParquetStore


def night(*drafts):
    """Plain decoding, and one shape with each draft, the first the fastest."""
    configs = [Config(model="m", speculative=TUNED.model_copy(update={"draft": draft})) for draft in drafts]
    trials = [trial(1 + n, 200.0 - n, key=config.uid, config=config) for n, config in enumerate(configs)]
    return [plain(0, 100.0), *trials]


def test_one_draft_is_not_named():
    """It would be the same in every line."""
    records = night("/d/one")
    assert "/d/one" not in verdict(records, 1)
    assert label(records[1].config) == "EAGLE3 3/4/12"


def test_of_several_drafts_each_is_named(tmp_path):
    """The verdict, the table of the console and the report say which checkpoint it was."""
    records = night("/d/one", "/d/two")
    assert "EAGLE3 3/4/12 draft=/d/one is 2.0" in verdict(records, 1)
    said = io.StringIO()
    summary(records, [1], Console(file=said, width=160))
    assert "EAGLE3 3/4/12 draft=/d/two" in said.getvalue()
    store = ParquetStore(str(tmp_path))
    store.declare("s", {})
    for record in records:
        store.append(record)
    assert Facts(store, "s").labels[2] == "EAGLE3 3/4/12 draft=/d/two"


def test_variables_that_differ_are_named():
    """Two points of one tree and different environments have different names, in verdict and table alike."""
    ll = Config(model="m", speculative=TUNED, env={"NCCL_PROTO": "LL", "NCCL_DEBUG": "INFO"})
    unset = ll.model_copy(update={"env": {"NCCL_DEBUG": "INFO"}})
    name = names_of([ll, unset])
    assert (name(ll), name(unset)) == ("EAGLE3 3/4/12 NCCL_PROTO=LL", "EAGLE3 3/4/12")
    own = Config(model="m", env={"NCCL_DEBUG": "INFO"})
    records = [plain(0, 100.0, config=own), trial(1, 150.0, config=unset), trial(2, 170.0, key="ll", config=ll)]
    assert "EAGLE3 3/4/12 NCCL_PROTO=LL is 1.70x" in verdict(records, 1)


def test_speedups_without_plain_decoding_are_called_recorded():
    """Launches whose plain decoding is elsewhere: `best` says what their speedups are, and of others nothing."""
    alone = [trial(1, 150.0, speedup={1: 1.5})]
    for records, told in ((alone, True), ([plain(0, 100.0), *alone], False)):
        said = io.StringIO()
        summary(records, [1], Console(file=said, width=160))
        assert ("speedups are what was recorded where they ran" in said.getvalue()) is told


@pytest.mark.parametrize(("width", "table"), [(120, True), (100, True), (99, False), (40, False)])
def test_no_terminal_cuts_a_figure_or_a_name(width, table):
    """However narrow: interval, speedup and the variable that tells two points apart are all there."""
    env = {"NCCL_ALGO": "ring,tree;allreduce:tree", "NCCL_P2P_LEVEL": "SYS"}
    known = Config(model="m", speculative=TUNED, env=env)
    records = [
        plain(0, 1000.0, 100.0),
        trial(1, 1500.0, 100.0, config=known, speedup={1: 1.5}),
        trial(2, None, key="y"),
    ]
    board = boards(records, width)
    assert "…" not in board
    assert "1400.0–1600.0" in board
    assert "1.50x" in board
    assert ("│" in board) is table
    cells = "".join(line.split("│")[2].strip() for line in board.splitlines() if "│" in line)
    assert "NCCL_ALGO=ring,tree;allreduce:tree" in (cells if table else board)
    assert "failed" in board
    assert "oom" in board


def test_a_table_that_fits_is_one():
    """Short names need no wide terminal."""
    assert "│" in boards([plain(0, 100.0), trial(1, 150.0)], 90)


def test_what_was_ended_early_is_told_shortly():
    """When, in the table; by how much it was behind is in its figures and among its gates."""
    early = trial(1, 150.0)
    gate = Gate(name=HOPELESS, verdict="warning", detail="ended early after 12 answers: 0.65 times the speed")
    outcome = early.outcome.model_copy(update={"gates": (gate,)})
    told = boards([plain(0, 100.0), trial(2, 200.0, key="y"), early.model_copy(update={"outcome": outcome})], 120)
    assert "ended early after 12 answers" in " ".join(told.replace("│", " ").split())
    assert "0.65" not in told


def boards(records, width):
    """What is printed before the verdict."""
    said = io.StringIO()
    summary(records, [1], Console(file=said, width=width))
    return said.getvalue().split("Verdict")[0]
