"""Bytes of a peer and round without a server: all bytes of the TCP connections of 20 peers on loopback.

    python benchmarks/gossip.py [--peers 20] [--rounds 4] [--seconds 40] [--only compact …] [--json]

Each peer is what `fedkseed peer` runs but for its model: its copy on disk, its server, its gossip, TLS with a
certificate on each side. When a round opens, each adds an upload of random scalars, which has the size of a real one.
Each peer is dialled through a proxy, which counts the bytes that it passes on: TLS, HTTP, digests, names and uploads,
without the headers of TCP and IP. Each byte is sent by one peer and received by another, so that the mean of what is
sent is the mean of what is received. In the first round peers connect to each other; the others are the usual ones.

SeedFlood's numbers, and those of its rivals, are those of the literature, of other models and runs.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import tomli_w

from fedkseed.network.peers import FILE, tls
from fedkseed.network.peers.app import application, serving_uploads
from fedkseed.network.peers.gossip import ComparisonPace, Gossip, PeerRequests
from fedkseed.network.peers.merge_rule import MergeRule
from fedkseed.network.peers.roster import PeerAddresses, Roster, load_roster
from fedkseed.network.peers.signed_upload import SignedUpload
from fedkseed.network.peers.store import UploadStore
from fedkseed.network.protocol.certs import make, sign
from fedkseed.network.protocol.networked_recipe import largest_request, with_network_defaults
from fedkseed.network.protocol.signatures import private_key
from fedkseed.network.protocol.signatures import sign as signature
from fedkseed.recipe.reading import parse
from fedkseed.recipe.rules import checked_algorithm
from fedkseed.wire.codec import encode
from fedkseed.wire.records import Run
from table import Row, free_port, new_parser, show
from traffic import SIZE, STEPS, Counts, Proxy

UPLOADS = {  # of 200 scalars as 16 bits, of their signs, and of K numbers as 8 bits
    "compact": {"algorithm": "fedkseed", "wire": "compact"},
    "sign": {"algorithm": "fedkseed", "wire": "sign"},
    "plus": {"algorithm": "fedkseed-plus"},
}
# Kim and Lee, 2026, https://arxiv.org/abs/2602.18181, bytes a training run as a summary of it reports them
# (arxivlens.com); Figure 1 of the paper itself says 10^2 to 10^7 times fewer bytes than other methods.
PUBLISHED = {"SeedFlood": 400e3, "ChocoSGD": 15e6, "DSGD": 526e9}
WAIT = 60.0  # seconds after the last round for the last uploads


class Peers:
    """Peers without models, in one process; each thread of theirs is what a process of one has."""

    def __init__(self, folder: Path, count: int, rounds: int, seconds: float, training: dict) -> None:
        self.count, self.rounds, self.seconds = count, rounds, seconds
        self.listens = [free_port() for _ in range(count)]
        self.proxies = [Proxy(port) for port in self.listens]
        keys = folder / "keys"
        make(keys, count, ["localhost"], 2)
        table = []
        for number, proxy in enumerate(self.proxies):
            sign(keys, number, [], 2)
            line = (keys / f"client-{number}.pub").read_text().strip()
            table.append({"key": line, "address": f"https://localhost:{proxy.port}"})
        self.begin = float(round(time.time() + 5))
        start = datetime.fromtimestamp(self.begin, UTC)
        (folder / "peers.toml").write_text(tomli_w.dumps({"start": start, "seconds": seconds, "peers": table}))
        recipe = with_network_defaults(
            parse(
                {
                    "model": {"name": "none"},
                    "clients": {"split": "files", "cohort": count},
                    "directions": {"family": "hadamard", "size": SIZE},
                    "training": {"rounds": rounds, "steps": STEPS, "eps": 1e-3, "lr": 1e-6, **training},
                }
            )
        )
        self.roster: Roster = load_roster(folder / "peers.toml")
        algorithm = checked_algorithm(recipe)
        strategy = algorithm.make(recipe, Run(algorithm.pool(recipe), bytes(32)))
        self.rule = MergeRule.of(b"", recipe, strategy, self.roster)
        self.keys = [private_key(keys / f"client-{number}") for number in range(count)]
        self.stores, self.gossips, self.servers = list[UploadStore](), list[Gossip](), []
        largest = largest_request(recipe)
        for number, port in enumerate(self.listens):
            files = keys / f"client-{number}", keys / f"client-{number}.pem", keys / "ca.pem"
            server, client = tls.contexts(*files, folder)
            store = UploadStore(folder / f"{number}-{FILE}", self.rule)
            addresses, pace = PeerAddresses(folder / "peers.toml", self.roster, print), ComparisonPace.of(seconds)
            requests = PeerRequests(self.rule, addresses, client, largest)
            gossip = Gossip(store, requests, number, self.roster.open_round, recipe.seed, pace, print)
            app = application(store, self.roster.open_round, largest, gossip.heard)
            self.stores.append(store)
            self.gossips.append(gossip)
            self.servers.append(serving_uploads(app, store, "127.0.0.1", port, server))

    def train(self, round_: int) -> None:
        """Each adds an upload of random scalars, some time after the round has opened, and pushes it."""
        rng = np.random.default_rng(round_)
        whens = np.sort(rng.uniform(0.0, 0.4 * self.seconds, self.count)) + self.roster.opens_at(round_)
        for number, when in zip(rng.permutation(self.count).tolist(), whens.tolist(), strict=True):
            time.sleep(max(0.0, when - time.time()))
            strategy, drawn = self.rule.strategy, np.random.default_rng([round_, number])
            differentiates = strategy.settings.derivatives is not None
            own = strategy.client.example(round_, number, 100, differentiates, drawn)
            made = SignedUpload(round_, self.rule.broadcast_digest(self.stores[number].state(round_)), encode(own))
            made = replace(made, signature=signature(self.keys[number], made.statement(self.rule.run)))
            (header,), _ = self.stores[number].add([made.encoded], round_)
            self.gossips[number].push(header.name)
            self.size = len(made.encoded)


async def measure(folder: Path, peers: Peers, name: str) -> list[Row]:
    """A row of each round."""
    rows, counts = list[Row](), list[Counts]()
    with ExitStack() as stack:
        async with AsyncExitStack() as proxies:
            for proxy in peers.proxies:
                await proxies.enter_async_context(proxy.running())
            for listening, store in zip(peers.servers, peers.stores, strict=True):
                stack.callback(store.close)
                await asyncio.to_thread(listening.__enter__)
                stack.push(listening.__exit__)
            for gossip in peers.gossips:
                stack.callback(gossip.close)
                gossip.start()
            for round_ in range(peers.rounds):
                await asyncio.sleep(max(0.0, peers.roster.opens_at(round_) - time.time()))
                counts.append(Counts.total(peers.proxies))
                await asyncio.to_thread(peers.train, round_)
            await asyncio.sleep(max(0.0, peers.roster.opens_at(peers.rounds) - time.time()))
            counts.append(Counts.total(peers.proxies))
            end = time.monotonic() + WAIT
            while len({store.digest() for store in peers.stores}) > 1 and time.monotonic() < end:
                await asyncio.sleep(0.5)
            digests = len({peers.rule.broadcast_digest(store.state(peers.rounds)) for store in peers.stores})
            for before, after in pairwise(counts):
                one = after.since(before)
                rows.append({
                    "uploads": name, "round": len(rows) + 1, "an upload, signed": peers.size,
                    "those of the others": peers.size * (peers.count - 1),
                    "sent, as much received": round((one.down + one.up) / peers.count),
                    "requests": one.requests / peers.count, "connections made": one.connections / peers.count,
                    "models in the end": digests,
                })  # fmt: skip
                print(rows[-1], file=sys.stderr)
            await asyncio.to_thread(stack.close)
    return rows


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--peers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4, help="the first is shown, and not in the second table")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a round")
    parser.add_argument("--only", nargs="+", choices=UPLOADS, default=list(UPLOADS))
    options = parser.parse_args()
    rows = list[Row]()
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="fkg") as folder:
            peers = Peers(Path(folder), options.peers, options.rounds, options.seconds, UPLOADS[name])
            rows += asyncio.run(measure(Path(folder), peers, name))
    title = f"bytes a peer and round without a server: {options.peers} peers, K = {SIZE:,}, {STEPS} steps"
    show(title, rows, as_json=options.json, notes={"seconds of a round": options.seconds})
    show("bytes a peer and run, beside published numbers", beside(rows), as_json=options.json)


def beside(rows: Sequence[Row]) -> list[Row]:
    """Rows of what a run sends, by rounds as they were measured, and of what others report."""
    found = list[Row]()
    for name in dict.fromkeys(str(row["uploads"]) for row in rows):
        usual = [float(row["sent, as much received"]) for row in rows if row["uploads"] == name and row["round"] != 1]
        for rounds in (10, 40):
            method, sent = f"fedkseed peer, {name}, {rounds} rounds", rounds * sum(usual) / len(usual)
            found.append({"method": method, "bytes": round(sent), "source": ""})
    source = "arXiv 2602.18181, as a summary reports it; other models, and clients' number and steps are others"
    return found + [{"method": name, "bytes": round(size), "source": source} for name, size in PUBLISHED.items()]


if __name__ == "__main__":
    main()
