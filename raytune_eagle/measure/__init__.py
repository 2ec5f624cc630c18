"""Drive a server that is ready, and say how fast it serves a workload and how sure that is.

The load is closed-loop without a break: `concurrency` streams, each sending its next prompt when an answer is whole;
the warm-up runs into the first pass and each pass into the next, every pass over all prompts in a new seeded order.
The remaining requests of the last pass are kept company by fillers (the prompts that would come next) until the last
of them is whole; what is under way then is broken off at the last concurrency, and before another one waited for as
long as the slowest answer took. So every counted request sees a full server from its first to its last token, and
there is no tail of fewer streams to bias anything: throughput is `concurrency` × tokens / stream seconds (see
`raytune_eagle.statistics`), the client's own time between two requests left out.

From the second pass on a server with a prefix cache knows the prompts: to include prefill, launch it with
``disable-radix-cache``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from time import perf_counter
from typing import Any, NamedTuple, NoReturn

import uvloop

from raytune_eagle.errors import BenchError, SpecError, TrialError
from raytune_eagle.measure.client import Client
from raytune_eagle.measure.http_stream import Connections
from raytune_eagle.measure.passes import Early, Judge, Level
from raytune_eagle.measure.wire import Wire, wire_of
from raytune_eagle.model import Value
from raytune_eagle.model.measurement import Measurement, Request, Sample, Vitals
from raytune_eagle.model.workload import Workload
from raytune_eagle.ports import Progress, Server

_CHECK_S = 0.5  # how often the server is asked whether it lives
_DYING_S = 1.0  # how long a server may take to be seen dead after it broke its connections


class MeasureResult(Value):
    """A bench that came to its end.

    Attributes:
        measurements: one per concurrency, in the workload's order.
        requests: every request sent; `repeat` is -1 for the warm-up and -2 for fillers, which no figure counts.
        samples: what the machine did during the passes, twice a second.
        warmup_s, bench_s: seconds until the warm-up's last answer, and the rest, over all concurrencies.
        hopeless: why it was ended before all was measured; empty where it was not.
    """

    measurements: tuple[Measurement, ...]
    requests: tuple[Request, ...]
    samples: tuple[Sample, ...]
    warmup_s: float
    bench_s: float
    hopeless: str = ""


class InterruptedBench(KeyboardInterrupt):
    """Ctrl-C in a bench; `kept` has its figures so far, of whole passes alone (perhaps none)."""

    def __init__(self, kept: MeasureResult) -> None:
        super().__init__()
        self.kept = kept


def measure(
    server: Server,
    workload: Workload,
    progress: Progress,
    *,
    wire: Wire | None = None,
    early: Early = lambda _: None,
    judge: Judge = lambda _: "",
) -> MeasureResult:
    """Measure `server` at each concurrency of `workload`, asked in the way of `wire` (by default SGLang's).

    Passes stop when the 95 % interval of throughput is within `precision` of it after `min_passes`, or at
    `max_passes` (then `stable` is False). `progress` hears of each pass. `server.check()` is called twice a second in
    a thread, so that a dead server ends the bench within 2 s. `early` is shown the rows of each warm-up;
    `judge` those of each concurrency after each answer, and what it says ends the bench.

    Raises:
        TrialError: `early` raised it.
        BenchError: as `server.check()` classified it, or ``requests_failed`` when more requests failed than
            `max_failed_share` allows, of those sent or of the shortest possible bench, whichever is more. Its
            attribute `requests` holds the rows so far, those under way included.
        SpecError: the workload has no prompts.
        InterruptedBench: on Ctrl-C.
    """
    if not workload.prompts:
        raise SpecError("workload.prompts: no prompts to send; give at least one")
    bench = _Bench(server, Plan(workload, wire or wire_of(workload), early, judge), progress)
    try:
        uvloop.run(bench.run())
    except KeyboardInterrupt as exc:
        bench.cut_short()
        raise InterruptedBench(bench.result()) from exc
    return bench.result()


class Plan(NamedTuple):
    """What is asked of a bench; see `measure`."""

    workload: Workload
    wire: Wire
    early: Early
    judge: Judge


class _Bench:
    """All concurrencies of one workload on one server."""

    def __init__(self, server: Server, plan: Plan, progress: Progress) -> None:
        self._server, self._plan, self._workload, self._progress = server, plan, plan.workload, progress
        self._hopeless = ""
        self._under_way: Level | None = None
        self._measurements: list[Measurement] = []
        self._rows: list[Request] = []
        self._samples: list[Sample] = []
        self._warmup_s = self._bench_s = 0.0

    async def run(self) -> None:
        asyncio.get_running_loop().set_exception_handler(_interrupted)
        for concurrency in self._workload.concurrency:
            await self._level(concurrency)
            if self._hopeless:
                break

    def cut_short(self) -> None:
        """Take the whole passes of the concurrency that is under way, where there are any."""
        if self._under_way and self._under_way.cut_short():
            self._close(self._under_way)

    def result(self) -> MeasureResult:
        return MeasureResult(
            measurements=tuple(self._measurements),
            requests=tuple(self._rows),
            samples=tuple(self._samples),
            warmup_s=self._warmup_s,
            bench_s=self._bench_s,
            hopeless=self._hopeless,
        )

    async def _level(self, concurrency: int) -> None:
        level = Level(self._workload, concurrency, self._progress, self._plan.early, self._plan.judge)
        self._under_way, began = level, perf_counter()
        try:
            await self._drive(level)
            self._close(level)
        except TrialError as error:
            error.requests = (*self._rows, *level.rows())
            raise
        self._bench_s += perf_counter() - began - level.warmup_s

    def _close(self, level: Level) -> None:
        self._measurements.append(level.measurement())
        self._under_way = None
        self._rows += level.rows()
        self._samples += level.samples
        self._warmup_s += level.warmup_s
        self._hopeless = level.hopeless

    async def _drive(self, level: Level) -> None:
        """Run the streams, with an eye on the server; when one of them raises, all end."""
        # New connections for each concurrency: one that idles for seconds may be closed just as it is used again.
        with closing(Connections(self._server.url, self._server.headers)) as connections:
            client = Client(connections, self._plan.wire, self._workload)
            streams = [asyncio.ensure_future(level.work(client)) for _ in range(level.concurrency)]
            watch = asyncio.ensure_future(self._watch(level))
            tasks = [*streams, watch]
            try:
                await _first_end(level, streams, watch)
                if level.concurrency != self._workload.concurrency[-1] and not level.hopeless:
                    await asyncio.wait(streams, timeout=level.longest_s)
            except BenchError as error:
                await _cancel(tasks)
                await self._blame(error)
            finally:
                await _cancel(tasks)

    async def _watch(self, level: Level) -> None:
        while True:
            level.feel(await asyncio.to_thread(self._look))
            await asyncio.sleep(_CHECK_S)

    def _look(self) -> Vitals:
        self._server.check()
        return self._server.vitals()

    async def _blame(self, error: BenchError) -> NoReturn:
        """Raise what the server says of itself if it is dying (connections break before a process ends), or `error`."""
        end = perf_counter() + _DYING_S
        while error.failure_class == "requests_failed" and perf_counter() < end:
            await asyncio.to_thread(self._server.check)
            await asyncio.sleep(0.1)
        raise error


async def _first_end(level: Level, streams: Sequence[asyncio.Future[None]], watch: asyncio.Future[None]) -> None:
    """Wait until all is decided; raises what the first of the streams, or the watch, raises."""
    over = asyncio.ensure_future(level.over.wait())
    running: set[asyncio.Future[Any]] = {*streams, watch, over}
    try:
        while not level.over.is_set():
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        over.cancel()


def _interrupted(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ctrl-C within a callback is told by who called us, and by nobody else."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)


async def _cancel(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
