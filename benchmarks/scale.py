"""Costs of a server against the number of clients: aggregation, rounds over Flower's Grid, and the SuperLink itself.

    python benchmarks/scale.py [--only aggregation grid shards polls] [--clients 100000 …] [--json]

Uploads are those of FedKSeed, compact, with K = 4,096 and 200 steps; no client trains. Each row has a process of its
own. Time is processor time, so that other programs do not count. Memory is the peak of resident memory, less that
before. A MB is 10^6 bytes.

    aggregation   decode and aggregate uploads, as a round does
    grid          the second round of a server whose clients answer at once, with Flower's records and no network; the
                  time in which clients make their answers is left out
    shards        the same uploads in groups, each aggregated by itself, and their sums compared bit by bit
    polls         clients that ask the SuperLink for work when there is none, as fast as they can, over TLS, with keys
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, cast

import numpy as np

from bytes import SIZES, made, upload
from fedkseed import KSeed, Upload, decode, encode
from fedkseed.strategies.checks import drawn_by
from fedkseed.strategies.sums import Contribution, Sum, require_summable, summed
from fedkseed.wire.records import Subtotal

if TYPE_CHECKING:  # a process that aggregates imports neither PyTorch nor Flower; others do so in their functions
    from fedkseed.network.flower.server.processes import ServerProcesses
    from table import Row

MB = 1e6
CONNECT, SECONDS = 25.0, 8.0  # seconds until all clients poll, on a busy machine; seconds of polling


def aggregation(clients: int) -> "Row":
    """A row about a round's work on the clients' uploads."""
    strategy = made("fedkseed", "compact")
    state = strategy.init()
    replies = {client: encode(upload(strategy, 0, client)) for client in range(clients)}
    before, begin = peak_memory(), process_time()
    uploads = [decode(data, Upload) for data in replies.values()]
    decoded = process_time()
    strategy.aggregate(state, uploads)
    end = process_time()
    return {
        "clients": clients,
        "decode, CPU s": decoded - begin,
        "aggregate, CPU s": end - decoded,
        "CPU µs a client": (end - begin) / clients * 1e6,
        "messages, MB": sum(map(len, replies.values())) / MB,
        "memory beside them, MB": (peak_memory() - before) / MB,
    }


def grid(clients: int, model: Path) -> "Row":
    """A row about a round of a server, from the broadcast to the next state."""
    from flwr.app import Message

    from fedkseed.network.flower.loopback import LoopbackGrid
    from fedkseed.network.flower.messages import packed
    from fedkseed.network.flower.server.carrier import GridCarrier
    from fedkseed.network.protocol.envelope import Reply, Status
    from fedkseed.network.protocol.server.client_numbers import ClientNumbers
    from fedkseed.network.protocol.server.clients import RemoteClients
    from fedkseed.network.protocol.server.rounds import federation
    from fedkseed.recipe.reading import parse
    from fedkseed.recipe.schema import NetworkTable
    from fedkseed.run.progress import Silent

    nodes = range(1, clients + 1)
    answers: dict[int, bytes] = {}
    answering = 0.0

    def deliver(message: Message) -> Iterable[Message]:
        nonlocal answering
        begin = process_time()
        answer = Message(packed(answers[message.metadata.dst_node_id]), reply_to=message)
        answering += process_time() - begin
        yield answer

    with tempfile.TemporaryDirectory() as name:
        recipe = parse(
            {
                "model": {"name": str(model), "digest": 64 * "0"},
                "data": {"source": str(Path(name) / "none"), "held_out": "none"},
                "clients": {"split": "files", "cohort": clients},
                "directions": {"family": "hadamard", "size": SIZES["fedkseed"]},
                "training": {"rounds": 2, "wire": "compact", "steps": 200},
            }
        )
        ClientNumbers.register(Path(name), nodes)
        numbers = ClientNumbers(Path(name), None)
        remote = RemoteClients(
            GridCarrier(LoopbackGrid(lambda: nodes, deliver)), numbers, b"[model]", clients, NetworkTable(), Silent()
        )
        server = federation(recipe, remote)
        strategy = cast("KSeed", server.strategy)
        state, report, before, begin = strategy.init(), None, 0, 0.0
        for round_ in range(2):
            for node in nodes:
                reply = Reply(Status.DONE, encode(upload(strategy, round_, node - 1)))
                answers[node] = reply.encode()
            before = before or peak_memory()
            answering, begin = 0.0, process_time()
            state, report = server.round(state, {}.__getitem__)  # synchronous: no earlier state is asked for
        seconds = process_time() - begin - answering
        used = peak_memory() - before
    assert report is not None
    assert len(report.clients) == clients
    return {
        "clients": clients,
        "CPU s": seconds,
        "CPU ms a client": seconds / clients * 1e3,
        "down, bytes": report.bytes_down,
        "up, bytes": report.bytes_up,
        "memory of two rounds, MB": used / MB,
    }


def shards(count: int, clients: int) -> "Row":
    """A row that compares sums of uploads grouped in shards of neighbouring clients with the sum of one server."""
    strategy = made("fedkseed", "compact")
    size = strategy.run.pool.size
    uploads = [upload(strategy, 0, client) for client in range(clients)]
    taken = [
        Contribution.of_scalars(one.client, one.examples, drawn_by(one, strategy.run, None), one.scalars[one.found])
        for one in uploads
    ]
    require_summable(taken)
    groups = [taken[s * clients // count : (s + 1) * clients // count] for s in range(count)]
    whole, tree = summed(taken, size), Sum(np.zeros(size, np.int64), 0)
    for group in groups:
        tree = tree + summed(group, size)
    floats = np.sum([summed(group, size).values * 1e-9 for group in groups], 0)  # as float64 would have it
    first, members = summed(groups[0], size), np.arange(len(groups[0]), dtype=np.uint32)
    none, drawn = np.zeros(size, np.int64), np.zeros(size, np.uint32)
    handed = Subtotal(strategy.run, 0, 0, members, first.weight, 0.0, 0, first.values, none, drawn)
    return {
        "shards": count,
        "clients": clients,
        "sums that differ": int(np.sum(tree.values != whole.values)),
        "weights that differ": int(tree.weight != whole.weight),
        "in float64": int(np.sum(floats != whole.values * 1e-9)),
        "bytes a shard hands up": len(encode(handed)),
    }


def poll(number: int, folder: Path, port: int, begin: float) -> int:
    """Number of times within SECONDS from `begin` on that one client is answered that there is no work."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supernode.fleet_http_connection import http_request_response

    key = load_ssh_private_key((folder / "keys" / f"client-{number}").read_bytes(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    ca = str(folder / "keys" / "ca.pem")
    with http_request_response(f"localhost:{port}", False, ca, (key, key.public_key())) as (_, receive, *_rest):
        receive()
        time.sleep(max(0.0, begin - time.time()))
        count, end = 0, begin + SECONDS
        while time.time() < end:
            assert receive() is None
            count += 1
    return count


def polls(clients: int, through: str) -> "Row":
    """A row about the requests that the SuperLink answers, through nginx or past nginx."""
    from fedkseed.network.flower.children import free_port
    from fedkseed.network.flower.server.processes import ServerProcesses
    from fedkseed.network.protocol.certs import make as make_keys
    from fedkseed.run.progress import Silent

    with tempfile.TemporaryDirectory(prefix="fks") as name:
        folder = Path(name)
        make_keys(folder / "keys", clients, ["localhost"], 40)
        (folder / "run").mkdir()
        host = ServerProcesses(folder / "run", folder / "keys", "127.0.0.1", free_port(), 1 << 16, Silent())
        with host.running(), ProcessPoolExecutor(clients, get_context("spawn")) as pool:
            port = host.port if through == "nginx" else host.inner
            begin = time.time() + CONNECT
            waiting = [pool.submit(poll, number, folder, port, begin) for number in range(clients)]
            time.sleep(begin - time.time())
            before = cpu_seconds(host)
            time.sleep(SECONDS)
            used = {child: seconds - before[child] for child, seconds in cpu_seconds(host).items()}
            count = sum(task.result() for task in waiting)
    return {
        "through": through if "nginx" in used else "no nginx here",
        "clients": clients,
        "requests a second": count / SECONDS,
        "SuperLink, CPU ms a request": used["SuperLink"] / count * 1e3,
        "nginx, CPU ms a request": used["nginx"] / count * 1e3 if "nginx" in used else "not measured",
    }


def peak_memory() -> int:
    """Peak resident memory of this process in bytes, by code that does not import PyTorch."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def cpu_seconds(host: "ServerProcesses") -> dict[str, float]:
    """Processor seconds of each of a server's processes, including those of the processes that it has started."""
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            about, _, rest = path.read_text().rpartition(")")
            stats.append((int(about.split()[0]), rest.split()))
    found = {}
    for name, child in host.children.items():
        family = {child.process.pid} if child.process else set[int]()
        while more := {own for own, fields in stats if int(fields[1]) in family} - family:
            family |= more
        ticks = sum(int(fields[11]) + int(fields[12]) for own, fields in stats if own in family)  # user's, system's
        found[name] = ticks / os.sysconf("SC_CLK_TCK")
    return found


def alone(job: Callable[[], "Row"]) -> "Row":
    """The row of a job that runs in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        row = process.submit(job).result()
    print(row, file=sys.stderr)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("aggregation", "grid", "shards", "polls")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--clients", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="numbers to aggregate")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        jobs: dict[str, tuple[str, list[Callable[[], Row]]]] = {
            "aggregation": ("decode and aggregate", [partial(aggregation, size) for size in options.clients]),
            "shards": (
                "coefficients, of 4,096, that sums of shards do not share with the sums of one server",
                [partial(shards, count, 10_000) for count in (1, 10, 100)],
            ),
            "polls": (
                "clients that ask for work, as fast as they can",
                [partial(polls, 3, through) for through in ("nginx", "nothing")],
            ),
        }
        if "grid" in options.only:
            from traffic import untrained

            model = untrained(Path(name) / "model")
            rounds = [partial(grid, 10**power, model) for power in (1, 2, 3)]
            jobs["grid"] = "a server's round over a Grid without a network", rounds
        for part in options.only:
            title, rows = jobs[part]
            made_rows = [alone(job) for job in rows]
            from table import show

            show(title, made_rows, as_json=options.json)


if __name__ == "__main__":
    main()
