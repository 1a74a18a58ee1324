"""`Trainer`: tuning in the manner of `transformers.Trainer`, with one client or several and without backpropagation.

A step is a round (round.py): with one client and one local step it is one batch, as anywhere else; with several
clients each of the cohort takes its local steps, and the server adds them up. A checkpoint is the server's state, and
batches, directions and cohorts are functions of the seed and the step, so that a resumed run has the bits of one that
never stopped.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_model
from torch import nn
from transformers import TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_pt_utils import find_batch_size, nested_concat, nested_numpify
from transformers.trainer_utils import (
    EvalPrediction,
    PredictionOutput,
    SaveStrategy,
    TrainOutput,
    denumpify_detensorize,
    get_last_checkpoint,
    rotate_checkpoints,
    speed_metrics,
)
from transformers.utils.generic import find_labels

from ..errors import FedKSeedError
from ..files import border
from ..local.optimizers import Optimizer
from ..local.schedules import require_settings
from ..local.work import LocalWork
from ..randomness import Purpose, generator
from ..round import Report, run_round
from ..run.eps_ladder import SAMPLES, judge, ladder
from ..strategies.kseed import KSeed, State
from ..weights.adapter import NAME, Adapter
from . import checkpoints
from .arguments import require_obeyed, schedule
from .datasets import Batches, Collator, columns_of, shares, shuffled
from .own_model import Parties

SEARCH, UNTIL_FOUND = "search", 1e-3  # eps; a broadcast has one even where no step needs it


@dataclass(slots=True)
class Tally:
    """Losses of steps: since the last entry of the log, and of the whole training."""

    since: list[float] = field(default_factory=list)
    rho: list[float] = field(default_factory=list)  # mean |ρ| of each step since then
    total: float = 0.0
    steps: int = 0

    def add(self, report: Report) -> None:
        if math.isfinite(report.loss):
            self.since.append(report.loss)
            self.total, self.steps = self.total + report.loss, self.steps + 1
        if report.scalar is not None:
            self.rho.append(report.scalar)

    @property
    def mean(self) -> float:
        return self.total / self.steps if self.steps else math.nan

    def taken(self) -> dict[str, float]:
        """The means since the last call."""
        found = {"loss": fmean(self.since) if self.since else math.nan}
        if self.rho:
            found["rho"] = fmean(self.rho)
        self.since, self.rho = [], []
        return found


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
        steps_of: `two points`, forward passes alone; or `sgd` or `adam`, derivatives along all directions.
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
        eps: the perturbation scale, once it is found.
        adapter: the tuned model as a file of 4 bytes a direction, once trained.
        reports: of each round.

    Raises:
        FedKSeedError: an argument is not obeyed or out of range, or a dataset has no rows.

    Example:
        args = TrainingArguments("out", max_steps=1000, learning_rate=1e-3, lr_scheduler_type="constant")
        fedkseed.Trainer(model, dataset, args=args).train()
    """

    def __init__(
        self,
        model: nn.Module,
        train_dataset: Any,
        eval_dataset: Any = None,
        args: TrainingArguments | None = None,
        *,
        data_collator: Callable[[list[Any]], Any] | None = None,
        processing_class: Any = None,
        compute_loss: Callable[[Any, Any], Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        client_column: str | None = None,
        cohort: int | None = None,
        steps_of: str = "two points",
        local_steps: int = 1,
        eps: float | str = SEARCH,
        probes: int = 1,
        clip: float = math.inf,
        wire: str | None = None,
        **options: Any,
    ) -> None:
        if isinstance(eps, str) and eps != SEARCH:
            raise FedKSeedError(f"eps is a number or {SEARCH!r}, got {eps!r}")
        self.args = args = TrainingArguments() if args is None else args
        require_obeyed(args)
        self.model = model.to(args.device)
        self.eval_dataset, self.processing_class, self.compute_metrics = eval_dataset, processing_class, compute_metrics
        self._compute_loss, self._options = compute_loss, options
        self.label_names = args.label_names or find_labels(type(model)) or ["labels"]
        every = compute_loss is not None or not args.remove_unused_columns  # a user's loss may read any column
        columns = None if every else columns_of(model, self.label_names)
        self.data_collator = Collator(args.device, columns, client_column, data_collator, processing_class)
        own = shares(train_dataset, client_column)
        self.clients = list(own)
        self.batches = [
            Batches(
                rows,
                args.per_device_train_batch_size,
                self.data_collator,
                shuffled(args.seed, number, len(rows)),
                args.dataloader_drop_last,
            )
            for number, rows in enumerate(own.values())
        ]
        require_settings("constant", local_steps=local_steps)
        self._cohort, size = cohort, cohort or len(self.clients)
        self._per_epoch = math.ceil(sum(map(len, self.batches)) / (size * local_steps))
        self.max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * self._per_epoch)
        self.eps, self._searches = None if isinstance(eps, str) else eps, eps == SEARCH and steps_of == "two points"
        kept = steps_of == "adam" and local_steps == 1  # the server's Adam has the moments, which a checkpoint keeps
        self._server = Optimizer("adam") if kept else Optimizer()
        self.local = LocalWork(
            self.max_steps,
            "sgd" if kept else steps_of,
            local_steps,
            lr=args.learning_rate,
            eps=UNTIL_FOUND if self.eps is None else self.eps,
            probes=probes,
            clip=clip,
        )
        self.wire = wire or ("exact" if len(self.clients) == 1 else "compact")
        self._rate = schedule(args, self.max_steps)
        self.state, self.control = TrainerState(), TrainerControl()
        self.adapter: Adapter | None = None
        self.reports: list[Report] = []
        self._parties: Parties | None = None  # while it trains
        self._server_state: State | None = None
        self._tally, self._logged = Tally(), 0
        self.callback_handler: Any = CallbackHandler(
            [
                DefaultFlowCallback,
                *get_reporting_integration_callbacks(args.report_to),
                *(callbacks or ()),
                PrinterCallback if args.disable_tqdm else ProgressCallback,
            ],
            self.model, processing_class, None, None,
        )  # fmt: skip
        self.control = self.callback_handler.on_init_end(args, self.state, self.control)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, an instance or its class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove a callback, or the first of a class, and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback, or the first of a class."""
        self.callback_handler.remove_callback(callback)

    # --- training ---------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainOutput:
        """Tune the model, which then holds the tuned weights.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the last one in `output_dir`. The model must be
                the base model, as when the training began.

        Raises:
            FedKSeedError: the checkpoint is damaged or of another training, or the numbers diverge. The model is the
                base model again.
        """
        begin, first = time.time(), 0
        checkpoint = self._found(resume_from_checkpoint)
        with quiet(self.model, self.args.use_cache):
            parties = self._hold()
            try:
                first = self._begin(parties, checkpoint)
                self._rounds(parties)
                best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
                state = self._current if best is None else checkpoints.read(Path(best), self._identity())[0]
                self.adapter = parties.finish(state)
            except BaseException:
                parties.release()
                raise
            finally:
                self._parties = None
        steps = self.state.global_step - first
        rows = self.args.per_device_train_batch_size * self.local.steps * (self._cohort or len(self.clients)) * steps
        metrics = speed_metrics("train", begin, num_samples=rows, num_steps=steps)
        metrics["train_loss"] = self._tally.mean
        self._log(metrics)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(self.state.global_step, self._tally.mean, metrics)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False) -> Any:
        """The loss of a batch, with the model's outputs if `return_outputs`; a subclass may have another."""
        if self._compute_loss is not None:
            found = self._compute_loss(model, inputs)
            loss, outputs = found if isinstance(found, tuple) else (found, None)
        else:
            outputs = self._outputs(model, inputs)
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
            if loss is None:
                raise FedKSeedError(
                    f"the model {type(model).__name__} returned no loss for {_described(inputs)}; give rows with "
                    f"{' and '.join(self.label_names)}, or compute_loss, a function of the model and a batch"
                )
        return (loss, outputs) if return_outputs else loss

    def _hold(self) -> Parties:
        parties = Parties(
            self.model,
            lambda model, batch: self.compute_loss(model, batch),
            self.batches,
            self.local,
            seed=self.args.seed,
            wire=self.wire,
            **self._options,
        )
        parties.strategy = replace(parties.strategy, server=self._server)
        self._parties = parties
        return parties

    def _begin(self, parties: Parties, checkpoint: Path | None) -> int:
        """Set the state before the first step, or that of a checkpoint, and find eps; returns the steps done."""
        parties.cohort(0, self._cohort)  # refuses a cohort that can't be
        self._server_state, self.state, self._tally, self._logged = parties.strategy.init(), TrainerState(), Tally(), 0
        self.reports = []
        if checkpoint is not None:
            self._resume(checkpoint)
        elif self._searches:
            self._use_eps(self._search(parties))
        state, args = self.state, self.args
        state.max_steps, state.num_train_epochs = self.max_steps, math.ceil(self.max_steps / self._per_epoch)
        state.train_batch_size = args.per_device_train_batch_size
        state.compute_steps(args, self.max_steps)
        self.callback_handler.train_dataloader = self.batches[0] if len(self.batches) == 1 else self.batches
        self.control = self.callback_handler.on_train_begin(args, state, self.control)
        if args.eval_on_start and not state.global_step:
            self._evaluate()
        return state.global_step

    def _rounds(self, parties: Parties) -> None:
        state, handler, args, begun = self.state, self.callback_handler, self.args, False
        while state.global_step < self.max_steps and not self.control.should_training_stop:
            number = state.global_step
            if number % self._per_epoch == 0 or not begun:
                self.control, begun = handler.on_epoch_begin(args, state, self.control), True
            self.control = handler.on_step_begin(args, state, self.control)
            rate = self._rate(number)
            parties.strategy = self._strategy(parties.strategy, rate)
            cohort = parties.cohort(number, self._cohort)
            self._server_state, report = run_round(parties.strategy, self._current, cohort, parties.transport)
            self.reports.append(report)
            self._tally.add(report)
            state.global_step += 1
            state.epoch = state.global_step / self._per_epoch
            self.control = handler.on_step_end(args, state, self.control)
            self._act(rate)
            if self.control.should_epoch_stop:
                raise FedKSeedError(
                    "a callback has set should_epoch_stop; batches here follow from the number of the step, so that an "
                    "epoch can't be cut short: set should_training_stop"
                )
            if state.global_step in (self.max_steps, number - number % self._per_epoch + self._per_epoch) or (
                self.control.should_training_stop
            ):
                self.control = handler.on_epoch_end(args, state, self.control)
                self._act(rate)

    @property
    def _current(self) -> State:
        if self._server_state is None:
            raise FedKSeedError("there is no state before train() has begun")
        return self._server_state

    def _strategy(self, strategy: KSeed, rate: float) -> KSeed:
        """The strategy of a step with this learning rate."""
        if self._server.kind == "adam":
            return replace(strategy, server_lr=rate)
        derivatives = strategy.derivatives and replace(strategy.derivatives, lr=rate)
        return replace(strategy, local=replace(strategy.local, lr=rate), derivatives=derivatives)

    def _search(self, parties: Parties) -> float:
        """The eps of least error for the base model, on first batches of clients."""
        parties.load(parties.strategy.init())
        drawn = generator(self.args.seed, Purpose.TUNE, 0).integers(parties.weights.pool.size, size=SAMPLES).tolist()
        losses = [ladder(parties.client(k % len(self.clients)), j) for k, j in enumerate(drawn)]
        parties.load(parties.strategy.init())
        if (found := judge(np.array(losses)).eps) is None:
            raise FedKSeedError(
                "no eps of the ladder measures a slope of this model's loss: at least half of each scalar is rounding "
                "or curvature. Hold the model in float32, take larger batches, or give eps, a number such as 1e-3"
            )
        return found

    def _use_eps(self, eps: float) -> None:
        self.eps, self.local = eps, replace(self.local, eps=eps)
        if self._parties is not None:
            strategy = self._parties.strategy
            self._parties.strategy = replace(strategy, local=replace(strategy.local, eps=eps))

    def _act(self, rate: float) -> None:
        """Log, evaluate and save, as callbacks have asked for."""
        control, state = self.control, self.state
        if control.should_log and state.global_step > self._logged:
            self._logged, last = state.global_step, self.reports[-1]
            logs = self._tally.taken() | {"learning_rate": rate}
            if len(self.clients) > 1:
                logs |= {"bytes_down": last.bytes_down, "bytes_up": last.bytes_up}  # of a client in this round
            self._log(logs)
        if self.control.should_evaluate:
            better = self._is_best(self._evaluate())
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = better
        if self.control.should_save:
            self._save_checkpoint()
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _log(self, logs: dict[str, float]) -> None:
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    # --- evaluation -------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """The mean loss over rows, and `compute_metrics`, of the model as it is now."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise FedKSeedError("there is nothing to evaluate on; give eval_dataset")
        if isinstance(dataset, Mapping):
            found: dict[str, float] = {}
            for name, own in dataset.items():
                found |= self.evaluate(own, f"{metric_key_prefix}_{name}")
            return found
        metrics = self._looked(dataset, metric_key_prefix, self.compute_metrics is not None).metrics or {}
        self._log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """The model's outputs for rows, their labels and metrics; without labels, the outputs alone."""
        found = self._looked(test_dataset, metric_key_prefix, True)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, found.metrics)
        return found

    def _evaluate(self) -> dict[str, float]:
        if self._parties is not None:
            self._parties.load(self._current)  # the last client's own w(c) is there
        return self.evaluate()

    @torch.no_grad()
    def _looked(self, dataset: Any, prefix: str, outputs: bool) -> PredictionOutput:
        """Outputs, labels and metrics of rows.

        Args:
            outputs: whether outputs and labels are kept.
        """
        begin, outputs = time.time(), outputs and not self.args.prediction_loss_only
        batches = Batches(dataset, self.args.per_device_eval_batch_size, self.data_collator)
        handler = self.callback_handler
        handler.eval_dataloader = batches
        losses: list[float] = []
        kept: list[Any] = [None, None]
        with quiet(self.model, self.args.use_cache):
            for batch in batches:
                loss, *seen = self._look(batch)
                rows = find_batch_size(batch) or batches.size
                losses += [] if loss is None else [float(loss)] * rows
                if outputs:
                    for k, one in enumerate(seen):
                        kept[k] = one if kept[k] is None else nested_concat(kept[k], one)
                self.control = handler.on_prediction_step(self.args, self.state, self.control)
        predictions, labels = (None if one is None else cast(Any, nested_numpify(one)) for one in kept)
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and predictions is not None and labels is not None:
            metrics |= cast(Any, denumpify_detensorize(self.compute_metrics(EvalPrediction(predictions, labels))))
        if losses:
            metrics["loss"] = fmean(losses)
        named = {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value for key, value in metrics.items()}
        named |= speed_metrics(prefix, begin, num_samples=len(dataset), num_steps=len(batches))
        return PredictionOutput(predictions, labels, named)  # pyright: ignore[reportArgumentType] - None, as upstream

    def _look(self, batch: Any) -> tuple[Any, Any, Any]:
        """Loss, outputs and labels of a batch; None for what it has not."""
        if isinstance(batch, Mapping):
            labels = tuple(batch[name] for name in self.label_names if batch.get(name) is not None)
        else:
            labels = (batch[-1],) if isinstance(batch, tuple | list) else ()
        if self._compute_loss is None and type(self).compute_loss is Trainer.compute_loss and not labels:
            return None, self._predictions(self._outputs(self.model, batch)), None
        loss, outputs = self.compute_loss(self.model, batch, return_outputs=True)
        return loss, self._predictions(outputs), _one_or_all(labels)

    def _predictions(self, outputs: Any) -> Any:
        if not isinstance(outputs, Mapping):
            return outputs
        config = getattr(self.model, "config", None)
        hidden = {"loss", *getattr(config, "keys_to_ignore_at_inference", ("past_key_values",))}
        return _one_or_all(tuple(value for name, value in outputs.items() if name not in hidden))

    def _is_best(self, metrics: dict[str, float]) -> bool:
        """True if an evaluation is the best so far, by `metric_for_best_model`."""
        if (name := self.args.metric_for_best_model) is None:
            return False
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise FedKSeedError(f"metric_for_best_model is {name}, an evaluation has only {', '.join(metrics)}")
        value, best = metrics[name], self.state.best_metric
        better = best is None or (value > best if self.args.greater_is_better else value < best)
        if better:
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        return better

    # --- files ------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model as its own `save_pretrained` does, or as model.safetensors; once trained, the adapter, too.

        Raises:
            FedKSeedError: train() is at work, so that weights are made only when they are used.
        """
        if self._parties is not None:
            raise FedKSeedError("the weights exist only while they are used; save the model when train() has ended")
        where = Path(output_dir or self.args.output_dir or ".")
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
            self.adapter.save(where / NAME)

    def _identity(self) -> dict[str, Any]:
        """The facts that a training and its checkpoints share."""
        if self._parties is None:
            raise FedKSeedError("a checkpoint is written and read while train() is at work")
        run, local = self._parties.strategy.run, self.local
        return {
            "base": run.base.hex(),
            "pool": [run.pool.key, run.pool.size, run.pool.family, run.pool.basis.hex()],
            "tuned": list(self._parties.patterns),
            "seed": self.args.seed,
            "batches": [len(own) for own in self.batches],
            "cohort": self._cohort,
            "steps_of": "adam" if self._server.kind == "adam" else local.steps_of,
            "local_steps": local.steps,
            "probes": local.probes,
            "clip": str(local.clip),
            "wire": self.wire,
        }

    def _save_checkpoint(self) -> None:
        state, args = self.state, self.args
        output = Path(args.output_dir or ".")
        path = output / f"checkpoint-{state.global_step}"
        if state.best_global_step is not None:
            best = output / f"checkpoint-{state.best_global_step}"
            if best == path or best.exists():
                state.best_model_checkpoint = str(best)
        able = [one for one in self.callback_handler.callbacks if isinstance(one, ExportableState)]
        state.stateful_callbacks = {type(one).__name__: one.state() for one in able}  # pyright: ignore[reportAttributeAccessIssue] - as it is read back
        facts = {"identity": self._identity(), "eps": self.eps, "logged": self._logged, "tally": asdict(self._tally)}
        checkpoints.write(path, self._current, state, facts)
        rotate_checkpoints(str(output), args.save_total_limit, state.best_model_checkpoint)

    def _found(self, asked: str | Path | bool | None) -> Path | None:
        """The folder of the checkpoint that is asked for."""
        if asked is not True:
            return Path(asked) if asked else None
        output = Path(self.args.output_dir or ".")
        last = get_last_checkpoint(str(output)) if output.is_dir() else None
        if last is None:
            raise FedKSeedError(f"there is no checkpoint in {output}; train without resume_from_checkpoint")
        return Path(last)

    def _resume(self, path: Path) -> None:
        self._server_state, self.state, facts = checkpoints.read(path, self._identity())
        self._tally, self._logged = Tally(**facts["tally"]), facts["logged"]
        if facts["eps"] is not None:
            self._use_eps(facts["eps"])
        saved: Any = self.state.stateful_callbacks
        for one in self.callback_handler.callbacks:
            for name, value in saved.get(type(one).__name__, {}).get("attributes", {}).items():
                setattr(one, name, value)

    def _outputs(self, model: nn.Module, inputs: Any) -> Any:
        if not isinstance(inputs, Mapping):
            raise FedKSeedError(
                f"{type(model).__name__} can't be called with {_described(inputs)}, which names no arguments: give "
                "rows that are dicts, or compute_loss, a function of the model and a batch"
            )
        return model(**inputs)


@contextmanager
def quiet(model: nn.Module, cache: bool) -> Iterator[None]:
    """Keep a model in evaluation mode, and without a cache of keys and values, inside the block."""
    training = [(module, module.training) for module in model.modules()]
    config = getattr(model, "config", None)
    cached = getattr(config, "use_cache", None)
    model.eval()
    if cached is not None:
        setattr(config, "use_cache", cache)  # noqa: B010 - a config of any class
    try:
        yield
    finally:
        if cached is not None:
            setattr(config, "use_cache", cached)  # noqa: B010
        for module, was in training:
            module.training = was


def _one_or_all(values: tuple[Any, ...]) -> Any:
    return None if not values else values[0] if len(values) == 1 else values


def _described(batch: Any) -> str:
    return f"a batch of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
