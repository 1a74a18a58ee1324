"""The reason why a server is not reached, found out on real connections of this machine."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from fedkseed.network.http_client import BoundedClient
from fedkseed.network.https.unreachable import Unreachable, reason_of
from fedkseed.network.protocol.certs import make

from ..ports import free_port


@contextmanager
def answering(said: bytes, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A server that says the same to everybody, for each connection once; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                    with connection if tls is None else tls.wrap_socket(connection, server_side=True) as talk:
                        talk.recv(4096)
                        talk.sendall(said)
                except (ssl.SSLError, ConnectionError):
                    continue
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def reason(url: str, ca: ssl.SSLContext, proxy: str = "", timeout: float = 5.0) -> Unreachable:
    with closing(BoundedClient(ca, timeout, url=url)) as http, pytest.raises(httpx.TransportError) as refused:
        http.ask("GET", "/v1/challenge", 32)
    return reason_of(refused.value, url, proxy)


def trusting(keys) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(keys / "ca.pem"))


@pytest.fixture
def keys(tmp_path):
    make(tmp_path / "keys", 1, ["fl.example.org"], 2)
    make(tmp_path / "other", 1, ["localhost"], 2)
    return tmp_path / "keys"


def as_server(keys) -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(keys / "server.pem", keys / "server.key")
    return tls


def test_a_certificate_of_another_authority_or_name_is_no_matter_of_time(keys):
    with answering(b"", as_server(keys)) as port:
        authority = reason(f"https://localhost:{port}", trusting(keys.parent / "other"))
        name = reason(f"https://{socket.gethostname()}:{port}", trusting(keys)) if resolves() else None
        address = reason(f"https://127.0.0.2:{port}", trusting(keys)) if name is None else name
    assert f"the certificate of localhost:{port} is not by the authority of --ca" in authority.text
    assert "get ca.pem of this very server" in authority.text
    assert "is for other names than" in address.text
    assert "make one with --host" in address.text
    assert not authority.passes
    assert not address.passes


def resolves() -> bool:
    """Whether this machine's own name leads to the address on which the server of a test listens."""
    try:
        return socket.gethostbyname(socket.gethostname()) == "127.0.0.1"
    except OSError:
        return False


@pytest.mark.parametrize(("days", "said"), [(-30, "certificate has expired"), (30, "certificate is not yet valid")])
def test_a_certificate_that_is_not_valid_now_is_told_with_this_clock(tmp_path, days, said):
    make(tmp_path, 0, ["localhost"], 2, datetime.now(UTC) + timedelta(days=days))
    with answering(b"", as_server(tmp_path)) as port:
        found = reason(f"https://localhost:{port}", trusting(tmp_path))
    assert said in found.text
    assert f"the clock here says {datetime.now(UTC):%Y-%m-%d}" in found.text
    assert not found.passes


def test_a_port_without_tls_is_told_as_that(keys):
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        found = reason(f"https://localhost:{port}", trusting(keys))
    assert found == Unreachable(
        f"what listens at localhost:{port} speaks no TLS, so it is no such server: mend the port", False
    )


def test_what_is_not_up_yet_may_come(keys):
    port = free_port()
    found = reason(f"https://localhost:{port}", trusting(keys))
    assert found == Unreachable(f"nothing listens at localhost:{port}")
    with answering(b"") as cut:
        assert reason(f"https://localhost:{cut}", trusting(keys)).passes
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = reason(f"https://localhost:{silent.getsockname()[1]}", trusting(keys), timeout=0.2)
    assert found.passes
    assert "does not answer" in found.text


def test_an_address_without_a_port_is_told_so():
    refused = httpx.ConnectError("refused")
    refused.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert "443 (the address names no port; serve's own is 8443)" in reason_of(refused, "https://fl.example.org").text


@pytest.mark.parametrize(
    ("number", "text", "passes"),
    [
        (socket.EAI_NONAME, "no machine is called fl.example.org", False),
        (socket.EAI_AGAIN, "the name fl.example.org can't be looked up now", True),
    ],
)
def test_a_name_that_does_not_exist_is_told_from_one_that_can_not_be_asked_for(number, text, passes):
    failed = httpx.ConnectError("lookup")
    failed.__cause__ = socket.gaierror(number, "lookup failed")
    found = reason_of(failed, "https://fl.example.org:8443")
    assert found.text.startswith(text)
    assert found.passes is passes
    of_proxy = reason_of(failed, "https://10.0.0.1:8443", "fl.example.org:3128")
    assert of_proxy.text.startswith(text)


@pytest.mark.parametrize(
    ("status", "text", "passes"),
    [
        ("407 Proxy Authentication Required", "wants a name and a password: HTTPS_PROXY=http://NAME:PASSWORD@", False),
        ("403 Forbidden", "makes no tunnel to 10.1.2.3:8443 (403 Forbidden): let its owner allow that", False),
        ("501 Not Implemented", "let its owner allow that, or put the host into NO_PROXY", False),
        ("503 Service Unavailable", "it may not reach it yet", True),
    ],
)
def test_a_proxy_that_makes_no_tunnel_is_named_with_its_reason(keys, monkeypatch, status, text, passes):
    with answering(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode()) as port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        found = reason("https://10.1.2.3:8443", trusting(keys), f"127.0.0.1:{port}")
    assert f"the proxy 127.0.0.1:{port} " in found.text
    assert text in found.text
    assert found.passes is passes


def test_a_proxy_on_which_nothing_listens_is_named(keys, monkeypatch):
    proxy = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy}")
    found = reason("https://10.1.2.3:8443", trusting(keys), proxy)
    assert found == Unreachable(f"nothing listens at the proxy {proxy}")
