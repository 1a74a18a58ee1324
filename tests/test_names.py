"""Names say what they hold: a class name stands for one thing, and few names could stand for anything."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "fedkseed"
EMPTY = {"found", "one", "known", "own", "of", "made", "left", "some", "both", "given", "taken", "rest"}
VAGUE = {"result", "value", "item", "data", "obj", "tmp"}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCES.rglob("*.py")):
        yield str(path.relative_to(SOURCES)), ast.parse(path.read_text(encoding="utf-8"))


def assigned(tree: ast.AST) -> Iterator[str]:
    """The names that a tree assigns: in statements, loops, comprehensions, `with` and `:=`."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield name


def test_a_name_of_a_type_stands_for_one_thing():
    homes = defaultdict[str, list[str]](list)
    for file, tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=name):
                    homes[name].append(file)
                case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                    homes[name].append(file)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_locals_say_what_they_hold():
    names = Counter(name for _, tree in trees() for name in assigned(tree))
    total = names.total()
    assert total > 5000
    assert sum(names[name] for name in EMPTY) <= 0.01 * total
    assert sum(names[name] for name in VAGUE) <= 0.0175 * total  # their share in November 2026


def test_every_way_to_assign_is_counted():
    code = "a = 1\nb: int = 2\nfor c in d: pass\nwith e as f: pass\n(g := [h for h in i])\nj, (k, *m) = n\no += 1"
    assert sorted(assigned(ast.parse(code))) == list("abcfghjkmo")
