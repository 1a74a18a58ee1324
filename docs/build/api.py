"""The reference of the names that `import fedkseed` has, made from the signatures and docstrings of the source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

SOURCES = Path(__file__).parents[2] / "src" / "fedkseed"
HEAD = """# The Python interface

The names that `import fedkseed as fk` has, by the file that each comes from. How they are used:
[README](../README.md#from-python), [extending.md](extending.md).
"""
SECTIONS = ("Args:", "Attributes:", "Returns:", "Yields:", "Raises:")  # of a docstring, as Google has them
ITEM = re.compile(r"    (\*{0,2}\w+): (.*)")
WIDTH = 120


def api() -> str:
    """The whole page."""
    parts = [HEAD]
    for module, names in _homes().items():
        path = SOURCES.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        place = path.relative_to(SOURCES.parents[1])
        parts.append(f"## {module}\n\n{ast.get_docstring(tree)}\n\nSource: [{place}](../{place})\n")
        parts += [_described(_found(tree, name, path)) for name in names]
    return "\n".join(parts)


def _homes() -> dict[str, tuple[str, ...]]:
    """The table by which the package finds its names: module -> names."""
    for node in ast.parse((SOURCES / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            return ast.literal_eval(node.value)
    raise LookupError("src/fedkseed/__init__.py has no table _HOMES")


def _found(tree: ast.Module, name: str, path: Path) -> ast.stmt:
    """The definition of a name in a module, or where the module gets it from."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            home = path.parents[node.level - 1].joinpath(*(node.module or "").split(".")).with_suffix(".py")
            return _found(ast.parse(home.read_text(encoding="utf-8")), name, home)
    raise LookupError(f"{path} has no {name}")


def _described(node: ast.stmt) -> str:
    """A function, or a class with its public methods."""
    if isinstance(node, ast.FunctionDef):
        return f"### {node.name}\n\n{_code(_signature(node))}\n{_text(node)}"
    assert isinstance(node, ast.ClassDef)  # noqa: S101 - for the type checker: `_found` finds no others
    fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    code = "\n".join([f"class {node.name}{bases}", *(f"    {one}" for one in fields)])
    parts = [f"### {node.name}\n", _code(code), _text(node)]
    parts += [f"{_code(_signature(one))}\n{_text(one)}" for one in methods if ast.get_docstring(one)]
    return "\n".join(parts)


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def _signature(node: ast.FunctionDef) -> str:
    """The first line of a function as the source has it, with an argument a line where it would be long."""
    kinds = {ast.unparse(one) for one in node.decorator_list}
    before = "".join(f"@{kind}\n" for kind in ("classmethod", "staticmethod", "property") if kind in kinds)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    line = f"{before}def {node.name}({ast.unparse(node.args)}){returns}"
    if len(line) - len(before) <= WIDTH - 20:
        return line
    return f"{before}def {node.name}(\n" + "\n".join(f"    {one}," for one in _arguments(node.args)) + f"\n){returns}"


def _arguments(found: ast.arguments) -> Iterator[str]:
    """The arguments of a function, each as the source has it."""

    def with_default(argument: ast.arg, default: ast.expr | None) -> str:
        apart = " = " if argument.annotation is not None else "="
        return ast.unparse(argument) + ("" if default is None else apart + ast.unparse(default))

    usual = [*found.posonlyargs, *found.args]
    defaults = [None] * (len(usual) - len(found.defaults)) + [*found.defaults]
    yield from map(with_default, usual, defaults)
    if found.vararg is not None or found.kwonlyargs:
        yield "*" + (ast.unparse(found.vararg) if found.vararg is not None else "")
    yield from map(with_default, found.kwonlyargs, found.kw_defaults)
    if found.kwarg is not None:
        yield "**" + ast.unparse(found.kwarg)


def _text(node: ast.ClassDef | ast.FunctionDef) -> str:
    """A docstring as Markdown: its sections as lists."""
    lines, found, section = (ast.get_docstring(node) or "").splitlines(), list[str](), ""
    for line in lines:
        if line in SECTIONS:
            section = line
            found += [f"**{line.removesuffix(':')}**", ""]
        elif section and (item := ITEM.match(line)):
            found.append(f"- `{item[1]}`: {item[2]}")
        elif section and line.strip() and found[-1].startswith("- "):
            found[-1] += " " + line.strip()
        else:
            section = section if not line or line.startswith(" ") else ""
            code = not section and line.startswith("    ") and found[-1] and not found[-1].startswith("    ")
            found += ["", line] if code else [line.strip() if section else line]
    listed = (fill(line, WIDTH, subsequent_indent="  ") if line.startswith("- `") else line for line in found)
    return "\n".join(listed).strip() + "\n"
