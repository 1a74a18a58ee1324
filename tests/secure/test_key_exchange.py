"""Public keys of low order, with which everybody knows the secrets of a pair, are refused wherever a key enters."""

from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedkseed import FedKSeedError
from fedkseed.network.protocol.masking_keys import COMMENT, masking_key_in
from fedkseed.secure.key_exchange import agreed

from .rounds import key_of, members_of, roster_of

P = (1 << 255) - 19
OF_ORDER_8 = (
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
)  # of the curve and its twist: the points of small order in https://cr.yp.to/ecdh.html#validate
LOW_ORDER = [
    (u | top << 255).to_bytes(32, "little") for u in (0, 1, P - 1, P, P + 1, *OF_ORDER_8) for top in (0, 1)
]  # the numbers from P on and the highest bit make other bytes of the same points


def test_both_owners_find_the_same_secret():
    one, other = (X25519PrivateKey.from_private_bytes(key_of(number)) for number in range(2))
    assert agreed(one, other.public_key().public_bytes_raw()) == agreed(other, one.public_key().public_bytes_raw())


@pytest.mark.parametrize("key", LOW_ORDER, ids=bytes.hex)
def test_every_encoding_of_a_point_of_low_order_is_refused(key):
    for number in range(3):
        with pytest.raises(FedKSeedError, match=f"{key.hex()} is no public key for masks"):
            agreed(X25519PrivateKey.from_private_bytes(key_of(number)), key)
    with pytest.raises(FedKSeedError, match=f"bob.pub: {key.hex()} is no public key for masks"):
        masking_key_in(f"ecdsa-sha2-nistp256 AAAA {COMMENT}{key.hex()}", "bob.pub: ")


def test_no_honest_key_is_refused_with_either_highest_bit():
    for number in range(50):
        public = X25519PrivateKey.from_private_bytes(key_of(number)).public_key().public_bytes_raw()
        own = X25519PrivateKey.from_private_bytes(key_of(99))
        assert agreed(own, public) == agreed(own, public[:-1] + bytes([public[-1] | 128]))


def test_a_round_with_such_a_key_is_refused_before_training():
    members = members_of(range(4))
    roster = roster_of(members)
    keys = roster.keys.copy()
    keys[2] = np.frombuffer(LOW_ORDER[5], np.uint8)
    assert members[0].place(roster) == 0
    with pytest.raises(FedKSeedError, match="is no public key for masks"):
        members[0].place(replace(roster, keys=keys))
