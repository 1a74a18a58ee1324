"""Addresses, files and disks that a command names."""

from types import SimpleNamespace

import pytest

from fedkseed import FedKSeedError
from fedkseed.network.protocol import addresses
from fedkseed.network.protocol.addresses import disk_of, is_loopback, require_files
from fedkseed.network.protocol.certs import make


def test_a_key_that_others_can_read_or_that_is_not_there_is_refused(tmp_path):
    make(tmp_path, 1, ["localhost"], 2)
    ca, key = tmp_path / "ca.pem", tmp_path / "client-0"
    require_files(ca, key)
    with pytest.raises(FedKSeedError, match="`fedkseed certs request` makes a key"):
        require_files(ca, tmp_path / "client-7")
    key.chmod(0o644)
    with pytest.raises(FedKSeedError, match=f"others can read the key {key}; keep it to yourself: chmod 600"):
        require_files(ca, key)


@pytest.mark.parametrize(
    ("free", "match"), [(0, "is full: make space and start.*500"), (1 << 20, "^Server error 500$")]
)
def test_whatever_fails_on_a_full_disk_is_told_as_that(monkeypatch, tmp_path, free, match):
    monkeypatch.setattr(addresses.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(FedKSeedError, match=match), disk_of(tmp_path):
        raise FedKSeedError("Server error 500")


def test_loopback_is_this_machine_alone():
    everywhere = "0.0.0.0"  # noqa: S104 - nothing is bound
    names = ("127.0.0.1", "localhost", "::1", everywhere, "10.0.0.1", "fl.example.org")
    assert [is_loopback(name) for name in names] == [True] * 3 + [False] * 3
