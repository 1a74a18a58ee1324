"""The clients' public keys, as a server registers them, and one over HTTPS takes up again while it runs.

They are the files client-K.pub in the folder of `fedkseed certs`. A key that is removed or replaced is refused from
then on, and can't come back to its run.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from ...errors import FedKSeedError
from ...files import read_table, stamp, write_table
from ...run.progress import Progress
from ...run.store import Store
from ..protocol import certs
from ..protocol.carrier import RoundStoppedError
from ..protocol.masking_keys import masking_key_in
from ..protocol.server.client_numbers import ClientNumbers
from ..protocol.signatures import SIGNING, ServerSigning, name_in, public_key
from .connections import Connections, copied

NUMBERING = "shard.json"  # in the directory of a shard: the number of its first client
FOLDER = "https"  # of this transport, in the directory of a run or a shard
CHECKED_EVERY = 2.0  # seconds
KEY_FILES = "client-*.pub"


class RekeyedError(RoundStoppedError):
    """The end of an attempt at a round, because clients have other keys."""


@dataclass(slots=True)
class RegisteredKeys:
    """The keys that are registered in the directory of a run or a shard."""

    directory: Path
    folder: Path  # with the keys
    files: Callable[[], Mapping[int, Path]]  # the key file of each client by its number
    progress: Progress
    transport: str = FOLDER  # its folder in the directory
    lines: list[str] = field(default_factory=list)  # the public line of each client, by number; empty: it has no key
    keys: list[EllipticCurvePublicKey | None] = field(default_factory=list)  # the same, read
    registrations: int = 0  # how often keys were registered
    _registered: dict[Path, tuple[int, ...]] = field(default_factory=dict)  # with their stamps
    _last_seen: dict[Path, tuple[int, ...]] = field(default_factory=dict)  # registered or not
    _paths: Mapping[int, Path] = field(default_factory=dict)
    _checked: float = 0.0

    def register(self) -> None:
        """Register the keys as they are now.

        Raises:
            FedKSeedError: a file holds no key, two clients have one, or one has a key that was revoked.
        """
        self._last_seen = _stamps(self.folder)
        paths = self.files()
        texts = {n: path.read_text(errors="replace").strip() for n, path in paths.items() if path.exists()}
        # Read before anything is written: a file may be half written.
        keys = {n: public_key(text.encode(), paths[n]) for n, text in texts.items()}
        lines = [texts.get(number, "") for number in range(max(paths) + 1)]
        if len({tuple(line.split()[:2]) for line in texts.values()}) < len(texts):
            raise FedKSeedError(f"two clients of {self.folder} have the same key; each needs one of its own")
        signing = self.directory / self.transport / SIGNING
        former = chain(*read_table(signing)["former"]) if signing.exists() else ()
        revoked = [line.split()[:2] for line in former]  # the rest of a line is a comment
        for number, line in texts.items():
            masking_key_in(line, f"{paths[number]}: ")
            if line.split()[:2] in revoked:
                raise FedKSeedError(f"{paths[number]} was revoked and can't come back; make client {number} another")
        ClientNumbers.register(self.directory, range(len(lines)), [k for k, line in enumerate(lines) if not line])
        ServerSigning.write(signing.parent, self.folder, lines)
        self.lines, self.keys = lines, [keys.get(number) for number in range(len(lines))]
        self._paths, self._registered = paths, self._last_seen
        self.registrations += 1

    def has(self, client: int) -> bool:
        """Whether a client's file is the registered one: a removed key has no more requests from that moment on."""
        path = self._paths.get(client)
        return path is not None and self._registered.get(path) == stamp(path)

    def wait_for(self, count: int) -> None:
        """Wait for a number of keys: those of browsers are made on the page, once it is served."""
        noted = -1
        while (present := len(_stamps(self.folder))) < count:
            if present != noted:
                self.progress.note(f"{present} of {count} clients have a key in {self.folder}: waiting for more")
            noted = present
            time.sleep(CHECKED_EVERY)

    def take_up(self, connections: Connections) -> None:
        """Register the keys as they are now, and let their owners connect, and nobody else."""
        self.register()
        connections.take(self.keys)

    def stop_if_changed(self, connections: Connections) -> None:
        """Take up keys that have changed, and stop the round that began with others; pass on what requests noted.

        Raises:
            RekeyedError: keys were taken up.
        """
        while connections.notices:
            number, text, leaked = connections.notices.popleft()
            name = f" ({known})" if (known := name_in(self.lines[number])) else ""
            remedy = copied(self.folder, self._paths[number].stem[7:])
            why = f"; if that repeats, and its owner has not started it twice, {remedy}"
            self.progress.note(f"client {number}{name} {text}{why * leaked}")
        now = time.monotonic()
        if now - self._checked < CHECKED_EVERY:
            return
        self._checked = now
        if _stamps(self.folder) == self._last_seen:
            return
        try:
            self.take_up(connections)
        except (FedKSeedError, OSError) as error:  # half written, too: it is read again when it is whole
            self.progress.note(f"the keys in {self.folder} can't be taken up: {error}")
        else:
            raise RekeyedError


def keys_of_run(directory: Path, folder: Path, progress: Progress, transport: str = FOLDER) -> RegisteredKeys:
    """The keys of a run's clients. One that has begun keeps its number of clients, and files may be missing.

    Args:
        folder: with the keys.
        transport: folder of the transport in the directory.
    """

    def files() -> dict[int, Path]:
        count = ClientNumbers.registered(directory) if Store(directory).rounds >= 0 else 0
        if not count:
            return dict(enumerate(certs.public_keys(folder)))
        if len([*folder.glob(KEY_FILES)]) > count:
            progress.note(f"the run began with {count} clients; those that have come since take part in new runs")
        return {number: folder / f"client-{number}.pub" for number in range(count)}

    return RegisteredKeys(directory, folder, files, progress, transport)


def keys_of_shard(directory: Path, folder: Path, first: int, progress: Progress) -> RegisteredKeys:
    """The keys of a shard's clients, which may come and go at any time, and keep their numbers.

    Args:
        directory: of the shard.
        folder: with the keys.
        first: number in the run of the client whose key is client-0.pub.

    Raises:
        FedKSeedError: the directory is of a shard whose numbers begin elsewhere.
    """
    path = directory / NUMBERING
    if path.exists() and (begun := read_table(path)) != {"first": first}:
        raise FedKSeedError(
            f"{directory} began with {begun}, not with --first {first}: give this one a --state of its own"
        )
    write_table(path, {"first": first})

    def files() -> dict[int, Path]:
        names = {path: re.fullmatch(r"client-(0|[1-9][0-9]{0,8})\.pub", path.name) for path in folder.glob(KEY_FILES)}
        if strangers := [path for path, match in names.items() if match is None]:
            raise FedKSeedError(f"{strangers[0]} is no name of a client's key: client-0.pub is, and those after it")
        if not names:
            raise FedKSeedError(f"{folder} has no public key of a client; `fedkseed certs add` registers one")
        ends = [1 + int(match[1]) for match in names.values() if match]
        count = max(*ends, ClientNumbers.registered(directory) - first)
        return {first + number: folder / f"client-{number}.pub" for number in range(count)}

    return RegisteredKeys(directory, folder, files, progress)


def _stamps(folder: Path) -> dict[Path, tuple[int, ...]]:
    return {path: found for path in folder.glob(KEY_FILES) if any(found := stamp(path))}  # a file can vanish between
