"""Layouts of rows, found by their columns, and the examples that they make."""

import json
from collections import Counter
from contextlib import suppress
from random import Random

import pytest

from fedkseed import FedKSeedError
from fedkseed.data.layouts import FIELDS, LAYOUTS, MAX_TURNS, Example, Turn, fit

ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
NAN = float("nan")


def example(row: dict, named: dict[str, str] | None = None, layout: str | None = None) -> Example:
    return fit(row, named or {}, layout, "a.csv, line 2").example(row, "a.csv, line 2")


def layout_of(*columns: str, named: dict[str, str] | None = None) -> str:
    return fit(dict.fromkeys(columns, "x"), named or {}, None, "a.csv, line 2").name


MADE = {  # layout -> a row, and the example that a hand makes of it
    "instruction": (
        {"instruction": "q", "response": "a", "context": "c", "category": "k"},
        Example("q", "a", "c", "k"),
    ),
    "alpaca": ({"instruction": "q", "input": "c", "output": "a"}, Example("q", "a", "c")),
    "prompt-completion": ({"prompt": "q", "completion": "a", "category": "k"}, Example("q", "a", "", "k")),
    "text": ({"text": "Once.", "category": "k"}, Example("", "Once.", "", "k", plain=True)),
    "chat": (
        {"messages": [{"role": "system", "content": "Be kind."}, *ASKED, {"role": "user", "content": "Bye"}]},
        Example("Hi", "Hello.", turns=(Turn("system", "Be kind."), Turn("user", "Hi"))),
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}], "category": None},
        Example("Hi", "Hello.", turns=(Turn("user", "Hi"),)),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_found_by_its_columns_and_makes_examples(name):
    row, expected = MADE[name]
    assert layout_of(*row) == name
    assert example(row) == example(row, layout=name) == expected


def test_upper_case_and_space_in_names_of_columns_do_not_count():
    assert example({"Prompt": "q", " COMPLETION ": "a", "Other": 1}) == Example("q", "a")
    assert example({"Prompt": "q", "prompt": "r", "completion": "a"}).instruction == "r", "the exact name goes first"


def test_a_conversation_of_several_turns_ends_with_its_last_answer():
    turns = [*ASKED, {"role": "user", "content": "More"}, {"role": "assistant", "content": "Yes."}]
    expected = Example("More", "Yes.", turns=(Turn("user", "Hi"), Turn("assistant", "Hello."), Turn("user", "More")))
    assert example({"messages": turns}) == expected
    ends = [{"role": "assistant", "content": " "}, {"role": "user", "content": "Thanks"}]
    assert example({"messages": [*turns, *ends]}) == expected
    for nothing in ([], None, NAN, turns[:1]):
        assert not example({"messages": nothing}).response


def test_other_names_of_roles_and_parts_of_text_are_read():
    messages = [
        {"role": "Developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        {"role": "function", "content": "4"},
        {"role": "model", "content": "Hello.", "tool_calls": None},
    ]
    found = example({"messages": messages})
    assert [turn.role for turn in found.turns] == ["system", "user", "tool"]
    assert (found.instruction, found.response) == ("Hi", "Hello.")


@pytest.mark.parametrize(
    ("columns", "named", "expected"),
    [
        (("instruction", "response", "output", "text"), {}, "instruction"),  # as files with these were always read
        (("instruction", "input", "output", "text"), {}, "alpaca"),  # Alpaca's own file
        (("prompt", "completion", "text"), {}, "prompt-completion"),
        (("prompt", "messages"), {}, "chat"),
        (("q", "a"), {"instruction": "q", "response": "a"}, "instruction"),
        (("instruction", "output"), {"response": "output"}, "instruction"),
        (("prompt", "answer", "text"), {"response": "answer"}, "prompt-completion"),
        (("body", "prompt", "completion"), {"text": "body"}, "text"),
        (("log", "messages"), {"messages": "log"}, "chat"),
        (("messages", "topic"), {"instruction": "Frage", "response": "Antwort", "category": "topic"}, "chat"),
        (("prompt", "completion"), {"instruction": "Frage", "response": "Antwort"}, "prompt-completion"),
        (("text", "label"), {}, "text"),
        (("text", "label"), {"instruction": "text", "response": "label"}, "instruction"),
        (("Inhalt",), {"instruction": "Frage", "response": "Antwort", "text": "Inhalt"}, "text"),
        (("prompt", "completion", "department"), {"client": "department"}, "prompt-completion"),
    ],
)
def test_of_several_layouts_the_first_wins_and_plain_text_loses(columns, named, expected):
    assert layout_of(*columns, named=named) == expected


def test_layouts_that_fit_alike_are_refused_until_one_is_named():
    row = {"prompt": "q", "completion": "a", "messages": ASKED, "text": "t"}
    with pytest.raises(FedKSeedError, match=r"line 2: the columns prompt, completion, messages, text fit the layouts "
                       r"prompt-completion and chat; say which, as .data. layout = 'prompt-completion'"):  # fmt: skip
        example(row)
    assert example(row, layout="prompt-completion") == Example("q", "a")
    assert example(row, layout="chat").turns == (Turn("user", "Hi"),)
    assert example(row, layout="text").plain


@pytest.mark.parametrize(
    ("row", "named", "layout", "match"),
    [
        ({"issue": "q", "fix": "a"}, {}, None, "no column instruction and no response; columns found: issue, fix"),
        ({"issue": "q", "fix": "a"}, {}, None, r"or prompt and completion \(prompt-completion\), or messages"),
        ({"prompt": "q", "fix": "a"}, {}, None, "line 2: no column completion; columns found: prompt, fix"),
        ({"x": "q", "y": "a"}, {"instruction": "x"}, None, "line 2: no column response; columns found: x, y"),
        ({"Text A": "q", "y": "a"}, {"instruction": "Text A", "response": "z"}, None, "no column z; columns found: Te"),
        ({"x": "q", "y": "a"}, {"instruction": "Frage", "response": "Antwort"}, None, "no column Frage and no Antwort"),
        (
            {"Frage": "q", "Anfrage": "q", "Antwort": "a"},
            {},
            None,
            "line 2: each of the columns Frage, Anfrage could be the instruction; say which, as .* instruction=F",
        ),
        ({"x": "q", "y": "q"}, {"instruction": ["x", "y"]}, None, "x and y are names of instruction in .data. columns"),
        ({"text": "t"}, {}, "chat", "line 2: no column messages; columns found: text"),
        ({"text": "t"}, {"answer": "t"}, None, "no field is called 'answer'; fields are instruction, response, conte"),
        ({"t": "t"}, {"text": "t", "response": "t"}, None, "names response, text, and not one layout has all of"),
        ({"t": "t"}, {"response": "t"}, "text", "names response, and not the layout 'text' has all of these fields"),
    ],
)
def test_columns_that_fit_no_layout_are_refused_with_all_that_fit(row, named, layout, match):
    with pytest.raises(FedKSeedError, match=match):
        example(row, named, layout)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"instruction": 1, "response": "a"}, "line 2: instruction must be text, got int"),
        ({"instruction": ["q"], "response": "a"}, "line 2: instruction must be text, got list"),
        ({"instruction": "q", "response": {"a": "b"}}, "line 2: response must be text, got dict"),
        ({"instruction": "q", "response": "\ud800"}, "half a character"),
        ({"messages": "Hi"}, "line 2: messages must be a list of at most 256 messages, got str"),
        ({"messages": ASKED * MAX_TURNS}, "line 2: messages must be a list of at most 256 messages, got 512 messages"),
        ({"messages": ["Hi"]}, "line 2, message 1: expected an object with role and content, got str"),
        ({"messages": [ASKED[0], {"role": "judge", "content": "x"}]}, "message 2: role is one of user, .* got 'judge'"),
        ({"messages": [{"who": "user", "content": "x"}]}, "message 1: from is one of .* got None"),
        ({"messages": [{"role": "user", "content": 5}]}, "message 1: content must be text, got int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 1: content has parts that are no"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "message 1: calls of tools are not read"),
    ],
)
def test_a_value_that_the_layout_does_not_have_is_refused_with_its_place(row, match):
    with pytest.raises(FedKSeedError, match=match):
        example(row)


@pytest.mark.parametrize("nothing", [None, NAN, ""])
def test_null_and_nan_are_empty_text(nothing):
    assert example({"instruction": "q", "response": "a", "context": nothing, "category": nothing}) == Example("q", "a")
    assert example({"instruction": nothing, "response": nothing}) == Example("", "")


def test_a_row_s_client_is_text_or_a_number():
    row = {"text": "t", "Department": " hr "}
    fitted = fit(row, {"client": "department"}, None, "line 1")
    values = (" hr ", 7, None, NAN, "")
    assert [fitted.client(row | {"Department": value}) for value in values] == ["hr", "7", "", "", ""]
    assert fit({"text": "t"}, {}, None, "line 1").client({"text": "t"}) == ""
    assert FIELDS == ("instruction", "response", "context", "category", "client", "messages", "text")


def columns_of(rows: list[dict]) -> dict[str, list]:
    return {key: [row[key] for row in rows] for key in rows[0]}


FORMS = [
    lambda cell: cell,
    json.dumps,
    repr,
    lambda cell: f"\n {json.dumps(cell, ensure_ascii=False, indent=1)} ",
    columns_of,
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_messages_are_the_same_in_whatever_form_a_file_keeps_a_list(form, seed):
    """As text of JSON in a CSV file, as pandas prints a list into one, and as an object of columns in Parquet."""
    rng = Random(seed)
    words = ["Hi", 'He said "no"', "it's", "a\nb", "C:\\new\\table", "größer", "[1]", "{x}", "🚂", "null", "True"]
    said = [" ".join(rng.choices(words, k=3)) for _ in range(4)]
    turns = [
        {"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, said, strict=True)
    ]  # fmt: skip
    expected = example({"messages": turns})
    assert expected.turns == (Turn("user", said[0]), Turn("assistant", said[1]), Turn("user", said[2]))
    assert example({"messages": form(turns)}) == expected
    exchange = {"prompt": form(turns[:3]), "completion": form(turns[3:])}
    layout = fit(exchange, {}, None, "")
    assert (layout.name, layout.talks, layout.title) == (
        "prompt-completion", True, "conversations, of prompt and completion"
    )  # fmt: skip
    asked, answered, again = expected.turns
    uncounted = (asked, answered._replace(counted=False), again)
    assert example(exchange) == Example(said[2], said[3], turns=uncounted), "the loss counts the completion"
    if form is not columns_of:
        earlier = example({"instruction": said[2], "response": said[3], "history": form([[said[0], said[1]]])})
        assert earlier == expected


def test_prompts_that_are_no_messages_stay_texts():
    for prompt in (
        "{{}}",
        "{{1}, {2}}",
        "{[1]: 2}",
        '[{"from": "a", "from": "b"}]',
        '[{"role": "admin", "name": "x"}]',
        "[1, 2, 3]",
        "[x] done?",
        "{}",
        "[]",
        '["a"]',
        "[{'a': 1}]",
        "[" * 100_000,
        "{" * 9,
        r"[\d, '\d']",
    ):
        layout = fit({"prompt": prompt, "completion": "c"}, {}, None, "")
        assert not layout.talks
        assert layout.example({"prompt": prompt, "completion": "c"}, "").instruction == prompt


def test_a_text_beside_messages_is_the_message_of_its_place():
    turn = [{"role": "user", "content": "q"}]
    assert example({"prompt": turn, "completion": "a"}) == Example("q", "a", turns=(Turn("user", "q"),))
    one = {"prompt": turn[0], "completion": {"role": "assistant", "content": "a"}}
    assert example(one) == Example("q", "a", turns=(Turn("user", "q"),))
    assert example({"prompt": turn, "completion": None}).response == ""
    layout = fit({"prompt": turn, "completion": "a"}, {}, None, "")
    later = layout.example({"prompt": "p", "completion": [{"role": "assistant", "content": "b"}]}, "")
    assert later == Example("p", "b", turns=(Turn("user", "p"),))
    with pytest.raises(FedKSeedError, match="w, prompt: prompt must be a list of at most 256 messages, got int"):
        layout.example({"prompt": 3, "completion": "a"}, "w")
    with pytest.raises(FedKSeedError, match=r"w: a context beside messages \(column context\); write it into one"):
        layout.example({"prompt": turn, "completion": "a", "context": "c"}, "w")


def test_of_a_question_with_several_answers_the_first_is_learned_and_the_others_are_counted():
    """SQuAD's form."""
    counts = Counter[str]()
    row = {
        "question": "Who?",
        "context": "Ann and Bo.",
        "answers": {"text": ["Ann", "Ann", "Bo"], "answer_start": [0, 0, 8]},
    }
    layout = fit(row, {}, None, "")
    assert layout.example(row, "", counts) == Example("Who?", "Ann", "Ann and Bo.")
    assert counts == {"further answers": 1}
    row["answers"] = {"text": [], "answer_start": []}
    assert layout.example(row, "").response == ""


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("Where from, where to?", '[{"from": "Berlin", "to": "Rome"}]'),
        ("Make a dialogue as JSON.", json.dumps(ASKED)),
        (json.dumps(ASKED), "What does the second say?"),
        ('[{"name": "ann", "role": "admin"}]', '[{"name": "bo", "role": "user"}]'),
    ],
)
@pytest.mark.parametrize("names", [("prompt", "completion"), ("instruction", "output"), ("question", "answer")])
def test_a_text_that_says_a_list_is_a_text_unless_both_say_messages(prompt, completion, names):
    assert example(dict(zip(names, (prompt, completion), strict=True))) == Example(prompt, completion)


def test_beside_messages_an_answer_that_says_json_is_a_text_and_a_number_is_one():
    layout = fit({"prompt": ASKED[:1], "completion": "a"}, {}, None, "")
    for completion in ('{"answer": 3}', '["a", "b"]', "[]", "{}", "{{}}"):
        assert layout.example({"prompt": ASKED[:1], "completion": completion}, "").response == completion
    assert layout.example({"prompt": ASKED[:1], "completion": 3}, "").response == "3"
    weighted = [{**ASKED[1], "weight": 1}, ASKED[0]]
    assert [turn.counted for turn in layout.example({"prompt": weighted, "completion": "a"}, "").turns] == [False, True]
    with pytest.raises(FedKSeedError, match=r"w, prompt, message 1: role is one of"):
        layout.example({"prompt": [{"role": "x", "content": "a"}], "completion": "a"}, "w")
    with pytest.raises(FedKSeedError, match=r"w: a conversation has at most 256 messages, got 257"):
        layout.example({"prompt": ASKED * (MAX_TURNS // 2), "completion": "a"}, "w")


def test_messages_below_a_first_row_of_texts_are_refused():
    layout = fit({"prompt": "q", "completion": "a"}, {}, None, "")
    for form in (json.dumps, repr):
        with pytest.raises(
            FedKSeedError, match="w: messages, where the first row has texts; give either a file of its"
        ):
            layout.example({"prompt": form(ASKED[:1]), "completion": form(ASKED[1:])}, "w")


def test_a_history_that_is_a_text_is_counted():
    for history in ('{"visits": 3}', '{"visits": [3]}', "{'fever', 'cough'}", "ill since May"):
        counts = Counter[str]()
        row = {"instruction": "q", "response": "a", "history": history}
        assert fit(row, {}, None, "").example(row, "", counts) == Example("q", "a")
        assert counts == {"history": 1}


def test_squads_answers_in_other_forms():
    row = {"question": "Who?", "answers": "{'text': ['', 'Ann'], 'answer_start': [0, 1]}"}
    assert example(row) == Example("Who?", "Ann")
    row["answers"] = "{'text': array(['Ann'], dtype=object), 'answer_start': array([0], dtype=int32)}"
    with pytest.raises(FedKSeedError, match="line 2: answers as pandas prints arrays"):
        example(row)


@pytest.mark.parametrize(
    "response",
    [
        "{answer_start} is the name of the placeholder", '{"answer_start": 5} is what I return',
        '{ answer_start: 0, text: "x" }  // JavaScript', '{"text": ["Ann", "Bo"], "answer_start": [1, 2]}',
    ],
)  # fmt: skip
def test_an_answer_of_another_column_that_looks_like_squads_is_a_text(response):
    assert example({"instruction": "Write it as JSON.", "output": response}) == Example("Write it as JSON.", response)
    other = {"question": "q", "answers": response.replace('"text"', '"texts"')}
    assert example(other).response == other["answers"]


def test_squads_answers_that_are_numbers_are_read_as_labels_are():
    assert example({"question": "q", "answers": {"text": [3, 4], "answer_start": [1, 2]}}) == Example("q", "3")


@pytest.mark.parametrize("form", [json.dumps, repr])
@pytest.mark.parametrize(
    ("prompt", "completion", "match"),
    [
        (ASKED[:1], [{"role": "assistant", "tool_calls": [{"name": "f"}]}], "calls of tools are not read"),
        ([{"role": "moderator", "content": "q"}], ASKED[1:], "role is one of"),
        (ASKED[:1], "[{'role': 'assistant', 'content': 'a'}", "says no list in JSON or as Python prints it"),
        (ASKED[:1], [], None),
    ],
)
def test_a_broken_list_below_lists_that_are_texts_is_refused_and_never_learned(form, prompt, completion, match):
    layout = fit({"prompt": form(ASKED[:1]), "completion": form(ASKED[1:])}, {}, None, "")
    row = {"prompt": form(prompt), "completion": completion if isinstance(completion, str) else form(completion)}
    if match is None:
        assert layout.example(row, "").response == ""
        return
    with pytest.raises(FedKSeedError, match=match):
        layout.example(row, "")


def test_a_first_row_without_an_answer_does_not_change_how_the_others_are_read():
    for empty in ("", None, NAN, " "):
        layout = fit({"prompt": json.dumps(ASKED[:1]), "completion": empty}, {}, None, "")
        assert layout.example({"prompt": json.dumps(ASKED[:1]), "completion": json.dumps(ASKED[1:])}, "").turns


NUMBER = "0x" + "f" * 5000  # which Python does not print


@pytest.mark.parametrize(
    "row",
    [
        {"messages": "[{'role': 'user', 'content': 'a', 1: 'x'}, {'role': 'assistant', 'content': 'b', None: 2}]"},
        {"messages": f"[{{'role': {NUMBER}, 'content': 'a'}}]"},
        {"messages": f"[{{'role': 'assistant', 'content': [{{'type': {NUMBER}}}], 'weight': {NUMBER}}}]"},
        {"messages": "[{'role': 'assistant', 'content': {1, 2}}]"},
        {"instruction": "q", "output": "a", "history": f"[{NUMBER}]"},
        {"prompt": f"{{{NUMBER}: 1}}", "completion": "b"},
        {"prompt": "[{...}]", "completion": "[b'a', 1j]"},
    ],
    ids=range(7),
)
def test_what_python_can_print_and_json_can_not_ends_no_program(row):
    """Each of these was an error of Python's own, which ended the command."""
    with suppress(FedKSeedError):
        example(row)
