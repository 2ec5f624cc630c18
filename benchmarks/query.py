"""Five questions to 10,000 trials and 640,000 requests: `raytune-eagle query` against pandas, and a report of 5,000.

    python benchmarks/query.py [--trials N] [--no-singles] [--quick]

The records are made by the cost model of the tests (tests/made_results.py), kept as a file per trial, and once more
compacted by `results compact`. Each question is asked in a fresh process, the least of 3 (what stands beside: once);
its peak of memory is that of the process. What a process pays once is left out on both sides: imports, the first small
read, and with it the start of DuckDB (told apart below). pandas reads the same compacted files whole, as
`pandas.read_parquet(folder)` does, and answers with groupby; for comparison also only the columns that it needs. Times
are wall clock: run it on a quiet machine.

It takes about six minutes and 2 GB of disk. `--quick`: 5,000 trials, made compacted, each question three times in one
process; less than a minute.

The last line is one JSON object: `worst_vs_pandas` (ours over pandas reading whole files, the worst of the five) and
`report_5000_s` (the command `report` on 5,000 compacted trials, imports included).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from made_results import Made, write, write_compacted  # noqa: E402 - after the path

from raytune_eagle.store import ParquetStore  # noqa: E402

FULL, QUICK, ONCE = (3, 1), (1, 3), (1, 1)
"""Fresh processes for each question, and how often each of them asks it."""
TRIALS, QUICK_TRIALS = 10_000, 5000
QUERIES = {
    "best per study": (
        "select study, max(output_throughput) from trials where status = 'completed' and concurrency = 1 group by all",
        "trials",
        ["study", "status", "concurrency", "output_throughput"],
        "d[(d.status == 'completed') & (d.concurrency == 1)].groupby('study').output_throughput.max()",
    ),
    "top 20 by throughput": (
        (
            "select number, num_steps, eagle_topk, num_draft_tokens, output_throughput from trials "
            "where concurrency = 1 order by output_throughput desc limit 20"
        ),
        "trials",
        ["number", "num_steps", "eagle_topk", "num_draft_tokens", "output_throughput", "concurrency"],
        "d[d.concurrency == 1].nlargest(20, 'output_throughput')",
    ),
    "accept_len by steps and topk": (
        "select num_steps, eagle_topk, avg(accept_len) from trials where kind = 'trial' group by all",
        "trials",
        ["num_steps", "eagle_topk", "accept_len", "kind"],
        "d[d.kind == 'trial'].groupby(['num_steps', 'eagle_topk']).accept_len.mean()",
    ),
    "per-category throughput of the winner": (
        (
            "with best as (select study, number from trials where status = 'completed' order by output_throughput desc "
            "limit 1) select category, sum(completion_tokens) / sum(latency_s) from requests r join best b "
            "on r.study = b.study and r.trial = b.number where repeat >= 0 group by all"
        ),
        "requests",
        ["trial", "category", "completion_tokens", "latency_s", "repeat"],
        (
            "(lambda g: g.completion_tokens / g.latency_s)(d[(d.trial == 9) & (d.repeat >= 0)].groupby('category')"
            "[['completion_tokens', 'latency_s']].sum())"
        ),
    ),
    "failures by class": (
        "select failure_class, count(*) from trials where status = 'failed' group by all order by 2 desc",
        "trials",
        ["failure_class", "status"],
        "d[d.status == 'failed'].failure_class.value_counts()",
    ),
}
_TIMED = """
import json, time
{setup}
times = []
for _ in range({asks}):
    began = time.perf_counter()
    {asked}
    times.append(time.perf_counter() - began)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([times, int(peak.split()[1]) / 1024]))
"""
Runs = tuple[int, int]


def timed(setup: str, asked: str, runs: Runs) -> tuple[float, float]:
    """Least seconds, which neighbours disturbed least, and largest memory (MiB) of `asked`, a line of code."""
    processes, asks = runs
    found = [_once(_TIMED.format(setup=setup, asked=asked, asks=asks)) for _ in range(processes)]
    seconds = [each for times, _ in found for each in times]
    return min(seconds), max(memory for _, memory in found)


def _once(code: str) -> tuple[list[float], float]:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    seconds, memory = json.loads(done.stdout.splitlines()[-1])
    return seconds, memory


def ours(results: Path, sql: str, runs: Runs) -> tuple[float, float]:
    """Through the same class as the command."""
    setup = f"from raytune_eagle.report.query import Query; Query({str(results)!r}).run('select 1 from events limit 1')"
    return timed(setup, f"Query({str(results)!r}).run({sql!r})", runs)


def theirs(results: Path, table: str, answer: str, runs: Runs, columns: list[str] | None = None) -> tuple[float, float]:
    """With pandas, whole files or some columns of them."""
    folder = str(results / "study=made" / table)
    setup = f"import pandas as pd; pd.read_parquet({str(results / 'study=made' / 'events')!r})"
    return timed(setup, f"d = pd.read_parquet({folder!r}, columns={columns!r}); {answer}", runs)


def make_both(singles: Path, compacted: Path, trials: int) -> None:
    """A file per trial, and what `results compact` makes of a copy of it."""
    began = time.perf_counter()
    write(str(singles), Made(trials=trials))
    written = time.perf_counter()
    shutil.copytree(singles, compacted, copy_function=os.link)
    for each in ParquetStore(str(compacted)).compact("made"):
        print(f"{each.table}: {each.files:,} files of {each.rows:,} rows made one", flush=True)
    print(f"made in {written - began:.0f} s, compacted in {time.perf_counter() - written:.0f} s", flush=True)


def compare(compacted: Path, singles: Path | None, runs: Runs) -> float:
    """Print a line per question and return the worst ratio to pandas."""
    print(f"{'question':40} {'ours':>16} {'pandas':>16} ratio {'its columns':>16} {'single files':>16}")
    worst = 0.0
    for name, (sql, table, columns, answer) in QUERIES.items():
        mine, whole = ours(compacted, sql, runs), theirs(compacted, table, answer, runs)
        beside = [theirs(compacted, table, answer, ONCE, columns), ours(singles, sql, ONCE)] if singles else []
        ratio = mine[0] / whole[0]
        worst = max(worst, ratio)
        print(f"{name:40} {_cell(mine)} {_cell(whole)} {ratio:5.2f} {' '.join(map(_cell, beside))}", flush=True)
    start, _ = timed("import duckdb", "duckdb.connect()", (runs[0], 1))
    print(f"once per process beside the imports: {start:.3f} s, the start of DuckDB")
    return worst


def _cell(found: tuple[float, float]) -> str:
    return f"{f'{found[0]:.3f} s {found[1]:.0f} MiB':>16}"


def report_seconds(folder: Path, runs: Runs) -> float:
    """Of the command, on 5,000 compacted trials."""
    command = [sys.executable, "-m", "raytune_eagle", "report", "made", "--results", str(folder)]
    code = f"import subprocess; subprocess.run({[*command, '-o', str(folder / 'page.html')]!r}, check=True)"
    return timed("", code, (runs[0], 1))[0]


def main() -> None:
    """Make, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--no-singles", action="store_true", help="leave out the file per trial, which takes minutes")
    parser.add_argument("--quick", action="store_true", help="5,000 trials, compacted alone, a minute")
    given = parser.parse_args()
    trials, runs = (QUICK_TRIALS, QUICK) if given.quick else (given.trials, FULL)
    with tempfile.TemporaryDirectory() as place:
        compacted, singles, many = Path(place, "compacted"), Path(place, "singles"), Path(place, "report")
        alone = given.quick or given.no_singles
        if alone:
            write_compacted(str(compacted), Made(trials=trials))
        else:
            make_both(singles, compacted, trials)
        worst = compare(compacted, None if alone else singles, runs)
        if trials == QUICK_TRIALS:
            many = compacted
        else:
            write_compacted(str(many), Made(trials=QUICK_TRIALS))
        seconds = report_seconds(many, runs)
    print(json.dumps({"worst_vs_pandas": round(worst, 3), "report_5000_s": round(seconds, 2), "trials": trials}))


if __name__ == "__main__":
    main()
