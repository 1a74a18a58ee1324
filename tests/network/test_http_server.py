"""What a stranger can cost a server: services in processes of their own, and attacks on them from this one."""

import asyncio
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization

from fedkseed.network.http_server import Crowd, Doorkeeper, listen, listening_at, serving
from fedkseed.network.peers import tls
from fedkseed.network.peers.app import path_of
from fedkseed.network.protocol.certs import add, make, sign

from . import attacks
from .attacks import Target
from .peers.synthetic import PEERS, Federation, line, secret
from .ports import wait_for

MB = 1 << 20


@dataclass
class Service:
    """A running service, an attacker's way to it, and an honest request."""

    process: subprocess.Popen[str]
    target: Callable[..., Target]
    serves: Callable[[], object]


def begun(kind: str, folder: Path) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "tests.network.services", kind, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.fixture(scope="module", params=["https", "peers", "page"])
def service(request, tmp_path_factory) -> Iterator[Service]:
    folder, contexts, paths = tmp_path_factory.mktemp("service"), [], ("/", "/nowhere")
    if request.param == "peers":
        make(folder, 0, ["localhost"], 2)
        for number in range(PEERS):
            (folder / f"{number}.pub").write_text(line(number))
            add(folder, folder / f"{number}.pub")
            sign(folder, number, [], 2)
            form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            key = secret(number).private_bytes(serialization.Encoding.PEM, form, none)
            (folder / f"{number}.key").write_bytes(key)
            files = folder / f"{number}.key", folder / f"client-{number}.pem", folder / "ca.pem"
            contexts.append(tls.contexts(*files, folder)[1])
        paths = f"{path_of(Federation.of().rule.run)}/set?digest=", f"{path_of(Federation.of().rule.run)}/give"
    process, port = begun(request.param, folder)
    try:
        if request.param == "https":
            contexts = 2 * [ssl.create_default_context(cafile=str(folder / "keys" / "ca.pem"))]
            paths = "/v1/challenge", f"/v1/task/{'0' * 32}"
        honest, attacker = contexts[:2] or (None, None)
        scheme = "http" if honest is None else "https"

        def serves() -> None:
            with httpx.Client(verify=honest or True, timeout=20, trust_env=False) as http:
                answer = http.get(f"{scheme}://localhost:{port}{paths[0]}")
                assert answer.status_code == 200, answer.text

        yield Service(process, lambda: Target(process.pid, port, attacker, paths[1]), serves)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_endless_headers_and_bodies(service):
    target = service.target()
    with target.bounded(service.serves):
        for attack in (attacks.endless_header, attacks.headers_of_five_bytes):
            assert attack(target, 64 * MB) < 64 * MB, "the server has ended it"
        attacks.endless_body(target, 96 * MB)


def test_bodies_that_nobody_waits_for(service):
    target = service.target()
    with target.bounded(service.serves):
        attacks.bodies(target, 12, 16 * MB)


def test_half_open_and_dripping_connections(service):
    target = service.target()
    with target.bounded(service.serves):
        headers = attacks.half_open(target, 80)
        bodies = [target.connect() for _ in range(5)]
        for one in bodies:
            with suppress(OSError):
                one.sendall(target.post + b"content-length: 100000\r\n\r\n")
        service.serves()
        assert attacks.dripped(headers, b"x", 2.5) == 0, "a header is whole in a second here, or its connection ends"
        wait_for(lambda: attacks.dripped(bodies, b"x", 0.5) == 0)


def test_an_owner_of_many_connections():
    release, connections = threading.Event(), []

    async def app(scope, receive, send):
        connections.append(scope["state"]["connection"])
        while scope["path"] == "/waits" and not release.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    at = listen("127.0.0.1", 0)
    target = Target(0, at.getsockname()[1])
    with target.opened, serving(app, at, None, Crowd(3)):
        busy = target.connect()
        busy.sendall(b"GET /waits HTTP/1.1\r\nhost: x\r\n\r\n")
        wait_for(lambda: connections)
        idle = [target.connect() for _ in range(6)]
        wait_for(lambda: attacks.alive(idle) == 2)  # before the first request: one that is answered may stay
        for one in idle[-2:]:
            one.settimeout(20)
            one.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert one.recv(100).startswith(b"HTTP/1.1 200 ")
        assert attacks.alive(idle[-2:]) == 2, "the newest"
        release.set()
        assert not connections[0].gone.is_set()
        assert busy.recv(100).startswith(b"HTTP/1.1 200 ")
        busy.close()
        assert connections[0].gone.wait(10)


@pytest.mark.parametrize(
    ("host", "token", "headers", "path", "status"),
    [
        ("127.0.0.1", "", {}, "/now", 200),
        ("127.0.0.1", "", {"host": "localhost:8000"}, "/now", 200),
        ("::1", "", {"host": "[::1]:8000"}, "/now", 200),
        ("127.0.0.1", "", {"host": "attacker.example"}, "/now", 403),
        ("127.0.0.1", "", {"host": "127.0.0.1.attacker.example:8000"}, "/now", 403),
        ("127.0.0.1", "", {"host": ""}, "/now", 403),
        ("127.0.0.1", "", {"host": "localhost:8000", "origin": "http://localhost:8000"}, "/now", 200),
        ("127.0.0.1", "", {"host": "localhost:8000", "origin": "http://attacker.example"}, "/now", 403),
        ("127.0.0.1", "", {"host": "localhost:8000", "origin": "null"}, "/now", 403),
        ("127.0.0.1", "secret", {}, "/now", 401),
        ("127.0.0.1", "secret", {"authorization": "Bearer secret"}, "/now", 200),
        ("127.0.0.1", "secret", {"authorization": "Bearer secre"}, "/now", 401),
        ("127.0.0.1", "secret", {"authorization": "Bearer s\xe9cret"}, "/now", 401),
        ("127.0.0.1", "secret", {"authorization": "Bearer secret", "host": "attacker.example"}, "/now", 403),
        ("0.0.0.0", "secret", {"host": "lab.example:8000"}, "/secret/now", 200),  # noqa: S104 - nobody listens
        ("0.0.0.0", "secret", {"host": "lab.example:8000"}, "/now", 401),  # noqa: S104
        ("0.0.0.0", "secret", {"host": "lab.example:8000"}, "/secre/now", 401),  # noqa: S104
    ],
)  # fmt: skip
def test_who_is_answered_locally(host, token, headers, path, status):
    paths = []

    async def app(scope, receive, send):
        paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    answer = asked(Doorkeeper(app, host, token), path, headers)
    assert answer.status_code == status, answer.text
    assert paths == ["/now"] * (status == 200)


def test_a_body_for_such_an_address_is_bounded():
    async def app(scope, receive, send):
        assert (await receive())["body"] == b"asked"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    door = Doorkeeper(app, "127.0.0.1", most=10)
    assert asked(door, "/", {}, b"asked").status_code == 200
    assert asked(door, "/", {}, b"asked too much").status_code == 413


def asked(app: object, path: str, headers: dict[str, str], body: bytes = b"") -> httpx.Response:
    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            encoded = {name: text.encode("latin-1") for name, text in headers.items()}
            return await client.post(path, content=body, headers=encoded)

    return asyncio.run(once())


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_an_address_is_shown_as_it_stands_in_a_url(host, shown):
    with listen(host, 0) as at:
        assert listening_at(at) == f"{shown}:{at.getsockname()[1]}"
        assert httpx.URL(f"http://{listening_at(at)}/").port == at.getsockname()[1]
