"""A client whose only way out is a proxy: which addresses go through it, and what it and the log get to see."""

import asyncio
import os
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedkseed import FedKSeedError
from fedkseed.network.https import server
from fedkseed.network.https.connections import Connections
from fedkseed.network.https.join import HttpsClient
from fedkseed.network.https.way_out import proxy_of, through
from fedkseed.network.protocol.certs import make
from fedkseed.network.protocol.signatures import Audiences, private_key

from ..ports import free_port, wait_for
from .test_join import EndedError

NAME = "fl.example.org"  # which no machine has: the proxy alone knows the way
VARIABLES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


class Tunnels:
    """A proxy that knows CONNECT, and brings every host to one port of this machine."""

    def __init__(self, target: int) -> None:
        self.target, self.port, self.asked, self.passed = target, 0, list[str](), bytearray()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.listener = asyncio.run_coroutine_threadsafe(self._listen(), self.loop).result(10)
        self.port = self.listener.sockets[0].getsockname()[1]

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._tunnel, "127.0.0.1", 0)

    async def _tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            self.asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
            inner, outer = await asyncio.open_connection("127.0.0.1", self.target)
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await asyncio.gather(self._copy(reader, outer), self._copy(inner, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 14):
                self.passed += data
                writer.write(data)
        finally:
            writer.close()

    async def _end(self) -> None:
        self.listener.close()
        tunnels = asyncio.all_tasks() - {asyncio.current_task()}
        for tunnel in tunnels:
            tunnel.cancel()
        await asyncio.gather(*tunnels, return_exceptions=True)
        await asyncio.sleep(0.05)  # connections end in later turns of the loop

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


class Desk:
    """Whoever answers tasks, of which none comes."""

    kept, log = "", ""

    def open(self) -> None: ...
    def close(self) -> None: ...
    def reply(self, task: bytes, begun: Any) -> bytes:
        raise AssertionError("no task comes")


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[tuple[Connections, int, Path]]:
    keys, port = tmp_path / "keys", free_port()
    make(keys, 1, [NAME, "localhost"], 2)
    hub = Connections(Audiences.of(keys), [private_key(keys / "client-0").public_key()])
    with server.listening(hub, server.Address("127.0.0.1", port), 500, keys):
        yield hub, port, keys


def attended(keys: Path, url: str, until: Any) -> list[str]:
    """What a client says until something is so."""
    said, ends = list[str](), threading.Event()
    client = HttpsClient(keys.parent / "client", url, keys / "ca.pem", keys / "client-0", Desk())

    def sleep(seconds: float) -> None:
        if ends.is_set():
            raise EndedError
        time.sleep(0.01)

    def serve() -> None:
        with suppress(EndedError, RuntimeError):  # of a connection that is closed below
            client.serve(said.append, sleep)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    wait_for(lambda: until(said))
    ends.set()
    client.session.http.close()
    return said


def test_a_client_joins_through_the_proxy_which_sees_the_server_s_name_alone(federation, monkeypatch):
    hub, port, keys = federation
    with closing(Tunnels(port)) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:s3cret@127.0.0.1:{proxy.port}")
        monkeypatch.setenv("SSL_CERT_FILE", os.devnull)  # the server's authority is the one that was given
        said = attended(keys, f"https://{NAME}:8443", lambda said: hub.nodes() == [0])
        assert said[1] == "connected as client 0"
        assert said[0].startswith(f"connecting to https://{NAME}:8443 through the proxy 127.0.0.1:{proxy.port}; logs")
        assert "s3cret" not in "".join(said)
        assert proxy.asked[0].startswith(f"CONNECT {NAME}:8443 HTTP/1.1\r\n")
        assert f"Proxy-Authorization: Basic {b64encode(b'me:s3cret').decode()}" in proxy.asked[0]
        assert b"/v1/" not in proxy.passed  # TLS ends at the server


def test_this_machine_and_what_no_proxy_names_are_reached_straight(federation, monkeypatch):
    hub, port, keys = federation
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    said = attended(keys, f"https://localhost:{port}", lambda said: hub.nodes() == [0])
    assert "proxy" not in said[0]


def test_a_proxy_that_does_not_answer_is_named(federation, monkeypatch):
    _, _, keys = federation
    monkeypatch.setenv("https_proxy", f"me:s3cret@127.0.0.1:{free_port()}")
    said = attended(keys, f"https://{NAME}:8443", lambda said: len(said) > 1)
    assert "nothing listens at the proxy 127.0.0.1:" in said[1]
    assert "s3cret" not in "".join(said)


@pytest.mark.parametrize(
    ("no_proxy", "url", "straight"),
    [
        ("", "https://fl.example.org:8443", False),
        ("example.org", "https://fl.example.org:8443", True),
        (".example.org", "https://fl.example.org:8443", True),
        ("other.org, fl.example.org", "https://FL.example.org:8443", True),
        ("ample.org", "https://fl.example.org", False),
        ("*", "https://fl.example.org", True),
        ("10.0.0.0/8", "https://10.1.2.3:8443", True),
        ("10.0.0.0/8", "https://11.1.2.3:8443", False),
        ("fd00::/8", "https://[fd00::1]:8443", True),
        ("", "https://127.0.0.1:8443", True),
        ("", "https://[::1]:8443", True),
        ("", "https://localhost:8443", True),
    ],
)
def test_no_proxy_names_hosts_endings_addresses_and_networks(no_proxy, url, straight, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "http://proxy.example.org:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (proxy_of(url) is None) == straight
    assert through(url) == ("" if straight else " through the proxy proxy.example.org:3128")


def test_the_variable_of_https_comes_before_that_of_all_and_that_of_http_is_for_others(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://wrong.example.org:1")
    assert proxy_of("https://fl.example.org") is None
    monkeypatch.setenv("ALL_PROXY", "http://all.example.org:1")
    monkeypatch.setenv("HTTPS_PROXY", "http://one.example.org:1")
    proxy = proxy_of("https://fl.example.org")
    assert proxy is not None
    assert proxy.url == httpx.URL("http://one.example.org:1")


@pytest.mark.parametrize("value", ["socks5://me:s3cret@proxy:1080", "https://me:s3cret@proxy:3128", "http://:s3cret@"])
def test_another_kind_of_proxy_is_refused_without_its_password(value, monkeypatch):
    monkeypatch.setenv("https_proxy", value)
    with pytest.raises(FedKSeedError, match=r"https_proxy begins with .*; the way out is a proxy of HTTP") as refused:
        proxy_of("https://fl.example.org:8443")
    assert "s3cret" not in str(refused.value)
