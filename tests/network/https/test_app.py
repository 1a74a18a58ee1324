"""The requests of clients against a real server with TLS on loopback."""

import os
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from fedkseed import FedKSeedError
from fedkseed.network import limits
from fedkseed.network.https import app, server
from fedkseed.network.https.connections import Connections
from fedkseed.network.https.task_files import Stub
from fedkseed.network.protocol.certs import make
from fedkseed.network.protocol.envelope import Task
from fedkseed.network.protocol.signatures import Audiences, private_key

from ..attacks import MEMORY, Target
from ..ports import free_port, wait_for
from .test_connections import parcel, proof, task

LARGEST = 1000  # bytes of a reply


@dataclass
class Place:
    """A server, and a way to ask it."""

    hub: Connections
    http: httpx.Client
    keys: Path
    port: int

    def session(self, number: int) -> dict[str, str]:
        """The headers of a client's new session."""
        challenge = self.http.get("/v1/challenge").content
        signed = proof(self.hub, private_key(self.keys / f"client-{number}"), challenge)
        found = self.http.post("/v1/session", content=signed).json()
        assert found["client"] == number
        return {"authorization": f"Bearer {found['token']}"}

    @contextmanager
    def line(self, head: str, mine: dict[str, str]) -> Iterator[ssl.SSLSocket]:
        """A connection of its own, on which a session's request has begun."""
        context = ssl.create_default_context(cafile=str(self.keys / "ca.pem"))
        plain = socket.create_connection(("localhost", self.port), 30)
        with closing(plain), context.wrap_socket(plain, server_hostname="localhost") as secured:
            secured.sendall(f"{head} HTTP/1.1\r\nhost: x\r\nauthorization: {mine['authorization']}\r\n".encode())
            yield secured


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    keys, port = tmp_path_factory.mktemp("keys"), free_port()
    make(keys, 3, ["localhost"], 2)
    hub = Connections(Audiences.of(keys), [private_key(keys / f"client-{number}").public_key() for number in range(3)])
    context = ssl.create_default_context(cafile=str(keys / "ca.pem"))
    with (
        server.listening(hub, server.Address("127.0.0.1", port), LARGEST, keys),
        httpx.Client(base_url=f"https://localhost:{port}", verify=context, timeout=30) as http,
    ):
        yield Place(hub, http, keys, port)


def test_a_client_proves_its_key_waits_fetches_files_and_answers(place):
    mine = place.session(0)
    (key,) = place.hub.send([parcel(0)])
    stub = Stub.decode(place.http.get("/v1/task?wait=5", headers=mine).content)
    files = {name: place.http.get(f"/v1/file/{name.hex()}") for name in stub.names}
    assert {file.headers["cache-control"] for file in files.values()} == {"public, max-age=31536000, immutable"}
    assert stub.task(lambda name: files[name].content) == task(0).encode()
    assert place.http.post(f"/v1/task/{stub.key.hex()}", content=b"a reply", headers=mine).status_code == 204
    assert [arrival.data for arrival in place.hub.arrived([key or ""])] == [b"a reply"]
    nothing = place.http.get("/v1/task?wait=0.01", headers=mine)
    assert (nothing.status_code, nothing.content) == (204, b"")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404), ("GET", "/v1", 404), ("GET", "/v1/tasks", 404), ("GET", "/v1/file/../task", 401),
        ("POST", "/v1/task", 405), ("DELETE", "/v1/session", 405), ("GET", "/v1/task", 401),
        ("GET", "/v1/task?wait=soon", 400), ("GET", "/v1/task?after=00", 400), ("GET", "/v1/file/00", 400),
        ("GET", f"/v1/file/{'0' * 64}", 404), ("GET", "/v1/file/%2e%2e%2frun.sqlite", 404),
        ("POST", f"/v1/task/{'0' * 32}", 401), ("POST", "/v1/session", 401), ("GET", "/docs", 404),
        ("POST", "/v1/checks", 401), ("GET", "/v1/checks", 405),
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_a_line(place, method, path, status):
    answer = place.http.request(method, path)
    assert answer.status_code == status
    assert 0 < len(answer.text) < 200
    assert answer.text.count("\n") == 1
    assert "server" not in answer.headers


def test_tokens_of_nobody_are_refused(place):
    for header in ("Bearer x", "Bearer", "Basic x", "Bearer " + "x" * 4000):
        answer = place.http.get("/v1/task", headers={"authorization": header})
        assert answer.status_code == 401


def test_a_reply_that_is_too_large_is_not_read(place):
    mine = place.session(1)
    (key,) = place.hub.send([parcel(1)])
    assert place.http.post(f"/v1/task/{key}", content=bytes(LARGEST + 1), headers=mine).status_code == 413
    parts = (bytes(100) for _ in range(1000))  # without a length
    assert place.http.post(f"/v1/task/{key}", content=parts, headers=mine).status_code == 413
    assert place.hub.arrived([key or ""]) == []
    assert place.http.post(f"/v1/task/{key}", content=bytes(LARGEST), headers=mine).status_code == 204


def test_a_reply_that_stands_still_is_given_up(place, monkeypatch):
    monkeypatch.setattr(limits, "PATIENCE", 0.2)
    mine = place.session(2)
    (key,) = place.hub.send([parcel(2)])
    with place.line(f"POST /v1/task/{key}", mine) as slow:
        slow.sendall(b"content-length: 500\r\n\r\nabc")
        assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_a_reply_to_no_task_is_not_read_and_of_two_for_one_task_the_later_is(place):
    mine = place.session(0)
    with place.line(f"POST /v1/task/{'0' * 32}", mine) as line:
        line.sendall(b"content-length: 1000\r\n\r\n")
        assert line.recv(1000).startswith(b"HTTP/1.1 410 ")
    (key,) = place.hub.send([parcel(0)])
    with place.line(f"POST /v1/task/{key}", mine) as first:
        first.sendall(b"content-length: 1000\r\n\r\nabc")
        time.sleep(0.2)
        assert place.http.post(f"/v1/task/{key}", content=b"a reply", headers=mine).status_code == 204
        assert first.recv(1000).startswith(b"HTTP/1.1 409 ")
    assert [arrival.data for arrival in place.hub.arrived([key or ""])] == [b"a reply"]


def test_a_large_answer_waits_for_its_reader(place):
    sent, mine = parcel(0), place.session(0)
    large = replace(sent, data=replace(Task.decode(sent.data), message=bytes(32 << 20)).encode())
    place.hub.send([large])
    stub = Stub.decode(place.http.get("/v1/task?wait=5", headers=mine).content)
    target = Target(os.getpid(), place.port)
    before = target.memory()
    with ExitStack() as readers:
        for _ in range(10):
            line = readers.enter_context(place.line(f"GET /v1/file/{stub.names[2].hex()}", mine))
            line.sendall(b"\r\n")
            assert line.recv(10) == b"HTTP/1.1 2"
        assert target.memory() - before < MEMORY
    assert place.http.get(f"/v1/file/{stub.names[2].hex()}").content == bytes(32 << 20)
    assert place.http.post(f"/v1/task/{stub.key.hex()}", content=b"a reply", headers=mine).status_code == 204


def test_a_client_that_hangs_up_waits_no_more(place):
    with place.line("GET /v1/task?wait=200", place.session(0)) as line:
        line.sendall(b"\r\n")
        wait_for(lambda: place.hub._clients[0].wake)
    wait_for(lambda: place.hub._clients[0].wake is None)


def test_strangers_of_one_address_are_limited(place, monkeypatch):
    monkeypatch.setattr(app, "PENALTY", 0.0)
    port = free_port()
    with (
        server.listening(place.hub, server.Address("127.0.0.1", port, False, 1.0), LARGEST, place.keys),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
    ):
        found = [http.get("/v1/challenge").status_code for _ in range(30)]
        assert found[:8] == [200] * 8
        for path in ("/v1/challenge", f"/v1/file/{'0' * 64}", "/v1/task", "/nowhere"):
            assert 429 in [http.get(path).status_code for _ in range(30)], "to any path"


def test_without_a_trusted_certificate_nothing_is_said(place):
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://localhost:{place.port}/v1/challenge", timeout=30)


def test_a_port_that_is_taken_is_refused(place):
    address = server.Address("127.0.0.1", place.port)
    taken = f"can't listen on port {place.port} of 127.0.0.1: Address already in use.*; take another port"
    with pytest.raises(FedKSeedError, match=taken), server.listening(place.hub, address, 1, place.keys):
        pass
