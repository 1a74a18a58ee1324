"""A server of a fleet over HTTPS: clients that wait, uploads a second, the time of a round.

    python benchmarks/fleet.py [--only waiting rounds] [--clients 1000 10000] [--waiting 19000] [--no-tls] [--json]

The server is `fedkseed serve` without a model, with its defaults (rule, agreement, signatures, receipts). Clients are
those of a load generator in two processes of its own: real sockets, TLS, keys, sessions, signed uploads of FedKSeed,
compact, K = 4,096, 200 steps; they train nothing. All share one machine. A client that waits is an open file of the
server (ulimit -Hn). With --no-tls it is as behind a proxy on its machine, which would be charged for TLS.

    waiting   clients that are connected and wait: memory of the server for each, its processor time while they do
    rounds    rounds in which every client takes part and answers at once; the first, in which clients get the recipe,
              is not counted
"""

import asyncio
import os
import resource
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import tomli_w

from bytes import SIZES, STEPS
from fedkseed import Upload, decode, encode
from fedkseed.network.https.task_files import Stub
from fedkseed.network.protocol.certs import make as make_keys
from fedkseed.network.protocol.envelope import Reply, Status, Task
from fedkseed.network.protocol.signatures import audience, certificate, private_key, proof_of, sign, upload_statement
from fedkseed.run.store import Store
from fedkseed.wire.delta import restore
from fedkseed.wire.numbers import scalars
from fedkseed.wire.records import Broadcast
from table import Row, free_port, new_parser, show

MB = 1e6
PROCESSES = 2  # of the generator
ROUNDS = 3  # of which the first is not counted
IDLE = 60.0  # seconds for which clients wait and the server's time is measured
PATIENCE = 1800.0
RECIPE = {
    "seed": 1,
    "model": {"name": "none", "digest": "00" * 32, "tuned": ["*"]},
    "data": {"source": "none", "held_out": "summarization"},
    "clients": {"split": "files", "min_examples": 1},
    "directions": {"family": "hadamard", "size": SIZES["fedkseed"]},
    "training": {"algorithm": "fedkseed", "rounds": ROUNDS, "steps": STEPS, "eps": 1e-3, "lr": 1e-6, "wire": "compact"},
}
# A client finds one scalar in a step; here they are found before the rounds, which are those of the server.
DRAWN = [np.clip(8 * np.random.default_rng(seed).standard_t(4, STEPS), -1000, 1000) for seed in range(64)]
NUMBERS = [scalars(numbers, "compact") for numbers in DRAWN]


def open_files() -> None:
    """Let this process and its children open as many files as the system allows."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Line:
    """One connection of a client to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: Path, ca: Path) -> None:
        self.reader, self.writer, self.headers = reader, writer, ""
        self.key, self.authority = private_key(key), certificate(ca)

    @classmethod
    async def joined(cls, key: Path, ca: Path, port: int, context: ssl.SSLContext | None) -> "Line":
        """A connection on which a client's session has begun."""
        name = None if context is None else "localhost"
        opened = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        line = cls(*opened, key, ca)
        _, challenge = await line.ask("GET", "/v1/challenge")
        status, found = await line.ask(
            "POST", "/v1/session", proof_of(line.key, line.authority, "localhost", challenge)
        )
        if status != 200:
            raise ConnectionError(found)
        token = found.decode().partition('"token":"')[2].partition('"')[0]
        line.headers = f"authorization: Bearer {token}\r\n"
        return line

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """The status and body of the answer to a request."""
        length = f"content-length: {len(body)}\r\n" if body else ""
        self.writer.write(f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{self.headers}{length}\r\n".encode() + body)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        _, _, size = head.partition("content-length: ")
        data = await self.reader.readexactly(int(size.split()[0])) if size else b""
        return int(head.split()[1]), data

    async def next_task(self, kept: dict[bytes, bytes]) -> tuple[bytes, Task, bytes] | None:
        """The next task after its key, and the broadcast that it is about, whole; None: the session is over.

        Args:
            kept: broadcasts of earlier tasks by their messages' digests, of all clients of a process.
        """
        status, data = 204, b""
        while status == 204:
            status, data = await self.ask("GET", "/v1/task?wait=240")
        if status != 200:
            return None
        stub = Stub.decode(data)
        files = {name: (await self.ask("GET", f"/v1/file/{name.hex()}"))[1] for name in stub.names if any(name)}
        task = Task.decode(stub.task(files.__getitem__))
        if task.keep:
            return stub.key, task, task.message
        if stub.names[2] not in kept:  # others of this process have restored the same difference
            bases = [None, *kept.values()]
            kept[stub.names[2]] = next(found for base in bases if (found := restore(task.message, base)))
        return stub.key, task, kept[stub.names[2]]

    def reply(self, task: Task, whole: bytes, made: bytes) -> Reply:
        """The reply with a signed answer to a task about a whole broadcast."""
        of = audience(self.authority, "localhost")
        statement = upload_statement(of, task.nonce, task.client, task.head, whole, made)
        return Reply(Status.DONE, made, signature=sign(self.key, statement))

    async def send(self, key: bytes, reply: bytes) -> int:
        """Send the reply to the task of a key; returns the status of the server's answer."""
        return (await self.ask("POST", f"/v1/task/{key.hex()}", reply))[0]


@cache
def broadcast_of(whole: bytes) -> Broadcast:
    return decode(whole, Broadcast)


async def client(
    number: int,
    keys: Path,
    port: int,
    context: ssl.SSLContext | None,
    kept: dict[bytes, bytes],
    gate: asyncio.Semaphore,
) -> None:
    """Take part until the server ends."""
    async with gate:  # limits how many connect at once
        line = await Line.joined(keys / f"client-{number}", keys / "ca.pem", port, context)
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        while found := await line.next_task(kept):
            key, task, whole = found
            made = b""
            if not task.keep:
                asked = broadcast_of(whole)
                upload = Upload(asked.run, asked.round, number, 1, 1.0, NUMBERS[number % len(NUMBERS)], asked.wire)
                made = encode(upload)
            await line.send(key, line.reply(task, whole, made).encode())


def generate(numbers: range, keys: Path, port: int, tls: bool) -> None:
    open_files()

    async def all_of_them() -> None:
        context = ssl.create_default_context(cafile=str(keys / "ca.pem")) if tls else None
        kept, gate = dict[bytes, bytes](), asyncio.Semaphore(50)
        await asyncio.gather(*(client(number, keys, port, context, kept, gate) for number in numbers))

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    asyncio.run(all_of_them())


class Server:
    """`fedkseed serve` in a folder, for some clients."""

    def __init__(self, folder: Path, keys: Path, clients: int, tls: bool) -> None:
        self.folder, self.keys, self.port, self.clients, self.tls = folder, keys, free_port(), clients, tls
        network = {"minimum": clients, "patience": PATIENCE, "deadline": PATIENCE}
        recipe = RECIPE | {"clients": RECIPE["clients"] | {"cohort": clients}, "network": network}
        folder.mkdir()
        (folder / "recipe.toml").write_text(tomli_w.dumps(recipe))

    @contextmanager
    def running(self) -> Iterator[None]:
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603 - this program itself
                [
                    sys.executable, "-m", "fedkseed", "serve", str(self.folder / "recipe.toml"), "--certs",
                    str(self.keys), "--output", str(self.folder / "run"), "--port", str(self.port), "--strangers",
                    "100000", "--tls" if self.tls else "--no-tls",
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        try:
            self.until("clients connect to port")
            yield
        finally:
            self.process.terminate()
            self.process.wait()

    @contextmanager
    def joined(self, clients: int) -> Iterator[None]:
        """The first `clients` clients, in processes of their own."""
        spawn, parts = get_context("spawn"), [range(begin, clients, PROCESSES) for begin in range(PROCESSES)]
        made = [
            spawn.Process(target=generate, args=(part, self.keys, self.port, self.tls), daemon=True) for part in parts
        ]
        for one in made:
            one.start()
        try:
            yield
        finally:
            for one in made:
                one.terminate()
                one.join()

    def until(self, text: str) -> None:
        end = time.monotonic() + PATIENCE
        while text not in (said := (self.folder / "log").read_text()):
            if time.monotonic() > end or self.process.poll() is not None:
                raise TimeoutError(f"{text!r} was not said: {said[-2000:]}")
            time.sleep(0.1)

    def status(self, name: str) -> int:
        """A number of the server's process, as the system counts it."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024

    def processor(self) -> float:
        """Processor seconds of the server so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waiting(clients: int, keys: Path, tls: bool) -> Row:
    """A row about clients that are connected and wait for another, who never comes."""
    with tempfile.TemporaryDirectory(prefix="fks") as name:
        server = Server(Path(name) / "s", keys, clients + 1, tls)
        with server.running():
            before, began = server.status("VmRSS"), time.monotonic()
            with server.joined(clients):
                server.until(f"{clients} of {clients + 1} clients are connected")
                connected, memory = time.monotonic() - began, server.status("VmRSS")
                busy = server.processor()
                time.sleep(IDLE)
                busy = server.processor() - busy
    return {
        "clients": clients, "seconds to connect": connected, "connections a second": clients / connected,
        "server's memory, MB": memory / MB, "KB a client": (memory - before) / clients / 1e3,
        "its CPU s in an idle minute": busy * 60 / IDLE,
    }  # fmt: skip


def rounds(clients: int, keys: Path, tls: bool) -> Row:
    """A row about rounds in which all clients answer at once."""
    with tempfile.TemporaryDirectory(prefix="fks") as name:
        server = Server(Path(name) / "s", keys, clients, tls)
        with server.running(), server.joined(clients):
            server.until(f"all {clients} clients are connected")
            busy = server.processor()
            server.until("clients have kept the tuned model")
            peak, busy = server.status("VmHWM"), server.processor() - busy
            store = Store(server.folder / "run")
            reports = store.reports()[1:]
    seconds = sum(report["seconds"] for report in reports) / len(reports)
    return {
        "clients": clients, "seconds a round": seconds, "uploads a second": clients / seconds,
        "server's CPU ms an upload": busy / clients / (ROUNDS + 1) * 1e3, "server's peak memory, MB": peak / MB,
        "left out": clients * len(reports) - sum(len(report["clients"]) for report in reports),
    }  # fmt: skip


def main() -> None:
    parser = new_parser(__doc__)
    parts = ("waiting", "rounds")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--waiting", type=int, nargs="+", default=[1_000, 19_000])
    parser.add_argument("--no-tls", dest="tls", action="store_false", help="as behind a proxy on the same machine")
    options = parser.parse_args()
    open_files()
    jobs = {
        "waiting": ("clients that wait", waiting, options.waiting, 1),  # for one more, who never comes
        "rounds": ("rounds", rounds, options.clients, 0),
    }
    with tempfile.TemporaryDirectory(prefix="fks") as name:
        for title, job, counts, absent in (jobs[part] for part in parts if part in options.only):
            found = []
            for count in counts:
                keys = Path(name) / f"keys-{count + absent}"  # of one server: their number is that of its clients
                if not keys.exists():
                    make_keys(keys, count + absent, ["localhost"], 40)
                found.append(job(count, keys, options.tls))
                print(found[-1], file=sys.stderr)
            show(title if options.tls else f"{title}, without TLS", found, as_json=options.json)


if __name__ == "__main__":
    main()
