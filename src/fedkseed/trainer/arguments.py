"""Fields of `transformers.TrainingArguments` that `fedkseed.Trainer` obeys, and the refusal of all others."""

from collections.abc import Callable
from dataclasses import fields

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments
from transformers.optimization import get_scheduler
from transformers.trainer_utils import SchedulerType

from ..errors import FedKSeedError

OBEYED = """
output_dir max_steps num_train_epochs per_device_train_batch_size per_device_eval_batch_size dataloader_drop_last
learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps seed use_cpu use_cache
logging_strategy logging_steps logging_first_step eval_strategy eval_steps eval_delay eval_on_start
save_strategy save_steps save_total_limit load_best_model_at_end metric_for_best_model greater_is_better
prediction_loss_only remove_unused_columns label_names disable_tqdm report_to run_name project
"""
# Read by scripts and callbacks, or true of every run here: it keeps the states of callbacks.
OTHERS = """
do_train do_eval do_predict resume_from_checkpoint restore_callback_states_from_checkpoint local_rank
"""
SMALLEST = 1e-6  # of the learning rate: where a schedule says 0, a state could not be broadcast


def require_obeyed(args: TrainingArguments) -> None:
    """Refuse arguments, away from their defaults, that the trainer would not obey."""
    usual = TrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu)
    names = [field.name for field in fields(TrainingArguments) if field.name not in (OBEYED + OTHERS).split()]
    away = [name for name in names if getattr(args, name) != getattr(usual, name)]
    if away:
        said = ", ".join(f"{name}={getattr(args, name)!r}" for name in away)
        raise FedKSeedError(
            f"fedkseed.Trainer does not obey {said}; leave out {', '.join(away)} (`fedkseed docs python`)"
        )
    if not args.learning_rate > 0:
        raise FedKSeedError(f"learning_rate must be above 0, got {args.learning_rate}")


def schedule(args: TrainingArguments, steps: int) -> Callable[[int], float]:
    """The learning rate of each step, from 0, by transformers' schedule; one that depends on more is refused."""
    kind = SchedulerType(args.lr_scheduler_type)
    if kind not in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY):
        placeholder = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)  # a schedule wants an optimiser
        options = args.lr_scheduler_kwargs if isinstance(args.lr_scheduler_kwargs, dict) else {}
        scheduler = get_scheduler(kind, placeholder, args.get_warmup_steps(steps), steps, options)
        if isinstance(scheduler, LambdaLR):
            (factor,) = scheduler.lr_lambdas
            return lambda step: args.learning_rate * max(factor(step), SMALLEST)
    raise FedKSeedError(
        f"lr_scheduler_type={kind.value!r} depends on more than the number of the step; take constant, linear or cosine"
    )
