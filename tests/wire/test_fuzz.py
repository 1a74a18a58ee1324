"""The campaign finds what it looks for, and nothing where there is nothing."""

from concurrent.futures import Future

import pytest

from fedkseed import FedKSeedError
from fedkseed.wire.codec import KINDS, encode
from tests.wire import fuzz
from tests.wire.fuzz import BLOCK, HANGS, QUIET, campaign, judge, made, specimens, try_block

LACK = specimens()["lack"]


def test_twenty_thousand_inputs_are_refused_or_messages():
    told = []
    tally = campaign(20 * BLOCK, seed=1, tell=told.append)
    assert tally.inputs == 20 * BLOCK
    assert set(tally.accepted) == {kind.record.__name__ for kind in KINDS.values()}
    assert len(tally.refused) > 30  # so many checks were reached


def test_specimens_are_of_every_kind_and_are_judged_sound():
    assert {type(record) for record in specimens().values()} == {kind.record for kind in KINDS.values()}
    for record in specimens().values():
        assert judge(encode(record)) == (type(record).__name__, "")


def test_inputs_are_a_function_of_seed_and_number():
    assert list(made(3, 5)) == list(made(3, 5))
    assert len({tuple(made(seed, block)) for seed, block in [(3, 5), (3, 6), (4, 5)]}) == 3


def test_most_inputs_get_past_the_checksum():
    past = sum(
        judge(data)[1] not in ("the message's checksum does not fit", "not a fedkseed message") for data in made(0, 0)
    )
    assert past > 0.8 * BLOCK


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (lambda data, *kinds: {}["no such key"], "KeyError"),
        (lambda data, *kinds: LACK, "accepted as Lack, which encodes to other bytes"),
    ],
)
def test_a_decoder_that_breaks_is_found_and_the_input_is_told(monkeypatch, broken, what):
    monkeypatch.setattr(fuzz, "decode", broken)
    with pytest.raises(FedKSeedError, match=rf"input 2000 of seed 0 is neither refused.*{what}.*it is [0-9a-f]+$"):
        try_block(0, 2)


def test_a_slow_decoder_is_found(monkeypatch):
    monkeypatch.setattr(fuzz, "SLOW", 0.0)
    with pytest.raises(FedKSeedError, match=r"input 0 of seed 0 .* took 0\.\d s"):
        try_block(0, 0)


def test_the_command_says_what_it_did(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fuzz", "--inputs", "1", "--start", "5500", "--seed", "2"])
    fuzz.main()
    printed = capsys.readouterr().out
    assert "1,000 inputs of seed 2 from 5,000 on" in printed
    assert "no finding" in printed


class Never(Future):
    """Of a block that hangs."""

    waits = 0

    def result(self, timeout=None):
        self.waits += 1
        raise TimeoutError


def test_a_block_that_hangs_is_given_up_after_many_short_waits():
    hanging = Never()
    with pytest.raises(TimeoutError):
        fuzz._result(hanging)
    assert hanging.waits == HANGS / QUIET
