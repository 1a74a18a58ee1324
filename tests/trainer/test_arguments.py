"""Arguments of transformers: those that are not obeyed are refused by name, and schedules are those of transformers."""

from typing import Any

import pytest
import torch
from transformers import TrainingArguments
from transformers.optimization import get_scheduler

from fedkseed import FedKSeedError
from fedkseed.trainer.arguments import OBEYED, OTHERS, require_obeyed, schedule


def made(**more: Any) -> TrainingArguments:
    return TrainingArguments("out", use_cpu=True, **more)


@pytest.mark.parametrize(
    "away",
    [
        {"gradient_accumulation_steps": 2},
        {"weight_decay": 0.1},
        {"optim": "sgd"},
        {"bf16": True},
        {"dataloader_num_workers": 2},
        {"label_smoothing_factor": 0.1},
        {"max_grad_norm": 0.5},
        {"push_to_hub": True, "data_seed": 1},
    ],
    ids=str,
)
def test_what_is_not_obeyed_is_refused_by_name(away):
    with pytest.raises(FedKSeedError, match="does not obey .*" + ".*".join(f"{name}=" for name in away)):
        require_obeyed(made(**away))


def test_what_is_obeyed_and_every_default_passes():
    require_obeyed(TrainingArguments())
    require_obeyed(made())
    require_obeyed(
        made(
            max_steps=5, learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=2, logging_steps=1,
            eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
            seed=3, report_to="none", run_name="mine", num_train_epochs=2, do_train=True, label_names=["labels"],
        )
    )  # fmt: skip
    known = set(TrainingArguments.__dataclass_fields__)
    assert known >= {*OBEYED.split(), *OTHERS.split()}


def test_no_step_stands_still_or_goes_back():
    with pytest.raises(FedKSeedError, match="learning_rate must be above 0, got 0"):
        require_obeyed(made(learning_rate=0.0))


@pytest.mark.parametrize(
    "more",
    [
        {"lr_scheduler_type": "constant"},
        {"lr_scheduler_type": "linear", "warmup_steps": 3},
        {"lr_scheduler_type": "cosine", "warmup_steps": 0.2},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-5}},
        {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
    ],
    ids=str,
)
def test_schedules_are_those_of_transformers(more):
    args, steps = made(learning_rate=1e-2, **more), 12
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-2)
    options = args.lr_scheduler_kwargs or {}
    theirs = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(steps), steps, options)
    ours = schedule(args, steps)
    for step in range(steps):
        assert ours(step) == max(theirs.get_last_lr()[0], 1e-8)  # of a broadcast, a rate of 0 is refused
        optimizer.step()
        theirs.step()


def test_a_schedule_that_needs_more_than_the_step_is_refused():
    args = made(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1)
    with pytest.raises(FedKSeedError, match="'reduce_lr_on_plateau' depends on more than the number of the step"):
        schedule(args, 5)
