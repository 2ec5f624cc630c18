"""What a machine does beside serving: other processes' CPU, the clocks and heat of its GPUs."""

from __future__ import annotations

import time

import psutil

from raytune_eagle.engines.gpus import Gpu, Gpus
from raytune_eagle.engines.watch import Processes
from raytune_eagle.errors import NodeError
from raytune_eagle.model.measurement import Vitals

GPUS_EACH_S = 5.0


class Pulse:
    """Takes the vitals of this machine again and again; each time since the time before."""

    def __init__(self, processes: Processes, gpus: Gpus | None) -> None:
        self._processes, self._gpus, self._client = processes, gpus, psutil.Process()
        self._before, self._looked_at = self._clocks(), 0.0

    def take(self) -> Vitals:
        """What was going on since the last call."""
        now, before = self._clocks(), self._before
        self._before = now
        seconds, busy, ours = (new - old for new, old in zip(now, before, strict=True))
        gpus = self._look(now[0])
        return Vitals(
            other_cores=max(0.0, busy - ours) / seconds if seconds > 0 else None,
            clock_mhz=min((gpu.clock_mhz for gpu in gpus if gpu.clock_mhz), default=None),
            temperature_c=max((gpu.temperature_c for gpu in gpus if gpu.temperature_c), default=None),
        )

    def _look(self, now: float) -> list[Gpu]:
        """The GPUs, if it is time to look again: each look starts the driver's library anew."""
        if self._gpus is None or now - self._looked_at < GPUS_EACH_S:
            return []
        self._looked_at = now
        try:
            return self._gpus.look()
        except NodeError:  # the engine tells of a driver that fails
            return []

    def _clocks(self) -> tuple[float, float, float]:
        """Now, CPU seconds of the whole machine, and those of server and client."""
        total, client = psutil.cpu_times(), self._client.cpu_times()
        idle = total.idle + getattr(total, "iowait", 0.0)
        guests = getattr(total, "guest", 0.0) + getattr(total, "guest_nice", 0.0)  # counted in user already
        return time.monotonic(), sum(total) - idle - guests, self._processes.cpu_s() + client.user + client.system
