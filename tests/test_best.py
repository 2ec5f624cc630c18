"""The winner: pooling, ratios by node, sentences no surer than the figures, and exports that come back the same."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytune_eagle.errors import SpecError
from raytune_eagle.model import Completed, Config, Failed, Measurement, Request, Speculative, TrialRecord
from raytune_eagle.report.best import (
    Interval,
    export,
    gain,
    label,
    leaderboard,
    pooled,
    ratio,
    ratio_of_intervals,
    verdict,
    winner,
)

MEASURED = dict.fromkeys(Measurement.model_fields, 1) | {"stable": True}
TUNED = Speculative(draft="d", num_steps=3, eagle_topk=4, num_draft_tokens=12)
OF_PLAIN = "of plain decoding on the same node"
FAILURE = Failed(failure_class="oom", failure_phase="launch", failure_detail="no memory")


def figures(value: float, half: float, concurrency: int = 1) -> Measurement:
    """A throughput with its interval."""
    speed = {"output_throughput": value, "ci_low": value - half, "ci_high": value + half}
    return Measurement.model_validate(MEASURED | speed | {"concurrency": concurrency, "accept_len": 3.0})


def trial(number: int, value: float | None, half: float = 1.0, **changes: object) -> TrialRecord:
    """A searched launch on node n; None failed."""
    outcome = FAILURE if value is None else Completed(measurements=(figures(value, half),), requests=())
    fields = {
        "study": "s",
        "number": number,
        "kind": "trial",
        "node": "n",
        "key": "k",
        "config": Config(model="m", speculative=TUNED),
        "started_at": 0.0,
        "ended_at": 1.0,
        "outcome": outcome,
    }
    return TrialRecord.model_validate(fields | changes)


def plain(number: int, value: float, half: float = 1.0, **changes: object) -> TrialRecord:
    """A baseline launch."""
    return trial(number, value, half, **({"kind": "baseline", "key": "b", "config": Config(model="m")} | changes))


def requests(speed: dict[str, float], passes: int = 4) -> tuple[Request, ...]:
    """100 tokens per prompt at its speed, the passes a little apart."""
    return tuple(
        Request(
            concurrency=1,
            repeat=number,
            prompt_id=prompt,
            category="c",
            started_s=0.0,
            latency_s=100 / tokens_s * (1 + 0.01 * (number % 2)),
            completion_tokens=100,
        )
        for number in range(-1, passes)
        for prompt, tokens_s in speed.items()
    )


def test_one_launch_keeps_its_interval():
    """A single launch is reported as measured."""
    assert pooled([figures(100, 3)]) == Interval(100, 97, 103)


def test_launches_that_agree_narrow_the_interval():
    """Four equal launches halve the interval of one."""
    assert pooled([figures(100, 4)] * 4) == pytest.approx((100, 98, 102))


def test_launches_that_disagree_widen_the_interval():
    """The spread between launches counts where it is more than what each saw of itself."""
    found = pooled([figures(90, 0.1), figures(110, 0.1)])
    assert found.value == 100
    assert found.low == pytest.approx(100 - 1.96 * 10)


def test_ratio_of_intervals_by_hand():
    """Errors add in squares on the log scale."""
    found = ratio_of_intervals(Interval(200, 200 / 1.1, 200 * 1.1), Interval(100, 100 / 1.1, 100 * 1.1))
    width = math.exp(math.sqrt(2) * math.log(1.1))
    assert found == pytest.approx((2, 2 / width, 2 * width))


def test_ratio_with_an_interval_down_to_zero_shows_nothing():
    """A baseline that may be zero has no upper end, one that may be anything no lower."""
    found = ratio_of_intervals(Interval(10, 0, 20), Interval(10, 0, 20))
    assert found.low == 0
    assert found.high > 1e100


def test_ratio_pairs_prompts_where_requests_are_kept():
    """Prompts of very different speed cancel: the interval is far narrower than the launches' own."""
    speed = {"a": 10.0, "b": 100.0, "c": 1000.0}
    sides = [
        trial(0, 1.0, 0.9, outcome=Completed(measurements=(figures(1, 0.9),), requests=requests(chosen)))
        for chosen in ({name: 2 * value for name, value in speed.items()}, speed)
    ]
    found = ratio(sides[:1], sides[1:], 1)
    assert found.value == pytest.approx(2)
    assert 1.9 < found.low < 2 < found.high < 2.1


def test_ratio_falls_back_on_intervals():
    """Without requests, or with a single pass, the launches' intervals decide."""
    expected = ratio_of_intervals(Interval(200, 199, 201), Interval(100, 99, 101))
    assert ratio([trial(0, 200.0)], [plain(1, 100.0)], 1) == expected
    one_pass = [
        record.model_copy(update={"outcome": record.outcome.model_copy(update={"requests": requests({"a": 1.0}, 1)})})
        for record in (trial(0, 200.0), plain(1, 100.0))
    ]
    assert ratio(one_pass[:1], one_pass[1:], 1) == expected


def test_leaderboard_pools_by_key_and_puts_the_fastest_first():
    """Launches with one key are one row; broken constraints and failures come below whatever their speed."""
    records = [
        plain(0, 100.0),
        trial(1, 120.0, speedup={1: 1.2}),
        trial(2, 130.0, kind="confirm", speedup={1: 1.3}),
        trial(3, 500.0, key="slow tails", violations=("itl_p95_ms 50 > 40",)),
        trial(4, None, key="broken"),
    ]
    rows = leaderboard(records, 1)
    assert [(row.key, row.status, row.numbers) for row in rows] == [
        ("k", "completed", (1, 2)),
        ("b", "completed", (0,)),
        ("slow tails", "infeasible", (3,)),
        ("broken", "failed", (4,)),
    ]
    assert (rows[0].throughput, rows[0].speedup, rows[0].accept_len, rows[0].kind) == (125, 1.25, 3.0, "confirm")
    assert [row.reason for row in rows] == ["", "", "itl_p95_ms 50 > 40", "oom"]


def test_a_failed_launch_beside_good_ones_is_not_averaged_in():
    """A point that failed once keeps the figures of its other launches, and why it failed."""
    (row,) = leaderboard([trial(0, None), trial(1, 120.0)], 1)
    assert (row.throughput, row.measured, row.reason) == (120, 1, "oom")


def test_the_winner_is_searched_and_keeps_the_constraints():
    """Neither plain decoding nor a point that breaks a constraint wins; nothing wins where nothing was measured."""
    records = [plain(0, 300.0), trial(1, 200.0, key="x", violations=("v",)), trial(2, 100.0), trial(3, 90.0, key="y")]
    assert winner(records, 1).key == "k"
    assert winner(records, 8) is None
    assert winner(records[:2], 1) is None


def test_gain_is_taken_node_by_node():
    """A fast node that only ran the tuned side, or a slow one that only ran the other, moves nothing."""
    records = [
        plain(0, 100.0, node="slow"),
        trial(1, 150.0, node="slow"),
        plain(2, 1000.0, node="fast"),
        trial(3, 1500.0, node="fast"),
        trial(4, 9999.0, node="alone"),
        plain(5, 1.0, node="other"),
    ]
    (interval, same) = gain(records, winner(records, 1), 1)
    assert interval.value == pytest.approx(1.5)
    assert 1.45 < interval.low < interval.high < 1.55
    assert same


def test_gain_prefers_plain_decoding_under_the_same_settings():
    """NCCL settings speed plain decoding up too: its launch under them is the one to compare with."""
    config = Config(model="m", speculative=TUNED, env={"NCCL_PROTO": "LL"})
    tuned = trial(2, 150.0, config=config)
    tuned_plain = plain(1, 125.0, key="b2", config=Config(model="m", env={"NCCL_PROTO": "LL"}))
    found, same = gain([plain(0, 100.0), tuned_plain, tuned], winner([tuned], 1), 1)
    assert (found.value, same) == (pytest.approx(1.2), True)
    found, same = gain([plain(0, 100.0), tuned], winner([tuned], 1), 1)
    assert (found.value, same) == (pytest.approx(1.5), False)


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        (
            [plain(0, 100.0), trial(1, 138.0), trial(2, 138.0)],
            "EAGLE3 3/4/12 is 1.38x (1.36–1.40) of plain decoding on the same node",
        ),
        (
            [plain(0, 100.0), trial(1, 138.0)],
            "EAGLE3 3/4/12 is 1.38x (1.36–1.40) of plain decoding on the same node; launched once, so not confirmed",
        ),
        (
            [plain(0, 100.0, 10.0), trial(1, 105.0, 10.0), trial(2, 105.0, 10.0)],
            "no difference shown: the best, EAGLE3 3/4/12, is 1.05x (0.93–1.19) of plain decoding on the same node",
        ),
        (
            [plain(0, 100.0), trial(1, 60.0), trial(2, 60.0)],
            f"plain decoding is faster: the best, EAGLE3 3/4/12, is 0.60x (0.59–0.61) {OF_PLAIN}",
        ),
        ([plain(0, 100.0), trial(1, None), trial(2, None)], "no trial completed (2 launched; most often: oom)"),
        ([], "no trial completed (0 launched)"),
        ([trial(0, 9.0, violations=("v",))], "no trial kept the constraints"),
        (
            [plain(0, 100.0, node="other"), trial(1, 138.0), trial(2, 138.0)],
            "EAGLE3 3/4/12 is the fastest at 138.0 tok/s, but no node measured plain decoding beside it",
        ),
    ],
)
def test_the_verdict_is_no_surer_than_the_figures(records, sentence):
    """Each state of a study has its sentence."""
    assert verdict(records, 1) == sentence


def test_the_verdict_tells_other_settings_and_other_concurrency():
    """Plain decoding under other settings, and a concurrency that nobody measured, are said."""
    config = Config(model="m", speculative=TUNED, env={"NCCL_PROTO": "LL"})
    text = verdict([plain(0, 100.0), trial(1, 138.0, config=config), trial(2, 138.0, config=config)], 1)
    assert text.endswith("; plain decoding was not measured under the same environment and arguments")
    assert verdict([trial(1, 138.0)], 8) == "no trial was measured at concurrency 8"


def test_the_ratio_can_be_swapped():
    """Another way to compare launches decides the sentence."""
    records = [plain(0, 100.0), trial(1, 138.0), trial(2, 138.0)]
    assert verdict(records, 1, lambda *_: Interval(1.0, 0.5, 2.0)).startswith("no difference shown")


def test_label_of_plain_decoding():
    """A configuration without speculation is called what it is."""
    assert label(Config(model="m")) == "plain decoding"


NASTY = [
    "a b",
    "it's",
    'say "hi"',
    "$HOME `id` $(id)",
    "two\nlines",
    "back\\slash",
    "*?[a]",
    "-",
    "",
    "ünï",
    "#no",
    "~/x",
]
SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], {k: os.environ.get(k) for k in ('NCCL_A', 'B_2')}]))"


def nasty(first: str, second: str) -> Config:
    """A configuration full of what a shell could take for its own, whose launcher shows what it was given."""
    return Config(
        model=first,
        speculative=TUNED.model_copy(update={"draft": second}),
        args={"tp-size": 8, "list": [1, second], "flag": True},
        tuned_args={"chat-template": first},
        env={"NCCL_A": first, "B_2": second},
        launcher=(sys.executable, "-c", SHOW),
    )


def shell(script: str, *words: str) -> list:
    """What the launcher saw when /bin/sh ran a script."""
    ran = subprocess.run(["/bin/sh", "-c", script, *words], capture_output=True, check=True, text=True)
    return json.loads(ran.stdout)


@pytest.mark.parametrize(("first", "second"), list(zip(NASTY, reversed(NASTY), strict=True)))
def test_a_real_shell_gives_back_argv_and_env(tmp_path, first, second):
    """The command pasted into /bin/sh, and the env file sourced by it, start exactly the configuration."""
    config = nasty(first, second)
    expected = [config.argv(), config.env]
    assert shell(export(config, "command")) == expected
    path = tmp_path / "launch.env"
    path.write_text(export(config, "env"), encoding="utf-8")
    assert shell('set -a; . "$0"; set +a; eval "exec $RAYTUNE_EAGLE_ARGS"', str(path)) == expected


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@given(first=TEXT, second=TEXT)
def test_every_export_is_parsed_back(first, second):
    """Whatever the texts, each form holds the same words and environment."""
    config = nasty(first, second)
    words, env = [*config.launcher, *config.argv()], config.env
    assert json.loads(export(config, "json")) == {"argv": words, "env": env}
    assert shlex.split(export(config, "command")) == [*(f"{name}={value}" for name, value in env.items()), *words]
    lines = dict(word.split("=", 1) for word in shlex.split(export(config, "env")))
    assert shlex.split(lines.pop("RAYTUNE_EAGLE_ARGS")) == words
    assert lines == env


def test_a_command_is_one_line():
    """Without line breaks in its values the command is a single line."""
    assert export(nasty("a b", "c"), "command").count("\n") == 1


@pytest.mark.parametrize("form", ["command", "env"])
def test_a_name_that_no_shell_takes_is_refused(form):
    """An environment name that a shell could not assign is told, and JSON holds it all the same."""
    config = Config(model="m", env={"A-B": "1"})
    with pytest.raises(SpecError, match="'A-B' is no name for a shell variable; use json"):
        export(config, form)
    assert json.loads(export(config, "json"))["env"] == {"A-B": "1"}


def test_an_unknown_form_is_refused():
    """The forms are named when another is asked for."""
    with pytest.raises(SpecError, match="'yaml' is not one of command, env, json"):
        export(Config(model="m"), "yaml")
