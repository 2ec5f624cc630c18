"""The requests of one concurrency: which comes next, which passes are whole, when there are enough, and the figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from raytune_eagle.errors import BenchError
from raytune_eagle.figures import accept_len, best_second, token_gaps, weighted_percentile
from raytune_eagle.measure.client import Client, Stream
from raytune_eagle.model.measurement import Measurement, Request, Sample, Vitals
from raytune_eagle.model.trial import HOPELESS
from raytune_eagle.model.workload import Prompt, Workload
from raytune_eagle.ports import Progress
from raytune_eagle.statistics import Interval, throughput

Early = Callable[[Sequence[Request]], None]
"""Is shown the rows of a warm-up; raises a `TrialError` where the bench is not worth its time."""
Judge = Callable[[Sequence[Request]], str]
"""Is shown the counted rows of a concurrency after each answer; says why no more are needed, or nothing."""
WARM_UP = -1
FILLER = -2

_ERRORS_SHOWN = 3


class Level:
    """The requests of one concurrency: which comes next, which passes are whole, when to stop.

    Attributes:
        over: set once all is decided; what is under way then is filler.
    """

    def __init__(
        self,
        workload: Workload,
        concurrency: int,
        progress: Progress,
        early: Early = lambda _: None,
        judge: Judge = lambda _: "",
    ) -> None:
        self.concurrency, self._workload, self._progress = concurrency, workload, progress
        self._early, self._judged = early, judge
        self.hopeless = ""
        self._cut: set[int] = set()  # places of streams that were under way when it was found hopeless
        self.samples: list[Sample] = []
        self._streams: list[Stream] = []
        self._missing: dict[int, int] = {}  # pass -> answers that have not come yet
        self._queue = self._plan(np.random.default_rng([workload.seed, concurrency]))
        self._passes = 0
        self._decided: Interval | None = None
        self.over = asyncio.Event()
        self._failed = self._ended = 0
        self._warm = max(2 * concurrency, 4)
        self._whole: list[Request] = []  # counted rows of whole passes and of those under way

    def _plan(self, rng: np.random.Generator) -> Iterator[tuple[int, Prompt]]:
        """Warm-up, then pass after pass without end."""
        prompts = self._workload.prompts
        order = np.resize(rng.permutation(len(prompts)), self._warm)
        yield from ((WARM_UP, prompts[place]) for place in order)
        repeat = 0
        while True:
            yield from ((repeat, prompts[place]) for place in rng.permutation(len(prompts)))
            repeat += 1

    async def work(self, client: Client) -> None:
        """One of the streams: prompt after prompt until the level is decided. Raises `BenchError`."""
        while self._decided is None:
            repeat, prompt = next(self._queue)
            self._missing.setdefault(repeat, self._warm if repeat == WARM_UP else len(self._workload.prompts))
            stream = client.stream(prompt, self.concurrency, repeat)
            self._streams.append(stream)
            await client.send(stream)
            self._took(stream)

    def feel(self, vitals: Vitals) -> None:
        """Keep what the machine does during this pass."""
        self.samples.append(Sample(concurrency=self.concurrency, repeat=self._passes, vitals=vitals))

    def _took(self, stream: Stream) -> None:
        self._ended += 1
        self._missing[stream.repeat] -= 1
        if stream.error and self._decided is None:
            self._failed += 1
            self._check_failures()
        if stream.repeat == WARM_UP and not self._missing[WARM_UP]:
            self._early([warm.row(warm.sent) for warm in self._streams if warm.repeat == WARM_UP])
        if stream.repeat >= 0:
            self._whole.append(stream.row(self._streams[0].sent))
        while self._decided is None and self._missing.get(self._passes) == 0:
            self._passes += 1
            self._judge()
        if stream.repeat >= 0 and self._decided is None:
            self.hopeless = self._judged(self._whole)
            if self.hopeless:
                self._give_up()

    def _give_up(self) -> None:
        """Leave it at the whole passes, or at the answers so far of the first."""
        self._progress(HOPELESS, self.hopeless)
        if not self._passes:
            self._passes = 1
            self._cut = {place for place, one in enumerate(self._streams) if one.repeat == 0 and one.ended is None}
        self._decide(self._known())

    def cut_short(self) -> bool:
        """Leave it at the whole passes; False where there is none, or no token in them."""
        if self._decided is None and self._passes:
            self._decided = self._known()
        return bool(self._decided and self._decided.value)

    def _known(self) -> Interval:
        rows = [row for row in self._whole if row.repeat < self._passes]
        return throughput(rows, self.concurrency, self._workload.seed)

    def _decide(self, known: Interval) -> None:
        self._decided = known
        self.over.set()

    @property
    def longest_s(self) -> float:
        """Seconds that the slowest answer took; what is still under way then will hardly end by itself."""
        return max((stream.latency_s for stream in self._streams if stream.ended is not None), default=0.0)

    def _check_failures(self) -> None:
        least = self._warm + self._workload.min_passes * len(self._workload.prompts)
        if self._failed <= self._workload.max_failed_share * max(least, self._ended):
            return
        errors = list(dict.fromkeys(stream.error for stream in self._streams if stream.error))
        shown = "; ".join(errors[:_ERRORS_SHOWN]) + (" …" if len(errors) > _ERRORS_SHOWN else "")
        raise BenchError(
            "requests_failed",
            f"{self._failed} of {self._ended} requests failed at concurrency {self.concurrency} "
            f"(at most {self._workload.max_failed_share:.1%} may): {shown}",
        )

    def _judge(self) -> None:
        """A pass is whole: tell of it, and decide whether it was the last."""
        known = self._known()
        sure = f" ±{known.half_width:.1%}" if self._passes > 1 else ""
        self._progress(
            "pass",
            f"{self._passes} of at most {self._workload.max_passes} at concurrency {self.concurrency}: "
            f"{known.value:.1f} tok/s{sure}",
        )
        precise = self._passes >= self._workload.min_passes and known.half_width <= self._workload.precision
        if precise or self._passes >= self._workload.max_passes:
            self._decide(known)

    @property
    def warmup_s(self) -> float:
        """Seconds from the first request to the last answer of the warm-up."""
        ends = [stream.ended for stream in self._streams if stream.repeat == WARM_UP and stream.ended is not None]
        return max(ends) - self._streams[0].sent if ends else 0.0

    def rows(self) -> list[Request]:
        """A row for each request sent, in the order of sending; those of undecided passes are fillers."""
        if not self._streams:
            return []
        epoch = self._streams[0].sent
        rows = []
        for place, stream in enumerate(self._streams):
            row = stream.row(epoch)
            filler = self._decided is not None and (row.repeat >= self._passes or place in self._cut)
            rows.append(row.model_copy(update={"repeat": FILLER}) if filler else row)
        return rows

    def measurement(self) -> Measurement:
        """The figures of the passes; only when the level is decided. Raises `BenchError` where no token came."""
        known = self._decided or Interval(0.0, 0.0, 0.0)
        if not known.value:
            raise BenchError("requests_failed", f"not one token came at concurrency {self.concurrency}")
        streams = [stream for place, stream in enumerate(self._streams) if place not in self._cut]
        sent = [stream for stream in streams if 0 <= stream.repeat < self._passes]
        return summarise(sent, known, self._workload.precision)


def summarise(streams: Sequence[Stream], known: Interval, precision: float) -> Measurement:
    """Figures of whole passes at one concurrency."""
    good = [stream for stream in streams if stream.error is None]
    rows = [stream.row(0.0) for stream in good]
    tokens, rounds = sum(row.completion_tokens for row in rows), sum(row.verify_rounds or 0 for row in rows)
    seconds = sum(row.latency_s for row in rows)
    drafts = np.array([stream.drafts() for stream in good]).reshape(-1, 2).sum(0)
    firsts = np.array([row.ttft_s for row in rows if row.ttft_s is not None])
    ttft = weighted_percentile(firsts, np.ones(len(firsts)), (50, 95)) * 1000
    itl = _itl_ms(good)
    return Measurement(
        concurrency=streams[0].concurrency,
        passes=len({stream.repeat for stream in streams}),
        output_throughput=known.value,
        ci_low=known.low,
        ci_high=known.high,
        stable=known.half_width <= precision,
        completion_tokens=tokens,
        accept_len=accept_len(rows),
        accept_rate=float(drafts[0] / drafts[1]) if drafts[1] else None,
        verify_rounds=rounds or None,
        cycle_ms=1000 * seconds / (rounds or tokens) if tokens else 0.0,
        burst_throughput=_burst(good),
        ttft_p50_ms=float(ttft[0]),
        ttft_p95_ms=float(ttft[1]),
        itl_p50_ms=float(itl[0]),
        itl_p95_ms=float(itl[1]),
        failed_share=1 - len(good) / len(streams),
    )


def _itl_ms(streams: Sequence[Stream]) -> NDArray[np.float64]:
    """Median and 95th percentile over all tokens but each stream's first chunk, in milliseconds."""
    parts = [token_gaps(stream.times, stream.counts) for stream in streams]
    if not parts:
        return np.zeros(2)
    gaps, weights = (np.concatenate(column) for column in zip(*parts, strict=True))
    return weighted_percentile(gaps, weights, (50, 95)) * 1000


def _burst(streams: Sequence[Stream]) -> float:
    """Tokens in the best second over all streams."""
    if not streams:
        return 0.0
    tokens = [np.diff(np.asarray(stream.counts, dtype=float), prepend=0) for stream in streams]
    return best_second(np.concatenate([stream.times for stream in streams]), np.concatenate(tokens))
