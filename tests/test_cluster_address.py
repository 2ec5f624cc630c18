"""`--cluster` where no Ray is: told in one line within seconds, which Ray itself takes minutes for."""

import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from raytune_eagle.cli import main
from raytune_eagle.nodes.address import host_and_port

SPEC = Path(__file__).parent.parent / "search_spaces" / "tiny_cpu.yaml"


def asked(*words, cwd=None):
    """Finished process, and the seconds that it took."""
    began = time.monotonic()
    command = [sys.executable, "-m", "raytune_eagle", *map(str, words)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=cwd)
    return done, time.monotonic() - began


@pytest.fixture
def stranger():
    """Address of a server that speaks first, as sshd does, and no gRPC."""
    server, greeted = socket.create_server(("127.0.0.1", 0)), []

    def greet():
        with suppress(OSError):  # the server was closed
            while True:
                greeted.append(server.accept()[0])
                greeted[-1].sendall(b"SSH-2.0-x\r\n")

    thread = threading.Thread(target=greet)
    thread.start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    server.shutdown(socket.SHUT_RDWR)
    thread.join()
    for each in [server, *greeted]:
        each.close()


@pytest.mark.slow
def test_another_server_is_no_head(stranger):
    """What answers, but is no head: exit 1 and one line, within 20 s on a busy machine."""
    done, seconds = asked("doctor", SPEC, "--cluster", stranger)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"raytune-eagle: --cluster \S+: what listens at \S+ is no Ray head.*\n", done.stderr)
    assert seconds < 20


@pytest.mark.slow
@pytest.mark.parametrize("words", [("doctor", SPEC), ("run", SPEC), ("nodes",), ("plan", SPEC)])
def test_nobody_there(words, tmp_path):
    """A port that nobody listens on: exit 1 and one line, for every command that joins a cluster."""
    done, seconds = asked(*words, "--cluster", "127.0.0.1:1", cwd=tmp_path)  # no study there that is through
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"raytune-eagle: --cluster 127\.0\.0\.1:1: nobody answers at .*\n", done.stderr)
    assert seconds < 20


@pytest.mark.slow
def test_no_address():
    """What cannot be an address is bad usage."""
    done, _ = asked("nodes", "--cluster", "nonsense")
    assert done.returncode == 2
    assert done.stderr == "raytune-eagle: --cluster nonsense: give `auto` or HOST:PORT\n"


@pytest.mark.slow
@pytest.mark.parametrize("address", ["foo", "host:abc", "http://x"])
def test_no_address_in_the_environment(monkeypatch, address):
    """`auto` goes where Ray's own variable says, which is named when that cannot be one."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    done, _ = asked("nodes", "--cluster", "auto")
    assert done.returncode == 2
    assert re.fullmatch(r"raytune-eagle: RAY_ADDRESS.*: give `auto` or HOST:PORT.*\n", done.stderr)
    assert address in done.stderr
    assert done.stderr.count("\n") == 1


CHOICES = {
    "run": "`local`, `auto`, HOST:PORT or simulated:NAME",
    "plan": "`local`, `auto`, HOST:PORT or simulated:NAME",
    "doctor": "`local`, `auto` or HOST:PORT",
    "probe": "`local`, `auto` or HOST:PORT",
    "nodes": "`auto` or HOST:PORT",
}
NO_ADDRESSES = [
    "",
    "simulated",
    "nonsense",
    "host:abc",
    "host:99999",
    "host:0",
    "host:",
    ":6379",
    "http://x",
    "ray://host:10001",
    "::1:6379",
    "two words:1",
]


@pytest.mark.parametrize("where", NO_ADDRESSES)
@pytest.mark.parametrize("command", CHOICES)
def test_what_cannot_be_an_address(tmp_path, command, where):
    """Bad usage for every command, told with all that this command takes, before Ray or a file is touched."""
    words = [command, *([] if command == "nodes" else [str(SPEC)]), "--results", str(tmp_path / "new")]
    words = [word for word in words if command != "plan" or not word.startswith(("--results", str(tmp_path)))]
    done = CliRunner().invoke(main, [*words, "--cluster", where])
    assert done.exit_code == 2
    given = where or '""'
    assert done.stderr == f"raytune-eagle: --cluster {given}: give {CHOICES[command]}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("10.0.0.1:6379", ("10.0.0.1", 6379)),
        ("head-0.pod_1.example:1", ("head-0.pod_1.example", 1)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
    ],
)
def test_addresses(where, found):
    """Names, IPv4 and bracketed IPv6 addresses are taken apart into host and port."""
    assert host_and_port(where) == found
