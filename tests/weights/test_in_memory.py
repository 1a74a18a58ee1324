"""A model as a function of K numbers, in every architecture, type and mode."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fedkseed import FedKSeedError, Pool, hold, materialize
from fedkseed.models.quantised import quantise
from fedkseed.weights import streamed
from fedkseed.weights.base import Pooled
from fedkseed.weights.in_memory import Materialized
from fedkseed.weights.layout import Layout
from fedkseed.weights.lazy import Lazy
from fedkseed.weights.streamed import InPlace

from ..conftest import CONFIGS, EVERYWHERE, tiny_llama
from .test_streamed import coefficients


def values(weights: Pooled) -> list[torch.Tensor]:
    """The tuned weights as the model has them now."""
    found = [getattr(*entry.places[0]) for entry in weights.layout.tuned]
    return [tensor.whole() if isinstance(tensor, Lazy) else tensor.data for tensor in found]


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_any_architecture_is_laid_out_and_tuned(config):
    model = AutoModelForCausalLM.from_config(config).eval()
    layout = Layout(model)
    unique = {t.data_ptr() for t in model.parameters()}
    assert len(layout.entries) == len(unique)
    assert [e.name for e in layout.entries] == sorted(e.name for e in layout.entries)
    assert layout.size == sum(t.numel() for t in model.parameters())
    tokens = torch.arange(8)[None]
    with torch.inference_mode():
        before = model(tokens).logits
        hold(model, Pool(1, 64, "hadamard")).load(coefficients(64) * 100)
        assert not torch.equal(model(tokens).logits, before)


def test_tied_tensors_are_tuned_once_under_their_smallest_name():
    model = tiny_llama()
    names = [entry.name for entry in Layout(model).entries]
    assert "lm_head.weight" in names
    assert "model.embed_tokens.weight" not in names
    weights = hold(model, Pool(1, 64, "hadamard"))
    weights.load(coefficients(64))
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_a_part_moves_along_the_same_directions_as_the_whole():
    whole, part = tiny_llama(), tiny_llama()
    hold(whole, Pool(1, 64, "hashed")).load(coefficients(64))
    hold(part, Pool(1, 64, "hashed"), ["*.mlp.*"]).load(coefficients(64))
    base = dict(tiny_llama().named_parameters())
    for (name, a), (_, b) in zip(whole.named_parameters(), part.named_parameters(), strict=True):
        assert torch.equal(b, a if ".mlp." in name else base[name])


def test_a_pattern_may_name_either_of_two_tied_tensors():
    assert [e.name for e in Layout(tiny_llama(), ["*embed_tokens*"]).tuned] == ["lm_head.weight"]


@pytest.mark.parametrize(
    ("patterns", "message"), [(["*.attention.*"], "no parameter's name fits the pattern"), ([], "no tuned tensors")]
)
def test_a_model_with_no_tuned_tensors_is_refused(patterns, message):
    with pytest.raises(FedKSeedError, match=message):
        Layout(tiny_llama(), patterns)


@pytest.mark.parametrize("patterns", [["[" * 40_000], ["*a" * 200], [f"*{k}" for k in range(1000)]])
def test_patterns_of_a_server_are_bounded_before_one_is_translated(patterns, monkeypatch):
    monkeypatch.setattr("fedkseed.weights.layout.fnmatchcase", None)
    with pytest.raises(FedKSeedError, match="at most 256 patterns of 256 characters can have wildcards, got"):
        Layout(tiny_llama(), patterns)


def test_any_number_of_names_as_they_are_can_be_given():
    names = [entry.name for entry in Layout(tiny_llama()).entries]
    assert [entry.name for entry in Layout(tiny_llama(), names * 1000).tuned] == names
    with pytest.raises(FedKSeedError, match="no parameter's name fits the pattern 'xxx") as refused:
        Layout(tiny_llama(), [*names, "x" * 40_000])
    assert len(str(refused.value)) < 500


def test_parameters_that_overlap_in_part_are_refused():
    memory = torch.zeros(10)
    module = nn.Module()
    module.a, module.b = nn.Parameter(memory[:6]), nn.Parameter(memory[4:])
    with pytest.raises(FedKSeedError, match="overlapping"):
        Layout(module)


def test_neighbouring_views_of_one_memory_are_two_tensors():
    memory = torch.zeros(10)
    module = nn.Module()
    module.a, module.b = nn.Parameter(memory[:6]), nn.Parameter(memory[6:])
    assert [e.name for e in Layout(module).entries] == ["a", "b"]


def test_one_bit_of_one_weight_changes_the_digest():
    model = tiny_llama()
    before = Layout(model).digest()
    assert Layout(tiny_llama()).digest() == before
    weight = model.model.layers[1].mlp.up_proj.weight.data
    weight.view(torch.int32)[3, 5] ^= 1
    assert Layout(model).digest() != before


def test_the_digest_tells_types_apart():
    assert Layout(tiny_llama()).digest() != Layout(tiny_llama().bfloat16()).digest()


@pytest.mark.parametrize("family", EVERYWHERE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_modes_and_materialize_give_the_same_bits_for_the_same_coefficients(dtype, family):
    pool, c = Pool(5, 32, family), coefficients(32)
    digests = set()
    for mode in ("materialized", "in place", "streamed"):
        weights = hold(tiny_llama().to(dtype), pool, mode=mode)
        base = [entry.tensor.clone() for entry in weights.layout.tuned]
        weights.load(c)
        digests.add(weights.digest())
        for entry, w0, w in zip(weights.layout.tuned, base, values(weights), strict=True):
            out = torch.empty_like(w0)
            materialize(w0, pool, c, out, tensor=entry.number)
            assert torch.equal(out, w)
    assert len(digests) == 1


@pytest.mark.parametrize("mode", ["materialized", "in place"])
@pytest.mark.parametrize("family", EVERYWHERE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_after_200_steps_the_model_is_that_of_base_and_coefficients(dtype, family, mode):
    """The client's model equals materialize(w_0, c + its own steps), bit for bit."""
    pool, rng = Pool(5, 32, family), np.random.default_rng(1)
    weights = hold(tiny_llama().to(dtype), pool, mode=mode)
    bases = [entry.tensor.clone() for entry in weights.layout.tuned]
    weights.load(coefficients(32))
    for _ in range(200):
        j = int(rng.integers(32))
        weights.shift(j, 1e-3)
        weights.shift(j, -1e-3)
        weights.move(j, float(rng.normal()) * 1e-4)
    weights.settle()
    for entry, base, w in zip(weights.layout.tuned, bases, values(weights), strict=True):
        want = torch.empty_like(base)
        materialize(base, pool, weights.c, want, tensor=entry.number)
        assert torch.equal(w, want)


@pytest.mark.parametrize("family", EVERYWHERE)
def test_the_running_sum_stays_close_to_the_sum_it_stands_for(family):
    """Between two settles s differs from Σ c_j z_j by the rounding of its own steps only."""
    pool, rng = Pool(5, 32, family), np.random.default_rng(1)
    weights = hold(tiny_llama(), pool, mode="in place")
    assert isinstance(weights, InPlace)
    weights.load(coefficients(32))
    for _ in range(200):
        weights.move(int(rng.integers(32)), float(rng.normal()) * 1e-4)
    for number, total in weights.sums.items():
        exact = torch.empty_like(total)
        materialize(torch.zeros_like(total), pool, weights.c, exact, tensor=number)
        # 200 roundings of at most half a unit in the last place add up like a random walk; 4 sigma, doubled
        allowed = 8 * 200**0.5 * 2**-25 * float(exact.abs().max())
        assert float((total - exact).abs().max()) < allowed


@pytest.mark.parametrize("mode", ["materialized", "in place", "streamed"])
def test_a_perturbation_leaves_nothing_behind(mode):
    weights = hold(tiny_llama().half(), Pool(5, 32, "rademacher"), mode=mode)
    weights.load(coefficients(32))
    before = weights.digest()
    for j in range(32):
        weights.shift(j, 0.1)
        weights.shift(j, -0.1)
    weights.settle()
    assert weights.digest() == before


def test_a_step_writes_the_weights_twice(monkeypatch):
    written, write = [], Materialized._use
    monkeypatch.setattr(Materialized, "_use", lambda self, *sums: written.append(sums) or write(self, *sums))
    weights = hold(tiny_llama(), Pool(5, 32, "hadamard"), mode="materialized")
    weights.load(np.zeros(32))
    written.clear()
    for j in range(10):
        weights.shift(j, 1e-3)
        weights.shift(j, -1e-3)
        weights.move(j, 1e-4)
    assert len(written) == 20


@pytest.mark.parametrize("mode", ["materialized", "in place"])
def test_restore_gives_back_the_base_model_bit_for_bit(mode):
    weights = hold(tiny_llama(), Pool(5, 32, "gaussian"), mode=mode)
    weights.load(coefficients(32))
    weights.restore()
    assert weights.digest() == weights.base_digest
    weights.settle()
    assert weights.digest() == weights.base_digest


class Passes:
    """The number of directions of each sum that is added to the running one."""

    def __init__(self, monkeypatch) -> None:
        self.terms, add = list[int](), InPlace._add

        def counted(weights, total, entries):
            if entries:
                self.terms.append(len(total._terms()[0]))
            add(weights, total, entries)

        monkeypatch.setattr(InPlace, "_add", counted)

    def taken(self) -> list[int]:
        """The passes since the last call, without those of single steps."""
        found = [terms for terms in self.terms if terms > 1]
        self.terms.clear()
        return found


def in_turns(weights: Pooled, c: np.ndarray, clients: int) -> list[tuple[list[float], str]]:
    """Losses and digests of clients that take turns: each syncs, takes three steps, and is looked at."""
    found = []
    for client in range(clients):
        weights.load(c)
        total = [float(values(weights)[0].double().sum())]
        for j in range(3):
            weights.shift(client + j, 1e-2)
            total.append(float(values(weights)[0].double().sum()))
            weights.move(client + j, 1e-3)
        weights.settle()
        found.append((total, weights.digest().hex() if client == clients - 1 else ""))
    return found


@pytest.mark.parametrize("quantised", [False, True])
def test_clients_that_take_turns_sum_all_directions_once_a_round(monkeypatch, quantised):
    """The first round shows that they do; the model that a client ends with is made when somebody asks for it."""
    passes, pool, made = Passes(monkeypatch), Pool(5, 32, "gaussian"), tiny_llama()
    weights = hold(quantise(made, "Q8_0") if quantised else made, pool)
    assert isinstance(weights, InPlace)
    first, second = coefficients(32), 2 * coefficients(32)
    one = in_turns(weights, first, 4)
    assert passes.taken() == [32, 32, 32], "by the first two clients, and for the digest of the last"
    two = in_turns(weights, second, 4)
    assert passes.taken() == [32, 32]
    weights.load(second)
    assert passes.taken() == []
    assert weights.again == 0
    monkeypatch.setattr(streamed, "available", lambda device: 8000)  # enough for norms alone
    poor = hold(quantise(tiny_llama(), "Q8_0") if quantised else tiny_llama(), pool)
    assert [in_turns(poor, first, 4), in_turns(poor, second, 4)] == [one, two]
    assert passes.taken() == [32] * 10
    others = sum(entry.tensor.numel() for entry in weights.layout.tuned if entry.tensor.numel() >= 1000)
    assert isinstance(poor, InPlace)
    assert poor.again == 5 * others


def test_a_client_alone_sums_all_directions_once_a_round_and_keeps_no_copy(monkeypatch):
    passes, weights = Passes(monkeypatch), hold(tiny_llama(), Pool(5, 32, "rademacher"))
    assert isinstance(weights, InPlace)
    for round_ in range(1, 4):
        weights.load(round_ * coefficients(32))
        weights.load(round_ * coefficients(32))  # its gain is measured on the same model before
        weights.move(3, 1e-3)
        weights.settle()
    assert passes.taken() == [32] * 3
    assert not weights._kept


def test_a_running_sum_leaves_the_models_own_weights_alone():
    model = tiny_llama().bfloat16()
    before = {name: (t.data_ptr(), t.clone()) for name, t in model.named_parameters()}
    weights = hold(model, Pool(1, 64, "gaussian"))
    weights.load(coefficients(64))
    weights.both(3, 1e-3, lambda: 0.0)
    weights.move(3, 1e-3)
    weights.settle()
    weights.digest()
    weights.restore()
    for name, tensor in model.named_parameters():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])
    weights.load(coefficients(64))
    weights.keep()
    kept = hold(tiny_llama().bfloat16(), Pool(1, 64, "gaussian"), mode="materialized")
    kept.load(coefficients(64))
    assert Layout(model).digest() == kept.digest()


def test_an_unknown_mode_and_broken_coefficients_are_refused():
    with pytest.raises(FedKSeedError, match="no mode is called 'flooded'"):
        hold(tiny_llama(), Pool(5, 32, "gaussian"), mode="flooded")
    weights = hold(tiny_llama(), Pool(5, 32, "hadamard"))
    before = weights.digest()
    with pytest.raises(FedKSeedError, match="finite"):
        weights.load(np.full(32, np.nan))
    assert weights.digest() == before
