"""Arguments of `tune` and `Trainer` that a PyTorch user gets wrong, and models as PyTorch users have them."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import fedkseed as fk

from .test_own_model import batches, loss, made
from .test_trainer import arguments, pictures, same, vit

QUICK = {"rounds": 1, "steps": 2, "lr": 1e-3}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"lr": -1}, "lr must be a positive number, got -1"),
        ({"lr": 0}, "lr must be a positive number, got 0"),
        ({"lr": True}, "lr must be a positive number, got True"),
        ({"lr": float("nan")}, "lr must be a positive number, got nan"),
        ({"lr": "1e-3"}, "lr is a number or 'search', got '1e-3'"),
        ({"lr": None}, "lr must be a positive number, got None"),
        ({"eps": -1}, "eps must be a positive number, got -1"),
        ({"eps": "auto"}, "eps is a number or 'search', got 'auto'"),
        ({"rounds": 1.5}, "rounds must be a whole number, got 1.5"),
        ({"rounds": "3"}, "rounds must be a whole number, got '3'"),
        ({"rounds": fk.LocalWork(3)}, "rounds must be a whole number, got LocalWork"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps_of": "adamw"}, "no kind of local steps is called 'adamw'; choose one of sgd, adam"),
        ({"size": 2.0}, "a cohort of 2.0 can't be drawn from 4 clients"),
        ({"size": 9}, "a cohort of 9 can't be drawn from 4 clients"),
        ({"metrics": {"accuracy": loss}}, "metrics are computed on held_out: give batches that no client has"),
        ({"held_out": []}, "held_out has no batch"),
    ],
    ids=lambda case: case if isinstance(case, str) else "-".join(case),
)
def test_an_argument_that_is_wrong_is_named(more, text):
    with pytest.raises(fk.FedKSeedError, match=text):
        fk.tune(made(), loss, batches(), **QUICK | more)


@pytest.mark.parametrize("steps_of", ["adam", "two points"])
@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (
            lambda m, b: cross_entropy(m(b[0]), b[1], reduction="none"),
            r"a tensor of \(16,\) float32, and must .*loss.mean.* with batch 0 of client 0",
        ),
        (lambda m, b: None, "returned a NoneType, and must return a tensor of one number"),
        (lambda m, b: (loss(m, b), m(b[0])), "returned a tuple"),
        (lambda m, b: (m(b[0]).argmax(-1) == b[1]).sum(), r"a tensor of \(\) int64"),
        (lambda m, b: type("Output", (), {"loss": loss(m, b)})(), "returned a Output, .*return its .loss"),
    ],
)
def test_a_loss_that_is_no_number_gets_a_sentence(returned, text, steps_of):
    with pytest.raises(fk.FedKSeedError, match=text):
        fk.tune(made(), returned, batches(), **QUICK, steps_of=steps_of)


def test_a_number_without_a_gradient_is_for_forward_passes():
    def number(model, batch):
        return loss(model, batch).item()

    with pytest.raises(
        fk.FedKSeedError, match=r"returned a float.*leave \.item\(\) and float\(\) out, or take steps_of"
    ):
        fk.tune(made(), number, batches(), **QUICK)
    fk.tune(made(), number, batches(), **QUICK, steps_of="two points")
    fk.tune(made(), lambda model, batch: loss(model, batch)[None], batches(), **QUICK)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Linear, "give a torch.nn.Module and a loss, a function of .* got a type and a function"),
        (made().forward, "got a method and a function"),
        (nn.LazyLinear(2), "the parameter weight has no values yet; run the model on a batch, or load its weights"),
        (nn.Linear(8, 2, device="meta"), "the parameter weight has no values yet"),
        (nn.ReLU(), "the model ReLU has no parameters"),
        (
            nn.Linear(8, 2).double(),
            r"weights must be float32, bfloat16 or float16, got torch.float64; take model.float\(\)",
        ),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_what_is_no_model_with_weights_gets_a_sentence(model, text):
    with pytest.raises(fk.FedKSeedError, match=text):
        fk.tune(model, loss, [[(x.double(), y) for x, y in own] for own in batches()] if "64" in text else batches())


def at(client: int, number: int, change: Any) -> list[Any]:
    """Batches of clients, one of them changed."""
    own = batches()
    own[client][number] = change(*own[client][number])
    return own


ROW = r"a tuple of a tensor of \(16, 8\) float32, a tensor of \(16,\) int64"


@pytest.mark.parametrize(
    ("more", "text", "cause"),
    [
        (
            {"batches": at(2, 1, lambda x, y: (x[:, :7], y))},
            r"your model or loss, called with batch 1 of client 2, a tuple of a tensor of \(16, 7\) float32, .* raised "
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
            RuntimeError,
        ),
        ({"batches": at(0, 0, lambda x, y: (x.long(), y))}, r"of \(16, 8\) int64, .* the same dtype", RuntimeError),
        ({"batches": at(1, 0, lambda x, y: (x, y + 5))}, "batch 0 of client 1, .* IndexError: Target", IndexError),
        ({"batches": at(1, 0, lambda x, y: (x.to("meta"), y))}, r"\(16, 8\) float32 on meta, ", RuntimeError),
        ({"loss": lambda model, x, y: y}, f"batch 0 of client 0, {ROW}, raised TypeError: .*missing 1 req", TypeError),
        ({"batches": {"north": batches()[0], "south": at(1, 2, lambda x, y: (y, y))[1]}}, "client south", RuntimeError),
        ({"held_out": at(0, 1, lambda x, y: (y, y))[0]}, "called with batch 1 of held_out", RuntimeError),
        (
            {"held_out": batches()[0], "metrics": {"third": lambda model, batch: batch[2]}},
            f"your metric third, called with batch 0 of held_out, {ROW}, raised IndexError: tuple index out of range",
            IndexError,
        ),
        (
            {"batches": DataLoader([torch.zeros(8), torch.zeros(7)], batch_size=2)},
            "your dataset or collate_fn, asked for batch 0 of client 0, raised RuntimeError: stack expects",
            RuntimeError,
        ),
        (
            {"loss": lambda model, batch: (out := model(batch[0]).exp()).square().sum() + out.mul_(2).sum()},
            "the pass back from the loss raised an error: one of the variables .* modified by an inplace operation",
            RuntimeError,
        ),
    ],
)  # fmt: skip
def test_an_error_in_what_the_user_gave_says_whose_it_is_and_what_it_was_called_with(more, text, cause):
    with pytest.raises(fk.FedKSeedError, match=text) as error:
        fk.tune(**{"model": made(), "loss": loss, "batches": batches()} | QUICK | more)
    assert type(error.value.__cause__) is cause


def test_an_error_in_a_later_round_says_its_batch():
    own = [[*batches(1, 12)[0]] for _ in range(3)]
    own[2][10] = own[2][10][0][:, :7], own[2][10][1]
    with pytest.raises(fk.FedKSeedError, match="called with batch 10 of client 2, "):  # not one that is looked at first
        fk.tune(made(), loss, own, 1, steps=12, lr=1e-3)


def test_a_training_says_what_it_understood_and_how_it_goes(capsys):
    rows = batches()
    fk.tune(made(), loss, rows[0] * 2, 2, steps=4, held_out=rows[1], metrics={"accuracy": hits})
    first, *searched, base, one, two, three, four, last = capsys.readouterr().out.strip().splitlines()
    assert first == (
        "1 client (one list, or one DataLoader) with 6 batches in all, the first a tuple of a tensor of (16, 8) "
        "float32, a tensor of (16,) int64; 266 of 266 weights are tuned"
    )
    assert all(line.startswith("tried lr ") for line in searched[:-1])
    assert searched[-1].startswith("lr = ")
    assert [line.split(":")[0] for line in (base, two, four)] == [f"held_out after {k} rounds" for k in range(3)]
    assert all(", accuracy " in line for line in (base, two, four))
    assert (one[:13], three[:13]) == ("round   1 of ", "round   2 of ")
    assert last.startswith("the loss on 6 of the clients' batches is ")
    assert "say little" not in last
    frozen = made()
    frozen[0].requires_grad_(False)
    fk.tune(frozen, loss, rows, **QUICK, on_round=lambda report, scores: print("mine"))
    first, second, last = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("4 clients with 12 batches in all, ")
    assert first.endswith("; 50 of 266 weights are tuned")
    assert second == "mine"
    assert last.endswith("; losses of clients' own batches say little about other rows, so hold some out to score on")


def test_a_loss_on_held_out_rows_that_rises_is_said():
    wrong = [(x, 1 - y) for x, y in batches(1, 3, 1)[0]]
    with pytest.warns(UserWarning, match=r"the loss on held_out was lowest after 0 rounds, .* take fewer"):
        fk.tune(made(), loss, batches(), 2, steps=8, lr=1e-2, held_out=wrong)


def hits(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


class Shared(nn.Module):
    """Two layers of one matrix, and a parameter of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.second.weight = self.first.weight
        self.order = nn.Parameter(torch.arange(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x[:, self.order]).tanh()))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.view(-1, 2, 4))[0][:, -1])


MODELS: dict[str, Any] = {
    "shared and whole numbers": Shared,
    "an LSTM": Recurrent,
    "a transformer layer": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(8, 2)
    ),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 2)),
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)),
    "bfloat16": lambda: made().bfloat16(),
}


def test_batch_norm_that_has_seen_no_batch_is_named():
    model = MODELS["batch norm"]()
    with pytest.warns(UserWarning, match="^1 has seen no batch, and steps use its running means as they are: first"):
        fk.tune(model, loss, batches(), **QUICK)
    model.train()(batches()[0][0][0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fk.tune(model, loss, batches(), **QUICK)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"max_norm": 1.0, "epochs": 2}, "fedkseed.tune has no argument max_norm, epochs; see help"),
        ({"metrics": loss, "held_out": batches()[0]}, "metrics is a function; give functions by name"),
        (
            {"metrics": {"spread": lambda m, b: m(b[0])}, "held_out": batches()[0]},
            r"the metric spread gave a tensor of \(16, 2\) float32, and must give one number",
        ),
        ({"held_out": batches()[0][0]}, r"held_out is a tuple of .*, one batch; put it into a list"),
    ],
    ids=lambda case: case if isinstance(case, str) else "-".join(case),
)
def test_what_pytorch_users_type_is_named(more, text):
    with pytest.raises(fk.FedKSeedError, match=text):
        fk.tune(made(), loss, batches(), **QUICK | more)


def test_a_text_is_one_pattern_and_all_names_are_listed():
    assert fk.tune(made(), loss, batches(), **QUICK, tuned="3.*").adapter.patterns == ("3.*",)
    assert {*fk.__all__} <= {*dir(fk)}


def test_an_adapter_is_applied_without_a_file_and_to_its_base_alone():
    tuned = fk.tune(model := made(), loss, batches(), **QUICK)
    assert same(fk.apply(made(), tuned.adapter), model)
    with pytest.raises(fk.FedKSeedError, match="it wants the Sequential with the weights that it had before"):
        fk.apply(model, tuned.adapter)


@pytest.mark.filterwarnings("ignore:hardly anything was learned", "ignore:.* has seen no batch")
@pytest.mark.parametrize("steps_of", ["adam", "two points"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_of_pytorch_users_learn_and_their_adapters_make_them_again(kind, steps_of):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[kind]()
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    own = [[(x.to(dtype), y) for x, y in part] for part in batches(2)]
    lr = 1e-2 if steps_of == "adam" else 3e-3
    tuned = fk.tune(model, loss, own, 3, steps_of=steps_of, lr=lr, eps=1e-2 if kind == "bfloat16" else 1e-3)
    if steps_of == "adam":
        assert tuned.reports[-1].loss < tuned.reports[0].loss
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert any(not torch.equal(after[name], base[name]) for name in base)
    model.load_state_dict(base)
    tuned.adapter.apply(model)
    assert all(torch.equal(tensor, after[name]) for name, tensor in model.state_dict().items())


def test_frozen_parameters_stay_unless_they_are_named():
    model = made()
    model[0].requires_grad_(False)
    before, head = model[0].weight.clone(), model[3].weight.clone()
    tuned = fk.tune(model, loss, batches(), **QUICK)
    assert tuned.adapter.patterns == ("3.weight", "3.bias")
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(model[3].weight, head)
    named = made()
    named[0].requires_grad_(False)
    fk.tune(named, loss, batches(), **QUICK, tuned=["*"])
    assert not torch.equal(named[0].weight, before)
    frozen = made().requires_grad_(False)
    with pytest.raises(fk.FedKSeedError, match="all weights of the model Sequential are frozen "):
        fk.tune(frozen, loss, batches(), **QUICK)
    assert fk.tune(frozen, loss, batches(), **QUICK, tuned="*").adapter.patterns == ("*",)


def test_a_compiled_model_is_tuned_as_the_one_that_it_compiles():
    model, plain = made(), made()
    fk.tune(torch.compile(model, backend="eager"), loss, batches(), **QUICK)
    fk.tune(plain, loss, batches(), **QUICK)
    assert torch.equal(model[0].weight, plain[0].weight)


def test_rounds_are_scored_on_rows_that_no_client_has_and_said():
    said = []
    tuned = fk.tune(
        made(), loss, batches(), 3, steps=4, lr=1e-2,
        held_out=[*batches(1, 2, 1)[0], (torch.randn(4, 8), torch.zeros(4).long())],
        metrics={"rows": lambda model, batch: len(batch[1])}, on_round=lambda *both: said.append(both),
    )  # fmt: skip
    assert [scores for _, scores in said] == tuned.scores[1:]
    assert [report for report, _ in said] == tuned.reports
    assert tuned.scores[0]["rows"] == (16 * 16 * 2 + 4 * 4) / 36  # a mean over rows, not over batches
    assert tuned.scores[-1]["loss"] < tuned.scores[0]["loss"]
    assert fk.tune(made(), loss, batches(), **QUICK).scores == []


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"tokenizer": None}, "fedkseed.Trainer has no argument tokenizer; see help"),
        ({"optimizers": None, "model_init": vit}, "has no argument model_init, optimizers"),
        ({"lr": 1e-3}, "lr is 'search' or None, got 0.001; give a number to args.learning_rate"),
        ({"lr": "auto"}, "lr is a number or 'search', got 'auto'"),
        ({"local_steps": 1.5}, "local_steps must be a whole number, got 1.5"),
    ],
    ids=lambda case: case if isinstance(case, str) else "-".join(case),
)
def test_trainer_refuses_what_it_has_not_when_it_is_made(more, text, tmp_path):
    with pytest.raises(fk.FedKSeedError, match=text):
        fk.Trainer(vit(), pictures(8, 0), args=arguments(tmp_path, 1, 1e-3), **more)
