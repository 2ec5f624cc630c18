"""The page without a browser: what stands in it, what must not, and how large it is. test_browser.py looks at it."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from made import failed
from made_results import WINNER, Made, write

from raytune_eagle.model.measurement import Gate
from raytune_eagle.model.trial import HOPELESS
from raytune_eagle.ranking import leaderboard
from raytune_eagle.report.facts import Facts
from raytune_eagle.report.page import page
from raytune_eagle.report.page.charts_nodes import PHASES, busy_share, segments
from raytune_eagle.report.page.charts_probes import all_reduces
from raytune_eagle.report.page.charts_search import progress, ranking, round_values, thinned
from raytune_eagle.report.page.influence import cycle_parts, importances
from raytune_eagle.report.verdict import verdict, winner
from raytune_eagle.store import ParquetStore

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u2028"
REAL = Path(__file__).parents[1] / "results"


class Elements(HTMLParser):
    """Tags and what they hold."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.inside, self.texts = [], [], "", {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id") or tag

    def handle_data(self, data):
        self.texts[self.inside] = self.texts.get(self.inside, "") + data


def facts_of(tmp_path, **changes):
    made = Made(**{"trials": 40, "requests": 16, "passes": 2, **changes})
    write(str(tmp_path), made)
    return Facts(ParquetStore(str(tmp_path)), made.study)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return facts_of(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def text(facts):
    return page(facts)


def test_the_known_winner_leads(facts, text):
    """Verdict, command and the first row of the leaderboard are those of the point that the cost model favours."""
    assert [facts.standing(level).best.config.speculative.num_steps for level in (1, 8)] == [WINNER["num_steps"]] * 2
    assert "EAGLE3 5/4/16 NCCL_PROTO=LL is 1." in text
    command = re.search(r'<pre tabindex="0" id="command-1">(.*?)</pre>', text)[1]
    assert "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16" in command
    assert command.startswith("NCCL_PROTO=LL ")


@pytest.mark.slow
def test_the_verdict_is_that_of_best(facts, tmp_path):
    """What the page says is what `best` says of all records with all their requests."""
    made = Made(trials=150, requests=16, passes=2)
    write(str(tmp_path), made)
    store = ParquetStore(str(tmp_path))
    whole, read = list(store.read("made")), Facts(store, "made")
    for level in (1, 8):
        assert read.standing(level).sentence == verdict(whole, level)
        assert read.standing(level).launch == winner(whole, level)
        assert read.standing(level).rows == leaderboard(whole, level)


def test_thousands_are_thinned_and_said(facts):
    """Of many launches the fastest are drawn and a sample of the rest; the words say so, and few are drawn whole."""
    few = [(r, r.outcome.measurements[0]) for r in facts.measured]
    assert thinned(few) == (few, "")
    many = few * 100
    kept, words = thinned(many)
    assert len(kept) <= 1200 < len(many)
    fastest = sorted((figures.output_throughput for _, figures in many), reverse=True)[:600]
    assert sorted((figures.output_throughput for _, figures in kept), reverse=True)[:600] == fastest
    assert f"the table has all {len(many):,}" in words
    assert [record.number for record, _ in kept] == sorted(record.number for record, _ in kept)


def test_the_line_of_the_best_is_where_it_was_found(facts):
    """The line goes up at the launch that was faster than all before it, and on to the last one."""
    (line,) = (trace for trace in progress(facts, 1).data if trace["name"] == "best so far")
    done = [(r.number, f.output_throughput) for r, f in facts.launches(1) if r.kind == "trial"]
    sound = {r.number for r in facts.records if r.status == "completed"}
    best = [(n, y) for n, y in done if n in sound and y >= max(v for m, v in done if m <= n and m in sound)]
    assert list(zip(line["x"], line["y"], strict=True)) == [*best, (done[-1][0], best[-1][1])]
    assert len(best) > 2


def test_gates_are_counted_and_warn(text, facts):
    """Each gate has how often it passed and warned, and a warning of the winner is among what speaks against it."""
    measured = len(facts.measured)
    assert f'<th scope="row">draft_class</th><td>{measured}</td><td>0</td>' in text
    assert f'<th scope="row">graphs</th><td>0</td><td>{measured}</td>' in text
    assert "gate graphs: 2 % of batches ran without graphs" in text


def test_every_chart_has_words_and_a_table(text):
    """Each figure is described in words, and its table has as many columns as its rows have cells."""
    elements = Elements(text)
    data = json.loads(elements.texts["data"])
    figures = [attrs for tag, attrs in elements.tags if tag == "figure"]
    labels = [attrs["aria-label"] for tag, attrs in elements.tags if attrs.get("class") == "plot"]
    assert len(figures) == len(labels) == len(data["charts"])
    assert all(len(label.split(": ", 1)[1]) > 10 for label in labels)
    assert {attrs["data-chart"] for attrs in figures} == set(data["charts"])
    for chart in data["charts"].values():
        assert chart["rows"]
        assert {len(row) for row in chart["rows"]} == {len(chart["columns"])}


def test_the_page_asks_nobody(text):
    """No element loads anything, and the policy would stop it; size is within 8 MB."""
    elements = Elements(text)
    sources = [
        attrs.get("src") or attrs.get("href") for tag, attrs in elements.tags if tag in ("script", "link", "img")
    ]
    assert [source for source in sources if source] == ["data:,"]
    policy = next(a["content"] for t, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert len(text.encode()) < 8e6


def test_hostile_texts_do_not_leave_their_place(tmp_path):
    """Markup in drafts, categories, errors and logs is escaped wherever it stands, in HTML and in JSON."""
    text = page(facts_of(tmp_path, hostile=HOSTILE))
    elements = Elements(text)
    assert [tag for tag, _ in elements.tags].count("script") == 3
    assert "img" not in [tag for tag, _ in elements.tags]
    data = json.loads(elements.texts["data"])
    names = [row[0] for row in data["charts"]["categories-1"]["rows"]]
    assert names
    assert all(name.endswith(HOSTILE) for name in names)  # a table sets texts
    drawn = data["charts"]["categories-1"]["data"][0]["x"]
    assert all("<" not in name and "&lt;img" in name for name in drawn)  # Plotly would take markup for markup


def test_every_kind_of_study_has_a_page(tmp_path):
    """Nothing but failures, and nothing but plain decoding, give a page that says so."""
    made = Made(trials=12, requests=16, passes=2)
    records = write(str(tmp_path / "a"), made)
    for name, chosen in (("failures", "trial"), ("baselines", "baseline")):
        store = ParquetStore(str(tmp_path / "b"))
        kept = [record for record in records if record.kind == chosen]
        for record in kept:
            change = {"study": name, "outcome": failed() if name == "failures" else record.outcome, "speedup": {}}
            store.append(record.model_copy(update=change | {"matches_baseline": {}}))
        text = page(Facts(store, name))
        assert "No trial completed" in text or "no trial completed" in text
    assert "graph_capture_failed" in page(Facts(store, "failures"))


def test_the_kept_study_has_a_page():
    """The real study that comes with the clone says that plain decoding is faster there."""
    text = page(Facts(ParquetStore(str(REAL)), "smollm2-h200-two-factor"))
    assert "Plain decoding is faster: the best, EAGLE3 3/1/4, is 0.59x" in text


def test_segments_fill_a_launch(facts):
    """Phases lie end to end within their launch, and the busy share is theirs over the span of the study."""
    for record in facts.records:
        parts = list(segments([record]))
        assert parts[0].start == record.started_at
        assert all(left.end == right.start for left, right in itertools.pairwise(parts))
        assert parts[-1].end <= record.ended_at + 1e-6
        assert {part.phase for part in parts} <= set(PHASES)
    start, end = facts.span
    for node, share in busy_share(facts).items():
        spent = sum(part.end - part.start for part in segments(facts.records) if part.node == node)
        assert share == pytest.approx(spent / (end - start))


def test_round_values_lie_between():
    """Iso-throughput lines are few, round and within what was measured, however wide that is."""
    for low, high in ((34.7, 137.0), (99.0, 101.0), (5.0, 5.0), (1000.0, 90000.0), (0.3, 0.9)):
        values = round_values(low, high)
        assert 1 <= len(values) <= 7
        assert all(low * 0.98 <= value <= high * 1.02 for value in values)


def test_cycle_parts_find_a_known_cycle(facts):
    """Of launches with cycle = 3 + 2 × steps + 0.5 × tokens the fit finds just that; from a handful, nothing."""
    rows = []
    for record in facts.measured:
        chosen = record.config.speculative
        if chosen and not record.config.env:
            cycle = 3 + 2 * chosen.num_steps + 0.5 * chosen.num_draft_tokens
            rows.append((record.config, record.outcome.measurements[0].model_copy(update={"cycle_ms": cycle})))
    found = cycle_parts(rows)
    assert (found.fixed, found.per_step, found.per_token) == pytest.approx((3, 2, 0.5))
    assert found.r2 == pytest.approx(1)
    assert sum(found.parts(rows[0][0].speculative).values()) == pytest.approx(rows[0][1].cycle_ms)
    assert cycle_parts(rows[:5]) is None


def test_importances_name_what_matters(facts):
    """A figure that only num_steps moves makes it the most important; few launches say nothing."""
    rows = [(r, float(r.params["num_steps"])) for r in facts.measured if r.kind == "trial"]
    found = importances(rows)
    assert next(iter(found)) == "num_steps"
    assert sum(found.values()) == pytest.approx(1)
    assert importances(rows[:5]) == {}


def test_probes_have_their_chart_and_table():
    """Every timed environment of the kept study is drawn, the default first, with the times that pandas finds."""
    facts = Facts(ParquetStore(str(REAL)), "random7b-h200x4")
    frame = pd.read_parquet(REAL / "study=random7b-h200x4/probes")
    chart = all_reduces(facts.probes)
    (drawn,) = chart.data
    assert len(drawn["y"]) == frame.env.astype(str).nunique()
    assert drawn["y"][0] == "default"
    assert drawn["x"][0] == f"{frame.message_bytes.min() // 1024} KiB"
    small = frame[(frame.message_bytes == frame.message_bytes.min()) & (frame.env.astype(str) == "[]")]
    assert drawn["text"][0][0] == f"{small.p50_us.median():.3g}"
    assert drawn["z"][0][0] == 0
    assert len(chart.rows) == len(frame)
    assert {row[4] for row in chart.rows} == set(frame.p50_us)
    assert 'data-chart="probes-all"' in page(facts)


def timed(env, us, node="n0", size=8192, at=1.0, error=None):
    """One row of the view probes."""
    row = {"measured_unix_s": at, "node": node, "step": "verify", "tokens": 2, "env": env, "message_bytes": size}
    return {**row, "p50_us": us, "p95_us": us, "chosen": None, "error": error}


def test_probes_of_several_nodes_and_failures():
    """Nodes meet in their median, shares are of the default's, and what failed is named and has no time."""
    ring, low = {"NCCL_ALGO": "Ring"}, {"NCCL_PROTO": "LL128"}
    rows = [timed({}, 10.0), timed(ring, 20.0), timed({}, 30.0, "n1"), timed(ring, 60.0, "n1")]
    chart = all_reduces([*rows, timed(low, None, error="hang: no answer <b>")])
    (drawn,) = chart.data
    assert (drawn["y"], drawn["text"], drawn["z"]) == (["default", "ALGO=Ring"], [["20"], ["40"]], [[0.0], [1.0]])
    assert "Failed: NCCL_PROTO=LL128 (hang: no answer <b>)." in chart.about
    assert [row[6] for row in chart.rows] == [0.5, 1.0, 1.5, 3.0, None]
    assert all_reduces([]) is None
    assert all_reduces([timed({}, None, error="hang")]) is None


def test_probes_of_hundreds_of_environments():
    """Of more environments than can be read the fastest and the slowest are drawn; the table has all."""
    rows = [timed({}, 10.0), *(timed({"NCCL_NTHREADS": str(n)}, 10.0 + n) for n in range(1, 200))]
    chart = all_reduces(rows)
    assert len(chart.data[0]["y"]) == 24
    assert chart.data[0]["y"][-1] == "NTHREADS=199"
    assert "fastest and the slowest of 200" in chart.about
    assert len(chart.rows) == 200


def test_launches_that_ended_early_are_drawn(tmp_path):
    """A launch that was given up as hopeless has its place among the fastest, as what it is."""
    records = write(str(tmp_path / "a"), Made(trials=12, requests=16, passes=2))
    store = ParquetStore(str(tmp_path / "b"))
    for record in records:
        gates = (Gate(name=HOPELESS, verdict="passed", detail="cannot be the best any more"),)
        early = record.number == 3 and record.status == "completed"
        change = {"gates": gates} if early else {}
        store.append(record.model_copy(update={"outcome": record.outcome.model_copy(update=change)}))
    assert store.reading("made", brief=True).records[3].status == "hopeless"
    facts = Facts(store, "made")
    drawn = {trace["name"]: trace["y"] for trace in ranking(facts, facts.standing(1)).data}
    assert len(drawn["ended early"]) == 1


def test_the_confirmed_are_held_against_their_own_plain_decoding():
    """Figures beside the verdict are of the launches that it is about, and names hold only what differs."""
    facts = Facts(ParquetStore(str(REAL)), "random7b-h200x4")
    standing = facts.standing(1)
    again = next(row for row in standing.again if row.config.speculative is None)
    assert standing.found.confirmed
    assert standing.plain["output_throughput"] == pytest.approx(again.throughput)
    assert [row.speedup for row in standing.again] == [
        None if row is again else row.throughput / again.throughput for row in standing.again
    ]
    names = [row[0] for row in ranking(facts, standing).rows]
    assert "EAGLE3 3/4/16 NCCL_NTHREADS=64" in names
    assert not any("SGLANG_SIMULATE" in name for name in names)
