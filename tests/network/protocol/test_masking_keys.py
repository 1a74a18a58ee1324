"""Keys of masked uploads, and a client's memory of what it has answered."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedkseed import FedKSeedError
from fedkseed.network.protocol.certs import request
from fedkseed.network.protocol.masking_keys import (
    COMMENT,
    MASKED_ROUNDS,
    listed_keys,
    masking_comment,
    masking_key,
    masking_key_in,
    note_masked,
)
from fedkseed.network.protocol.signatures import private_key

RUN = bytes(range(16))


def test_the_key_follows_from_the_identity_and_its_public_half_stands_in_the_public_file(tmp_path):
    line = request(tmp_path / "alice").read_text()
    key = masking_key(private_key(tmp_path / "alice"))
    assert masking_key_in(line) == X25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw()
    assert len(masking_comment(private_key(tmp_path / "alice")).split()) == 1
    others = [masking_key(ec.generate_private_key(ec.SECP256R1())) for _ in range(3)]
    assert len({key, *others}) == 4


@pytest.mark.parametrize(
    "line", ["", "ecdsa-sha2-nistp256 AAAA", "x fedkseed-masks:", "x fedkseed-masks:zz", "y alice"]
)
def test_a_line_without_a_key_has_none(line):
    assert masking_key_in(line) is None
    assert masking_key_in("x fedkseed-masks:" + "00" * 31) is None
    assert masking_key_in("x fedkseed-masks:zz fedkseed-masks:" + "00" * 32) is None, "the first word decides"


def test_a_client_answers_each_leg_of_a_round_once_also_after_a_restart(tmp_path):
    note_masked(tmp_path, RUN, 3, "upload", b"numbers")
    note_masked(tmp_path, RUN, 3, "upload", b"numbers")
    note_masked(tmp_path, RUN, 3, "set of survivors", b"all")
    with pytest.raises(FedKSeedError, match="round 3 was answered with another set of survivors"):
        note_masked(tmp_path, RUN, 3, "set of survivors", b"fewer")
    with pytest.raises(FedKSeedError, match="round 3 was answered with another upload"):
        note_masked(tmp_path, RUN, 3, "upload", b"other numbers")
    note_masked(tmp_path, RUN, 4, "upload", b"other numbers")
    with pytest.raises(FedKSeedError, match="round 3 of this run is over: round 4"):
        note_masked(tmp_path, RUN, 3, "upload", b"numbers")
    note_masked(tmp_path, bytes(16), 3, "upload", b"of another run")


def test_a_run_is_not_forgotten_for_others(tmp_path):
    """A server that could drive a run out of the memory could ask its rounds again."""
    for number in range(300):
        note_masked(tmp_path, number.to_bytes(16, "big"), 0, "upload", b"x")
    with pytest.raises(FedKSeedError, match="another upload"):
        note_masked(tmp_path, bytes(16), 0, "upload", b"y")


def test_a_memory_that_was_damaged_is_no_empty_one(tmp_path):
    (tmp_path / MASKED_ROUNDS).write_text("{")
    with pytest.raises(FedKSeedError, match=MASKED_ROUNDS):
        note_masked(tmp_path, RUN, 0, "upload", b"x")


def test_a_list_of_members_has_one_key_for_masks_of_each(tmp_path):
    lines = [request(tmp_path / name).read_text() for name in ("alice", "bob")]
    file = tmp_path / "members.pub"
    file.write_text("".join(lines))
    keys = [masking_key_in(line) for line in lines]
    assert listed_keys(file) == {0: keys[0], 1: keys[1]}
    file.write_text("".join(["a line of no key\n", *lines]))
    assert listed_keys(file) == {1: keys[0], 2: keys[1]}
    file.write_text("".join([*lines, lines[0]]))
    with pytest.raises(FedKSeedError, match="line 3: line 1 has the same key for masks; each member has its own"):
        listed_keys(file)
    file.write_text(f"{lines[0]}ecdsa-sha2-nistp256 AAAA {COMMENT}{bytes(32).hex()}\n")
    with pytest.raises(FedKSeedError, match=r"members.pub, line 2: 0{64} is no public key for masks"):
        listed_keys(file)
    with pytest.raises(FedKSeedError, match="nowhere"):
        listed_keys(Path("nowhere"))
