"""Every command of ours in README, docs and notes beside results is one that the program takes, options included."""

import re
import shlex
from pathlib import Path

import click
import pytest
from typer.main import get_command

from fedkseed.cli import app

from .test_documentation import CODE, TEXTS

COMMANDS = get_command(app)
COMMAND = re.compile(r"fedkseed [a-z-]+(?: [^;|>\\]*)?")  # no bytes that are signed
PAGES = [path for path in TEXTS if path.name != "CHANGELOG.md"]  # which names commands that have ended


def commands(path: Path, sentences: bool = True) -> list[list[str]]:
    """The words of each command in a page's code, in blocks and perhaps inside of sentences, without its comments."""
    text = re.sub(r" *\\\n *", " ", path.read_text())
    lines = [line for block in CODE.findall(text) for line in block.splitlines()]
    lines += [line for line in text.splitlines() if line.startswith("    ")]
    if sentences:
        lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", CODE.sub("", text))]
    parts = [re.sub(r"  +#.*|[\[\]]", "", part).strip() for line in lines for part in re.split(r"; | > ", line)]
    found = [part for part in parts if COMMAND.fullmatch(part) and not re.search(r"…|\.\.\.", part)]
    return [re.findall(r"\"[^\"]*\"|'[^']*'|\S+", re.sub(r" N\b", " 1", part))[1:] for part in found]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: "/".join(path.parts[-2:]))
def test_commands_have_the_options_with_which_they_are_written(path):
    whole = commands(path, sentences=False)
    for words in commands(path):
        line = f"fedkseed {shlex.join(words)}"
        command, rest = COMMANDS, words
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            name = (
                "make"
                if words[0] == "certs" and rest[0] not in command.commands and command is not COMMANDS
                else rest[0]
            )
            assert name in command.commands, f"{line}: there is no command {name}"
            command, rest = command.commands[name], rest[name == rest[0] :]
        try:
            command.make_context("fedkseed", list(rest))
        except click.MissingParameter as error:  # a sentence names a command with some of its options
            if words in whole or (rest and not rest[0].startswith("-")):
                pytest.fail(f"{line}: {error.format_message()}")
        except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
            pass  # --help
        except click.UsageError as error:
            if not error.message.endswith("requires an argument."):
                pytest.fail(f"{line}: {error.format_message()}")


def test_there_are_commands_to_check():
    assert sum(len(commands(path)) for path in PAGES) > 150
