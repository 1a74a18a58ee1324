"""Rows over a limit of tokens: the model's context is one, and each row is kept as it is, cut, or counted."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkseed.data.encoder import Encoder, within_context
from fedkseed.data.federated import own_held_out, own_share, share_out, whole_set
from fedkseed.data.layouts import ASSISTANT, USER, Example, Turn
from fedkseed.data.split import OwnedRow
from fedkseed.errors import FedKSeedError
from fedkseed.models.load import load_tokenizer
from fedkseed.recipe.reading import load_recipe, own_recipe, parse
from fedkseed.recipe.schema import Recipe
from fedkseed.report.page import account
from fedkseed.run.store import Store

from ..commands import documented, fedkseed, refused
from ..encoding import encode

CONTEXT = 512  # of the tiny models


def questions(count, long=(), words=400):
    """Rows of which those of the numbers in `long` have an answer of many words."""
    answers = [f"It is {k}." + " and so on" * (words if k in long else 0) for k in range(count)]
    return [{"instruction": f"What is {k} plus 0?", "response": answer} for k, answer in enumerate(answers)]


@pytest.fixture(scope="session")
def plain(tiny_model):
    return load_tokenizer(str(tiny_model("plain")))


def test_rows_that_are_left_out_are_a_warning_of_run_preview_json_and_report(recipe_for, tmp_path):
    recipe = recipe_for("plain", questions(40, long=range(0, 40, 4), words=150))
    document = documented("preview", recipe)
    warnings = [line for line in document["notes"] if line.startswith("warning: ")]
    assert len(warnings) == 2
    counts = [int(line.split()[1]) for line in warnings]
    totals = [int(line.split()[3]) for line in warnings]
    assert totals == [32, 8]  # of which 0.2 is held out
    assert sum(counts) == 10
    assert counts[0] == document["too_long"]
    for line, count, total in zip(warnings, counts, totals, strict=True):
        assert f"({100 * count / total:.3g} %) over 256 tokens ([data] max_tokens) left out, the longest has " in line
    shown = " ".join(fedkseed("preview", recipe).output.split())
    run = documented("run", recipe, "--output", tmp_path / "run")
    costs = documented("run", recipe, "--dry-run")
    store = Store(tmp_path / "run")
    for line in warnings:
        assert line in shown
        assert line in run["notes"]
        assert line in costs["notes"]
        assert line in account(store, "run", store)["notes"]


def test_what_would_keep_all_rows_is_said(recipe_for, plain):
    def warning(limit, words):
        asked = recipe_for("plain", questions(20, long=[3, 4, 5, 6, 7], words=words), max_tokens=limit)
        (line, *_) = [line for line in share_out(load_recipe(asked), plain).notes if line.startswith("warning: ")]
        return line

    line = warning("max_tokens = 128", 50)
    longest = int(line.partition("the longest has ")[2].partition(":")[0])
    assert f"max_tokens = {longest} keeps all" in line
    kept = recipe_for("plain", questions(20, long=[3, 4, 5, 6, 7], words=50), max_tokens=f"max_tokens = {longest}")
    assert share_out(load_recipe(kept), plain).too_long == 0
    assert f"raise max_tokens up to the model's context of {CONTEXT}, or shorten or split them" in warning(
        "max_tokens = 128", 300
    )
    assert warning(f"max_tokens = {CONTEXT}", 300).endswith(": shorten or split them")


@pytest.mark.parametrize("table", ["data", "evaluation"])
def test_a_limit_beyond_the_context_is_refused_with_both_numbers(recipe_for, table):
    named = {"data": {"max_tokens": "max_tokens = 513"}, "evaluation": {"examples": "examples = 4\nmax_tokens = 513"}}
    recipe = recipe_for("plain", questions(20), **named[table])
    for command in ("preview", "run"):
        message = refused(command, recipe)
        assert f"[{table}] max_tokens = 513 is beyond the context" in message
        assert "positions for 512 tokens; set max_tokens = 512 or fewer" in message
    assert "[data] max_tokens = 1,024 is beyond" in refused("preview", recipe, "--set", "data.max_tokens=1024")


def test_without_a_limit_the_context_is_one(recipe_for, plain, tiny_model, tmp_path):
    recipe = load_recipe(recipe_for("plain", questions(40, long=[1, 2, 3, 4, 5]), max_tokens="strict = false"))
    shares = share_out(recipe, plain)
    assert shares.too_long > 0
    assert any(f"over {CONTEXT} tokens" in line for line in shares.notes)
    # A run's recipe states all keys, and so does a server's; nobody has chosen the default.
    stated = parse(recipe.model_dump(exclude_none=True))
    assert stated.data.max_tokens == 1024
    assert share_out(stated, plain).digest() == shares.digest()
    assert documented("run", recipe_for("plain", questions(20)), "--output", tmp_path / "run")["rounds"] == 2
    assert fedkseed("resume", tmp_path / "run").exit_code == 0
    unlimited = load_tokenizer(str(tiny_model("plain")))
    unlimited.model_max_length = 10**30
    assert within_context(recipe, unlimited).data.max_tokens == 1024


@pytest.mark.parametrize(("algorithm", "room"), [("fedptuning", 492), ("fedkseed-backprop", CONTEXT)])
def test_virtual_tokens_take_positions(recipe_for, plain, algorithm, room):
    made = {"algorithm": f'algorithm = "{algorithm}"', "lr": ""}
    recipe = load_recipe(recipe_for("plain", questions(20), max_tokens=f"max_tokens = {room}", **made))
    assert within_context(recipe, plain) == recipe
    larger = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_tokens": room + 1})})
    with pytest.raises(FedKSeedError, match=rf"set max_tokens = {room} or fewer"):
        within_context(larger, plain)


def test_a_client_of_long_rows_alone_has_an_error_with_its_file(recipe_for, plain, tmp_path):
    recipe = load_recipe(recipe_for("plain", questions(12, long=range(12)), held_out='held_out = "none"'))
    with pytest.raises(
        FedKSeedError, match=r"rows\.jsonl: the client has 0 examples .*12 of 12 training rows \(100 %\)"
    ):
        own_share(recipe, plain)
    with pytest.raises(FedKSeedError, match=r"got 0; .* training rows \(100 %\) over 256 tokens"):
        share_out(load_recipe(recipe_for("plain", questions(12, long=range(12)))), plain)
    said = list[str]()
    some = load_recipe(recipe_for("plain", questions(12, long=[1, 2, 3]), held_out='held_out = "none"'))
    examples, *_ = own_share(some, plain, said.append)
    assert len(examples) == 9
    assert said[1].startswith("warning: 3 of 12 training rows (25 %) over 256 tokens ([data] max_tokens) left out")


def test_a_held_out_set_of_long_rows_alone_is_refused(recipe_for, plain, tmp_path):
    rows = [row | {"category": "long" if k < 5 else "short"} for k, row in enumerate(questions(30, long=range(5)))]
    asked = load_recipe(recipe_for("plain", rows, held_out='held_out = "long"'))
    for read in (share_out, own_held_out):
        with pytest.raises(
            FedKSeedError, match=r"no row of the set 'held-out' is left: 5 of 5 held-out rows \(100 %\)"
        ):
            read(asked, plain)
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    further = f'examples = "all"\nsets = [{{ name = "more", path = {json.dumps(str(tmp_path / "more.jsonl"))} }}]'
    with pytest.raises(FedKSeedError, match=r"no row of the set 'more' is left: 5 of 5 rows of the set 'more'"):
        share_out(load_recipe(recipe_for("plain", rows, examples=further)), plain)
    with pytest.raises(FedKSeedError, match=r"has no example of 256 tokens or fewer; 5 of 5 rows"):
        whole_set(load_recipe(recipe_for("plain", tmp_path / "more.jsonl")), plain)


def test_the_official_code_cuts_rows_and_says_so(recipe_for, plain):
    official = 'max_tokens = 128\nprotocol = "official-code"\ntemplate = "plain"'
    rows = questions(20, long=[2, 3, 4, 5])
    rows += [{"instruction": "again " * 200, "response": f"Yes, {k}."} for k in range(6)]
    shares = share_out(load_recipe(recipe_for("plain", rows, max_tokens=official)), plain)
    kept = [example for part in shares.clients for example in part]
    cut = [line for line in shares.notes if " cut, as [data] protocol says, the longest has " in line]
    assert {int(line.split()[0]) for line in cut[:1]} == {sum(len(e.tokens) == 128 for e in kept)}
    assert shares.too_long > 0
    assert any(line.startswith(f"warning: {shares.too_long} of ") for line in shares.notes)


def test_options_of_choice_beyond_the_context_are_refused(recipe_for, plain):
    rows = [{"instruction": f"Is {k} odd? " + "so " * 90, "response": ["no", "yes " * 220][k % 2]} for k in range(20)]
    chosen = {"examples": 'examples = "all"\nmetrics = ["choice"]'}
    with pytest.raises(
        FedKSeedError, match=r"'choice' puts each option after the prompt, .* context of 512: .*max_tok"
    ):
        share_out(load_recipe(recipe_for("plain", rows, **chosen)), plain)
    short = [row | {"response": row["response"][:3]} for row in rows]
    assert share_out(load_recipe(recipe_for("plain", short, **chosen)), plain).options == {"": ["no", "yes"]}


def test_rows_without_a_token_that_counts_are_left_out_and_counted(recipe_for, tiny_model):
    tokenizer = load_tokenizer(str(tiny_model("chatml")))
    recipe = load_recipe(recipe_for("chatml", questions(20)))
    encoder = Encoder.of(recipe, tokenizer)
    example = Example("Hello", "Yes.", turns=(Turn(USER, "Hello"),))
    rows = [OwnedRow(example), OwnedRow(replace(example, response="No."))]
    encoder.refused(rows)
    encoded = encoder._encoded[example]
    encoder._encoded[example] = replace(encoded, tokens=encoded.tokens[: encoded.prompt])
    kept = encoder.within(rows)
    assert ([e.example.response for e in kept.examples], len(kept.uncounted)) == (["No."], 1)
    (line,) = encoder.remarks(kept, 2, "training rows")
    assert line == "warning: 1 of 2 training rows (50 %) left out without a token that the loss counts"


@pytest.mark.parametrize("at", ["instruction", "context", "response", "turns", None])
def test_rows_with_special_tokens_in_their_own_text_are_counted(recipe_for, tiny_model, at):
    """What a chat template writes is not theirs, and in a plain text they are its format."""
    tokenizer = load_tokenizer(str(tiny_model("chatml")))
    encoder = Encoder.of(load_recipe(recipe_for("chatml", questions(20))), tokenizer)
    example, said = Example("Hello", "Yes.", "Here"), "a <|im_end|> b"
    if at == "turns":
        example = replace(example, turns=(Turn(USER, said), Turn(ASSISTANT, "a"), Turn(USER, "Hello")))
    elif at is not None:
        example = replace(example, **{at: said})
    kept = encoder.within([OwnedRow(Example("Hi", "No.")), OwnedRow(example), OwnedRow(Example("", said, plain=True))])
    lines = [*encoder.remarks(kept, 3, "training rows")]
    expected = "warning: 1 of 3 examples of the training rows have special tokens in their own text, as <|im_end|>, "
    assert lines == ([] if at is None else [f"{expected}which the model reads as such: rewrite or remove them"])


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=20),
    limit=st.integers(1, 130),
    cuts=st.booleans(),
    talks=st.booleans(),
)
def test_each_row_is_kept_as_it_is_or_cut_or_counted(plain, sizes, limit, cuts, talks):
    """All rows are accounted for, kept ones are unchanged to the token, and none is over the limit."""
    rows = list[OwnedRow]()
    for k, (asked, answered) in enumerate(sizes):
        turns = (
            (Turn(USER, "Hi" * asked), Turn(ASSISTANT, "Ja " * answered), Turn(USER, "?")) if talks and k % 2 else ()
        )
        rows.append(OwnedRow(Example(" a" * asked + f" {k}", "b " * answered, turns=turns), owner=k))
    protocol = "official-code" if cuts else "paper"
    data = {"template": "plain", "max_tokens": limit, "protocol": protocol}
    recipe = Recipe.model_validate({"model": {"name": "m"}, "data": data})
    encoder = Encoder.of(recipe, plain)
    kept = encoder.within(rows)
    whole = [encode(row.example, plain, encoder.wording) for row in rows]
    assert len(kept.examples) == len(kept.owners)
    assert sorted([*kept.owners, *(row.owner for row in kept.too_long)]) == [row.owner for row in rows]
    assert all(len(example.tokens) <= limit for example in kept.examples)
    for owner, example in zip(kept.owners, kept.examples, strict=True):
        assert example.tokens == whole[owner].tokens[:limit]
        assert example.counted[-1][1] > example.counted[-1][0]
        if not cuts:
            assert example == whole[owner]
    for row in kept.too_long:
        assert (whole[row.owner].prompt if cuts else len(whole[row.owner].tokens)) > limit - cuts
    assert {row.owner for row in kept.cut} == {o for o in kept.owners if len(whole[o].tokens) > limit}
    left_out = [row.owner for row in (*kept.too_long, *kept.cut)]
    assert kept.longest == max((len(whole[owner].tokens) for owner in left_out), default=0)
    lines = [*encoder.remarks(kept, len(rows), "training rows")]
    assert len(lines) == bool(kept.too_long) + bool(kept.cut)
    for line, counted in zip(lines, filter(None, (kept.too_long, kept.cut)), strict=True):
        share = 100 * len(counted) / len(rows)
        assert f"{len(counted)} of {len(rows)} training rows ({share:.3g} %) over {limit} tokens" in line


@settings(max_examples=20, deadline=None)
@given(texts=st.lists(st.text("abc \n", min_size=1, max_size=80), min_size=1, max_size=8), limit=st.integers(2, 40))
def test_texts_are_cut_into_blocks_within_the_limit(plain, texts, limit):
    recipe = Recipe.model_validate({"model": {"name": "m"}, "data": {"max_tokens": limit}})
    encoder = Encoder.of(recipe, plain)
    rows = [OwnedRow(Example("", text, plain=True)) for text in texts]
    kept = encoder.within(rows)
    stream = [token for row in rows for token in encode(row.example, plain, encoder.wording).tokens]
    assert [token for block in kept.examples for token in block.tokens] in (stream, stream[:-1])
    assert all(len(block.tokens) <= limit for block in kept.examples)


def test_a_users_recipe_is_told_from_one_that_states_all_keys(recipe_for, plain):
    named = own_recipe(recipe_for("plain", questions(20), max_tokens="max_tokens = 1024"))
    with pytest.raises(FedKSeedError, match="max_tokens = 1,024 is beyond"):
        share_out(named, plain)
