import os
import tomllib
from contextlib import suppress

import numpy as np
import pytest

from fedkseed import FedKSeedError, load_recipe
from fedkseed.recipe.reading import MAX_BYTES, own_recipe, parse, tables

MODEL = {"model": {"name": "x"}}


def test_a_recipe_is_read_and_written_without_loss(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file)
    (tmp_path / "again.toml").write_text(recipe.to_toml())
    assert load_recipe(tmp_path / "again.toml") == recipe


def test_the_shipped_recipes_are_valid(request):
    # Those of the paper are parts, see tests/paper.
    recipes = sorted(
        {*(request.config.rootpath / "recipes").glob("*.toml")} - {request.config.rootpath / "recipes/policy.toml"}
    )
    assert [path.name for path in recipes if own_recipe(path)] == [path.name for path in recipes] != []


def test_the_key_of_the_directions_follows_from_the_seed():
    keys = {parse({**MODEL, "seed": seed}).pool.key for seed in (0, 1, 2)}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainning": {}}, "unknown table or key 'trainning'; did you mean 'training'"),
        ({"str": 1}, "unknown table or key 'str'; it knows seed, "),  # pydantic has names of its own for types
        ({"data": {"literals": 1}}, r"\[data\] has no key 'literals'"),
        ({"data": {"columns": {"instruction": 5}}}, r"\[data.columns\] instruction: input should be a valid "),
        ({"data": {"columns": {"instruction": [1]}}}, r"\[data.columns\] instruction: input should be a valid "),
        ({"training": {"lr": "x"}}, r"\[training\] lr: input should be "),
        ({"training": {"learning_rate": 1.0}}, r"\[training\] has no key 'learning_rate'; it knows algorithm, rounds"),
        ({"training": {"stepps": 1}}, r"\[training\] has no key 'stepps'; did you mean 'steps'"),
        ({"training": {"lr": -1.0}}, r"\[training\] lr: input should be greater than 0, got -1.0"),
        ({"training": {"rounds": "many"}}, r"\[training\] rounds: input should be a valid integer.*'many'"),
        (
            {"training": {"algorithm": "fedsgd"}},
            r"\[training\] algorithm: no algorithm is called 'fedsgd'; did you mean 'fedit-sgd'\? choose one of ",
        ),
        ({"training": {"eps": float("nan")}}, r"\[training\] eps"),
        ({"clients": {"alpha": 0.0}}, r"\[clients\] alpha: input should be greater than 0, got 0.0"),
        ({"clients": {"count": 3, "cohort": 4}}, "a cohort of 4 can't be drawn from 3 clients"),
        ({"clients": {"cohort": 5, "active": 0.1}}, r"\[clients\] cohort is a number of clients and active a share"),
        ({"clients": {"active": 1.5}}, r"\[clients\] active: input should be less than or equal to 1, got 1.5"),
        ({"clients": {"split": "tasks"}}, "'rows' does not go with .clients. split = 'tasks'"),
        ({"data": {"format": "natural-instructions"}}, "'natural-instructions' does not go .* 'dirichlet'"),
        (
            {
                "data": {"format": "natural-instructions", "columns": {"instruction": "q"}},
                "clients": {"split": "tasks"},
            },
            r"\[data\] columns name the fields of rows",
        ),
        ({"data": {"format": "natural-instructions", "layout": "chat"}, "clients": {"split": "tasks"}}, "layout the"),
        ({"data": {"layout": "chats"}}, r"\[data\] layout: input should be 'instruction', 'alpaca'"),
        ({"data": {"protocol": "code"}}, r"\[data\] protocol: input should be 'paper' or 'official-code'"),
        ({"directions": {"size": 1000}}, "power of two as its size K, got 1000; the next one is 1024"),
        (
            {"directions": {"family": "cosine"}},
            "'gaussian', 'rademacher', 'hadamard', 'hashed', 'separable', 'informed' or 'mixed'",
        ),
        ({"data": {"held_out": 1.5}}, r"\[data\] held_out"),
        ({"training": {"bits": 8}}, r"\[training\] has no key 'bits'"),
        ({"training": {"wire": "zip"}}, r"\[training\] wire: input should be 'exact', 'compact' or 'sign', got 'zip'"),
        ({"training": {"wire": "sign"}}, r"wire = 'sign' moves a coefficient by lr in a step: give it"),
        ({"model": {}}, r"\[model\] name is missing"),
    ],
)
def test_what_is_not_allowed_is_refused_with_a_hint(change, message):
    with pytest.raises(FedKSeedError, match=message):
        parse({**MODEL, **change})


@pytest.mark.parametrize(
    ("algorithm", "lines", "message"),
    [
        ("fedkseed-plus", "lr = 1e-3", r"\[training\] lr would change nothing: .* set \[derivatives\] lr"),
        ("fedkseed-backprop", "lr = 1e-3", r"\[training\] lr would change nothing: .* set \[derivatives\] lr"),
        ("fedkseed-plus", "eps = 1e-3", r"\[training\] eps would change nothing: it is of zeroth-order steps"),
        ("fedkseed-plus", "probes = 2", r"\[training\] probes would change nothing"),
        ("fedavg", "eps = 1e-3", r"\[training\] eps would change nothing"),
        ("evofed", "clip = 2.0", r"\[training\] clip would change nothing"),
        ("fedkseed", "epochs = 2", r"\[training\] epochs would change nothing: .* set \[training\] steps"),
        ("fedkseed", "[derivatives]\nlr = 1e-3", r"\[derivatives\] lr would change nothing: .* set \[training\]"),
        ("fedkseed-pro", "[derivatives]\nsteps = 4", r"\[derivatives\] steps would change nothing"),
        ("fedavg", "[peft]\nrank = 4", r"\[peft\] rank would change nothing: it is of adapters"),
    ],
)
def test_a_setting_that_the_algorithm_ignores_is_refused_in_a_users_recipe_alone(tmp_path, algorithm, lines, message):
    path = tmp_path / "r.toml"
    path.write_text(f'model.name = "x"\n[training]\nalgorithm = "{algorithm}"\n{lines}\n')
    with pytest.raises(FedKSeedError, match=message):
        own_recipe(path)
    path.write_text(load_recipe(path).to_toml())  # a run's own: resumed and reported whatever it states
    with pytest.raises(FedKSeedError, match=message):
        own_recipe(path)


@pytest.mark.parametrize(
    ("algorithm", "lines"),
    [
        ("fedkseed", "lr = 1e-3\neps = 1e-3\nprobes = 2\nclip = 9.0"),
        ("fedkseed", "[derivatives]\nlr = 1e-3\n[clients]\nbackpropagating = 0.5"),
        ("fedkseed-backprop", "clip = 1000.0"),  # which bounds its K numbers, and `fedkseed serve` writes it out
        ("fedkseed-plus", "steps = 3\nschedule = 'linear'\nepochs = 1\n[derivatives]\nlr = 1e-3"),
        ("fedavg", "lr = 1e-3\nepochs = 1"),
        ("fedit", "lr = 1e-3\n[peft]\nrank = 4"),
        ("decomfl", "lr = 1e-3\neps = 1e-3"),
    ],
)
def test_a_recipe_with_settings_that_count_is_taken_and_so_is_that_of_its_run(tmp_path, algorithm, lines):
    path = tmp_path / "r.toml"
    path.write_text(f'model.name = "x"\n[training]\nalgorithm = "{algorithm}"\n{lines}\n')
    recipe = own_recipe(path)
    path.write_text(recipe.to_toml())
    assert own_recipe(path) == recipe


def test_values_are_changed_by_dotted_keys(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('seed = 1\nmodel.name = "x"\n[training]\nrounds = 3\nsteps = 7\n')
    numbers = ["training.rounds=20", "training.rounds = 30", "directions.size=2048", "seed=2", "save=false"]
    texts = ["training.algorithm=fedavg", "data.columns={ response = 'a' }", "model.name='a = b'", "training.steps="]
    recipe = load_recipe(path, [*numbers, *texts])
    assert (recipe.training.rounds, recipe.training.steps, recipe.training.algorithm) == (30, 200, "fedavg")
    assert (recipe.directions.size, recipe.data.columns, recipe.save) == (2048, {"response": "a"}, False)
    assert (recipe.model.name, recipe.seed) == ("a = b", 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.rounds", "--set takes KEY=VALUE, as training.rounds=20, got 'training.rounds'"),
        ("training.=3", "--set takes KEY=VALUE"),
        ("=3", "--set takes KEY=VALUE"),
        ("seed.x=3", "--set goes into tables, and seed is none"),
        ("training.roundz=3", r"\[training\] has no key 'roundz'; did you mean 'rounds'"),
        ("training.rounds=many", r"\[training\] rounds: input should be a valid integer.*'many'"),
        ("training.rounds=1\nsteps = 2", r"\[training\] rounds: input should be a valid integer"),
        (f"{'a.' * 9}b=1", "--set takes KEY=VALUE"),
    ],
)
def test_a_change_that_is_none_is_refused(tmp_path, change, message):
    path = tmp_path / "r.toml"
    path.write_text('seed = 1\nmodel.name = "x"\n')
    with pytest.raises(FedKSeedError, match=message):
        load_recipe(path, [change])


SET = {"name": "a", "path": "f.jsonl"}
CHOOSING = {"every": 5, "validation": 0.5, "best": "loss"}


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"sets": [{"path": "f"}]}, r"\[evaluation.sets\] name is missing"),
        ({"sets": [SET | {"nmae": 1}]}, r"\[evaluation.sets\] has no key 'nmae'; did you mean 'name'"),
        (
            {"sets": [SET | {"examples": 1}]},
            r"\[evaluation.sets\] examples: input should be greater than or equal to 2",
        ),
        *[
            ({"sets": [SET | {"name": name}]}, "1 to 40 printable characters, without a colon or a slash")
            for name in ("", " a", "a ", "a\n", "a\0", "a: b", "a/b", 41 * "a", "\u2028")
        ],
        *[({"sets": [SET | {"name": name}]}, f"'{name}' is taken") for name in ("held-out", "validation")],
        ({"sets": [SET, SET | {"path": "g"}]}, r"\[evaluation\] two sets have the name 'a': give each its own"),
        (
            {"sets": [{"name": name, "held_out": "x"} for name in "ab"]},
            r"\[evaluation\] two sets have the held_out 'x': give each its own",
        ),
        ({"sets": [{"name": name, "clients": 1} for name in "ab"]}, r"two sets are of the clients' own rows: give one"),
        ({"sets": [{"name": "a"}]}, r"the set 'a' has no rows: give one of path .*, held_out .* and clients"),
        ({"sets": [SET | {"clients": 1}]}, r"the set 'a' has path and clients: give one of"),
        *[
            ({"sets": [{"name": "a", "clients": portion}]}, r"\[evaluation.sets\] clients: input should be a share of")
            for portion in (True, 0, -1, 1.0, 1.5, "all")
        ],
        (
            {"validation": True},
            r"\[evaluation\] validation: input should be a share of rows as 0.1, or a number of rows",
        ),
        ({"best": "loss"}, r"best and patience choose among the evaluations of a run: set every, too, as every = 5"),
        ({"best": "loss", "validation": 0.5}, "set every, too"),
        ({"patience": 3}, "set every, too"),
        (CHOOSING | {"best": "choice"}, r"best is a metric .*, 'loss' in this recipe, got 'choice'"),
        (
            CHOOSING | {"best": "rouge", "generated": 8, "metrics": ["rouge", "accuracy"]},
            r"best is a metric that every evaluation measures, 'loss' or 'accuracy' in this recipe, got 'rouge'",
        ),
    ],
)
def test_sets_and_a_choice_that_are_not_clear_are_refused(evaluation, message):
    with pytest.raises(FedKSeedError, match=message):
        parse({**MODEL, "evaluation": evaluation})


def test_one_line_is_enough_to_end_a_run_early_or_to_choose_its_best_round():
    patient = parse({**MODEL, "evaluation": {"every": 2, "patience": 3}}).evaluation
    assert (patient.best, patient.validation) == ("loss", 0.5)
    chosen = parse({**MODEL, "evaluation": {"every": 2, "best": "accuracy", "metrics": ["accuracy"], "validation": 20}})
    assert (chosen.evaluation.best, chosen.evaluation.validation) == ("accuracy", 20)
    assert parse(tomllib.loads(chosen.to_toml())) == chosen
    assert parse({**MODEL, "evaluation": {"every": 2}}).evaluation.validation is None


@pytest.mark.parametrize(("every", "due"), [(0, []), (2, [2, 4]), ([1, 4], [1, 4])])
def test_evaluations_are_due_every_few_rounds_or_after_those_of_a_list(every, due):
    evaluation = parse({**MODEL, "evaluation": {"every": every}}).evaluation
    assert [done for done in range(1, 6) if evaluation.due(done)] == due


@pytest.mark.parametrize("portion", [3, 0.1])
def test_sets_survive_writing_and_reading_with_absolute_paths(portion, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.jsonl").write_text("{}\n")
    sets = [SET, {"name": "b", "held_out": "x", "examples": "all"}, {"name": "c d", "clients": portion}]
    recipe = parse({**MODEL, "evaluation": CHOOSING | {"patience": 2, "sets": sets}}).absolute()
    assert parse(tomllib.loads(recipe.to_toml())) == recipe
    assert recipe.evaluation.sets is not None
    assert [one.path for one in recipe.evaluation.sets] == [f"{tmp_path}/f.jsonl", None, None]
    assert [one.clients for one in recipe.evaluation.sets] == [None, None, portion]
    assert recipe.evaluation.categories == ("x",)


def test_a_recipe_without_sets_is_written_as_before():
    assert not any(key in parse(MODEL).to_toml() for key in ("sets", "validation", "best"))


def test_a_missing_and_a_broken_file_are_refused(tmp_path):
    with pytest.raises(FedKSeedError, match=r"can't read the recipe .*none.toml: No such file"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("seed = = 1")
    with pytest.raises(FedKSeedError, match="not valid TOML"):
        load_recipe(tmp_path / "broken.toml")


def test_a_recipe_is_a_regular_file_of_a_recipes_size(tmp_path):
    """A device never ends, and a pipe may never begin."""
    os.mkfifo(tmp_path / "pipe.toml")
    for path in ("/dev/zero", tmp_path / "pipe.toml"):
        with pytest.raises(FedKSeedError, match=r"can't read the recipe .*: it is no regular file"):
            load_recipe(path)
    (tmp_path / "long.toml").write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(FedKSeedError, match="it has more than 65,536 bytes"):
        load_recipe(tmp_path / "long.toml")


def test_recipes_with_flipped_bytes_are_read_or_refused(tmp_path, request):
    rng, whole = np.random.default_rng(7), (request.config.rootpath / "recipes" / "mixed.toml").read_bytes()
    for _ in range(400):
        flipped = bytearray(whole)
        flipped[rng.integers(len(whole))] ^= int(rng.integers(1, 256))
        (tmp_path / "damaged.toml").write_bytes(flipped)
        with suppress(FedKSeedError):
            load_recipe(tmp_path / "damaged.toml")


def test_a_separator_of_a_page_is_refused():
    """One of 60 KB between each prompt and response made 5 GB of tokens."""
    with pytest.raises(FedKSeedError, match=r"\[data\] separator: .* at most 64 characters"):
        parse(MODEL | {"data": {"separator": "x" * 60_000}})


NI = {"data": {"format": "natural-instructions"}, "clients": {"split": "tasks"}}


def test_defaults_that_another_value_decides():
    rows, files, tasks = (parse({**MODEL, **part}) for part in ({}, {"clients": {"split": "files"}}, NI))
    assert [r.clients.count for r in (rows, files, tasks)] == [200, None, None]
    assert parse({**MODEL, "clients": {"split": "column"}}).clients.count is None
    assert [r.clients.min_examples for r in (rows, files, tasks)] == [10, 10, 20]
    assert (rows.data.template, rows.data.separator) == (tasks.data.template, tasks.data.separator) == ("paper", "\n")
    code = {"protocol": "official-code"}
    dolly, own = parse({**MODEL, "data": code}).data, parse({**MODEL, "data": {**code, "template": "alpaca"}}).data
    ni = parse({**MODEL, "data": {**code, **NI["data"]}, "clients": NI["clients"]}).data
    found = [(data.template, data.separator) for data in (dolly, ni, own)]
    assert found == [("official-dolly", ""), ("official-ni", ""), ("alpaca", "")]


@pytest.mark.parametrize("part", [{}, NI, {"clients": {"active": 0.1}}, {"data": {"protocol": "official-code"}}])
def test_defaults_survive_writing_and_reading(part):
    recipe = parse({**MODEL, **part})
    assert parse(tomllib.loads(recipe.to_toml())) == recipe


def test_the_cohort_is_a_number_or_a_share_rounded_down():
    def cohort(count: int, **clients: float) -> int:
        return parse({**MODEL, "clients": clients}).clients.cohort_of(count)

    assert cohort(738, active=0.05) == 36  # as the official code has it
    assert [cohort(200, active=0.05), cohort(100, active=0.29), cohort(7, active=0.05)] == [10, 29, 1]
    assert [cohort(738), cohort(738, cohort=3)] == [10, 3]
    with pytest.raises(FedKSeedError, match="a cohort of 10 can't be drawn from 9 clients"):
        cohort(9)


def test_a_recipe_of_a_windows_program_is_read_or_says_what_to_change():
    text = "[model]\nname = 'm'\n"
    assert parse(tables(b"\xef\xbb\xbf" + text.encode())) == parse(tables(text.encode()))
    with pytest.raises(FedKSeedError, match=r"which is UTF-8: .*; save it as UTF-8"):
        tables(text.encode("utf-16"))
    with pytest.raises(FedKSeedError, match=r"^(?!.*a path with)"):
        tables(b'[data]\nseparator = "\\n"\nsource = \n')
    with pytest.raises(FedKSeedError, match=r"; a path with .* goes between single quotes, or with /"):
        tables(b'[model]\nname = "C:\\Users\\m"\n')
