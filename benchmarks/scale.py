"""Costs of a server against the number of clients: aggregation, rounds, and sums of shards.

    python benchmarks/scale.py [--only aggregation rounds shards] [--clients 100000 …] [--json]

Uploads are those of FedKSeed, compact, with K = 4,096 and 200 steps; no client trains. Each row has a process of its
own. Time is processor time, so that other programs do not count. Memory is the peak of resident memory, less that
before. A MB is 10^6 bytes.

    aggregation   decode and aggregate uploads, as a round does
    rounds        the second round of a server whose clients answer at once, without a network
    shards        the same uploads in groups, each aggregated by itself, and their sums compared bit by bit
"""

import sys
import tempfile
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING

import numpy as np

from bytes import SIZES, made, upload
from fedkseed import Upload, decode, encode
from fedkseed.round import Broadcasts
from fedkseed.strategies.sums import Contribution, Sum
from fedkseed.strategies.uploads import drawn_directions
from fedkseed.wire.records import Subtotal

if TYPE_CHECKING:  # a process that aggregates imports no PyTorch; others do so in their functions
    from fedkseed.network.protocol.carrier import Arrival, Parcel
    from table import Row

MB = 1e6


def aggregation(clients: int) -> "Row":
    """A row about a round's work on the clients' uploads."""
    strategy = made("fedkseed", "compact")
    state = strategy.server.init()
    replies = {client: encode(upload(strategy, 0, client)) for client in range(clients)}
    before, begin = peak_memory(), process_time()
    uploads = [decode(data, Upload) for data in replies.values()]
    decoded = process_time()
    strategy.aggregate(state, uploads)
    end = process_time()
    return {
        "clients": clients, "decode, CPU s": decoded - begin, "aggregate, CPU s": end - decoded,
        "CPU µs a client": (end - begin) / clients * 1e6, "messages, MB": sum(map(len, replies.values())) / MB,
        "memory beside them, MB": (peak_memory() - before) / MB,
    }  # fmt: skip


class AtOnce:
    """A carrier of clients that answer at once, each with the bytes that it was given."""

    name, largest = "nothing", 1 << 30

    def __init__(self, clients: int) -> None:
        self.answers: dict[int, bytes] = {}
        self.clients = clients

    def nodes(self) -> list[int]:
        return [*range(self.clients)]

    def dialled(self, node: int) -> str:
        return ""

    def send(self, parcels: "Iterable[Parcel]") -> list[str | None]:
        return [str(parcel.node) for parcel in parcels]

    def arrived(self, keys: Collection[str]) -> "list[Arrival]":
        from fedkseed.network.protocol.carrier import Arrival

        return [Arrival(key, int(key), self.answers[int(key)]) for key in keys]


def rounds(clients: int, model: Path) -> "Row":
    """A row about a round of a server, from the broadcast to the next state."""
    from fedkseed.network.protocol.envelope import Reply, Status
    from fedkseed.network.protocol.server.client_numbers import ClientNumbers
    from fedkseed.network.protocol.server.clients import RemoteClients
    from fedkseed.network.protocol.server.rounds import federation
    from fedkseed.recipe.reading import parse
    from fedkseed.recipe.schema import NetworkTable
    from fedkseed.run.progress import Silent

    carrier = AtOnce(clients)
    with tempfile.TemporaryDirectory() as name:
        recipe = parse({
            "model": {"name": str(model), "digest": 64 * "0"},
            "data": {"source": str(Path(name) / "none"), "held_out": "none"},
            "clients": {"split": "files", "cohort": clients},
            "directions": {"family": "hadamard", "size": SIZES["fedkseed"]},
            "training": {"rounds": 2, "wire": "compact", "steps": 200},
        })  # fmt: skip
        ClientNumbers.register(Path(name), carrier.nodes())
        numbers = ClientNumbers(Path(name), None)
        remote = RemoteClients(carrier, numbers, b"[model]", clients, NetworkTable(), Silent())
        server = federation(recipe, remote)
        strategy, broadcasts = server.strategy, Broadcasts(server.strategy.server)
        state, report, before, begin = strategy.server.init(), None, 0, 0.0
        for round_ in range(2):
            for client in range(clients):
                carrier.answers[client] = Reply(Status.DONE, encode(upload(strategy, round_, client))).encode()
            before = before or peak_memory()
            begin = process_time()
            state, report = server.round(state, {}.__getitem__, broadcasts)  # synchronous: no earlier state is needed
        seconds = process_time() - begin
        used = peak_memory() - before
    assert report is not None
    assert len(report.clients) == clients
    return {
        "clients": clients, "CPU s": seconds, "CPU ms a client": seconds / clients * 1e3,
        "down, bytes": report.bytes_down, "up, bytes": report.bytes_up, "memory of two rounds, MB": used / MB,
    }  # fmt: skip


def shards(count: int, clients: int) -> "Row":
    """A row that compares sums of uploads grouped in shards of neighbouring clients with the sum of one server."""
    strategy = made("fedkseed", "compact")
    size = strategy.run.pool.size
    uploads = [upload(strategy, 0, client) for client in range(clients)]
    drawn = [drawn_directions(strategy.settings, 0, one.client, one.scalars.size, None) for one in uploads]
    taken = [
        Contribution.of_scalars(one.client, one.examples, directions[one.found], one.scalars[one.found])
        for one, directions in zip(uploads, drawn, strict=True)
    ]
    groups = [taken[s * clients // count : (s + 1) * clients // count] for s in range(count)]
    whole, tree = Sum.of(taken, size), Sum.of([], size)
    for group in groups:
        tree = tree + Sum.of(group, size)
    floats = np.sum([Sum.of(group, size).values * 1e-9 for group in groups], 0)  # as float64 would have it
    first, members = Sum.of(groups[0], size), np.arange(len(groups[0]), dtype=np.uint32)
    none, drawn = np.zeros(size, np.int64), np.zeros(size, np.uint32)
    handed = Subtotal(strategy.run, 0, 0, members, first.weight, 0.0, 0, first.values, none, drawn)
    return {
        "shards": count, "clients": clients, "sums that differ": int(np.sum(tree.values != whole.values)),
        "weights that differ": int(tree.weight != whole.weight),
        "in float64": int(np.sum(floats != whole.values * 1e-9)), "bytes a shard hands up": len(encode(handed)),
    }  # fmt: skip


def peak_memory() -> int:
    """Peak resident memory of this process in bytes, by code that does not import PyTorch."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def alone(job: Callable[[], "Row"]) -> "Row":
    """The row of a job that runs in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        row = process.submit(job).result()
    print(row, file=sys.stderr)
    return row


def main() -> None:
    from table import new_parser, show

    parser = new_parser(__doc__)
    parts = ("aggregation", "rounds", "shards")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--clients", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="numbers to aggregate")
    options = parser.parse_args()
    apart = "coefficients, of 4,096, that sums of shards do not share with the sums of one server"
    with tempfile.TemporaryDirectory() as name:
        jobs: dict[str, tuple[str, list[Callable[[], Row]]]] = {
            "aggregation": ("decode and aggregate", [partial(aggregation, size) for size in options.clients]),
            "shards": (apart, [partial(shards, count, 10_000) for count in (1, 10, 100)]),
        }
        if "rounds" in options.only:
            from traffic import untrained

            model = untrained(Path(name) / "model")
            sizes = [partial(rounds, 10**power, model) for power in (1, 2, 3)]
            jobs["rounds"] = "a server's round without a network", sizes
        for title, rows in (jobs[part] for part in options.only):
            show(title, [alone(job) for job in rows], as_json=options.json)


if __name__ == "__main__":
    main()
