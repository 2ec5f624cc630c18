"""All-reduce times under NCCL's settings, measured apart from any launch: what they say of the cycle before one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raytune_eagle.samplers.candidates import Params
from raytune_eagle.samplers.kernels import Array

_SHARE = 0.3
"""Share of a cycle that all-reduces may take; the launches say how much of it is true."""
_RIDGE = 0.3
"""Observations of no effect that each value of a variable is estimated with."""


class Probed:
    """What was timed, a row per setting.

    Args:
        times: settings (of all NCCL variables that are searched) and how long all-reduces took under them, in any
            unit; None where they failed or hung. At least one succeeded.
    """

    def __init__(self, times: Sequence[tuple[Params, float | None]]) -> None:
        self._names = tuple(times[0][0])
        self._logs = {self._key(setting): math.log(time) if time else None for setting, time in times}
        good = [(setting, math.log(time)) for setting, time in times if time]
        self._middle = float(np.median([log for _, log in good]))
        self._worth = self._effects(good)

    def slowness(self, points: Sequence[Mapping[str, Any]]) -> Array:
        """By how much the log of the cycle should differ from that under a middling setting, a value for each point.

        What was not timed is taken to be as slow as its values are in the mean of what was.
        """
        logs = np.array([self._log(point) for point in points])
        return np.asarray(np.log1p(_SHARE * np.expm1(logs)))

    def failed(self, point: Mapping[str, Any]) -> bool:
        """Whether its all-reduces failed or hung."""
        return self._logs.get(self._key(point), 0.0) is None

    def _key(self, point: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(point.get(name) for name in self._names)

    def _log(self, point: Mapping[str, Any]) -> float:
        known = self._logs.get(self._key(point))
        if known is not None:
            return known - self._middle
        return math.fsum(self._worth.get((name, point.get(name)), 0.0) for name in self._names)

    def _effects(self, good: Sequence[tuple[Params, float]]) -> dict[tuple[str, Any], float]:
        """What each value of each variable adds to the log of the time, by least squares with a ridge."""
        values = list(dict.fromkeys((name, setting[name]) for setting, _ in good for name in self._names))
        rows = [[float(setting[name] == value) for name, value in values] for setting, _ in good]
        design, logs = np.array(rows), np.array([log for _, log in good]) - self._middle
        found = np.linalg.solve(design.T @ design + _RIDGE * np.eye(len(values)), design.T @ logs)
        return dict(zip(values, found.tolist(), strict=True))
