"""Consent of a client: a recipe that came over the network decides how to train, but never what to open or run."""

import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

from ...data.reading import SAMPLES
from ...errors import FedKSeedError
from ...files import border, write_atomically
from ...recipe.reading import parse
from ...recipe.schema import Recipe
from ...wire.records import MAX_SCALARS
from ..recipes import require_networked
from ..signatures import ClientSigning, certificate, private_key

SETTINGS = "owner.json"  # in the directory of a client
MOST = {  # limits of settings that take memory or threads at once; the time of a task is the server's choice
    ("clients", "count"): 1 << 20,
    ("clients", "threads"): 256,
    ("training", "batch_size"): 1 << 12,
    ("peft", "rank"): 1 << 12,
    ("peft", "virtual_tokens"): 1 << 12,
    ("evaluation", "max_new_tokens"): 1 << 13,
}


@dataclass(frozen=True, slots=True)
class Owner:
    """The settings that the owner of a client decides, and no server."""

    data: str  # the client's own file
    model: str | None = None  # the base model: folder, file or name; None: one in an installed package
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.data not in SAMPLES and not Path(self.data).expanduser().is_file():
            raise FedKSeedError(f"a client's data is a file of its own, there is none at {self.data}")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a worker, in a file in its directory."""

    owner: Owner
    idle: float = 1800.0  # seconds without a task after which the worker ends
    key: str | None = None  # file of the private key that signs answers
    ca: str | None = None  # file of the authority; None, as the key: tasks need no signature, and answers get none

    def __post_init__(self) -> None:
        if (self.key is None) != (self.ca is None):
            raise FedKSeedError(f"a client has a key and a ca, or neither; got key = {self.key}, ca = {self.ca}")

    def write(self, directory: Path) -> None:
        """Make the directory, for this user alone, and write the settings into it."""
        with border(f"can't make {directory}"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.chmod(0o700)
        write_atomically(directory / SETTINGS, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, directory: Path) -> "Settings":
        with border(f"can't read {directory / SETTINGS}"):
            table = json.loads((directory / SETTINGS).read_bytes())
        return cls(Owner(**table.pop("owner")), **table)

    def signing(self) -> ClientSigning | None:
        """The verification of tasks and signing of answers by the files of these settings.

        Raises:
            FedKSeedError: a file can't be read.
        """
        if self.key is None or self.ca is None:
            return None
        return ClientSigning(private_key(Path(self.key)), certificate(Path(self.ca)))


def consented(recipe: bytes, owner: Owner) -> Recipe:
    """The recipe that a client follows: the server's, with the owner's file, model and device.

    Raises:
        FedKSeedError: the bytes are no recipe, or the recipe would run or open something on this machine, or can't be
            followed by a client with a file of its own.
    """
    try:
        wished = parse(tomllib.loads(recipe.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedKSeedError(f"the server's recipe is not valid TOML: {error}") from error
    require_networked(wished)
    for (table, name), most in MOST.items():
        if ((value := getattr(getattr(wished, table), name)) or 0) > most:
            raise FedKSeedError(f"the server's recipe asks for [{table}] {name} = {value}, at most {most} go")
    if (probes := wished.training.steps * wished.training.probes) > MAX_SCALARS:
        raise FedKSeedError(f"the server's recipe asks for {probes} probes in a round, at most {MAX_SCALARS} go")
    model = owner.model or _carried(wished.model.name)
    return wished.model_copy(
        update={
            "model": wished.model.model_copy(update={"name": model, "device": owner.device}),
            "data": wished.data.model_copy(update={"source": owner.data}),
        }
    )


def _carried(name: str) -> str:
    """The name of a model in an installed package, the only kind of model that a server may choose.

    Loading such a model reads no other file of this machine, and downloads none.
    """
    _, _, file = name.removeprefix("package:").partition("/")
    if not name.startswith("package:") or ".." in Path(file).parts or Path(file).is_absolute():
        raise FedKSeedError(
            f"the server's recipe names the base model {name!r}, and a client opens or downloads no model by a "
            "server's wish; start the client with --model, the name or the place of the same model"
        )
    return name
