"""Conversations that a chat template refuses: named by their places in one answer, or left out and counted."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkseed.data.federated import own_share, share_out, whole_set
from fedkseed.errors import FedKSeedError
from fedkseed.models.load import load_tokenizer
from fedkseed.recipe.reading import load_recipe

from ..commands import documented, refused

USUAL, GREETED, TWICE = ("user", "assistant"), ("assistant", "user", "assistant"), ("user", "user", "assistant")


def talk(number, roles=USUAL):
    said = {"user": f"What is {number} plus 0?", "assistant": f"It is {number}."}
    return {"messages": [{"role": role, "content": said[role]} for role in roles]}


@pytest.fixture(scope="session")
def alternate(tiny_model):
    return load_tokenizer(str(tiny_model("alternate")))


@pytest.mark.parametrize("roles", [GREETED, TWICE])
def test_the_row_is_named_by_file_and_line(recipe_for, roles):
    rows = [talk(k, roles if k == 17 else USUAL) for k in range(40)]
    recipe = recipe_for("alternate", rows)
    for command in ("preview", "run"):
        message = refused(command, recipe)
        assert "rows.jsonl, line 18: the model's chat template can't be used: TemplateError: roles must" in message
        assert "leave_out_faulty" in message


def test_all_rows_of_a_file_are_in_one_answer_held_out_or_not(recipe_for, alternate):
    faulty = [2, 3, 5, 8, 13, 21, 34, 39]
    recipe = recipe_for("alternate", [talk(k - 1, TWICE if k in faulty else USUAL) for k in range(1, 41)])
    with pytest.raises(FedKSeedError) as raised:
        share_out(load_recipe(recipe), alternate)
    assert "8 faulty rows" in str(raised.value)
    assert re.search(r"line 2: .* .so line 3, line 5, line 8, line 13, line 21, line 34, line 39.; ", str(raised.value))


def test_they_are_left_out_and_counted_if_the_owner_asks(recipe_for):
    recipe = recipe_for("alternate", [talk(k, TWICE if k % 10 == 3 else USUAL) for k in range(40)])
    document = documented("preview", recipe, "--set", "data.leave_out_faulty=true")
    assert sum(client["examples"] for client in document["clients"]) + document["held_out"] == 36
    assert "4 faulty rows left out: line 4: the model's chat template can't be used" in document["notes"][0]
    warned = [line for line in document["notes"] if "that the chat template refuses" in line]
    assert sum(int(line.split()[1]) for line in warned) == 4


def test_a_template_that_refuses_all_rows_is_one_message(recipe_for, alternate):
    for changes in ({}, {"max_tokens": "max_tokens = 256\nleave_out_faulty = true"}):
        recipe = load_recipe(recipe_for("alternate", [talk(k, GREETED) for k in range(30)], **changes))
        with pytest.raises(FedKSeedError) as raised:
            share_out(recipe, alternate)
        assert str(raised.value).count("roles must alternate") == 1
        assert "line 1" in str(raised.value)


def test_a_clients_file_and_a_file_to_evaluate_on_have_the_same_answer(recipe_for, alternate):
    chat = {"max_tokens": 'max_tokens = 256\ntemplate = "chat"', "held_out": 'held_out = "none"'}
    recipe = load_recipe(recipe_for("alternate", [talk(k, TWICE if k in (4, 6) else USUAL) for k in range(20)], **chat))
    for read in (own_share, whole_set):
        with pytest.raises(FedKSeedError, match=r"rows.jsonl.*line 5: .* .so line 7."):
            read(recipe, alternate)


@settings(max_examples=15, deadline=None)
@given(kinds=st.lists(st.sampled_from([USUAL, GREETED, TWICE, (*USUAL, *USUAL)]), min_size=12, max_size=24))
def test_refused_and_kept_rows_are_all_rows(tmp_path_factory, tiny_model, alternate, kinds):
    folder = tmp_path_factory.mktemp("rows")
    rows = [talk(k, roles) for k, roles in enumerate([USUAL] * 6 + kinds)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text(
        f'[model]\nname = "m"\n[data]\nsource = {json.dumps(str(folder / "rows.jsonl"))}\nheld_out = 0.2\n'
        'leave_out_faulty = true\n[clients]\nsplit = "even"\ncount = 1\ncohort = 1\nmin_examples = 1\n'
        '[evaluation]\nexamples = "all"\n'
    )
    try:
        shares = share_out(load_recipe(folder / "recipe.toml"), alternate)
    except FedKSeedError as error:  # by chance all rows that are held out
        if "no row of the set 'held-out' is left" not in str(error):
            raise
        return
    wrong = sum(roles in (GREETED, TWICE) for roles in kinds)
    assert len(shares.clients[0]) + len(shares.held_out) == len(rows) - wrong
    assert (f"{wrong} faulty row" in shares.notes[0]) == bool(wrong)
