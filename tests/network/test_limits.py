"""Limits on what one key may ask, with a clock that stands until it is moved."""

from dataclasses import dataclass

from fedkseed.network import limits
from fedkseed.network.limits import Quota

RATE, BURST = 10.0, 100


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_key_may_ask_a_burst_at_once_and_then_at_the_rate():
    clock = Clock()
    quota = Quota(RATE, BURST, clock)
    assert [quota.takes(b"a") for _ in range(BURST + 5)] == [True] * BURST + [False] * 5
    assert quota.takes(b"b"), "each key has its own"
    clock.now += 3.5 / RATE
    assert [quota.takes(b"a") for _ in range(5)] == [True] * 3 + [False] * 2
    clock.now += 1e6
    assert sum(quota.takes(b"a") for _ in range(2 * BURST)) == BURST, "what was not used is not saved up"


def test_made_up_keys_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(limits, "MOST_KEYS", 10)
    quota = Quota(RATE, 1, Clock())
    assert all(quota.takes(number) for number in range(1000))
    assert len(quota._seen) == 10
    assert not quota.takes(999)
    assert quota.takes(5), "it was forgotten, and begins anew"


def test_whoever_has_cost_more_than_its_quota_waits_until_that_is_paid_off():
    clock = Clock()
    quota = Quota(0.5, 2.0, clock)
    quota.charge("costly", 2.5)
    quota.charge("cheap", 0.5)
    assert quota.wait("costly") == 1.0
    assert quota.wait("cheap") == quota.wait("new") == 0
    clock.now += 1
    assert quota.wait("costly") == 0
