"""A model, a loss and batches of your own, tuned in one call by four parties.

Run:  python own_model.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedkseed as fk


def loss(model, batch):  # the lower the better; a batch is whatever you put into the list below
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def accuracy(model, batch):  # any number of a model and a batch
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def tune(rounds: int = 15) -> tuple[dict[str, float], dict[str, float]]:
    """Loss and accuracy on points that no party has, before and after."""
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 2))  # any torch.nn.Module
    points = torch.randn(5, 3, 16, 8, generator=torch.Generator().manual_seed(0))
    *parties, held_out = [[(x, (x.sum(1) > 0).long()) for x in own] for own in points]  # three batches each
    tuned = fk.tune(model, loss, parties, rounds, held_out=held_out, metrics={"accuracy": accuracy})
    print("loss of the parties:", tuned.reports[0].loss, "->", tuned.reports[-1].loss)
    print(tuned.reports[-1].bytes_up, "bytes up,", tuned.reports[-1].bytes_down, "bytes down a party and round")
    tuned.adapter.save("adapter.safetensors")  # 16 KB: fk.apply(model, "adapter.safetensors") tunes the base model
    return tuned.scores[0], tuned.scores[-1]


if __name__ == "__main__":
    print("on points that no party has: {} before, {} after".format(*tune()))
