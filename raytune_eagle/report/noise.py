"""What launches of one configuration differ by, which no pass within a launch shows: told from a study's records."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from raytune_eagle.figures import Array
from raytune_eagle.model.measurement import Measurement
from raytune_eagle.model.trial import TrialRecord
from raytune_eagle.ranking import confirming, measurement
from raytune_eagle.statistics import LaunchNoise, degrees_of_freedom, launch_noise, log_variance

Rounds = dict[tuple[str, int], dict[str, Measurement]]
"""By node and number: the first launch of each point there is of round 0, the second of round 1."""


def between_launches(records: Sequence[TrialRecord], concurrency: int) -> LaunchNoise:
    """What launches differ by.

    From the rounds of a confirmation: the n-th launch of each point on a node. Where they are none or a single pair,
    also from how points came out in the search and then beside each other again, so that a winner that came out
    otherwise the second time is no sure one. Without either from baselines, node by node: those lie hours apart, and
    what the hours did is in them too.
    """
    again = _rounds(confirming(records), "confirm", concurrency)
    nodes = sorted({record.node for record in records})
    tables = [_table(list(again.values()))]
    if _freedom(tables) > 1:
        return launch_noise(tables)
    tables += [_table(_twice(records, again, node, concurrency)) for node in nodes]
    if not _freedom(tables):
        plain = _rounds(records, "baseline", concurrency)
        tables = [_table([found for (node, _), found in plain.items() if node == each]) for each in nodes]
    return launch_noise(tables, alike=False)


def _freedom(tables: Sequence[tuple[Array, Array]]) -> int:
    return sum(degrees_of_freedom(logs) for logs, _ in tables)


def _rounds(records: Sequence[TrialRecord], kind: str, concurrency: int) -> Rounds:
    rounds: Rounds = defaultdict(dict)
    launched = Counter[tuple[str, str]]()
    for record in records:
        if record.kind == kind and (figures := measurement(record, concurrency)):
            rounds[record.node, launched[record.node, record.key]][record.key] = figures
            launched[record.node, record.key] += 1
    return rounds


def _twice(records: Sequence[TrialRecord], again: Rounds, node: str, concurrency: int) -> list[dict[str, Measurement]]:
    """What a node launched in the search, the last of each point, and what it launched of that to confirm it."""
    confirmed = again.get((node, 0), {})
    searched = {
        record.key: figures
        for record in records
        if record.kind != "confirm" and record.node == node and record.status == "completed"
        if (figures := measurement(record, concurrency))
    }
    both = searched.keys() & confirmed.keys()
    return [{key: found[key] for key in sorted(both)} for found in (searched, confirmed)] if len(both) > 1 else []


def _table(rounds: Sequence[dict[str, Measurement]]) -> tuple[Array, Array]:
    """Logs of throughput and their variances, of the points of the fullest round over the rounds that have them all."""
    points = max((found.keys() for found in rounds), key=len, default=())
    full = [found for found in rounds if found.keys() >= set(points)]
    shape = (len(points), len(full))
    logs = [[math.log(found[point].output_throughput) for found in full] for point in points]
    variances = [[log_variance(found[point]) for found in full] for point in points]
    return np.array(logs).reshape(shape), np.array(variances).reshape(shape)
