"""The command line: `main`, and the list of all commands, which are in a file for each family.

    tune      a run and what comes before it        share     tuned and base models for others
    look      runs and tuned models as they are     research  bases, directions, the paper's experiments
    certs     keys of a federation                  network   its servers, clients and peers

Each command imports its modules when it is called: `fedkseed --help` and commands that only read a run load no PyTorch.
"""

from typing import Annotated

from typer import Exit, Option, Typer

from .. import __version__
from ..errors import DIVERGED, INTERRUPTED, REFUSED
from . import certs, guide, look, network, research, share, tune
from .options import Command, Group, guarded, writing_all

NETWORK = "Network: one model for several sites"
COMMANDS = {  # by the titles under which the help lists them; README has the same families
    "Tune: a run, and what comes before it": (
        *(tune.init, tune.run, tune.resume, look.rollback, look.forget, tune.tune, tune.compare, look.preview),
        *(research.basis, share.pin, share.convert, share.untie),
    ),
    "Look: at a run, and at a tuned model": (
        *(look.rounds, look.report, look.watch, look.eval, look.generate, look.verify),
    ),
    "Share: a tuned model for other programs": (share.export, share.serve_model),
    NETWORK: (network.serve, network.join, network.shard, network.peer, network.doctor),
    "Research: the paper's experiments": (research.reproduce, research.directions),
    "Help: pages and examples that the package carries": (guide.docs, guide.examples),
}
KEY_COMMANDS = (certs.make, certs.request, certs.add, certs.revoke, certs.sign, certs.members, certs.public)
HELP = """Tune all weights of a language model across parties that never share data, with kilobytes a round.

fedkseed init recipe.toml --data rows.csv --model MODEL
fedkseed run recipe.toml
fedkseed generate runs/recipe "A question"
"""
EXIT_CODES = (
    f"Exit codes: 0 done; {REFUSED} refused, with the reason in one line on stderr; {DIVERGED} the run diverged and "
    f"was ended, its best model is kept; {INTERRUPTED} stopped by Ctrl-C or SIGTERM; 1 an error of the program itself."
)

app = Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
    help=HELP,
    epilog=EXIT_CODES,
)
keys = Typer(cls=certs.DirectoryFirst, help=certs.HELP, no_args_is_help=True, rich_markup_mode="rich")
for title, functions in COMMANDS.items():
    for function in functions:
        app.command(cls=Command, rich_help_panel=title)(guarded(function))
for function in KEY_COMMANDS:
    keys.command(cls=Command)(guarded(function))
app.add_typer(keys, name="certs", rich_help_panel=NETWORK)


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import directions
        from ..network.protocol import envelope
        from ..recipe import schema
        from ..run import digest_chain
        from ..wire import codec

        homes = {"wire": codec, "session": envelope, "run directory": digest_chain, "recipe": schema}
        formats = ", ".join(f"{name} {home.VERSION}" for name, home in (homes | {"directions": directions}).items())
        print(f"fedkseed {__version__}\n{formats}; what a new version breaks: fedkseed docs policies")
        raise Exit


@app.callback()
def _options_of_all_commands(
    version: Annotated[
        bool,
        Option("--version", callback=_print_version, is_eager=True, help="Print the versions of program and formats."),
    ] = False,
) -> None:
    """Options of all commands."""


def main() -> None:
    """Entry point of the command `fedkseed`."""
    with writing_all():
        app()
