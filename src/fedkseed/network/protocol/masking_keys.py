"""Keys of masked uploads over a network, and what a client must not forget about them.

The X25519 key of a client follows from its identity's private key, so there is no second file to keep. Its public half
stands as the comment in the line of its public file: `ecdsa-sha2-nistp256 AAAA… fedkseed-masks:HEX`.
"""

import hashlib
import re
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...errors import FedKSeedError
from ...files import read_table, read_whole, write_table
from ...secure.key_exchange import agreed
from ...wire.records import KEY

COMMENT = "fedkseed-masks:"
MASKED_ROUNDS = "masks.json"  # in the directory of a client


def masking_key(identity: ec.EllipticCurvePrivateKey) -> bytes:
    """The private X25519 key that goes with an identity, 32 bytes."""
    scalar = identity.private_numbers().private_value.to_bytes(KEY, "big")
    return HKDF(hashes.SHA256(), KEY, None, b"fedkseed, version 1: the key of masked uploads").derive(scalar)


def masking_comment(identity: ec.EllipticCurvePrivateKey) -> str:
    public = X25519PrivateKey.from_private_bytes(masking_key(identity)).public_key()
    return COMMENT + public.public_bytes_raw().hex()


def masking_key_in(line: str, place: str = "") -> bytes | None:
    """The public X25519 key in a line of OpenSSH's format, whose place begins an error; None if its comment holds none.

    Raises:
        FedKSeedError: it is one of low order, with which masks hide nothing.
    """
    first = re.search(rf"(?<!\S){COMMENT}(\S*)", line)
    if first is None or not re.fullmatch(f"[0-9A-Fa-f]{{{2 * KEY}}}", first[1]):
        return None
    agreed(X25519PrivateKey.from_private_bytes(bytes(KEY)), key := bytes.fromhex(first[1]), place)
    return key


def note_masked(directory: Path, run: bytes, round_: int, leg: str, value: bytes) -> None:
    """Note a value for a leg of a round of the run with a nonce, before what follows from it leaves this machine.

    Another value for the same leg is refused, and one for a round before the run's last. No run is forgotten: it could
    be asked again. How many there are is bounded where a task's history is followed (run_history.py).
    """
    path, name = directory / MASKED_ROUNDS, run.hex()
    table = read_table(path) if path.exists() else {}
    last = table.get(name, {"round": -1})
    if last["round"] > round_:
        raise FedKSeedError(f"round {round_} of this run is over: round {last['round']} was masked since, by {path}")
    digest = hashlib.sha256(value).hexdigest()
    legs = last["legs"] if last["round"] == round_ else {}
    if legs.get(leg, digest) != digest:
        raise FedKSeedError(
            f"round {round_} was answered with another {leg}: from both answers the server could tell this "
            f"client's numbers; it must go on with the first, or begin a new run; {path} has what was answered"
        )
    table[name] = {"round": round_, "legs": legs | {leg: digest}}
    write_table(path, table)


def listed_keys(file: Path) -> dict[int, bytes]:
    """The keys for masks in a client's own list of the federation's members, by number.

    Args:
        file: a line of OpenSSH's format for each of clients 0, 1, ….

    Raises:
        FedKSeedError: the file can't be read, or has one key twice: its owner would count as two.
    """
    lines = read_whole(file, 1 << 24, str(file)).decode(errors="replace").splitlines()
    places = dict[bytes, int]()
    for number, line in enumerate(lines):
        key = masking_key_in(line, f"{file}, line {number + 1}: ")
        if key is not None and places.setdefault(key, number) != number:
            raise FedKSeedError(
                f"{file}, line {number + 1}: line {places[key] + 1} has the same key for masks; each member has its own"
            )
    return {number: key for key, number in places.items()}
