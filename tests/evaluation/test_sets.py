"""Further held-out sets and a validation part, through a whole run: rows, store, terminal, report, event files."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fedkseed import FedKSeedError, load_recipe, resume
from fedkseed.data.federated import ClientShares, share_out
from fedkseed.data.sources import Example
from fedkseed.evaluation.statistics import Evaluation, paired_change, title_of
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.models.loss import example_losses
from fedkseed.report import page as report
from fedkseed.run import trackers
from fedkseed.run.store import STOPPED, Store
from fedkseed.weights.adapter import Adapter

from ..conftest import recipe_text, rows
from ..run.test_loop import begun
from .conftest import fedkseed

OTHERS = [
    {"instruction": f"How large is {thing}?", "response": size, "category": "size"}
    for thing, size in [("an ant", "Small."), ("a cat", "Small."), ("the sea", "Large."), ("Peru", "Large.")]
]
OWN = '[[evaluation.sets]]\nname = "own rows"\nclients = {}\n'
UNSEEN = '[[evaluation.sets]]\nname = "unseen task"\nheld_out = "number"\n'
GENERAL = '[[evaluation.sets]]\nname = "general"\npath = "others.jsonl"\n'
SETS = OWN.format(1) + UNSEEN + GENERAL
SIZES = {"": 6, "validation": 4, "own rows": 2, "unseen task": 10, "general": 4}
CHOOSING = 'validation = 0.4\nbest = "loss"\npatience = 2'
BEST, LAST = 2, 4  # with these recipes: 0.01 nats better on the validation part than after any other round


def write(path: Path, sets: str = SETS, extra: str = CHOOSING, **changes: str) -> Path:
    """A recipe with two clients, which hold the rows about colours."""
    lines = {
        "count": "count = 2", "alpha": 'split = "even"', "lr": "lr = 2e-3", "rounds": "rounds = 6",
        "examples": f'every = 1\nexamples = 10\nmetrics = ["accuracy", "exact match"]\n{extra}',
    } | changes  # fmt: skip
    others = path.parent / "others.jsonl"
    others.write_text("".join(json.dumps(row) + "\n" for row in OTHERS))
    path.write_text(recipe_text(MODEL["folder"], MODEL["data"], **lines) + sets.replace("others.jsonl", str(others)))
    return path


MODEL: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def model(model_folder, data_file) -> None:
    MODEL.update(folder=model_folder, data=data_file)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    write(folder / "recipe.toml")
    (folder / "printed.txt").write_text(fedkseed("run", folder / "recipe.toml", "--output", folder / "run"))
    return folder / "run"


@pytest.fixture(scope="module")
def kept(run) -> dict[int, Evaluation]:
    return {done: Evaluation.of(found) for done, found in Store(run).evaluations().items()}


@pytest.fixture(scope="module")
def departments(tmp_path_factory) -> Path:
    """A run with a client each for the rows about colours and those about numbers, which keep three of them back."""
    folder = tmp_path_factory.mktemp("departments")
    (folder / "data").mkdir()
    for name, category in (("hr", "colour"), ("it", "number")):
        own = [row for row in rows() if row["category"] in (category, "capital")]
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    lines = {
        "count": 'split = "files"', "lr": "lr = 2e-3", "alpha": "", "generated": "generated = 2",
        "examples": 'clients = 3\nevery = 2\nexamples = 8\nmetrics = ["accuracy", "exact match"]',
    }  # fmt: skip
    (folder / "recipe.toml").write_text(recipe_text(MODEL["folder"], folder / "data", **lines))
    (folder / "printed.txt").write_text(fedkseed("run", folder / "recipe.toml", "--output", folder / "run"))
    return folder / "run"


# --- the rows ----------------------------------------------------------------------------------


def shares_of(folder: Path, sets: str = SETS, extra: str = CHOOSING, **changes: str) -> ClientShares:
    recipe = load_recipe(write(folder / "recipe.toml", sets, extra, **changes))
    return share_out(recipe, load_tokenizer(str(MODEL["folder"])))


def examples(part) -> list[Example]:
    return [e.example for e in part]


def test_no_row_is_in_two_places(tmp_path):
    shares = shares_of(tmp_path)
    parts = [*shares.clients, shares.held_out, *(one.examples for one in shares.sets.values())]
    every = [example for part in parts for example in examples(part)]
    assert len(every) == len({*every}) == 10 + 6 + 4 + 2 + 10 + 4
    assert {name: len(one.examples) for name, one in shares.sets.items()} == {k: n for k, n in SIZES.items() if k}
    assert [*shares.sets] == ["validation", "own rows", "unseen task", "general"]
    kinds = {name: {e.category for e in examples(one.examples)} for name, one in shares.sets.items()}
    assert kinds == {"validation": {"capital"}, "own rows": {"colour"}, "unseen task": {"number"}, "general": {"size"}}
    assert {e.category for part in shares.clients for e in examples(part)} == {"colour"}


def test_each_client_keeps_back_rows_that_depend_on_seed_and_client_alone(tmp_path):
    plain, kept = shares_of(tmp_path, "", ""), shares_of(tmp_path, OWN.format(2), "")
    own = examples(kept.sets["own rows"].examples)
    assert len({*own}) == 4
    for whole, part in zip(plain.clients, kept.clients, strict=True):
        left_out = [e for e in examples(whole) if e not in examples(part)]
        assert (len(whole), len(left_out)) == (12, 2)
        assert {*left_out} < {*own}
        assert [e for e in examples(whole) if e not in left_out] == examples(part)  # in the same order
    among_others = shares_of(tmp_path, GENERAL + OWN.format(2))
    assert examples(among_others.sets["own rows"].examples) == own
    other = shares_of(tmp_path, OWN.format(2), "", seed="seed = 4").sets["own rows"].examples
    assert examples(other) != own


@pytest.mark.parametrize(("portion", "count"), [(3, 3), (0.34, 4), (0.01, 1)])
def test_a_share_or_a_number_of_each_clients_rows_is_kept_back(portion, count, tmp_path):
    shares = shares_of(tmp_path, OWN.format(portion), "")
    assert [len(part) for part in shares.clients] == [12 - count, 12 - count]
    assert len(shares.sets["own rows"].examples) == 2 * count


@pytest.mark.parametrize(
    ("validation", "examples_", "sizes"), [("0.25", "8", (6, 2)), ("3", "8", (5, 3)), ("0.5", '"all"', (6, 6))]
)
def test_the_validation_part_is_taken_from_the_examples_and_leaves_the_others_as_they_are(
    validation, examples_, sizes, tmp_path
):
    plain = shares_of(tmp_path, "", "", examples=f"examples = {examples_}")
    shares = shares_of(tmp_path, "", "", examples=f"examples = {examples_}\nvalidation = {validation}")
    reported, chooses = examples(shares.held_out), examples(shares.sets["validation"].examples)
    assert (len(reported), len(chooses)) == sizes
    assert reported + chooses == examples(plain.held_out)
    assert plain.clients == shares.clients


@pytest.mark.parametrize(("most", "generated"), [(1, 5), (1, 0), (5, 5), (6, 5)])
def test_responses_that_answers_can_not_be_as_long_as_are_counted(most, generated, tmp_path):
    sizes = {"generated": generated, "max_new_tokens": most, "examples": 8}
    changes = {name: f"{name} = {size}" for name, size in sizes.items()}
    recipe, notes = load_recipe(write(tmp_path / "recipe.toml", "", "", **changes)), list[str]()
    tokenizer = load_tokenizer(str(MODEL["folder"]))
    held_out = share_out(recipe, tokenizer, notes.append).held_out
    sizes = [len(tokenizer(e.example.response).input_ids) for e in held_out[:generated]]
    long = [size for size in sizes if size > most]
    lines = [line for line in notes if "max_new_tokens" in line]
    assert len(lines) == bool(long) == (most < 6 and generated > 0)
    if long:
        assert f"max_new_tokens = {most} cuts answers short: {len(long)} of the 5 responses" in lines[0]
        assert f"the longest has {max(long)} tokens" in lines[0]


def test_a_set_has_as_many_examples_as_the_first_or_as_it_says(tmp_path):
    for line, count in (("", 10), ("examples = 3\n", 3), ('examples = "all"\n', 12)):
        assert len(shares_of(tmp_path, UNSEEN + line, "").sets["unseen task"].examples) == count


def test_a_folder_of_files_is_read_as_one(tmp_path):
    (tmp_path / "parts").mkdir()
    for number in range(2):
        (tmp_path / "parts" / f"{number}.jsonl").write_text(json.dumps(OTHERS[number]) + "\n")
    shares = shares_of(tmp_path, GENERAL.replace("others.jsonl", str(tmp_path / "parts")), "")
    read = {e.instruction for e in examples(shares.sets["general"].examples)}
    assert read == {row["instruction"] for row in OTHERS[:2]}


@pytest.mark.parametrize(
    ("sets", "extra", "message"),
    [
        (OWN.format(12), "", r"clients = 12 keeps back 12 of the 12 examples of client 0, and none is left to train"),
        (UNSEEN.replace("number", "size"), "", r"no category of the data beside .*: 'size'; there are colour, number"),
        (UNSEEN.replace("number", "capital"), "", r"of the data beside those of \[data\] held_out: 'capital'"),
        (UNSEEN + "examples = 13\n", "", r"\[evaluation.sets\] 'unseen task' asks for 13 held-out examples, 12 are"),
        (GENERAL.replace("others", "nothing"), "", "no data file at"),
        ("", "validation = 9", r"validation = 9 takes 9 of 10 held-out examples: that part and the part that is"),
        ("", "validation = 0.1", "validation = 0.1 takes 1 of 10"),
    ],
)
def test_what_the_rows_do_not_allow_is_refused(sets, extra, message, tmp_path):
    with pytest.raises(FedKSeedError, match=message):
        shares_of(tmp_path, sets, extra)


def test_a_file_with_rows_that_clients_train_on_is_refused(tmp_path):
    trained = next(row for row in rows() if row["category"] == "colour")
    OTHERS.append(trained)
    try:
        with pytest.raises(FedKSeedError, match=r"'general': clients train on 1 of its 5 examples; remove these rows"):
            shares_of(tmp_path)
    finally:
        OTHERS.pop()


def test_each_set_offers_choices_among_its_own_responses(tmp_path):
    """The file has the category of the data, and other responses: they are no options of each other."""
    changes = {"examples": 'examples = 10\nmetrics = ["choice"]'}
    OTHERS.append({"instruction": "What is the capital of Mars?", "response": "None.", "category": "size"})
    try:
        shares = shares_of(tmp_path, GENERAL + UNSEEN, "", **changes)
    finally:
        OTHERS.pop()
    assert shares.sets["general"].options == {"size": ["Large.", "None.", "Small."]}
    assert shares.sets["unseen task"].options.keys() == {"number"}
    assert shares.options.keys() == {"capital"}


# --- a whole run -------------------------------------------------------------------------------


def test_the_store_has_a_number_an_example_set_and_metric(kept):
    assert [*kept] == [0, 1, 2, 3, 4]
    for done, found in kept.items():
        for name, one in found.every.items():
            answers = done in (0, BEST) and name != "validation"  # of the tuned model and the base model
            sizes = {"loss": SIZES[name], "accuracy": SIZES[name]} | ({"exact match": 2} if answers else {})
            assert {metric: len(values) for metric, values in one.measures.items()} == sizes, (done, name)
    assert len({tuple(found.sets["general"].losses) for found in kept.values()}) == 5


def test_the_numbers_of_a_set_are_those_of_its_rows(run, kept):
    """The base model's loss on the file, one example at a time."""
    model, tokenizer = load_model(str(MODEL["folder"])), load_tokenizer(str(MODEL["folder"]))
    held_out = share_out(Store(run).load_recipe(), tokenizer).sets["general"].examples
    assert {e.example.instruction for e in held_out} == {row["instruction"] for row in OTHERS}
    for encoded, loss in zip(held_out, kept[0].sets["general"].losses, strict=True):
        logs = model(torch.tensor([encoded.tokens])).logits[0].double().log_softmax(-1)
        nats = [-float(logs[at - 1, encoded.tokens[at]]) for at in range(encoded.prompt, len(encoded.tokens))]
        assert loss == pytest.approx(np.mean(nats), rel=1e-5)


def test_the_terminal_shows_each_set_with_its_paired_change(run, kept):
    printed = (run.parent / "printed.txt").read_text()
    for of, before in kept[0].every.items():
        after = kept[BEST].every[of]
        prefix = f"{of}: " if of else ""
        for name in before.measures:
            count = f"{len(before.measures[name])} {'answers' if name == 'exact match' else 'examples'}"
            (line,) = [line for line in printed.splitlines() if f"│ {prefix}{title_of(name)}, {count}" in line]
            change = paired_change(before.measures[name], after.measures[name])
            assert f"{np.mean(before.measures[name]):.4f} ± " in line
            assert f"{np.mean(after.measures[name]):.4f} ± " in line
            assert f"{change.mean:+.4f} ± {change.error:.4f}" in line
    assert "stopped early after 4 rounds: in 2 evaluations the held-out loss of the validation part" in printed
    assert "stopped early after 4 rounds: in 2 evaluations the held-out loss of the validation part" in printed
    assert "the tuned model is that after 2 rounds" in printed


def test_eval_prints_each_set_of_the_best_round_and_of_any_other(run, kept):
    for arguments, done in (((), BEST), (("--after", LAST), LAST)):
        printed = fedkseed("eval", run, *arguments)
        assert f"after {done} rounds: held-out loss {np.mean(kept[done].losses):.4f} ± " in printed
        for of, found in kept[done].sets.items():
            change = paired_change(kept[0].sets[of].losses, found.losses)
            line = f"{of}: held-out loss {np.mean(found.losses):.4f} ± "
            assert line in printed
            assert f"change from the base model: {change.mean:+.4f} ± {change.error:.4f}" in printed.split(line)[1]


def test_rounds_metrics_jsonl_and_event_files_have_the_means_of_each_set(run, kept):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for of, name in (("own rows", "loss"), ("unseen task", "accuracy"), ("general", "loss")):
        means = [float(np.mean(kept[done].sets[of].measures[name])) for done in kept]
        assert [lines[0]["base"][f"{of}: {name}"], *(line["evaluation"][f"{of}: {name}"] for line in lines)] == means
        curve = f"held-out/{of}: {title_of(name)}"
        points = {done: values[curve] for done, _, values in trackers.curves(Store(run)) if curve in values}
        assert points == dict(zip(kept, means, strict=True))
    printed = fedkseed("rounds", run)
    rows = [re.split("[┃│]", line)[1:-1] for line in printed.splitlines() if re.search("[┃│]", line)]
    table = [dict(zip(map(str.strip, rows[0]), map(str.strip, row), strict=True)) for row in rows[1:]]
    assert [row["general: held-out loss"] for row in table] == [
        f"{np.mean(found.sets['general'].losses):.4f}" for found in kept.values()
    ]
    assert "stopped early after 4 rounds" in printed
    assert "the tuned model is that after 2 rounds" in printed


def test_the_report_has_each_set(run, kept):
    account = report.account(Store(run), "a", Store(run))
    assert (account["best"], account["stopped"]) == (BEST, Store(run).recall(STOPPED))
    for shown, (done, found) in zip(account["evaluations"], kept.items(), strict=True):
        for of, one in found.sets.items():
            measured = shown["others"][f"{of}: loss"]
            assert measured["mean"].mean == pytest.approx(np.mean(one.losses))
            assert measured["change"] == (paired_change(kept[0].sets[of].losses, one.losses) if done else None)
            assert measured["count"] == f"{SIZES[of]} examples"
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', report.page([run]))
    good = {one["name"]: (one["title"], one["good"]) for one in json.loads(data)["scores"]}
    assert good["general: loss"] == ("general: held-out loss", -1)
    assert good["general: accuracy"] == ("general: token accuracy", 1)


def test_each_client_sees_whether_it_gained(departments):
    found = {done: Evaluation.of(table) for done, table in Store(departments).evaluations().items()}
    before, after = found[0].sets["own rows"], found[3].sets["own rows"]
    owners = np.array(before.owners)
    assert sorted(before.owners) == ["hr"] * 3 + ["it"] * 3
    assert before.owners == after.owners
    losses = [np.array(one.losses) for one in (before, after)]
    printed = (departments.parent / "printed.txt").read_text()
    evaluated = fedkseed("eval", departments, "--json")  # with what goes to stderr
    of_clients = json.loads(evaluated[evaluated.index("{") :])["clients"]
    on_page = report.account(Store(departments), "run", Store(departments))["gains"]
    for table, shown, name in zip(of_clients, on_page, ("hr", "it"), strict=True):
        then, now = (values[owners == name] for values in losses)
        change, error = float((now - then).mean()), float((now - then).std(ddof=1) / np.sqrt(3))
        assert (table["client"], table["rows"]) == (name, 3)
        assert table["before"]["loss"] == pytest.approx(then.mean())
        assert table["after"]["loss"] == pytest.approx(now.mean(), abs=1e-5)
        assert table["change"]["loss"] == pytest.approx({"mean": change, "error": error}, abs=1e-5)
        answered = {"exact match"} if name in owners[:2] else set[str]()  # answers are written to the first two rows
        assert table["change"].keys() == {"loss", "accuracy"} | answered
        assert table["verdict"] == ("unclear" if abs(change) <= 2 * error else "gained" if change < 0 else "lost")
        assert {key: shown[key] for key in ("client", "rows", "verdict")} == {
            key: table[key] for key in ("client", "rows", "verdict")
        }
        row = next(line for line in printed.splitlines() if re.match(rf"│ {name}\b", line))
        assert [f"{then.mean():.4f}", f"{now.mean():.4f}", f"{change:+.4f} ± {error:.4f}", table["verdict"]] == [
            cell.strip() for cell in row.split("│")[3:7]
        ]
    mean = (losses[1] - losses[0]).mean()
    assert f"over all rows the loss changed by {mean:+.4f}" in printed
    assert '"names":["hr","it"]' in report.page([departments])


def test_a_recipe_asks_for_the_clients_own_rows_once(tmp_path):
    with pytest.raises(FedKSeedError, match="two sets are of the clients' own rows: give one"):
        shares_of(tmp_path, OWN.format(1), "clients = 2")
    taken = '[[evaluation.sets]]\nname = "own rows"\npath = "others.jsonl"\n'
    with pytest.raises(FedKSeedError, match="two sets have the name 'own rows'"):
        shares_of(tmp_path, taken, "clients = 2")


def test_sets_that_take_no_rows_and_a_validation_part_change_nothing_but_the_evaluation(tmp_path):
    adapters = {}
    for name, sets, extra in (("plain", "", ""), ("more", GENERAL, "validation = 0.4")):
        write(tmp_path / f"{name}.toml", sets, extra)
        fedkseed("run", tmp_path / f"{name}.toml", "--output", tmp_path / name)
        adapters[name] = (tmp_path / name / "adapter.safetensors").read_bytes()
    assert adapters["plain"] == adapters["more"]


def test_the_model_of_the_best_round_is_that_of_a_run_which_ends_there(run, tmp_path):
    write(tmp_path / "two.toml", SETS, "", rounds=f"rounds = {BEST}")
    fedkseed("run", tmp_path / "two.toml", "--output", tmp_path / "two")
    one, other = (Adapter.load(folder / "adapter.safetensors") for folder in (run, tmp_path / "two"))
    assert one.tuned == other.tuned  # the digest of all its weights
    assert one.tuned in (run.parent / "printed.txt").read_text()
    assert Store(run).rounds == LAST


def test_what_is_exported_is_the_best_rounds_model(run, kept, tmp_path):
    fedkseed("export", run, tmp_path / "hf")
    facts = (tmp_path / "hf" / "README.md").read_text()
    assert f"| rounds | {BEST} |" in facts
    for of in ("unseen task", "general"):
        assert f"{np.mean(kept[BEST].sets[of].losses):.4f}" in facts
    tuned, tokenizer = load_model(str(tmp_path / "hf")), load_tokenizer(str(MODEL["folder"]))
    held_out = share_out(Store(run).load_recipe(), tokenizer).held_out
    losses = [float(example_losses(tuned, [e], tokenizer.pad_token_id)[0]) for e in held_out]
    assert losses == pytest.approx(kept[BEST].losses, abs=1e-4)
    assert losses != pytest.approx(kept[LAST].losses, abs=1e-4)


def test_rolled_back_and_resumed_it_ends_with_the_same_bits(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    Store(copy).rollback(1)
    result = resume(copy)
    assert (result.best, result.stopped) == (BEST, Store(run).recall(STOPPED))
    assert (copy / "adapter.safetensors").read_bytes() == (run / "adapter.safetensors").read_bytes()
    assert Store(copy).evaluations() == Store(run).evaluations()


@pytest.mark.parametrize(("rounds", "more"), [(1, 2), (4, 3), (4, 14)])  # 14: the best round's answers come
def test_a_process_that_is_killed_and_resumed_ends_with_the_same_bits(rounds, more, run, tmp_path):
    process, signs = begun(run.parent / "recipe.toml", tmp_path / "run")
    for _ in range(rounds):
        while signs.recv_bytes() != b"round":
            pass
    for _ in range(more):
        signs.recv_bytes()  # an EOFError: it was not killed while it worked
    process.kill()
    process.join()
    result = resume(tmp_path / "run")
    assert (result.best, result.stopped) == (BEST, Store(run).recall(STOPPED))
    assert (tmp_path / "run" / "adapter.safetensors").read_bytes() == (run / "adapter.safetensors").read_bytes()
    assert Store(tmp_path / "run").evaluations() == Store(run).evaluations()


def test_a_run_whose_further_set_has_changed_is_not_resumed(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    others = run.parent / "others.jsonl"
    whole = others.read_text()
    others.write_text(whole.replace("Small.", "Tiny."))
    try:
        with pytest.raises(FedKSeedError, match="began with data of digest"):
            resume(copy)
    finally:
        others.write_text(whole)


def test_preview_counts_the_rows_of_each_set(run):
    assert "6 are held out, 4 in the set validation, 2 in the set own rows, 10 in the set un" in fedkseed(
        "preview", run / "recipe.toml"
    )
