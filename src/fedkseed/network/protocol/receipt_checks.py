"""Checks of a run's receipts: signatures of uploads by the keys of clients, and heads that clients have seen."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from ...errors import FedKSeedError
from ...files import border
from ...run.store import AUDIENCES, NONCES, Store
from ...run.verify import Signed
from .run_history import read_history
from .signatures import Audiences, keys_of_run, public_key, upload_statement, verify

Keys: TypeAlias = Mapping[int, Iterable[EllipticCurvePublicKey]]  # client -> the public keys that it has had


def held_keys(places: Iterable[Path]) -> Keys:
    """The clients' public keys in folders and files that whoever verifies a run holds, by the names client-K.pub.

    Raises:
        FedKSeedError: a folder has none, a file has another name, or can't be read, or holds none.
    """
    keys: dict[int, list[EllipticCurvePublicKey]] = {}
    for place in places:
        files = sorted(place.glob("client-*.pub")) if place.is_dir() else [place]
        if not files:
            raise FedKSeedError(f"there is no client-0.pub or the like in {place}, which --keys names")
        for file in files:
            named = re.fullmatch(r"client-([0-9]{1,9})\.pub", file.name)
            if named is None:
                raise FedKSeedError(f"--keys names {file}: name it as its client, client-0.pub or the like")
            with border(f"can't read {file}"):
                keys.setdefault(int(named[1]), []).append(public_key(file.read_bytes(), file))
    return keys


def signature_check(store: Store, held: Keys | None = None) -> Signed | None:
    """A check of uploads' signatures; None where clients have no keys.

    Args:
        held: the keys of whoever verifies; None: those that the run itself says its clients have had. A server that has
            made all uploads itself can have written its own keys there.
    """
    keys = dict(enumerate(keys_of_run(store.directory))) if held is None else held
    if not keys:
        return None

    audiences = _audiences_of(store)

    def signed(done: int, client: int, broadcast: bytes, upload: bytes, signature: bytes) -> bool:
        if held is not None and client not in held:
            raise FedKSeedError(f"round {done + 1}: client {client} took part, and --keys has no client-{client}.pub")
        about = nonce_of(store, done), client, store.head(done), broadcast, upload
        statements = [upload_statement(bytes.fromhex(audience), *about) for audience in audiences]
        return any(verify(key, statement, signature) for key in keys.get(client, ()) for statement in statements)

    return signed


def remember_audiences(store: Store, audiences: Audiences) -> None:
    """Remember for whom the uploads of a run are signed, beside those for whom earlier ones were."""
    now = [audience.hex() for audience in audiences.all()]
    store.remember(AUDIENCES, [*dict.fromkeys([*_audiences_of(store), *now])])


def _audiences_of(store: Store) -> list[str]:
    """The audiences of a run's uploads; an empty one is that of rounds by version 2, which named none."""
    return store.recall(AUDIENCES) or [""] * (store.rounds > 0)


def nonce_of(store: Store, done: int) -> bytes:
    """The nonce of the tasks that were sent after `done` rounds.

    Raises:
        FedKSeedError: the run has none.
    """
    found = [value for first, value in store.recall(NONCES) or [] if value and first <= done]
    if not found:
        raise FedKSeedError(f"{store.directory} has no nonce for the tasks after {done} rounds")
    return bytes.fromhex(found[-1])


def require_seen(store: Store, path: Path) -> None:
    """Refuse a run whose history is another than the one that a client has seen.

    Raises:
        FedKSeedError: it is; or the client has seen nothing of the run.
    """
    entries, heads = store.recall(NONCES) or [], read_history(path)
    of_run = [(at, heads[nonce].done, heads[nonce].head) for at, (_, nonce) in enumerate(entries) if nonce in heads]
    if not of_run:
        raise FedKSeedError(f"the client of {path} has seen nothing of {store.directory}")
    for at, done, head in of_run:
        back = min((first for first, _ in entries[at + 1 :]), default=done)
        if back < done and at == of_run[-1][0]:
            raise FedKSeedError(
                f"the client of {path} has seen {done} rounds of {store.directory}, which has gone back to {back} since"
            )
        if back >= done and store.head(done) != head:
            raise FedKSeedError(f"the client of {path} has seen another run than {store.directory}, up to round {done}")
