"""Studies that run as jobs of the cluster: they go on when the terminal is closed."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray.job_submission import JobStatus, JobSubmissionClient

from raytune_eagle.errors import NodeError, SpecError
from raytune_eagle.nodes.joining import reach

_STUDY = "raytune-eagle study"
"""Key of a job's metadata that says whose study it runs."""
_LOOK_S = 1.0
_STOP_S = 30.0


def submit(study: str, folder: str, words: Sequence[str]) -> str:
    """Start a command, in `folder`, as a job on the head; returns its id.

    Raises:
        SpecError: that study runs already.
        NodeError: no cluster can be asked from here.
    """
    with _client() as client:
        latest = _latest(client, study)
        if latest is not None and _goes_on(latest):
            raise SpecError(f"--detach: study {study!r} runs already, as job {latest.submission_id}")
        command = f"cd {shlex.quote(folder)} && exec {shlex.join(words)}"
        identity = f"{study}-{time.strftime('%Y%m%d-%H%M%S')}"
        return str(client.submit_job(entrypoint=command, submission_id=identity, metadata={_STUDY: study}))


def status(study: str | None) -> list[tuple[str, str, str, float, str]]:
    """Study, job, status, start (seconds since the epoch) and message of the jobs that run studies; newest first."""
    with _client() as client:
        return [
            (job.metadata[_STUDY], job.submission_id, str(job.status), (job.start_time or 0) / 1000, job.message or "")
            for job in _jobs(client)
            if study in (None, job.metadata[_STUDY])
        ]


def logs(study: str, *, follow: bool) -> Iterator[str]:
    """What the latest job of a study has printed; with `follow` also what it prints until its end."""
    with _client() as client:
        job, told = _known(client, study), 0
        while True:
            over = client.get_job_status(job).is_terminal()
            text = client.get_job_logs(job)
            yield text[told:]
            told = len(text)
            if over or not follow:
                return
            time.sleep(_LOOK_S)


def stop(study: str) -> str:
    """End the latest job of a study in an orderly way; returns its status."""
    with _client() as client:
        job, deadline = _known(client, study), time.monotonic() + _STOP_S
        client.stop_job(job)
        while not (now := client.get_job_status(job)).is_terminal() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return str(now)


def succeeded(status: str) -> bool:
    """Whether a job of this status did what it was asked for, or still does."""
    return JobStatus(status) in (JobStatus.SUCCEEDED, JobStatus.RUNNING, JobStatus.PENDING)


def _goes_on(job: Any) -> bool:
    """Whether a job is to run or has a process here, on the head: of a lost head's jobs Ray says "running" (2.60)."""
    if job.status == JobStatus.RUNNING:
        return any(job.submission_id in _job_of(process) for process in psutil.process_iter())
    return not job.status.is_terminal()


def _job_of(process: psutil.Process) -> str:
    try:
        return process.environ().get(RAY_JOB_CONFIG_JSON_ENV_VAR, "")
    except psutil.Error:
        return ""


@contextmanager
def _client() -> Iterator[JobSubmissionClient]:
    reach("auto")
    try:
        client = JobSubmissionClient()
    except (ConnectionError, RuntimeError) as exc:
        why = str(exc).strip().splitlines()[0]
        raise NodeError(f"no cluster can be asked for its jobs from here ({why}): be on the head of one") from exc
    try:
        yield client
    except RuntimeError as exc:  # all that its HTTP may answer
        raise NodeError(f"the cluster's jobs: {str(exc).strip().splitlines()[0]}") from exc


def _jobs(client: JobSubmissionClient) -> list[Any]:
    found = [job for job in client.list_jobs() if job.submission_id and _STUDY in (job.metadata or {})]
    return sorted(found, key=lambda job: job.start_time or 0, reverse=True)


def _latest(client: JobSubmissionClient, study: str) -> Any:
    return next((job for job in _jobs(client) if job.metadata[_STUDY] == study), None)


def _known(client: JobSubmissionClient, study: str) -> str:
    job = _latest(client, study)
    if job is None:
        known = ", ".join(dict.fromkeys(each.metadata[_STUDY] for each in _jobs(client))) or "none"
        raise SpecError(f"no job runs or ran study {study!r}; there are: {known}")
    return str(job.submission_id)
