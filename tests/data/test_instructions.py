import itertools

import pytest
import torch

from fedkseed import FedKSeedError
from fedkseed.data.instructions import Wording, alpaca, collate, encode, endless_batches, paper
from fedkseed.data.sources import Example
from fedkseed.models.load import load_tokenizer
from fedkseed.models.loss import IGNORED
from fedkseed.randomness import Purpose, generator


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(str(model_folder))


def test_the_prompt_is_the_papers():
    text = paper(Example("Name it.", "x", context="A thing."), None)
    assert text == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nName it.\n\n### Input:\nA thing.\n\n### Response:"
    )
    without = paper(Example("Name it.", "x"), None)
    assert without == text.replace("### Input:\nA thing.\n\n", "")


def test_alpaca_has_an_opening_of_its_own_without_input():
    with_input = Example("Name it.", "x", context="A thing.")
    assert alpaca(with_input, None) == paper(with_input, None)
    assert "paired with" not in alpaca(Example("Name it.", "x"), None)


def test_the_separator_stands_between_prompt_and_response(tokenizer):
    for separator in ("", "\n"):
        encoded = encode(Example("Q?", "yes"), tokenizer, Wording("paper", separator))
        assert tokenizer.decode(encoded.tokens).endswith(f"### Response:{separator}yes{tokenizer.eos_token}")


def test_the_chat_template_is_the_tokenizers(tokenizer, monkeypatch):
    with pytest.raises(FedKSeedError, match="has no chat template"):
        Wording("chat").prompt(Example("Q?", "x"), tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", "U:{{ messages[0]['content'] }}|A:")
    assert tokenizer.decode(Wording("chat").prompt(Example("Q?", "x", "C"), tokenizer)) == "U:Q?\n\nC|A:"


def test_an_unknown_template_is_refused():
    with pytest.raises(FedKSeedError, match="no template is called 'llama'"):
        Wording("llama")


def test_the_loss_sees_the_response_and_the_end_and_nothing_else(tokenizer):
    encoded = [encode(Example("Q?", response), tokenizer, Wording()) for response in ("four legs", "red")]
    batch = collate(encoded, tokenizer.pad_token_id)
    for row, response in enumerate(("four legs", "red")):
        seen = batch.labels[row][batch.labels[row] != IGNORED]
        assert tokenizer.decode(seen) == response + tokenizer.eos_token
        assert int(batch.mask[row].sum()) == len(encoded[row].tokens)
    assert torch.equal(batch.tokens[batch.labels != IGNORED], batch.labels[batch.labels != IGNORED])


def test_a_pass_uses_every_example_once_and_rounds_differ(tokenizer):
    encoded = [encode(Example("Q?", "x" * (n + 1)), tokenizer, Wording()) for n in range(6)]

    def first_pass(round_: int) -> list[int]:
        batches = endless_batches(encoded, 2, 0, generator(0, Purpose.BATCHES, round_, 1))
        return [int(row.sum()) for batch in itertools.islice(batches, 3) for row in batch.mask]

    assert sorted(first_pass(0)) == sorted(len(e.tokens) for e in encoded)
    assert first_pass(0) == first_pass(0)
    assert first_pass(0) != first_pass(1)


def test_a_client_with_less_than_a_batch_uses_all_it_has(tokenizer):
    encoded = [encode(Example("Q?", "x"), tokenizer, Wording())] * 3
    assert next(endless_batches(encoded, 8, 0, generator(0, Purpose.BATCHES, 0, 0))).tokens.shape[0] == 3
