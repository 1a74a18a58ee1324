"""The way in which answers are found in what a chat template writes; wordings by templates are in test_wording.py."""

from datetime import date

import pytest

from fedkseed import FedKSeedError
from fedkseed.data.chat_template import DIRECTIVES, ChatTemplate, pinned, uses_clock
from fedkseed.data.layouts import Example, Turn
from fedkseed.data.wording import Wording
from fedkseed.models.load import load_tokenizer

from ..encoding import encode

TURNS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
ASK = "{% if add_generation_prompt %}[assistant]{% endif %}"
DAY = date(2026, 3, 7)


@pytest.fixture
def tokenizer(model_folder):
    return load_tokenizer(str(model_folder))


@pytest.mark.parametrize(
    ("template", "leads", "tail", "ends"),
    [
        (TURNS + "{{ eos_token }}\n{% endfor %}" + ASK, ("",), "<end>", True),
        (TURNS + " {{ eos_token }}{% endfor %}" + ASK, ("",), " <end>", True),
        (TURNS + "\n###\n{% endfor %}" + ASK, ("",), "\n###", False),
        (TURNS + "\n{% endfor %}" + ASK, ("",), "", False),
        (TURNS + "{{ eos_token }}\n{% endfor %}" + ASK + "{{ eos_token }}", (), None, None),
        (
            TURNS.replace("]{{", "]{% if loop.last and m['role'] == 'assistant' %}(no thought){% endif %}{{")
            + "{{ eos_token }}{% endfor %}" + ASK,
            ("(no thought)", ""), "<end>", True,
        ),
        ("{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}{% endfor %}[a]", ("",), "", False),
    ],
)  # fmt: skip
def test_what_stands_around_an_answer_is_found_by_trying(tokenizer, template, leads, tail, ends):
    tokenizer.chat_template = template
    if not leads:
        with pytest.raises(FedKSeedError, match=r"does not write an answer behind what asks for it.*and writes"):
            ChatTemplate.of(tokenizer, None)
        return
    made = ChatTemplate.of(tokenizer, None)
    assert (made.leads, made.tail, made.end is not None) == (leads, tail, ends)


def decoded(tokenizer, encoded):
    return [tokenizer.decode(encoded.tokens[begin:end]) for begin, end in encoded.counted]


TWO = Example("B?", "two", turns=(Turn("user", "A?"), Turn("assistant", "one"), Turn("user", "B?")))


def test_where_the_next_header_ends_an_answer_it_is_counted(tokenizer):
    """GLM's way: its settings of generation list the header of a user as an end."""
    tokenizer.add_tokens(["<user>", "<assistant>"], special_tokens=True)
    tokenizer.rows = None  # as of a model that has them
    turns = "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
    encoded = encode(TWO, tokenizer, Wording("chat"))
    assert decoded(tokenizer, encoded) == ["\none<user>", "\ntwo<user>"]
    assert Wording("chat").ends(tokenizer) == [0, tokenizer.convert_tokens_to_ids("<user>")]
    whole = tokenizer.decode(encoded.tokens)
    assert whole == "<user>\nA?<assistant>\none<user>\nB?<assistant>\ntwo<user>"


def test_a_template_without_a_request_for_an_answer_is_refused(tokenizer):
    tokenizer.chat_template = TURNS + "{{ eos_token }}{% endfor %}"
    with pytest.raises(FedKSeedError, match=r"'\[assistant\]' before an answer and does not ask by it"):
        encode(TWO, tokenizer, Wording("chat"))


def test_a_conversation_is_refused_where_nothing_ends_an_answer(tokenizer):
    tokenizer.chat_template = TURNS + "\n{% endfor %}" + ASK
    with pytest.raises(FedKSeedError, match="writes nothing that ends an answer"):
        encode(TWO, tokenizer, Wording("chat"))
    assert decoded(tokenizer, encode(Example("A?", "one"), tokenizer, Wording("chat"))) == ["one<end>"]


def test_a_thought_in_a_form_of_the_templates_own_is_counted(tokenizer):
    """Qwen's way: what is before </think> is written anew for the last answer, and left out of earlier ones."""
    thought = "m['content'].split('</think>')"
    shown = (
        f"{{% if {thought} | length > 1 and loop.last %}}<think>{{{{ {thought}[0][7:] | trim }}}}</think>{{% endif %}}"
    )
    turns = "{% for m in messages %}[{{ m['role'] }}]" + shown + f"{{{{ {thought}[-1] }}}}{{{{ eos_token }}}}"
    tokenizer.chat_template = turns + "{% endfor %}" + ASK
    lone = Example("A?", "<think> Hm. </think>one", turns=(Turn("user", "A?"),))
    assert decoded(tokenizer, encode(lone, tokenizer, Wording("chat"))) == ["<think>Hm.</think>one<end>"]
    talk = Example("B?", "two", turns=(Turn("user", "A?"), Turn("assistant", lone.response), Turn("user", "B?")))
    with pytest.raises(FedKSeedError, match="otherwise than it asks for one"):
        encode(talk, tokenizer, Wording("chat"))


MARKED = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' and 'skip' not in m['content'] %}"
    "{% generation %}{{ m['content'] }}{{ eos_token }}\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}{{ eos_token }}\n{% endif %}{% endfor %}" + ASK
)


def test_answers_without_the_templates_own_mark_are_not_counted(tokenizer):
    tokenizer.chat_template = MARKED
    turns = [("user", "A?"), ("assistant", "one"), ("user", "B?"), ("assistant", "skip two"), ("user", "C?")]
    encoded = encode(Example("C?", "three", turns=tuple(Turn(*turn) for turn in turns)), tokenizer, Wording("chat"))
    counted = [tokenizer.decode(encoded.tokens[begin:end]) for begin, end in encoded.counted]
    assert counted == ["one<end>", "three<end>"]
    messages = [{"role": role, "content": text} for role, text in [*turns, ("assistant", "three")]]
    asked = {"return_dict": True, "return_assistant_tokens_mask": True}
    theirs = tokenizer.apply_chat_template(messages, **asked)
    assert list(encoded.tokens) == theirs["input_ids"][: len(encoded.tokens)]
    ours = [any(begin <= k < end for begin, end in encoded.counted) for k in range(len(encoded.tokens))]
    line_ends = [tokenizer.decode([token]) == "\n" for token in encoded.tokens]  # behind the end of an answer
    marks = [bool(mark) for mark in theirs["assistant_masks"]]
    assert ours == [mark and not end for mark, end in zip(marks, line_ends, strict=False)]
    with pytest.raises(FedKSeedError, match="leave out the last answer"):
        encode(Example("A?", "skip it", turns=(Turn("user", "A?"),)), tokenizer, Wording("chat"))


def test_a_template_that_writes_the_date_writes_the_one_that_it_is_given(tokenizer):
    day = "{{ strftime_now('%d %B %Y, a %A, %-d.%-m.%y') }}"
    tokenizer.chat_template = day + TURNS + "{{ eos_token }}{% endfor %}" + ASK
    with pytest.raises(FedKSeedError, match=r"writes today's date.*\[data\] date = 20"):
        encode(Example("A?", "B."), tokenizer, Wording("chat"))
    encoded = encode(Example("A?", "B."), tokenizer, Wording("chat", date=DAY))
    assert tokenizer.decode(encoded.tokens).startswith(
        "07 March 2026, a Saturday, 7.3.26[user]A?<end>[assistant]B.<end>"
    )
    assert uses_clock(tokenizer)
    tokenizer.chat_template = Wording("chat", date=DAY).chat_template(tokenizer)
    assert not uses_clock(tokenizer)
    again = tokenizer.apply_chat_template([{"role": "user", "content": "A?"}], add_generation_prompt=True)
    assert again["input_ids"] == list(encoded.tokens[: encoded.prompt])


@pytest.mark.parametrize("name", DIRECTIVES)
def test_every_part_of_a_date_is_written_as_python_does(tokenizer, name):
    tokenizer.chat_template = f"{{{{ strftime_now('a {name} b') }}}}"
    messages = [{"role": "user", "content": "A?"}]
    written = tokenizer.apply_chat_template(messages, chat_template=pinned(tokenizer, DAY), tokenize=False)
    assert written == f"a {DAY.strftime(name)} b"


def test_a_template_that_asks_whether_the_clock_is_there_is_given_the_date(tokenizer):
    tokenizer.chat_template = (
        "{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}"
        "{% else %}{% set day = '?' %}{% endif %}"
        "{{ day }}" + TURNS + "{{ eos_token }}{% endfor %}" + ASK
    )
    text = ChatTemplate.of(tokenizer, DAY).render([{"role": "user", "content": "A?"}], asks=True)
    assert text == "07 Mar 2026[user]A?<end>[assistant]"


def test_of_several_templates_the_default_is_taken(tokenizer):
    plain = TURNS + "{{ eos_token }}{% endfor %}" + ASK
    tokenizer.chat_template = {"default": plain, "tool_use": "x"}
    assert ChatTemplate.of(tokenizer, None).text == plain
    tokenizer.chat_template = {"tool_use": "x"}
    with pytest.raises(FedKSeedError, match="has no chat template"):
        ChatTemplate.of(tokenizer, None)


def test_an_earlier_answer_ends_by_the_token_that_the_template_writes_there(tokenizer):
    """The way of gpt-oss: another token ends the last answer."""
    tokenizer.add_tokens(["<next>"], special_tokens=True)
    tokenizer.rows = None
    end = "{% if m['role'] == 'assistant' and loop.last %}{{ eos_token }}{% else %}<next>{% endif %}"
    tokenizer.chat_template = TURNS + end + "{% endfor %}" + ASK
    assert decoded(tokenizer, encode(TWO, tokenizer, Wording("chat"))) == ["one<next>", "two<end>"]
    assert Wording("chat").ends(tokenizer) == [tokenizer.eos_token_id]
    tokenizer.chat_template = TURNS + end.replace("<next>", "") + "{% endfor %}" + ASK
    with pytest.raises(FedKSeedError, match="the answer 'one' otherwise than it asks for one"):
        encode(TWO, tokenizer, Wording("chat"))


def test_words_that_end_an_answer_are_no_token_to_stop_at(tokenizer):
    tokenizer.chat_template = TURNS + "\n#\n{% endfor %}" + ASK
    assert Wording("chat").ends(tokenizer) == [tokenizer.eos_token_id]
    tokenizer.chat_template = TURNS + " [done]{{ eos_token }}\n{% endfor %}" + ASK
    assert ChatTemplate.of(tokenizer, None).end == tokenizer.eos_token_id
    assert decoded(tokenizer, encode(TWO, tokenizer, Wording("chat"))) == ["one [done]<end>", "two [done]<end>"]


def test_an_answer_that_is_not_counted_may_be_written_anew(tokenizer):
    shown = "{{ m['content'] if loop.last else m['content'].split('>')[-1] }}{{ eos_token }}"
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]" + shown + "{% endfor %}" + ASK
    turns = (Turn("user", "A?"), Turn("assistant", "<Hm>one", counted=False), Turn("user", "B?"))
    encoded = encode(Example("B?", "two", turns=turns), tokenizer, Wording("chat"))
    assert decoded(tokenizer, encoded) == ["two<end>"]


def test_the_header_of_a_greeting_is_not_counted_where_the_request_is_in_the_loop(tokenizer):
    """The way of OLMo 2: without messages it asks for nothing."""
    tokenizer.chat_template = (
        TURNS + "{{ eos_token }}{% if loop.last and add_generation_prompt %}[assistant]{% endif %}{% endfor %}"
    )
    turns = (Turn("assistant", "Hello."), Turn("user", "B?"))
    encoded = encode(Example("B?", "two", turns=turns), tokenizer, Wording("chat"))
    assert decoded(tokenizer, encoded) == ["Hello.<end>", "two<end>"]


def test_all_messages_are_looked_for_in_one_rendering_where_an_answer_is_written_anew(tokenizer, monkeypatch):
    shown = "{{ m['content'] if loop.last else m['content'].split('>')[-1] }}{{ eos_token }}"
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]" + shown + "{% endfor %}" + ASK
    template, rendered = ChatTemplate.of(tokenizer, None), []
    turns = [{"role": role, "content": f"<Hm>{k} a"} for k in range(20) for role in ("user", "assistant")]
    render = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda *given, **more: rendered.append(1) or render(*given, **more))
    template._require_all(render(template, turns), turns)
    assert len(rendered) == 21, "one, and one for each message of which the template writes a part"
    plain = [message | {"content": message["content"].removeprefix("<Hm>")} for message in turns]
    plain[1]["content"] = "<Hm>0 a"
    rendered.clear()
    template._require_all(render(template, plain), plain)
    assert len(rendered) == 1


SOME = (
    "{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}[{{ m['role'] }}]{{ m['content'] }}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("said", ["18 °C", "It is 18 °C.", "assistant", "]"])
@pytest.mark.parametrize("role", ["tool", "system"])
def test_a_message_that_is_left_out_is_refused_though_its_words_come_again(tokenizer, role, said):
    tokenizer.chat_template = SOME + ASK
    turns = Turn("user", "How warm?"), Turn("assistant", "I look it up."), Turn(role, said)
    example = Example("How warm?", "It is 18 °C.", turns=turns)
    with pytest.raises(FedKSeedError, match=rf"leaves out message 3, .* of the role {role}"):
        encode(example, tokenizer, Wording("chat"))
    tokenizer.chat_template = TURNS + "{{ eos_token }}{% endfor %}" + ASK
    assert decoded(tokenizer, encode(example, tokenizer, Wording("chat")))[-1] == "It is 18 °C.<end>"
