"""The benchmark of Trainer's memory at the smallest size, each row in a process of its own."""

import pytest

from . import rows_of

OURS, THEIRS = "Trainer, two points", "transformers' Trainer, AdamW"


@pytest.mark.slow(seconds=28, guards="gradients or moments in the memory of two points")
def test_two_points_hold_no_gradients_and_no_moments():
    asked = ["--config", "tiny", "--types", "float32", "--tokens", 16, "--ways", OURS, THEIRS]
    found = {row["way"]: row["GB"] * 1e9 for row in rows_of("trainer.py", *asked)}
    assert set(found) == {"forward pass", OURS, THEIRS}
    weights = 2 * 4096 * 256 + 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512)
    assert found[OURS] > 0.9 * 4 * weights  # the model
    # gradients and two moments are 12 bytes a weight; our step's buffers, 5 MB here, stand against them
    assert found[THEIRS] - found[OURS] > 0.7 * 12 * weights
