"""Tables and conversations of others whose rows would be read as something else: each is used, refused or said."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkseed import FedKSeedError
from fedkseed.data.batches import Encoded
from fedkseed.data.held_out import options_of
from fedkseed.data.layouts import Example, Turn
from fedkseed.data.sources import DataFile, Reader
from fedkseed.data.wording import Wording
from fedkseed.models.load import load_tokenizer
from fedkseed.planning.init import summary
from fedkseed.recipe.schema import Recipe

from ..encoding import encode

WORDS = st.lists(st.sampled_from(["the", "room", "is 7", "where?", "über", "(12)"]), min_size=1, max_size=4).map(
    " ".join
)
PAIRS = st.lists(st.tuples(WORDS, WORDS), min_size=4, max_size=30)


def file_of(folder: Path, text: str, name: str = "rows.csv") -> DataFile:
    (folder / name).write_bytes(text.encode())
    return Reader().file(str(folder / name))


def csv_of(rows: list[list[str]], separator: str = ",") -> str:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=separator, lineterminator="\n").writerows(rows)
    return text.getvalue()


def evaluated(read: DataFile) -> list[Encoded]:
    return [Encoded((1,), 1, example) for example in read.examples]


@settings(max_examples=40, deadline=None)
@given(pairs=PAIRS, separator=st.sampled_from("\t|"), data=st.data())
def test_quotes_of_a_text_never_join_the_lines_of_a_table_without_quoting(tmp_path_factory, pairs, separator, data):
    """The way of GLUE: a line begins with a quote, and a later one ends with one."""
    first = data.draw(st.integers(0, len(pairs) - 2))
    last = data.draw(st.integers(first + 1, len(pairs) - 1))
    lines = [separator.join(pair) for pair in [("question", "answer"), *pairs]]
    lines[1 + first] = '"' + lines[1 + first]
    lines[1 + last] = lines[1 + last] + '"'
    folder, name = tmp_path_factory.mktemp("rows"), "rows.tsv" if separator == "\t" else "rows.csv"
    with pytest.raises(FedKSeedError, match=rf"line {2 + first}: not valid CSV .*quoting=3"):
        file_of(folder, "\n".join(lines) + "\n", name)
    quoted = [list(pairs[0]), [f"{pairs[1][0]}\n{pairs[1][1]}", "said"], *map(list, pairs[2:])]
    read = file_of(folder, csv_of([["question", "answer"], *quoted], separator), name)  # by a writer that quotes
    assert [example.instruction for example in read.examples] == [row[0] for row in quoted]


def test_names_of_columns_in_the_middle_are_counted_and_refused_in_another_order(tmp_path):
    rows = [[f"Who is {k}?", f"I, {k}", "Trier"] for k in range(30)]
    names = ["question", "answer", "site"]
    twice = file_of(tmp_path, csv_of([names, *rows, ["Question", "answer", "site"], *rows[:7]]))
    assert len(twice.examples) == 37
    assert "1 line with the names of the columns again not used" in twice.summary()
    turned = csv_of([names, *rows, ["answer", "site", "question"], *rows])
    with pytest.raises(FedKSeedError, match="line 32: the names of the columns again, in another order"):
        file_of(tmp_path, turned)
    pairs = csv_of([["question", "answer"], ["question", "a word for asking"], ["answer", "question"]])
    with pytest.raises(FedKSeedError, match="line 3: the names"):
        file_of(tmp_path, pairs)


@settings(max_examples=30, deadline=None)
@given(pairs=PAIRS, separator=st.sampled_from(",;"))
def test_quotes_behind_a_space_are_marks_of_fields(tmp_path_factory, pairs, separator):
    """As people write tables by hand: `question, answer`, then `"How are you?", "fine, thanks"`."""
    lines = [f"{separator} ".join(f'"{part}, {separator}"' for part in pair) for pair in pairs]
    read = file_of(tmp_path_factory.mktemp("rows"), "\n".join([f"question{separator} answer", *lines]))
    assert [(row.instruction, row.response) for row in read.examples] == [
        (f"{a}, {separator}", f"{b}, {separator}") for a, b in pairs
    ]
    assert "spaces before the quotes of fields not used" in read.summary()


@pytest.mark.parametrize("separator", [",", "\t"])
def test_a_space_and_a_quote_may_begin_a_text(tmp_path, separator):
    """A quote that another follows, or one within a field of a writer that quotes, marks no field behind a space."""
    rows = [[f"Who is {k}?", "  two spaces"] for k in range(5)]
    spoken = [["question", "answer"], *rows, ["What?", '"Yes" he said']]
    name = "rows.csv" if separator == "," else "rows.tsv"
    lines = "\n".join(separator.join(row).replace('"Yes"', ' "Yes"') for row in spoken)
    read = file_of(tmp_path, lines + "\n", name)
    assert [example.response.strip() for example in read.examples][-2:] == ["two spaces", '"Yes" he said']
    quoted = csv_of([["question", "answer"], *rows, ["What?", ' "hello" she said']], separator)
    read = file_of(tmp_path, quoted, name)
    assert [example.response for example in read.examples][-2:] == ["  two spaces", ' "hello" she said']
    assert "spaces before" not in read.summary()


def test_tables_of_several_windows_files_have_a_mark_at_each_beginning(tmp_path):
    table = "\ufeff" + csv_of([["question", "answer"], *([f"Who is {k}?", "über"] for k in range(5))])
    (tmp_path / "wide.csv").write_bytes((table * 3).encode("utf-16-le"))
    wide = Reader().file(str(tmp_path / "wide.csv"))
    read = file_of(tmp_path, table * 3)
    assert wide.examples == read.examples
    assert {example.instruction for example in read.examples} == {f"Who is {k}?" for k in range(5)}
    assert "2 lines with the names of the columns again not used" in read.summary()
    lines = "\ufeff" + json.dumps({"question": "Who?", "answer": "über"}, ensure_ascii=False) + "\n"
    assert {row.response for row in file_of(tmp_path, lines * 2, "rows.jsonl").examples} == {"über"}


@pytest.mark.parametrize("shifted", [1, 3, 7])
@pytest.mark.parametrize("extra", [0, 1, 2])
def test_a_comma_in_a_text_is_a_fault_of_its_row_although_the_last_field_is_empty(tmp_path, shifted, extra):
    rows = [f"Where is {k}?,On shelf {k},good" for k in range(12)]
    rows[shifted] = f"Dear desk, where is {shifted}?,On shelf {shifted},"
    text = "\n".join(row + "," * extra for row in ["question,answer,remark", *rows])
    with pytest.raises(FedKSeedError, match=rf"line {shifted + 2}: {4 + extra} fields"):
        file_of(tmp_path, text)
    rows[shifted] = f"Where is {shifted}?,On shelf {shifted},"
    short = ["question,answer,remark", *(row + "," * extra for row in rows)]  # the names alone without them
    assert len(file_of(tmp_path, "\n".join(short)).examples) == 12


@pytest.mark.parametrize("forms", [("True", "TRUE"), ("Kündigung", "Ku\u0308ndigung"), ("good", "good ")])
def test_labels_that_differ_by_form_alone_are_said_and_no_choice_is_made_among_them(tmp_path, forms):
    rows = [{"question": f"Is it {k}?", "answer": [*forms, "other"][k % 3]} for k in range(12)]
    read = file_of(tmp_path, "\n".join(map(json.dumps, rows)), "rows.jsonl")
    assert "differ by case, space or form alone" in read.summary()
    recipe = Recipe.model_validate({"model": {"name": "M"}, "evaluation": {"metrics": ["choice"]}})
    with pytest.raises(FedKSeedError, match="make them one in all files"):
        options_of(evaluated(read), read.examples, recipe)
    alike = [{**row, "answer": row["answer"].replace(forms[1], forms[0])} for row in rows]
    read = file_of(tmp_path, "\n".join(map(json.dumps, alike)), "rows.jsonl")
    assert "differ" not in read.summary()
    assert options_of(evaluated(read), read.examples, recipe) == {"": sorted({forms[0], "other"})}
    free = [{"question": f"Is it {k}?", "answer": f"It is {k}."} for k in range(60)]
    free += [{"question": "Is it so?", "answer": "it is 7."}]  # texts are no labels
    assert "differ" not in file_of(tmp_path, "\n".join(map(json.dumps, free)), "rows.jsonl").summary()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_score_is_the_text_of_the_number_that_was_stored(tmp_path, dtype):
    scores = np.random.default_rng(0).uniform(0, 5, 200).round(2).astype(dtype)
    table = {"question": pa.array([f"How alike are {k}?" for k in range(200)]), "answer": pa.array(scores)}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    answers = [example.response for example in Reader().file(str(tmp_path / "rows.parquet")).examples]
    whole = {f"{dtype(k)}": f"{k}" for k in range(6)}
    assert answers == [whole.get(str(score), str(score)) for score in scores]


@pytest.mark.parametrize(
    ("columns", "context"),
    [
        (("instruction", "input", "response"), "input"), (("question", "passage", "answer"), "passage"),
        (("prompt", "Kontext", "completion"), "Kontext"), (("instruction", "context", "input", "response"), "context"),
    ],
)  # fmt: skip
def test_what_a_question_is_about_is_read_by_any_of_its_names(tmp_path, columns, context):
    rows = [{name: f"{name} {k}" for name in columns} for k in range(8)]
    read = file_of(tmp_path, "\n".join(map(json.dumps, rows)), "rows.jsonl")
    assert [example.context for example in read.examples] == [f"{context} {k}" for k in range(8)]


NO = ["FALSE", "Falsch", "faux", "FALSO", "no", "Nein", "non", "0", "0,0"]
YES = ["TRUE", "Wahr", "vrai", "verdadero", "vero", "yes", "JA", "oui", "sí", "1", "1,0"]


@pytest.mark.parametrize("column", ["context", "input"])
def test_a_context_that_stands_for_none_is_none_and_counted(tmp_path, column):
    """As Alpaca's <noinput>, or a missing cell that a program wrote out."""
    none, contexts = ["<noinput>", "nan", " N/A ", "None", "--", "NULL"], ["", "Nan is 90.", "NA, K and Mg", "keine"]
    rows = [["instruction", column, "output"], *([f"What is {k}?", c, "7"] for k, c in enumerate(none + contexts))]
    read = file_of(tmp_path, csv_of(rows))
    assert [example.context for example in read.examples] == [""] * len(none) + contexts
    assert read.unused == {f"the context {c.strip()!r}": 1 for c in none}
    assert "not used: the context '<noinput>' (1), the context 'nan' (1)" in read.summary()


def test_a_flag_of_a_table_leaves_rows_out_in_the_words_of_five_languages(tmp_path):
    rows = [["question", "answer", "train"], *([f"Is {flag} {k}?", "it is", flag] for k, flag in enumerate(NO + YES))]
    read = file_of(tmp_path, csv_of(rows, ";"))
    assert len([example for example in read.examples if example.response]) == len(YES)
    assert f"{len(NO)} left out by their flag" in read.summary()
    with pytest.raises(FedKSeedError, match=r"a row is learned or left out, .* got 0\.5"):
        file_of(tmp_path, csv_of([["question", "answer", "weight"], ["a", "b", "0,5"]], ";"))
    elsewhere = file_of(tmp_path, csv_of([["question", "answer", "train"], ["When?", "At 7", "ICE 72"]]))
    assert "not used: train (1)" in elsewhere.summary()


@pytest.mark.parametrize("said", [*NO[:4], False])
def test_answers_that_are_marked_as_bad_are_refused_in_every_format(tmp_path, said):
    with pytest.raises(FedKSeedError, match="marked as not wanted"):
        file_of(tmp_path, csv_of([["prompt", "completion", "label"], ["a", "b", f"{said}"]]))
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    with pytest.raises(FedKSeedError, match="marked as not wanted"):
        file_of(tmp_path, json.dumps({"conversations": talk, "label": said}), "rows.jsonl")


def test_init_lets_answers_be_as_long_as_the_longest_label(tmp_path, model_folder):
    labels = ["transfer_not_received_by_recipient", "Kündigungsschutzverfahren"]
    rows = [["question", "answer"], *([f"What is {k}?", labels[k % 2]] for k in range(20))]
    (tmp_path / "rows.csv").write_text(csv_of(rows))
    tokenizer = load_tokenizer(str(model_folder))
    data = summary(str(tmp_path / "rows.csv"), {}, tokenizer)
    tokens = [len(tokenizer(label, add_special_tokens=False).input_ids) for label in labels]
    assert (data.labels, data.longest_label) == (2, max(tokens))
    assert max(tokens) > 8


SHAPE = "[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}"
EACH = "{% for m in messages %}%s{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
FIRST = "{% if messages[0]['role'] == 'system' %}" + SHAPE.replace("m[", "messages[0][") + "{% endif %}"
# The system's message stands in the question, in other letters.
INTO_QUESTION = (
    "{% if m['role'] != 'system' %}[{{ m['role'] }}]"
    "{% if m['role'] == 'user' %}<<{{ messages[0]['content'] | upper }}>>{% endif %}"
    "{{ m['content'] }}{{ eos_token }}{% endif %}"
)
TURNS = (Turn("system", "Be brief."), Turn("user", "Where?"), Turn("assistant", "I look."), Turn("tool", "7 rooms"))


@pytest.mark.parametrize(
    ("template", "turns", "lost"),
    [
        (EACH.replace("%s", "{% if m['role'] != 'system' %}" + SHAPE + "{% endif %}"), TURNS, "message 1, 'Be brief.'"),
        (EACH.replace("%s", "{% if m['role'] != 'tool' %}" + SHAPE + "{% endif %}"), TURNS, "message 4, '7 rooms'"),
        (FIRST + EACH.replace("%s", "{% if m['role'] != 'system' %}" + SHAPE + "{% endif %}"), TURNS, None),
        (FIRST + EACH.replace("%s", "{% if m['role'] != 'system' %}" + SHAPE + "{% endif %}"),
         (TURNS[1], TURNS[2], TURNS[0], TURNS[1]), "message 3, 'Be brief.'"),
        (EACH.replace("%s", SHAPE), TURNS, None),
        (EACH.replace("%s", INTO_QUESTION), TURNS, None),
    ],
)  # fmt: skip
def test_no_message_is_left_out_by_a_template_without_a_word(model_folder, template, turns, lost):
    tokenizer = load_tokenizer(str(model_folder))
    tokenizer.chat_template = template
    example = Example("Where?", "In room 7.", turns=turns)
    if lost:
        with pytest.raises(FedKSeedError, match=f"leaves out {lost}"):
            encode(example, tokenizer, Wording("chat"))
    else:
        encoded = encode(example, tokenizer, Wording("chat"))
        assert isinstance(encoded, Encoded)
        assert tokenizer.decode(encoded.tokens).count("room 7") == 1


CUTS_THOUGHTS = SHAPE.replace("m['content']", "m['content'].split('</think>')[-1].lstrip()")
MOVES_THOUGHTS = (
    "[{{ m['role'] }}]{% set parts = m['content'].split('</think>') %}"
    "{% if parts | length > 1 %}<think>{{ parts[0].split('<think>')[-1] }}</think>{{ parts[1].lstrip() }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ eos_token }}"
)


@pytest.mark.parametrize(("shape", "cut"), [(CUTS_THOUGHTS, True), (MOVES_THOUGHTS, False), (SHAPE, False)])
def test_a_template_that_cuts_the_thought_out_of_an_answer_is_refused(model_folder, shape, cut):
    tokenizer = load_tokenizer(str(model_folder))
    tokenizer.chat_template = EACH.replace("%s", shape)
    example = Example("What follows 8?", "<think>\nI add one.\n</think>\n\nIt is 9.")
    if cut:
        with pytest.raises(FedKSeedError, match="chat template leaves 'add' out of the answer"):
            encode(example, tokenizer, Wording("chat"))
    else:
        encoded = encode(example, tokenizer, Wording("chat"))
        assert isinstance(encoded, Encoded)
        assert "I add one." in tokenizer.decode(encoded.tokens)
