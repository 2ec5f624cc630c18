"""One launch spelled out: words, environment, ports, key and files; nothing is started here."""

from __future__ import annotations

import getpass
import os
import secrets
import shlex
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml

from raytune_eagle.engines.builtin import builtin_path
from raytune_eagle.model.config import Config
from raytune_eagle.model.trial import Job
from raytune_eagle.rules import ALIASES

SECRET_FLAGS = ("api-key", "admin-api-key")
ENV = {
    "PYTHONUNBUFFERED": "1",  # progress is read from the log as it comes
    "GLOO_SOCKET_IFNAME": "lo",  # a server's processes are all on this machine; else the address of its name is taken
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # or each look at /health would cost a generation
}

INIT_METHOD = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""How ranks meet (``environ.py``, SGLang 0.5.12-0.5.23; older ones ignore it and meet at ``--nccl-port``)."""
_ROOM_FOR_SOCKETS = 70
"""Characters of a folder's path that leave room for a socket's name: Linux takes 107 in all."""
_OTHER_MEETINGS = ("pp-size", "nnodes", "dist-init-addr", "dp-size", "elastic-ep-backend")
"""With these there may be ranks elsewhere, or several groups of them: SGLang has them meet as it thinks right. A file
was tried with one rank (0.5.20 on a CPU) and with ``tp-size`` 2 (0.5.16, NCCL on two H200s)."""


@dataclass(frozen=True)
class Settings:
    """Where and how an engine launches.

    Attributes:
        work_dir: for the logs of servers.
        python: interpreter that has SGLang; None is this one.
        host: address that servers listen on; clients on other machines need one that they can reach.
        start_stall_s: a start without new log lines and without CPU work for so long is ended.
        start_timeout_s: a start is ended after so long.
        gpus: how many this node has; 0 asks for no GPU and looks at none.
        cores: CPU cores for the server; None is all.
        only_draft: of the whole study; a launch that cannot find it says that no other will. None with several.
    """

    work_dir: Path
    python: str | None = None
    host: str = "127.0.0.1"
    start_stall_s: float = 300.0
    start_timeout_s: float = 1800.0
    gpus: int = 0
    cores: tuple[int, ...] | None = None
    only_draft: str | None = None

    @property
    def interpreter(self) -> str:
        """The interpreter's path; a bare name is left to PATH."""
        return os.path.expanduser(self.python) if self.python else sys.executable  # noqa: PTH111  keep bare names bare


@dataclass(frozen=True)
class Launch:
    """What to start, and how to talk to it.

    Attributes:
        secret_dir: holds its key; 0700.
        scratch: holds its temporary files; may be the same. Both go with the server.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    host: str
    port: int
    key: str
    secret_dir: Path
    scratch: Path
    log_path: Path
    model: str
    cores: tuple[int, ...] | None = None

    @property
    def url(self) -> str:
        """Where the server will answer; a wildcard address is reached over loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)  # noqa: S104
        return f"http://{host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """What each request must carry."""
        return {"Authorization": f"Bearer {self.key}"}


def free_ports(host: str, count: int) -> list[int]:
    """Distinct ports that nothing listens on now, found by binding all at once."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]


def resolved(config: Config) -> Config:
    """The same with the paths of built-in models, and of those under ``~``."""
    config = config.at_home()
    spec = config.speculative
    if spec:
        spec = spec.model_copy(update={"draft": builtin_path(spec.draft, "draft")})
    return config.model_copy(update={"model": builtin_path(config.model, "target"), "speculative": spec})


def take_out(words: Sequence[str], flag: str) -> tuple[list[str], str | None]:
    """Words without ``--flag value``, and the value."""
    kept, value, rest = [], None, iter(words)
    for word in rest:
        if word == f"--{flag}":
            value = next(rest, None)
        else:
            kept.append(word)
    return kept, value


def command(settings: Settings, config: Config) -> str:
    """The launch as one pasteable shell line, without what is secret and with what only this engine would know."""
    config = resolved(config)
    words = config.argv()
    for flag in SECRET_FLAGS:
        words, _ = take_out(words, flag)
    env = [f"{name}={shlex.quote(value)}" for name, value in config.env.items()]
    launcher = (settings.interpreter if settings.python else config.launcher[0], *config.launcher[1:])
    return " ".join([*env, shlex.join([*launcher, *words])])


def prepare(settings: Settings, job: Job) -> Launch:
    """Choose ports and a key, and write the files that the server will read."""
    config = resolved(job.config)
    words, own_config = take_out(config.argv(), "config")
    given: dict[str, object] = {}
    if own_config:  # SGLang reads one --config only
        given = yaml.safe_load(Path(own_config).expanduser().read_text(encoding="utf-8")) or {}
    for flag in SECRET_FLAGS:
        words, value = take_out(words, flag)
        if value is not None:
            given[flag] = value
    key = str(given.setdefault("api-key", f"rte-{secrets.token_hex(16)}"))
    settings.work_dir.mkdir(parents=True, exist_ok=True)
    # 0700, and under work_dir: of a local Ray that is its folder, which goes with it even when the guard that would
    # remove this one is killed first
    secret_dir = Path(tempfile.mkdtemp(prefix="key-", dir=settings.work_dir))
    file = secret_dir / "server.yaml"
    with os.fdopen(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600), "w", encoding="utf-8") as out:
        yaml.safe_dump(given, out)
    port, nccl_port = free_ports(settings.host, 2)
    address = ["--host", settings.host, "--port", str(port), "--nccl-port", str(nccl_port), "--config", str(file)]
    scratch = _scratch(secret_dir)
    meeting = _meeting(words, given, secret_dir / "ranks") | _shared_memory(settings, nccl_port)
    return Launch(
        argv=(settings.interpreter, *config.launcher[1:], *words, *address),
        env={**meeting, **_environment(settings, config, scratch)},
        host=settings.host,
        port=port,
        key=key,
        secret_dir=secret_dir,
        scratch=scratch,
        log_path=settings.work_dir / f"{job.number:05d}-{job.kind}-{job.config.uid}.log",
        model=config.model,
        cores=settings.cores,
    )


def _meeting(words: Sequence[str], given: Mapping[str, object], file: Path) -> dict[str, str]:
    """One group of ranks on one machine: a file of its own, where torch's TCPStore would listen on every address."""
    named = [*(word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")), *given]
    if any(ALIASES.get(name, name) in _OTHER_MEETINGS for name in (each.replace("_", "-") for each in named)):
        return {}
    return {INIT_METHOD: f"file://{file}"}


def _shared_memory(settings: Settings, port: int) -> dict[str, str]:
    """Names that of SGLang's all-reduce on CPUs with AMX, as it does itself where ranks meet at ``--nccl-port``."""
    return {} if settings.gpus else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _scratch(secret_dir: Path) -> Path:
    """Where a server's temporary files go: SGLang leaves five a launch, sockets most of them (0.5.16-0.5.20)."""
    if len(os.fspath(secret_dir)) <= _ROOM_FOR_SOCKETS:
        return secret_dir
    return Path(tempfile.mkdtemp(prefix="rte-", dir="/tmp"))


def _environment(settings: Settings, config: Config, scratch: Path) -> dict[str, str]:
    """Ours, then what an engine wants, then the configuration's own."""
    path = os.environ.get("PATH", os.defpath)
    if os.sep in settings.interpreter:  # kernels compiled at start want that environment's ninja and nvcc
        path = f"{Path(settings.interpreter).parent}{os.pathsep}{path}"
    # Where torch keeps what it compiled by default: it is not to be compiled anew in each launch.
    kernels = {"TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"}
    return {**kernels, **os.environ, "PATH": path, "TMPDIR": str(scratch), **ENV, **config.env}
