"""Campaigns against the readers of strangers' files: short ones here, 10⁶ inputs in `make test-faults`."""

import pytest

from fedkseed import FedKSeedError
from tests.wire import fuzz_files
from tests.wire.fuzz import BLOCK, TARGETS, campaign, main, try_block
from tests.wire.fuzz_files import KINDS, judge, specimens

ALL = 1_000_000
EACH = 50_000  # of each kind at least; messages, which take 40 µs each, are the rest


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_files_of_each_kind_are_read_or_refused(kind):
    tally = campaign(BLOCK, seed=1, tell=lambda line: None, target=kind)
    assert tally.inputs == BLOCK
    assert tally.accepted[kind] > 20
    assert tally.refused.total() > 20


@pytest.mark.parametrize("kind", KINDS)
def test_specimens_are_read(kind):
    read = [judge(kind, data) for data in specimens(kind)]
    assert (kind, "") in read
    # some adapters need peft's own check, and one of the answers is a server's refusal
    assert kind in ("adapters", "answers") or {*read} == {(kind, "")}


def test_a_reader_that_breaks_is_found_with_its_input(monkeypatch):
    def broken(path):
        raise KeyError("no such key")

    monkeypatch.setitem(fuzz_files.KINDS, "csv", (*KINDS["csv"][:2], broken))
    with pytest.raises(FedKSeedError, match=r"input 2000 of seed 0 is neither refused nor sound: KeyError.*it is \w+$"):
        try_block(0, 2, "csv")


@pytest.mark.slow(seconds=900, guards="readers of strangers' files and messages, by a million inputs")
@pytest.mark.parametrize("kind", TARGETS)
def test_a_million_inputs_are_refused_or_sound(kind, capsys):
    rest = ALL - EACH * (len(TARGETS) - 1)
    tally = campaign(rest if kind == "messages" else EACH, seed=47, tell=lambda line: None, target=kind, processes=2)
    with capsys.disabled():
        print(f"\n{kind}: {tally.inputs:,} inputs, no finding: {tally.accepted.total():,} accepted")
        print("".join(f"{count:>10,}  {refusal}\n" for refusal, count in tally.refused.most_common(12)), end="")


def test_the_command_takes_each_kind(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fuzz", "--inputs", "1", "--target", "session"])
    main()
    assert "1,000 inputs of seed 0" in capsys.readouterr().out
