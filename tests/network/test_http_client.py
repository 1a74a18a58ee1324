"""What a hostile server or peer can cost whoever asks it, on real connections and by generated answers."""

import gzip
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from fedkseed import FedKSeedError
from fedkseed.errors import without_controls
from fedkseed.network.http_client import AnswerError, BoundedClient
from fedkseed.network.https.join import HttpsClient, ServerSession
from fedkseed.network.protocol.certs import make
from fedkseed.network.protocol.signatures import certificate

from .attacks import MEMORY

KEY = ec.generate_private_key(ec.SECP256R1())
HEAD = b"HTTP/1.1 200 OK\r\n"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b2J\u202egnp.exe\u2066\x00\r"
BOMB = gzip.compress(bytes(32 << 20))  # 32 KB; of zstd they would be 1 GB, and neither is unpacked


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make(folder, 1, ["localhost"], 2)
    return folder


@contextmanager
def saying(keys: Path, parts: Callable[[], Iterator[bytes]], pause: float = 0.0) -> Iterator[str]:
    """A server that answers each request with these parts, and waits after each; yields its address."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(keys / "server.pem", keys / "server.key")
    ended = threading.Event()

    def talk(line: socket.socket) -> None:
        with suppress(OSError), tls.wrap_socket(line, server_side=True) as secured:
            secured.recv(1 << 16)
            for part in parts():
                secured.sendall(part)
                if ended.wait(pause):
                    return

    def listen() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield f"https://localhost:{listener.getsockname()[1]}"
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
PIECE = bytes(1 << 16)
ENDLESS = {
    "a body": lambda: chain([HEAD + b"\r\n"], repeat(PIECE, 4000)),
    "a body in chunks": lambda: chain([CHUNKED], repeat(b"10000\r\n" + PIECE + b"\r\n", 4000)),
    "the size of a chunk": lambda: chain([CHUNKED], repeat(b"0" * len(PIECE), 4000)),
    "a header": lambda: chain([HEAD + b"x: "], repeat(b"a" * len(PIECE), 4000)),
    "headers of five bytes": lambda: chain([HEAD], repeat(b"a:b\r\n" * 13000, 1000)),
    "a refusal": lambda: chain([b"HTTP/1.1 500 no\r\n\r\n"], repeat(PIECE, 4000)),
    "a gzip of much": lambda: iter([HEAD + b"content-encoding: gzip\r\nconnection: close\r\n\r\n" + BOMB]),
    "a zstd": lambda: iter([HEAD + b"content-encoding: zstd\r\nconnection: close\r\n\r\n" + bytes(100)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_answer(keys, kind):
    before, tls = memory(), ssl.create_default_context(cafile=str(keys / "ca.pem"))
    refused = pytest.raises((AnswerError, httpx.TransportError))
    with saying(keys, ENDLESS[kind]) as url, closing(BoundedClient(tls, 20.0, 1, url)) as http, refused:
        http.ask("GET", "/v1/task", 1000)
    assert memory() - before < MEMORY


@pytest.mark.parametrize(
    "parts",
    [
        lambda: iter([HEAD + b"content-length: 9\r\n\r\n", *repeat(b"x", 8)]),
        lambda: (bytes([letter]) for letter in HEAD + b"x: " + b"a" * 1000),
        lambda: repeat(b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["a body", "a header", "words before it"],
)
def test_a_dripping_answer(keys, parts):
    """httpx counts the seconds of single reads, so that a byte in each 9 s holds it for ever."""
    tls, begin = ssl.create_default_context(cafile=str(keys / "ca.pem")), time.monotonic()
    refused = pytest.raises(httpx.TransportError)
    with saying(keys, parts, 0.15) as url, closing(BoundedClient(tls, 20.0, 1, url)) as http, refused:
        http.ask("GET", "/v1/task", 1000, seconds=0.5)
    assert time.monotonic() - begin < 10


class Unconnected:
    def get_extra_info(self, name: str) -> None: ...


def answered(body: bytes, status: int = 200, **headers: str) -> httpx.Response:
    """An answer as it comes from a connection: not decoded yet."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    about = {"network_stream": Unconnected()}
    return httpx.Response(status, stream=httpx.ByteStream(body), headers=named, extensions=about)


def replies(answers: Iterator[httpx.Response]) -> httpx.Client:
    """The client of a server that gives one answer after the other."""
    transport = httpx.MockTransport(lambda request: next(answers))
    return httpx.Client(base_url="https://localhost:1", transport=transport)


def session(answers: Iterator[httpx.Response], ca: x509.Certificate) -> ServerSession:
    """A session whose server gives one answer after the other."""
    http = BoundedClient(ssl.create_default_context(), 1.0, url="https://localhost:1")
    http.http = replies(answers)
    return ServerSession(http, KEY, ca)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just(ESCAPES),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["token", "wait", "client", "x"]), inner)
    ),
    max_leaves=8,
)
BODIES = (
    st.binary(max_size=400)
    | JSON.map(lambda table: json.dumps(table).encode())
    | st.fixed_dictionaries({"token": JSON, "wait": JSON, "client": JSON}).map(lambda table: json.dumps(table).encode())
    | st.sampled_from([b"[" * 4000, b'{"token": "t", "wait": 1e999, "client": 1e999}', b"9" * 4000])
)
STATUSES = st.sampled_from([200, 200, 200, 204, 301, 400, 401, 403, 404, 409, 410, 429, 500, 503])
NAMES = st.sampled_from(["content_encoding", "content_type", "location", "content_length"])
HEADERS = st.dictionaries(NAMES, st.sampled_from(["gzip", "zstd", "text/plain; charset=utf-7", "-1", "/", "br"]))


@given(
    body=BODIES,
    status=STATUSES,
    headers=HEADERS,
    request=st.sampled_from(["begin", "challenge", "next_task", "file", "send"]),
)
def test_generated_answers(keys, body, status, headers, request):
    challenged = [answered(bytes(32))] * (request == "begin")
    ca = certificate(keys / "ca.pem")
    asked = session(iter([*challenged, answered(body, status, **headers)]), ca)
    calls = {
        "begin": asked.begin, "challenge": asked.challenge, "next_task": lambda: asked.next_task(b"", True),
        "file": lambda: asked.file(bytes(32)), "send": lambda: asked.send(bytes(16), b"reply").text,
    }  # fmt: skip
    words = ""
    try:
        words = calls[request]()
    except (FedKSeedError, httpx.TransportError) as error:
        words = str(error)
    assert not isinstance(words, str) or without_controls(words) == words


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xff\xfe", b"null", b"[]", b'{"token": "t"}', b'{"token": "t\\n", "wait": 1, "client": 0}', b"[" * 4000,
        b'{"token": "t", "wait": NaN, "client": 0}', b'{"token": "t", "wait": 1e999, "client": 0}',
        b'{"token": "t", "wait": -1, "client": 0}', b'{"token": "t", "wait": 1, "client": 1e9}',
        b'{"token": "\\u001b[2J", "wait": 1, "client": 0}',
    ],
)  # fmt: skip
def test_a_server_that_begins_a_session_in_other_words_ends_a_client_with_a_sentence(keys, tmp_path, body):
    class Desk:
        kept = ""
        open = close = finish = lambda self: None

    client = HttpsClient(tmp_path / "c", "https://localhost:1", keys / "ca.pem", keys / "client-0", Desk())  # type: ignore
    client.session.http.http = replies(iter([answered(bytes(32)), answered(body)]))
    with pytest.raises(FedKSeedError, match=r"is no server of fedkseed .*: mend the address"):
        client.serve(len, lambda seconds: None)


def test_what_others_write_moves_no_cursor_and_turns_no_letters_around():
    text = str(FedKSeedError(f"the server said {ESCAPES}\nand more\tto read, ünïcödé 日本"))
    assert not any(character in text for character in ESCAPES if not character.isprintable())
    assert text.endswith("\nand more\tto read, ünïcödé 日本")
