"""Metrics against slow definitions, and through a whole run: store, terminal, event files, report, tables."""

import inspect
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from tomllib import loads
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Lfm2Config, MambaConfig, MistralConfig

from fedkseed import FedKSeedError, load_recipe, resume
from fedkseed.data.batches import Encoded, collate
from fedkseed.data.federated import own_held_out, share_out
from fedkseed.data.layouts import MOST_LABELS
from fedkseed.data.sources import Example
from fedkseed.data.wording import Wording
from fedkseed.evaluation.evaluate import evaluate, respond
from fedkseed.evaluation.metrics import Metrics, accuracies, accuracy, metrics_of, rouge_l
from fedkseed.evaluation.statistics import BALANCED, Evaluation, McNemar, balanced_accuracy, paired_change
from fedkseed.models import loss as losses
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.models.loss import CACHES, example_losses, ignores_padding, option_losses
from fedkseed.paper.results import MEASURES, RunOutcome
from fedkseed.recipe import schema
from fedkseed.recipe.reading import parse
from fedkseed.report import results
from fedkseed.run import trackers
from fedkseed.run.simulation import Simulation
from fedkseed.run.store import Store

from ..conftest import CONFIGS, SMALL, recipe_text
from ..encoding import encode
from ..weights.test_streamed import model_of
from .conftest import fedkseed, train

LABELS = {"taste": ["sweet", "sour", "it has no taste that I know of"], "size": ["large", "small"]}
THINGS = ["grass", "snow", "coal", "a cat", "an ant", "a bird", "France", "Peru", "lime", "sugar", "a pea", "the sea"]
STEPS = 72  # of backpropagation: 20 of 24 choices are right then, and all five labels are chosen
OWN = """
def score(answers, examples):
    return [len(a) + len(e.response) for a, e in zip(answers, examples, strict=True)]
"""


def questions() -> list[dict[str, str]]:
    return [
        {"instruction": f"What is the {kind} of {thing}?", "response": labels[k % len(labels)], "category": kind}
        for kind, labels in LABELS.items()
        for k, thing in enumerate(THINGS)
    ]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def data_file(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "questions.jsonl", questions())


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(str(model_folder))


@pytest.fixture(scope="module")
def decided(model_folder, tokenizer, tmp_path_factory) -> Path:
    """A model that chooses now this and now that, and not always right."""
    batch = collate([encode(Example(**row), tokenizer, Wording()) for row in questions()], tokenizer.pad_token_id)
    return train(model_folder, tokenizer, batch, STEPS, tmp_path_factory.mktemp("decided"))


@pytest.fixture(scope="module")
def model(decided):
    return load_model(str(decided))


@pytest.fixture(scope="module")
def encoded(tokenizer):
    return [encode(Example(**row), tokenizer, Wording()) for row in questions()]


def log_probability(model, tokenizer, example: Example, option: str) -> float:
    """The sum over the option's tokens and the end, from one plain forward without padding."""
    whole = encode(replace(example, response=option), tokenizer, Wording())
    logs = model(torch.tensor([whole.tokens])).logits[0].double().log_softmax(-1)
    return sum(float(logs[at - 1, whole.tokens[at]]) for at in range(whole.prompt, len(whole.tokens)))


def slow_choice(model, tokenizer, example: Example, options: list[str]) -> str:
    return max(options, key=lambda option: log_probability(model, tokenizer, example, option))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_choice_is_that_of_one_option_at_a_time(side, batch_size, model, tokenizer, encoded, monkeypatch):
    monkeypatch.setattr(tokenizer, "padding_side", side)
    lengths = {len(tokenizer(option).input_ids) for option in LABELS["taste"]}
    assert len(lengths) > 1
    passed, metrics = [], Metrics(options=LABELS)
    found = evaluate(model, tokenizer, encoded, metrics=metrics, batch_size=batch_size, on_progress=passed.append)
    expected = [slow_choice(model, tokenizer, e.example, LABELS[e.example.category]) for e in encoded]
    assert found.choices == [(e.example.response, chosen) for e, chosen in zip(encoded, expected, strict=True)]
    assert found.scores["choice"] == [float(e.example.response == c) for e, c in zip(encoded, expected, strict=True)]
    assert len(set(expected)) >= 4  # no option of a category wins everywhere
    assert 0 < sum(found.scores["choice"]) < len(encoded)
    assert sum(passed) == metrics.work(encoded, 0) == 24 + 12 * 3 + 12 * 2


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_options_after_one_prompt_have_the_losses_of_whole_texts(config):
    model = model_of(config)
    prompt, options = (1, 2, 3, 4, 5), [(7,), (8, 9, 10), (11, 12)]
    (found,) = option_losses(model, [prompt], [options], 0)
    for option, nats in zip(options, found, strict=True):
        logs = model(torch.tensor([[*prompt, *option]])).logits[0].double().log_softmax(-1)
        assert nats == pytest.approx(-sum(float(logs[4 + k, token]) for k, token in enumerate(option)), rel=1e-5)
    assert option_losses(model, [prompt], [[(7,), (8,)]], 0)[0][0] == pytest.approx(found[0], rel=1e-6)
    several = option_losses(model, [(5, 4, 3, 2, 1), prompt], [[(7,), (8,)], options], 0)
    assert several[1] == pytest.approx(found, rel=1e-5)
    (alone,) = option_losses(model, [(5, 4, 3, 2, 1)], [[(7,), (8,)]], 0)
    assert several[0] == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("begun", [0, 1, 20])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_prompts_of_different_lengths_have_the_losses_that_each_has_alone(config, begun):
    """Also where they begin alike, and where one of them is the beginning of the others."""
    model = model_of(config)
    assert ignores_padding(model)
    begin = tuple(range(1, 1 + begun))
    prompts = [(*begin, *rest) for rest in ((33, 34, 35, 36, 37), (38,), (39, 40, 41), (33,))]
    options = [[(7,), (8, 9, 10)], [(11, 12), (13,), (14, 15, 16)], [(17,)], [(7,), (11, 12)]]
    together = option_losses(model, prompts, options, 0)
    for prompt, own, found in zip(prompts, options, together, strict=True):
        assert found == pytest.approx(option_losses(model, [prompt], [own], 0)[0], rel=1e-5)


@pytest.mark.parametrize("earlier", [(), ((12, 14),)], ids=["one turn", "two turns"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_rows_that_begin_alike_have_the_losses_that_each_has_alone(config, earlier):
    model, read = model_of(config), []
    model.register_forward_hook(lambda _, args, kwargs, out: read.append(kwargs["input_ids"].shape), with_kwargs=True)
    begin = tuple(range(1, 21))
    texts = [((33, 34, 35), (7, 8)), ((38,), (9, 10, 11)), ((), (12,))]
    nothing = Example("", "")
    encoded = [Encoded((*begin, *rest, *answer), 20 + len(rest), nothing, earlier) for rest, answer in texts]
    together = example_losses(model, encoded, 0)
    begun = 11 if earlier else 19  # up to the token before the first that counts
    windows = config.model_type in ("gemma2", "mistral")
    assert read == ([(3, 25)] if windows else [(1, begun), (3, 25 - begun)])
    for one, found in zip(encoded, together, strict=True):
        logs = model(input_ids=torch.tensor([one.tokens])).logits[0].double().log_softmax(-1)
        counted = [at for span in one.counted for at in range(*span)]
        expected = -sum(float(logs[at - 1, one.tokens[at]]) for at in counted) / len(counted)
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", CACHES)
def test_options_of_one_batch_take_three_passes_and_read_a_common_beginning_once(name):
    """Also where the cache has the other name: transformers 5.24 changed it, and every option was read by itself."""
    model, read = model_of(CONFIGS[0]), []
    forward = model.forward
    here = next(each for each in CACHES if each in inspect.signature(forward).parameters)

    def renamed(**arguments):
        output = forward(**{here if key == name else key: value for key, value in arguments.items()})
        return SimpleNamespace(logits=output.logits, **{name: output[here]} if here in output else {})

    parameters = inspect.signature(forward).parameters.values()
    names = [each.replace(name=name) if each.name == here else each for each in parameters]
    renamed.__signature__ = inspect.Signature(names)
    model.forward = renamed
    model.register_forward_hook(lambda _, args, kwargs, out: read.append(kwargs["input_ids"].shape), with_kwargs=True)
    prompts = [(*range(1, 21), *rest) for rest in ((33, 34, 35, 36, 37), (38,), (39, 40, 41))]
    option_losses(model, prompts, [[(7,), (8, 9, 10)], [(11, 12)], [(13,)]], 0)
    assert read == [(1, 20), (3, 5), (4, 2)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_where_logits_are_many_those_of_tokens_that_count_are_made_a_few_at_a_time(config, monkeypatch):
    model, made, caches = model_of(config), [], []
    prompts, options = [(*range(1, 12), *rest) for rest in ((33, 34), (38,))], [[(7,), (8, 9, 10)], [(11, 12), (13,)]]
    encoded = [Encoded((*range(1, n), 7, 8, 9), n - 1, Example("", "")) for n in (12, 15, 13)]
    expected = example_losses(model, encoded, 0), option_losses(model, prompts, options, 0)
    monkeypatch.setattr(losses, "MANY_LOGITS", 2 * 64)  # of two tokens
    layer = model.get_output_embeddings()
    layer.register_forward_hook(lambda _, args, out: made.append(out.shape[:-1].numel()))
    assert example_losses(model, encoded, 0) == pytest.approx(expected[0], rel=1e-5)
    assert max(made[-5:]) <= 2
    assert sum(made[-5:]) == 3 * 3
    model.get_decoder().register_forward_hook(
        lambda _, args, kwargs, out: caches.extend(kwargs[name] for name in CACHES if kwargs.get(name) is not None),
        with_kwargs=True,
    )
    found = option_losses(model, prompts, options, 0)
    assert [*map(pytest.approx, found)] == expected[1]
    assert (max(made[-2:]), sum(made[-2:])) == (2, 3)  # what follows the first tokens of options, without padding
    assert not any("forward" in vars(module) for module in model.modules())
    assert {len(layer.keys) for layer in caches[-1].layers} == {2}, "rows of options are in no layer's cache"


def test_a_window_shorter_than_the_prompts_is_that_of_each_prompt_alone():
    model = model_of(MistralConfig(**SMALL, intermediate_size=48, num_key_value_heads=1, sliding_window=6))
    prompts = [(*range(1, 21), *rest) for rest in ((33, 34, 35, 36, 37), (38,))]
    options = [[(7, 8, 9), (10,)], [(11, 12), (13,)]]
    for found, prompt, own in zip(option_losses(model, prompts, options, 0), prompts, options, strict=True):
        assert found == pytest.approx(option_losses(model, [prompt], [own], 0)[0], rel=1e-5)
        for option, nats in zip(own, found, strict=True):
            logs = model(torch.tensor([[*prompt, *option]])).logits[0].double().log_softmax(-1)[len(prompt) - 1 :]
            assert nats == pytest.approx(-sum(float(logs[k, token]) for k, token in enumerate(option)), rel=1e-5)


def test_a_model_with_a_recurrent_state_reads_each_text_whole():
    model = model_of(MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4, expand=1))
    (found,) = option_losses(model, [(1, 2, 3)], [[(7, 8), (9,)]], 0)
    logs = model(torch.tensor([[1, 2, 3, 7, 8]])).logits[0].double().log_softmax(-1)
    assert found[0] == pytest.approx(-float(logs[2, 7] + logs[3, 8]), rel=1e-5)


def test_a_model_with_a_recurrent_state_in_some_layers_reads_each_text_whole():
    """It takes positions, and has a cache, rows of which can't be taken twice."""
    layers = ["conv", "full_attention"]
    model = model_of(Lfm2Config(**SMALL, intermediate_size=48, num_key_value_heads=1, layer_types=layers))
    assert not ignores_padding(model)
    prompts, options = [(*range(1, 21), 33, 34), (*range(1, 21), 35)], [[(7, 8), (9,)], [(10,)]]
    for prompt, own, found in zip(prompts, options, option_losses(model, prompts, options, 0), strict=True):
        for option, nats in zip(own, found, strict=True):
            logs = model(torch.tensor([[*prompt, *option]])).logits[0].double().log_softmax(-1)[len(prompt) - 1 :]
            assert nats == pytest.approx(-sum(float(logs[k, token]) for k, token in enumerate(option)), rel=1e-5)
    encoded = [Encoded((*prompt, 7, 8), len(prompt), Example("", "")) for prompt in prompts]
    alone = [example_losses(model, [one], 0)[0] for one in encoded]
    assert example_losses(model, encoded, 0) == pytest.approx(alone, rel=1e-5)


def test_where_the_label_is_the_category_all_labels_are_options(tmp_path, decided, tokenizer):
    rows = [{**row, "category": row["response"]} for row in questions()]
    shares = share_out(recipe_of(tmp_path, decided, write(tmp_path / "rows.jsonl", rows)), tokenizer)
    labels = sorted(label for labels in LABELS.values() for label in labels)
    assert set(map(tuple, shares.options.values())) == {tuple(labels)}
    assert len(shares.options) > 1


def test_choice_is_by_the_whole_probability_and_not_by_that_of_a_token(model_folder, tokenizer, encoded):
    """A model to which all tokens are alike prefers the shortest option; the mean of a token would be a tie."""
    model = load_model(str(model_folder))
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    options = {"taste": ["it has no taste that I know of", "sour"], "size": ["small", "small"]}
    found = evaluate(model, tokenizer, encoded, metrics=Metrics(options=options))
    assert {chosen for _, chosen in found.choices[:12]} == {"sour"}


def test_a_tie_goes_to_the_first_option(model_folder, tokenizer, encoded):
    model = load_model(str(model_folder))
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    one, other = (next(w for w in words if len(tokenizer(w).input_ids) == 1) for words in ("abc", "xyz"))
    for options in ([one, other], [other, one]):
        found = evaluate(model, tokenizer, encoded[:2], metrics=Metrics(options={"taste": options}))
        assert {chosen for _, chosen in found.choices} == {options[0]}


def test_token_accuracy_is_that_of_one_token_at_a_time(model, tokenizer, encoded):
    """The responses are those the model gives to half of the tokens: it gets some right, and some not."""
    said = []
    for e in encoded[:6]:
        tokens = list(e.tokens[: e.prompt])
        for k in range(4):
            best = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
            tokens.append(best if k < len(said) else (best + 1) % 256)
        said.append(replace(e, tokens=tuple(tokens)))
    found = evaluate(model, tokenizer, said, metrics=Metrics({"accuracy": accuracies}), batch_size=4)
    assert found.scores["accuracy"] == [0, 0.25, 0.5, 0.75, 1, 1]
    assert accuracy(model, collate(said, tokenizer.pad_token_id)) == pytest.approx(3.5 / 6)


def test_scores_of_answers_are_those_of_the_same_objectives(model, tokenizer, encoded, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    own = f"{tmp_path}/own.py:score"
    for package in ("rouge", "rouge-score"):
        settings = schema.EvaluationTable(metrics=["rouge", "exact match", own], generated=3, rouge=package)
        metrics = metrics_of(settings, {})
        found = evaluate(model, tokenizer, encoded, metrics=metrics, generated=3, max_new_tokens=4)
        answers = respond(model, tokenizer, [e.tokens[: e.prompt] for e in encoded[:3]], 4)
        pairs = [(e.example.response, a) for e, a in zip(encoded, answers, strict=False)]
        assert found.rouge == [rouge_l(*pair, package) for pair in pairs]
        assert found.scores["exact match"] == [float(a.strip() == b) for b, a in pairs]
        assert found.scores[own] == [len(a) + len(b) for b, a in pairs]
        assert found.empty == [not a.strip() for a in answers]


# --- options -----------------------------------------------------------------------------------


def recipe_of(folder: Path, model: Path, data: Path, **changes: str):
    lines = {
        "count": "count = 2", "held_out": 'held_out = 0.4', "generated": "generated = 0",
        "examples": 'examples = 9\nmetrics = ["choice"]',
    }  # fmt: skip
    path = folder / "recipe.toml"
    path.write_text(recipe_text(model, data, **(lines | changes)))
    return load_recipe(path)


def test_options_are_the_responses_of_a_category_in_all_rows(tmp_path, decided, data_file, tokenizer):
    expected = {kind: sorted(labels) for kind, labels in LABELS.items()}
    shares = share_out(recipe_of(tmp_path, decided, data_file), tokenizer)
    assert shares.options == expected
    assert {e.example.category for e in shares.held_out} == set(LABELS)
    one = share_out(recipe_of(tmp_path, decided, data_file, held_out='held_out = "size"'), tokenizer)
    assert one.options == {"size": expected["size"]}  # of the evaluated category alone
    plain = recipe_of(tmp_path, decided, data_file, examples="examples = 9")
    assert share_out(plain, tokenizer).options == {}


def test_rows_without_a_category_are_one(tmp_path, decided, tokenizer):
    data = write(tmp_path / "rows.jsonl", [{k: v for k, v in row.items() if k != "category"} for row in questions()])
    shares = share_out(recipe_of(tmp_path, decided, data), tokenizer)
    assert shares.options == {"": sorted(label for labels in LABELS.values() for label in labels)}


def test_a_server_has_the_options_of_its_own_rows(tmp_path, decided, data_file, tokenizer):
    recipe = recipe_of(tmp_path, decided, data_file, held_out='held_out = "taste"')
    held_out, sets = own_held_out(recipe, tokenizer)
    assert held_out.options == {"taste": sorted(LABELS["taste"])}
    assert len(held_out.examples) == 9
    assert sets == {}


@pytest.mark.parametrize(("count", "fits"), [(1, False), (2, True), (MOST_LABELS, True), (MOST_LABELS + 1, False)])
def test_a_category_with_too_few_or_too_many_responses_is_refused(count, fits, tmp_path, decided, tokenizer):
    rows = [{"instruction": f"number {k}", "response": f"label {k % count}", "category": "n"} for k in range(80)]
    recipe = recipe_of(tmp_path, decided, write(tmp_path / "rows.jsonl", rows))
    if fits:
        assert len(share_out(recipe, tokenizer).options["n"]) == count
        return
    said = rf"2 to 32 of them; the category 'n' has {count}\. Give each classification task a category"
    with pytest.raises(FedKSeedError, match=said):
        Simulation(recipe)


# --- the recipe --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "measured", "written"),
    [
        ({}, ("loss",), ()),
        ({"generated": 4}, ("loss", "rouge"), ("rouge",)),
        ({"metrics": []}, ("loss",), ()),
        ({"metrics": ["choice", "accuracy", "choice"], "generated": 4}, ("loss", "choice", "accuracy"), ()),
        ({"metrics": ["exact match"], "generated": 4}, ("loss", "exact match"), ("exact match",)),
    ],
)
def test_what_a_recipe_measures(settings, measured, written):
    found = schema.EvaluationTable(**settings)
    assert (found.measured, found.written) == (measured, written)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metrics": ["f1"]}, r"\[evaluation\] metrics are 'loss', .*'choice', or a function of yours as .*got 'f1'"),
        ({"metrics": ["rouge"]}, r"the metric 'rouge' scores written answers, and generated = 0: set generated"),
        ({"metrics": ["own.py:score"]}, "scores written answers"),
    ],
)
def test_a_recipe_with_a_metric_that_does_not_go_is_refused(settings, message):
    with pytest.raises(FedKSeedError, match=message):
        parse({"model": {"name": "x"}, "evaluation": settings})


def test_the_recipe_of_the_documentation_is_valid(request):
    text = (request.config.rootpath / "docs" / "evaluation.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    first, sets, clients, choosing = (parse({"model": {"name": "x"}, **loads(block)}).evaluation for block in blocks)
    assert first.measured == ("loss", "choice", "accuracy", "exact match")
    assert [one.name for one in sets.sets or ()] == ["own rows", "unseen task", "general"]
    assert clients.clients == 0.1
    assert (choosing.best, choosing.patience) == ("loss", 4)


def test_a_recipe_that_names_no_metrics_is_written_as_before():
    text = parse({"model": {"name": "x"}, "evaluation": {"generated": 4}}).to_toml()
    assert "metrics" not in text


def test_a_functions_path_becomes_absolute_as_others_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["choice", "own.py:score", "package.module:score"]
    recipe = parse({"model": {"name": "x"}, "evaluation": {"metrics": names, "generated": 1}}).absolute()
    assert recipe.evaluation.metrics == ["choice", f"{tmp_path}/own.py:score", "package.module:score"]


def test_a_function_that_is_not_there_is_refused_before_the_model_is_loaded(tmp_path, decided, data_file):
    lines = {"generated": "generated = 2", "examples": 'examples = 9\nmetrics = ["nowhere.py:score"]'}
    with pytest.raises(FedKSeedError, match=r"\[evaluation\] metrics = .*there is no file .*nowhere.py"):
        Simulation(recipe_of(tmp_path, decided, data_file, **lines))


def test_what_is_no_list_of_numbers_is_refused_in_the_metrics_name(model, tokenizer, encoded, tmp_path):
    (tmp_path / "own.py").write_text("def score(answers, examples):\n    return 'good'\n")
    settings = schema.EvaluationTable(metrics=[f"{tmp_path}/own.py:score"], generated=2)
    with pytest.raises(FedKSeedError, match=r"\[evaluation\] metrics = '.*own.py:score' has to return a list of numb"):
        evaluate(model, tokenizer, encoded, metrics=metrics_of(settings, {}), generated=2, max_new_tokens=2)


# --- a whole run -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory, decided, data_file) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "own.py").write_text(OWN)
    names = json.dumps(["accuracy", "choice", "exact match", f"{folder}/own.py:score"])
    lines = {"generated": "generated = 3", "examples": f"every = 1\nexamples = 9\nmetrics = {names}", "lr": "lr = 1e-2"}
    lines["generated"] += "\nstop_when_diverged = false"  # the choices are what is looked at
    recipe_of(folder, decided, data_file, **lines)
    (folder / "printed.txt").write_text(fedkseed("run", folder / "recipe.toml", "--output", folder / "run"))
    return folder / "run"


@pytest.fixture(scope="module")
def kept(run) -> dict[int, Evaluation]:
    return {done: Evaluation(**found) for done, found in Store(run).evaluations().items()}


def test_the_store_has_a_number_an_example(run, kept):
    own = f"{run.parent}/own.py:score"
    assert list(kept) == [0, 1, 2, 3]
    for done, found in kept.items():
        assert {name: len(values) for name, values in found.measures.items()} == {
            "loss": 9, "accuracy": 9, "choice": 9, **({"exact match": 3, own: 3} if done in (0, 3) else {})
        }  # fmt: skip
        assert [float(true == chosen) for true, chosen in found.choices] == found.scores["choice"]
        assert {true for true, _ in found.choices} <= {label for labels in LABELS.values() for label in labels}
    assert kept[0].choices != kept[3].choices  # something has changed, so that the rest below can't pass by chance


def test_the_numbers_are_those_of_the_state(run, kept, model, tokenizer):
    """The first model's, one option at a time."""
    shares = share_out(Store(run).load_recipe(), tokenizer)
    expected = [slow_choice(model, tokenizer, e.example, shares.options[e.example.category]) for e in shares.held_out]
    assert [chosen for _, chosen in kept[0].choices] == expected


def test_the_terminal_shows_each_metric_with_its_paired_change(run, kept):
    printed = (run.parent / "printed.txt").read_text()
    titles = {
        "held-out loss, 9 examples (nats a token)": "loss", "token accuracy, 9 examples": "accuracy",
        "choice accuracy, 9 examples": "choice", "exact match, 3 answers": "exact match",
        "own.py:score, 3 answers": f"{run.parent}/own.py:score",
    }  # fmt: skip
    for title, name in titles.items():
        before, after = (kept[done].measures[name] for done in (0, 3))
        change = paired_change(before, after)
        (line,) = [line for line in printed.splitlines() if title in line]
        assert f"{np.mean(before):.4f} ± " in line
        assert f"{np.mean(after):.4f} ± " in line
        assert f"{change.mean:+.4f} ± {change.error:.4f}" in line
    (line,) = [line for line in printed.splitlines() if BALANCED in line]
    assert f"{balanced_accuracy(kept[3].choices):.4f}" in line
    test = McNemar.of(kept[0].scores["choice"], kept[3].scores["choice"])
    assert f"{test.gained} gained, {test.lost} lost, p = {test.p:.2g}" in printed
    assert "most frequent choice" in printed
    assert "empty outputs" in printed
    assert "choices of the model" in printed


def test_labels_are_cut_to_a_line_and_stay_texts():
    long = "[red]" + 40 * "x"
    with results.console.capture() as captured:
        results.print_confusion([(long, "a\nb"), ("a\nb", "a\nb")])
    assert f"[red]{18 * 'x'}…" in captured.get()
    assert 20 * "x" not in captured.get()
    assert "a b" in captured.get()


def test_rounds_and_metrics_jsonl_have_the_means(run, kept):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["evaluation"] for line in lines] == [kept[done].means for done in (1, 2, 3)]
    assert [line.get("base") for line in lines] == [kept[0].means, None, None]
    others = [{k: v for k, v in line.items() if k not in ("evaluation", "base")} for line in lines]
    assert others == Store(run).reports()
    rows = [re.split("[┃│]", line)[1:-1] for line in fedkseed("rounds", run).splitlines() if re.search("[┃│]", line)]
    table = [dict(zip(map(str.strip, rows[0]), map(str.strip, row), strict=True)) for row in rows[1:]]
    assert [row["round"] for row in table] == ["0", "1", "2", "3"]
    assert [row["choice accuracy"] for row in table] == [f"{kept[done].means['choice']:.4f}" for done in kept]
    assert [row["exact match"] for row in table] == ["0.0000", "", "", f"{kept[3].means['exact match']:.4f}"]


def test_eval_prints_the_same(run, kept):
    printed = fedkseed("eval", run)
    change = paired_change(kept[0].scores["choice"], kept[3].scores["choice"])
    assert f"choice accuracy {np.mean(kept[3].scores['choice']):.4f} ± " in printed
    assert f"change from the base model: {change.mean:+.4f} ± {change.error:.4f}" in printed
    assert f"{BALANCED} {balanced_accuracy(kept[3].choices):.4f}" in printed
    assert "McNemar's exact test against the base model: " in printed
    assert "choices of the model" in printed


def test_event_files_have_a_curve_of_each(run, kept):
    points = {}
    for done, _, values in trackers.curves(Store(run)):
        for name, value in values.items():
            points.setdefault(name, {})[done] = value
    assert points["held-out/choice accuracy"] == {done: found.means["choice"] for done, found in kept.items()}
    assert points[f"held-out/{BALANCED}"] == {done: found.means[BALANCED] for done, found in kept.items()}
    assert points["loss/held-out"] == {done: found.means["loss"] for done, found in kept.items()}
    assert sorted(points["held-out/own.py:score"]) == [0, 3]


def test_a_run_that_was_stopped_ends_with_the_same_evaluations(run, kept, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    Store(copy).rollback(1)
    assert list(Store(copy).evaluations()) == [0, 1]
    resume(copy)
    assert Store(copy).evaluations() == Store(run).evaluations()
    assert [json.loads(line)["evaluation"] for line in (copy / "metrics.jsonl").read_text().splitlines()] == [
        kept[done].means for done in (1, 2, 3)
    ]


def test_metrics_change_nothing_but_the_evaluation(run, tmp_path, decided, data_file):
    recipe_of(tmp_path, decided, data_file, lr="lr = 1e-2", examples="examples = 9")
    fedkseed("run", tmp_path / "recipe.toml", "--output", tmp_path / "plain")
    plain = Store(tmp_path / "plain")
    assert (plain.directory / "adapter.safetensors").read_bytes() == (run / "adapter.safetensors").read_bytes()
    whole = Store(run).evaluations()
    for done, found in plain.evaluations().items():
        assert found["losses"] == whole[done]["losses"]
        assert found["scores"] == {}


def test_an_evaluation_of_an_earlier_release_is_read(run, tmp_path):
    """Its rows of the store lack the new columns; the metrics of the recipe are not made up for it."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    for done, found in Store(copy).evaluations().items():
        Store(copy).evaluated(done, {name: found[name] for name in ("losses", "rouge", "empty")})
    assert "held-out loss" in fedkseed("rounds", copy)
    assert "choice accuracy" not in fedkseed("rounds", copy)
    Store(copy).rollback(3)
    result = resume(copy)
    assert result.after.measures.keys() == {"loss"}


def test_tables_of_experiments_have_the_accuracies(run, kept):
    outcome = RunOutcome.read(run, {}, 1)
    for measure in ("accuracy", "choice"):
        before, after = (kept[done].means[measure] for done in (0, 3))
        assert MEASURES[measure].after(outcome, 3) == pytest.approx(100 * after)
        assert MEASURES[f"{measure} change"].after(outcome, 3) == pytest.approx(100 * (after - before))
    assert MEASURES["rouge"].after(outcome, 3) is None
