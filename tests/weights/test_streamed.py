"""Weights made when an operation asks for them: same values, same losses, nothing written."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PretrainedConfig

from fedkseed import FedKSeedError, Pool, hold
from fedkseed.local.zeroth_order import zeroth_order_steps
from fedkseed.models.load import load_model
from fedkseed.weights import lazy as lazy_module
from fedkseed.weights.lazy import Lazy, Workspace, densify
from fedkseed.weights.streamed import Streamed

from ..conftest import CONFIGS, EVERYWHERE, tiny_llama

TOKENS = torch.arange(24).view(2, 12)


def model_of(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).to(dtype).requires_grad_(False).eval()


def loss_of(model: nn.Module):
    @torch.inference_mode()
    def loss(tokens: torch.Tensor = TOKENS) -> float:
        logits = model(tokens, use_cache=False).logits.float()
        return float(functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))

    return loss


def coefficients(size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=size).astype(np.float32) * np.float32(1e-3)


def streamed(family: str = "hadamard"):
    """A model, and its weights, which no memory holds: streamed, or factored in a factored family."""
    model = tiny_llama()
    weights = hold(model, Pool(1, 64, family))
    weights.load(coefficients(64))
    return model, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_a_streamed_model_gives_the_losses_of_a_written_one_bit_for_bit(config, dtype):
    pool, found = Pool(1, 64, "hadamard"), []
    for mode in ("streamed", "materialized"):
        model = model_of(config, dtype)
        weights = hold(model, pool, mode=mode)
        weights.load(coefficients(64))
        loss = loss_of(model)
        found.append((loss(), weights.both(3, 1e-2, loss), weights.digest()))
    assert found[0] == found[1]
    assert found[0][1][0] != found[0][1][1]


@pytest.mark.parametrize("family", ["gaussian", "rademacher"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_a_model_with_a_running_sum_gives_the_losses_of_a_written_one_bit_for_bit(config, family):
    """At w_0, where the running sum of a point has no other order of additions."""
    found = []
    for mode in ("in place", "materialized"):
        model = model_of(config, torch.bfloat16)
        weights = hold(model, Pool(1, 64, family), mode=mode)
        weights.load(np.zeros(64))
        loss = loss_of(model)
        found.append([loss(), weights.both(3, 1e-2, loss), weights.both(5, 1e-2, loss)])
        weights.load(coefficients(64))
        found[-1] += [loss(), weights.digest()]
    assert found[0] == found[1]
    assert found[0][0] != found[0][1][0] != found[0][1][1]


def test_rows_made_a_few_at_a_time_give_the_same_values(monkeypatch):
    monkeypatch.setattr(lazy_module, "TILE", 32 * 7)  # seven rows of 32
    losses = []
    for mode in ("streamed", "materialized"):
        model = model_of(CONFIGS[2])  # OPT: with biases
        hold(model, Pool(1, 64, "hashed"), mode=mode).load(coefficients(64))
        losses.append(loss_of(model)())
    # a matrix product of some columns may add in another order than one of all
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("family", EVERYWHERE)
def test_tuning_streamed_ends_where_tuning_materialized_ends(family):
    pool, ends = Pool(5, 32, family), []
    for mode in ("streamed", "materialized"):
        model = tiny_llama()
        weights = hold(model, pool, mode=mode)
        weights.load(coefficients(32))
        batches = [TOKENS + k for k in range(6)]
        steps = zeroth_order_steps(weights, loss_of(model), batches, np.arange(6, dtype=np.uint32), lr=1e-4, eps=1e-3)
        ends.append((steps.scalars.tolist(), weights.c.tolist(), weights.digest()))
    assert ends[0] == ends[1]


def test_a_step_makes_every_matrix_twice_and_only_the_rows_in_use_of_an_embedding():
    model = model_of(CONFIGS[0])
    weights = hold(model, Pool(1, 64, "hadamard"))
    assert isinstance(weights, Streamed)
    weights.load(coefficients(64))
    weights.made = 0
    tokens = torch.tensor([[1, 2, 3, 2, 1]])
    weights.both(3, 1e-3, lambda: loss_of(model)(tokens))
    table = 64 * 32
    assert weights.made == 2 * (weights.layout.size - table + 3 * 32)  # three different tokens


def test_nothing_is_written_and_no_second_model_is_held():
    model = tiny_llama()
    before = {name: (t.data_ptr(), t.clone()) for name, t in model.named_parameters()}
    weights = hold(model, Pool(1, 64, "hadamard"), mode="streamed")
    weights.load(coefficients(64))
    weights.both(3, 1e-3, loss_of(model))
    assert all(isinstance(t, Lazy) for t in model.parameters())
    assert weights.digest() != weights.base_digest
    weights.restore()
    for name, t in model.named_parameters():
        assert t.data_ptr() == before[name][0]
        assert torch.equal(t, before[name][1])
    assert weights.digest() == weights.base_digest


@pytest.mark.parametrize("family", ["hadamard", "separable"])
def test_a_loss_that_fails_ends_both_points_and_leaves_the_model_usable(family):
    model, weights = streamed(family)
    loss, calls = loss_of(model), []

    def failing() -> float:
        calls.append(1)
        value = loss()
        if len(calls) == 2:
            raise ValueError("no loss here")
        return value

    before = loss()
    with pytest.raises(ValueError, match="no loss here"):
        weights.both(3, 1e-3, failing)
    assert not torch.is_inference_mode_enabled()
    weights.settle()
    assert loss() == before


def test_the_points_of_a_step_go_on_after_a_loss_that_fails_and_in_another_thread():
    model, weights = streamed()
    loss = loss_of(model)
    want = weights.both(3, 1e-3, loss)

    def failing() -> float:
        raise ValueError("no loss here")

    with pytest.raises(ValueError, match="no loss here"):
        weights.both(3, 1e-3, failing)
    assert weights.both(3, 1e-3, loss) == want
    with ThreadPoolExecutor(1) as other:
        assert other.submit(weights.both, 3, 1e-3, loss).result() == want
    assert weights.both(3, 1e-3, loss) == want


def test_a_step_keeps_no_batch_when_it_is_done():
    model, weights = streamed()
    tokens = TOKENS.clone()
    weights.both(3, 1e-3, partial(loss_of(model), tokens))
    kept = weakref.ref(tokens)
    del tokens
    assert kept() is None


def test_a_model_that_is_tuned_in_part_streams_that_part_only():
    model = tiny_llama()
    weights = hold(model, Pool(1, 64, "hadamard"), ["*.mlp.*"], mode="streamed")
    weights.load(coefficients(64))
    lazy = {name for name, t in model.named_parameters() if isinstance(t, Lazy)}
    assert lazy == {name for name, _ in tiny_llama().named_parameters() if ".mlp." in name}
    written = tiny_llama()
    hold(written, Pool(1, 64, "hadamard"), ["*.mlp.*"], mode="materialized").load(coefficients(64))
    assert loss_of(model)() == loss_of(written)()


def test_text_is_generated_with_streamed_weights():
    answers = []
    for mode in ("streamed", "materialized"):
        model = tiny_llama()
        hold(model, Pool(1, 64, "hadamard"), mode=mode).load(coefficients(64) * 10)
        answers.append(model.generate(TOKENS, max_new_tokens=5, do_sample=False, pad_token_id=0).tolist())
    assert answers[0] == answers[1]


class Given:
    """A source that copies from a real tensor."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.shape, self.dtype, self.device = values.shape, values.dtype, values.device

    def read(self, parts):
        for start, out in parts:
            out.copy_(self.values.reshape(-1)[start : start + out.numel()].view(out.shape))


@pytest.fixture
def values() -> torch.Tensor:
    return torch.arange(12.0).view(4, 3)


def lazy_of(values: torch.Tensor) -> Lazy:
    return Lazy(Given(values), Workspace())


def test_a_lazy_tensor_tells_what_it_is_without_being_made(values):
    made = []
    lazy = lazy_of(values)
    lazy.source.read = made.append
    seen = lazy.shape, lazy.dtype, lazy.device, lazy.numel(), lazy.dim()
    assert seen == ((4, 3), torch.float32, values.device, 12, 2)
    assert "Lazy" in repr(lazy)
    assert not made


def test_views_of_a_lazy_tensor_outlive_the_next_operation(values):
    lazy, other = lazy_of(values), lazy_of(-values)
    other.workspace = lazy.workspace
    view, flipped = lazy.t(), other[1:].float()
    functional.linear(torch.ones(1, 3), other)
    assert torch.equal(view, values.t())
    assert torch.equal(flipped, -values[1:])


def test_functions_on_lazy_tensors_give_what_they_give_on_real_ones(values):
    lazy, x = lazy_of(values), torch.ones(2, 3)
    assert torch.equal(functional.linear(x, lazy), functional.linear(x, values))
    assert torch.equal(functional.linear(x, lazy, torch.ones(4)), functional.linear(x, values, torch.ones(4)))
    assert torch.equal(
        functional.linear(x, torch.ones(4, 3), lazy_of(values[:, 0])), x @ torch.ones(3, 4) + values[:, 0]
    )
    tokens = torch.tensor([[3, 0], [3, 3]])
    assert torch.equal(functional.embedding(tokens, lazy), values[tokens])
    assert torch.equal(torch.cat([lazy, x]), torch.cat([values, x]))
    assert torch.equal(2 * lazy + lazy, 3 * values)
    four = torch.arange(8.0).view(2, 4)
    assert torch.equal(torch.addmm(lazy_of(torch.ones(3)), four, lazy), torch.addmm(torch.ones(3), four, values))


def test_gradients_pass_through_a_lazy_matrix(values):
    lazy, x = lazy_of(values), torch.ones(2, 3, requires_grad=True)
    y = functional.linear(x, lazy)
    functional.linear(torch.zeros(1, 3), lazy_of(-values))
    y.sum().backward()
    assert torch.equal(x.grad, values.sum(0).expand(2, 3))


def test_a_densified_model_holds_its_weights():
    (model, _), written = streamed(), tiny_llama()
    hold(written, Pool(1, 64, "hadamard"), mode="materialized").load(coefficients(64))
    densify(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, t in model.named_parameters():
        assert type(t) is nn.Parameter
        assert torch.equal(t, written.get_parameter(name))


@pytest.mark.parametrize(
    "write",
    [
        lambda model: model.load_state_dict(tiny_llama().state_dict()),
        lambda model: model.half(),
        lambda model: model.lm_head.weight.zero_(),
        lambda model: model.lm_head.weight.__setitem__(0, 1.0),
        lambda model: torch.add(torch.ones(400, 48), 1, out=model.lm_head.weight),
    ],
)
def test_writing_to_weights_that_do_not_exist_is_refused(write):
    model, _ = streamed()
    with pytest.raises((FedKSeedError, RuntimeError), match="densify"):
        write(model)


def test_threads_that_read_one_model_do_not_disturb_each_other():
    loss = loss_of(streamed()[0])
    want = [loss(TOKENS + k) for k in range(40)]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda k: loss(TOKENS + k), range(40))) == want


class Odd(nn.Module):
    """A scalar, one parameter under two names in one module, and a name with a space."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.a = self.b = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.add_module("a part", nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = getattr(self, "a part")(x)
        return self.scale * (functional.linear(input=inner, weight=self.a) @ self.b)


def test_odd_modules_are_streamed_like_any_other():
    found = []
    for mode in ("streamed", "materialized"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Odd().requires_grad_(False)
        weights = hold(model, Pool(1, 64, "hadamard"), mode=mode)
        weights.load(coefficients(64))
        found.append((model(torch.ones(1, 3)).tolist(), weights.digest()))
    assert found[0] == found[1]


def test_a_strided_parameter_and_autocast_are_refused():
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(torch.zeros(3, 4).t())
    with pytest.raises(FedKSeedError, match="weight is a strided view"):
        hold(model, Pool(1, 64, "hadamard"))
    model, weights = streamed()
    loss = loss_of(model)

    def cast() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss()

    with pytest.raises(FedKSeedError, match="can't use autocast"):
        weights.both(3, 1e-3, cast)
    assert not torch.is_autocast_enabled("cpu")


def test_settling_after_restoring_installs_again():
    _, weights = streamed()
    before = weights.digest()
    weights.restore()
    weights.move(3, 1e-3)
    weights.settle()
    assert weights.digest() not in (before, weights.base_digest)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_the_base_of_a_safetensors_folder_stays_a_mapped_file(model_folder):
    model = load_model(str(model_folder))
    weights = hold(model, Pool(1, 64, "hadamard"))
    weights.load(coefficients(64))
    weights.both(3, 1e-3, loss_of(model))
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "model.safetensors" in line]
    mapped = [tuple(int(place, 16) for place in line[0].split("-")) for line in lines]
    for entry in weights.layout.tuned:
        place = entry.tensor.data_ptr()
        assert any(first <= place < last for first, last in mapped), entry.name
