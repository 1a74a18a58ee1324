"""Peers as real processes on loopback: the commands as a user starts them, and files of theirs that a test edits."""

import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w

from fedkseed.network.protocol.certs import add, make, request, sign
from fedkseed.recipe.reading import parse, tables
from fedkseed.recipe.schema import Recipe

from ...conftest import recipe_text, rows
from ..flower.conftest import POLICY
from ..https.network import Program, limited
from ..ports import free_port


class Peers:
    """A federation of peers, each with a directory and a peers' file of its own.

    Args:
        seconds: length of a round.
        changes: whole lines of the recipe, see `recipe_text`.
        ports: that others dial; None: those that peers listen on. A proxy may stand in between.
    """

    def __init__(
        self, folder: Path, model: Path, count: int, seconds: float, ports: list[int] | None = None, **changes: str
    ) -> None:
        self.folder, self.model, self.count, self.seconds = folder, model, count, seconds
        self.listens = [free_port() for _ in range(count)]
        self.ports = ports or self.listens
        lines = {"count": 'split = "files"', "cohort": f"cohort = {count}", "generated": "generated = 0"}
        lines |= {"examples": f"examples = {min(count, 8)}"} | changes
        (folder / "data").mkdir(parents=True)
        (folder / "recipe.toml").write_text(recipe_text(model, folder / "data", **lines))
        (folder / "policy.toml").write_text(POLICY)
        own = [row for row in rows() if row["category"] != "capital"]
        held_out = [row for row in rows() if row["category"] == "capital"]
        for number in range(count):
            part = [*(own[(number + 5 * k) % len(own)] for k in range(4)), held_out[number % len(held_out)]]
            (folder / "data" / f"{number:03}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        self.keys = folder / "keys"
        make(self.keys, 0, ["localhost"], 2)
        for number in range(count):
            add(self.keys, request(folder / f"key-{number}"))
            sign(self.keys, number, [], 2)
        self.programs: dict[int, Program] = {}
        self.start = 0.0

    @property
    def recipe(self) -> Recipe:
        return parse(tables((self.folder / "recipe.toml").read_bytes()))

    def begin(self, seconds: float) -> None:
        """The first round opens in some seconds; each can dial each."""
        self.start = float(round(time.time() + seconds))
        self.part([range(self.count)])

    def opens(self, round_: int) -> float:
        return self.start + round_ * self.seconds

    def part(self, groups: Collection[Collection[int]]) -> None:
        """From now on peers dial those of their own group alone."""
        for group in groups:
            for number in group:
                peers: list[dict[str, Any]] = []
                for other in range(self.count):
                    key = (self.keys / f"client-{other}.pub").read_text().strip()
                    address = f"https://localhost:{self.ports[other]}"
                    peers.append({"key": key} | ({"address": address} if other in group else {}))
                table = {"start": datetime.fromtimestamp(self.start, UTC), "seconds": self.seconds, "peers": peers}
                part = self.folder / f"peers-{number}.part"
                part.write_text(tomli_w.dumps(table))
                part.replace(self.folder / f"peers-{number}.toml")

    def run(self, number: int, *more: object) -> Program:
        """Start a peer, or start it again."""
        own = ("--state", self.state(number), "--json", *more)
        program = Program(self.folder / f"{number}.log", "peer", *self.arguments(number, self.listens[number]), *own)
        self.programs[number] = program
        return program

    def arguments(self, number: int, port: object) -> tuple[object, ...]:
        """Those of a peer that listens on a port, but for its state."""
        return (
            self.folder / "recipe.toml", "--policy", self.folder / "policy.toml",
            "--peers", self.folder / f"peers-{number}.toml", "--data", self.folder / "data" / f"{number:03}.jsonl",
            "--key", self.folder / f"key-{number}", "--cert", self.keys / f"client-{number}.pem",
            "--ca", self.keys / "ca.pem", "--listen", f"127.0.0.1:{port}",
        )  # fmt: skip

    def state(self, number: int) -> Path:
        return self.folder / f"p{number}"

    def outcomes(self, seconds: float) -> list[dict[str, Any]]:
        """The results that peers have printed in the end."""
        assert [self.programs[number].wait(seconds) for number in range(self.count)] == [0] * self.count
        texts = [self.programs[number].new for number in range(self.count)]
        return [json.loads(text[text.index("\n{\n") :]) for text in texts]

    def everything(self) -> str:
        return "\n".join(f"--- peer {number}\n{one.output}" for number, one in sorted(self.programs.items()))


@contextmanager
def running(peers: Peers, limit: int) -> Iterator[Peers]:
    """Peers whose processes end with the test, after `limit` seconds at the latest."""
    with limited(peers.folder, limit, peers.everything):
        yield peers
