"""deploy/nginx-https.conf before a real server: clients get through it, and files come from its cache."""

import re
import ssl
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from fedkseed.network.https import server
from fedkseed.network.https.connections import Connections
from fedkseed.network.https.task_files import Stub
from fedkseed.network.protocol.certs import make
from fedkseed.network.protocol.signatures import Audiences, private_key

from ...report.browser import ended
from ..ports import accepts, find_nginx, free_port, wait_for
from .test_app import Place
from .test_connections import parcel, task


class Counting(Connections):
    """A hub that counts the files it is asked for."""

    asked = 0

    def file(self, name: bytes) -> bytes:
        self.asked += 1
        return super().file(name)


@pytest.fixture
def through(tmp_path, request) -> Iterator[Place]:
    """A server without TLS, and a client that reaches it through nginx."""
    if find_nginx() is None:
        pytest.skip("nginx is not installed")
    keys, inner, port = tmp_path / "keys", free_port(), free_port()
    make(keys, 2, ["localhost"], 2)
    (tmp_path / "nginx").mkdir()
    text = (request.config.rootpath / "deploy" / "nginx-https.conf").read_text()
    changed = text.replace("/srv/fedkseed", str(tmp_path)).replace("127.0.0.1:8000", f"127.0.0.1:{inner}")
    changed = changed.replace("0.0.0.0:8443", f"127.0.0.1:{port}").replace("daemon off;", "daemon off; user root;")
    changed = re.sub(r"worker_(processes|rlimit_nofile|connections) \w+", r"worker_\1 1000", changed)
    (tmp_path / "nginx.conf").write_text(changed.replace("worker_processes 1000", "worker_processes 1"))
    hub = Counting(Audiences.of(keys), [private_key(keys / f"client-{number}").public_key() for number in range(2)])
    context = ssl.create_default_context(cafile=str(keys / "ca.pem"))
    command = [str(find_nginx()), "-c", str(tmp_path / "nginx.conf"), "-e", "stderr"]
    with (
        server.listening(hub, server.Address("127.0.0.1", inner, tls=False), 1000, keys),
        subprocess.Popen(command, stderr=subprocess.DEVNULL) as nginx,
        httpx.Client(base_url=f"https://localhost:{port}", verify=context, timeout=30) as http,
    ):
        try:
            wait_for(lambda: accepts("127.0.0.1", port) or nginx.poll() is not None)
            assert nginx.poll() is None
            yield Place(hub, http, keys, port)
        finally:
            ended(nginx)


def test_clients_get_through_and_the_server_gives_each_file_once(through):
    hub, http = through.hub, through.http
    sessions = [through.session(number) for number in range(2)]
    sent = hub.send([parcel(number) for number in range(2)])
    for number, mine in enumerate(sessions):
        stub = Stub.decode(http.get("/v1/task?wait=5", headers=mine).content)
        assert stub.task(lambda name: http.get(f"/v1/file/{name.hex()}").content) == task(number).encode()
        answer = http.post(f"/v1/task/{stub.key.hex()}", content=bytes(1000), headers=mine)
        assert answer.status_code == 204
    assert hub.asked == 3, "recipe, certificate and message, once each for both clients"
    assert [len(arrival.data) for arrival in hub.arrived([key or "" for key in sent])] == [1000, 1000]
    assert http.get(f"/v1/file/{'0' * 64}").status_code == 404
    assert http.delete("/v1/file/00").status_code == 403
    assert http.get("/").status_code == 404
    assert http.post("/v1/session", content=bytes(70_000)).status_code == 413
