"""What a client does by a server's wish: a recipe that came over the network says how to train, never what to open."""

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

SETTINGS = "owner.json"  # in the directory of a client
MOST = {  # of what would take memory or threads at once; how long a task may take is the server's to say
    ("clients", "count"): 1 << 20,
    ("clients", "threads"): 256,
    ("training", "batch_size"): 1 << 12,
    ("peft", "rank"): 1 << 12,
    ("peft", "virtual_tokens"): 1 << 12,
    ("evaluation", "max_new_tokens"): 1 << 13,
}


@dataclass(frozen=True, slots=True)
class Owner:
    """What the owner of a client decides."""

    data: str  # the client's own file
    model: str | None = None  # where the base model lies; None: one that an installed package carries
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.data not in SAMPLES and not Path(self.data).expanduser().is_file():
            raise FedKSeedError(f"a client's data is a file of its own, there is none at {self.data}")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker is started with, from a file in its directory."""

    owner: Owner
    idle: float = 1800.0  # seconds without a task after which it ends

    def write(self, directory: Path) -> None:
        """Make the directory, for this user alone, and put the settings there."""
        with border(f"can't make {directory}"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.chmod(0o700)
        write_atomically(directory / SETTINGS, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, directory: Path) -> "Settings":
        with border(f"can't read {directory / SETTINGS}"):
            table = json.loads((directory / SETTINGS).read_bytes())
        return cls(Owner(**table["owner"]), table["idle"])


def consented(recipe: bytes, owner: Owner) -> Recipe:
    """The recipe that a client follows: the server's, with the owner's file, model and device.

    Raises:
        FedKSeedError: it is no recipe, wants to run or to open something on this machine, or can't be followed by a
            client with a file of its own.
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
    """A model of an installed package, which reads nothing else of this machine and downloads nothing."""
    _, _, file = name.removeprefix("package:").partition("/")
    if not name.startswith("package:") or ".." in Path(file).parts or Path(file).is_absolute():
        raise FedKSeedError(
            f"the server's recipe names the base model {name!r}, and a client opens or downloads no model by a "
            "server's wish; start the client with --model, the name or the place of the same model"
        )
    return name
