"""A federation of 50 clients over HTTPS for hours, with leaves, kills and bad answers: what grows, and what gets lost.

    PYTHONPATH=. python benchmarks/soak.py [--minutes 85] [--output soak.jsonl] [--redraw soak.jsonl]

`fedkseed serve` evaluates an untrained model of 0.14 million weights each 25 rounds. Five clients are `fedkseed join`,
the others, in this process, are those of fleet.py, with signed uploads of random scalars within ten seconds. One in 50
leaves a round, half of them with a task in hand, and joins again. One answer in 30 is bad: truncated, of another round,
with a wrong signature, or too long. One of the clients 1 to 4 is killed every five minutes (SIGKILL, its worker too),
the server after 1/20, 1/10 and 1/4 of the time; the same commands start them again. In the end the run is verified, has
to have no bad answer, and each good one of the fleet's that was taken in time.

Resident memory and descriptors are read every five seconds into --output. To those of each kind of process a line is
fitted by least squares: one slope, and a level for each of its lives, of which the first sixth of the time, at most ten
minutes, is left out. Residuals follow each other: the variance of the slope is (1 + r) / (1 − r) times that of others,
with r the correlation of neighbours. A slope is flat within two errors.
"""

import asyncio
import hashlib
import json
import os
import random
import re
import ssl
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import tomli_w
from numpy.typing import NDArray
from tests.network.https.network import Network, network, processes

from fedkseed import Upload, encode
from fedkseed.network.protocol.networked_recipe import ENVELOPE
from fedkseed.network.protocol.receipt_checks import signature_check
from fedkseed.run.store import Store
from fedkseed.run.verify import verify
from fedkseed.wire.numbers import scalars
from fleet import Line, broadcast_of
from table import Row, commit, machine, markdown
from traffic import untrained, write_data

CLIENTS, REAL, STEPS, PAUSE = 50, 5, 4, 10.0
LEAVES, BAD, KINDS = 1 / 50, 1 / 30, ("truncated", "of another round", "with a wrong signature", "too long")
LOOK, WARM, KILL = 5.0, 600.0, 300.0  # seconds between samples, at most of a life left out, between kills of clients
NUMBERS = [scalars(np.random.default_rng(seed).normal(size=STEPS), "compact") for seed in range(CLIENTS)]
POLICY = {"data": {"min_examples": 1, "held_out": ["open_qa"]}, "training": {"max_rounds": 1_000_000}}
TRAINING = {"algorithm": "fedkseed", "rounds": 60_000, "steps": STEPS, "batch_size": 4, "eps": 1e-3, "lr": 1e-6}
RECIPE = {
    "seed": 1, "data": {"source": "dolly-sample", "held_out": "open_qa", "max_tokens": 256},
    "clients": {"split": "files", "cohort": CLIENTS, "min_examples": 1}, "training": TRAINING | {"wire": "compact"},
    "directions": {"family": "hadamard", "size": 1024}, "evaluation": {"every": 25, "examples": 16, "generated": 0},
    "network": {"minimum": CLIENTS // 2, "deadline": 60.0, "attempts": 1000, "patience": 60.0, "grace": PAUSE + 4},
}  # fmt: skip


class Soak:
    """A federation at work, and what has happened to it."""

    def __init__(self, federation: Network, seconds: float, output: TextIO) -> None:
        self.federation, self.seconds, self.output = federation, seconds, output
        self.counts, self.cpu, self.dice = Counter[str](), dict[int, float](), random.Random(1)
        self.context = ssl.create_default_context(cafile=str(federation.keys / "ca.pem"))
        self.kept, self.bad = dict[bytes, bytes](), set[bytes]()  # broadcasts; answers, by their signatures' digests
        self.good = dict[bytes, tuple[int, int, int]]()  # of those taken: client, round, and kills of the server before
        self.ends, began = list[int](), time.monotonic()  # rounds at each kill of the server
        self.now = lambda: time.monotonic() - began
        self.server = federation.server("--strangers", 1000)
        self.real = [federation.client(number) for number in range(REAL)]

    async def fleet(self, number: int) -> None:
        """Be one client of the fleet, which joins again and again."""
        key, ca = self.federation.key(number), self.federation.keys / "ca.pem"
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):  # the server is away, or has ended the connection
                line = await Line.joined(key, ca, self.federation.port, self.context)
                self.counts["joins"] += 1
                with closing(line.writer):
                    await self.attend(number, line)
            await asyncio.sleep(self.dice.uniform(1, 4 * PAUSE))

    async def attend(self, number: int, line: Line) -> None:
        while found := await line.next_task(self.kept):
            key, task, whole = found
            await asyncio.sleep(self.dice.uniform(0, PAUSE))
            leaves = self.dice.random() < LEAVES
            if not leaves or self.dice.random() < 0.5:
                kind, asked = self.dice.choice(KINDS) if self.dice.random() < BAD else "", broadcast_of(whole)
                done, end = asked.round + (kind == "of another round"), -3 if kind == "truncated" else None
                made = encode(Upload(asked.run, done, number, 1, 1.0, self.dice.choice(NUMBERS), asked.wire))[:end]
                reply, before = line.reply(task, whole, made), len(self.ends)
                reply = replace(reply, signature=reply.signature[:: -1 if kind == "with a wrong signature" else 1])
                sent = hashlib.sha256(reply.signature + made).digest()
                if kind:
                    self.bad.add(sent)
                    self.counts[f"bad: {kind}"] += 1
                status = await line.send(key, reply.encode() + bytes(2 * ENVELOPE if kind == "too long" else 0))
                if status == 204 and not kind:
                    self.good[sent] = number, asked.round + 1, before
            if leaves:
                self.counts["leaves"] += 1
                return

    async def kill(self) -> None:
        """Kill clients, and the server, number 0, at their times, and start them again."""
        plan = [(float(moment), self.dice.randrange(1, REAL)) for moment in np.arange(KILL, self.seconds, KILL)]
        for moment, number in sorted([*plan, *((part * self.seconds, 0) for part in (1 / 20, 1 / 10, 1 / 4))]):
            await asyncio.sleep(max(0.0, moment - self.now()))
            self.counts["kills of clients" if number else "kills of the server"] += 1
            if number:
                self.federation.cut_power(self.real[number], number)
                self.real[number] = self.federation.client(number)
            else:
                self.server.kill()
                self.ends.append(self.federation.done)
                self.server = self.federation.server("--strangers", 1000)

    def sample(self) -> None:
        """Write memory and descriptors of all processes, and note what they have used of the processor."""
        lives = [("worker", pid) for pid in processes("protocol.client.worker", self.federation.folder)]
        lives += [("server", self.server.process.pid), *(("join", one.process.pid) for one in self.real)]
        for who, pid in lives:
            with suppress(OSError):  # it was killed
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                self.cpu[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                memory, files = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir(f"/proc/{pid}/fd"))
                print(json.dumps([who, pid, round(self.now(), 1), memory, files]), file=self.output, flush=True)

    async def run(self) -> None:
        """Let all of it happen, take samples, and print a line a minute."""
        tasks = [asyncio.create_task(job) for job in (*map(self.fleet, range(REAL, CLIENTS)), self.kill())]
        for look in range(1, round(self.seconds / LOOK) + 1):
            await asyncio.wait(tasks, timeout=LOOK, return_when=asyncio.FIRST_EXCEPTION)
            _ = [task.result() for task in tasks if task.done()]
            if self.server.process.poll() is not None:
                sys.exit(f"the server has ended: {self.server.output[-2000:]}")
            self.sample()
            if look % 12 == 0:
                self.counts["% of a core"] = round(100 * (sum(self.cpu.values()) + time.process_time()) / self.now())
                print(f"{look // 12} min, {self.federation.done} rounds, {dict(self.counts)}", flush=True)

    def outcome(self) -> dict[str, Any]:
        """The counts, what the run has kept of all answers, and how far `fedkseed verify` finds it right."""
        store, seconds, log = Store(self.federation.run), self.now(), self.server.output
        late = {*map(tuple, re.findall(r"answer of client (\d+) .*to round (\d+) is too late", log))}
        taken = (one for done in range(1, store.rounds + 1) for one in store.receipts(done).values())
        kept = {hashlib.sha256(one.signature + one.upload).digest() for one in taken}
        ends = [*self.ends, store.rounds]  # an answer to a round that was open at a kill is asked for again
        due = {sent: (str(client), str(done)) for sent, (client, done, life) in self.good.items() if done <= ends[life]}
        lost = [sent for sent in due if sent not in kept and due[sent] not in late]
        what = {"rounds": store.rounds, **dict(sorted(self.counts.items())), "bad, in the run": len(kept & self.bad),
                "good answers of the fleet": len(due), "of them lost": len(lost), "answers too late": len(late),
                "uploads that `verify` finds right": verify(store, signature_check(store)).signed}  # fmt: skip
        return {"what": what, "seconds": seconds, "on": machine()["cpu"], "at": commit(), "date": time.strftime("%F")}


def fitted(lives: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """The slope an hour of a line through samples (seconds, value), with a level for each life, and its error."""
    t, y = (np.concatenate([life[:, axis] - life[:, axis].mean() for life in lives]) for axis in (0, 1))
    rest = y - (slope := t @ y / (t @ t)) * t
    together = max(0.0, rest[1:] @ rest[:-1] / (rest @ rest)) if rest.any() else 0.0
    error = (rest @ rest / (len(t) - len(lives) - 1) / (t @ t) * (1 + together) / (1 - together)) ** 0.5
    return float(3600 * slope), float(3600 * error)


def slopes(samples: Sequence[Any], seconds: float) -> Iterator[Row]:
    """A row for each kind of process."""
    for who in ("server", "join", "worker"):
        pids = {pid for name, pid, *_ in samples if name == who}  # their samples: time, memory, descriptors
        whole = [np.array([values for _, pid, *values in samples if pid == one]) for one in pids]
        lives = [late for one in whole if len(late := one[one[:, 0] >= one[0, 0] + min(WARM, seconds / 6)]) > 2]
        row: Row = {"process": who, "lives": len(lives), "hours": sum(float(np.ptp(one[:, 0])) for one in lives) / 3600}
        for axis, name in enumerate(("MB", "descriptors") if lives else (), 1):
            slope, error = fitted([one[:, [0, axis]] for one in lives])
            row[name], row[f"{name} an hour"] = np.concatenate(lives)[:, axis].mean(), f"{slope:+.2f} ± {error:.2f}"
            row[f"{name}: flat"] = "yes" if abs(slope) <= 2 * error else "no"
        yield row


def draw(file: Path) -> str:
    """All that a results page says, of the samples and the outcome in a file."""
    *samples, end = map(json.loads, file.read_text().splitlines())
    return f"""# A federation of {CLIENTS} clients for {end["seconds"] / 60:.0f} minutes, {end["date"]}

`PYTHONPATH=. python benchmarks/soak.py` at {end["at"]}, whose text says what is done, two cores, {end["on"]}:

{markdown([{"what": name, "number": value} for name, value in end["what"].items()])}
{markdown([*slopes(samples, end["seconds"])])}"""


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=85.0)
    parser.add_argument("--output", type=Path, default="soak.jsonl", help="file of samples, made anew")
    parser.add_argument("--redraw", type=Path, help="draw the tables of such a file")
    options = parser.parse_args()
    if options.redraw is None:
        with tempfile.TemporaryDirectory(prefix="fks") as name, options.output.open("w") as output:  # a short one
            model, rows = untrained(Path(name) / "model"), write_data(Path(name) / "rows", REAL)
            files = [rows / f"{number % REAL}.jsonl" for number in range(CLIENTS)]  # the fleet reads none
            recipe = tomli_w.dumps({**RECIPE, "model": {"name": str(model)}})
            with network(Path(name), recipe, files, model, limit=int(60 * options.minutes) + 900) as federation:
                (Path(name) / "policy.toml").write_text(tomli_w.dumps(POLICY))
                soak = Soak(federation, 60 * options.minutes, output)
                asyncio.run(soak.run())
                soak.server.stop()
                print(json.dumps(soak.outcome()), file=output)
    print(draw(options.redraw or options.output), end="")


if __name__ == "__main__":
    main()
