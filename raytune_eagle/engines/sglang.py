"""The engine: one ``sglang.launch_server`` at a time, guarded, proven ready, and gone afterwards."""

from __future__ import annotations

import gzip
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from raytune_eagle import failures, logs
from raytune_eagle.engines.describe import describe
from raytune_eagle.engines.gpus import Gpu, Gpus, Nvml, await_release, require_free
from raytune_eagle.engines.guarded import Guarded, StillAliveError, sweep
from raytune_eagle.engines.launch import Launch, Settings, command, prepare
from raytune_eagle.engines.memory import oom_kills
from raytune_eagle.engines.proof import Proof
from raytune_eagle.engines.vitals import Pulse
from raytune_eagle.engines.watch import LogFollower, Processes, Stall
from raytune_eagle.errors import BenchError, LaunchError, NodeError, SpecError, TrialError
from raytune_eagle.failures.classes import Fault
from raytune_eagle.model.config import Config
from raytune_eagle.model.measurement import Vitals
from raytune_eagle.model.trial import Job, NodeFacts, ServerFacts
from raytune_eagle.ports import Progress

LOOK_S = 0.4
GRACE_S = 1.0
"""SGLang drains for 5-8 s on SIGTERM; there is nothing to drain, and the kernel frees the GPUs of the killed too."""
SETTLE_S = 0.3
"""For the last words of a dead process to reach the log."""
LAST_WORDS_S = 1.5
"""At most, where the log does not say yet: the launcher looks at its children once a second."""
CPU_LAUNCHER = "raytune_eagle.engines.cpu"
PATIENCE = 2
"""Starts per trial: a failure that may pass is given one more."""


class RunningServer:
    """A proven server; see `raytune_eagle.ports.Server`."""

    def __init__(self, running: Start, gpus: Gpus | None) -> None:
        answer = running.proof.answer
        answered, ready = answer.answered_at or 0.0, answer.ready_at or 0.0
        self._running, self._pulse = running, Pulse(running.processes, gpus)
        self.url, self.headers = running.launch.url, running.launch.headers
        self.facts: ServerFacts = answer.facts
        self.launch_s, self.ready_s = answered - running.started_at, ready - answered

    def check(self) -> None:
        """Raise `BenchError` (`NodeError` when the machine is at fault) if any process of the server died."""
        if dead := self._running.processes.dead():
            self._running.fail(dead, BenchError)

    def vitals(self) -> Vitals:
        """What else this machine does."""
        return self._pulse.take()

    def log(self) -> bytes:
        """The log so far, redacted and compressed."""
        return gzip.compress(self._running.log_text().encode())


class Start:
    """One attempt to start a server: its processes from the first to the last."""

    def __init__(self, launch: Launch, config: Config, progress: Progress, only_draft: str | None = None) -> None:
        self.launch, self.config, self.progress, self.only_draft = launch, config, progress, only_draft
        self.failure: failures.Failure | None = None
        self.started_at, self.oom_kills = time.monotonic(), oom_kills()
        with launch.log_path.open("wb") as log:
            self.guarded = Guarded(
                launch.argv,
                env=launch.env,
                stdout=log,
                grace_s=GRACE_S,
                remove=[launch.secret_dir, launch.scratch],
                cores=launch.cores,
            )
            self.guarded.start()
        self.processes = Processes(self.guarded)
        # psutil's bookkeeping is not made for two threads, so the proof has its own
        self.proof = Proof(launch, lambda: Processes(self.guarded).listen_on(launch.port))

    def await_ready(self, settings: Settings) -> None:
        """Return once proven; raise what it died or hangs of."""
        follower, stall = LogFollower(self.launch.log_path), Stall(settings.start_stall_s)
        self.proof.start()
        while self.proof.answer.ready_at is None:
            self.proof.join(LOOK_S)
            grew, events = follower.news()
            for name, detail in events:
                self.progress(name, detail)
            self._end_if_hopeless()
            if follower.gave_up:
                self._end_hanging("stalled", "the server gave up, but does not end")
            if stall.over(self.processes.cpu_s(), grew=grew):
                self._end_hanging("stalled", f"no log line and no CPU work for {settings.start_stall_s:g} s")
            if time.monotonic() - self.started_at > settings.start_timeout_s:
                self._end_hanging("start_timeout", f"not ready after {settings.start_timeout_s:g} s")

    def _end_if_hopeless(self) -> None:
        if self.proof.answer.trouble:
            self._raise(self.proof.answer.trouble, LaunchError)
        if (dead := self.processes.dead()) and self.proof.answer.ready_at is None:
            self.fail(dead, LaunchError)

    def _end_hanging(self, name: str, why: str) -> NoReturn:
        """A start that hangs may have said why (a port that was taken): then that is the failure."""
        text = self.log_text()
        reason = next(iter(failures.matching(text)), None)
        if reason is None:
            reached = logs.stage(text)
            reason = failures.Failure(name, reached, f"{why}; last stage: {reached}")
        self._raise(reason, LaunchError)

    def fail(self, dead: str, error: type[TrialError]) -> NoReturn:
        """Raise the failure that the log tells of."""
        deadline = time.monotonic() + LAST_WORDS_S
        while True:
            time.sleep(SETTLE_S)
            code = self.guarded.poll()
            failure = failures.classify(self.log_text(), code)
            if failure.name not in {"unknown", "rank_lost"} or code is not None or time.monotonic() > deadline:
                break
        if failure.name in {"killed_by_os", "rank_lost"} and oom_kills() > self.oom_kills:
            failure = failures.killed_for_memory(failure)
        self._raise(replace(failure, detail=f"{failure.detail} ({dead})"), error)

    def _raise(self, failure: failures.Failure, error: type[TrialError]) -> NoReturn:
        fault = whose(failure, self.config, self.only_draft)
        if fault == "machine":
            raise NodeError(f"{failure.name}: {failure.detail}")
        if fault == "spec" and error is LaunchError:
            raise SpecError(f"engine: {failure.name}: {failure.detail}")
        self.failure = failure
        text = self.log_text()
        raised = error(failure.name, failure.detail, logs.tail(text))
        raised.server_log = gzip.compress(text.encode())
        raise raised

    def log_text(self) -> str:
        """The log so far, secrets out."""
        return logs.redact(self.launch.log_path.read_text(errors="replace"), self.launch.key)

    def stop(self) -> None:
        """End every process; `NodeError` when one cannot be ended. The kept log loses its secrets."""
        self.processes.tree()  # for the pids that the GPUs are asked about
        self.proof.stop()
        try:
            self.guarded.stop()
        except StillAliveError as error:
            raise NodeError(str(error)) from error
        finally:
            self.launch.log_path.write_text(self.log_text())
        self.proof.join(1)


def whose(failure: failures.Failure, config: Config, only_draft: str | None = None) -> Fault:
    """Whose fault it is, given what was tried: a mistake in what only this configuration says is not the spec's."""
    if failure.fault != "spec":
        return failure.fault
    own = {f"--{name}" for name in config.tuned_args}
    if config.speculative:
        own |= {config.speculative.draft.rstrip("/")} - {only_draft, (only_draft or "").rstrip("/")}
    named = any(re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-]|\.\w)", failure.line) for word in own)
    return "configuration" if named or (config.speculative and "--speculative-" in failure.line) else "spec"


def _swept() -> list[int]:
    """What a killed guard left, killed; what cannot be is the machine's fault."""
    try:
        return sweep()
    except StillAliveError as error:
        raise NodeError(str(error)) from error


class SglangEngine:
    """Serves one configuration at a time; see `raytune_eagle.ports.Engine`.

    `gpus` looks at the GPUs; by default NVML, and nothing when the settings have none.
    """

    def __init__(self, settings: Settings, gpus: Gpus | None = None) -> None:
        self.settings = settings
        self.gpus = gpus or (Nvml(settings.gpus) if settings.gpus else None)
        self._least_mib: dict[int, int] = {}

    def command(self, job: Job) -> str:
        """The launch as one pasteable shell line."""
        return command(self.settings, job.config)

    def describe(self) -> NodeFacts:
        """Hardware and versions of this machine."""
        return describe(self.settings)

    @contextmanager
    def serve(self, job: Job, progress: Progress) -> Iterator[RunningServer]:
        """Start, prove, yield, and end."""
        before = self._before(job, progress)
        start = self._start(job, progress, before)
        try:
            yield RunningServer(start, self.gpus)
        finally:
            self._end(start, before)

    def _before(self, job: Job, progress: Progress) -> list[Gpu]:
        """Clear the way: no orphans, GPUs that are free."""
        if swept := _swept():
            progress("swept", f"killed {len(swept)} processes that a killed guard left: {swept}")
        if CPU_LAUNCHER in job.config.launcher:
            progress("cpu", "SGLang runs on the CPU: its figures say nothing about GPUs")
        return require_free(self.gpus, self._least_mib) if self.gpus else []

    def _start(self, job: Job, progress: Progress, before: list[Gpu]) -> Start:
        """A server that is ready; a failure that may pass is given one more try."""
        for attempt in range(1, PATIENCE + 1):
            start = self._spawn(job, progress)
            try:
                start.await_ready(self.settings)
            except BaseException:
                self._end(start, before)
                if attempt == PATIENCE or not (start.failure and start.failure.transient):
                    raise
                progress("retry", f"{start.failure.name}: {start.failure.detail}")
                continue
            progress("ready", f"{(start.proof.answer.answered_at or 0.0) - start.started_at:.1f} s to answer")
            return start
        raise AssertionError  # the last attempt returns or raises

    def _spawn(self, job: Job, progress: Progress) -> Start:
        launch = prepare(self.settings, job)
        progress("launch", self.command(job))
        try:
            return Start(launch, job.config, progress, self.settings.only_draft)
        except OSError as error:
            for folder in (launch.secret_dir, launch.scratch):
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, FileNotFoundError | PermissionError):
                raise SpecError(f"engine.python: {error}") from error
            raise NodeError(f"cannot start a process: {error}") from error

    def _end(self, start: Start, before: list[Gpu]) -> None:
        start.stop()
        if self.gpus:
            await_release(self.gpus, before, start.processes.pids)
