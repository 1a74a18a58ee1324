"""Addresses and disks that a command names."""

from types import SimpleNamespace

import pytest

from fedkseed import FedKSeedError
from fedkseed.network.protocol import addresses
from fedkseed.network.protocol.addresses import disk_of, is_loopback


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
