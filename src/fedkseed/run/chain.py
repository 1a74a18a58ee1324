"""The chain of a run: one digest after each round that stands for all rounds before it.

    link_r   SHA-256 of the parts of round r: SHA-256 of the state after it, of its report, of its receipts
    head_r   SHA-256(head_{r−1} ‖ link_r), where head_0 is SHA-256(BEGIN ‖ link_0) with the state before the first round

Whoever knows one head recognises any change of what came before it. The clients of a network check each link and sign
the head that they know (flower/history.py), so a server can't give two of them different histories unnoticed.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

BEGIN = b"fedkseed, version 2: the rounds of a run\n"
SIZE = 32  # bytes of a digest


@dataclass(frozen=True, slots=True)
class Receipt:
    """An upload as it came, and its client's signature; empty where clients have no keys."""

    upload: bytes
    signature: bytes = b""


def parts(state: bytes, report: str | None, receipts: Mapping[int, Receipt]) -> bytes:
    """The three digests of a round, 96 bytes: of its packed state, of its report, of its receipts."""
    made = hashlib.sha256()
    for client, receipt in sorted(receipts.items()):
        made.update(client.to_bytes(4, "little"))
        made.update(digest(receipt.upload) + digest(receipt.signature))
    return digest(state) + digest((report or "").encode()) + made.digest()


def link(of: bytes) -> bytes:
    """The link of a round with these parts."""
    return digest(of)


def head(before: bytes | None, of: bytes) -> bytes:
    """The head after a link; `before` is None for the state before the first round."""
    return digest((BEGIN if before is None else before) + of)


def digest(data: bytes) -> bytes:
    """SHA-256."""
    return hashlib.sha256(data).digest()
