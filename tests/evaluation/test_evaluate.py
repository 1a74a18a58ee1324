"""The loss against Hugging Face's own, generation against one prompt at a time."""

import inspect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, OPTConfig

from fedkseed.data.batches import collate
from fedkseed.data.sources import Example
from fedkseed.data.wording import Wording
from fedkseed.evaluation.evaluate import evaluate, respond
from fedkseed.evaluation.metrics import Metrics, rouge, rouge_l
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.models.loss import batch_loss, example_losses

from ..conftest import rows
from ..encoding import encode


@pytest.fixture(scope="module")
def model(model_folder):
    return load_model(str(model_folder))


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(str(model_folder))


@pytest.fixture(scope="module")
def encoded(tokenizer):
    return [encode(Example(**row), tokenizer, Wording()) for row in rows()[:7]]


def test_the_loss_is_that_of_transformers(model, tokenizer, encoded):
    batch = collate(encoded, tokenizer.pad_token_id)
    theirs = model(input_ids=batch.tokens, attention_mask=batch.mask, labels=batch.labels).loss
    assert batch_loss(model, batch) == pytest.approx(float(theirs), rel=1e-5)


def test_the_loss_works_for_models_that_cannot_leave_logits_out(tokenizer, encoded):
    config = OPTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32, word_embed_proj_dim=32)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()
    model.forward = lambda input_ids, attention_mask, use_cache: type(model).forward(model, input_ids, attention_mask)
    assert "logits_to_keep" not in inspect.signature(model.forward).parameters
    batch = collate(encoded, tokenizer.pad_token_id)
    theirs = type(model).forward(model, batch.tokens, batch.mask, labels=batch.labels).loss
    assert batch_loss(model, batch) == pytest.approx(float(theirs), rel=1e-5)


def test_padding_does_not_change_an_examples_loss(model, tokenizer, encoded):
    together = example_losses(model, encoded, tokenizer.pad_token_id)
    alone = [example_losses(model, [e], tokenizer.pad_token_id)[0] for e in encoded]
    np.testing.assert_allclose(together, alone, rtol=1e-5)


def test_the_first_answers_are_kept_with_their_requests(model, tokenizer, encoded):
    metrics = Metrics(written={"rouge": rouge})
    found = evaluate(model, tokenizer, encoded, metrics=metrics, generated=5, max_new_tokens=5)
    prompts = [e.tokens[: e.prompt] for e in encoded[:3]]
    written = [respond(model, tokenizer, [prompt], 5)[0] for prompt in prompts]
    expected = [[e.example.instruction, e.example.response, w] for e, w in zip(encoded, written, strict=False)]
    assert found.answers == expected
    assert evaluate(model, tokenizer, encoded).answers == []


def test_evaluation_keeps_the_order_of_the_examples(model, tokenizer, encoded):
    metrics = Metrics(written={"rouge": rouge})
    scores = evaluate(model, tokenizer, encoded, metrics=metrics, generated=3, max_new_tokens=5, batch_size=2)
    alone = [example_losses(model, [e], tokenizer.pad_token_id)[0] for e in encoded]
    np.testing.assert_allclose(scores.losses, alone, rtol=1e-5)
    assert len(scores.rouge) == len(scores.empty) == 3
    assert all(0 <= score <= 1 for score in scores.rouge)


def test_answers_written_together_are_those_written_alone(model, tokenizer, encoded):
    prompts = [e.tokens[: e.prompt] for e in encoded[:4]]
    together = respond(model, tokenizer, prompts, 6)
    assert together == [respond(model, tokenizer, [prompt], 6)[0] for prompt in prompts]


def test_an_answer_that_is_a_special_token_is_read(model, model_folder):
    """As labels that a tokenizer has as tokens of their own; what ends an answer is no part of it."""
    tokenizer = load_tokenizer(str(model_folder))
    prompt = tokenizer("Is 7 even?").input_ids
    (plain,) = respond(model, tokenizer, [prompt], 4)
    likely = tokenizer(plain, add_special_tokens=False).input_ids[0]
    tokenizer.add_special_tokens({"additional_special_tokens": [tokenizer.convert_ids_to_tokens(likely)]})
    assert likely in tokenizer.all_special_ids
    assert respond(model, tokenizer, [prompt], 1)[0] == tokenizer.decode([likely])
    assert respond(model, tokenizer, [prompt], 4, [likely]) == [""]


WORDS = st.lists(st.sampled_from(["a", "A", "b7", "the", "ä", "?", "x-y", "\n", ""]), max_size=9).map(" ".join)


@settings(deadline=None)  # the package is imported in the first example
@given(WORDS, WORDS)
def test_rouge_l_is_that_of_the_package_rouge_score(reference, output):
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    assert rouge_l(reference, output) == scorer.score(reference, output)["rougeL"].fmeasure


def test_the_two_packages_score_differently():
    assert rouge_l("Paris", "paris") == 1
    assert rouge_l("Paris", "paris", "rouge") == 0
    assert rouge_l("yes", "yes yes yes yes", "rouge") == pytest.approx(1)
    assert rouge_l("yes", "yes yes yes yes") == pytest.approx(0.4)
    for package in ("rouge-score", "rouge"):
        assert rouge_l("a b c", "", package) == 0
        assert rouge_l("a b c", "...", package) == 0
