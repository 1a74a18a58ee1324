"""A client over HTTPS beside a real server, with a worker that answers at once: what its owner reads."""

import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedkseed import FedKSeedError
from fedkseed.network.http_client import AnswerError as SessionError
from fedkseed.network.https import join, server
from fedkseed.network.https.connections import Connections
from fedkseed.network.https.join import HttpsClient, WorkerDesk
from fedkseed.network.protocol.addresses import host_of
from fedkseed.network.protocol.certs import make
from fedkseed.network.protocol.client.recipe_consent import Owner, OwnerSettings
from fedkseed.network.protocol.envelope import Code, Reply, Status, Task
from fedkseed.network.protocol.signatures import Audiences, certificate, private_key, proof_of

from ..ports import free_port, wait_for
from .test_connections import parcel

LARGEST_REPLY = 500


class EndedError(Exception):
    """The end of a client that a test has seen enough of."""


def attendance(directory: Path, url: str, ca: Path, key: Path, owner: Owner) -> HttpsClient:
    """A client as `fedkseed join` makes it."""
    desk = WorkerDesk(directory, OwnerSettings(owner, 60.0, str(key), str(ca), host_of(url)))
    return HttpsClient(directory, url, ca, key, desk)


@pytest.fixture
def joined(tmp_path, monkeypatch) -> Iterator[tuple[Connections, list[str], dict[str, Any]]]:
    """A server with client 1 connected, what the client says, and the reply that its worker will give."""
    keys, port, said, worker, ends = tmp_path / "keys", free_port(), list[str](), dict[str, Any](), threading.Event()
    make(keys, 2, ["localhost"], 2)
    hub = Connections(Audiences.of(keys), [private_key(keys / f"client-{number}").public_key() for number in range(2)])

    def relayed(task: bytes, directory: Path, opened: Callable[..., None]) -> bytes:
        worker.get("before", int)()
        return worker["reply"].encode()

    def sleep(seconds: float) -> None:
        if ends.is_set():
            raise EndedError
        time.sleep(0.01)

    monkeypatch.setattr(join, "ask_worker", relayed)
    monkeypatch.setattr(join, "BEAT", 0.05)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    owner = Owner(str(tmp_path / "rows.jsonl"))
    client = attendance(tmp_path / "client", f"https://localhost:{port}", keys / "ca.pem", keys / "client-1", owner)

    def attend() -> None:
        try:
            client.serve(said.append, sleep)
        except EndedError:
            return
        except FedKSeedError as refusal:
            said.append(f"refused: {refusal}")
        ended.set()

    worker["ended"] = ended = threading.Event()
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


def answered(
    hub: Connections, worker: dict[str, Any], said: list[str], reply: Reply, keep: bool = False
) -> tuple[list[bytes], list[str]]:
    """Send a task to client 1; the replies that came, and what the client says of it after it has begun."""
    worker["reply"], before = reply, len(said) - keep  # of a model to be kept it says nothing when that has begun
    sent = parcel(1)
    task = replace(Task.decode(sent.data), keep=keep)
    keys = [key or "" for key in hub.send([replace(sent, data=task.encode())])]
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
    assert re.fullmatch(r"round 5: not answered \(no memory\): .*worker\.log says why", lines[0])


def test_a_recipe_that_is_refused_at_first_ends_the_client_with_the_reason(joined, tmp_path):
    hub, said, worker = joined
    log = tmp_path / "client" / "worker.log"
    log.write_text("rows: 40\n2026-11-26 10:00:00 no answer (policy): the recipe asks for 2 steps\n")
    answered(hub, worker, said, Reply(Status.REFUSED, text=Code.POLICY))
    wait_for(worker["ended"].is_set)
    assert said[-1] == f"refused: round 5: not answered (policy): the recipe asks for 2 steps (in {log})"


def test_a_recipe_that_was_followed_before_may_be_followed_again(joined, tmp_path):
    hub, said, worker = joined
    answered(hub, worker, said, Reply(Status.DONE, b"numbers"))
    log = tmp_path / "client" / "worker.log"
    log.write_text("no answer (policy): spent\nno answer (error): Traceback (most recent call last):\nOSError: full\n")
    assert answered(hub, worker, said, Reply(Status.REFUSED, text=Code.POLICY))[1] == [
        f"round 5: not answered (policy): OSError: full (in {log})"
    ]
    assert not worker["ended"].is_set()


def test_a_client_that_has_kept_the_tuned_model_ends_and_says_how_to_ask_it(joined, tmp_path):
    hub, said, worker = joined
    kept = Reply(Status.DONE)
    assert answered(hub, worker, said, kept, keep=True)[0] == [kept.encode()]
    wait_for(worker["ended"].is_set)
    adapter = tmp_path / "client" / "adapter.safetensors"
    asked = f"fedkseed generate {tmp_path / 'client'} '…'"
    assert said[-2] == "the tuned model has come"
    assert said[-1] == f"the run has ended; its tuned model is {adapter}; ask it: {asked}"


@pytest.mark.parametrize("run_is_over", [False, True])
def test_a_tuned_model_that_comes_as_the_server_ends_is_kept_all_the_same(joined, run_is_over):
    hub, said, worker = joined
    gone = threading.Event()
    worker["before"] = lambda: (hub.close(run_is_over), gone.wait(5), time.sleep(0.3))
    worker["reply"] = Reply(Status.DONE)
    sent = parcel(1)
    hub.send([replace(sent, data=replace(Task.decode(sent.data), keep=True).encode())])
    wait_for(lambda: hub._closed)
    gone.set()
    wait_for(worker["ended"].is_set)
    assert said[-1].startswith("the run has ended; its tuned model is")


def test_a_tuned_model_that_can_not_be_kept_ends_the_client(joined):
    hub, said, worker = joined
    worker["reply"] = Reply(Status.REFUSED, text=Code.MODEL)
    sent = parcel(1)
    hub.send([replace(sent, data=replace(Task.decode(sent.data), keep=True).encode())])
    wait_for(worker["ended"].is_set)
    assert said[-1].startswith("refused: the tuned model: not answered (model): ")
    assert said[-1].endswith("join again: where clients get it, the same `fedkseed serve` sends it again")


def test_a_run_that_ends_without_a_model_for_its_clients_ends_them(joined):
    hub, said, worker = joined
    hub.close(run_is_over=True)
    wait_for(worker["ended"].is_set)
    assert "the run has ended, and no tuned model came here: https://localhost:" in said[-1]


def test_a_key_in_two_hands_is_told_to_both_and_one_gives_way(joined, tmp_path):
    hub, said, worker = joined
    for times in (1, 2, 3):
        wait_for(lambda: hub.nodes() == [1] and said[-1] == "connected as client 1")
        begun(hub, 1, tmp_path / "keys")
        wait_for(lambda times=times: len(said) == 2 + 2 * times - (times == 3) or worker["ended"].is_set())
    wait_for(worker["ended"].is_set)
    key = tmp_path / "keys" / "client-1"
    text = f"another process has connected with the key {key}: each client needs a key of its own"
    assert said.count(f"{text}; trying again until it answers") == 2
    assert said[-1].startswith(f"refused: {text}, and this one gives way after 3 times; if you have not started the ot")
    assert "`fedkseed certs revoke KEYS 1`" in said[-1]
    assert (1, "has connected again", True) in hub.notices


def begun(hub: Connections, number: int, keys: Path) -> None:
    """Begin another session with the key of a client, as a second process does."""
    key, authority = private_key(keys / f"client-{number}"), certificate(keys / "ca.pem")
    hub.session(proof_of(key, authority, "localhost", hub.challenge()))


@pytest.mark.parametrize("connected", [False, True], ids=["at first", "after it was right"])
def test_what_waiting_can_not_mend_ends_a_client_at_first_alone(tmp_path, data_file, connected):
    make(tmp_path, 1, ["localhost"], 2)
    url = f"https://localhost:{free_port()}"
    client = attendance(tmp_path / "c", url, tmp_path / "ca.pem", tmp_path / "client-0", Owner(str(data_file)))
    client._connected = connected
    wrong = ssl.SSLCertVerificationError("wrong")
    wrong.verify_code, wrong.verify_message = 20, "unable to get local issuer certificate"
    failed = httpx.ConnectError("wrong")
    failed.__cause__ = wrong
    for error, said in (
        (failed, "is not by the authority of --ca"),
        (SessionError("no", 403), r"does not know the key .*client-0 .*, of fingerprint [0-9a-f:]{71}: send its"),
        (SessionError("no such request", 404), "is no server of fedkseed"),
    ):
        if connected:
            assert re.search(said, client.refuse_lasting(error))
        else:
            with pytest.raises(FedKSeedError, match=said):
                client.refuse_lasting(error)
    assert client.refuse_lasting(SessionError("the server is about to end", 503)) == "the server is about to end"


def test_a_client_without_a_server_says_so_at_once_and_once_and_tries_again_later_and_later(
    tmp_path, data_file, monkeypatch
):
    make(tmp_path, 1, ["localhost"], 2)
    url = f"https://localhost:{free_port()}"
    client = attendance(tmp_path / "c", url, tmp_path / "ca.pem", tmp_path / "client-0", Owner(str(data_file)))
    said, slept, now = list[str](), list[float](), [1000.0]
    monkeypatch.setattr(join.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += 30
        if len(slept) == 10:
            raise EndedError

    with pytest.raises(EndedError):
        client.serve(said.append, sleep)
    nobody = f"nothing listens at {url.removeprefix('https://')}"
    assert said[1] == f"{nobody}; trying again until it answers"
    assert said[2:] == [f"{nobody}; still trying after {minutes} min" for minutes in (1, 2, 4)], "and then more rarely"
    assert all(0.5 * 2**k <= seconds < 1.5 * 2**k for k, seconds in enumerate(slept[:6])), "twice as long each time"


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:1",
        "localhost:8443",
        "https://",
        "https://localhost:1/rounds",
        "https://localhost:84433",
        "https://a:b",
    ],
)
def test_another_address_is_refused(url, tmp_path):
    make(tmp_path, 1, ["localhost"], 2)
    with pytest.raises(FedKSeedError, match="a server is https://HOST:PORT"):
        attendance(tmp_path, url, tmp_path / "ca.pem", tmp_path / "client-0", Owner("dolly-sample"))
