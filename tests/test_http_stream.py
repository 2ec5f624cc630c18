"""The connection below the load generator, against sockets that answer byte for byte what a test wants."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import ssl
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from raytune_eagle.measure.http_stream import Connections, RefusedError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = CHUNKED + b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"


class Heard:
    """What a server was sent: request heads by connection."""

    def __init__(self) -> None:
        self.connections: list[list[str]] = []

    @property
    def heads(self) -> list[str]:
        """Of all connections."""
        return [head for heads in self.connections for head in heads]


async def gone(writer: asyncio.StreamWriter) -> None:
    """Close it, and wait until it is."""
    writer.close()
    with suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()


def talk(
    parts: Sequence[bytes],
    *,
    requests: int = 1,
    answers: int = 1000,
    hang_up: bool = False,
    tls: ssl.SSLContext | None = None,
    url: str = "http://127.0.0.1:{port}",
    take: Callable[[bytes, float], None] | None = None,
) -> tuple[list[bytes], Heard]:
    """Pieces that were handed on when a server answered each of `requests` with `parts`, sent one by one.

    A connection of it has so many `answers`: it hangs up on a request too many.
    """
    heard, pieces, served = Heard(), list[bytes](), set[asyncio.Task[None] | None]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads = list[str]()
        heard.connections.append(heads)
        served.add(asyncio.current_task())
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                heads.append(head.decode())
                await reader.readexactly(2)
                if len(heads) > answers:
                    break
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                if hang_up:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            await gone(writer)

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
            port = server.sockets[0].getsockname()[1]
            try:
                with closing(Connections(url.format(port=port), {"X-Key": "k"})) as connections:
                    for _ in range(requests):
                        async with asyncio.timeout(5):
                            await connections.post("/generate", b"{}", take or (lambda piece, _: pieces.append(piece)))
                        await asyncio.sleep(0.02)
            finally:
                await asyncio.gather(*filter(None, served), return_exceptions=True)

    asyncio.run(main())
    return pieces, heard


def test_pieces_are_handed_on_as_they_come_over_one_kept_connection():
    """Chunks reach the reader one by one, and three requests share a connection."""
    pieces, heard = talk([WHOLE], requests=3)
    assert pieces == [b"hello", b" world"] * 3
    assert [len(heads) for heads in heard.connections] == [3]
    assert heard.heads[0].splitlines()[0] == "POST /generate HTTP/1.1"
    assert "X-Key: k" in heard.heads[0]


@pytest.mark.parametrize("size", [1, 7, 50])
def test_an_answer_torn_anywhere_is_the_same_answer(size: int):
    """However the network cuts it, the bytes are those sent."""
    pieces, _ = talk([WHOLE[at : at + size] for at in range(0, len(WHOLE), size)])
    assert b"".join(pieces) == b"hello world"


def test_times_are_those_of_arrival():
    """Pieces that came apart have times that are apart."""
    times = list[float]()
    talk([CHUNKED + b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"], take=lambda _piece, now: times.append(now))
    assert times[1] - times[0] > 0.005


def test_an_answer_without_a_length_ends_with_its_connection():
    """A server that hangs up to say that this was all; the next request opens a connection."""
    pieces, heard = talk([HEAD + b"Connection: close\r\n\r\n", b"all"], requests=2, hang_up=True)
    assert pieces == [b"all", b"all"]
    assert len(heard.connections) == 2


def test_a_server_that_hangs_up_between_two_requests_is_asked_anew():
    """A kept connection that the server has closed is not used again."""
    pieces, heard = talk([WHOLE], requests=2, hang_up=True)
    assert pieces == [b"hello", b" world"] * 2
    assert len(heard.connections) == 2


@pytest.mark.parametrize(
    ("parts", "error", "said"),
    [
        ([b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 7\r\n\r\nno\n key"], RefusedError, "HTTP 401: no key"),
        (
            [b"HTTP/1.1 307 Moved\r\nLocation: /there\r\nContent-Length: 0\r\n\r\n"],
            RefusedError,
            "HTTP 307: moved to /there: give",
        ),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], ConnectionError, "not HTTP"),
        ([b""], ConnectionResetError, "without an answer"),
        ([CHUNKED + b"zz\r\n"], ConnectionError, "not HTTP"),
    ],
)
def test_what_is_no_answer_is_told(parts: list[bytes], error: type[Exception], said: str):
    """Each way not to answer is an error that names it."""
    with pytest.raises(error, match=said):
        talk(parts, hang_up=True)


def test_a_connection_that_ended_unseen_is_asked_anew():
    """A server that hangs up when it is asked again, without a byte, is asked over a new connection."""
    pieces, heard = talk([WHOLE], requests=3, answers=1)
    assert pieces == [b"hello", b" world"] * 3
    assert [len(heads) for heads in heard.connections] == [2, 2, 1]


def test_an_announcement_is_not_the_answer():
    """Status 100 to 199 come before the answer."""
    pieces, _ = talk([b"HTTP/1.1 103 Early Hints\r\n\r\n", WHOLE])
    assert pieces == [b"hello", b" world"]


def test_what_the_reader_raises_ends_the_request():
    """The reader's own error reaches the caller as it is."""

    def refuse(_piece: bytes, _now: float) -> None:
        raise KeyError("meta_info")

    with pytest.raises(KeyError, match="meta_info"):
        talk([WHOLE], take=refuse)


def test_a_path_in_the_address_is_sent():
    """As behind a proxy."""
    _, heard = talk([WHOLE], url="http://127.0.0.1:{port}/behind")
    assert heard.heads[0].startswith("POST /behind/generate ")


def certificate(folder: Path) -> Path:
    """A key and a certificate of its own for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    file = folder / "server.pem"
    file.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    return file


def test_https_is_spoken_to_who_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A server with a certificate that the system knows is measured; one with another is not."""
    file = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)
    with pytest.raises(ssl.SSLCertVerificationError):
        talk([WHOLE], tls=context, url="https://127.0.0.1:{port}")
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    assert talk([WHOLE], tls=context, url="https://127.0.0.1:{port}")[0] == [b"hello", b" world"]
