"""Local steps that are ended after each of them, and go on in another process: to the bit those that nothing ended."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedkseed import Pool, hold
from fedkseed.local.derivatives import derivative_steps
from fedkseed.local.kept_steps import KeptSteps
from fedkseed.local.optimizers import Optimizer
from fedkseed.local.zeroth_order import zeroth_order_steps
from fedkseed.models.loss import batch_loss, graph_loss

from ..conftest import tiny_llama
from .test_derivatives import batch

STEPS, PROBES, BROKEN = 4, 2, 1  # the loss of batch BROKEN is no number
BATCHES = [batch(seed) for seed in range(STEPS + 1)]
C = np.random.default_rng(0).normal(size=64).astype(np.float32) * 1e-3
OF = bytes(32)


class KilledError(Exception):
    """The end of a process after a step."""


def two_points(weights: Any, loss: Callable[[Any], float], batches: list[Any], **options: Any) -> Any:
    directions = np.random.default_rng(1).integers(0, 64, STEPS * PROBES).astype(np.uint32)
    # A rate with which a sum in another order shows.
    return zeroth_order_steps(weights, loss, batches, directions, probes=PROBES, lr=1e-2, eps=1e-3, **options)


def derivatives(optimizer: str, weights: Any, loss: Callable[[Any], Any], batches: list[Any], **options: Any) -> Any:
    return derivative_steps(weights, loss, batches, steps=STEPS, lr=1e-4, optimizer=Optimizer(optimizer), **options)


KINDS = {"two points": two_points, "sgd": partial(derivatives, "sgd"), "adam": partial(derivatives, "adam")}


def noise_of(step: int, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Another number in each step, as noise is."""
    return np.nan_to_num(rows).mean(0) + 0.01 * step


def taken(
    kind: str, mode: str, kept: KeptSteps | None = None, last: int = 0, noised: bool = False
) -> tuple[Any, bytes, list[int]]:
    """A process from the sync on: what its steps found, the digest of its weights, and the batches of its passes.

    Args:
        last: the process is killed after so many steps of its own; 0: it is not.
    """
    model, passes, steps = tiny_llama(), set[int](), []
    weights = hold(model, Pool(1, 64, "hadamard"), mode=mode)
    weights.load(C)
    of_batch = batch_loss if kind == "two points" else graph_loss

    def loss(one: Any) -> Any:
        passes.add(number := next(k for k, each in enumerate(BATCHES) if each is one))
        return of_batch(model, one) * (math.nan if number == BROKEN else 1)

    def on_step(value: float) -> None:
        steps.append(value)
        if len(steps) == last:
            raise KilledError

    batches: list[Any] = [[one] for one in BATCHES] if noised else BATCHES
    options = {"on_step": on_step, "kept": kept, "noised": noise_of if noised else None}
    return KINDS[kind](weights, loss, batches, **options), weights.digest(), sorted(passes)


def same(found: tuple[Any, bytes, list[int]], expected: tuple[Any, bytes, list[int]]) -> bool:
    """Whether two processes end with the same upload and the same weights."""
    numbers = [
        getattr(steps, "scalars", None) if hasattr(steps, "scalars") else steps.change
        for steps, *_ in (found, expected)
    ]
    facts = [(steps.skipped, repr(steps.loss), digest) for steps, digest, _ in (found, expected)]
    return np.array_equal(*numbers, equal_nan=True) and facts[0] == facts[1]


@pytest.mark.parametrize(
    ("kind", "mode", "noised"),
    [
        ("two points", "streamed", False),
        ("two points", "in place", False),
        ("two points", "materialized", False),
        ("two points", "streamed", True),
        ("sgd", "streamed", False),
        ("adam", "in place", False),
        ("adam", "streamed", True),
    ],
)
def test_steps_that_end_after_each_of_them_are_those_that_nothing_ended(tmp_path, kind, mode, noised):
    kept, expected = KeptSteps(tmp_path / "steps.kept", OF), taken(kind, mode, noised=noised)
    assert expected[2] == [*range(STEPS)]
    assert expected[0].skipped == (0 if noised else PROBES if kind == "two points" else 1)
    for done in range(1, STEPS):
        with pytest.raises(KilledError):
            taken(kind, mode, kept, 1, noised)
        if done == STEPS // 2:
            assert same(found := taken(kind, mode, kept_copy(kept), noised=noised), expected)
            assert found[2] == [*range(done, STEPS)], "no step is taken twice"
    with pytest.raises(KilledError):
        taken(kind, mode, kept, 1, noised)  # after the last step, and before the upload was sent
    assert same(found := taken(kind, mode, kept, noised=noised), expected)
    assert found[2] == []


def kept_copy(kept: KeptSteps) -> KeptSteps:
    copy = kept.path.with_name("copy.kept")
    copy.write_bytes(kept.path.read_bytes())
    return KeptSteps(copy, kept.of)


def test_steps_of_another_round_and_damaged_ones_are_not_taken_up(tmp_path):
    kept = KeptSteps(tmp_path / "steps.kept", OF).within([b"round 1", b"rows"])
    assert kept.read() == {}, "there is no file yet"
    kept.keep(c=C, losses=np.zeros(0))
    found = kept.read()
    assert np.array_equal(found["c"], C)
    assert found["losses"].shape == (0,)
    assert kept.path.stat().st_mode & 0o777 == 0o600
    others = [KeptSteps(kept.path, OF).within(parts) for parts in ([b"round 2", b"rows"], [b"round 1rows"], [])]
    assert [other.read() for other in others] == [{}] * 3
    whole = kept.path.read_bytes()
    for broken in (b"", whole[:40], whole[:-1], whole[:50] + bytes([whole[50] ^ 1]) + whole[51:], bytes(len(whole))):
        kept.path.write_bytes(broken)
        assert kept.read() == {}
    left = tmp_path / f".steps.kept.{'0' * 16}.part"  # of a process that was killed while it wrote
    left.touch()
    assert kept.read() == {}
    assert not left.exists()


def test_a_disk_that_takes_nothing_stops_no_step(tmp_path):
    assert same(
        taken("two points", "streamed", KeptSteps(tmp_path / "none" / "steps.kept", OF)),
        taken("two points", "streamed"),
    )
