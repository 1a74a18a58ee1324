"""Objectives against slow direct computations, streamed against written, and a user's own through a whole run."""

import json
import math
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedkseed import FedKSeedError, Pool, hold, load_recipe, resume, start
from fedkseed.cli import app
from fedkseed.data.batches import collate
from fedkseed.data.sources import Example
from fedkseed.data.wording import Wording
from fedkseed.evaluation.metrics import accuracy, rouge_l
from fedkseed.evaluation.objectives import objective_of
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.models.loss import batch_loss
from fedkseed.randomness import pool_key
from fedkseed.recipe.algorithms import ALGORITHMS
from fedkseed.recipe.reading import parse
from fedkseed.run.simulation import Simulation
from fedkseed.run.store import Store

from ..conftest import recipe_text, rows
from ..encoding import encode_all
from .conftest import train

NAMES = ("loss", "accuracy", "exact match", "rouge")
LIMIT = 8  # new tokens: responses have 4 to 7, and the end
SHORT = rows()[::3]


@pytest.fixture(scope="module")
def data_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "short.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in SHORT))
    return path


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(str(model_folder))


@pytest.fixture(scope="module")
def batch(tokenizer):
    encoded = encode_all([Example(**row) for row in SHORT], tokenizer, Wording())
    return collate(encoded, tokenizer.pad_token_id)


@pytest.fixture(scope="module")
def trained(model_folder, tokenizer, batch, tmp_path_factory):
    return train(model_folder, tokenizer, batch, 32, tmp_path_factory.mktemp("trained"))


@pytest.fixture
def model(trained):
    return load_model(str(trained))


def slow_answer(model, tokenizer, encoded):
    """One token after the other, each from a forward pass over all before it."""
    tokens = list(encoded.tokens[: encoded.prompt])
    for _ in range(LIMIT):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        if tokens[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(tokens[encoded.prompt :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def answers(trained, tokenizer, batch):
    model = load_model(str(trained))
    return [slow_answer(model, tokenizer, e) for e in batch.examples]


@pytest.fixture(scope="module")
def said(batch, answers):
    """The batch with references of which every third is what the model says, with space around it."""
    examples = [
        replace(e, example=replace(e.example, response=f" {answer}\n")) if k % 3 == 0 else e
        for k, (e, answer) in enumerate(zip(batch.examples, answers, strict=True))
    ]
    return replace(batch, examples=examples)


def test_accuracy_is_that_of_one_token_at_a_time(model, tokenizer, batch):
    right = [
        int(model(torch.tensor([e.tokens[:place]])).logits[0, -1].argmax()) == e.tokens[place]
        for e in batch.examples
        for place in range(e.prompt, len(e.tokens))
    ]
    assert 0 < sum(right) < len(right)
    assert objective_of("accuracy", 1)(model, tokenizer, batch) == pytest.approx(1 - sum(right) / len(right))


def test_answers_are_compared_with_their_references(model, tokenizer, said, answers):
    references = [e.example.response for e in said.examples]
    pairs = list(zip(answers, references, strict=True))
    matches = [answer.strip() == reference.strip() for answer, reference in pairs]
    assert 0 < sum(matches) < len(matches)
    overlaps = [rouge_l(reference, answer) for answer, reference in pairs]
    assert objective_of("exact match", LIMIT)(model, tokenizer, said) == pytest.approx(1 - np.mean(matches))
    assert objective_of("rouge", LIMIT)(model, tokenizer, said) == pytest.approx(1 - np.mean(overlaps))


def test_the_loss_is_still_the_loss(model, tokenizer, batch):
    assert objective_of("loss", 1)(model, tokenizer, batch) == batch_loss(model, batch)


@pytest.mark.parametrize("name", NAMES)
def test_streamed_models_find_what_written_ones_find(name, trained, tokenizer, said):
    objective, before, found = objective_of(name, LIMIT), warnings.filters[:], []
    for mode in ("streamed", "materialized"):
        model = load_model(str(trained))
        weights = hold(model, Pool(1, 16, "hadamard"), mode=mode)
        weights.load(np.full(16, 2e-4, np.float32))
        points = [weights.both(j, 8e-3, lambda m=model: objective(m, tokenizer, said)) for j in range(3)]
        weights.settle()
        found.append((points, objective(model, tokenizer, said)))
    assert found[0] == found[1]
    assert any(above != below for above, below in found[0][0])
    assert warnings.filters == before  # the two points take turns: neither may leave a setting of the other behind


def recipe_of(folder, model, data, objective, **changes):
    lines = {
        "algorithm": f'algorithm = "fedkseed"\nobjective = "{objective}"', "count": "count = 2",
        "held_out": "held_out = 0.2", "examples": "examples = 2", "generated": "generated = 0",
        "max_new_tokens": f"max_new_tokens = {LIMIT}", "steps": "steps = 2", "rounds": "rounds = 2",
        "eps": "eps = 8e-3", "lr": "lr = 1e-4",
    }  # fmt: skip
    path = folder / "recipe.toml"
    path.write_text(recipe_text(model, data, **(lines | changes)))
    return load_recipe(path)


@pytest.mark.parametrize("seed", [1, 2])
def test_raising_accuracy_leads_a_model_back_that_was_moved_along_the_directions(
    seed, tmp_path, trained, data_file, tokenizer, batch
):
    model = load_model(str(trained))
    weights = hold(model, Pool(pool_key(seed), 4, "hadamard"), mode="materialized")
    for distance in np.arange(0.01, 0.2, 0.005):  # until less than a third of the tokens are right
        weights.load(np.full(4, distance, np.float32))
        if accuracy(model, batch) < 0.3:
            break
    model.save_pretrained(tmp_path / "moved")
    tokenizer.save_pretrained(tmp_path / "moved")
    lines = {
        "seed": f"seed = {seed}", "size": "size = 4", "steps": "steps = 15", "batch_size": "batch_size = 12",
        "eps": "eps = 1e-2", "lr": "lr = 1.5e-3",
    }  # fmt: skip
    simulation = Simulation(recipe_of(tmp_path, tmp_path / "moved", data_file, "accuracy", **lines))
    examples = [e for share in simulation.shares.clients for e in share]
    fixed, state = collate(examples, tokenizer.pad_token_id), simulation.strategy.server.init()
    simulation.setup.load(state)
    before = accuracy(simulation.setup.model, fixed)
    for _ in range(2):
        state, _report = simulation.round(state)
    simulation.setup.load(state)
    assert accuracy(simulation.setup.model, fixed) > before + 0.1  # 0.16 to 0.49 on seeds 1 to 6


OWN = """
from pathlib import Path

NONE = 0.25

def score(answers, examples):
    with (Path(__file__).parent / "calls").open("a") as calls:
        print([[a, e.instruction, e.response, e.category] for a, e in zip(answers, examples)], file=calls)
    return [NONE + len(a) for a in answers]
"""


def test_a_function_of_ones_own_gets_answers_and_examples_and_its_scores_are_raised(
    tmp_path, model, tokenizer, batch, answers
):
    (tmp_path / "own.py").write_text(OWN)
    value = objective_of(f"{tmp_path}/own.py:score", LIMIT)(model, tokenizer, batch)
    assert len(set(answers)) > 1
    asked = [[a, r["instruction"], r["response"], r["category"]] for a, r in zip(answers, SHORT, strict=True)]
    assert (tmp_path / "calls").read_text() == f"{asked}\n"
    assert value == pytest.approx(1 - np.mean([0.25 + len(a) for a in answers]))


def test_a_run_finds_the_function_again_from_elsewhere_and_an_evaluation_does_without(
    tmp_path, trained, data_file, monkeypatch
):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    whole = start(recipe_of(tmp_path, trained, data_file, "own.py:score"), tmp_path / "run")
    assert all(report["loss"] < 0.75 for report in whole.reports)  # 1 − 0.25 − characters: the objective is reported
    asked = (tmp_path / "calls").read_text().splitlines()
    assert len(asked) == 2 * 2 * 2 * 2  # rounds, clients, steps, points
    monkeypatch.chdir(tmp_path / "elsewhere")
    Store(tmp_path / "run").rollback(1)
    assert resume(tmp_path / "run").digest == whole.digest
    assert (tmp_path / "calls").read_text().splitlines()[len(asked) :] == asked[len(asked) // 2 :]
    (tmp_path / "own.py").unlink()
    Store(tmp_path / "run").rollback(1)
    with pytest.raises(FedKSeedError, match=re.escape(f"no file {tmp_path / 'own.py'}")):
        resume(tmp_path / "run")
    assert CliRunner().invoke(app, ["eval", str(tmp_path / "run")]).exit_code == 0


def test_a_function_of_a_package_is_found(model, tokenizer, batch):
    by_name, by_place = objective_of("rouge", LIMIT), objective_of("fedkseed.evaluation.metrics:rouge", LIMIT)
    assert by_place(model, tokenizer, batch) == by_name(model, tokenizer, batch)


def test_the_example_of_the_documentation_works(request, model, tokenizer, batch):
    example = request.config.rootpath / "docs" / "examples" / "objective.py"
    assert math.isfinite(objective_of(f"{example}:brief", LIMIT)(model, tokenizer, batch))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:score", "there is no file .*nowhere.py; correct the path"),
        ("no.such.package:score", r"No module named 'no'; install it, or name a file as 'FILE.py:score'"),
        ("fedkseed.evaluation.metrics:bleu", r"has no function 'bleu'; its functions are: .*exact_match"),
        ("fedkseed.evaluation.metrics:SCORES", r"has no function 'SCORES'"),
    ],
)
def test_a_function_that_is_not_there_is_refused(name, message):
    with pytest.raises(FedKSeedError, match=message):
        objective_of(name, LIMIT)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "a list of numbers, one for each of 12 answers; it returned None"),
        ("1.0", "it returned 1.0"),
        ("[1.0] * 11", r"it returned \[1.0"),
        ("[str(len(a)) for a in answers]", "it returned"),
        ("[[1.0], [1.0, 2.0]] * 6", "it returned"),
        ("[1.0] * 11 + [float('nan')]", "scored the answer .* nan; return a finite number"),
        ("[1.0] * 11 + [float('-inf')]", "scored the answer .* -inf; return a finite number"),
    ],
)
def test_what_is_no_list_of_finite_numbers_is_refused(returned, message, tmp_path, monkeypatch, model, batch):
    monkeypatch.setattr("fedkseed.evaluation.objectives.answers_to", lambda *given: ["x"] * len(given[2]))
    (tmp_path / "own.py").write_text(f"def score(answers, examples):\n    return {returned}\n")
    with pytest.raises(FedKSeedError, match=message):
        objective_of(f"{tmp_path}/own.py:score", LIMIT)(model, None, batch)


@pytest.mark.parametrize("name", [name for name, algorithm in ALGORITHMS.items() if algorithm.differentiates])
def test_algorithms_that_backpropagate_want_the_loss(name):
    with pytest.raises(FedKSeedError, match=f"{name} takes derivatives, and 'accuracy' has no gradient"):
        parse({"model": {"name": "/no/model"}, "training": {"algorithm": name, "objective": "accuracy"}})


@pytest.mark.parametrize("name", ["acuracy", "exact_match", "own.py", ":score", "own.py:", "a b:score"])
def test_a_recipe_with_an_unknown_objective_is_refused(name):
    with pytest.raises(
        FedKSeedError, match=r"\[training\] objective is 'loss', 'accuracy', 'exact match', 'rouge', or"
    ):
        parse({"model": {"name": "x"}, "training": {"objective": name}})
