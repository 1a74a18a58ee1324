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


@torch.no_grad()
def mean(model, batches) -> float:
    return sum(float(loss(model, batch)) for batch in batches) / len(batches)


def tune(rounds: int = 15) -> tuple[float, float]:
    """The loss on points that no party has, before and after."""
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 2))  # any torch.nn.Module
    points = torch.randn(5, 3, 16, 8, generator=torch.Generator().manual_seed(0))
    *parties, held_out = [[(x, (x.sum(1) > 0).long()) for x in own] for own in points]  # three batches each
    before = mean(model, held_out)
    tuned = fk.tune(model, loss, parties, fk.LocalWork(rounds, steps=20, lr=1e-2, eps=1e-3))
    print("loss of the parties:", tuned.reports[0].loss, "->", tuned.reports[-1].loss)
    print(tuned.reports[-1].bytes_up, "bytes up,", tuned.reports[-1].bytes_down, "bytes down a party and round")
    tuned.adapter.save("adapter.safetensors")  # 16 KB: fk.apply(model, "adapter.safetensors") tunes the base model
    return before, mean(model, held_out)


if __name__ == "__main__":
    print("loss on points that no party has: {:.3f} before, {:.3f} after".format(*tune()))
