"""One ``raytune-eagle run`` on the head of a lab's cluster, and what can be seen of it from outside."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
import time
from pathlib import Path

import yaml
from lab.hosts import ROOT, Host
from lab.ray_cluster import RayCluster
from lab.waiting import await_true
from made_interpreter import make_interpreter
from real_server import REAL

from raytune_eagle.model.trial import Event, TrialRecord
from raytune_eagle.store import ParquetStore

FAKE = ROOT / "tests" / "fakes" / "launch_server.py"
COMMAND = f"{sys.executable} -m raytune_eagle"
SPEC = {
    "engine": {"model": "builtin:tiny", "draft": "builtin:tiny"},
    "workload": {"max_new_tokens": 32, "min_passes": 2, "max_passes": 2, "request_timeout_s": 10},
    "space": {
        "speculative": {"num_steps": {"int": [1, 8]}, "eagle_topk": [1, 2, 4], "num_draft_tokens": {"int": [2, 12]}}
    },
    "search": {"sampler": "random"},
    "baseline": {"every": 1000},
    "confirm": {"top": 0},
}


class StudyRun:
    """A study of the fake server (of the real one, on the hosts in `real`).

    Args:
        round_ms: per verify round of the fake server: 4 prompts of 32 tokens, 3 passes each, so that a trial takes
            200 to 400 rounds.
        real: hosts that have SGLang itself, on the CPU; its start takes 15 s, and more beside other work.
        gpus: of a node.
    """

    def __init__(
        self, cluster: RayCluster, name: str, trials: int, round_ms: float = 20, *, real: str = "", gpus: int = 0
    ) -> None:
        self.cluster, self.name = cluster, name
        self.folder = cluster.lab.folder / f"study-{name}"
        self.folder.mkdir(exist_ok=True)
        self.log = self.folder / "run.log"
        self.process: subprocess.Popen[bytes] | None = None
        prompts = self.folder / "prompts.jsonl"
        prompts.write_text("".join(f'{{"id": "{i}", "category": "code", "text": "def f{i}(x):"}}\n' for i in range(4)))
        spec = {**SPEC, "name": name, "budget": {"trials": trials}, "node": {"gpus": gpus}}
        spec["workload"] = {**SPEC["workload"], "prompts": str(prompts)}
        spec["engine"] = {
            **SPEC["engine"],
            "args": REAL.args if real else {},  # without a limit its cache takes 14 GiB and a minute to fill
            "start_timeout_s": 240 if real else 60,
            "python": str(self._interpreter(real) if not gpus else self._gpu_interpreter()),
            "env": {"RAYTUNE_FAKE": f"round_ms={round_ms}"},
        }
        (self.folder / "spec.yaml").write_text(yaml.safe_dump(spec))

    def _interpreter(self, real: str) -> Path:
        """Serves the fake where SGLang's CPU layer is asked for, but for the hosts that have the real one."""
        path = self.folder / "python"
        path.write_text(
            "#!/bin/sh\n"
            f'case " {real} " in *" $(hostname) "*) exec {sys.executable} "$@";; esac\n'
            f'if [ "$1 $2" = "-m raytune_eagle.engines.cpu" ]; then shift 2; exec {sys.executable} {FAKE} "$@"; fi\n'
            f'exec {sys.executable} "$@"\n'
        )
        path.chmod(0o755)
        return path

    def _gpu_interpreter(self) -> Path:
        """Has an SGLang as far as it is asked, and serves the fake."""
        path = self.folder / "python"
        path.write_text(
            "#!/bin/sh\n"
            f'case "$#:$1:$2" in 2:-c:*|4:-c:*) exec {make_interpreter(self.folder / "env")} "$@";;\n'
            f'*:-m:sglang.launch_server) shift 2; exec {sys.executable} {FAKE} "$@";; esac\n'
            f'exec {sys.executable} "$@"\n'
        )
        path.chmod(0o755)
        return path

    def words(self, command: str = "run") -> str:
        """The command line."""
        return f"{COMMAND} {command} {self.folder}/spec.yaml --cluster auto --results {self.folder}/results"

    def start(self) -> StudyRun:
        """Start it on the head."""
        self.process = self.cluster.head.start(self.words(), self.log)
        return self

    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def await_line(self, pattern: str, seconds: float, after: int = 0) -> re.Match[str]:
        """Wait until a line that matches is printed after the first `after` characters."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, self.text()[after:], re.MULTILINE)

        await_true(found, seconds, lambda: f"{pattern!r} in\n{self.text()[-3000:]}")
        match = found()
        assert match is not None
        return match

    def after(self, pattern: str) -> int:
        """Where the first line that matches has been printed."""
        match = re.search(pattern, self.text(), re.MULTILINE)
        assert match is not None, pattern
        return match.end()

    def await_trial(self, host: Host) -> int:
        """Wait until a trial (not plain decoding) is measured on `host`; returns the pid of its server."""
        at = len(self.text())
        self.await_line(rf"{host.name} #\d+ +launching .*--speculative", 90, at)
        return self.await_busy(host)

    def await_busy(self, host: Host, seconds: float = 60) -> int:
        """Wait until a server on `host` is measured; returns the pid of the server there."""
        await_true(lambda: len(servers(host)) == 1, seconds, lambda: f"no server on {host.name}\n{self.text()[-3000:]}")
        time.sleep(1.5)
        return servers(host)[0]

    def end(self, seconds: float, code: int = 0) -> None:
        """Wait for its end."""
        assert self.process is not None
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s:\n{self.text()[-3000:]}") from None
        assert self.process.returncode == code, self.text()[-3000:]

    def interrupt(self) -> None:
        """Ctrl-C, and an end in order within 20 s."""
        assert self.process is not None
        self.cluster.head.kill("raytune_eagle run", number=2)
        self.end(20, code=130)

    def sigkill(self) -> None:
        """Kill the driver itself, wherever it is in its start."""
        assert self.process is not None
        for pid in self.cluster.head.find(f"{self.folder}/spec.yaml"):
            self.cluster.head.run("kill", "-9", str(pid), check=False)
        self.process.wait(10)

    def kill(self) -> None:
        """For the end of a test that failed."""
        if self.process is not None and self.process.poll() is None:
            self.sigkill()

    def store(self) -> ParquetStore:
        """Its records."""
        return ParquetStore(str(self.folder / "results"))

    def records(self) -> list[TrialRecord]:
        """All that are kept."""
        return list(self.store().read(self.name))

    def events(self) -> list[Event]:
        """All that are kept."""
        return list(self.store().read_events(self.name))

    def server_logs(self) -> dict[int, str]:
        """The kept log of each launch's server."""
        paths = self.folder.glob(f"results/study={self.name}/logs/*.log.gz")
        return {int(path.name.split("-")[0]): gzip.decompress(path.read_bytes()).decode() for path in paths}

    def check_whole(self, trials: int | None = None) -> None:
        """Exactly so many trials, no number and no point twice, no torn file, and nothing left on any host."""
        records = self.records()
        assert self.store().problems(self.name) == []
        numbers = [record.number for record in records]
        assert len(numbers) == len(set(numbers)), numbers
        measured = [record for record in records if record.kind == "trial"]
        assert trials is None or (len(measured), sorted(numbers)) == (trials, list(range(len(numbers)))), numbers
        assert len({record.key for record in measured}) == len(measured)
        await_true(lambda: not self.left(), 15, lambda: f"left: {self.left()}")

    def left(self) -> dict[str, list[str]]:
        """What is still there of servers, guards and owners, by host."""
        ours = ("launch_server.py", "guard.py", "sglang", "ray::Owner")
        found = {
            host.name: [words[:120] for words in host.processes().values() if any(name in words for name in ours)]
            for host in self.cluster.lab.hosts
        }
        return {name: words for name, words in found.items() if words}


def servers(host: Host) -> list[int]:
    """Pids of the fake servers of a host, without their guards."""
    return sorted(
        pid for pid, words in host.processes().items() if "launch_server.py" in words and "guard.py" not in words
    )
