"""Bytes of a peer and round without a server: all bytes of the TCP connections of real processes on loopback.

    python benchmarks/gossip.py [--peers 20] [--rounds 4] [--seconds 60] [--start 150] [--json]

Each `fedkseed peer` is dialled through a proxy, which counts the bytes that it passes on: TLS with a certificate on
each side, HTTP, digests, names and uploads, without the headers of TCP and IP. Each byte is sent by one peer and
received by another, so that the mean of what is sent is the mean of what is received. Rounds after the first are the
usual ones: in the first, peers connect to each other. The model has 0.14 million weights; the bytes do not depend on
that number. SeedFlood's numbers are those of the literature, see the notes of the table, and of other runs.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import tomli_w

from fedkseed.data.reading import read
from fedkseed.flower.certs import make, sign
from fedkseed.flower.children import free_port
from table import Row, show
from traffic import EXAMPLES, FEDKSEED, POLICY, SHORT, SIZE, STEPS, Counts, Proxy, untrained

OURS = "fedkseed peer"
# Kim and Lee, 2026, https://arxiv.org/abs/2602.18181, as a summary of it reports them (arxivlens.com); Figure 1 of the
# paper says 10^2 to 10^7 times fewer bytes than its rivals.
PUBLISHED = {"SeedFlood": 400e3, "ChocoSGD": 15e6, "DSGD": 526e9}  # bytes a training run
SETTLE = 60.0  # seconds after the last round for the last uploads


async def measure(folder: Path, peers: int, rounds: int, seconds: float, start: float) -> tuple[list[Row], list[dict]]:
    """A row for each round, and what each peer has printed at its end."""
    (folder / "data").mkdir(parents=True)
    keys, model = folder / "keys", untrained(folder / "model")
    make(keys, peers, ["localhost"], 2)
    recipe = {
        "seed": 1,
        "model": {"name": str(model)},
        "data": {"source": "each peer's own", "max_tokens": 256, "held_out": "summarization"},
        "clients": {"split": "files", "cohort": peers, "min_examples": 1, "threads": 1},
        "directions": {"family": "hadamard", "size": SIZE},
        "training": {"rounds": rounds, "batch_size": 1, **FEDKSEED, "wire": "compact"},
    }
    (folder / "recipe.toml").write_text(tomli_w.dumps(recipe))
    (folder / "policy.toml").write_text(tomli_w.dumps(POLICY))
    examples = [e for e in read("dolly-sample") if len(e.instruction + e.context + e.response) < SHORT]
    listens = [free_port() for _ in range(peers)]
    proxies = [Proxy(port) for port in listens]
    first, table = float(round(time.time() + start)), []
    for number in range(peers):
        own = [examples[(number * EXAMPLES + k) % len(examples)] for k in range(EXAMPLES)]
        rows = [{key: getattr(e, key) for key in ("instruction", "context", "response", "category")} for e in own]
        (folder / "data" / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sign(keys, number, [], 2)
        line = (keys / f"client-{number}.pub").read_text().strip()
        table.append({"key": line, "address": f"https://localhost:{proxies[number].port}"})
    roster = {"start": datetime.fromtimestamp(first, UTC), "seconds": seconds, "peers": table}
    (folder / "peers.toml").write_text(tomli_w.dumps(roster))

    async with AsyncExitStack() as stack:
        for proxy in proxies:
            await stack.enter_async_context(proxy.running())
        processes = []
        for number in range(peers):
            with (folder / f"{number}.log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    Path(sys.executable), "-m", "fedkseed", "peer", folder / "recipe.toml", "--json",
                    "--peers", folder / "peers.toml", "--data", folder / "data" / f"{number}.jsonl",
                    "--key", keys / f"client-{number}", "--cert", keys / f"client-{number}.pem",
                    "--ca", keys / "ca.pem", "--listen", f"127.0.0.1:{listens[number]}", "--until", "20",
                    "--state", folder / f"p{number}", "--policy", folder / "policy.toml",
                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )  # fmt: skip
            processes.append(process)
            stack.callback(_stop, process)
        found, counts = [], [Counts()]
        for round_ in range(rounds + 1):
            await asyncio.sleep(max(0.0, first + round_ * seconds - time.time()))
            counts.append(Counts.total([proxy.counts for proxy in proxies]))
            print(round_, counts[-1], file=sys.stderr)
        for before, after in pairwise(counts[1:]):
            one = after.since(before)
            found.append(
                {
                    "round": str(len(found) + 1),
                    "bytes sent, as many received": round((one.down + one.up) / peers),
                    "requests": one.requests / peers,
                    "connections made": one.connections / peers,
                }
            )
        outcomes = []
        for process in processes:
            out, _ = await asyncio.wait_for(process.communicate(), SETTLE + 4 * peers)
            outcomes.append(json.loads(out))
        return found, outcomes


def _stop(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a round")
    parser.add_argument("--start", type=float, default=150.0, help="seconds for all peers to start")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fkg") as name:
        rows, outcomes = asyncio.run(
            measure(Path(name) / "all", options.peers, options.rounds, options.seconds, options.start)
        )
    digests = {one["digest"] for one in outcomes}
    usual = [float(row["bytes sent, as many received"]) for row in rows[1:]]
    each = sum(usual) / len(usual)
    notes: Row = {
        "peers": options.peers,
        "seconds of a round": options.seconds,
        "uploads that count": outcomes[0]["uploads"],
        "digests of the tuned models": len(digests),
    }
    title = f"bytes a peer and round without a server, K = {SIZE:,}, {STEPS} steps"
    show(title, rows, as_json=options.json, notes=notes)
    beside: list[Row] = [
        {"method": f"{OURS}, {n} rounds", "bytes a peer and run": round(n * each), "source": "measured above"}
        for n in (10, 40)
    ]
    beside += [
        {"method": name, "bytes a peer and run": round(size), "source": "arXiv 2602.18181, by a summary of it"}
        for name, size in PUBLISHED.items()
    ]
    show("beside published numbers, of other models and runs", beside, as_json=options.json)


if __name__ == "__main__":
    main()
