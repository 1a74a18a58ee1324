"""Attacks on each command that listens, as its user starts it. Minutes; `make test-faults`.

tests/network/test_http_server.py has short forms of them.
"""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from fedkseed.network.peers import tls
from fedkseed.network.protocol.certs import add, make, request
from fedkseed.planning.pin import pin

from .. import attacks
from ..attacks import Target
from ..peers.network import Peers
from ..ports import free_port, wait_for
from .network import Network, Program, limited, network

pytestmark = pytest.mark.network
MB = 1 << 20


@dataclass
class Listening:
    """A command that listens, and what an honest and a hostile party need to ask it."""

    program: Program
    port: int
    read: str  # a path that is read
    write: str  # one that takes a body
    tls: ssl.SSLContext | None = None
    key: str = ""
    honest: ssl.SSLContext | None = None  # that of another peer, who does not wait for the hostile one's requests

    def target(self) -> Target:
        headers = f"authorization: Bearer {self.key}\r\n" if self.key else ""
        return Target(self.program.process.pid, self.port, self.tls, self.write, headers)

    def serves(self) -> None:
        scheme, headers = "https" if self.tls else "http", {"authorization": f"Bearer {self.key}"} if self.key else {}
        with httpx.Client(verify=self.honest or self.tls or True, timeout=60, trust_env=False) as http:
            answer = http.get(f"{scheme}://localhost:{self.port}{self.read}", headers=headers)
        assert answer.status_code == 200, answer.text


def trusting(keys: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(keys / "ca.pem"))


def without_model(setting, folder: Path, **changes: str) -> str:
    """A recipe whose server loads no model and evaluates nothing."""
    (folder / "pinned.toml").write_text(setting.text("minimum = 3", **changes))
    pin(folder / "pinned.toml")
    text = (folder / "pinned.toml").read_text().replace(str(setting.model), "owner/model")
    return text.replace(str(setting.folder / "data"), "/none")


@contextmanager
def served(kind: str, setting, run: Path, folder: Path) -> Iterator[Listening]:
    """One of the commands, which waits for others and is asked by an attacker."""
    port, programs = free_port(), list[Program]()
    no_task = f"/v1/task/{'0' * 32}"
    try:
        match kind:
            case "serve" | "shard":
                federation = Network(folder, without_model(setting, folder), setting.files, setting.model)
                programs.append(federation.server())
                programs[-1].wait_for("clients connect to port")
                keys, port = federation.keys, federation.port
                if kind == "shard":
                    add(keys, request(folder / "shard-0"))
                    keys, port = folder / "keys-0", free_port()
                    make(keys, 1, ["localhost"], 2)
                    own = ("--key", federation.key(0), "--ca", federation.keys / "ca.pem", "--state", folder / "s")
                    url = f"https://localhost:{federation.port}"
                    more = ("--certs", keys, "--port", port, "--patience", 600)
                    programs.append(Program(folder / "shard.log", "shard", url, *own, *more))
                    programs[-1].wait_for("connect to port")
                yield Listening(programs[-1], port, "/v1/challenge", no_task, trusting(keys))
            case "peer":
                peers = Peers(folder / "peers", setting.model, 3, 60.0)
                peers.begin(1200.0)
                programs.append(peers.run(0))
                programs[-1].wait_for("listening on port")
                part = programs[-1].output.split("run ")[-1][:16]
                pairs = [(folder / "peers" / f"key-{k}", peers.keys / f"client-{k}.pem") for k in (1, 2)]
                hostile, honest = (tls.contexts(*pair, peers.keys / "ca.pem", folder)[1] for pair in pairs)
                paths = f"/v1/{part}/set?digest=", f"/v1/{part}/give"
                yield Listening(programs[-1], peers.listens[0], *paths, hostile, honest=honest)
            case "watch":
                programs.append(Program(folder / "watch.log", "watch", run, "--serve", port))
                programs[-1].wait_for("shows")
                yield Listening(programs[-1], port, "/now.json", "/")
            case "serve-model":
                programs.append(Program(folder / "model.log", "serve-model", run, "--port", port))
                programs[-1].wait_for("until Ctrl-C")
                key = programs[-1].output.split("key ")[-1].partition(",")[0]
                yield Listening(programs[-1], port, "/v1/models", "/v1/chat/completions", key=key)
    finally:
        for program in programs:
            program.stop()


@pytest.mark.parametrize("kind", ["serve", "shard", "peer", "watch", "serve-model"])
def test_a_command_that_listens_bears_attacks(kind, setting, undisturbed, tmp_path):
    run = undisturbed.output.parent
    with limited(tmp_path, 600, str), served(kind, setting, run, tmp_path) as listening:
        target = listening.target()
        with target.bounded(listening.serves):
            for attack in (attacks.endless_header, attacks.headers_of_five_bytes):
                assert attack(target, 300 * MB) < 300 * MB
                listening.serves()
            attacks.endless_body(target, 300 * MB)
            attacks.bodies(target, 30, 16 * MB)
            listening.serves()
            bodies = [target.connect() for _ in range(10)]
            for line in bodies:
                with suppress(OSError):
                    line.sendall(target.post + b"content-length: 100000\r\n\r\n")
            headers = attacks.half_open(target, 500)
            listening.serves()
            # A peer's own bodies are read one after the other, each for 10 s.
            wait_for(lambda: attacks.dripped(headers + bodies, b"x", 3.0, 0.5) == 0, 150)
        print(f"{kind}: {target.memory() / 1e6:.0f} MB")


def flood(target: Callable[[], Target], over: threading.Event) -> None:
    """Headers without end, half of them, and bodies for nobody, again and again."""
    while not over.is_set():
        one = target()
        with one.opened, suppress(OSError):
            attacks.endless_header(one, 16 * MB)
            attacks.bodies(one, 3, MB)
            attacks.half_open(one, 100)
            over.wait(1.0)


def test_a_run_under_attack_ends_as_one_that_nobody_has_attacked(setting, undisturbed, tmp_path):
    with network(tmp_path, setting.text("minimum = 3"), setting.files, setting.model) as federation:
        server, over = federation.server(), threading.Event()
        server.wait_for("clients connect to port")
        context, no_task = trusting(federation.keys), f"/v1/task/{'0' * 32}"
        attacker = threading.Thread(
            target=flood, args=(lambda: Target(server.process.pid, federation.port, context, no_task), over)
        )
        attacker.start()
        try:
            for number in range(3):
                federation.client(number)
            assert server.wait() == 0
        finally:
            over.set()
            attacker.join()
        assert federation.digest() == undisturbed.digest
