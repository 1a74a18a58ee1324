"""A client over HTTPS: one connection, on which it waits for a task, fetches its files and sends the reply.

A `TaskAnswerer` answers its tasks: a worker with the model, a process of its own that ends when it is idle
(network/protocol/client/worker.py), or a shard's clients (shard.py). This process loads no PyTorch, and while it waits
it does nothing at all.
"""

import json
import re
import secrets
import shlex
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from ...errors import FedKSeedError
from ...files import exclusive
from ...weights.adapter import ADAPTER
from ..http_client import DONE, AnswerError, BoundedClient, HttpAnswer
from ..limits import REFUSAL
from ..protocol.addresses import host_of
from ..protocol.carrier import MAX_MESSAGE
from ..protocol.certs import require_identity
from ..protocol.client.recipe_consent import Owner, OwnerSettings
from ..protocol.client.worker_process import GiveUp, ask_worker, finish_work, last_reason, socket_path, stop_worker
from ..protocol.client_gain import GainFile
from ..protocol.envelope import MAX_RECIPE, Code, RefusedError, Reply, Status, Task
from ..protocol.signatures import certificate, fingerprint, private_key, proof_of
from .connections import SEPARATOR, copied
from .task_files import LARGEST, Stub
from .unreachable import Unreachable, reason_of
from .way_out import proxy_at, through

BEAT = 15.0  # seconds between two signs of life while the worker computes
TIMEOUT = 60.0  # seconds between two signs of life of a server
TOKEN = re.compile(r"[\w.~+/=-]{1,200}", re.ASCII)
FIRST, LONGEST = 1.0, 60.0  # seconds before a server that did not answer is tried again: the first time, and at most
MOST_WAIT = 3600.0  # seconds; serve's are 240
OVER, ANOTHER = 410, 409  # status of a request for a task: the run has ended; another session of the key has begun
NO_SERVER = 0, 404, 405  # statuses of answers that no server of fedkseed gives before it has begun a session
SENT_AGAIN = "where clients get it, the same `fedkseed serve` sends it again"
TAKEN_OVER = 3  # times that another process connects with the same key, until this one ends
# Refusals that hold for a recipe as long as the settings of this client do: with none of its tasks answered, it ends.
LASTING = (Code.RELEASE, Code.RECIPE, Code.POLICY, Code.DATA, Code.MODEL, Code.BASIS)
MAX_FILES = 16  # that are kept: a recipe and a certificate come again after each restart of a worker
# A server asks again where a reply may be lost: two tasks that agree in these have the same answer.
ANSWER_DEPENDS_ON = attrgetter("nonce", "head", "client", "digest", "keep", "message")

Say = Callable[[str], object]


class TaskAnswerer(Protocol):
    """Whoever answers the tasks of a client, whose directory is free from `open` to `close`."""

    kept: str  # what becomes of the tuned model of a finished run

    def open(self) -> None: ...

    def reply(self, task: bytes, begun: Callable[[GiveUp], object]) -> bytes:
        """The encoded reply to an encoded task.

        Args:
            begun: gets what gives the task up, once it can be.
        """
        ...

    def reason(self) -> str:
        """The reason why the last task was not answered, or the place that says it."""
        ...

    def finish(self) -> None:
        """Wait for what follows the last reply."""
        ...

    def close(self) -> None: ...


class WorkerDesk:
    """A worker in the client's directory, which is started when a task comes."""

    def __init__(self, directory: Path, settings: OwnerSettings) -> None:
        self.directory, self.settings = directory.resolve(), settings
        ask = f"fedkseed generate {shlex.quote(str(directory))} '…'"
        self.kept = f"its tuned model is {self.directory / ADAPTER}; ask it: {ask}"
        settings.signing(self.directory)  # a key of another kind is refused now, and not by each worker
        socket_path(self.directory)

    def open(self) -> None:
        self.settings.write(self.directory)

    def reply(self, task: bytes, begun: Callable[[GiveUp], object]) -> bytes:
        return ask_worker(task, self.directory, begun)

    def reason(self) -> str:
        return last_reason(self.directory)

    def finish(self) -> None:
        finish_work(self.directory)

    def close(self) -> None:
        stop_worker(self.directory)


@dataclass(slots=True)
class ServerSession:
    """A client's requests to its server, in the order in which it makes them.

    All raise an `AnswerError` where the server refuses the request or this session, or sends too many bytes; but `send`
    returns any refusal other than that of the session. Another session has to be begun then.
    """

    http: BoundedClient
    key: EllipticCurvePrivateKey
    ca: x509.Certificate
    token: str = ""
    wait: float = 0.0  # seconds for which the server lets a request for a task wait
    files: dict[bytes, bytes] = field(default_factory=dict)  # by their digests
    date: str = ""  # of the server's clock, as it came with the last challenge

    def begin(self) -> int:
        """Begin a session, and return the number that the server knows this client by.

        Raises:
            AnswerError: the server refuses it.
        """
        challenge = self.challenge()
        proof = proof_of(self.key, self.ca, host_of(self.http.url), challenge)
        answer = self._ask("POST", "/v1/session", REFUSAL, content=proof)
        if answer.status != 200:
            said = answer.text
            if answer.status == 401:  # to a challenge that has just come: a server of version 2 reads no name
                said += "; if it says so again, it is of an older release than this client"
            raise AnswerError(f"the server refuses this key: {said}", answer.status)
        with suppress(ValueError, RecursionError):
            match json.loads(answer.body):
                case {"token": str(token), "wait": int() | float() as wait, "client": int(number)} if (
                    TOKEN.fullmatch(token) and 0 <= wait <= MOST_WAIT and 0 <= number < 1 << 32
                ):
                    self.token, self.wait = token, float(wait)
                    return number
        raise AnswerError(f"the server begins a session in other words than this release knows: {answer.text[:100]}")

    def challenge(self, check: Callable[[Any], object] = id) -> bytes:
        """Bytes to be signed; whoever asks for them needs no key yet. `check` is given the connection."""
        self.token = ""
        return self._get("/v1/challenge", 32, check=check)

    def next_task(self, after: bytes, waits: bool) -> Stub | None:
        """The task after the one of a key; None if there is none yet."""
        wait = self.wait if waits else 0.0
        data = self._get(f"/v1/task?wait={wait:g}&after={after.hex()}", LARGEST, wait)
        return Stub.decode(data) if data else None

    def file(self, digest: bytes) -> bytes:
        """The file of a digest; the task checks it. It is anybody's who knows the digest, and needs no session."""
        if (data := self.files.get(digest)) is None:
            data = self._get(f"/v1/file/{digest.hex()}", MAX_MESSAGE, names_session=False)
            if len(data) <= MAX_RECIPE:  # a message can be all weights, and does not come again
                self.files[digest] = data
            for oldest in [*self.files][:-MAX_FILES]:
                del self.files[oldest]
        return data

    def send(self, key: bytes, reply: bytes) -> HttpAnswer:
        """Send the reply to a task, and return what the server says to it.

        Raises:
            AnswerError: the session has ended.
        """
        return self._ask("POST", f"/v1/task/{key.hex()}", 0, content=reply, headers=self._headers)

    def tell(self, failed: Sequence[str]) -> None:
        """Say which checks of `fedkseed doctor` fail on this machine; none: all pass.

        Raises:
            AnswerError: the server refuses it.
        """
        answer = self._ask("POST", "/v1/checks", 0, content=SEPARATOR.join(failed).encode(), headers=self._headers)
        if answer.status != 204:
            raise AnswerError(f"the server takes no results of checks: {answer.text}", answer.status)

    @property
    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"} if self.token else {}

    def _get(self, path: str, most: int, wait: float = 0.0, names_session: bool = True, **options: Any) -> bytes:
        """The body of an answer, of at most `most` bytes; empty for one without."""
        answer = self._ask("GET", path, most, headers=self._headers if names_session else {}, wait=wait, **options)
        self.date = answer.date or self.date
        if answer.status not in DONE:
            raise AnswerError(f"the server refuses {path.partition('?')[0]}: {answer.text}", answer.status)
        return answer.body

    def _ask(self, method: str, path: str, most: int, **options: Any) -> HttpAnswer:
        answer = self.http.ask(method, path, most, **options)
        if answer.status == 401 and self.token:
            raise AnswerError("the session has ended", 401)
        return answer


class TaskInHand:
    """A task, encoded as `data`, that the desk answers on a thread of its own.

    Another task that asks the same only changes the `key` of the reply.
    """

    def __init__(self, key: bytes, task: Task, data: bytes, desk: TaskAnswerer) -> None:
        self.key, self.task, self.reply, self.done = key, task, b"", threading.Event()
        self._given_up = False
        self._stop: GiveUp = lambda: None

        def begun(stop: GiveUp) -> None:
            self._stop = stop
            if self._given_up:
                stop()

        def run() -> None:
            self.reply = desk.reply(data, begun)
            self.done.set()

        threading.Thread(target=run, daemon=True).start()

    def __str__(self) -> str:
        return "the tuned model" if self.task.keep else f"round {self.task.done + 1}"

    def give_up(self) -> None:
        """Let the desk stop: nobody waits for the answer any more."""
        self._given_up = True
        self._stop()


def client_of(owner: Owner, url: str, ca: Path, key: Path, directory: Path, idle: float = 1.0) -> "HttpsClient":
    """A client with its worker, as `fedkseed join` makes it; refuses files and addresses that can't serve."""
    require_identity(ca, key)
    settings = OwnerSettings(owner, idle, str(key.resolve()), str(ca.resolve()), host_of(url))
    return HttpsClient(directory, url, ca, key, WorkerDesk(directory, settings))


class HttpsClient:
    """A client of a server, which takes part until the run is over.

    Args:
        directory: for this client's logs and what it must not forget.
        url, ca: of the server, as https://fl.example.org:8443, and the authority that has signed its certificate.
        key: the client's private key.
    """

    def __init__(self, directory: Path, url: str, ca: Path, key: Path, desk: TaskAnswerer) -> None:
        self.directory, self.url, self.desk, self.key = directory.resolve(), url.rstrip("/"), desk, key
        right = False
        with suppress(httpx.InvalidURL):
            parsed = httpx.URL(self.url)
            right = parsed.scheme == "https" and parsed.host and parsed.path == "/" and (parsed.port or 443) < 1 << 16
        if not right:
            raise FedKSeedError(f"a server is https://HOST:PORT, as https://fl.example.org:8443, got {url!r}")
        self.by = through(self.url)
        private = private_key(key)
        try:
            tls = ssl.create_default_context(cafile=str(ca))
        except (OSError, ssl.SSLError) as error:
            raise FedKSeedError(f"{ca} holds no certificate of an authority: {error}") from error
        self.session = ServerSession(BoundedClient(tls, TIMEOUT, 1, self.url), private, certificate(ca))
        self.gain = GainFile(self.directory)
        self._connected = self._answered = self._over = False  # whether there was a session, an answer, a tuned model
        self._number = self._taken_over = 0  # as the server counts; times that another has connected with the key

    def serve(self, say: Say = print, sleep: Callable[[float], object] = time.sleep) -> None:
        """Take part in rounds until the run is over; a server that does not answer is tried again and again.

        Raises:
            FedKSeedError: another client uses the directory, or the directory can't be written; or waiting can't help:
                something is wrong with what was typed, this client's owner or files refuse the recipe, its key is in
                two hands, or the tuned model can't be kept.
        """
        taken = f"another client uses {self.directory}; give it its own --state"
        with ExitStack() as stack:
            stack.enter_context(exclusive(self.directory / "client.lock", taken))
            self.desk.open()  # where it fails, a worker that outlived this process goes on
            stack.enter_context(closing(self.desk))
            stack.enter_context(closing(self.session.http))
            say(f"connecting to {self.url}{self.by}; logs are in {self.directory}")
            pause, noted, since, again = FIRST, "", 0.0, 0.0
            while True:
                try:
                    self._number = self.session.begin()
                    say(f"connected as client {self._number}")
                    self._connected, noted = True, ""
                    pause = pause if self._taken_over else FIRST
                    self._attend(say)
                    break
                except (AnswerError, httpx.TransportError) as error:
                    if self._over:  # the server has ended, too, perhaps before it had the reply
                        break
                    if isinstance(error, AnswerError) and error.status == OVER:
                        say(f"the run has ended, and no tuned model came here: {self.url} has it; {SENT_AGAIN}")
                        return
                    text = self.refuse_lasting(error)
                self._say_gain(say)
                now = time.monotonic()
                if text != noted:
                    say(f"{text}; trying again until it answers")
                    noted, since, again = text, now, LONGEST
                elif now - since >= again:
                    say(f"{text}; still trying after {(now - since) / 60:.0f} min")
                    again *= 2
                # Spread, so that a server that is back is not asked by all of its clients at once.
                sleep(pause * (0.5 + secrets.randbelow(1024) / 1024))
                pause = min(2 * pause, LONGEST)
            self.desk.finish()
            self._say_gain(say)
            say(f"the run has ended; {self.desk.kept}")

    def require_reachable(self) -> None:
        """Refuse a server that waiting won't make reachable; one that is not up yet is fine."""
        try:
            self.session.challenge()
        except (AnswerError, httpx.TransportError) as error:
            self.refuse_lasting(error)

    def refuse_lasting(self, error: AnswerError | httpx.TransportError) -> str:
        """The reason of an error for which it may help to wait: for each, once this client has been connected.

        Raises:
            FedKSeedError: it does not help.
        """
        if not isinstance(error, AnswerError):
            reason = reason_of(error, self.url, proxy_at(self.url))
        elif error.status == ANOTHER:
            self._taken_over += 1
            text = f"another process has connected with the key {self.key}: each client needs a key of its own"
            if self._taken_over >= TAKEN_OVER:
                why = f"if you have not started the other, {copied('KEYS', self._number)}"
                raise FedKSeedError(f"{text}, and this one gives way after {TAKEN_OVER} times; {why}")
            reason = Unreachable(text)
        elif error.status == 403:
            shown = fingerprint(self.session.key.public_key()).hex(":", 4)
            reason = Unreachable(
                f"{self.url} does not know the key {self.key} (any more), of fingerprint {shown}: send its public file "
                "to the server's owner, who adds it with `fedkseed certs add` before a run begins, or give the key "
                "that was sent",
                passes=False,
            )
        elif error.status == 421:
            reason = Unreachable(f"{self.url}: {error}", passes=False)
        elif error.status in NO_SERVER:
            reason = Unreachable(f"{self.url} is no server of fedkseed ({error}): mend the address", passes=False)
        else:
            reason = Unreachable(str(error))
        if not (reason.passes or self._connected):
            raise FedKSeedError(reason.text)
        return reason.text

    def _attend(self, say: Say) -> None:
        """Answer tasks until the tuned model was kept, or the session ends."""
        work: TaskInHand | None = None
        last = b""  # key of the last task of this session: one that was refused or late is not done again
        try:
            while True:
                self._say_gain(say)
                if work is not None and work.done.wait(BEAT):
                    self._send(work, say)
                    if self._over:
                        return
                    work = None
                try:
                    stub = self.session.next_task(last, waits=work is None)
                    if stub is None:
                        continue
                    last, data = stub.key, stub.task(self.session.file)
                    task = Task.decode(data)
                except FedKSeedError as error:  # a broken file or task
                    if isinstance(error, RefusedError | AnswerError):  # the former of another release
                        raise
                    raise AnswerError(str(error)) from error
                if work is not None and ANSWER_DEPENDS_ON(work.task) == ANSWER_DEPENDS_ON(task):
                    work.key = stub.key
                    continue
                if work is not None:
                    work.give_up()
                    say(f"{work}: given up, the server has gone on")
                work = TaskInHand(stub.key, task, data, self.desk)
                if not task.keep:
                    say(f"{work}: training")
        except (AnswerError, httpx.TransportError):
            if work is not None and work.task.keep:  # the server waits for nobody, and may be gone
                work.done.wait()
                self._over = Reply.decode(work.reply).status is Status.DONE
            raise
        finally:
            if work is not None:
                work.give_up()

    def _send(self, work: TaskInHand, say: Say) -> None:
        """Send the worker's reply. One that is lost is asked for again, and the worker has it still.

        Raises:
            FedKSeedError: the recipe is refused, or the tuned model can't be kept.
        """
        reply = Reply.decode(work.reply)
        self._over = reply.status is Status.DONE and work.task.keep
        answer = self.session.send(work.key, work.reply)
        if self._over:
            say("the tuned model has come")
        elif reply.status is Status.DONE:
            self._answered, self._taken_over = True, 0
            size = f"{len(work.task.message):,} bytes down, {len(reply.message):,} up"
            refusal = f"refused with {answer.status} {answer.text}"
            ends = {204: f"answered, {size}", 410: "too late"}
            say(f"{work}: {ends.get(answer.status, refusal)}")
        elif reply.status is not Status.UNPREPARED:
            text = f"{work}: not answered ({reply.text}): {self.desk.reason()}"
            if reply.status is Status.REFUSED and work.task.keep:
                raise FedKSeedError(f"{text}; when that is mended, join again: {SENT_AGAIN}")
            if reply.status is Status.REFUSED and reply.text in LASTING and not self._answered:
                raise FedKSeedError(text)
            say(text)

    def _say_gain(self, say: Say) -> None:
        """Print the client's gain once it is measured, which may be after the server has ended."""
        if (words := self.gain.news()) is not None:
            say(words)
