"""Rates as in ordinary training, their search, and the end of a training that diverges or learns nothing."""

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import fedkseed as fk
from fedkseed.trainer.judge import BATCHES, Judge

from .test_own_model import batches, loss, made
from .test_trainer import TEXT, arguments, pictures, same, texts, vit


def net() -> nn.Module:
    """A CNN as PyTorch initialises it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(),
            nn.Linear(32, 2),
        )  # fmt: skip


def images(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of 16 pictures, whose upper half is brighter or darker: the label."""
    rows = pictures(16 * count, seed)
    x, y = torch.stack([torch.from_numpy(row["pixel_values"]) for row in rows]), [row["labels"] for row in rows]
    return [(x[k : k + 16], torch.tensor(y[k : k + 16])) for k in range(0, len(rows), 16)]


def bert() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForSequenceClassification(BertConfig(**TEXT, num_labels=2))


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    rows = texts(16 * count, seed)
    ids, y = torch.tensor([row["input_ids"] for row in rows]), torch.tensor([row["labels"] for row in rows])
    return [{"input_ids": ids[k : k + 16], "labels": y[k : k + 16]} for k in range(0, len(rows), 16)]


def of_model(model, batch):
    return model(**batch).loss


def hits(model, batch) -> float:
    logits, labels = (
        (model(batch[0]), batch[1]) if isinstance(batch, tuple) else (model(**batch).logits, batch["labels"])
    )
    return float((logits.argmax(-1) == labels).float().mean())


@pytest.mark.parametrize("kind", ["an MLP", "a CNN", "a BERT"])
def test_it_learns_at_the_first_try(kind):
    make, of, draw, rounds = {
        "an MLP": (made, loss, lambda count, seed: batches(1, count, seed)[0], 10),
        "a CNN": (net, loss, images, 2),
        "a BERT": (bert, of_model, sentences, 3),
    }[kind]
    own = draw(8, 0)
    tuned = fk.tune(make(), of, [own[:4], own[4:]], rounds, held_out=draw(6, 1), metrics={"accuracy": hits})
    assert [*tuned.scores[0]] == ["loss", "accuracy"]
    assert len(tuned.scores) == rounds + 1
    assert tuned.scores[0]["accuracy"] < 0.75
    assert tuned.scores[-1]["accuracy"] > 0.9  # by chance 0.5 with a standard error of 0.05


@pytest.mark.parametrize(("steps_of", "lr"), [("sgd", 1e-2), ("sgd", 1e-1), ("adam", 1e-3), ("adam", 1e-2)])
@pytest.mark.parametrize("kind", ["MLP", "CNN"])
def test_a_rate_does_what_it_does_in_ordinary_training(kind, steps_of, lr):
    model, own = (made(), batches(1, 8)[0]) if kind == "MLP" else (net(), images(8, 0))
    ordinary = copy.deepcopy(model)
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[steps_of](ordinary.parameters(), lr)
    for step in range(16):
        optimizer.zero_grad()
        loss(ordinary, own[step % 8]).backward()
        optimizer.step()
    fk.tune(model, loss, [own], 1, steps_of=steps_of, steps=16, lr=lr, schedule="constant")
    before, ours, theirs = (mean_loss(each, own) for each in (net() if kind == "CNN" else made(), model, ordinary))
    assert 0.5 * (before - theirs) < before - ours < 2 * (before - theirs)


@torch.no_grad()
def mean_loss(model, own) -> float:
    return sum(float(loss(model, batch)) for batch in own) / len(own)


def test_a_training_that_diverges_says_so_and_leaves_the_base_model():
    model, own = net(), images(8, 0)
    text = r"the training diverges: after \d+ rounds the loss on 8 of the clients' batches is .* no round's model was"
    with pytest.raises(fk.DivergedError, match=text) as diverged:
        fk.tune(model, loss, [own], 5, steps_of="sgd", lr=50.0)
    assert "Take a smaller lr than 50, such as 5, or lr='search'" in str(diverged.value)
    assert diverged.value.best is None
    assert same(model, net())


def test_the_error_of_a_training_that_diverges_has_its_best_model():
    model, own = net(), images(8, 0)
    parties = fk.Parties(model, loss, [own], fk.LocalWork(4, "adam", steps=8, lr=3e-3))
    judge, state = Judge(parties, 3e-3), parties.strategy.server.init()
    for _ in range(2):
        state, report = fk.run_round(parties.strategy, state, [0], parties.transport)
        judge.note(state, report)
    far = replace(state, coefficients=state.coefficients * -1e3, round=5)
    for _ in range(2):
        judge.note(far, replace(report, loss=9.0))
    with pytest.raises(
        fk.DivergedError, match=r"after 5 rounds .* the best one, after 2 rounds with a loss of 0\."
    ) as error:
        judge.note(far, replace(report, loss=math.nan))
    parties.release()
    assert same(model, net())
    error.value.best.apply(model)
    assert mean_loss(model, own) < mean_loss(net(), own) - 0.1


@pytest.mark.parametrize("steps_of", ["adam", "two points"])
def test_a_loss_that_is_not_finite_is_no_success(steps_of):
    own, seen = images(8, 0), []

    def breaks(model, batch):
        seen.append(1)
        return loss(model, batch) * (math.nan if len(seen) > 40 else 1.0)

    with pytest.raises(fk.FedKSeedError, match="the base model's loss is nan on batch 0 of client 0, "):
        fk.tune(net(), lambda model, batch: loss(model, batch) * math.nan, [own], steps_of=steps_of)
    model = net()
    with pytest.raises(fk.DivergedError, match="after 4 rounds the loss on 8 of the clients' batches is nan"):
        fk.tune(model, breaks, [own], 4, steps_of=steps_of, steps=8, lr=1e-3, eps=1e-3)
    assert same(model, net())


def test_a_rate_that_moves_nothing_and_steps_that_are_left_out_are_said():
    own = images(8, 0)
    with pytest.warns(UserWarning, match=r"hardly anything was learned: .*Take a larger lr than 3e-07"):
        fk.tune(net(), loss, [own], 3, steps_of="two points", lr=3e-7, eps=1e-3)
    spoiled = [*own, (own[0][0] * math.nan, own[0][1])]
    with pytest.warns(UserWarning, match="6 steps of the training had no finite loss"):
        fk.tune(net(), loss, [spoiled], 6, steps=9, lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fk.tune(net(), loss, [own], 1, steps=2, lr=1e-9)  # too few to expect anything


def test_the_search_is_of_batches_of_many_clients_and_leaves_the_base_model():
    parties = fk.Parties(made(), loss, batches(12, 2), fk.LocalWork(1, "adam", steps=4, lr=1.0))
    judge = Judge(parties)
    assert judge.places == [(client, 0) for client in range(BATCHES)]
    judge.search_rate("adam", 4, None)
    assert 1e-3 < judge.lr < 1.0
    assert parties.strategy.settings.derivatives.steps == 4
    assert judge.loss(parties.strategy.server.init()) == judge.base
    few = Judge(fk.Parties(made(), loss, [batches()[0], batches()[1][:1]], fk.LocalWork(1)))
    assert few.places == [(0, 0), (1, 0), (0, 1), (0, 2)]


def test_a_search_goes_down_where_all_rates_diverge():
    own = images(8, 0)
    tuned = fk.tune(net(), lambda model, batch: 1e4 * loss(model, batch), [own], 2, steps_of="sgd")
    assert tuned.lr < 1e-4
    assert tuned.reports[-1].loss < tuned.reports[0].loss


def test_trainer_searches_a_rate_and_ends_where_it_diverges(tmp_path):
    searched = fk.Trainer(vit(), pictures(128, 0), args=arguments(tmp_path, 20, 5e-5), lr="search")
    searched.train()
    rate = searched.training.factor * 5e-5
    assert rate > 5e-4
    assert searched.state.log_history[0]["learning_rate"] == pytest.approx(rate)
    assert searched.reports[-1].loss < searched.reports[0].loss / 2
    model = vit()
    with pytest.raises(fk.DivergedError, match="Take a smaller lr than 100, such as 10, or lr='search'"):
        fk.Trainer(model, pictures(128, 0), args=arguments(tmp_path, 40, 100.0), steps_of="sgd").train()
    assert same(model, vit())
