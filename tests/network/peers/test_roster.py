"""The peers' file: what it must have, and what may change while a run goes on."""

import os
from datetime import UTC, datetime

import pytest
import tomli_w

from fedkseed import FedKSeedError
from fedkseed.network.peers.roster import PeerAddresses, load_roster

from .synthetic import line

START = datetime(2030, 1, 31, 12, tzinfo=UTC)


def table(**changes) -> dict:
    made = {
        "start": START,
        "seconds": 600,
        "peers": [{"key": line(k), "address": f"https://p{k}.example.org:8443/"} for k in range(3)],
    }
    return made | changes


def write(path, **changes):
    path.write_text(tomli_w.dumps(table(**changes)))
    return path


def test_rounds_open_by_the_clock(tmp_path, monkeypatch):
    roster = load_roster(write(tmp_path / "peers.toml"))
    assert [roster.opens_at(k) - START.timestamp() for k in (0, 1, 3)] == [0, 600, 1800]
    for seconds, round_ in ((-0.5, -1), (0, 0), (599.9, 0), (600, 1)):
        now = START.timestamp() + seconds
        monkeypatch.setattr("time.time", lambda now=now: now)
        assert roster.open_round() == round_


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"peers": []}, "peers: list should have at least 2 items"),
        ({"peers": [{"key": line(0)}, {"key": line(0)}]}, "peers 0 and 1 have one key"),
        ({"peers": [{"key": "junk"}, {"key": line(0)}]}, "the key of peer 0 holds no public key"),
        ({"peers": [{"key": line(1), "address": "http://a"}, {"key": line(0)}]}, "is https://HOST:PORT, got 'http://a'"),
        ({"peers": [{"key": line(1), "adress": "https://a"}, {"key": line(0)}]}, "did you mean 'address'"),
        ({"start": datetime(2030, 1, 1)}, "start: input should have timezone info"),
        ({"seconds": 0}, "seconds: input should be greater than 0"),
        ({"max_staleness": -1}, "max_staleness: input should be greater than or equal to 0"),
    ],
    ids=["nobody", "twice", "no key", "address", "a word", "no zone", "no time", "staleness"],
)  # fmt: skip
def test_a_file_that_lacks_something_is_refused(tmp_path, changes, text):
    with pytest.raises(FedKSeedError, match=text):
        load_roster(write(tmp_path / "peers.toml", **changes))


def test_addresses_may_change_and_keys_and_times_may_not(tmp_path):
    path, notes = write(tmp_path / "peers.toml"), []
    addresses = PeerAddresses(path, load_roster(path), notes.append)
    assert addresses.current()[2] == "https://p2.example.org:8443"

    def changed(**changes) -> dict[int, str]:
        write(tmp_path / "part", **changes)
        os.replace(tmp_path / "part", path)
        return addresses.current()

    assert changed(peers=[{"key": line(0)}, *table()["peers"][1:]]).keys() == {1, 2}
    assert notes == []
    for wrong in ({"seconds": 5}, {"peers": table()["peers"][:2]}, {"peers": []}):
        assert changed(**wrong).keys() == {1, 2}
    assert ["stay as they were" in note for note in notes] == [True] * 3
    path.unlink()
    assert addresses.current().keys() == {1, 2}
    assert changed().keys() == {0, 1, 2}
