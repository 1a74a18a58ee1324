"""Every rule of the table refuses a recipe, and the recipe mended as its message says is legal."""

import re
from typing import Any

import pytest

from fedkseed import FedKSeedError
from fedkseed.recipe.reading import parse, typed
from fedkseed.recipe.rules import OPTIONAL_SETTINGS, RULES, Where, broken_rules, checked_algorithm, require_legal
from fedkseed.recipe.schema import Recipe
from fedkseed.strategy import OPTIONAL

Tables = dict[str, Any]

SECURE = {"secure": {"norm": 1.0}}
CLIENTS = {"privacy": {"epsilon": 8.0, "norm": 1.0}}
EXAMPLES = {"privacy": {"epsilon": 8.0, "norm": 1.0, "unit": "example"}}
LATE = {"asynchronous": {"buffer": 2}}
FILES = {"clients": {"split": "files"}}
SHARDS = FILES | {"network": {"shards": [2, 1]}}
ROWS = {"evaluation": {"sets": [{"name": "a", "clients": 1}]}}
FILE = {"evaluation": {"sets": [{"name": "a", "path": "f"}]}}
INFORMED = {"family": "informed", "size": 4, "basis": "b.safetensors"}


def algorithm(name: str, **training: object) -> Tables:
    return {"training": {"algorithm": name, **training}}


# The place, a recipe that breaks one of its rules, and the tables of it that change as the message says.
MANY = algorithm("fedkseed-backprop") | {"clients": {"count": 20_000, "cohort": 10_000}}
CASES: list[tuple[Where, Tables, Tables]] = [
    *[
        (Where.ALWAYS, SECURE | {"trust": trust}, {"trust": {"rule": "mean", "agreement": False}})
        for trust in ({"rule": "median"}, {"agreement": True})
    ],
    (Where.ALWAYS, SECURE | LATE, {"asynchronous": None}),
    (Where.ALWAYS, CLIENTS | SECURE, {"privacy": {"epsilon": 8.0}}),
    (Where.ALWAYS, {"privacy": {"epsilon": 8.0, "unit": "example"}}, EXAMPLES),
    (Where.ALWAYS, CLIENTS | {"asynchronous": {"buffer": 2}}, {"asynchronous": None}),
    (Where.ALWAYS, CLIENTS | {"trust": {"rule": "median"}}, {"trust": {"rule": "mean"}}),
    (Where.ALWAYS, EXAMPLES | algorithm("fedkseed-plus", epochs=1), algorithm("fedkseed-plus", steps=5)),
    (Where.ALWAYS, CLIENTS | {"trust": {"guard": 1.0}, "evaluation": {"every": 1}}, {"trust": {}}),
    (Where.ALWAYS, CLIENTS | ROWS, FILE),
    (
        Where.ALWAYS,
        SECURE | {"privacy": {"epsilon": 8.0, "simulated": {"clients": 9, "cohort": 3}}},
        {"secure": None, "privacy": {"epsilon": 8.0, "norm": 1.0, "simulated": {"clients": 9, "cohort": 3}}},
    ),
    (Where.ALWAYS, {"model": {"name": "x", "mode": "factored"}}, {"directions": {"family": "separable"}}),
    (Where.ALWAYS, {"trust": {"guard": 1.0}}, {"evaluation": {"every": 1}}),
    (Where.ALWAYS, {"trust": {"warmup": 3}}, {"trust": {"warmup": 3, "agreement": True}}),
    (Where.ALWAYS, {"clients": {"split": "tasks"}}, {"data": {"format": "natural-instructions"}}),
    (Where.ALWAYS, {"data": {"format": "natural-instructions"}}, {"clients": {"split": "tasks"}}),
    (Where.ALWAYS, LATE | {"clients": {"draw": "in turns"}}, {"clients": {}}),
    (Where.ALWAYS, {"asynchronous": {"buffer": 201}}, {"asynchronous": {"buffer": 200}}),
    (Where.ALWAYS, {"asynchronous": {"concurrency": 201}}, {"asynchronous": {"concurrency": 200}}),
    (Where.ALGORITHM, algorithm("fedkseed", wire="sign"), algorithm("fedkseed", wire="sign", lr=1e-6)),
    (Where.ALGORITHM, algorithm("fedavg") | {"model": {"name": "x", "storage": "Q8_0"}}, {"model": {"name": "x"}}),
    (Where.ALGORITHM, algorithm("fedavg") | {"evaluation": {"every": 1, "best": "loss"}}, {"evaluation": {"every": 1}}),
    (
        Where.ALGORITHM,
        algorithm("decomfl") | {"directions": {"family": "separable"}},
        {"directions": {"family": "rademacher"}},
    ),
    (Where.ALGORITHM, EXAMPLES | algorithm("fedavg"), CLIENTS),
    (Where.ALGORITHM, LATE | algorithm("fedavg"), {"asynchronous": None}),
    (Where.ALGORITHM, algorithm("fedmezo") | {"clients": {"backpropagating": 0.5}}, {"clients": {}}),
    (Where.ALGORITHM, algorithm("fedmezo") | {"derivatives": {"lr": 1.0}}, {"derivatives": {}}),
    (Where.ALGORITHM, algorithm("fedmezo") | {"directions": {"shared": True}}, algorithm("fedkseed")),
    (Where.ALGORITHM, CLIENTS | algorithm("evofed"), {"privacy": None}),
    (Where.ALGORITHM, SECURE | algorithm("fedavg"), algorithm("fedkseed")),
    (Where.ALGORITHM, algorithm("fedavg", wire="compact"), algorithm("fedavg", wire="exact")),
    (Where.ALGORITHM, algorithm("fedavg", server="adam", server_lr=1.0), algorithm("fedavg")),
    (Where.ALGORITHM, algorithm("fedavg") | {"trust": {"most_examples": 1}}, {"trust": {}}),
    (Where.ALGORITHM, algorithm("fedavg", objective="accuracy"), algorithm("fedkseed", objective="accuracy")),
    (
        Where.ALGORITHM,
        algorithm("fedkseed", objective="accuracy") | {"clients": {"backpropagating": 0.5}},
        algorithm("fedkseed"),
    ),
    (Where.ALGORITHM, algorithm("fedprompt") | {"model": {"name": "x", "last_layers": 1}}, algorithm("fedit")),
    (
        Where.ALGORITHM,
        algorithm("fedit") | {"model": {"name": "x", "last_layers": 1, "head": True}},
        {"model": {"name": "x", "last_layers": 1}},
    ),
    (Where.ALGORITHM, SECURE | algorithm("fedkseed-pro"), algorithm("fedkseed")),
    (Where.ALGORITHM, SECURE | algorithm("fedkseed-plus") | {"directions": {"shared": True}}, {"directions": {}}),
    (Where.ALGORITHM, CLIENTS | algorithm("fedkseed-pro"), algorithm("fedkseed")),
    (Where.ALGORITHM, CLIENTS | algorithm("uplink-seeds"), algorithm("fedkseed")),
    (Where.STATED, algorithm("fedkseed-plus", lr=1e-3), algorithm("fedkseed-plus") | {"derivatives": {"lr": 1e-3}}),
    (Where.STATED, algorithm("fedavg", probes=2), algorithm("fedavg")),
    (Where.STATED, algorithm("fedkseed", epochs=2), algorithm("fedkseed", steps=2)),
    (Where.STATED, {"derivatives": {"lr": 1e-3}}, {"clients": {"backpropagating": 0.5}}),
    (Where.STATED, {"peft": {"rank": 4}}, {"peft": {}}),
    (Where.RUN, {"secure": {}}, SECURE),
    (Where.RUN, {"privacy": {"epsilon": 8.0}}, CLIENTS),
    (Where.SIMULATION, algorithm("decomfl") | {"clients": {"at_once": 2}}, {"clients": {"at_once": 1}}),
    (Where.ENGINE, algorithm("decomfl"), algorithm("fedkseed")),
    (Where.NETWORK, FILES | algorithm("mine.py:own"), algorithm("fedkseed")),
    (Where.NETWORK, FILES | algorithm("fedkseed", objective="mine.py:own"), algorithm("fedkseed")),
    (Where.NETWORK, {}, FILES),
    (Where.NETWORK, FILES | {"model": {"name": "x", "dtype": "auto"}}, {"model": {"name": "x"}}),
    (Where.NETWORK, FILES | {"data": {"held_out": 0.1}}, {"data": {"held_out": "summarization"}}),
    (Where.NETWORK, FILES | ROWS, FILE),
    (Where.NETWORK, FILES | {"directions": INFORMED}, {"directions": INFORMED | {"basis_digest": 64 * "0"}}),
    (
        Where.NETWORK,
        FILES | {"model": {"name": "x", "last_layers": 1}},
        {"model": {"name": "x", "last_layers": 1, "tuned": ["h.1.*"]}},
    ),
    (Where.NETWORK, FILES | LATE, {"asynchronous": None}),
    (Where.NETWORK, FILES | algorithm("decomfl"), algorithm("fedkseed")),
    (Where.NETWORK, SHARDS | {"clients": {"split": "files", "count": 10}}, FILES),
    (Where.NETWORK, SHARDS | algorithm("fedkseed", steps=70_000), algorithm("fedkseed")),
    (Where.NETWORK, SHARDS | {"evaluation": {"clients": 0.2}}, {"evaluation": {}}),
    (Where.NETWORK, SHARDS | algorithm("fedavg"), algorithm("fedkseed-pro")),
    (Where.NETWORK, SHARDS | SECURE, {"secure": None}),
    (Where.NETWORK, SHARDS | CLIENTS, {"privacy": None}),
    *[
        (Where.NETWORK, SHARDS | {"trust": trust}, {"trust": {"rule": "mean", "agreement": False}})
        for trust in ({"rule": "clipped"}, {"agreement": True})
    ],
    *[(where, SHARDS, {"network": {}}) for where in (Where.PAGE, Where.FLOWER_SERVER, Where.PEERS)],
    (Where.PEERS, SECURE, {"secure": None}),
    (Where.PEERS, CLIENTS, {"privacy": None}),
    (Where.PEERS, algorithm("fedkseed-pro"), algorithm("fedkseed-backprop")),
    (Where.PEERS, algorithm("fedavg"), algorithm("fedkseed-plus")),
    (Where.REMARK, SECURE | {"directions": {"shared": False}}, {"directions": {}}),
    (Where.REMARK, {"trust": {"rule": "median"}}, {"directions": {"shared": True}}),
    (Where.REMARK, MANY | {"trust": {"rule": "median"}}, {"trust": {"rule": "mean", "agreement": False}}),
]


def test_the_gigabytes_of_a_rule_follow_from_cohort_and_uploads():
    """An upload of 4,096 numbers, 30 bytes each; a median has them twice more, 16 bytes."""
    ((_, said),) = broken_rules(recipe_of(MANY | {"trust": {"rule": "median"}}), Where.REMARK)
    assert "holds for it, up to 1.9 GB" in said
    for tables in (
        MANY,
        MANY | {"clients": {"cohort": 100}, "trust": {"rule": "median"}},
        {"trust": {"rule": "clipped"}},
    ):
        assert not [*broken_rules(recipe_of(tables), Where.REMARK)]


def recipe_of(tables: Tables, **changes: Any) -> Recipe:
    whole = {"model": {"name": "x"}} | tables | changes
    return typed(Recipe, {name: table for name, table in whole.items() if table is not None})


@pytest.mark.parametrize(("where", "tables", "mended"), CASES)
def test_a_recipe_that_breaks_a_rule_is_refused_and_legal_when_mended_as_the_message_says(where, tables, mended):
    _, message = next(broken_rules(recipe_of(tables), where))
    with pytest.raises(FedKSeedError, match=f"^{re.escape(message)}$"):
        require_legal(recipe_of(tables), where)
    legal = recipe_of(tables, **mended)
    require_legal(legal, Where.ALWAYS, Where.ALGORITHM, where)
    if where not in (Where.RUN, Where.STATED):
        checked_algorithm(legal)


def test_each_rule_has_a_recipe_that_it_refuses():
    refusing = {(where, next(broken_rules(recipe_of(tables), where))[0]) for where, tables, _ in CASES}
    assert {(where, rule) for where, rules in RULES.items() for rule in rules} == refusing


@pytest.mark.parametrize("where", [Where.ALWAYS, Where.ALGORITHM])
def test_a_recipe_that_can_not_run_is_refused_when_it_is_read(where):
    for tables in (tables for place, tables, _ in CASES if place is where):
        with pytest.raises(FedKSeedError):
            parse({"model": {"name": "x"}} | tables)


def test_the_table_knows_each_setting_that_not_every_strategy_reads():
    assert OPTIONAL_SETTINGS.keys() == OPTIONAL


def test_no_rule_of_algorithms_says_anything_of_a_users_own():
    own = recipe_of(algorithm("mine.py:own", epochs=2) | {"trust": {"rule": "median"}, "peft": {"rank": 4}})
    assert list(broken_rules(own, Where.ALGORITHM, Where.STATED, Where.REMARK)) == []
