"""Is our load generator right, and cheap? Against SGLang's own, on the real server; and against a server that counts.

    python benchmarks/load_client.py [--quick] [--part stub|cpu|throughput]

1. `throughput_ratio`: ours over `sglang.bench_serving`'s, the same prompts on the same real server (concurrency 8, the
   bundled tiny pair with EAGLE-3 on the CPU), runs alternating, medians. Theirs divides all tokens by the wall clock,
   start and tail of fewer streams included: 1 to 2 % here, where 256 prompts go through 8 streams. (Its figure over the
   mean concurrency that it reports would be too high: a busy CPU serves 7 streams as many tokens a second as 8.)
2. `cpu_ratio`: CPU seconds of the client per 1,000 streamed tokens at concurrency 8, ours over theirs; a run of 2 N
   tokens minus one of N, so that the start is left out; imports, several seconds that vary, are not counted at all.
   Both stream from a stub in SGLang's shape: the real server on a CPU streams too slowly for a cost to stand out.
3. `paced_ratio`: our throughput over what a stub's pace makes it (8 streams of 50 tokens a second), and
   `paced_ratio_theirs`: which of the two is off where they differ, free of what the real server does by itself.
4. `stub_ratio`: tokens that we counted over tokens that a local server sent, 5,000 chunks a second on 256 connections.

Aims: throughput_ratio within 2 % of 1, cpu_ratio at most 0.6, stub_ratio at least 0.98, on a quiet machine.

The last line is one JSON object with them, or with those of the one `--part` asked for: each takes some minutes.
Environment: `make setup` and `pip install -e .[bench]`, no GPU. With --quick all is
run once, small, beside the start of the real server, and CPU is that of a single run, its start included: it shows
that the parts work, and no more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from stub_stream import stub_server

from raytune_eagle.engines.guarded import Guarded
from raytune_eagle.engines.launch import free_ports
from raytune_eagle.measure import measure
from raytune_eagle.model.measurement import Vitals
from raytune_eagle.model.trial import ServerFacts
from raytune_eagle.model.workload import Prompt, Workload
from raytune_eagle.workload import load_prompts

ROOT = Path(__file__).resolve().parent.parent
PAIR = ROOT / "raytune_eagle" / "builtin" / "tiny"
CONCURRENCY = 8
CONNECTIONS, CHUNKS_PER_S = 256, 5000
READY_S = 120.0


class Known:
    """A server that somebody else looks after."""

    facts = ServerFacts()
    launch_s = 0.0
    ready_s = 0.0

    def __init__(self, url: str) -> None:
        self.url, self.headers = url, dict[str, str]()

    def check(self) -> None:
        """Not our business."""

    def vitals(self) -> Vitals:
        """Nor is its machine."""
        return Vitals()

    def log(self) -> bytes:
        """None."""
        return b""


def prompts(count: int) -> tuple[Prompt, ...]:
    """`count` prompts, the bundled ones over and over, each with a line of its own so that no cache knows it."""
    texts = load_prompts("builtin:tiny", held_out=None)
    return tuple(
        Prompt(id=str(n), category="any", text=f"# part {n}\n{texts[n % len(texts)].text}") for n in range(count)
    )


def workload(count: int, tokens: int, concurrency: int = CONCURRENCY) -> Workload:
    """One pass over `count` prompts."""
    return Workload(
        prompts=prompts(count),
        max_new_tokens=tokens,
        ignore_eos=True,
        concurrency=(concurrency,),
        min_passes=1,
        max_passes=1,
        request_timeout_s=300,
    )


@contextmanager
def real_server() -> Iterator[Callable[[], str]]:
    """SGLang with EAGLE-3 on this CPU; the call waits until it is ready and gives its URL."""
    port = free_ports("127.0.0.1", 1)[0]
    flags = f"""--model-path builtin:tiny --device cpu --dtype float32 --speculative-algorithm EAGLE3
        --speculative-draft-model-path builtin:tiny --speculative-num-steps 3 --speculative-eagle-topk 1
        --speculative-num-draft-tokens 4 --max-total-tokens 16384 --max-running-requests {CONCURRENCY}
        --mem-fraction-static 0.5 --skip-server-warmup --sleep-on-idle --host 127.0.0.1 --port {port}"""
    command = [sys.executable, "-m", "raytune_eagle.engines.cpu", *flags.split()]
    folder = tempfile.mkdtemp()  # of the server's own temporary files, which it leaves
    env = os.environ | {"TMPDIR": folder}
    with tempfile.TemporaryFile() as log, Guarded(command, env=env, stdout=log, remove=[folder]) as process:
        url = f"http://127.0.0.1:{port}"

        def ready() -> str:
            wait_ready(url, process)
            return url

        yield ready


def wait_ready(url: str, process: Guarded) -> None:
    """Until the server has generated something."""
    body = json.dumps({"text": "import ", "sampling_params": {"max_new_tokens": 4}}).encode()
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        try:
            request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=10):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("the server did not become ready")


class Run(NamedTuple):
    """One run of a client.

    Attributes:
        full: tokens per second with all streams busy; theirs: over all of its run.
        cpu: CPU seconds after the imports; `tokens`: streamed to it, in so many `seconds`.
    """

    full: float
    cpu: float
    tokens: int
    seconds: float


def last_line(command: list[str], environment: dict[str, str]) -> str:
    """What a command printed at the end."""
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment)
    return done.stdout.splitlines()[-1]


def ours(url: str, count: int, tokens: int) -> Run:
    """One run of our client over `count` prompts."""
    return Run(*json.loads(last_line([sys.executable, __file__, "--child", url, str(count), str(tokens)], {})))


def child(url: str, count: int, tokens: int) -> None:
    """One run of our client; prints what `ours` wants to know."""
    begun = time.process_time()
    result = measure(Known(url), workload(count, tokens), silent)
    cpu, streamed = time.process_time() - begun, sum(row.completion_tokens for row in result.requests)
    print(json.dumps([result.measurements[0].output_throughput, cpu, streamed, result.warmup_s + result.bench_s]))


def silent(_name: str, _detail: str) -> None:
    """No progress."""


THEIRS = """
import runpy, time
from raytune_eagle.engines.cpu import shim
shim.install()
import sglang.bench_serving
begun = time.process_time()
runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)
print()
print(time.process_time() - begun)
"""


def theirs(url: str, count: int, tokens: int) -> Run:
    """One run of `sglang.bench_serving` over the same prompts."""
    port, model = url.rsplit(":", 1)[1], str(PAIR / "target")
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "prompts.jsonl", Path(folder) / "out.jsonl"
        talks = [[{"role": "user", "content": p.text}, {"role": "assistant", "content": "x"}] for p in prompts(count)]
        data.write_text("".join(json.dumps({"conversations": talk}) + "\n" for talk in talks))
        flags = f"""--backend sglang --host 127.0.0.1 --port {port} --model {model} --tokenizer {model}
            --num-prompts {count} --max-concurrency {CONCURRENCY} --temperature 0 --dataset-name custom
            --dataset-path {data} --sharegpt-output-len {tokens} --disable-tqdm --output-file {out}"""
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        cpu = float(last_line([sys.executable, "-W", "ignore", "-c", THEIRS, *flags.split()], offline))
        figures = json.loads(out.read_text().splitlines()[-1])
    return Run(figures["output_throughput"], cpu, figures["total_output_tokens"], figures["duration"])


def throughput_ratio(url: str, runs: int, count: int, tokens: int) -> dict[str, float]:
    """Both clients in turn on the real server."""
    speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for name in in_turn(runs):
        run = ours(url, count, tokens) if name == "ours" else theirs(url, count, tokens)
        speeds[name].append(run.full)
        print(f"{name}: {run.full:.1f} tok/s", flush=True)
    middle = {name: statistics.median(values) for name, values in speeds.items()}
    return {"throughput_ratio": middle["ours"] / middle["theirs"]}


def paced_ratio(count: int) -> dict[str, float]:
    """Both clients on a stub whose throughput is known: 8 streams of 50 tokens a second."""
    figures = {}
    for name, run in (("paced_ratio", ours), ("paced_ratio_theirs", theirs)):
        with stub_server(24, 1 / 50) as (url, _):
            figures[name] = run(url, count, 24).full / (CONCURRENCY * 50)
    return figures


def in_turn(runs: int) -> list[str]:
    """Who runs when: one, the other; then the other, the one; and so on."""
    return [name for n in range(runs) for name in (("ours", "theirs") if n % 2 == 0 else ("theirs", "ours"))]


def cpu_ratio(runs: int, count: int, tokens: int, *, difference: bool = True) -> dict[str, float]:
    """Both clients in turn on a stub of 5,000 chunks a second: what `count` streams more cost, or all of them."""
    costs: dict[str, list[float]] = {"ours": [], "theirs": []}
    for name in in_turn(runs):
        with stub_server(tokens, CONCURRENCY / CHUNKS_PER_S) as (url, _):
            run = ours if name == "ours" else theirs
            short = run(url, count, tokens) if difference else Run(0.0, 0.0, 0, 0.0)
            long = run(url, 2 * count, tokens)
        costs[name].append((long.cpu - short.cpu) / (long.tokens - short.tokens) * 1000)
        print(f"{name}: {costs[name][-1]:.4f} CPU s per 1,000 tokens", flush=True)
    middle = {name: statistics.median(values) for name, values in costs.items()}
    return {"cpu_ratio": middle["ours"] / middle["theirs"], **{f"cpu_s_{name}": cost for name, cost in middle.items()}}


def stub_ratio(seconds: float) -> dict[str, float]:
    """Our count over the stub's own, and the chunks a second that it sent."""
    tokens = max(10, int(seconds / 4 * CHUNKS_PER_S / CONNECTIONS))  # 2 warm-up streams a connection, 1 pass, fillers
    with stub_server(tokens, CONNECTIONS / CHUNKS_PER_S) as (url, sent):
        result = measure(Known(url), workload(CONNECTIONS, tokens, CONNECTIONS), silent)
    counted = sum(row.completion_tokens for row in result.requests)
    return {"stub_ratio": counted / sent[0], "stub_chunks_per_s": sent[0] / (result.warmup_s + result.bench_s)}


def quick() -> dict[str, float]:
    """Each part once, small, while the real server starts."""
    with real_server() as ready:
        figures = stub_ratio(2) | cpu_ratio(1, 100, 96, difference=False)
        return figures | throughput_ratio(ready(), 1, 16, 24)


def whole(part: str | None) -> dict[str, float]:
    """One part, or all."""
    figures: dict[str, float] = {}
    if part in {None, "stub"}:
        figures |= stub_ratio(24)
    if part in {None, "cpu"}:
        figures |= cpu_ratio(5, 300, 96)
    if part in {None, "throughput"}:
        with real_server() as ready:
            figures |= throughput_ratio(ready(), 5, 256, 24)
        figures |= paced_ratio(256)
    return figures


def main() -> None:
    """Run the parts and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each part once, and small")
    parser.add_argument("--part", choices=["stub", "cpu", "throughput"], help="this part alone, in full")
    parser.add_argument("--child", nargs=3, metavar=("URL", "COUNT", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], *map(int, args.child[1:]))
        return
    figures = quick() if args.quick else whole(args.part)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
