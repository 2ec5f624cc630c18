"""A job's answer from a cost model: requests as the client would have seen them, and the figures that follow."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from raytune_eagle.figures import accept_len
from raytune_eagle.measure.early_end import Judge
from raytune_eagle.model.config import Config
from raytune_eagle.model.measurement import Gate, Measurement, Request
from raytune_eagle.model.trial import HOPELESS, Completed, Failed, Job, Phases
from raytune_eagle.model.workload import Prompt, Workload
from raytune_eagle.nodes.cost_model import CostModel, Shape
from raytune_eagle.nodes.simulated import Answer
from raytune_eagle.statistics import throughput

_NO_GRAPHS = {"disable-cuda-graph": True, "cuda-graph-backend-decode": "disabled"}
_PROMPT_TOKENS = 4
"""Characters per token of a prompt, about."""


class _Rate(NamedTuple):
    """What a prompt of one category meets: milliseconds per round (per token without speculation), and its chances."""

    round_ms: float
    accepts: np.ndarray | None


class CostModelNodes:
    """Answers jobs as `model` says; the same job on the same node always has the same answer.

    Args:
        model: what launches cost and accept.
        seed: of the noise.
    """

    def __init__(self, model: CostModel, seed: int = 0) -> None:
        self._model, self._seed = model, seed

    def __call__(self, node: str, job: Job) -> Answer:
        """See `raytune_eagle.nodes.simulated.Response`."""
        night, shape = self._model.night, _shape(job.config)
        tokens = shape.tokens if shape else 1
        start_s = night.launch_s + night.capture_s * tokens * _graphs(job.config)
        if tokens > night.most_tokens:
            return Answer(_out_of_memory(start_s, tokens), start_s)
        rng = np.random.default_rng(self._words(node, job))
        measured, requests, warmup_s, bench_s, why = self._bench(job, rng)
        gates = (Gate(name=HOPELESS, verdict="warning", detail=why),) if why else ()
        phases = Phases(launch_s=start_s, ready_s=2.0, warmup_s=warmup_s, bench_s=bench_s, teardown_s=night.teardown_s)
        outcome = Completed(measurements=measured, requests=requests, gates=gates, phases=phases)
        return Answer(outcome, start_s + 2.0 + warmup_s + bench_s + night.teardown_s)

    def _words(self, node: str, job: Job) -> list[int]:
        text = f"{self._seed} {node} {job.number} {job.config.uid}"
        return list(hashlib.blake2s(text.encode(), digest_size=16).digest())

    def _bench(
        self, job: Job, rng: np.random.Generator
    ) -> tuple[tuple[Measurement, ...], tuple[Request, ...], float, float, str]:
        slower = float(np.exp(rng.normal(0, self._model.night.cycle_noise)))
        measured, rows, bench_s, warmup_s = [], list[Request](), 0.0, 0.0
        judge, why = Judge(job.to_beat), ""
        for streams in job.workload.concurrency:
            level, why = self._level(job, streams, slower, judge, rng)
            measured.append(summary(level, streams, job.workload, _proposed(job.config)))
            rows += level
            bench_s += sum(row.latency_s for row in level) / streams
            warmup_s += max(row.latency_s for row in level) * max(2, 4 / streams)
            if why:
                break
        return tuple(measured), tuple(rows), warmup_s, bench_s, why

    def _level(
        self, job: Job, streams: int, slower: float, judge: Judge, rng: np.random.Generator
    ) -> tuple[list[Request], str]:
        """Passes until the throughput is known to the precision asked for, or `judge` says why no more are needed."""
        rates = {category: self._rate(job.config, category, streams) for category in _categories(job.workload)}
        rows: list[Request] = []
        for repeat in range(job.workload.max_passes):
            for row in self._pass(job.workload, repeat, streams, rates, slower, rng):
                rows.append(row)
                if why := judge(rows):
                    return rows, why
            enough = repeat + 1 >= job.workload.min_passes
            if enough and throughput(rows, streams, job.workload.seed).half_width <= job.workload.precision:
                break
        return rows, ""

    def _rate(self, config: Config, category: str, streams: int) -> _Rate:
        shape, machine, graphs = _shape(config), self._model.machine, _graphs(config)
        if shape is None or config.speculative is None:
            return _Rate(machine.plain_ms(config.env, streams, graphs=graphs), None)
        draft = self._model.draft(config.speculative.draft)
        reached = np.array([1.0, *draft.reached(shape, category), 0.0])
        return _Rate(machine.cycle_ms(draft, shape, config.env, streams, graphs=graphs), -np.diff(reached))

    def _pass(
        self,
        workload: Workload,
        repeat: int,
        streams: int,
        rates: dict[str, _Rate],
        slower: float,
        rng: np.random.Generator,
    ) -> Iterator[Request]:
        clock = 0.0
        for place in rng.permutation(len(workload.prompts)):
            prompt = workload.prompts[place]
            row = self._request(prompt, workload, rates[prompt.category], slower, rng)
            yield row.model_copy(update={"concurrency": streams, "repeat": repeat, "started_s": clock})
            clock += row.latency_s / streams

    def _request(
        self, prompt: Prompt, workload: Workload, rate: _Rate, slower: float, rng: np.random.Generator
    ) -> Request:
        tokens = rounds = workload.max_new_tokens
        histogram: tuple[int, ...] = ()
        if rate.accepts is not None:
            # greedy texts are the same each time, so what is accepted is too: of this prompt and these settings
            own = np.random.default_rng(list(hashlib.blake2s(prompt.id.encode(), digest_size=8).digest()))
            expected = rate.accepts * tokens / (rate.accepts @ np.arange(1, len(rate.accepts) + 1))
            histogram = tuple(int(count) for count in np.floor(expected + own.random(len(expected))))
            rounds = sum(histogram)
            tokens = sum(count * (accepted + 1) for accepted, count in enumerate(histogram))
        ttft_s = self._model.machine.ttft_ms / 1000
        step_ms = rate.round_ms * slower * float(np.exp(rng.normal(0, self._model.night.request_noise)))
        return Request(
            concurrency=1,
            repeat=0,
            prompt_id=prompt.id,
            category=prompt.category,
            started_s=0.0,
            latency_s=ttft_s + rounds * step_ms / 1000,
            ttft_s=ttft_s,
            itl_p50_ms=step_ms * rounds / tokens,
            itl_p95_ms=step_ms,
            prompt_tokens=1 + len(prompt.text) // _PROMPT_TOKENS,
            completion_tokens=tokens,
            verify_rounds=rounds if histogram else None,
            accept_histogram=histogram,
            output_hash=hashlib.blake2s(prompt.text.encode(), digest_size=8).hexdigest(),
        )


def summary(rows: list[Request], streams: int, workload: Workload, proposed: int) -> Measurement:
    """Figures of rows that were all counted; `proposed` drafts were verified in each round."""
    known = throughput(rows, streams, workload.seed)
    tokens, rounds = sum(row.completion_tokens for row in rows), sum(row.verify_rounds or 0 for row in rows)
    seconds = sum(row.latency_s for row in rows)
    fastest = max(streams * row.completion_tokens / (row.latency_s - (row.ttft_s or 0.0)) for row in rows)
    length = accept_len(rows)
    ttft, itl = (np.array([getattr(row, name) for row in rows]) for name in ("ttft_s", "itl_p50_ms"))
    slowest = max(row.itl_p95_ms or 0.0 for row in rows)
    return Measurement(
        concurrency=streams,
        passes=1 + max(row.repeat for row in rows),
        output_throughput=known.value,
        ci_low=known.low,
        ci_high=known.high,
        stable=known.half_width <= workload.precision,
        completion_tokens=tokens,
        accept_len=length,
        accept_rate=(length - 1) / proposed if length and proposed else None,
        verify_rounds=rounds or None,
        cycle_ms=1000 * seconds / (rounds or tokens),
        burst_throughput=fastest,
        ttft_p50_ms=1000 * float(np.median(ttft)),
        ttft_p95_ms=1000 * float(np.percentile(ttft, 95)),
        itl_p50_ms=float(np.median(itl)),
        itl_p95_ms=slowest,
        failed_share=0.0,
    )


def _categories(workload: Workload) -> list[str]:
    return sorted({prompt.category for prompt in workload.prompts})


def _shape(config: Config) -> Shape | None:
    chosen = config.speculative
    return None if chosen is None else Shape(chosen.num_steps, chosen.eagle_topk, chosen.num_draft_tokens)


def _proposed(config: Config) -> int:
    return config.speculative.num_draft_tokens - 1 if config.speculative else 0


def _graphs(config: Config) -> bool:
    flags = {**config.args, **config.tuned_args}
    return not any(flags.get(name) == value for name, value in _NO_GRAPHS.items())


def _out_of_memory(seconds: float, tokens: int) -> Failed:
    return Failed(
        failure_class="graph_capture_failed",
        failure_phase="launch",
        failure_detail=f"simulated: CUDA graph capture out of memory with {tokens} draft tokens",
        phases=Phases(launch_s=seconds),
    )
