"""Rows of a task of code: a function's first line and what it is for, and the rest of it, from installed packages.

    python benchmarks/code_rows.py FOLDER

Ten packages that anybody may copy are ten clients, a file each: `fedkseed run` with `[clients] split = "files"`. The
functions are those of 3 to 8 lines that say in one paragraph what they do; of each package 24, in the order of their
digests. The rows depend on the packages' releases, which are printed with the digest of all rows.
"""

import ast
import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = {
    "matplotlib": "matplotlib", "networkx": "networkx", "numpy": "numpy", "pandas": "pandas", "rich": "rich",
    "scipy": "scipy", "sklearn": "scikit-learn", "sympy": "sympy", "torch": "torch", "transformers": "transformers",
}  # fmt: skip
EACH = 24  # rows of a package
LINES, LONGEST = range(3, 9), 420  # lines of a function without its docstring; letters of a whole row


def functions(file: Path) -> Iterator[dict[str, str]]:
    """The rows of a file."""
    text = file.read_text(errors="replace")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or len(node.body) < 2:
            continue
        about, first = ast.get_docstring(node), node.body[1]
        begin, end = node.body[0].lineno - 1, node.end_lineno or 0
        head, rest = lines[node.lineno - 1 : begin], lines[first.lineno - 1 : end]
        if about is None or "\n\n" in about or len(head) + len(rest) not in LINES or ";" in lines[begin]:
            continue
        cut = node.col_offset
        head, rest = [line[cut:] for line in head], [line[cut:] for line in rest]
        about = about.replace("\n", "\n    ")
        ask = "\n".join([*head, f'    """{about}"""'])
        row = {"instruction": f"Complete this function.\n\n{ask}", "response": "\n".join(rest)}
        if sum(map(len, row.values())) <= LONGEST:
            yield row


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    whole = sha256()
    for name, distribution in PACKAGES.items():
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise SystemExit(f"{name} is not installed: pip install {distribution}")
        place = Path(spec.origin).parent
        files = sorted(path for path in place.rglob("*.py") if "test" not in path.relative_to(place).as_posix())
        found = {json.dumps(row): row for path in files for row in functions(path)}
        drawn = sorted(found, key=lambda text: sha256(text.encode()).digest())[:EACH]
        (folder / f"{name}.jsonl").write_text("".join(f"{text}\n" for text in drawn))
        whole.update("".join(drawn).encode())
        print(f"{distribution} {version(distribution)}: {len(drawn)} of {len(found)} functions")
    print(f"digest of all rows: {whole.hexdigest()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
