import itertools

import pytest
import torch

from fedkseed.data.instructions import alpaca, collate, encode, encode_all, endless_batches
from fedkseed.data.jsonl import Example
from fedkseed.models.load import load_tokenizer
from fedkseed.models.loss import IGNORED
from fedkseed.randomness import Purpose, generator


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(str(model_folder))


def test_the_prompt_is_the_papers():
    text = alpaca(Example("Name it.", "x", context="A thing."), None)
    assert text == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nName it.\n\n### Input:\nA thing.\n\n### Response:"
    )
    assert "### Input" not in alpaca(Example("Name it.", "x"), None)


def test_the_loss_sees_the_response_and_the_end_and_nothing_else(tokenizer):
    encoded = [encode(Example("Q?", response), tokenizer, "alpaca") for response in ("four legs", "red")]
    batch = collate(encoded, tokenizer.pad_token_id)
    for row, response in enumerate(("four legs", "red")):
        seen = batch.labels[row][batch.labels[row] != IGNORED]
        assert tokenizer.decode(seen) == response + tokenizer.eos_token
        assert int(batch.mask[row].sum()) == len(encoded[row].tokens)
    assert torch.equal(batch.tokens[batch.labels != IGNORED], batch.labels[batch.labels != IGNORED])


def test_longer_examples_are_left_out_and_counted(tokenizer):
    examples = [Example("Q?", "word " * n) for n in (1, 100, 300)]
    kept, left_out = encode_all(examples, tokenizer, "alpaca", 250)
    assert left_out == 3 - len(kept)
    assert all(len(e.tokens) <= 250 for e in kept)


def test_a_pass_uses_every_example_once_and_rounds_differ(tokenizer):
    encoded = [encode(Example("Q?", "x" * (n + 1)), tokenizer, "alpaca") for n in range(6)]

    def first_pass(round_: int) -> list[int]:
        batches = endless_batches(encoded, 2, 0, generator(0, Purpose.BATCHES, round_, 1))
        return [int(row.sum()) for batch in itertools.islice(batches, 3) for row in batch.mask]

    assert sorted(first_pass(0)) == sorted(len(e.tokens) for e in encoded)
    assert first_pass(0) == first_pass(0)
    assert first_pass(0) != first_pass(1)


def test_a_client_with_less_than_a_batch_uses_all_it_has(tokenizer):
    encoded = [encode(Example("Q?", "x"), tokenizer, "alpaca")] * 3
    assert next(endless_batches(encoded, 8, 0, generator(0, Purpose.BATCHES, 0, 0))).tokens.shape[0] == 3
