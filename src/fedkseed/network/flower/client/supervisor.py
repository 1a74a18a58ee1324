"""Supervision of a client's processes: Flower's SuperNode, started again when it ends, and the worker."""

import os
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from socket import create_connection
from typing import TypeAlias

import tomli_w

from ....errors import FedKSeedError
from ....files import border, exclusive, write_atomically
from ....weights.adapter import NAME as TUNED
from ...protocol.addresses import require_files
from ...protocol.client import worker_socket as sockets
from ...protocol.client.recipe_consent import Owner, OwnerSettings
from ...protocol.client.worker_process import stop_worker
from ...protocol.client_gain import GainFile
from ..children import COLOURS, Child, environment, free_port, program, secret, superexec
from ..compat import AHEAD, BEHIND, CLIENTAPP, CONNECTED, LEFT_OVER, NO_ENTRY, STUCK, UNTRUSTED, task_programs

LOOK = 0.5  # seconds between two looks at the SuperNode
FIRST = 5.0  # seconds before a SuperNode that ended is started again, doubled each time
REFUSED = CONNECTED + 10.0  # seconds before one that was refused is, and the longest wait
REACH = 5.0  # seconds to reach the server's address
LONG = 300.0  # seconds of a SuperNode's life after which the next wait is FIRST again

Say: TypeAlias = Callable[[str], object]
Sleep: TypeAlias = Callable[[float], object]


@dataclass(frozen=True, slots=True)
class Connection:
    """The server's address, and the files by which server and client prove their identities."""

    server: str  # HOST:PORT
    ca: Path
    key: Path

    def __post_init__(self) -> None:
        host, _, port = self.server.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise FedKSeedError(f"a server is HOST:PORT, got {self.server!r}")
        require_files(self.ca, self.key)

    def silent(self) -> str | None:
        """The reason for which nothing answers at the server's address, in words; None: something listens there."""
        host, _, port = self.server.rpartition(":")
        try:
            create_connection((host.strip("[]"), int(port)), REACH).close()
        except OSError as error:
            return f"nothing answers at host {host}, port {port} ({error.strerror or error})"
        return None

    def ahead(self) -> float | None:
        """Seconds that this machine's clock is ahead of the server's, by the date of an HTTP answer; None: unknown."""
        host, _, port = self.server.rpartition(":")
        try:
            context = ssl.create_default_context(cafile=str(self.ca))
            with closing(HTTPSConnection(host.strip("[]"), int(port), context=context, timeout=10)) as connection:
                connection.request("GET", "/")
                theirs = parsedate_to_datetime(connection.getresponse().getheader("Date", ""))
        except (OSError, HTTPException, ValueError):
            return None
        return time.time() - theirs.timestamp()


class Node:
    """A client of a server, which stays connected until it is stopped.

    Args:
        directory: directory for the sockets, logs and settings of this client alone.
    """

    def __init__(self, directory: Path, connection: Connection, owner: Owner, idle: float) -> None:
        self.directory, self.connection = directory.resolve(), connection
        self.settings = OwnerSettings(owner, idle, str(connection.key.resolve()), str(connection.ca.resolve()))
        self.settings.signing(self.directory)  # a key of another kind is refused now, and not by each worker
        sockets.socket_path(self.directory)

    def serve(self, say: Say = print, sleep: Sleep = time.sleep) -> None:
        """Keep a SuperNode connected to the server; a SuperNode that ends is followed by a new one.

        Raises:
            FedKSeedError: another client uses the directory, or the directory can't be written.
        """
        self.settings.write(self.directory)
        with exclusive(
            self.directory / "client.lock", f"another client uses {self.directory}; give it its own --state"
        ):
            wait = FIRST
            try:
                while True:
                    begin = time.monotonic()
                    say(f"connecting to {self.connection.server}; logs are in {self.directory}")
                    if (nothing := self.connection.silent()) is not None:  # Flower says so after 40 s
                        say(f"{nothing}: is the server running, and is the address right? Trying until it answers")
                    why = self._connect(say, sleep)
                    wait = FIRST if time.monotonic() - begin > LONG else wait
                    pause = max(wait, REFUSED) if why.refused else FIRST if why.anew else wait
                    say(f"{why.text}; connecting again in {pause:.0f} s")
                    sleep(pause)
                    wait = wait if why.anew else min(2 * wait, REFUSED)
            finally:
                stop_worker(self.directory)

    def _connect(self, say: Say, sleep: Sleep) -> "Ended":
        """Start a SuperNode and its executor, and wait until the SuperNode has ended or stands still."""
        node, executor = self._children()
        tuned, kept = self._tuned(), GainFile(self.directory)
        seen, text = node.log.stat().st_size if node.log.exists() else 0, ""
        try:
            node.start()
            executor.start()
            with node.log.open(errors="replace") as log:
                log.seek(seen)
                while True:
                    running = node.running
                    if (now := self._tuned()) != tuned:
                        tuned = now
                        say(f"the run has ended; its tuned model is {self.directory / TUNED}")
                    if (words := kept.news()) is not None:
                        say(words)
                    text = (text + COLOURS.sub("", log.read()))[-20_000:]
                    if UNTRUSTED in text:
                        why = "is not for this host, not signed by this --ca, or not valid by this machine's clock"
                        return Ended(f"the server's certificate {why}", True)
                    if NO_ENTRY in text:
                        key = "the key is not registered, or its last connection not over yet"
                        return Ended(f"refused: {self.wrong_clock() or key}", True)
                    if any(sign in text for sign in STUCK):
                        return Ended("the connection was lost")
                    if LEFT_OVER in text:
                        return Ended("the server has begun anew", anew=True)
                    if not running:  # if the server refuses this machine's clock, the log does not say so
                        wrong = self.wrong_clock()
                        return Ended(f"refused: {wrong}" if wrong else node.ended(), wrong is not None)
                    if not executor.running:
                        say(f"{executor.ended()}; it is started again")
                        executor.stop()
                        executor.start()
                    sleep(LOOK)
        finally:
            node.stop()
            executor.stop()

    def _tuned(self) -> int:
        """The time at which a tuned model was written, 0 for none."""
        path = self.directory / TUNED
        return path.stat().st_mtime_ns if path.exists() else 0

    def wrong_clock(self) -> str | None:
        """The error of this machine's clock, in words, if it is large enough for the server to refuse requests."""
        ahead = self.connection.ahead()
        if ahead is None or -BEHIND < ahead < AHEAD:
            return None
        return (
            f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's, and "
            f"Flower takes {AHEAD:.0f} s ahead and {BEHIND:.0f} s behind; set both by NTP"
        )

    def _children(self) -> tuple[Child, Child]:
        """A SuperNode, and the executor that starts a process for each message of the SuperNode."""
        folder, connection = self.directory, self.connection
        write_atomically(folder / "node.toml", tomli_w.dumps({"state": str(folder)}).encode())
        programs = write_programs(folder / "bin")
        port, known = str(free_port()), ["--superexec-auth-secret-file", str(secret(folder / "superexec.secret"))]
        node = [
            program("flower-supernode"), "--superlink", connection.server, "--root-certificates", str(connection.ca),
            "--auth-supernode-private-key", str(connection.key), "--node-config", str(folder / "node.toml"),
            "--isolation", "process", "--host", "127.0.0.1", "--port", port, *known,
        ]  # fmt: skip
        executor = [
            *superexec(), "--insecure", "--runtime-api-address", f"127.0.0.1:{port}", *known,
            "--parent-pid", str(os.getpid()),
        ]  # fmt: skip
        env = environment(folder / "home", [programs])
        return (
            Child("SuperNode", node, folder / "supernode.log", env),
            Child("superexec", executor, folder / "superexec.log", env),
        )


def write_programs(folder: Path) -> Path:
    """Write scripts under the names of all of Flower's programs, into a folder that comes first on the executor's path.

    The script for `flwr-clientapp` runs our ClientApp (executor.py). The scripts for the other programs, which would
    install and run code that the server sends, refuse to do anything.
    """
    with border(f"can't make {folder}"):
        folder.mkdir(mode=0o700, exist_ok=True)
        for name in task_programs():
            refuses = f"echo 'fedkseed runs no program that a server sends: {name} is refused' >&2; exit 1"
            runs = f"exec '{sys.executable}' -m fedkseed.network.flower.client.executor \"$@\""
            path = folder / name
            path.write_text(f"#!/bin/sh\n{runs if name == CLIENTAPP else refuses}\n")
            path.chmod(0o700)
    return folder


@dataclass(frozen=True, slots=True)
class Ended:
    """The reason for the end of a SuperNode."""

    text: str
    refused: bool = False
    anew: bool = False  # the server was restarted, and nothing is wrong with this client
