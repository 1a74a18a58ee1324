"""What all commands share: levels, exit codes, JSON alone on stdout, one line for a refusal."""

import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from os import environ
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

from fedkseed import Adapter
from fedkseed.cli import COMMANDS, app
from fedkseed.errors import REFUSED
from fedkseed.run.store import Store

from ..commands import RUNNER, documented, fedkseed, refused

README = Path(__file__).parents[2] / "README.md"


def tree(group: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands and groups, with the words that call them."""
    yield names, group
    for name, command in getattr(group, "commands", {}).items():
        yield from tree(command, *names, name)


ALL = dict(tree(get_command(app)))


def test_commands_that_print_tables_print_json_alone(finished, recipe_file, tmp_path):
    run = documented("run", recipe_file, "--output", tmp_path / "run")
    losses = Store(finished).evaluations()
    assert run["digest"] == Adapter.load(finished / "adapter.safetensors").tuned
    assert run["sets"]["held-out"]["after"]["loss"] == pytest.approx(np.mean(losses[3]["losses"]))
    assert run["sets"]["held-out"]["change"]["loss"]["error"] > 0
    assert (run["rounds"], run["diverged"], run["stopped"]) == (3, False, None)
    listed = documented("rounds", finished)
    assert [one["done"] for one in listed["rounds"]] == [0, 1, 2, 3]
    assert listed["rounds"][0]["evaluation"]["loss"] == pytest.approx(np.mean(losses[0]["losses"]))
    after = documented("eval", finished)["sets"]["held-out"]["after"]
    assert after["loss"] == pytest.approx(np.mean(losses[3]["losses"]))
    assert documented("resume", tmp_path / "run")["digest"] == run["digest"]
    assert documented("verify", finished)["rounds"] == 3
    shares = documented("preview", recipe_file)
    assert sum(one["examples"] for one in shares["clients"]) == 24
    assert shares["held_out"] == 8
    assert all(row["wrong"] == [] and row["vectors"] > 0 for row in documented("directions"))
    assert {"figure-9", "table-3"} <= {row["name"] for row in documented("reproduce", "--list")}


def test_verbose_shows_where_an_error_arose(recipe_file):
    result = fedkseed("run", recipe_file, "--set", "model.name=/no/model", "-v")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("fedkseed: no model at /no/model")


def test_exit_codes_are_in_the_help():
    text = " ".join(fedkseed("--help").output.split())
    for code in ("0 done", "2 refused", "3 the run diverged", "130 stopped by Ctrl-C", "1 an error of the program"):
        assert code in text


def test_version_and_other_ways_to_ask_for_help():
    assert fedkseed("--version").output.startswith("fedkseed 0.")
    assert fedkseed("help").output == fedkseed("--help").output
    assert fedkseed("help").output.strip() == fedkseed().output.strip()
    assert fedkseed("help", "run").output == fedkseed("run", "--help").output
    assert fedkseed("help", "certs").output == fedkseed("certs", "help").output == fedkseed("certs", "--help").output


def shown(words: tuple[str, ...], width: int) -> str:
    """The help of a command on a terminal of some width, without frames, in one line."""
    done = RUNNER.invoke(app, [*words, "--help"], env={"COLUMNS": f"{width}", "TERM": "xterm", "NO_COLOR": "1"})
    assert done.exit_code == 0
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.output), "control characters"
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.output).split())


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_shows_all_that_docstring_and_options_say(words):
    """As `[table]` in brackets, which typer takes for a style, and examples in one piece on a narrow terminal."""
    command, wide, narrow = ALL[words], shown(words, 200), shown(words, 60)
    source = command.help if words in ((), ("certs",)) else inspect.getdoc(command.callback)
    for text in source.replace("\\[", "[").split("\n\n"):
        for page in (wide, narrow):
            assert " ".join(text.split()) in page
    for parameter in command.params:
        assert parameter.help, f"{parameter.name} has no help"
        for word in parameter.help.replace("\\[", "[").split():
            assert word in wide, f"--{parameter.name}: {word}"


@pytest.mark.parametrize("words", [words for words in ALL if words not in ((), ("certs",))], ids=" ".join)
def test_examples_in_help_are_commands_of_today(words):
    examples = re.sub(r" *\\\n *", " ", ALL[words].examples).splitlines()
    lines = [line.strip().partition(" > ")[0] for line in examples if line.strip().startswith("fedkseed ")]
    called = [shlex.split(line)[1:] for line in lines]
    assert any(example[: len(words)] == [*words] for example in called), "there is no example of the command itself"
    for example in called:
        name = max((n for n in ALL if [*n] == example[: len(n)]), key=len)
        rest = example[len(name) :]
        ALL[name].make_context("fedkseed", ["make", *rest] if name == ("certs",) else rest)


def test_commands_stand_in_the_families_of_the_readme():
    rows = re.findall(r"^\| (\w+) \| (`.*) \|$", README.read_text(), re.MULTILINE)
    families = {family: set(re.findall(r"`([a-z-]+)`", names)) for family, names in rows}
    here = {title: {each.__name__.replace("_", "-") for each in functions} for title, functions in COMMANDS.items()}
    listed = {title.partition(":")[0].lower(): names for title, names in here.items()}
    assert listed["network"].isdisjoint({"certs"}), "which is a group of its own there"
    assert listed | {"network": listed["network"] | {"certs"}} == families
    text = fedkseed("--help").output
    places = [text.index(f" {title} ") for title in COMMANDS]
    assert places == sorted(places)
    for name in ("certs", *(name for names in here.values() for name in names)):
        assert ALL[name,].rich_help_panel in COMMANDS


def test_an_option_has_one_short_form_and_one_kind_of_value_in_all_commands():
    """So that what was learned of one command holds for the next."""
    forms: dict[str, set[tuple[str, ...]]] = {}
    for command in ALL.values():
        for parameter in command.params:
            if parameter.param_type_name == "option":
                forms.setdefault(parameter.opts[0], set()).add((*parameter.opts, parameter.type.name.split()[0]))
    assert {name for name, kinds in forms.items() if len(kinds) > 1} == {"--keys"}, "init's are a recipe's"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("runn", "run"), ("train", "run"), ("reprot", "report"), ("client", "join"), ("genrate", "generate")],
)
def test_a_mistyped_command_is_told_its_neighbour_once(typed, meant):
    done = fedkseed(typed, "recipe.toml")
    assert done.exit_code == 2
    assert re.search(rf"No such command '{typed}'\. Did you mean .*\b{meant}\b", done.stderr)
    assert done.stderr.count("Did you mean") == 1
    assert "Did you mean '--output'" in fedkseed("run", "--outptu", "x").stderr


def test_a_shell_completes_commands_and_options():
    words = {"_FEDKSEED_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert "rounds" in RUNNER.invoke(app, [], env=words | {"COMP_WORDS": "fedkseed ro"}, prog_name="fedkseed").output


def test_a_second_process_is_refused(copy):
    with Store(copy).locked():
        for command in (("resume", copy), ("rollback", copy, "--to", 0)):
            assert "another process is working on" in refused(*command)


def test_missing_directories_rounds_and_adapters_are_refused(finished, tmp_path):
    for command in ("resume", "rounds", "eval"):
        assert "is not a run's directory" in refused(command, tmp_path / "none")
    assert "no state after 9 rounds" in refused("rollback", finished, "--to", 9)
    assert "no state after 9 rounds" in refused("eval", finished, "--after", 9)
    assert "no such file" in refused("generate", tmp_path / "none.safetensors", "hello")


def test_a_run_whose_recipe_was_edited_is_refused(copy):
    recipe = copy / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("steps = 3", "steps = 4"))
    for command in ("resume", "eval", "rounds"):
        assert "has changed since the run began; bring the old one back, or start a new run" in refused(command, copy)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["docs", "data"], ["--version"], ["examples", "--json"]])
def test_output_on_a_full_disk_is_one_line_and_an_exit_code(words, unbuffered):
    """Also output that waits in a buffer until the end, as the few bytes of the second."""
    command = [sys.executable, "-m", "fedkseed", *words]
    with open("/dev/full", "w") as full:
        variables = environ | {"PYTHONUNBUFFERED": unbuffered}
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=variables)
    assert (run.returncode, run.stderr) == (
        REFUSED, "fedkseed: can't write: No space left on device; make room\n"
    )  # fmt: skip
