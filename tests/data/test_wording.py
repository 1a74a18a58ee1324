import copy
import itertools
import sys
from dataclasses import replace

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from fedkseed import FedKSeedError
from fedkseed.data.batches import IGNORED, collate, endless_batches
from fedkseed.data.layouts import Example, Turn
from fedkseed.data.wording import TEMPLATES, Wording, cut, encode_each, packed, prompt_of
from fedkseed.models.load import load_tokenizer
from fedkseed.randomness import Purpose, generator

from ..encoding import encode, encode_all


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(str(model_folder))


def test_the_prompt_is_the_papers():
    text = prompt_of("paper", Example("Name it.", "x", context="A thing."))
    assert text == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nName it.\n\n### Input:\nA thing.\n\n### Response:"
    )
    without = prompt_of("paper", Example("Name it.", "x"))
    assert without == text.replace("### Input:\nA thing.\n\n", "")


def test_alpaca_has_an_opening_of_its_own_without_input():
    with_input = Example("Name it.", "x", context="A thing.")
    assert prompt_of("alpaca", with_input) == prompt_of("paper", with_input)
    assert "paired with" not in prompt_of("alpaca", Example("Name it.", "x"))


def test_the_official_code_words_dolly_and_natural_instructions_differently():
    with_input, without = Example("Name it.", "x", context="A thing."), Example("Name it.", "x")
    assert prompt_of("official-dolly", with_input) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response for the task request.\n\n"
        "### Instruction:\nName it.\n\n### Input:\nA thing.\n\n### Response:"
    )
    assert prompt_of("official-dolly", without) == (
        "Below is an instruction that describes a task. Write a response for the task request.\n\n"
        "### Instruction:\nName it.\n\n### Response:"
    )
    assert prompt_of("official-ni", with_input) == prompt_of("paper", with_input)
    assert prompt_of("official-ni", without).endswith("### Instruction:\nName it.\n\n### Input:\n\n\n### Response:")


ASKED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}U:{{ m['content'] }}|A:{% else %}"
    "{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_many_examples_have_the_tokens_that_each_has_alone(model_folder, template):
    """The oracle calls the tokenizer, one that begins texts with a token of its own, with one text at a time."""
    tokenizer = load_tokenizer(str(model_folder))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    tokenizer.chat_template = ASKED
    examples = [Example(f"Q{'?' * n}", "yes " * n, "C" * (n % 2)) for n in range(5)]
    wording = Wording(template, "\n")
    for example, encoded in zip(examples, encode_all(examples, tokenizer, wording), strict=True):
        chat = f"U:{prompt_of('plain', example)}|A:"
        is_chat = template == "chat"
        asked = tokenizer(chat if is_chat else prompt_of(template, example) + "\n", add_special_tokens=not is_chat)
        answered = tokenizer(example.response, add_special_tokens=False)
        assert (asked.input_ids[0] == 0) == (template != "chat")
        assert encoded.tokens == (*asked.input_ids, *answered.input_ids, tokenizer.eos_token_id)
        assert (encoded.prompt, encoded.example) == (len(asked.input_ids), example)
    assert encode_all([], tokenizer, wording) == []


def test_a_cut_example_keeps_its_first_tokens(tokenizer):
    whole = encode(Example("Q?", "four legs"), tokenizer, Wording())
    short, shorter = cut(whole, whole.prompt + 1), cut(whole, whole.prompt - 1)
    assert (short.tokens, short.prompt) == (whole.tokens[: whole.prompt + 1], whole.prompt)
    assert (len(shorter.tokens), shorter.prompt) == (whole.prompt - 1, whole.prompt - 1)
    assert cut(whole, 10_000) == whole


def test_a_cut_conversation_keeps_the_spans_that_are_left(tokenizer):
    whole = encode(TALK, tokenizer, Wording())
    (begin, end), _ = whole.counted
    short = cut(whole, end - 1)
    assert short.counted == ((begin, end - 1), (end - 1, end - 1))
    assert cut(whole, begin).counted == ((begin, begin),)
    assert cut(whole, 10_000) == whole


def test_the_separator_stands_between_prompt_and_response(tokenizer):
    for separator in ("", "\n"):
        encoded = encode(Example("Q?", "yes"), tokenizer, Wording("paper", separator))
        assert tokenizer.decode(encoded.tokens).endswith(f"### Response:{separator}yes{tokenizer.eos_token}")


def test_the_chat_template_is_the_tokenizers(tokenizer, monkeypatch):
    with pytest.raises(FedKSeedError, match="has no chat template"):
        Wording("chat").prompt(Example("Q?", "x"), tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", ASKED)
    assert tokenizer.decode(Wording("chat").prompt(Example("Q?", "x", "C"), tokenizer)) == "U:Q?\n\nC|A:"


USER = Turn("user", "Q?")
TALK = Example(
    "And a crab?",
    "Ten.",
    turns=(
        Turn("system", "Be brief."),
        Turn("user", "How many legs has a cat?"),
        Turn("assistant", "Four."),
        Turn("user", "And a bird?"),
        Turn("assistant", " "),  # nothing to learn
        Turn("user", "And a crab?"),
    ),
)
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SECTION = "\n\n### Instruction:\n{}\n\n### Response:\n"
HEAD = prompt_of("paper", Example("How many legs has a cat?", "", "Be brief.")) + "\n"
FOUR, TEN = ([(answer, True), ("<end>", True)] for answer in ("Four.", "Ten."))
WORDED = {  # wording -> its texts, and whether the loss counts them, as a hand writes them
    CHAT: [
        ("system: Be brief.<end>\nuser: How many legs has a cat?<end>\nassistant: ", False),
        *FOUR,
        ("\nuser: And a bird?<end>\nassistant:  <end>\nuser: And a crab?<end>\nassistant: ", False),
        *TEN,
    ],
    "paper": [
        (HEAD, False),
        *FOUR,
        (SECTION.format("And a bird?\n\nAnd a crab?"), False),
        *TEN,
    ],
    "plain": [
        ("How many legs has a cat?\n\nBe brief.\n", False),
        *FOUR,
        ("\n\nAnd a bird?\n\nAnd a crab?\n", False),
        *TEN,
    ],
}


@pytest.mark.parametrize("wording", WORDED, ids=["chat", "paper", "plain"])
def test_the_loss_counts_the_answers_of_a_conversation_token_by_token(tokenizer, monkeypatch, wording):
    monkeypatch.setattr(tokenizer, "chat_template", wording if "{" in wording else None)
    encoded = encode(TALK, tokenizer, Wording("chat" if "{" in wording else wording))
    pieces = [(tokenizer(text, add_special_tokens=False).input_ids, counted) for text, counted in WORDED[wording]]
    tokens = [token for piece, _ in pieces for token in piece]
    labels = [token if counted else IGNORED for piece, counted in pieces for token in piece]
    other = encode(Example("Q?", "x"), tokenizer, Wording())
    batch = collate([encoded, other], tokenizer.pad_token_id)
    width = batch.tokens.shape[1]
    assert batch.tokens[0].tolist() == tokens + [tokenizer.pad_token_id] * (width - len(tokens))
    assert batch.labels[0].tolist() == labels + [IGNORED] * (width - len(tokens))
    assert encoded.tokens[encoded.prompt :] == (*tokenizer("Ten.").input_ids, tokenizer.eos_token_id)


def test_a_conversation_of_one_answer_has_the_tokens_of_an_instruction(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    one, other = Example("Q?", "yes", turns=(Turn("user", "Q?"),)), Example("Q?", "yes")
    for template in TEMPLATES:
        found = [encode(example, tokenizer, Wording(template)) for example in (one, other)]
        assert (found[0].tokens, found[0].counted) == (found[1].tokens, found[1].counted)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}|{{ messages[0]['content'] }}",
        CHAT.replace("m['content']", "'x'"),
        CHAT.replace("}}{{ eos", " | upper }}{{ eos"),
        CHAT.replace("assistant: ", "bot: "),
    ],
)
def test_a_template_that_does_not_write_answers_as_it_asks_for_them_is_refused_with_both_texts(
    tokenizer, monkeypatch, template
):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    for example in (TALK, Example("Q?", "x")):
        with pytest.raises(FedKSeedError, match=r"it asks by .*and writes"):
            encode(example, tokenizer, Wording("chat"))


def test_an_answer_that_its_template_rewrites_later_is_refused_alone(tokenizer, monkeypatch):
    """As those of reasoning models, which drop thoughts."""
    shortened = CHAT.replace("m['content']", "(m['content'] if loop.last else m['content'].split('>')[-1])")
    monkeypatch.setattr(tokenizer, "chat_template", shortened)
    thought = Example("And?", "No.", turns=(USER, Turn("assistant", "<Hm>Yes."), Turn("user", "And?")))
    alike = Example("And?", "No.", turns=(USER, Turn("assistant", "Yes."), Turn("user", "And?")))
    refused, encoded = encode_each([thought, alike], tokenizer, Wording("chat"))
    assert "'<Hm>Yes.' otherwise than it asks for one" in str(refused)
    assert encoded == encode(alike, tokenizer, Wording("chat"))


def test_a_greeting_is_counted(tokenizer, monkeypatch):
    example = Example("Hi", "Hello.", turns=(Turn("assistant", "Welcome!"), Turn("user", "Hi")))
    for template in (CHAT, "{% if messages[0]['role'] %}{% endif %}" + CHAT):  # the second can't ask for a greeting
        monkeypatch.setattr(tokenizer, "chat_template", template)
        encoded = encode(example, tokenizer, Wording("chat"))
        assert [tokenizer.decode(encoded.tokens[begin:end]) for begin, end in encoded.counted] == [
            "Welcome!<end>", "Hello.<end>",
        ]  # fmt: skip
        prompt = tokenizer.decode(encoded.tokens[: encoded.prompt])
        assert prompt == "assistant: Welcome!<end>\nuser: Hi<end>\nassistant: "


def test_a_lone_answer_is_asked_for_by_nothing(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    encoded = encode(Example("", "Welcome!"), tokenizer, Wording("chat"))
    assert tokenizer.decode(encoded.tokens) == "assistant: Welcome!<end>"
    assert tokenizer.decode(encoded.tokens[: encoded.prompt]) == "assistant: "


@pytest.mark.parametrize("wording", [*WORDED, "alpaca"])
def test_an_answer_that_is_not_to_be_learned_is_in_the_text_and_not_counted(tokenizer, monkeypatch, wording):
    monkeypatch.setattr(tokenizer, "chat_template", wording if "{" in wording else None)
    turns = tuple(turn._replace(counted=turn.text != "Four.") for turn in TALK.turns)
    every, some = (
        encode(example, tokenizer, Wording("chat" if "{" in wording else wording))
        for example in (TALK, replace(TALK, turns=turns))
    )
    assert some.tokens == every.tokens
    assert some.counted == every.counted[1:]


def test_the_plain_wording_is_the_instruction_and_its_context_alone():
    assert prompt_of("plain", Example("Name it.", "x", "A thing.")) == "Name it.\n\nA thing."
    assert prompt_of("plain", Example("Name it.", "x")) == "Name it."


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("separator", ["\n", "", ' "a\\n$b{{ c }}\U0001f600" '])
def test_a_chat_template_gives_programs_the_tokens_of_a_run(model_folder, template, separator):
    """The oracle is `encode`, with a tokenizer that begins texts with a token of its own."""
    tokenizer = load_tokenizer(str(model_folder))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    tokenizer.chat_template = CHAT
    wording = Wording(template, separator)
    opening = Example("Hi", "Hello.", turns=(Turn("assistant", "Welcome!"), Turn("user", "Hi")))
    one, brief = (Example("Q?", "x", turns=turns) for turns in ((USER,), (Turn("system", "Be brief."), USER)))
    for example in (TALK, opening, one, brief):
        encoded = encode(example, tokenizer, wording)
        made = copy.deepcopy(tokenizer)
        made.chat_template = wording.chat_template(tokenizer)
        messages = [{"role": turn.role, "content": turn.text} for turn in example.turns]
        asked = made.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert made.decode(asked) == made.decode(encoded.tokens[: encoded.prompt])
        assert asked == list(encoded.tokens[: encoded.prompt])


def test_a_chat_template_that_is_not_there_is_refused(tokenizer):
    with pytest.raises(FedKSeedError, match="has no chat template"):
        Wording("chat").chat_template(tokenizer)


def texts(*found: tuple[str, str]) -> list[Example]:
    return [Example("", text, category=category, plain=True) for text, category in found]


def test_texts_are_packed_into_blocks_of_which_every_token_counts(tokenizer):
    """The oracle joins the texts by hand; the first token of a block is nothing that could be predicted."""
    examples = texts(("grass is green", ""), ("snow", "b"), ("coal is black.", ""), ("", "b"))
    words = {text: tokenizer(text, add_special_tokens=False).input_ids for text in (e.response for e in examples)}
    end = [tokenizer.eos_token_id]
    streams = {"": [*words["grass is green"], *end, *words["coal is black."], *end], "b": [*words["snow"], *end, *end]}
    blocks = packed(encode_all(examples, tokenizer, Wording()), 4, tokenizer)
    for category, stream in streams.items():
        own = [block for block in blocks if block.example.category == category]
        joined = [token for block in own for token in block.tokens]
        assert joined == stream[: len(joined)]
        assert len(stream) - len(joined) in (0, 1), "a last block of one token has nothing to predict"
        assert {len(block.tokens) for block in own[:-1]} <= {4}
        for block in own:
            batch = collate([block], 0)
            assert batch.labels[0].tolist() == [IGNORED, *block.tokens[1:]]
            assert block.example.response == tokenizer.decode(block.tokens[1:])
    assert {block.example.category for block in blocks} == {"", "b"}


@pytest.mark.parametrize("space", ["", "\n", " \r\n\t"])
def test_a_text_that_has_its_begin_and_its_end_gets_no_second_one(model_folder, space):
    """The column `text` of those who let `apply_chat_template` write it."""
    tokenizer = load_tokenizer(str(model_folder))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    end = tokenizer.eos_token
    for text in (f"{end}snow{end}{space}", f"{end}{space}"):
        (encoded,) = encode_all(texts((text, "")), tokenizer, Wording())
        assert encoded.tokens == tuple(tokenizer(text, add_special_tokens=False).input_ids)
    (begun,) = encode_all(texts((f"{end}snow", "")), tokenizer, Wording())
    (ended,) = encode_all(texts((f"snow{end}", "")), tokenizer, Wording())
    assert begun.tokens == ended.tokens == (0, *tokenizer("snow", add_special_tokens=False).input_ids, 0)


@pytest.mark.parametrize("template", ["paper", "chat"])
def test_a_text_begins_as_the_tokenizer_begins_texts_and_has_no_wording(model_folder, template):
    tokenizer = load_tokenizer(str(model_folder))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    tokenizer.chat_template = CHAT
    (encoded,) = encode_all(texts(("snow", "")), tokenizer, Wording(template))
    assert encoded.tokens == (0, *tokenizer("snow", add_special_tokens=False).input_ids, tokenizer.eos_token_id)
    assert encoded.prompt == 1


ENDLESS = {  # chat templates that never end or never stop growing, and the words of their refusals
    "two loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "20,000 steps"),
    "a loop in a filter": ("{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}", "20,000 steps"),
    "a macro that calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError|20,000 steps"),
    "a long answer": ("{{ 'x' * 99999 }}", "made 99,999 characters of 2"),
    "a long template": ("x" * 70_000, "has 70,000 characters, at most 65,536 go"),
    "a program that fails": ("{{ 1 / 0 }}", "can't be used: ZeroDivisionError"),
    "one that wants out": ("{{ ''.__class__.__mro__ }}", "can't be used: SecurityError"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_chat_template_that_does_not_end_is_ended(tokenizer, monkeypatch, name):
    template, match = ENDLESS[name]
    monkeypatch.setattr(tokenizer, "chat_template", template)
    before = sys.gettrace()
    with pytest.raises(FedKSeedError, match=match):
        Wording("chat").prompt(Example("Q?", "x"), tokenizer)
    assert sys.gettrace() is before


def test_facts_of_a_strangers_file_are_texts():
    assert Wording.read({"separator": "", "template": None}) == Wording(separator="")
    with pytest.raises(FedKSeedError, match="the separator of a prompt is a text, got 5"):
        Wording.read({"separator": 5})


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
