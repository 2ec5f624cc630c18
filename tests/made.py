"""Values for tests: outcomes as a server would give them, and spec texts."""

import functools
import json

import yaml

from raytune_eagle import specfile
from raytune_eagle.model.measurement import Measurement, Request
from raytune_eagle.model.trial import Completed, Failed
from raytune_eagle.model.workload import Prompt, Workload
from raytune_eagle.space import Space

SPEC = """
name: s
engine: {model: /m, draft: /d, args: {tp-size: 8, disable-custom-all-reduce: true}}
space:
  speculative: {num_steps: {int: [1, 6]}, eagle_topk: [1, 2, 4], num_draft_tokens: {int: [2, 16]}}
  nccl: {NCCL_PROTO: [null, Simple, LL]}
search: {sampler: random, seed: 0}
confirm: {top: 0}
budget: {trials: 12, hours: 100}
"""

WORKLOAD = Workload(prompts=tuple(Prompt(id=f"p{i}", category="code", text=f"text {i}") for i in range(3)))


@functools.cache
def _space(tree):
    return Space(specfile.parse(json.loads(tree)))


def make_space(text=SPEC, **changes):
    """A space, which is only read: the same for the same words."""
    tree = yaml.safe_load(text)
    for path, value in changes.items():
        inner = tree
        *parts, last = path.split("__")
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return _space(json.dumps(tree))


def completed(tok_s, concurrency=(1,), texts=None, **figures):
    """A measured trial at `tok_s` tokens per second."""
    measurements = tuple(
        Measurement(
            **{
                "concurrency": c,
                "passes": 2,
                "output_throughput": float(tok_s),
                "ci_low": tok_s * 0.99,
                "ci_high": tok_s * 1.01,
                "stable": True,
                "completion_tokens": 300,
                "accept_len": 2.5,
                "accept_rate": 0.5,
                "verify_rounds": 120,
                "cycle_ms": 10.0,
                "burst_throughput": tok_s * 1.1,
                "ttft_p50_ms": 20.0,
                "ttft_p95_ms": 30.0,
                "itl_p50_ms": 9.0,
                "itl_p95_ms": 15.0,
                "failed_share": 0.0,
                **figures,
            }
        )
        for c in concurrency
    )
    requests = tuple(
        Request(
            concurrency=c,
            repeat=0,
            prompt_id=p.id,
            category=p.category,
            started_s=0.0,
            latency_s=1.0,
            output_hash=(texts or {}).get(p.id, "same"),
        )
        for c in concurrency
        for p in WORKLOAD.prompts
    )
    return Completed(measurements=measurements, requests=requests)


def failed(name="graph_capture_failed"):
    """A trial whose configuration failed."""
    return Failed(failure_class=name, failure_phase="capture", failure_detail="made for a test")


def surface(config):
    """Tokens per second of a configuration: one clear best, plain decoding the slowest."""
    spec = config.speculative
    if spec is None:
        return 90.0
    gain = 1 - 0.62**spec.num_steps
    cycle = 1 + 0.03 * spec.num_draft_tokens + 0.02 * spec.num_steps
    return 90.0 * (1 + 1.5 * gain) / cycle * (1.2 if config.env.get("NCCL_PROTO") == "LL" else 1.0)


class ListStore:
    """The smallest thing that keeps what `raytune_eagle.ports.Store` promises, in memory."""

    def __init__(self):
        self.records, self.events = [], []

    def append(self, record):
        assert record.number not in {r.number for r in self.records}
        self.records.append(record)

    def append_events(self, study, events):
        self.events += events

    def read(self, study):
        return sorted((r for r in self.records if r.study == study), key=lambda r: r.number)

    def read_events(self, study):
        return [e for e in self.events if e.study == study]
