"""Checks of a run's receipts: signatures of uploads by the keys of clients, and heads that clients have seen."""

from pathlib import Path

from ..errors import FedKSeedError
from ..run.store import NONCES, Store
from ..run.verify import Signed
from .history import seen
from .signatures import keys_of_run, upload_statement, verify


def checks(store: Store) -> Signed | None:
    """A check of uploads' signatures by all keys that a client of the run has had; None where clients have no keys."""
    keys = keys_of_run(store.directory / "flower")
    if not keys:
        return None

    def signed(done: int, client: int, broadcast: bytes, upload: bytes, signature: bytes) -> bool:
        statement = upload_statement(nonce_of(store, done), client, store.head(done), broadcast, upload)
        return client < len(keys) and any(verify(key, statement, signature) for key in keys[client])

    return signed


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
    entries, heads = store.recall(NONCES) or [], seen(path)
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
