"""Bytes of a client and round over a network: those of our messages beside all bytes of the TCP connections.

    python benchmarks/traffic.py [--only compact …] [--rounds 4] [--idle 90] [--json]

Each row is a federation of real processes on loopback: `fedkseed serve` and three times `fedkseed join`. Each client's
proxy counts the bytes it passes on: TLS and HTTP, without the headers of TCP and IP. Only rounds after the first are
counted, in which clients have the recipe and the model, and keep the last broadcast. Before the first row, two of the
three clients wait for the third: their traffic in this time is idle traffic. A client that waits makes a request every
240 s, so that `--idle` should be a multiple of that.

The model has 0.14 million weights. The bytes of FedKSeed do not depend on that number; for algorithms that send
weights, the column of SmolLM2-135M is computed: 4 bytes a tuned weight down and up.
"""

import asyncio
import json
import os
import sys
import tempfile
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import tomli_w

from fedkseed.data.sources import read
from fedkseed.models.sizes import Architecture
from fedkseed.network.protocol.certs import make as make_keys
from fedkseed.paper.byte_counts import communication, kseed
from fedkseed.paper.tiny_model import model, tokenizer
from fedkseed.run.store import Store
from table import Row, free_port, new_parser, show

SMOLLM2 = Architecture(576, 1536, 30, 49152, 576, 192, tied=True)  # SmolLM2-135M
CLIENTS, EXAMPLES = 3, 24  # of each client
SHORT = 300  # characters of an example: 200 steps in seconds
POLICY = {  # of clients with two dozen rows, for any algorithm and batches of one
    "data": {"min_examples": 1},
    "training": {
        "algorithms": ["fedkseed", "fedavg", "fedit"], "min_batch_size": 1, "max_numbers": 1_000_000,
        "weights_per_direction": 1,
    },
}  # fmt: skip
STEPS, SIZE = 200, 4096  # τ and K of the paper
PATIENCE = 300.0  # seconds until everything is connected, or a round is done, on a busy machine
SETTLE = 10.0  # seconds from a client's connection until traffic counts as idle
LOOK = 0.1  # seconds between two looks at the run
FEDKSEED = {"algorithm": "fedkseed", "steps": STEPS, "eps": 1e-3, "lr": 1e-6}
TRAININGS = {
    "compact": FEDKSEED | {"wire": "compact"},
    "exact": FEDKSEED | {"wire": "exact"},
    "sign": FEDKSEED | {"wire": "sign", "lr": 1e-5},
    "fedavg": {"algorithm": "fedavg", "steps": 20, "lr": 1e-3},
    "fedit": {"algorithm": "fedit", "steps": 20, "lr": 1e-3},
}


@dataclass
class Counts:
    """Counts of the bytes, requests and connections that a proxy has passed on."""

    down: int = 0
    up: int = 0
    requests: int = 0  # number of times that a client began to send after it had received
    connections: int = 0

    def since(self, before: "Counts") -> "Counts":
        pairs = ((getattr(self, name), getattr(before, name)) for name in self.__annotations__)
        return Counts(*(now - then for now, then in pairs))

    @staticmethod
    def total(proxies: Sequence["Proxy"]) -> "Counts":
        return Counts(*(sum(getattr(one.counts, name) for one in proxies) for name in Counts.__annotations__))


class Proxy:
    """A proxy that passes connections on to a port of this machine, and counts their traffic."""

    def __init__(self, target: int) -> None:
        self.target, self.counts, self.port = target, Counts(), free_port()

    @asynccontextmanager
    async def running(self):
        async with await asyncio.start_server(self._connected, "127.0.0.1", self.port):
            yield

    async def _connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:  # the server is not up yet
            writer.close()
            return
        self.counts.connections += 1
        quiet = True  # whether the client has sent nothing since it last received

        def up(size: int) -> None:
            nonlocal quiet
            self.counts.requests += quiet
            self.counts.up, quiet = self.counts.up + size, False

        def down(size: int) -> None:
            nonlocal quiet
            self.counts.down, quiet = self.counts.down + size, True

        await asyncio.gather(_pass(reader, back, up), _pass(there, writer, down))


async def _pass(reader: StreamReader, writer: StreamWriter, count) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            count(len(data))
            writer.write(data)
            await writer.drain()
    writer.close()


class Federation:
    """A server and three clients behind proxies, in a folder."""

    def __init__(self, folder: Path, recipe: dict, data: Path, model: Path) -> None:
        self.folder, self.data, self.model, self.port = folder, data, model, free_port()
        self.run, self.keys = folder / "run", folder / "keys"
        self.proxies = [Proxy(self.port) for _ in range(CLIENTS)]
        folder.mkdir()
        (folder / "recipe.toml").write_text(tomli_w.dumps(recipe))
        (folder / "policy.toml").write_text(tomli_w.dumps(POLICY))
        make_keys(self.keys, CLIENTS, ["localhost"], 40)

    @asynccontextmanager
    async def serving(self):
        async with AsyncExitStack() as stack:
            for proxy in self.proxies:
                await stack.enter_async_context(proxy.running())
            self._stack = stack
            own = ("--certs", self.keys, "--output", self.run, "--port", self.port)
            self._server = await self._start("serve", self.folder / "recipe.toml", *own)
            await self.until_told("clients connect to port")
            yield

    async def join(self, number: int) -> None:
        await self._start(
            "join", f"https://localhost:{self.proxies[number].port}", "--data", self.data / f"{number}.jsonl",
            "--key", self.keys / f"client-{number}", "--ca", self.keys / "ca.pem", "--model", self.model,
            "--state", self.folder / f"c{number}", "--policy", self.folder / "policy.toml",
        )  # fmt: skip

    async def until_told(self, text: str) -> None:
        await self._until(lambda: text in (self.folder / "serve.log").read_text(), text)

    async def until_done(self, rounds: int) -> list[dict]:
        """Wait until `rounds` rounds are finished, and return their reports."""
        await self._until(lambda: len(Store(self.run).reports()) >= rounds, f"round {rounds}")
        return Store(self.run).reports()

    async def _until(self, condition, what: str) -> None:
        end = perf_counter() + PATIENCE
        while not condition():
            if perf_counter() > end or self._server.returncode is not None:
                log = (self.folder / "serve.log").read_text()[-2000:]
                raise TimeoutError(f"not within {PATIENCE:g} s: {what}; the server said: {log}")
            await asyncio.sleep(LOOK)

    async def _start(self, command: str, *arguments: object) -> asyncio.subprocess.Process:
        with (self.folder / f"{command}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                Path(sys.executable), "-m", "fedkseed", command, *map(str, arguments),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "TERM": "dumb"},
            )  # fmt: skip

        async def stop() -> None:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()

        self._stack.push_async_callback(stop)
        return process


async def measure(
    folder: Path, training: dict, data: Path, model: Path, rounds: int, idle: float
) -> tuple[Row, Row | None]:
    """A row of bytes a client and round, and a row of bytes of idle clients, or None if `idle` is 0 seconds."""
    recipe = {
        "seed": 1,
        "model": {"name": str(model)},
        "data": {"source": str(folder / "none of the server's"), "max_tokens": 256, "held_out": "summarization"},
        "clients": {"split": "files", "cohort": CLIENTS, "min_examples": 1, "threads": 1},
        "directions": {"family": "hadamard", "size": SIZE},
        "training": {"rounds": rounds, "batch_size": 1, **training},
        "network": {"minimum": CLIENTS},
    }
    federation = Federation(folder, recipe, data, model)
    waiting: Row | None = None
    async with federation.serving():
        for number in range(CLIENTS - 1):
            await federation.join(number)
        if idle:
            await federation.until_told(f"{CLIENTS - 1} of {CLIENTS} clients are connected")
            await asyncio.sleep(SETTLE)
            before = Counts.total(federation.proxies)
            await asyncio.sleep(idle)
            found, hours = Counts.total(federation.proxies).since(before), (CLIENTS - 1) * idle / 3600
            sums = {"TCP down": found.down, "TCP up": found.up, "both": found.down + found.up}
            sums |= {"requests": found.requests, "connections": found.connections}
            waiting = {"a client that waits, an hour": f"measured for {idle:g} s and multiplied"}
            waiting |= {column: round(count / hours) for column, count in sums.items()}
            print(waiting, file=sys.stderr)  # at once: a later error must not lose a measurement of minutes
        await federation.join(CLIENTS - 1)
        await federation.until_done(1)
        before, begin = Counts.total(federation.proxies), perf_counter()
        reports = (await federation.until_done(rounds))[1:]
        found, seconds = Counts.total(federation.proxies).since(before), perf_counter() - begin
    each = CLIENTS * len(reports)
    down = sum(report["total_down"] for report in reports) / each
    both = sum(report["bytes_total"] for report in reports) / each
    name, tcp = training["algorithm"], (found.down + found.up) / each
    pooled = name == "fedkseed"
    weights = 8 * SMOLLM2.weights if name == "fedavg" else communication(name, SMOLLM2)  # 32 bits each way
    row: Row = {
        "algorithm": name, "wire": training.get("wire", "float32"),
        "down": round(down), "up": round(both - down), "both": round(both),
        "the paper's count": f"{sum(kseed(SIZE, STEPS)):,}" if pooled else "",
        "TCP down": round(found.down / each), "TCP up": round(found.up / each), "TCP both": round(tcp),
        "more than ours": round(tcp - both), "requests": found.requests / each,
        "seconds a round": seconds / len(reports), "both, SmolLM2-135M": round(both) if pooled else weights,
    }  # fmt: skip
    return row, waiting


def write_data(folder: Path, clients: int = CLIENTS) -> Path:
    """Write a data file for each client."""
    folder.mkdir()
    examples = [e for e in read("dolly-sample") if len(e.instruction + e.context + e.response) < SHORT]
    for number in range(clients):
        own = examples[number * EXAMPLES : (number + 1) * EXAMPLES]
        rows = [{key: getattr(e, key) for key in ("instruction", "context", "response", "category")} for e in own]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def untrained(folder: Path) -> Path:
    """Write a model of 0.14 million random weights, whose messages are as large as those of a trained model."""
    tokenizer().save_pretrained(folder)
    model().save_pretrained(folder)
    return folder


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--rounds", type=int, default=4, help="rounds of a row; the first is not counted")
    parser.add_argument("--idle", type=float, default=90.0, help="seconds of idle traffic to measure; 0 for none")
    options = parser.parse_args()
    rows, idle = list[Row](), list[Row]()
    with tempfile.TemporaryDirectory(prefix="fks") as place:  # short: a worker's socket has a path of 108 characters
        data, model = write_data(Path(place) / "data"), untrained(Path(place) / "model")
        for name in options.only:
            folder, wait = Path(place) / name, 0.0 if idle else options.idle
            row, waiting = asyncio.run(measure(folder, TRAININGS[name], data, model, options.rounds, wait))
            print(row, file=sys.stderr)
            rows.append(row)
            idle += [waiting] if waiting else []
    title = f"bytes a client and round: {CLIENTS} clients, K = {SIZE:,}, {STEPS} steps"
    show(f"{title}, mean of {options.rounds - 1} rounds", rows, as_json=options.json)
    if idle:
        show("idle", idle, as_json=options.json)


if __name__ == "__main__":
    main()
