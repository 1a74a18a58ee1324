"""The secret that the owners of two X25519 keys share, and the public keys that are refused.

A point of low order gives the same secret, zeros, with every private key. Fourteen strings of 32 bytes stand for such
points of the curve or its twist: 0, 1, p − 1, p, p + 1 and two of order 8, each with either highest bit, which does not
count. RFC 7748, section 6.1, has them recognised by that secret.
"""

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from ..errors import FedKSeedError


def agreed(private: X25519PrivateKey, public: bytes, place: str = "") -> bytes:
    """The secret that the owners of two keys share; the place of the public one begins an error.

    Raises:
        FedKSeedError: the public key is of low order: everybody would know the secret.
    """
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise FedKSeedError(
            f"{place}{public.hex()} is no public key for masks: everybody would know the secrets made with it; let "
            "its owner print the line of the public file anew, with `fedkseed certs public KEY`"
        ) from error
