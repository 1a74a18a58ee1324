"""The chain of a run: one digest after each round that stands for all rounds before it.

    stem_r   SHA-256 of three digests: of the state after round r, of its report, of its receipts
    link_r   SHA-256(stem_r ‖ SHA-256 of the broadcast that is made of the state)
    head_r   SHA-256(head_{r−1} ‖ link_r), where head_0 is SHA-256(BEGIN ‖ link_0) with the state before the first round

Whoever knows one head recognises any change of what came before it. The clients of a network check each link and sign
the head that they know (network/protocol/run_history.py), so a server can't give two of them different histories, and
by the stem of the last link that the broadcast is the one in it: after one head there is one, for all clients.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

VERSION = 2  # of a run's directory
BEGIN = f"fedkseed, version {VERSION}: the rounds of a run\n".encode()
SIZE = 32  # bytes of a digest


@dataclass(frozen=True, slots=True)
class Receipt:
    """An upload as it came, and its client's signature; empty where clients have no keys."""

    upload: bytes
    signature: bytes = b""


def parts(state: bytes, report: str | None, receipts: Mapping[int, Receipt], broadcast: bytes) -> bytes:
    """The four digests of a round, 128 bytes: of its packed state, of its report, of its receipts, of its broadcast.

    Args:
        broadcast: the digest of the message that is made of the state, since a message may have gigabytes.
    """
    of_receipts = hashlib.sha256()
    for client, receipt in sorted(receipts.items()):
        of_receipts.update(client.to_bytes(4, "little"))
        of_receipts.update(digest(receipt.upload) + digest(receipt.signature))
    return digest(state) + digest((report or "").encode()) + of_receipts.digest() + broadcast


def stem(of: bytes) -> bytes:
    """The digest of all parts of a round but the broadcast."""
    return digest(of[:-SIZE])


def link(stem: bytes, broadcast: bytes) -> bytes:
    """The link of a round with this stem and this digest of the broadcast."""
    return digest(stem + broadcast)


def link_of(of: bytes) -> bytes:
    """The link of a round with these parts."""
    return link(stem(of), of[-SIZE:])


def head(before: bytes | None, of: bytes) -> bytes:
    """The head after a link; `before` is None for the state before the first round."""
    return digest((BEGIN if before is None else before) + of)


def digest(data: bytes) -> bytes:
    """SHA-256."""
    return hashlib.sha256(data).digest()
