"""Tiny models after some backpropagation, which are right in part: a random one gets nothing right; and commands."""

from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from fedkseed.cli import app
from fedkseed.data.batches import Batch
from fedkseed.models.load import load_model
from fedkseed.models.loss import graph_loss


def train(model_folder: Path, tokenizer: Any, batch: Batch, steps: int, folder: Path) -> Path:
    """Write a model that has taken some steps of Adam on one batch."""
    model = load_model(str(model_folder))
    optimizer = torch.optim.Adam(model.requires_grad_(True).parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        graph_loss(model, batch).backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def fedkseed(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "500", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.output
