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

SPEC = Path(__file__).parent.parent / "search_spaces" / "tiny_cpu.yaml"


def asked(*words):
    """Finished process, and the seconds that it took."""
    began = time.monotonic()
    command = [sys.executable, "-m", "raytune_eagle", *map(str, words)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
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
def test_nobody_there(words):
    """A port that nobody listens on: exit 1 and one line, for every command that joins a cluster."""
    done, seconds = asked(*words, "--cluster", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"raytune-eagle: --cluster 127\.0\.0\.1:1: nobody answers at .*\n", done.stderr)
    assert seconds < 20


@pytest.mark.slow
def test_no_address():
    """What cannot be an address is bad usage."""
    done, _ = asked("nodes", "--cluster", "nonsense")
    assert done.returncode == 2
    assert done.stderr.startswith("raytune-eagle: --cluster nonsense: give `local`, `auto` or HOST:PORT")
    assert done.stderr.count("\n") == 1
