"""Files as offices write them: the same rows by many writers are the same rows, and what is odd in them is said."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any
from unicodedata import combining, normalize

import openpyxl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkseed import FedKSeedError
from fedkseed.data.layouts import Example, fit, is_placeholder
from fedkseed.data.sources import DataFile, Reader
from fedkseed.network.protocol.client.policy import Policy
from fedkseed.recipe.reading import load_recipe, typed

from ..commands import documented, fedkseed, refused
from ..data.test_text_encodings import SENTENCES, WORDS

HEADS = {  # language -> names of columns of questions and answers
    "en": [("question", "answer"), ("Prompt", "Response"), ("Q", "A"), ("input", "output"), ("Problem", "Solution")],
    "de": [("Frage", "Antwort"), ("FRAGEN:", "ANTWORTEN:"), ("Anliegen", "Lösung"), ("Problem", "Loesung")],
    "fr": [("Question", "Réponse"), ("QUESTION", "REPONSE"), ("Demande ", "réponse :")],
    "es": [("Pregunta", "Respuesta"), ("Consulta", "Solución"), ("preguntas", "respuestas")],
    "it": [("Domanda", "Risposta"), ("Richiesta", "Soluzione"), ("domande", "risposte")],
}
PARTS = [*WORDS, "12,50", "a;b", '"so"', "x|y", "tab\there"]
MORE = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map(" ".join)


def read(path: Path, **options: Any) -> DataFile:
    return Reader(**options).file(str(path))


def csv_of(rows: list[tuple[str, ...]], separator: str, end: str = "\r\n", quoting: Any = csv.QUOTE_MINIMAL) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=separator, lineterminator=end, quoting=quoting).writerows(rows)
    return text.getvalue()


@settings(max_examples=100, deadline=None)
@given(
    language=st.sampled_from([*HEADS]),
    more=st.lists(st.tuples(MORE, MORE), max_size=6),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252", "mac_roman", "cp850"]),
    separator=st.sampled_from(",;\t|"),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    named=st.booleans(),
    above=st.integers(0, 2),
    below=st.integers(0, 3),
    choose=st.integers(0, 99),
)
def test_the_same_rows_of_any_writer_are_the_same_rows(
    tmp_path_factory, language, more, encoding, separator, end, quoting, named, above, below, choose
):
    def kept(text: str) -> str:
        return text.encode(encoding, "ignore").decode(encoding)

    heads = HEADS[language]
    asked, answered = SENTENCES[language]
    lines = ["two\nlines", "2"] if quoting != csv.QUOTE_MINIMAL else ["one line", "2"]
    rows = [(kept(q), kept(a)) for q, a in [(asked, answered), ("12,5 %?", "0,5"), *more, *[lines] * 2]]
    table = [*[("Stand: Mai", "")] * above, heads[choose % len(heads)], *rows, *[("", "")] * below]
    text = (f"sep={separator}{end}" if named else "") + csv_of(table, separator, end, quoting)
    path = tmp_path_factory.getbasetemp() / "office.csv"
    path.write_bytes(text.encode(encoding))
    file = read(path)
    assert [(e.instruction, e.response) for e in file.examples] == rows
    assert any("a guess" in note for note in file.notes) == (encoding in ("cp1252", "mac_roman", "cp850"))
    assert any("above the names" in note for note in file.notes) == bool(above)
    path = path.with_suffix(".xlsx")
    book = openpyxl.Workbook()
    for row in table:
        book.worksheets[0].append(row)
    book.save(path)
    assert read(path).examples == file.examples


@pytest.mark.parametrize("head", [head for heads in HEADS.values() for head in heads])
def test_usual_names_are_known_in_any_case_and_form_and_with_or_without_accents(head):
    for form in ("NFC", "NFD"):
        for change in (str, str.upper, str.lower, lambda name: "".join(c for c in name if not combining(c))):
            names = [change(normalize(form, name)) for name in head]
            layout = fit(dict.fromkeys(names, "x"), {}, None, "line 2")
            assert layout.title == f"instruction and response ({names[0]}, {names[1]})"
            assert layout.example(dict(zip(names, "qa", strict=True)), "line 2") == Example("q", "a")


def test_names_of_a_layout_come_first_and_plain_text_last():
    row = {"prompt": "q", "completion": "a", "question": "x", "answer": "y"}
    assert fit(row, {}, None, "line 2").name == "prompt-completion"
    assert fit({"Text": "t", "Frage": "q", "Antwort": "a"}, {}, None, "line 2").name == "instruction"
    assert fit({"Text": "t", "Frage": "q", "Antwort": "a"}, {}, "text", "line 2").name == "text"
    assert fit({"Text": "t", "Frage": "q", "Antwort": "a"}, {"text": "Text"}, None, "line 2").name == "text"
    row = {"Frage": "q", "Antwort": "a", "Kategorie": "k", "Kontext": "c"}
    assert fit(row, {}, None, "line 2").example(row, "line 2") == Example("q", "a", "c", "k")


@pytest.fixture
def departments(tmp_path: Path) -> Path:
    """Three departments' files: an xlsx and a CSV of Windows in German, and one of a Mac in French."""
    folder = tmp_path / "departments"
    folder.mkdir()
    german = [(f"Wie hoch ist der Zuschuss für {k}; und wann?", f"Er beträgt {k},50 €, Grüße!") for k in range(24)]
    french = [(f"Où est la clé n° {k} ?", f"La clé {k} a été déposée à l’accueil, c’est là.") for k in range(24)]
    (folder / "hr.csv").write_bytes(csv_of([("Frage", "Antwort"), *german], ";").encode("cp1252"))
    (folder / "compta.csv").write_bytes(csv_of([("Question", "Réponse"), *french], ";", "\r").encode("mac_roman"))
    book = openpyxl.Workbook()
    sheet: Any = book.active
    sheet.title = "Fälle"
    for row in [("Stand Mai", ""), ("Anliegen", "Lösung"), *german, ("", "Ja"), ("Und?", "n/a"), ("Wer?", "-")]:
        sheet.append(row)
    book.save(folder / "it.xlsx")
    (folder / "~$it.xlsx").write_bytes(b"\x04Jana")  # while Excel has the file open
    return folder


def test_a_folder_of_three_departments_needs_no_names_of_columns(departments, tiny_model, tmp_path):
    recipe = tmp_path / "recipe.toml"
    done = documented("init", recipe, "--data", departments, "--model", tiny_model("plain"), "--no-estimate")
    assert done["data"]["rows"] == 75
    compta, hr, it = done["notes"][:3]
    assert compta.startswith("compta.csv: 24 rows as instruction and response (Question, Réponse); read as Mac Roman, ")
    assert hr.startswith(
        "hr.csv: 24 rows as instruction and response (Frage, Antwort); read as Windows-1252, a guess, "
    )
    assert "(Anliegen, Lösung); sheet 'Fälle', 1 line above the names of columns not used" in it
    assert "3 faulty rows left out: row 27: a row without a question" in it
    assert load_recipe(recipe).data.leave_out_faulty
    reason = "1 without a question, 1 with the answer 'n/a', 1 with the answer '-'"
    assert f"leave_out_faulty = true # {reason}; false: they are trained on\n" in recipe.read_text()
    kept = documented("preview", recipe, "--set", "data.leave_out_faulty=false")["notes"]
    assert f"{reason} ([data] leave_out_faulty = true leaves such rows out)" in kept[2]
    said = refused("preview", recipe, "--set", "data.leave_out_faulty=false", "--set", "data.strict=true")
    assert "row 27: a row without a question; row 28: a row with the answer 'n/a' (so row 29); 3 faulty" in said


def test_columns_have_other_names_in_each_file(departments, tiny_model, tmp_path):
    for name, names in (("hr", "Stichwort;Text A"), ("compta", "Sujet;Texte"), ("more", "instruction;response")):
        text = "".join(f"wie {k}?;so {k}\n" for k in range(30))
        (departments / f"{name}.csv").write_text(f"{names}\n{text}")
    model, recipe = tiny_model("plain"), tmp_path / "recipe.toml"
    columns = ["instruction=Stichwort", "response=Text A", "instruction=Sujet", "response=Texte"]
    arguments = ["--data", departments, "--model", model, "--no-estimate"]
    unnamed = fedkseed("init", recipe, *arguments)
    assert unnamed.exit_code == 2
    assert unnamed.stderr.count("no column instruction and no response") == 2
    done = documented("init", recipe, *arguments, *(part for column in columns for part in ("--column", column)))
    assert done["data"]["rows"] == 117
    named = {"instruction": ["Stichwort", "Sujet"], "response": ["Text A", "Texte"]}
    assert load_recipe(recipe).data.columns == named
    assert typed(Policy, {"data": {"columns": named}}).followed(load_recipe(recipe)).data.columns == named
    misspelt = json.dumps(named | {"response": ["Text A", "Texte", "Txt"]}).replace(":", " =")
    assert "has a column 'Txt'" in refused("preview", recipe, "--set", f"data.columns={misspelt}")


def test_all_that_is_wrong_in_a_folder_is_in_one_answer(departments):
    (departments / "notes.docx").touch()
    (departments / "empty").mkdir()
    (departments / "ru.csv").write_bytes("Frage;Antwort\nОтвет на вопрос;да\n".encode("cp1251"))
    (departments / "two.csv").write_bytes(b"Frage,Anfrage,Antwort\na,b,c\n")
    with pytest.raises(FedKSeedError) as raised:
        Reader().folder(str(departments))
    empty, notes, russian, two = str(raised.value).splitlines()
    assert "empty, holds no data files" in empty
    assert "notes.docx is no data file" in notes
    assert "ru.csv, line 2: not valid UTF-8, and no likely words as" in russian
    assert "two.csv, line 2: each of the columns Frage, Anfrage could be the instruction; say which" in two


@pytest.mark.parametrize(
    "answer",
    ["-", " – ", "...", "…", "?", "n/a", "N.A.", "k. A.", "tbd", "TODO", "keine", "Keine Angabe", "#N/A", "#NV",
     "#REF!", "#DIV/0!", "aucune", "Néant", "ninguna", "nessuno", "\\N", "NaT", "[removed]", "(blank)"],
)  # fmt: skip
def test_what_stands_for_no_answer_is_known(answer):
    assert is_placeholder(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "no",
        "Nein.",
        "0",
        "keine Zeit",
        "👍",
        "+",
        "C#",
        "#hr",
        "Not on Mondays",
        "",
        "NAT",
        "blank",
        "N",
        "(see above)",
    ],
)
def test_short_answers_are_answers(answer):
    assert not is_placeholder(answer)


def test_the_extra_for_sheets_is_named_where_it_is_missing(departments, monkeypatch):
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    for path in ("it.xlsx", "it.ods"):
        (departments / path).write_bytes(b"PK\0")
        with pytest.raises(FedKSeedError, match=r"it\.\w+ needs the extra `excel`: pip install 'fedkseed\[excel\]'"):
            read(departments / path)
