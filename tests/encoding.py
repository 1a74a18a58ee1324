"""Examples as tokens, of which none is refused."""

from fedkseed.data.wording import encode_each


def encode_all(examples, tokenizer, wording):
    encoded = encode_each(examples, tokenizer, wording)
    for each in encoded:
        if isinstance(each, Exception):
            raise each
    return encoded


def encode(example, tokenizer, wording):
    return encode_all([example], tokenizer, wording)[0]
