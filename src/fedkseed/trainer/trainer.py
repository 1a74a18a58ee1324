"""`Trainer`: tuning in the manner of `transformers.Trainer`, with one client or several and without backpropagation.

A step is a round (round.py): with one client and one local step it is one batch, as anywhere else; with several
clients each of the cohort takes its local steps, and the server adds them up. A checkpoint is the server's state, and
batches, directions and cohorts are functions of the seed and the step, so that a resumed run has the bits of one that
never stopped.
"""

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn
from torch.utils.data import BatchSampler
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers import trainer_utils as utils
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState, PrinterCallback
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import EvalPrediction, PredictionOutput, SaveStrategy, TrainOutput
from transformers.utils.generic import find_labels

from ..errors import FedKSeedError
from ..files import border
from ..local.schedules import require_settings
from ..local.work import LocalWork
from ..round import Report
from ..run.progress import Progress, Silent
from ..weights.adapter import ADAPTER, Adapter
from . import checkpoints
from .arguments import require_obeyed, schedule
from .client_batches import Batches, OwnedBatch
from .datasets import Collator, shares, shuffled
from .judge import SEARCH, UNTIL_FOUND, Judge, searches
from .outputs import evaluating, labels_of, loss_and_outputs, outputs_of, predictions_in
from .own_model import Parties
from .processes import Processes
from .training import Tally, Training


class Lines(Progress):
    """Notes of a training, printed as transformers prints the log: above its bar."""

    def note(self, text: str) -> None:
        tqdm.write(text)


class Trainer:
    """Tune a model in place along K directions, with the arguments, callbacks and results of `transformers.Trainer`.

    Args:
        model: any module; it is tuned in evaluation mode, so that dropout is off and buffers, such as the running
            means of BatchNorm, stay as they are.
        train_dataset: rows of one client; or a dict or list of datasets, one a client.
        eval_dataset: rows, or a dict of datasets.
        args: of transformers; fields that are not obeyed are refused (docs/python.md).
        data_collator: a function of rows to a batch; default as in transformers, and PyTorch's for rows that are no
            dicts.
        processing_class: a tokenizer or an image processor, saved with the model.
        compute_loss: (model, batch) to a scalar, or to a scalar and outputs that `compute_metrics` is to see; default:
            the loss that the model returns.
        compute_metrics: takes an EvalPrediction, returns a dict.
        callbacks: instances or classes of transformers.TrainerCallback.
        client_column: the column of `train_dataset` that names each row's client.
        cohort: clients of a step; default all.
        steps_of: `adam` or `sgd`, derivatives along all directions; or `two points`, forward passes alone.
        lr: "search" for the best of some learning rates in short trials; None: that of `args`, which is as in ordinary
            training by the same optimiser.
        local_steps: steps of a client before the server adds up. Adam keeps its moments from step to step where this
            is 1, and begins anew in every round otherwise.
        eps: the perturbation scale of two points, or "search": the best of a ladder, for 68 forward passes.
        probes: directions a local step, whose estimates are averaged.
        clip: largest |ρ|.
        wire: the precision of numbers that travel, see `KSeed`; default `exact` for one client, else `compact`.
        options: further arguments of `Parties`: pool, tuned, mode, basis.

    Attributes:
        state: transformers' TrainerState: global_step, epoch, log_history, …
        clients: names of the clients.
        batches: of each client.
        training: where the training stands; None before it has begun.
        adapter: the tuned model as a file of 4 bytes a direction, once trained.

    Raises:
        FedKSeedError: an argument is not obeyed or out of range, or a dataset has no rows.

    Example:
        args = TrainingArguments("out", max_steps=1000, learning_rate=1e-3, lr_scheduler_type="constant")
        fedkseed.Trainer(model, dataset, args=args).train()
    """

    def __init__(
        self, model: nn.Module, train_dataset: Any, eval_dataset: Any = None, args: TrainingArguments | None = None, *,
        data_collator: Callable[[list[Any]], Any] | None = None, processing_class: Any = None,
        compute_loss: Callable[[Any, Any], Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None, client_column: str | None = None,
        cohort: int | None = None, steps_of: str = "adam", lr: str | None = None, local_steps: int = 1,
        eps: float | str = SEARCH, probes: int = 1, clip: float = math.inf, wire: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if unknown := {*options} - {"pool", "tuned", "mode", "basis"}:
            raise FedKSeedError(f"fedkseed.Trainer has no argument {', '.join(sorted(unknown))}; see help(fk.Trainer)")
        searches("eps", eps)
        if lr is not None and not searches("lr", lr):
            raise FedKSeedError(f"lr is {SEARCH!r} or None, got {lr!r}; give a number to args.learning_rate")
        self.args = args = TrainingArguments() if args is None else args
        require_obeyed(args)
        require_settings("constant", local_steps=local_steps)
        self.model = model.to(args.device)
        self.eval_dataset, self.processing_class = eval_dataset, processing_class
        self.compute_metrics, self._compute_loss = compute_metrics, compute_loss
        self.label_names = args.label_names or find_labels(type(model)) or ["labels"]
        every = compute_loss is not None or not args.remove_unused_columns  # a user's loss may read any column
        inputs = () if every else inspect.signature(model.forward).parameters
        columns = None if every else frozenset({*inputs, *self.label_names, "label", "label_ids"})
        self.data_collator = Collator(args.device, columns, client_column, data_collator, processing_class)
        datasets = shares(train_dataset, client_column)
        self.clients = list(datasets)
        if args.world_size > len(datasets):
            raise FedKSeedError(
                f"torchrun has started {args.world_size} processes for {len(datasets)} client"
                f"{'s' * (len(datasets) > 1)}: each trains some of them; start fewer, or give more (client_column)"
            )
        self._processes = Processes() if args.world_size > 1 else None
        batch_size, drop_last = args.per_device_train_batch_size, args.dataloader_drop_last
        self.batches = batches = [
            shuffled(rows, batch_size, self.data_collator, args.seed, number, drop_last)
            for number, rows in enumerate(datasets.values())
        ]
        self._an_epoch = an_epoch = math.ceil(sum(map(len, batches)) / ((cohort or len(batches)) * local_steps))
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * an_epoch)
        moments = steps_of == "adam" and local_steps == 1
        self._search_lr, self._eps = lr is not None, None if isinstance(eps, str) else eps
        kind, first_eps = "sgd" if moments else steps_of, UNTIL_FOUND if self._eps is None else self._eps
        self.local = LocalWork(steps, kind, local_steps, lr=args.learning_rate, eps=first_eps, probes=probes, clip=clip)
        wire, server = wire or ("exact" if len(batches) == 1 else "compact"), "adam" if moments else "sgd"
        self._options = {"seed": args.seed, "wire": wire, "server": server, **options}
        self._cohort, self._rate, self._steps_of = cohort, schedule(args, steps), steps_of
        self.training: Training | None = None
        self.adapter: Adapter | None = None
        self._at_work = False
        self.state, self.control = TrainerState(), TrainerControl()
        reporting = get_reporting_integration_callbacks(args.report_to)
        shown = PrinterCallback if args.disable_tqdm else ProgressCallback
        every_callback = [DefaultFlowCallback, *reporting, *(callbacks or ()), shown]
        self.callback_handler: Any = CallbackHandler(every_callback, self.model, processing_class, None, None)
        self._tell("on_init_end")

    @property
    def eps(self) -> float | None:
        """The perturbation scale, once it is known."""
        return self._eps if self.training is None else self.training.eps

    @property
    def reports(self) -> list[Report]:
        """The report of each round."""
        return [] if self.training is None else self.training.reports

    def is_world_process_zero(self) -> bool:
        """Say whether this is the only process, or the one of torchrun's that logs and writes."""
        return self.args.process_index == 0

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, an instance or its class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove a callback, or the first of a class, and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback, or the first of a class."""
        self.callback_handler.remove_callback(callback)

    def _tell(self, event: str, *arguments: Any) -> None:
        """Call the callbacks of an event, which may ask for something in return."""
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control, *arguments)

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainOutput:
        """Tune the model, which then holds the tuned weights.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the last one in `output_dir`. The model must be
                the base model, as when the training began.

        Raises:
            FedKSeedError: the checkpoint is damaged or of another training, or the numbers diverge. The model is the
                base model again.
        """
        start, local, checkpoint = time.time(), self.local, self._checkpoint_of(resume_from_checkpoint)
        with evaluating(self.model, self.args.use_cache):
            batches = dict(zip(self.clients, self.batches, strict=True))
            parties = Parties(self.model, self.compute_loss, batches, local, **self._options)
            parties.progress = Lines() if self.is_world_process_zero() else Silent()
            parties.processes = self._processes
            self._at_work = True
            try:
                parties.cohort(0, self._cohort)  # refuses one that can't be drawn
                judge = Judge(parties, self.args.learning_rate)
                self.training = training = Training(parties, judge, parties.strategy.server.init(), self._eps)
                first = self._begin(training, checkpoint)
                self._steps(training)
                best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
                state = training.server if best is None else checkpoints.read(Path(best), self._identity(training))[0]
                steps = (self.state.global_step - first) * local.steps
                skipped, held_out = sum(report.skipped for report in training.reports), self.eval_dataset is not None
                judge.end(state, steps, skipped, held_out)
                self.adapter = parties.finish(state)
            except BaseException:
                parties.release()
                raise
            finally:
                self._at_work = False
        steps, tally = self.state.global_step - first, training.tally
        mean = tally.total / tally.steps if tally.steps else math.nan
        rows = self.args.per_device_train_batch_size * local.steps * (self._cohort or len(self.batches)) * steps
        metrics = utils.speed_metrics("train", start, num_samples=rows, num_steps=steps) | {"train_loss": mean}
        self._log(metrics)
        self._tell("on_train_end")
        return TrainOutput(self.state.global_step, mean, metrics)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False) -> Any:
        """The loss of a batch, with the model's outputs if `return_outputs`; a subclass may have another."""
        if self._compute_loss is None:
            loss, outputs = loss_and_outputs(model, inputs, self.label_names)
        else:
            computed = self._compute_loss(model, inputs)
            loss, outputs = computed if isinstance(computed, tuple) else (computed, None)
        return (loss, outputs) if return_outputs else loss

    def _begin(self, training: Training, checkpoint: Path | None) -> int:
        """Go on from a checkpoint, or begin with the search of eps; returns the steps that are done."""
        self.state = TrainerState()
        if self._processes is not None:
            self._processes.require_same(self._identity(training) | {"checkpoint": checkpoint and checkpoint.name})
        if checkpoint is not None:
            training.server, self.state, facts = checkpoints.read(checkpoint, self._identity(training))
            training.tally, training.logged, training.eps = Tally(**facts["tally"]), facts["logged"], facts["eps"]
            training.factor = facts["factor"]
            saved: Any = self.state.stateful_callbacks
            for callback in self.callback_handler.callbacks:
                for name, attribute in saved.get(type(callback).__name__, {}).get("attributes", {}).items():
                    setattr(callback, name, attribute)
        else:
            judge = training.judge
            if training.eps is None and self._steps_of == "two points":
                training.eps = judge.search_eps()
            if self._search_lr:
                judge.search_rate(self._steps_of, self.local.steps, self._cohort)
                training.factor = judge.lr / self.args.learning_rate
            if self._processes is not None:
                found = self._processes.first({"eps": training.eps, "factor": training.factor})
                training.eps, training.factor = found["eps"], found["factor"]
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.args.local_process_index == 0
        state, rounds = self.state, self.local.rounds
        state.max_steps, state.num_train_epochs = rounds, math.ceil(rounds / self._an_epoch)
        state.train_batch_size = self.args.per_device_train_batch_size
        state.compute_steps(self.args, rounds)
        self.callback_handler.train_dataloader = self.batches[0] if len(self.batches) == 1 else self.batches
        self._tell("on_train_begin")
        if self.args.eval_on_start and not state.global_step:
            training.parties.load(training.server)
            self.evaluate()
        return state.global_step

    def _steps(self, training: Training) -> None:
        """Take the steps that are left."""
        state, rounds, in_epoch = self.state, self.local.rounds, False
        eps = self.local.eps if training.eps is None else training.eps
        while state.global_step < rounds and not self.control.should_training_stop:
            rate = self._rate(state.global_step) * training.factor
            if not in_epoch:
                self._tell("on_epoch_begin")
            self._tell("on_step_begin")
            training.parties.adjust(rate, eps)
            training.server, report = training.judge.round(training.server, self._cohort)
            training.reports.append(report)
            training.tally.add_(report)
            state.global_step += 1
            state.epoch = state.global_step / self._an_epoch
            self._tell("on_step_end")
            self._act(training, rate)
            if self.control.should_epoch_stop:
                raise FedKSeedError(
                    "a callback has set should_epoch_stop; batches here follow from the number of the step, so that an "
                    "epoch can't be cut short: set should_training_stop"
                )
            whole = state.global_step % self._an_epoch == 0 or state.global_step == rounds
            in_epoch = not (whole or self.control.should_training_stop)
            if not in_epoch:
                self._tell("on_epoch_end")
                self._act(training, rate)

    def _act(self, training: Training, rate: float) -> None:
        """Log, evaluate and save, as callbacks have asked for."""
        if self.control.should_log and self.state.global_step > training.logged:
            training.logged, last = self.state.global_step, training.reports[-1]
            logs = training.tally.means_since_() | {"learning_rate": rate}
            if len(self.clients) > 1:
                logs |= {"bytes_down": last.bytes_down, "bytes_up": last.bytes_up}  # of a client in this round
            self._log(logs)
        if self.control.should_evaluate:
            training.parties.load(training.server)  # the last client's own w(c) is there
            metrics, better = self.evaluate(), False
            if (name := self.args.metric_for_best_model) is not None:
                name = name if name.startswith("eval_") else f"eval_{name}"
                if name not in metrics:
                    raise FedKSeedError(f"metric_for_best_model is {name}, an evaluation has only {', '.join(metrics)}")
                score, best = metrics[name], self.state.best_metric
                better = best is None or (score > best if self.args.greater_is_better else score < best)
                if better:
                    self.state.best_metric, self.state.best_global_step = score, self.state.global_step
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = better
        if self.control.should_save:
            self._save_checkpoint(training)
            self._tell("on_save")

    def _log(self, logs: dict[str, float]) -> None:
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._tell("on_log", logs)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """The mean loss over rows, and `compute_metrics`, of the model as it is now."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise FedKSeedError("there is nothing to evaluate on; give eval_dataset")
        if isinstance(dataset, Mapping):
            sets = [self.evaluate(rows, f"{metric_key_prefix}_{name}") for name, rows in dataset.items()]
            return {metric: score for scores in sets for metric, score in scores.items()}
        metrics = self._predicted(dataset, metric_key_prefix, self.compute_metrics is not None).metrics or {}
        self._log(dict(metrics))
        self._tell("on_evaluate", metrics)
        return metrics

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """The model's outputs for rows, their labels and metrics; without labels, the outputs alone."""
        predicted = self._predicted(test_dataset, metric_key_prefix, True)
        self._tell("on_predict", predicted.metrics)
        return predicted

    def _predicted(self, dataset: Any, prefix: str, keep: bool) -> PredictionOutput:
        """Outputs, labels and metrics of rows; the first two only if they are to be kept."""
        start, size = time.time(), self.args.per_device_eval_batch_size
        places = list(BatchSampler(range(len(dataset)), size, drop_last=False))
        self.callback_handler.eval_dataloader = batches = Batches(dataset, places, self.data_collator)
        keep = keep and not self.args.prediction_loss_only
        losses, metrics = list[float](), dict[str, Any]()
        kept: Any = EvalLoopContainer(), EvalLoopContainer()  # of outputs and labels
        with evaluating(self.model, self.args.use_cache), torch.no_grad():
            for number, rows in enumerate(places):
                batch = OwnedBatch.of(f"the rows of {prefix}", batches, number)
                loss, *seen = batch.put_through("model or loss", self._look)
                losses += [] if loss is None else [float(loss)] * len(rows)
                for container, part in zip(kept, seen, strict=True):
                    if keep:
                        container.add(part)
                self._tell("on_prediction_step")
        predictions, labels = (container.get_arrays() for container in kept)
        if self.compute_metrics is not None and all(part is not None for part in (predictions, labels)):
            computed: Any = utils.denumpify_detensorize(self.compute_metrics(EvalPrediction(predictions, labels)))
            metrics |= computed
        metrics |= {"loss": fmean(losses)} if losses else {}
        named = {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": number for key, number in metrics.items()}
        named |= utils.speed_metrics(prefix, start, num_samples=len(dataset), num_steps=len(batches))
        return PredictionOutput(predictions, labels, named)

    def _look(self, batch: Any) -> tuple[Any, Any, Any]:
        """Loss, outputs and labels of a batch; None for what it has not."""
        labels = labels_of(batch, self.label_names)
        if self._compute_loss is None and type(self).compute_loss is Trainer.compute_loss and labels is None:
            return None, predictions_in(self.model, outputs_of(self.model, batch)), None
        loss, outputs = self.compute_loss(self.model, batch, return_outputs=True)
        return loss, predictions_in(self.model, outputs), labels

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model as its own `save_pretrained` does, or as model.safetensors; once trained, the adapter, too.

        Of several processes the first one writes.

        Raises:
            FedKSeedError: train() is at work, so that weights are made only when they are used.
        """
        if self._at_work:
            raise FedKSeedError("the weights exist only while they are used; save the model when train() has ended")
        if not self.is_world_process_zero():
            return
        where = Path(output_dir) if output_dir else self._output
        with border(f"can't write {where}"):
            where.mkdir(parents=True, exist_ok=True)
            save: Any = getattr(self.model, "save_pretrained", None)
            if save is None:
                save_model(self.model, str(where / "model.safetensors"))
            else:
                save(where)
            if hasattr(self.processing_class, "save_pretrained"):
                self.processing_class.save_pretrained(where)
        if self.adapter is not None:
            self.adapter.save(where / ADAPTER)

    @property
    def _output(self) -> Path:
        return Path(self.args.output_dir or ".")

    def _save_checkpoint(self, training: Training) -> None:
        state, path = self.state, self._output / f"checkpoint-{self.state.global_step}"
        if state.best_global_step is not None:
            best = self._output / f"checkpoint-{state.best_global_step}"
            if best == path or best.exists():
                state.best_model_checkpoint = str(best)
        exported = [callback for callback in self.callback_handler.callbacks if isinstance(callback, ExportableState)]
        state.stateful_callbacks = {type(callback).__name__: callback.state() for callback in exported}  # pyright: ignore[reportAttributeAccessIssue] - as it is read back
        logged, tally = training.logged, asdict(training.tally)
        facts = {"eps": training.eps, "factor": training.factor, "logged": logged, "tally": tally}
        if self.is_world_process_zero():
            checkpoints.write(path, training.server, state, {"identity": self._identity(training), **facts})
            utils.rotate_checkpoints(str(self._output), self.args.save_total_limit, state.best_model_checkpoint)
        if self._processes is not None:
            self._processes.wait()

    def _identity(self, training: Training) -> dict[str, Any]:
        """The facts that a training and its checkpoints share."""
        parties, local = training.parties, self.local
        settings, run = parties.strategy.settings, parties.strategy.run
        return {
            "base": run.base.hex(), "pool": [run.pool.key, run.pool.size, run.pool.family, run.pool.basis.hex()],
            "tuned": list(parties.patterns), "seed": parties.seed, "batches": list(map(len, parties.batches)),
            "cohort": self._cohort, "steps_of": "adam" if settings.server == "adam" else local.steps_of,
            "local_steps": local.steps, "probes": local.probes, "clip": str(local.clip), "wire": settings.wire,
        }  # fmt: skip

    def _checkpoint_of(self, asked: str | Path | bool | None) -> Path | None:
        """The folder of the checkpoint that is asked for."""
        if asked is not True:
            return Path(asked) if asked else None
        last = utils.get_last_checkpoint(str(self._output)) if self._output.is_dir() else None
        if last is None:
            raise FedKSeedError(f"there is no checkpoint in {self._output}; train without resume_from_checkpoint")
        return Path(last)
