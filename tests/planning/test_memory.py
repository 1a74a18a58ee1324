"""Memory that a block needs, by the high-water mark and by looking."""

from time import monotonic, sleep

import numpy as np
import pytest

from fedkseed.planning.memory import Meter

SIZE = 64_000_000


@pytest.mark.parametrize("sampled", [False, True])
def test_the_most_in_use_inside_a_block_is_seen_and_what_was_before_it_is_not(sampled):
    before_all = np.ones(2 * SIZE, np.uint8)
    del before_all
    meter = Meter()
    before = meter.now()
    with meter._sampled() if sampled else meter.watch():
        inside = np.ones(SIZE, np.uint8)
        assert meter.now() - before >= 0.9 * SIZE  # pages of other parts may have been given back in between
        until = monotonic() + 30
        while sampled and meter.peak < meter._in_use() and monotonic() < until:
            sleep(1e-3)  # a busy machine may let the thread that looks wait
        del inside
    assert 0.9 * SIZE < meter.peak - before < 1.5 * SIZE
    assert meter.now() - before < 0.1 * SIZE
