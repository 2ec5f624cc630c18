"""Is our load generator right, and cheap? Against SGLang's own, on the real server; and against a server that counts.

    python benchmarks/load_client.py [--quick] [--part stub|cpu|throughput]

1. `throughput_ratio`: ours over `sglang.bench_serving`'s, the same prompts on the same real server (concurrency 8, the
   bundled tiny pair with EAGLE-3 on the CPU, no prefix cache, so that no run leaves anything to the next), the median
   of 5 ratios. Each is of two runs of ours and two of theirs in the order ours, theirs, theirs, ours (or the other way
   round), so that a machine that slows down or speeds up meanwhile weighs on both alike; and all clients have
   started and imported before the first run, or theirs would be the one that always runs after seconds of an idle
   server. Theirs divides all tokens by the wall clock, start and tail of fewer streams included: 1 % here, where 256
   prompts go through 8 streams. (Its figure over the mean concurrency that it reports would be too high: a busy CPU
   serves 7 streams as many tokens a second as 8.)
2. `cpu_ratio`: CPU seconds of the client per 1,000 streamed tokens at concurrency 8, ours over theirs; a run of 2 N
   tokens minus one of N, so that the start is left out; imports, several seconds that vary, are not counted at all.
   Both stream from a stub in SGLang's shape: the real server on a CPU streams too slowly for a cost to stand out.
3. `paced_ratio`: our throughput over what a stub's pace makes it (8 streams of 50 tokens a second), and
   `paced_ratio_theirs`: which of the two is off where they differ, free of what the real server does by itself.
4. `stub_ratio`: tokens that we counted over tokens that a local server sent, 5,000 chunks a second on 256 connections.

Aims: throughput_ratio within 2 % of 1, cpu_ratio at most 0.6, stub_ratio at least 0.98, on a quiet machine.

The last line is one JSON object with them, or with those of the one `--part` asked for: each takes some minutes,
`throughput` a quarter of an hour. Environment: `make setup` and `pip install -e .[bench]`, no GPU. With --quick all is
run once, small, beside the start of the real server, and CPU is that of a single run, its start included: it shows
that the parts work, and no more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from load_clients import CONCURRENCY, Client, Known, Run, ours, silent, theirs, workload
from stub_stream import stub_server

from raytune_eagle.engines.guarded import Guarded
from raytune_eagle.engines.launch import free_ports
from raytune_eagle.measure import measure

CONNECTIONS, CHUNKS_PER_S = 256, 5000
READY_S = 120.0


@contextmanager
def real_server() -> Iterator[Callable[[], str]]:
    """SGLang with EAGLE-3 on this CPU; the call waits until it is ready and gives its URL."""
    port = free_ports("127.0.0.1", 1)[0]
    flags = f"""--model-path builtin:tiny --device cpu --dtype float32 --speculative-algorithm EAGLE3
        --speculative-draft-model-path builtin:tiny --speculative-num-steps 3 --speculative-eagle-topk 1
        --speculative-num-draft-tokens 4 --max-total-tokens 16384 --max-running-requests {CONCURRENCY}
        --mem-fraction-static 0.5 --disable-radix-cache --skip-server-warmup --sleep-on-idle
        --host 127.0.0.1 --port {port}"""
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


def throughput_ratio(url: str, runs: int, count: int, tokens: int) -> dict[str, float]:
    """Both clients in turn on the real server; `runs` times two runs of each, or one of each for none."""
    order = [turn for n in range(runs) for turn in ("otto", "toot")[n % 2]] or list("ot")
    with ExitStack() as stack:
        begin = {"o": ours, "t": theirs}
        waiting = [stack.enter_context(begin[turn](url, count, tokens)) for turn in order]
        speeds = [(turn, go(client)) for turn, client in zip(order, waiting, strict=True)]
    ratios = []
    size = len(speeds) // max(1, runs)
    for group in (speeds[at : at + size] for at in range(0, len(speeds), size)):
        mine, other = (statistics.harmonic_mean([run.full for who, run in group if who == turn]) for turn in "ot")
        ratios.append(mine / other)
        print(f"ours {mine:.1f}, theirs {other:.1f} tok/s: {ratios[-1]:.3f}", flush=True)
    return {"throughput_ratio": statistics.median(ratios)}


def go(client: Client) -> Run:
    """Let a waiting client run, and tell of it."""
    run = client.run()
    print(f"{client.name}: {run.full:.1f} tok/s", flush=True)
    return run


def paced_ratio(count: int) -> dict[str, float]:
    """Both clients on a stub whose throughput is known: 8 streams of 50 tokens a second."""
    figures = {}
    for name, run in (("paced_ratio", ours), ("paced_ratio_theirs", theirs)):
        with stub_server(24, 1 / 50) as (url, _):
            figures[name] = once(run, url, count, 24).full / (CONCURRENCY * 50)
    return figures


def once(begin: Callable[[str, int, int], Client], url: str, count: int, tokens: int) -> Run:
    """One run of a client by itself."""
    with begin(url, count, tokens) as client:
        return client.run()


def in_turn(runs: int) -> list[str]:
    """Who runs when: one, the other; then the other, the one; and so on."""
    return [name for n in range(runs) for name in (("ours", "theirs") if n % 2 == 0 else ("theirs", "ours"))]


def cpu_ratio(runs: int, count: int, tokens: int, *, difference: bool = True) -> dict[str, float]:
    """Both clients in turn on a stub of 5,000 chunks a second: what `count` streams more cost, or all of them."""
    costs: dict[str, list[float]] = {"ours": [], "theirs": []}
    for name in in_turn(runs):
        with stub_server(tokens, CONCURRENCY / CHUNKS_PER_S) as (url, _):
            begin = ours if name == "ours" else theirs
            short = once(begin, url, count, tokens) if difference else Run(0.0, 0.0, 0)
            long = once(begin, url, 2 * count, tokens)
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
        return figures | throughput_ratio(ready(), 0, 16, 24)


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
    args = parser.parse_args()
    figures = quick() if args.quick else whole(args.part)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
