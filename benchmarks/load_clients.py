"""The two load generators that load_client.py compares: processes that import first and run when they are told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, NamedTuple, Self, cast

from raytune_eagle.measure import measure
from raytune_eagle.model.measurement import Vitals
from raytune_eagle.model.trial import ServerFacts
from raytune_eagle.model.workload import Prompt, Workload
from raytune_eagle.workload import load_prompts

HERE = Path(__file__).resolve().parent
PAIR = HERE.parent / "raytune_eagle" / "builtin" / "tiny"
CONCURRENCY = 8
READY = "imported"


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


def silent(_name: str, _detail: str) -> None:
    """No progress."""


class Run(NamedTuple):
    """One run of a client.

    Attributes:
        full: tokens per second with all streams busy; theirs: over all of its run.
        cpu: CPU seconds after the imports; `tokens`: streamed to it.
    """

    full: float
    cpu: float
    tokens: int


class Client:
    """A load generator that has been started; `run` waits until it has imported all, then lets it go."""

    name = ""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._errors = (self.folder / "errors").open("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=self.folder,
            env=os.environ | environment,
        )

    @property
    def folder(self) -> Path:
        """For its files; goes with it."""
        return Path(self._folder.name)

    def __enter__(self) -> Self:
        while line := self._out.readline():
            if line.strip() == READY:
                return self
        self.__exit__()
        raise SystemExit(f"{self.name} did not start")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()
        self._folder.cleanup()

    @property
    def _out(self) -> IO[str]:
        return cast("IO[str]", self._process.stdout)

    def last_line(self) -> str:
        """Of what it prints from now on."""
        out, _ = self._process.communicate("\n")
        if self._process.returncode:
            self._errors.seek(0)
            raise SystemExit(f"{self.name} failed: {self._errors.read()[-2000:]}")
        return out.splitlines()[-1]

    def run(self) -> Run:
        """Its one run."""
        raise NotImplementedError


class Ours(Client):
    """This project's."""

    name = "ours"

    def __init__(self, url: str, count: int, tokens: int) -> None:
        begin = f"import sys; sys.path.insert(0, {str(HERE)!r}); import load_clients; load_clients.main(*sys.argv[1:])"
        super().__init__([sys.executable, "-c", begin, url, str(count), str(tokens)], {})

    def run(self) -> Run:
        """See `Client`."""
        return Run(*json.loads(self.last_line()))


THEIRS = f"""
import runpy, time
from raytune_eagle.engines.cpu import shim
shim.install()
import sglang.bench_serving
print("\\n{READY}", flush=True)
input()
begun = time.process_time()
runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)
print()
print(time.process_time() - begun)
"""


class Theirs(Client):
    """`sglang.bench_serving`, over the same prompts."""

    name = "theirs"

    def __init__(self, url: str, count: int, tokens: int) -> None:
        port, model = url.rsplit(":", 1)[1], str(PAIR / "target")
        flags = f"""--backend sglang --host 127.0.0.1 --port {port} --model {model} --tokenizer {model}
            --num-prompts {count} --max-concurrency {CONCURRENCY} --temperature 0 --dataset-name custom
            --dataset-path prompts.jsonl --sharegpt-output-len {tokens} --disable-tqdm --output-file out.jsonl"""
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        super().__init__([sys.executable, "-W", "ignore", "-c", THEIRS, *flags.split()], offline)
        talks = [[{"role": "user", "content": p.text}, {"role": "assistant", "content": "x"}] for p in prompts(count)]
        lines = (json.dumps({"conversations": talk}) + "\n" for talk in talks)
        (self.folder / "prompts.jsonl").write_text("".join(lines))

    def run(self) -> Run:
        """See `Client`."""
        cpu = float(self.last_line())
        figures = json.loads((self.folder / "out.jsonl").read_text().splitlines()[-1])
        return Run(figures["output_throughput"], cpu, figures["total_output_tokens"])


def ours(url: str, count: int, tokens: int) -> Client:
    """Start our client, to send `count` prompts for `tokens` tokens each."""
    return Ours(url, count, tokens)


def theirs(url: str, count: int, tokens: int) -> Client:
    """Start theirs for the same."""
    return Theirs(url, count, tokens)


def main(url: str, count: str, tokens: str) -> None:
    """Be our client; prints what `Ours.run` wants to know."""
    load = workload(int(count), int(tokens))
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    sys.stdin.readline()
    begun = time.process_time()
    result = measure(Known(url), load, silent)
    cpu, streamed = time.process_time() - begun, sum(row.completion_tokens for row in result.requests)
    print(json.dumps([result.measurements[0].output_throughput, cpu, streamed]))
