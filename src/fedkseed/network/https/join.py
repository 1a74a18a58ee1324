"""A client over HTTPS: one connection, on which it waits for a task, fetches its files and sends the reply.

Who answers the tasks is its `TaskAnswerer`: a worker with the model, a process of its own that ends when it is idle
(network/protocol/client/worker.py), or a shard's clients (shard.py). This process loads no PyTorch, and while it
waits it does nothing at all.
"""

import secrets
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from ...errors import FedKSeedError
from ...files import border, exclusive
from ...weights.adapter import NAME as TUNED
from ..protocol.carrier import MAX_MESSAGE
from ..protocol.client import worker_socket as sockets
from ..protocol.client.consent import OwnerSettings
from ..protocol.client.relay import GiveUp, relay, stop_worker
from ..protocol.envelope import Reply, Status, Task
from ..protocol.gain import Kept
from ..protocol.signatures import fingerprint, private_key, sign
from .connections import HELLO
from .endpoints import http_client
from .task_files import LARGEST, Stub

BEAT = 15.0  # seconds between two signs of life while the worker computes
TIMEOUT = 60.0  # seconds for a request that does not wait
FIRST, LONGEST = 1.0, 60.0  # seconds before a server that did not answer is tried again: the first time, and at most
KEPT = 16  # files that are kept: a recipe and a certificate come again after each restart of a worker

Say = Callable[[str], object]


class SessionError(Exception):
    """The end of a session: another has to be begun."""


class TaskAnswerer(Protocol):
    """Whoever answers the tasks of a client."""

    kept: str  # what becomes of the tuned model of a finished run
    log: Path | str  # place that says why a task was not answered

    def open(self) -> None:
        """Begin: the client's directory is free."""
        ...

    def reply(self, task: bytes, begun: Callable[[GiveUp], object]) -> bytes:
        """The encoded reply to an encoded task.

        Args:
            begun: gets what gives the task up, once it can be.
        """
        ...

    def close(self) -> None:
        """End all work."""
        ...


class WorkerDesk:
    """A worker in the client's directory, which is started when a task comes.

    Args:
        settings: of the worker.
    """

    def __init__(self, directory: Path, settings: OwnerSettings) -> None:
        self.directory, self.settings = directory.resolve(), settings
        self.kept = f"its tuned model is {self.directory / TUNED}"
        self.log: Path | str = self.directory / sockets.LOG
        settings.signing(self.directory)  # a key of another kind is refused now, and not by each worker
        sockets.place(self.directory)

    def open(self) -> None:
        self.settings.write(self.directory)

    def reply(self, task: bytes, begun: Callable[[GiveUp], object]) -> bytes:
        return relay(task, self.directory, begun)

    def close(self) -> None:
        stop_worker(self.directory)


class TaskInHand:
    """A task in the hands of the desk, on a thread of its own.

    Args:
        stub: of the task; one that asks the same later only changes the key of the reply.
    """

    def __init__(self, stub: Stub, task: bytes, desk: TaskAnswerer) -> None:
        self.stub, self.about = stub, Task.decode(task)
        self.reply: bytes | None = None
        self.done = threading.Event()
        self._give_up: GiveUp | None = None
        self._given_up = False
        threading.Thread(target=self._run, args=(task, desk), daemon=True).start()

    def asks_the_same(self, stub: Stub, task: Task) -> bool:
        """True if another task has the same answer: a server asks again where a reply may be lost."""
        own = self.about
        return stub.names[2] == self.stub.names[2] and (own.nonce, own.head, own.client, own.digest, own.keep) == (
            task.nonce, task.head, task.client, task.digest, task.keep
        )  # fmt: skip

    def give_up(self) -> None:
        """Let the desk stop: nobody waits for the answer any more."""
        self._given_up = True
        if self._give_up is not None:
            self._give_up()

    def _run(self, task: bytes, desk: TaskAnswerer) -> None:
        def begun(give_up: GiveUp) -> None:
            self._give_up = give_up
            if self._given_up:
                give_up()

        self.reply = desk.reply(task, begun)
        self.done.set()


class HttpsClient:
    """A client of a server, which takes part until it is stopped.

    Args:
        directory: for this client's logs and what it must not forget.
        url: of the server, as https://fl.example.org:8443.
        ca: the authority that must have signed the server's certificate.
        key: the client's private key.
        desk: answers its tasks.
    """

    def __init__(self, directory: Path, url: str, ca: Path, key: Path, desk: TaskAnswerer) -> None:
        self.desk = desk
        self.directory, self.url = directory.resolve(), url.rstrip("/")
        parsed = httpx.URL(self.url)
        if parsed.scheme != "https" or not parsed.host or parsed.path != "/":
            raise FedKSeedError(f"a server is https://HOST:PORT, got {url!r}")
        self.key: EllipticCurvePrivateKey = private_key(key)
        try:
            context = ssl.create_default_context(cafile=str(ca))
        except (OSError, ssl.SSLError) as error:
            raise FedKSeedError(f"{ca} holds no certificate of an authority: {error}") from error
        self.http = http_client(context, TIMEOUT, 1, self.url)
        self._token, self._wait = "", 0.0
        self._files: dict[bytes, bytes] = {}
        self._gain = Kept(self.directory)

    def serve(self, say: Say = print, sleep: Callable[[float], object] = time.sleep) -> None:
        """Take part in rounds until stopped; a server that does not answer is tried again and again.

        Raises:
            FedKSeedError: another client uses the directory, or the directory can't be written.
        """
        with border(f"can't make {self.directory}"):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with exclusive(
            self.directory / "client.lock", f"another client uses {self.directory}; give it its own --state"
        ):
            self.desk.open()
            say(f"connecting to {self.url}; logs are in {self.directory}")
            pause, said = FIRST, ""
            try:
                while True:
                    try:
                        number = self.begin()
                        say(f"connected as client {number}")
                        pause, said = FIRST, ""
                        self._attend(say)
                    except SessionError as ended:
                        text = str(ended)
                    except httpx.TransportError as error:
                        text = f"no answer from {self.url} ({error or type(error).__name__}): is the server running?"
                    self._say_gain(say)
                    if text != said:
                        say(f"{text}; trying again until it answers")
                    said = text
                    # Spread, so that a server that is back is not asked by all of its clients at once.
                    sleep(pause * (0.5 + secrets.randbelow(1024) / 1024))
                    pause = min(2 * pause, LONGEST)
            finally:
                self.http.close()
                self.desk.close()

    def begin(self) -> int:
        """Begin a session, and return the number that the server knows this client by.

        Raises:
            SessionError: the server refuses it.
        """
        challenge = self._get("/v1/challenge", 32)
        name = fingerprint(self.key.public_key())
        proof = challenge + name + sign(self.key, HELLO + challenge + name)
        response = self.http.post("/v1/session", content=proof)
        if response.status_code != 200:
            raise SessionError(f"the server refuses this key: {response.text.strip()[:200]}")
        try:
            found = response.json()
            self._token, self._wait = str(found["token"]), float(found["wait"])
            return int(found["client"])
        except (ValueError, KeyError, TypeError) as error:
            raise SessionError(f"the server begins a session in other words than this release knows: {error}") from None

    def _attend(self, say: Say) -> NoReturn:
        """Answer tasks until the session ends."""
        work: TaskInHand | None = None
        last = b""  # key of the last task of this session: one that was refused or late is not done again
        try:
            while True:
                self._say_gain(say)
                if work is not None and work.done.wait(BEAT):
                    self._send(work, say)
                    work = None
                stub = self._next(last, waits=work is None)
                if stub is None:
                    continue
                last = stub.key
                task = stub.task(self._file)
                about = Task.decode(task)
                if work is not None and work.asks_the_same(stub, about):
                    work.stub = stub
                    continue
                if work is not None:
                    work.give_up()
                    say(f"{_round(work.about)}: given up, the server has gone on")
                if not about.keep:
                    say(f"{_round(about)}: training")
                work = TaskInHand(stub, task, self.desk)
        except FedKSeedError as error:  # a broken file or task
            raise SessionError(str(error)) from error
        finally:
            if work is not None:
                work.give_up()

    def _say_gain(self, say: Say) -> None:
        """Print the client's gain once it is measured, which may be after the server has ended."""
        if (words := self._gain.news()) is not None:
            say(words)

    def _next(self, after: bytes, waits: bool) -> Stub | None:
        """The task after the one of a key; None if there is none yet."""
        wait = self._wait if waits else 0.0
        data = self._get(f"/v1/task?wait={wait:g}&after={after.hex()}", LARGEST, TIMEOUT + wait)
        return Stub.decode(data) if data else None

    def _send(self, work: TaskInHand, say: Say) -> None:
        """Send the worker's reply. One that is lost is asked for again, and the worker has it still."""
        data = work.reply or b""
        headers = {"authorization": f"Bearer {self._token}"}
        response = self.http.post(f"/v1/task/{work.stub.key.hex()}", content=data, headers=headers)
        if response.status_code == 401:
            raise SessionError("the session has ended")
        reply = Reply.decode(data)
        if reply.status is Status.DONE and work.about.keep:
            say(f"the run has ended; {self.desk.kept}")
        elif reply.status is Status.DONE:
            size = f"{len(work.about.message):,} bytes down, {len(reply.message):,} up"
            refusal = f"refused with {response.status_code} {response.text.strip()[:200]}"
            ends = {204: f"answered, {size}", 410: "too late"}
            say(f"{_round(work.about)}: {ends.get(response.status_code, refusal)}")
        elif reply.status is not Status.UNPREPARED:
            say(f"{_round(work.about)}: not answered ({reply.text}); {self.desk.log} says why")

    def _file(self, name: bytes) -> bytes:
        """The file of a digest; the task checks it."""
        if name not in self._files:
            self._files[name] = self._get(f"/v1/file/{name.hex()}", MAX_MESSAGE, named=False)
            for old in [*self._files][:-KEPT]:
                del self._files[old]
        return self._files[name]

    def _get(self, path: str, most: int, timeout: float = TIMEOUT, named: bool = True) -> bytes:
        """The body of an answer; empty for one without.

        Args:
            named: whether the request names the session; files are anybody's who knows their digest.

        Raises:
            SessionError: the server refuses the request, or sends more bytes than `most`.
        """
        headers = {"authorization": f"Bearer {self._token}"} if named and self._token else {}
        data = bytearray()
        with self.http.stream("GET", path, headers=headers, timeout=httpx.Timeout(timeout, connect=TIMEOUT)) as answer:
            for part in answer.iter_bytes():
                data += part
                if len(data) > most:
                    raise SessionError(f"the server sends more than {most:,} bytes for {path}")
            if answer.status_code == 401:
                raise SessionError("the session has ended")
            if answer.status_code not in (200, 204):
                text = bytes(data[:200]).decode(errors="replace").strip()
                raise SessionError(f"the server refuses {path}: {answer.status_code} {text}")
        return bytes(data)


def _round(task: Task) -> str:
    return "the tuned model" if task.keep else f"round {task.done + 1}"
