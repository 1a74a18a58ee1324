"""Weights that may go anywhere: exact, whatever the model's type."""

import numpy as np
import pytest
import torch

from fedkseed import FedKSeedError, Pool
from fedkseed.directions.operations import DirectionSum, accumulate_
from fedkseed.local.first_order import first_order_steps
from fedkseed.weights.full import FullWeights, all_finite
from fedkseed.weights.layout import Layout

from ..conftest import tiny_llama

POOL = Pool(7, 1 << 32, "rademacher")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def free(dtype: torch.dtype = torch.float32, tuned=("*",)) -> tuple[torch.nn.Module, FullWeights]:
    model = tiny_llama().to(dtype)
    return model, FullWeights(Layout(model, tuned), POOL)


def bits(model) -> list[bytes]:
    return [p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters()]


@DTYPES
def test_values_go_out_and_come_back(dtype):
    model, weights = free(dtype)
    before, values = bits(model), weights.values()
    assert values.size == sum(p.numel() for p in model.parameters())
    weights.set(values + 1)
    assert bits(model) != before
    weights.set(values)
    assert bits(model) == before


@DTYPES
def test_values_that_the_type_can_not_hold_are_kept_exactly(dtype):
    model, weights = free(dtype)
    values = weights.values() + np.float32(1e-7)
    weights.set(values)
    assert weights.values().tobytes() == values.tobytes()
    want = torch.from_numpy(values[: model.lm_head.weight.numel()]).to(dtype)
    assert torch.equal(model.lm_head.weight.detach().flatten(), want)


def test_too_few_values_are_refused_and_change_nothing():
    model, weights = free()
    before = bits(model)
    with pytest.raises(FedKSeedError, match="has 60912 tuned weights, got 5"):
        weights.set(np.ones(5, np.float32))
    assert bits(model) == before


@DTYPES
def test_a_perturbation_leaves_nothing_behind(dtype):
    model, weights = free(dtype)
    before = bits(model)
    for j in range(20):
        weights.both(j, 1e-3, lambda: 0.0)
    assert bits(model) != before
    weights.settle()
    assert bits(model) == before


@DTYPES
def test_a_move_is_the_sum_that_it_is_defined_as(dtype):
    _, weights = free(dtype)
    want = [entry.tensor.float() for entry in weights.layout.tuned]
    for j, step in ((3, 1e-4), (1 << 31, -2e-4)):
        weights.move(j, step)
        for entry, tensor in zip(weights.layout.tuned, want, strict=True):
            accumulate_(tensor, POOL, [j], [step], tensor=entry.number)
    assert weights.values().tobytes() == torch.cat([t.flatten() for t in want]).numpy().tobytes()


@DTYPES
def test_back_is_where_keep_was(dtype):
    model, weights = free(dtype)
    weights.move(1, 1e-5)
    weights.settle()
    weights.keep()
    before, values = bits(model), weights.values()
    weights.move(2, 1.0)
    weights.settle()
    assert bits(model) != before
    weights.back()
    assert bits(model) == before
    assert weights.values().tobytes() == values.tobytes()


def test_the_change_is_projected_tensor_by_tensor():
    _, weights = free()
    weights.keep()
    pool = Pool(1, 64, "hadamard")
    weights.add(DirectionSum(pool, *pool.select([3], [0.5])))
    change = weights.change(pool)
    sizes = [entry.tensor.numel() for entry in weights.layout.tuned]
    assert change.shape == (len(sizes), 64)
    np.testing.assert_allclose(change[:, 3], 0.5 * np.array(sizes), rtol=1e-4)  # ‖z‖² = d for signs
    np.testing.assert_allclose(weights.distances(), 0.5 * np.sqrt(sizes), rtol=1e-4)


@DTYPES
def test_what_an_optimiser_did_is_no_rounding_of_where_it_began(dtype):
    _, weights = free(dtype)
    weights.move(5, 1e-5)  # less than a 16-bit weight's last place
    weights.settle()
    weights.keep()
    with weights.trainable():
        pass
    assert not weights.distances().any()
    assert not weights.change(Pool(1, 64)).any()
    with weights.trainable() as pairs, torch.no_grad():
        pairs[1][1].add_(1e-6)  # nor is it lost
    sizes = [entry.tensor.numel() for entry in weights.layout.tuned]
    np.testing.assert_allclose(weights.distances()[1], 1e-6 * np.sqrt(sizes[1]), rtol=0.05)
    assert weights.distances()[[0, *range(2, len(sizes))]].max() == 0


@DTYPES
def test_an_optimiser_changes_what_is_tuned_and_nothing_else(dtype):
    model, weights = free(dtype, ("*.mlp.*",))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = torch.arange(12).view(1, -1)

    def loss(batch):
        return model(input_ids=tokens, labels=tokens).loss

    found = first_order_steps(weights, loss, iter(range(9)), steps=3, lr=1e-1)
    assert found.skipped == 0
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), before[name]) == (".mlp." not in name)
        assert not p.requires_grad
        assert p.grad is None
    truth = torch.from_numpy(weights.values()).to(dtype)
    assert torch.equal(truth, torch.cat([entry.tensor.flatten() for entry in weights.layout.tuned]))


def test_steps_too_small_for_a_16_bit_weight_add_up():
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        model, weights = free(dtype)
        start, tokens = weights.values(), torch.arange(12).view(1, -1)

        def loss(batch, model=model, tokens=tokens):
            return model(input_ids=tokens, labels=tokens).loss

        first_order_steps(weights, loss, iter(range(50)), steps=50, lr=1e-4)
        ends.append(weights.values() - start)
    cosine = ends[0] @ ends[1] / np.linalg.norm(ends[0]) / np.linalg.norm(ends[1])
    assert cosine > 0.99
    assert np.linalg.norm(ends[1]) == pytest.approx(np.linalg.norm(ends[0]), rel=0.05)


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("numbers", "finite"),
    [
        ([1.0, -2.0], True),
        ([LARGEST, LARGEST], True),  # their sum is infinite
        ([LARGEST, LARGEST, float("nan")], False),
        ([float("inf"), 1.0], False),
        ([float("inf"), -float("inf")], False),
        ([float("nan")], False),
    ],
    ids=["finite", "sum overflows", "nan beside", "infinite", "both infinities", "nan"],
)
def test_a_tensor_is_finite_if_each_of_its_numbers_is(numbers, finite):
    assert all_finite(torch.tensor(numbers)) is finite


def test_a_step_whose_gradient_is_not_finite_moves_nothing():
    model, weights = free()
    before, tokens = bits(model), torch.arange(12).view(1, -1)

    def loss(batch):
        value = model(input_ids=tokens, labels=tokens).loss
        return value + (value - value.detach()).sqrt()  # 0, with an infinite slope

    found = first_order_steps(weights, loss, iter(range(2)), steps=2, lr=1e-1)
    assert found.skipped == 2
    assert bits(model) == before


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_first_order_steps_are_those_of_pytorch(optimizer):
    model, weights = free()
    twin = tiny_llama().requires_grad_(True)
    stepper = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](twin.parameters(), lr=1e-2)
    data = [torch.arange(k, k + 12).view(1, -1) for k in range(4)]
    for tokens in data:
        stepper.zero_grad()
        twin(input_ids=tokens, labels=tokens).loss.backward()
        stepper.step()
    first_order_steps(
        weights, lambda t: model(input_ids=t, labels=t).loss, iter(data), steps=4, lr=1e-2, optimizer=optimizer
    )
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_step_whose_loss_is_not_finite_moves_nothing_and_is_counted():
    model, weights = free()
    before, tokens = bits(model), torch.arange(12).view(1, -1)

    def broken(batch):
        return model(input_ids=tokens, labels=tokens).loss * float("nan")

    found = first_order_steps(weights, broken, iter(range(9)), steps=3, lr=1e-1)
    assert found.skipped == 3
    assert np.isnan(found.loss)
    assert bits(model) == before
