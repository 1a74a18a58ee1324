"""Small real things: a Llama-type model with its tokenizer, instruction data, a recipe."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from secrets import token_hex
from tomllib import loads
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which transformers does

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from fedkseed import Simulation
from fedkseed.directions import FAMILIES
from fedkseed.directions.factors import Basis, Factor, Matrix
from fedkseed.recipe.reading import parse
from fedkseed.weights.basis_file import save_basis
from fedkseed.weights.layout import Layout

# Models here are tiny. A second thread gains nothing and makes them a hundred times slower whenever
# another program uses a core: OpenMP's threads wait for each other after every operation.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start

# Processes of pytest-xdist have a width of 80 in their environment, which rich would take for good.
for size in ("COLUMNS", "LINES"):
    os.environ.pop(size, None)

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
CONFIGS: list[PretrainedConfig] = [
    LlamaConfig(**SMALL, intermediate_size=48, tie_word_embeddings=False),
    GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64),
    OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32),
    Qwen2Config(**SMALL, intermediate_size=48, num_key_value_heads=1, tie_word_embeddings=True),
    Qwen3Config(**SMALL, intermediate_size=48, num_key_value_heads=1, head_dim=16),
    GemmaConfig(**SMALL, intermediate_size=48, num_key_value_heads=1, head_dim=16),
    Gemma2Config(**SMALL, intermediate_size=48, num_key_value_heads=1, head_dim=16),
    MistralConfig(**SMALL, intermediate_size=48, num_key_value_heads=1),
]

CATEGORIES = {
    "colour": [
        ("Which colour has {0}?", "{0} is {1}.", ["grass", "snow", "coal", "blood"], ["green", "white", "black", "red"])
    ],
    "number": [
        (
            "How many legs has {0}?",
            "{0} has {1} legs.",
            ["a cat", "an ant", "a bird", "a crab"],
            ["four", "six", "two", "ten"],
        )
    ],
    "capital": [
        (
            "What is the capital of {0}?",
            "It is {1}.",
            ["France", "Spain", "Italy", "Peru"],
            ["Paris", "Madrid", "Rome", "Lima"],
        )
    ],
}


def rows() -> list[dict[str, str]]:
    """36 examples in three categories."""
    made = []
    for category, ((question, answer, subjects, values),) in CATEGORIES.items():
        for subject, value in zip(subjects, values, strict=True):
            for tail in ("", " Answer briefly.", " Say it in one sentence."):
                made.append(
                    {
                        "instruction": question.format(subject) + tail,
                        "context": "" if not tail else "A child asks.",
                        "response": answer.format(subject, value).capitalize(),
                        "category": category,
                    }
                )
    return made


@pytest.fixture(scope="session", autouse=True)
def of_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The account of privacy is the user's, and not of whoever runs the tests, also in processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state" / token_hex(8)))


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: a Llama type of 40,000 weights with tied embeddings, and a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([" ".join(row.values()) for row in rows()], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    tiny_llama().save_pretrained(folder)
    return folder


def widened(model: Any) -> Any:
    """A random model with greater weights: with those of a beginning all tokens are as likely, whatever it computes."""
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 12.0 if weight.dim() > 1 else 1.0
    return model


def widened_folder(folder: Path, copy: Path) -> Path:
    shutil.copytree(folder, copy)
    widened(LlamaForCausalLM.from_pretrained(copy)).save_pretrained(copy)
    return copy


def tiny_llama(vocabulary: int = 400) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
        return LlamaForCausalLM(config).requires_grad_(False).eval()


def recipe_text(model: Path, data: Path, **changes: str) -> str:
    """A recipe of a second's work; `changes` replace whole lines by their first word."""
    lines = f"""
seed = 3
[model]
name = "{model}"
[data]
source = "{data}"
max_tokens = 200
held_out = "capital"
[clients]
count = 4
cohort = 2
alpha = 1.0
min_examples = 1
[directions]
family = "hadamard"
size = 64
[training]
algorithm = "fedkseed"
rounds = 3
steps = 3
batch_size = 2
lr = 1e-3
eps = 1e-3
[evaluation]
examples = 8
generated = 2
max_new_tokens = 4
""".strip().splitlines()
    return "\n".join(changes.get(line.split(" ")[0], line) for line in lines) + "\n"


@pytest.fixture
def recipe_file(tmp_path: Path, model_folder: Path, data_file: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text(model_folder, data_file))
    return path


EVERYWHERE = [family.name for family in FAMILIES.values() if family.factored is None]  # directions of any tensor


def small_basis(model: nn.Module, rank: int = 2, seed: int = 5) -> Basis:
    """A basis with random factors of every tensor of a model; its factors have the scale of weights."""
    rng, factors, first = np.random.default_rng(seed), dict[str, Factor](), 0
    for name, shape in sorted(Layout(model).shapes.items()):
        matrix = Matrix.of(shape)
        parts = [rng.integers(-127, 128, (side, rank)).astype(np.int8) for side in (matrix.rows, matrix.columns)]
        scales = [rng.uniform(0.5, 2, rank).astype(np.float32) / 127 for _ in range(2)]
        factors[name] = Factor(matrix.rows, matrix.columns, first, *parts, *scales)
        first = factors[name].directions.stop
    return Basis(factors, {"made": "at random"})


@pytest.fixture(scope="session")
def basis_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A basis of the model in `model_folder`: 4 directions of each of its 20 tensors."""
    path = tmp_path_factory.mktemp("basis") / "basis.safetensors"
    save_basis(small_basis(tiny_llama()), path)
    return path


@pytest.fixture
def simulation(model_folder: Path, data_file: Path) -> Iterator[Callable[..., Simulation]]:
    """A function from a recipe's lines to a simulation of four clients, all of them in each round."""
    with ExitStack() as opened:

        def make(extra: str, secret: bytes = bytes(range(32)), **changes: str) -> Simulation:
            text = recipe_text(model_folder, data_file, **{"cohort": "cohort = 4"} | changes) + extra
            return opened.enter_context(closing(Simulation(parse(loads(text)), secret=secret)))

        yield make
