"""SGLang's own switch between numbers of draft steps, set from what was measured at each concurrency.

The file of ``--speculative-adaptive-config`` maps batch sizes to the numbers of steps that the server may take there; a
batch is served by the largest entry that is not above it (adaptive_spec_params.py of SGLang 0.5.20). It works with
eagle_topk 1 only; 0 steps is plain decoding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from raytune_eagle.errors import SpecError
from raytune_eagle.model.config import Config
from raytune_eagle.model.trial import TrialRecord
from raytune_eagle.ranking import Row, leaderboard


class Adaptive(NamedTuple):
    """The text of the file, and a launch that uses it (``FILE`` stands for its path)."""

    text: str
    command: str


def adaptive(records: Sequence[TrialRecord], concurrencies: Sequence[int]) -> Adaptive:
    """Steps of the fastest chain (eagle_topk 1), or 0 where plain decoding is faster, for each concurrency.

    One server has one environment and one set of flags, so the best over all concurrencies (geometric mean) is taken.

    Raises:
        SpecError: no chain was measured at every concurrency, or plain decoding is fastest at each.
    """
    boards = {level: _chains(leaderboard(records, level)) for level in concurrencies}
    settings = [_settings(row.config) for row in next(iter(boards.values()), [])]
    whole = [each for each in settings if all(_fastest(board, each) for board in boards.values())]
    if not whole:
        raise SpecError(
            "--export adaptive: no launch with eagle_topk 1 was measured at every concurrency of this study"
        )
    best = max(whole, key=lambda each: _mean(boards, each))
    chosen = {level: _fastest(board, best) for level, board in boards.items()}
    steps = {level: _steps(row) for level, row in chosen.items() if row}
    if not any(steps.values()):
        raise SpecError("--export adaptive: plain decoding is fastest at every concurrency: launch without speculation")
    text = json.dumps({str(level): {"candidate_steps": [count]} for level, count in sorted(steps.items())}, indent=2)
    return Adaptive(text + "\n", _command([row.config for row in chosen.values() if row]))


def _chains(rows: Sequence[Row]) -> list[Row]:
    """Measured points of one branch, plain decoding among them."""
    return [
        row
        for row in rows
        if row.status == "completed" and (row.config.speculative is None or row.config.speculative.eagle_topk == 1)
    ]


def _settings(config: Config) -> str:
    flags = {**config.args, **config.tuned_args}
    return json.dumps([sorted(config.env.items()), sorted((name, str(value)) for name, value in flags.items())])


def _fastest(rows: Sequence[Row], settings: str) -> Row | None:
    """Fastest under these settings; None where no chain was measured under them."""
    alike = [row for row in rows if _settings(row.config) == settings]
    return alike[0] if any(row.config.speculative for row in alike) else None


def _mean(boards: dict[int, list[Row]], settings: str) -> float:
    found = [row.throughput for board in boards.values() if (row := _fastest(board, settings)) and row.throughput]
    return math.fsum(math.log(each) for each in found)


def _steps(row: Row) -> int:
    return row.config.speculative.num_steps if row.config.speculative else 0


def _command(configs: Sequence[Config]) -> str:
    chain = next(config for config in configs if config.speculative)
    flags = {**chain.tuned_args, "speculative-adaptive": True, "speculative-adaptive-config": "FILE"}
    return chain.model_copy(update={"tuned_args": flags}).command()
