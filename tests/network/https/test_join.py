"""A client over HTTPS beside a real server, with a worker that answers at once: what its owner reads."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedkseed import FedKSeedError
from fedkseed.network.https import join, server
from fedkseed.network.https.connections import Connections
from fedkseed.network.https.join import HttpsClient, WorkerDesk
from fedkseed.network.protocol.certs import make
from fedkseed.network.protocol.client.recipe_consent import Owner, OwnerSettings
from fedkseed.network.protocol.envelope import Reply, Status
from fedkseed.network.protocol.signatures import private_key

from ..ports import free_port, wait_for
from .test_connections import parcel

LARGEST_REPLY = 500


class EndedError(Exception):
    """The end of a client that a test has seen enough of."""


def attendance(directory: Path, url: str, ca: Path, key: Path, owner: Owner) -> HttpsClient:
    """A client as `fedkseed join` makes it."""
    desk = WorkerDesk(directory, OwnerSettings(owner, 60.0, str(key), str(ca)))
    return HttpsClient(directory, url, ca, key, desk)


@pytest.fixture
def joined(tmp_path, monkeypatch) -> Iterator[tuple[Connections, list[str], dict[str, Any]]]:
    """A server with client 1 connected, what the client says, and the reply that its worker will give."""
    keys, port, said, worker, ends = tmp_path / "keys", free_port(), list[str](), dict[str, Any](), threading.Event()
    make(keys, 2, ["localhost"], 2)
    hub = Connections([private_key(keys / f"client-{number}").public_key() for number in range(2)])

    def relayed(task: bytes, directory: Path, opened: Callable[..., None]) -> bytes:
        worker.get("before", int)()
        return worker["reply"].encode()

    def sleep(seconds: float) -> None:
        if ends.is_set():
            raise EndedError
        time.sleep(0.01)

    monkeypatch.setattr(join, "ask_worker", relayed)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    owner = Owner(str(tmp_path / "rows.jsonl"))
    client = attendance(tmp_path / "client", f"https://localhost:{port}", keys / "ca.pem", keys / "client-1", owner)

    def attend() -> None:
        with pytest.raises(EndedError):
            client.serve(said.append, sleep)

    thread = threading.Thread(target=attend)
    with server.listening(hub, server.Address("127.0.0.1", port), LARGEST_REPLY, keys):
        thread.start()
        try:
            wait_for(lambda: hub.nodes() == [1] and len(said) == 2)
            yield hub, said, worker
        finally:
            ends.set()
    thread.join(30)
    assert not thread.is_alive()


def answered(hub: Connections, worker: dict[str, Any], said: list[str], reply: Reply) -> tuple[list[bytes], list[str]]:
    """Send a task to client 1; the replies that came, and what the client says of it after it has begun."""
    worker["reply"], before = reply, len(said)
    keys = [key or "" for key in hub.send([parcel(1)])]
    wait_for(lambda: len(said) >= before + 2)
    return [arrival.data for arrival in hub.arrived(keys)], said[before + 1 :]


def test_the_owner_reads_what_became_of_each_answer(joined):
    hub, said, worker = joined
    assert said[0].startswith("connecting to https://localhost:")
    assert said[1] == "connected as client 1"
    done = Reply(Status.DONE, b"numbers" * 10)
    assert answered(hub, worker, said, done) == ([done.encode()], ["round 5: answered, 440 bytes down, 70 up"])
    large = Reply(Status.DONE, bytes(LARGEST_REPLY))
    refusal = "round 5: refused with 413 at most 500 bytes are read"
    assert answered(hub, worker, said, large)[1][0] == refusal


def test_an_answer_that_nobody_waits_for_is_too_late_and_is_not_made_again(joined):
    hub, said, worker = joined
    worker["before"] = lambda: hub._tasks.clear()
    lines = answered(hub, worker, said, Reply(Status.DONE, b"numbers"))
    assert lines == ([], ["round 5: too late"])
    del worker["before"]
    assert answered(hub, worker, said, Reply(Status.DONE, b"more"))[1] == ["round 5: answered, 440 bytes down, 4 up"]
    assert sum(line.endswith("training") for line in said) == 2


def test_a_refusal_of_the_worker_is_said_with_its_log(joined):
    hub, said, worker = joined
    _, lines = answered(hub, worker, said, Reply(Status.FAILED, text="no memory"))
    assert re.fullmatch(r"round 5: not answered \(no memory\); .*worker\.log says why", lines[0])


def test_a_client_without_a_server_says_so_at_once_and_once_and_tries_again_later_and_later(tmp_path, data_file):
    make(tmp_path, 1, ["localhost"], 2)
    url = f"https://localhost:{free_port()}"
    client = attendance(tmp_path / "c", url, tmp_path / "ca.pem", tmp_path / "client-0", Owner(str(data_file)))
    said, slept = list[str](), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            raise EndedError

    with pytest.raises(EndedError):
        client.serve(said.append, sleep)
    assert len(said) == 2
    assert said[1].startswith(f"no answer from {url} (")
    assert said[1].endswith("is the server running?; trying again until it answers")
    assert all(0.5 * 2**k <= seconds < 1.5 * 2**k for k, seconds in enumerate(slept)), "twice as long each time"


@pytest.mark.parametrize("url", ["http://localhost:1", "localhost:8443", "https://", "https://localhost:1/rounds"])
def test_another_address_is_refused(url, tmp_path):
    make(tmp_path, 1, ["localhost"], 2)
    with pytest.raises(FedKSeedError, match="a server is https://HOST:PORT"):
        attendance(tmp_path, url, tmp_path / "ca.pem", tmp_path / "client-0", Owner("dolly-sample"))
