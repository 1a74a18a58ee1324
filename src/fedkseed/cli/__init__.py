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
from .options import guarded

COMMANDS = (
    *(tune.run, tune.init, tune.resume, tune.compare, tune.tune),
    *(look.rounds, look.report, look.watch, look.verify, look.rollback, look.eval, look.generate, look.preview),
    *(share.export, share.serve_model, share.pin, share.untie),
    *(research.basis, research.directions, research.reproduce),
    *(network.serve, network.shard, network.join, network.peer),
    *(guide.docs, guide.examples),
)
KEY_COMMANDS = (certs.make, certs.request, certs.add, certs.revoke, certs.sign, certs.members, certs.public)
EXIT_CODES = (
    f"Exit codes: 0 done; {REFUSED} refused, with the reason in one line on stderr; {DIVERGED} the run diverged and "
    f"was ended, its best model is kept; {INTERRUPTED} stopped by Ctrl-C; 1 an error of the program itself."
)

app = Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tune all weights of a language model across parties that never share data, with kilobytes a round.",
    epilog=EXIT_CODES,
)
keys = Typer(cls=certs.DirectoryFirst, help=certs.HELP, no_args_is_help=True)
app.add_typer(keys, name="certs")
for function in COMMANDS:
    app.command()(guarded(function))
for function in KEY_COMMANDS:
    keys.command()(guarded(function))


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
    app()
