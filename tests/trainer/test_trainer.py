"""Trainer: models of several kinds learn, a resumed training has the bits of one that never stopped, and callbacks of
transformers work."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.trainer_utils import TrainOutput

import fedkseed as fk

TEXT = {
    "vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 16, "initializer_range": 0.3,
}  # fmt: skip
PICTURE = {
    "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 48,
}  # fmt: skip


def made(kind: Any, *args: Any) -> Any:
    """A model of random weights, drawn without a change of PyTorch's global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(*args)


def texts(count: int, seed: int) -> list[dict[str, Any]]:
    """Twelve tokens of noise, four of which are a 2 or a 3: the label; and a column that no model takes."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        label, tokens = int(rng.integers(2)), rng.integers(4, 16, 12)
        tokens[rng.permutation(12)[:4]] = 2 + label
        rows.append({"input_ids": [1, *tokens.tolist()], "labels": label, "note": "a text"})
    return rows


def pictures(count: int, seed: int) -> list[dict[str, Any]]:
    """Noise whose upper half is brighter or darker: the label."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        label, pixels = int(rng.integers(2)), rng.normal(0, 0.5, (1, 8, 8)).astype(np.float32)
        pixels[0, :4] += 1 - 2 * label
        rows.append({"pixel_values": pixels, "labels": label})
    return rows


def pairs(count: int, seed: int) -> list[tuple[np.ndarray, int]]:
    return [(row["pixel_values"], row["labels"]) for row in pictures(count, seed)]


class Encoder(nn.Module):
    """An encoder without a head; two numbers of its first token are read as logits."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = BertModel(BertConfig(**TEXT))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.encoder(input_ids=input_ids).last_hidden_state[:, 0, :2]


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 2),
    )  # fmt: skip


def of_dict(model: nn.Module, batch: Any) -> Any:
    logits = model(batch["input_ids"])
    return cross_entropy(logits, batch["labels"]), logits


def of_pair(model: nn.Module, batch: Any) -> Any:
    logits = model(batch[0])
    return cross_entropy(logits, batch[1]), logits


def bert() -> Any:
    return made(BertForSequenceClassification, BertConfig(**TEXT, num_labels=2))


def vit() -> Any:
    return made(ViTForImageClassification, ViTConfig(**PICTURE, num_labels=2))


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def accuracy(seen: Any) -> dict[str, float]:
    return {"accuracy": float((seen.predictions.argmax(-1) == seen.label_ids).mean())}


def arguments(folder: Path, steps: int, lr: float, **more: Any) -> TrainingArguments:
    usual = {
        "lr_scheduler_type": "constant", "per_device_train_batch_size": 32, "per_device_eval_batch_size": 64,
        "logging_steps": 2, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    return TrainingArguments(str(folder), max_steps=steps, learning_rate=lr, **usual | more)


# kind -> model, rows, compute_loss, kind of steps, steps, learning rate
KINDS: dict[str, tuple[Any, Any, Any, str, int, float]] = {
    "BERT with a head": (bert, texts, None, "adam", 40, 1e-2),
    "BERT with a head, forward only": (bert, texts, None, "two points", 200, 3e-3),
    "an encoder": (lambda: made(Encoder), texts, of_dict, "adam", 60, 1e-2),
    "ViT": (vit, pictures, None, "adam", 30, 1e-2),
    "a CNN with BatchNorm, forward only": (lambda: made(cnn), pairs, of_pair, "two points", 200, 1e-2),
    "a CNN with BatchNorm": (lambda: made(cnn), pairs, of_pair, "sgd", 40, 1e-1),
}


@pytest.mark.filterwarnings("ignore:.* has seen no batch")
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_every_kind_learn_without_their_buffers(kind, tmp_path):
    make, rows, compute_loss, steps_of, steps, lr = KINDS[kind]
    model, base = make().train(), make()
    trainer = fk.Trainer(
        model, rows(256, 0), rows(200, 1), arguments(tmp_path, steps, lr, save_strategy="no"),
        compute_loss=compute_loss, compute_metrics=accuracy, steps_of=steps_of,
    )  # fmt: skip
    before = trainer.evaluate()
    done = trainer.train()
    after = trainer.evaluate()
    assert isinstance(done, TrainOutput)
    assert done.global_step == steps
    assert before["eval_accuracy"] < 0.75
    assert after["eval_accuracy"] > 0.9  # by chance 0.5 with a standard error of 0.035
    assert after["eval_loss"] < before["eval_loss"]
    assert model.training
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    pair = zip(model.named_buffers(), base.named_buffers(), strict=True)
    assert all(torch.equal(one, other) for (_, one), (_, other) in pair)
    trainer.adapter.save(tmp_path / "adapter.safetensors")
    fk.apply(base, tmp_path / "adapter.safetensors")
    assert same(model, base)


@pytest.mark.parametrize(("clients", "cohort", "local_steps"), [(1, None, 1), (3, 2, 4)])
@pytest.mark.parametrize("steps_of", ["two points", "sgd"])
def test_it_is_what_tune_does_with_the_same_batches(clients, cohort, local_steps, steps_of, tmp_path):
    rows = pictures(40, 0)
    own = rows if clients == 1 else [rows[k::clients] for k in range(clients)]
    args = arguments(tmp_path, 6, 1e-3, per_device_train_batch_size=4, seed=9)
    settings = {"cohort": cohort, "local_steps": local_steps, "eps": 1e-3, "steps_of": steps_of}
    trainer = fk.Trainer(vit(), own, args=args, **settings)
    trainer.train()
    tuned = fk.tune(
        vit(),
        lambda model, batch: model(**batch).loss,
        trainer.batches,
        rounds=6,
        steps_of=steps_of,
        steps=local_steps,
        lr=1e-3,
        eps=1e-3,
        schedule="constant",
        size=cohort,
        seed=9,
        wire="exact" if clients == 1 else "compact",
    )
    assert trainer.adapter.tuned == tuned.adapter.tuned
    assert [report.clients for report in trainer.reports] == [report.clients for report in tuned.reports]
    np.testing.assert_array_equal(trainer.adapter.coefficients, tuned.adapter.coefficients)


class Stop(TrainerCallback):
    """Stops a training after a step, or breaks it."""

    def __init__(self, step: int, breaks: bool = False) -> None:
        self.step, self.breaks = step, breaks

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            if self.breaks:
                raise RuntimeError("power cut")
            control.should_training_stop = True


def history(trainer: fk.Trainer) -> list[dict[str, float]]:
    """The log without what depends on the clock."""
    return [
        {name: value for name, value in entry.items() if not name.endswith(("runtime", "_per_second"))}
        for entry in trainer.state.log_history
    ]


RESUMED: dict[str, dict[str, Any]] = {
    "eps of a ladder": {},
    "moments of Adam": {"steps_of": "adam"},
    "three clients, a cohort of two": {"cohort": 2, "local_steps": 3},
}


@pytest.mark.parametrize("way", RESUMED)
@pytest.mark.parametrize("breaks", [False, True])
def test_a_resumed_training_has_the_bits_of_one_that_never_stopped(way, breaks, tmp_path):
    rows, settings = pictures(48, 0), RESUMED[way]
    own = [rows[k::3] for k in range(3)] if "cohort" in settings else rows

    def trainer(folder: str, callbacks: list[TrainerCallback]) -> fk.Trainer:
        args = arguments(
            tmp_path / folder, 10, 1e-3, per_device_train_batch_size=6, lr_scheduler_type="cosine", warmup_steps=2,
            logging_steps=3, eval_strategy="steps", eval_steps=5, save_strategy="steps", save_steps=4,
        )  # fmt: skip
        return fk.Trainer(vit(), own, rows[:8], args, callbacks=callbacks, **settings)

    whole = trainer("whole", [])
    whole.train()
    cut = trainer("cut", [Stop(7, breaks)])
    if breaks:
        with pytest.raises(RuntimeError, match="power cut"):
            cut.train()
        assert same(cut.model, vit())
    else:
        assert cut.train().global_step == 7
    again = trainer("cut", [])
    assert again.train(resume_from_checkpoint=True).global_step == 10
    assert len(again.reports) == 6  # those after the checkpoint of step 4
    assert again.adapter.tuned == whole.adapter.tuned
    assert history(again) == history(whole)
    assert again.eps == whole.eps


class Events(TrainerCallback):
    """Writes down what it is called for, and the step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name != "on_prediction_step":
            return lambda args, state, control, **kwargs: self.seen.append((name, state.global_step))
        return super().__getattribute__(name)


def test_callbacks_are_called_where_transformers_calls_them(tmp_path):
    events = Events()
    args = arguments(
        tmp_path, 4, 1e-3, per_device_train_batch_size=8, eval_strategy="epoch", save_strategy="steps", save_steps=3
    )
    fk.Trainer(vit(), pictures(16, 0), pictures(4, 1), args, callbacks=[events], eps=1e-3).train()
    step = ["on_step_begin", "on_step_end"]
    expected = [
        ("on_init_end", 0), ("on_train_begin", 0), ("on_epoch_begin", 0),
        (step[0], 0), (step[1], 1), (step[0], 1), (step[1], 2), ("on_log", 2),
        ("on_epoch_end", 2), ("on_log", 2), ("on_evaluate", 2),
        ("on_epoch_begin", 2), (step[0], 2), (step[1], 3), ("on_save", 3), (step[0], 3), (step[1], 4), ("on_log", 4),
        ("on_save", 4), ("on_epoch_end", 4), ("on_log", 4), ("on_evaluate", 4), ("on_log", 4), ("on_train_end", 4),
    ]  # fmt: skip
    assert events.seen == expected


def test_early_stopping_ends_with_the_best_model_and_keeps_its_checkpoint(tmp_path):
    args = arguments(
        tmp_path, 60, 3e-2, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, save_total_limit=1,
    )  # fmt: skip
    patience = EarlyStoppingCallback(early_stopping_patience=3)
    trainer = fk.Trainer(vit(), pictures(64, 0), pictures(32, 1), args, callbacks=[patience], eps=1e-3)
    done = trainer.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert done.global_step < 60
    assert trainer.state.best_metric == min(losses.values()) == losses[trainer.state.best_global_step]
    assert done.global_step - trainer.state.best_global_step == 6  # three evaluations that were no better
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)
    kept = sorted(int(path.name.removeprefix("checkpoint-")) for path in tmp_path.glob("checkpoint-*"))
    assert kept == [trainer.state.best_global_step, done.global_step]


def test_a_checkpoint_has_a_few_numbers_a_direction_and_nothing_pickled(tmp_path):
    args = arguments(tmp_path, 2, 1e-3, save_strategy="steps", save_steps=2)
    fk.Trainer(vit(), pictures(8, 0), args=args, steps_of="sgd", pool=fk.Pool(5, 256)).train()
    files = {path.name: path.stat().st_size for path in (tmp_path / "checkpoint-2").iterdir()}
    assert set(files) == {"state.safetensors", "fedkseed.json", "trainer_state.json"}
    assert 256 * 24 < files["state.safetensors"] < 256 * 24 + 2048  # c, Σ |ρ| and a count, 8 bytes each
    assert json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2


def test_a_checkpoint_that_is_damaged_or_of_another_training_is_refused(tmp_path):
    def trainer(model: Any = None, steps: int = 3, lr: float = 1e-3, **more: Any) -> fk.Trainer:
        args = arguments(tmp_path, steps, lr, save_strategy="steps", save_steps=2, **more)
        return fk.Trainer(model or vit(), pictures(8, 0), args=args, eps=1e-3)

    with pytest.raises(fk.FedKSeedError, match=r"there is no checkpoint in .*train without resume_from_checkpoint"):
        trainer().train(resume_from_checkpoint=True)
    first = trainer()
    first.train()
    with pytest.raises(fk.FedKSeedError, match=r"of a training with base .* load the base model again"):
        trainer(first.model).train(resume_from_checkpoint=True)
    with pytest.raises(fk.FedKSeedError, match=r"of a training with pool .* give the arguments with which it began"):
        trainer(seed=5).train(resume_from_checkpoint=True)
    state = tmp_path / "checkpoint-3" / "state.safetensors"
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)
    with pytest.raises(fk.FedKSeedError, match=r"state.safetensors has changed since it was written"):
        trainer().train(resume_from_checkpoint=True)
    done = trainer(steps=5, lr=1e-4).train(resume_from_checkpoint=tmp_path / "checkpoint-2")  # goes on, and longer
    assert done.global_step == 5


@pytest.mark.filterwarnings("ignore:.* has seen no batch")
def test_the_model_is_saved_as_its_class_saves_it_and_as_an_adapter(tmp_path):
    args = arguments(tmp_path, 2, 1e-2)
    trainer = fk.Trainer(vit(), pictures(8, 0), args=args, eps=1e-3)
    trainer.train()
    trainer.save_model(tmp_path / "hf")
    loaded = ViTForImageClassification.from_pretrained(tmp_path / "hf")
    assert same(trainer.model, loaded)
    assert same(trainer.model, fk.apply(vit(), tmp_path / "hf" / "adapter.safetensors"))

    plain = fk.Trainer(made(cnn), pairs(8, 0), args=args, compute_loss=of_pair, eps=1e-3)
    plain.train()
    plain.save_model(tmp_path / "plain")
    for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        assert torch.equal(plain.model.state_dict()[name], tensor)

    class Early(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            plain.save_model(tmp_path / "early")

    plain.add_callback(Early)
    with pytest.raises(fk.FedKSeedError, match="save the model when train"):
        plain.train()
    assert isinstance(plain.pop_callback(Early), Early)
    plain.train()


def test_several_sets_are_evaluated_and_rows_without_labels_predicted(tmp_path):
    trainer = fk.Trainer(
        vit(), pictures(8, 0), {"a": pictures(70, 1), "b": pictures(5, 2)}, arguments(tmp_path, 1, 1e-3),
        compute_metrics=accuracy, eps=1e-3,
    )  # fmt: skip
    found = trainer.evaluate()
    rows, model = pictures(70, 1), vit().eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(np.stack([row["pixel_values"] for row in rows]))).logits
    labels = torch.tensor([row["labels"] for row in rows])
    assert found["eval_a_loss"] == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-5)  # batches of 64 and 6
    assert found["eval_a_accuracy"] == float((logits.argmax(-1) == labels).double().mean())
    assert "eval_b_loss" in found
    bare = trainer.predict([{"pixel_values": row["pixel_values"]} for row in rows])
    np.testing.assert_allclose(bare.predictions, logits.numpy(), rtol=1e-4, atol=1e-6)  # float32
    assert bare.label_ids is None
    assert "test_loss" not in bare.metrics
    named = trainer.predict(rows)
    assert named.metrics["test_accuracy"] == found["eval_a_accuracy"]
    np.testing.assert_array_equal(named.label_ids, labels.numpy())


def test_a_column_names_the_clients_and_does_not_reach_the_model(tmp_path):
    rows = [row | {"owner": "ab"[k % 2]} for k, row in enumerate(texts(12, 0))]
    args = arguments(tmp_path, 2, 1e-3, per_device_train_batch_size=4)
    found = []
    for dataset in (rows, Dataset.from_list(rows)):
        trainer = fk.Trainer(bert(), dataset, args=args, client_column="owner", cohort=1, eps=1e-3)
        assert trainer.clients == ["a", "b"]
        assert [len(own) for own in trainer.batches] == [2, 2]
        trainer.train()
        assert {"bytes_down", "bytes_up"} <= trainer.state.log_history[0].keys()
        found.append(trainer.adapter.tuned)
    assert found[0] == found[1]
    with pytest.raises(fk.FedKSeedError, match="client_column = 'nobody' is no column"):
        fk.Trainer(bert(), rows, args=args, client_column="nobody")


def test_a_model_s_own_loss_can_be_replaced_in_a_subclass(tmp_path):
    class Halved(fk.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            return (outputs.loss / 2, outputs) if return_outputs else outputs.loss / 2

    args = arguments(tmp_path, 2, 1e-3)
    one, half = (kind(vit(), pictures(8, 0), pictures(8, 1), args, eps=1e-3) for kind in (fk.Trainer, Halved))
    assert half.evaluate()["eval_loss"] == pytest.approx(one.evaluate()["eval_loss"] / 2)
    one.train(), half.train()
    assert half.reports[0].loss == pytest.approx(one.reports[0].loss / 2, rel=1e-6)


def refusals() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"train_dataset": [(1.0, 2.0)]}, "names no arguments: give rows that are dicts, or compute_loss"
    yield {"train_dataset": [{"a": 1}]}, "forward takes none of them; rename columns"
    unlabelled = {"pixel_values": np.zeros((1, 8, 8), np.float32)}
    yield (
        {"train_dataset": [unlabelled]},
        "returned no loss for a batch of pixel.* does not take are left out",
    )
    yield {"eps": "auto"}, "eps is a number or 'search', got 'auto'"
    yield {"eps": 0}, "eps must be a positive number, got 0"
    yield {"local_steps": 0}, "local_steps must be at least 1, got 0"
    yield {"cohort": 2}, "a cohort of 2 can't be drawn from 1 clients"
    yield {"steps_of": "one point"}, "no kind of forward-only steps is called 'one point'"
    flat = {"compute_loss": lambda model, batch: torch.ones(()), "steps_of": "two points"}
    yield flat, "no eps of the ladder measures a slope"


@pytest.mark.parametrize(("settings", "text"), list(refusals()), ids=lambda value: str(value)[:30])
def test_refusals_say_what_to_do(settings, text, tmp_path):
    with pytest.raises(fk.FedKSeedError, match=text):
        fk.Trainer(
            **{"model": vit(), "train_dataset": pictures(8, 0), "args": arguments(tmp_path, 1, 1e-3)} | settings
        ).train()
