"""The commands of keys and certificates: certs make, request, add, revoke, sign, members, public."""

from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from typer import Argument, Option

from ..report.terminal import say
from .options import Group, require_packages

Directory = Annotated[Path, Argument(metavar="KEYS", help="The directory that `fedkseed certs` has made.")]
ClientNumber = Annotated[int, Argument(help="The client's number, as in client-3.pub.", min=0)]
Hosts = Annotated[list[str] | None, Option(help="A host name or address by which others reach it; may be repeated.")]
Days = Annotated[int, Option(help="Days for which the certificate is valid.", min=1)]
HELP = """Make, request and add the keys of a federation, in four steps.

`fedkseed certs DIRECTORY` is short for `fedkseed certs make DIRECTORY`.

1. The server's owner makes the server's keys and certificates:
       fedkseed certs keys --host fl.example.org
2. Each client makes a key, keeps it, and sends my-key.pub to the server's owner:
       fedkseed certs request --key my-key
3. The owner takes it in, compares its fingerprint with the client's, and sends keys/ca.pem in return:
       fedkseed certs add keys my-key.pub
   and takes it out again with: fedkseed certs revoke keys 0
4. Both start:
       fedkseed serve recipe.toml --certs keys --host 0.0.0.0
       fedkseed join https://fl.example.org:8443 --key my-key --ca ca.pem --data rows.csv
"""


def _certs() -> ModuleType:
    """The module that makes and reads them; it needs a package."""
    require_packages("keys need", "cryptography")
    from ..network.protocol import certs

    return certs


class DirectoryFirst(Group):
    """Commands of which `make` may be left out, where the first word is a directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "--help", "-h", "help"}:
            args = ["make", *args]
        return super().parse_args(ctx, args)


def make(
    directory: Annotated[Path, Argument(help="Directory for keys and certificates; made if it is missing.")],
    clients: Annotated[
        int,
        Option(
            help="Number of clients that have a key in the end; private keys that are missing are made here, so that "
            "whoever has this machine can act as these clients.",
            min=0,
        ),
    ] = 0,
    host: Hosts = None,
    days: Days = 365,
) -> None:
    """Make a certificate authority and the server's certificate, on the server's machine.

    Existing files are never overwritten. To renew the server's certificate, remove server.pem and server.key first,
    bring ca.key back, and give --host again. The server keeps the directory; every client gets a copy of ca.pem.

    fedkseed certs make keys --host fl.example.org
    """
    files = _certs().make(directory, clients, host or [], days)
    say("\n".join(f"made {file}" for file in files) or f"{directory} has all of it already")
    if clients and any(file.name.startswith("client-") for file in files):
        say(
            "warning: the clients' private keys were made here, so this machine can act as any of these clients. Give "
            "client-K to its client and remove it here, or let clients make their own: fedkseed certs request"
        )
    if any(file.name == "ca.key" for file in files):
        say(
            f"warning: whoever has {directory / 'ca.key'} can act as the server. No other command needs it: keep it on "
            "another machine until the server's certificate is renewed"
        )


def request(
    key: Annotated[Path, Option(help="File for the new private key; its public half gets the same name and .pub.")],
) -> None:
    """Make a client's key pair, on the client's machine.

    Send the public file to the server's owner, who answers with ca.pem. The private file stays on this machine.

    fedkseed certs request --key my-key
    """
    certs = _certs()
    public = certs.request(key)
    say(
        f"made {key}, which stays on this machine\nmade {public}: send it to the server's owner, with the fingerprint "
        f"over another channel\nfingerprint {certs.shown_fingerprint(public)}"
    )


def add(
    directory: Directory,
    file: Annotated[Path, Argument(help="A client's public file, as made by `fedkseed certs request`.")],
) -> None:
    """Take a client's public key into the server's directory, under the next number.

    Clients that are added after a run has begun take part in new runs.

    fedkseed certs add keys my-key.pub
    """
    certs = _certs()
    public = certs.add(directory, file)
    say(
        f"{file} is now {public}: compare the fingerprint with its owner, and send back {directory / 'ca.pem'}\n"
        f"fingerprint {certs.shown_fingerprint(public)}"
    )


def revoke(directory: Directory, number: ClientNumber) -> None:
    """Take a client's public key out of the server's directory, where it was stolen or the client has left.

    A server with a round under way refuses the key within seconds, and never takes it again for its run. The others go
    on. Give the number to somebody else's key before a new run begins: a run's clients have the numbers 0, 1, …
    without a gap.

    fedkseed certs revoke keys 3
    """
    kept = _certs().revoke(directory, number)
    say(f"the key of client {number} is revoked; it is kept as {kept}")


def sign(directory: Directory, number: ClientNumber, host: Hosts = None, days: Days = 365) -> None:
    """Sign a certificate for a client's key, with which it can be a peer: `fedkseed peer --cert`.

    The client's private key stays where it is. Send client-K.pem and ca.pem back to it.

    fedkseed certs sign keys 0 --host peer0.example.org
    """
    certificate = _certs().sign(directory, number, host or [], days)
    say(f"made {certificate}: send it to the owner of {certificate.with_suffix('.pub')}")


def members(directory: Directory) -> None:
    """Print the public lines of all clients, in the order of their numbers.

    Clients that give them to `fedkseed join --members FILE` mask their uploads for these keys alone. Get the file
    from somebody else than the server's owner, or compare it with each other.

    fedkseed certs members keys > members.txt
    """
    print(_certs().members(directory), end="")


def public(key: Annotated[Path, Argument(help="A client's private key.")]) -> None:
    """Print the public line of a client's key, as `fedkseed certs request` has written it into its public file.

    Files of older releases have no key for masks; this line does.

    fedkseed certs public my-key > my-key.pub
    """
    print(_certs().public(key), end="")
