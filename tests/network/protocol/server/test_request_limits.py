"""Limits on what one key may ask, with a clock that stands until it is moved."""

from dataclasses import dataclass

from fedkseed.network.protocol.server import request_limits as guard
from fedkseed.network.protocol.server.request_limits import BURST, RATE, TOGETHER, ClientAddresses, Quota


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_key_may_ask_a_burst_at_once_and_then_at_the_rate():
    clock = Clock()
    quota = Quota(clock=clock)
    assert [quota.takes(b"a") for _ in range(int(BURST) + 5)] == [True] * int(BURST) + [False] * 5
    assert quota.takes(b"b"), "each key has its own"
    clock.now += 3.5 / RATE
    assert [quota.takes(b"a") for _ in range(5)] == [True] * 3 + [False] * 2
    clock.now += 1e6
    assert sum(quota.takes(b"a") for _ in range(2 * int(BURST))) == BURST, "what was not used is not saved up"


def test_made_up_keys_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(guard, "MOST", 10)
    quota = Quota(burst=1, clock=Clock())
    assert all(quota.takes(number) for number in range(1000))
    assert len(quota._left) == 10
    assert not quota.takes(999)
    assert quota.takes(5), "it was forgotten, and begins anew"


def test_a_key_at_two_addresses_at_a_time_is_seen_and_a_client_that_moves_is_not():
    clock = Clock()
    addresses = ClientAddresses(clock)
    moving = ["home", "home", "train", "train", "office"]
    assert [addresses.other(1, where) for where in moving] == [None] * 5
    assert [addresses.other(2, where) for where in ("owner", "thief", "owner")] == [None, None, "thief"]
    assert addresses.other(3, "home") is None
    clock.now += TOGETHER + 1
    assert [addresses.other(3, where) for where in ("train", "home")] == [None, None], "it went home after a minute"
