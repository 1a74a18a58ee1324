"""A model of transformers, or one of your own, with `fedkseed.Trainer`. Run:  python trainer.py

A vision transformer says whether the upper or the lower half of a small picture is the brighter one: by forward passes
alone, by derivatives, and as two hospitals that share 4 KB a round. A plain module with a loss of its own does, too.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

import fedkseed as fk

ARGS: dict[str, Any] = {
    "output_dir": "tuned", "per_device_train_batch_size": 32, "lr_scheduler_type": "constant", "logging_steps": 20,
    "save_strategy": "no",
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 48, "num_labels": 2,
}  # fmt: skip


def pictures(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows, as any dataset of transformers has them: what the model takes, by name."""
    draw = torch.Generator().manual_seed(seed)
    pixels, labels = torch.randn(count, 1, 8, 8, generator=draw) / 2, torch.randint(2, (count,), generator=draw)
    pixels[:, :, :4] += 1 - 2 * labels[:, None, None, None]
    return [{"pixel_values": x, "labels": int(y)} for x, y in zip(pixels, labels, strict=True)]


def vit() -> Any:
    return ViTForImageClassification(ViTConfig(**SHAPE))


def accuracy(seen: Any) -> dict[str, float]:
    return {"accuracy": float((seen.predictions.argmax(-1) == seen.label_ids).mean())}


def forward_only() -> dict[str, float]:
    """One machine, two forward passes a step, no gradient."""
    args = TrainingArguments(**ARGS, max_steps=150, learning_rate=5e-3)
    trainer = fk.Trainer(
        vit(), pictures(256, 0), pictures(200, 1), args, steps_of="two points", compute_metrics=accuracy
    )  # fmt: skip
    trainer.train()
    return trainer.evaluate()


def by_derivatives() -> dict[str, float]:
    """One machine, one pass forward and one back a step, Adam on K = 4,096 numbers."""
    args = TrainingArguments(**ARGS, max_steps=40, learning_rate=1e-3)
    trainer = fk.Trainer(vit(), pictures(256, 0), pictures(200, 1), args, compute_metrics=accuracy)
    trainer.train()
    trainer.save_model("tuned")  # as save_pretrained writes it, with a 16 KB adapter beside it
    return trainer.evaluate()


def federated() -> dict[str, float]:
    """Two parties; a step is a round, in which each takes 10 local steps."""
    args = TrainingArguments(**ARGS, max_steps=10, learning_rate=1e-3)
    parties = {"north": pictures(128, 0), "south": pictures(128, 2)}
    trainer = fk.Trainer(vit(), parties, pictures(200, 1), args, local_steps=10, compute_metrics=accuracy)
    trainer.train()
    return trainer.evaluate()


def plain() -> dict[str, float]:
    """A module that is not of transformers, with a loss of its own."""

    def loss(model, batch):
        logits = model(batch["pixel_values"])
        return cross_entropy(logits, batch["labels"]), logits  # the second is what compute_metrics sees

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 2))
    args = TrainingArguments(**ARGS, max_steps=40, learning_rate=1e-3)
    trainer = fk.Trainer(
        model, pictures(256, 0), pictures(200, 1), args, compute_loss=loss, compute_metrics=accuracy
    )  # fmt: skip
    trainer.train()
    return trainer.evaluate()


if __name__ == "__main__":
    for way in (forward_only, by_derivatives, federated, plain):
        found = way()
        print(f"{way.__name__}: accuracy {found['eval_accuracy']:.3f} on pictures that were not trained on")
