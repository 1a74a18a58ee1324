"""A model, a loss and data of a user's own, without a recipe: it learns, and what is left is an ordinary module."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedkseed as fk
from fedkseed.strategies.uploads import largest_change


def made(dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 2))


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def batches(clients: int = 4, each: int = 3, seed: int = 0):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(clients):
        x = rng.normal(size=(each, 16, 8)).astype(np.float32)
        found.append([(torch.from_numpy(part), torch.from_numpy((part.sum(1) > 0).astype(np.int64))) for part in x])
    return found


def mean(model) -> float:
    with torch.no_grad():
        return float(np.mean([float(loss(model, batch)) for own in batches(seed=1) for batch in own]))


STEPS = {
    "two points": {"rounds": 15, "steps_of": "two points", "lr": 1e-2, "eps": 1e-3, "schedule": "constant"},
    "adam": {"rounds": 5, "steps": 4, "lr": 1e-2},
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("mode", ["auto", "materialized", "in place"])
def test_it_learns_and_leaves_an_ordinary_module_that_the_adapter_makes_again(steps, mode, tmp_path):
    model, base = made().train(), made()
    tuned = fk.tune(model, loss, batches(), **STEPS[steps], mode=mode)
    assert mean(model) < mean(base) - 0.1
    assert len(tuned.reports) == STEPS[steps]["rounds"]
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert model.training
    tuned.adapter.save(tmp_path / "adapter.safetensors")
    fk.apply(base, tmp_path / "adapter.safetensors")
    for one, other in zip(model.parameters(), base.parameters(), strict=True):
        assert torch.equal(one, other)


def test_it_is_the_loop_that_the_readme_shows():
    whole = fk.tune(made(), loss, batches(), **STEPS["two points"], size=2, seed=5)
    parties = fk.Parties(made(), loss, batches(), fk.LocalWork(15, steps=20, lr=1e-2, eps=1e-3), seed=5)
    state = parties.strategy.server.init()
    for number in range(15):
        state, _ = fk.run_round(parties.strategy, state, parties.cohort(number, 2), parties.transport)
    np.testing.assert_array_equal(state.coefficients, whole.state.coefficients)
    assert parties.finish(state).tuned == whole.adapter.tuned


def test_dropout_is_off_while_two_losses_are_compared():
    one, other = (
        fk.tune(made(dropout), loss, batches(), **STEPS["two points"]).adapter.tuned for dropout in (0.0, 0.9)
    )
    assert one == other


def test_a_refusal_or_an_error_of_the_loss_leaves_the_model_as_it_was():
    model, calls = made(), iter(range(100))
    before = [parameter.clone() for parameter in model.parameters()]

    def broken(model, batch):
        if next(calls) == 50:
            raise RuntimeError("mine")
        return loss(model, batch)

    with pytest.raises(fk.FedKSeedError, match=r"your model or loss, called with .*, raised RuntimeError: mine"):
        fk.tune(model, broken, batches(), **STEPS["two points"])
    with pytest.raises(fk.FedKSeedError, match="client 1 has no batch, and every client needs one"):
        fk.tune(model, loss, [batches()[0], []])
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("mode", ["auto", "in place"])
def test_what_is_not_tuned_gets_no_gradient_and_every_switch_of_the_model_is_where_it_was(mode):
    model = made(0.5).train()
    model[2].eval()
    model[0].bias.requires_grad_(False)
    switches = [(module.training, [p.requires_grad for p in module.parameters()]) for module in model.modules()]
    for rounds in (1, 2):
        fk.tune(model, loss, batches(), rounds, steps=2, lr=1e-2, tuned=["3.*"], mode=mode)
        found = [(module.training, [p.requires_grad for p in module.parameters()]) for module in model.modules()]
        assert found == switches
        assert all(parameter.grad is None for parameter in model.parameters())

    def other(model, batch):  # depends on the first layer alone
        return model[0](batch[0]).square().mean()

    for steps_of, more, message in (
        ("adam", {"tuned": ["3.*"]}, "the loss does not depend on the tuned weights"),
        ("one point", {}, "no kind of forward-only steps is called 'one point'"),
        ("adam", {"mode": "nope"}, "no mode is called 'nope'"),
        ("adam", {"size": 5}, "a cohort of 5 can't be drawn from 4 clients"),
    ):
        with pytest.raises(fk.FedKSeedError, match=message):
            fk.tune(model, other, batches(), 2, steps_of=steps_of, lr=1e-2, eps=1e-3, **{"mode": mode, **more})
        assert [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()] == switches


def test_a_clip_holds_for_derivatives_too():
    parties = fk.Parties(made(), loss, batches(), fk.LocalWork(1, "adam", steps=2, lr=1e-4, clip=0.01))
    settings = parties.strategy.settings
    assert largest_change(settings, 0) == pytest.approx(settings.derivatives.lr * 2 * 0.01)


@pytest.mark.parametrize("work", [fk.LocalWork(1, steps=4), fk.LocalWork(1, "sgd", steps=4, lr=1e-4)], ids=str)
def test_a_pass_goes_on_from_round_to_round_and_takes_each_batch_once(work):
    parties = fk.Parties(made(), loss, [list(range(6)), list(range(5))], work)
    for number, own in enumerate(parties.batches):
        client, taken = parties.client(number), []
        for round_ in range(15):
            batches = client.batches(round_)
            taken += [next(batches).batch for _ in range(4)]
        passes = [taken[first : first + len(own)] for first in range(0, 60, len(own))]
        assert all(sorted(passed) == list(own) for passed in passes)
        assert len({tuple(passed) for passed in passes}) > 5  # of 10 or 12 that are drawn from 120 or 720 orders


class Clipped(nn.Module):
    """Writes to a weight as weight clipping does."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 24), nn.Linear(24, 2)

    def forward(self, x):
        self.first.weight.data.clamp_(-0.05, 0.05)
        return self.last(torch.tanh(self.first(x)))


class Normed(Clipped):
    def forward(self, x):
        self.first.weight.data = nn.functional.normalize(self.first.weight.data)
        return self.last(torch.tanh(self.first(x)))


class Listed(Clipped):
    """Holds a weight in a plain list."""

    def __init__(self):
        super().__init__()
        self.weights = [self.first.weight]

    def forward(self, x):
        return self.last(torch.tanh(nn.functional.linear(x, self.weights[0], self.first.bias)))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class OwnFunction(Clipped):
    """Differentiates a weight by code of its own, as straight-through estimators do."""

    def forward(self, x):
        return self.last(torch.tanh(Product.apply(x, self.first.weight)))


@pytest.mark.parametrize("steps_of", ["adam", "two points"])
@pytest.mark.parametrize("kind", [Clipped, Listed, OwnFunction])
def test_weights_that_a_module_uses_by_ways_of_its_own_are_tuned_as_those_in_memory(kind, steps_of, tmp_path):
    def model():
        torch.manual_seed(3)
        return kind()

    tuned = {}
    for mode in ("auto", "materialized"):
        *parties, held_out = batches()
        own = model()
        done = fk.tune(own, loss, parties, 2, steps=3, steps_of=steps_of, lr=1e-2, held_out=held_out, mode=mode)
        tuned[mode] = [score["loss"] for score in done.scores]
        with torch.no_grad():
            left = float(loss(own, held_out[0]))
            done.adapter.save(tmp_path / f"{mode}.safetensors")
            again = model()
            fk.apply(again, tmp_path / f"{mode}.safetensors")
            assert float(loss(again, held_out[0])) == pytest.approx(left, abs=1e-5)
    assert tuned["auto"] == pytest.approx(tuned["materialized"], abs=1e-4)


def test_a_module_that_replaces_the_memory_of_a_weight_is_refused():
    with pytest.raises(fk.FedKSeedError, match="would write to weights that exist only while they are used"):
        fk.tune(Normed(), loss, batches(), 1, steps=1, lr=1e-2)


def test_another_way_than_auto_is_refused_where_a_module_does_not_see_its_weights():
    with pytest.raises(fk.FedKSeedError, match="take mode='materialized'"):
        fk.tune(Listed(), loss, batches(), 1, steps=1, lr=1e-2, mode="streamed")


class WithTable(Clipped):
    """Makes a table when it is first needed, as rotary positions often are."""

    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(8.0) / 8
        return self.last(torch.tanh(self.first(x * self.table)))


@pytest.mark.parametrize("steps_of", ["adam", "two points"])
def test_a_table_that_a_module_makes_when_it_is_needed_can_be_differentiated_later(steps_of):
    model = WithTable()
    fk.tune(model, loss, batches(), 1, steps=2, steps_of=steps_of, lr=1e-3, held_out=batches()[0])
    loss(model, batches()[0][0]).backward()
    assert model.first.weight.grad.abs().sum() > 0
