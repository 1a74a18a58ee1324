"""Consent of a client: a recipe that came over the network decides how to train, but never what to open or run.

What it may ask of the rows is the owner's policy (policy.py). All that was asked for is kept in a journal.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ....data.file_formats import HUB_NAME, SAMPLES, is_saved
from ....data.sources import Reader, require_columns
from ....errors import FedKSeedError
from ....files import border, own_folder, private, read_table, write_table
from ....local.schedules import require_positive
from ....models.place import require_device
from ....recipe.reading import parse, tables, typed
from ....recipe.rules import Where, require_legal
from ....recipe.schema import Recipe, absolute_path
from ..envelope import Code, RefusedError, printable, recipe_digest, refusing
from ..masking_keys import listed_keys
from ..run_history import RunHistory
from ..signatures import ClientSigning, certificate, private_key
from .policy import Policy, RowView, load_policy

SETTINGS, ASKED = "owner.json", "asked.jsonl"  # in the directory of a client
MAX_ASKED = 1 << 24  # bytes of one server in a journal: 10,000 recipes of usual size
MOST = {  # limits of settings that take memory or threads at once, whatever the policy says
    ("clients", "count"): 1 << 20,
    ("clients", "threads"): 256,
    ("peft", "rank"): 1 << 12,
    ("peft", "virtual_tokens"): 1 << 12,
    ("evaluation", "max_new_tokens"): 1 << 10,
}


@dataclass(frozen=True, slots=True)
class Owner:
    """The settings that the owner of a client decides, and no server."""

    data: str  # the client's own file, or a folder that `save_to_disk` wrote
    model: str | None = None  # the base model: folder, file or name; None: one in an installed package
    device: str = "auto"
    policy: Policy = field(default_factory=Policy)
    secret: int | None = None  # seed of the client's batches; None: the recipe's
    basis: str | None = None  # file with the basis of informed directions; a server can't name one
    members: str | None = None  # file with the public lines of clients 0, 1, …: whose keys masks are made with

    def __post_init__(self) -> None:
        path = Path(self.data).expanduser()
        if self.data not in SAMPLES and not path.is_file() and not is_saved(path):  # and so never a name on the hub
            raise FedKSeedError(f"a client's data is a file of its own, there is none at {self.data}")


def owner_of(
    data: str, model: str | None, device: str, policy: Path | None, basis: Path | None, members: Path | None
) -> Owner:
    """The settings that the owner of a client decides, with paths that hold in any directory.

    Raises:
        FedKSeedError: there is no such file or device, or the policy or the list of members can't be read.
    """
    files = [None if file is None else str(file.expanduser().resolve()) for file in (basis, members)]
    if missing := [file for file in files if file is not None and not Path(file).is_file()]:
        raise FedKSeedError(f"there is no file {missing[0]}; mend the path, or leave the option out")
    if members is not None:
        listed_keys(members)  # refused now, and not by each worker
    name = model or "owner/name"
    if not (name.startswith("package:") or Path(name).expanduser().exists() or HUB_NAME.fullmatch(name)):
        raise FedKSeedError(f"no model at {name}; give a folder, a .gguf file, or owner/name on the Hugging Face hub")
    rules = Policy() if policy is None else load_policy(policy)
    require_device(device)
    return Owner(absolute_path(data), None if model is None else absolute_path(model), device, rules, None, *files)


def usable_rows(owner: Owner) -> str:
    """A line on the rows of an owner's file, which are enough for some recipe; what one leaves out comes later.

    Raises:
        FedKSeedError: the file can't be read as the policy says, or has fewer rows than the policy asks for.
    """
    rows, batch = owner.policy.data, owner.policy.training.min_batch_size
    try:
        file = Reader(**rows.way_of_reading()).file(owner.data)
        require_columns([file])
    except FedKSeedError as error:
        said, _, _ = str(error).partition(", as options of `fedkseed init`")
        raise FedKSeedError(said + " ([data] of the file of --policy)" * ("[data]" in said)) from error
    count, least = len(file.examples), max(rows.min_examples, batch)
    if count < least and not file.examples[0].plain:  # texts are cut into any number of examples
        raise FedKSeedError(
            f"{file.source} has {count} rows to learn from, and a client takes part with {least} or more: add rows, or "
            f"let the file of --policy ask for fewer ([data] min_examples = {rows.min_examples}, [training] "
            f"min_batch_size = {batch})"
        )
    return file.summary()


@dataclass(frozen=True, slots=True)
class OwnerSettings:
    """The settings of a worker, in a file in its directory."""

    owner: Owner
    idle: float = 1800.0  # seconds without a task after which the worker ends
    key: str | None = None  # file of the private key that signs answers
    ca: str | None = None  # file of the authority; None, as the key: tasks need no signature, and answers get none
    dialled: str = ""  # the name by which the server is dialled; empty: none is

    def __post_init__(self) -> None:
        require_positive(idle=self.idle)
        if (self.key is None) != (self.ca is None):
            raise FedKSeedError(f"a client has a key and a ca, or neither; got key = {self.key}, ca = {self.ca}")

    def write(self, directory: Path) -> None:
        """Make the directory, for this user alone, and write the settings into it."""
        own_folder(directory)
        with border(f"can't make {directory}"):
            directory.chmod(0o700)
        text = json.dumps(asdict(self), default=lambda policy: policy.model_dump())
        write_table(directory / SETTINGS, json.loads(text))

    @classmethod
    def read(cls, directory: Path) -> "OwnerSettings":
        """The settings that `write` has written, or a person.

        Raises:
            FedKSeedError: the file can't be read, is damaged, or holds something else.
        """
        table = read_table(directory / SETTINGS, by_hand=True)
        try:
            owner = table.pop("owner")
            return cls(Owner(**{**owner, "policy": typed(Policy, owner.get("policy", {}))}), **table)
        except (KeyError, TypeError, AttributeError) as error:
            raise FedKSeedError(f"{directory / SETTINGS} holds no settings of a client: {error!r}") from error

    def signing(self, directory: Path) -> ClientSigning | None:
        """The verification of tasks and signing of answers by the files of these settings.

        Args:
            directory: of the client, in which it keeps the histories that it has seen.

        Raises:
            FedKSeedError: a file can't be read.
        """
        if self.key is None or self.ca is None:
            return None
        proofs = private_key(Path(self.key)), certificate(Path(self.ca))
        return ClientSigning(*proofs, RunHistory(directory), self.dialled)


class RecipeJournal:
    """All recipes that servers have asked a client to follow, each once as text, with the decisions on them.

    A line is a JSON object: `time`, `server`, `digest` of the recipe, and `recipe`, or else `decision`, with the `view`
    of a recipe that is followed.

    Args:
        server: that asks; it can't fill the journal for another.
    """

    def __init__(self, directory: Path, server: bytes = b"") -> None:
        self.path, self.server, self._size = directory / ASKED, server.hex(), 0
        self._known, self.views = set[str](), set[RowView]()
        with border(f"can't read {self.path}"):
            text = self.path.read_text(errors="replace") if self.path.exists() else ""
        self._cut = text[-1:] not in ("", "\n")  # then the next line would be one with the last, and both be lost
        for line in text.split("\n"):
            # One that was cut short as the machine went down, or damaged.
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                entry = json.loads(line)
                self._size += (len(line) + 1) * (entry.get("server", "") == self.server)
                self._known |= {entry["digest"]} if "recipe" in entry else set()
                self.views |= {RowView(**entry["view"])} if "view" in entry else set()

    def asked(self, recipe: bytes) -> None:
        """Note that a recipe was asked for, before it can do anything.

        Raises:
            RefusedError: the journal is full, and a recipe that can't be noted is not followed.
        """
        if (digest := recipe_digest(recipe).hex()) not in self._known:
            self._write(digest, recipe=recipe.decode(errors="replace"))
            self._known.add(digest)

    def decided(self, recipe: bytes, decision: str, view: RowView | None = None) -> None:
        """Note the decision on a recipe."""
        self._write(recipe_digest(recipe).hex(), decision=decision, **({"view": asdict(view)} if view else {}))
        self.views |= {view} if view else set()

    def require_room(self, view: RowView, most: int) -> None:
        """Refuse another view of the rows where the owner's number of them has been answered.

        Raises:
            RefusedError: this would be one more.
        """
        if view not in self.views and len(self.views) >= most:
            raise RefusedError(
                Code.POLICY,
                f"the recipe wants to see the rows in another way than {len(self.views)} earlier ones, the policy says "
                f"max_views = {most}: raise it, or remove {self.path}",
            )

    def _write(self, digest: str, **more: Any) -> None:
        about = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "server": self.server, "digest": digest}
        line = json.dumps(about | more) + "\n"
        if self._size + len(line) > MAX_ASKED:
            used = f"{self.path} has {self._size:,} of {MAX_ASKED:,} bytes of this server's recipes"
            raise RefusedError(Code.POLICY, f"{used}, no more of them are followed: ask its owner why")
        with border(f"can't write {self.path}"), open(self.path, "a", opener=private) as file:
            file.write("\n" * self._cut + line)
        self._size, self._cut = self._size + len(line), False


def accepted_recipe(recipe: bytes, owner: Owner) -> Recipe:
    """The recipe that a client follows: the server's, with the owner's file, columns, model and device.

    Raises:
        RefusedError: the bytes are no recipe, or the recipe would run or open something on this machine, can't be
            followed by a client with a file of its own, or asks for more than the owner's policy allows.
    """
    with refusing(Code.RECIPE):
        try:
            wished = parse(tables(recipe))
        except FedKSeedError as error:
            raise FedKSeedError(f"the server's recipe can't be read: {printable(str(error))}") from error
        require_legal(wished, Where.NETWORK)
    with refusing(Code.POLICY):
        for (table, name), most in MOST.items():
            if ((value := getattr(getattr(wished, table), name)) or 0) > most:
                raise FedKSeedError(f"the server's recipe asks for [{table}] {name} = {value}, at most {most} go")
        owner.policy.require(wished)
        if not owner.model:
            _require_carried(wished.model.name)
    directions = wished.directions
    with refusing(Code.BASIS):
        if directions.informed and owner.basis is None:
            raise FedKSeedError(
                f"the server's recipe needs the basis {directions.basis_digest}: get that file from its owner, and "
                "start the client with --basis FILE"
            )
    followed, basis = owner.policy.followed(wished), owner.basis if directions.informed else None
    model = {"name": owner.model or wished.model.name, "device": owner.device}
    return followed.having(model=model, data={"source": owner.data}, directions={"basis": basis})


def _require_carried(name: str) -> None:
    """Refuse a model but one in an installed package, to load which reads and downloads no other file."""
    _, _, file = name.removeprefix("package:").partition("/")
    if not name.startswith("package:") or ".." in Path(file).parts or Path(file).is_absolute():
        raise FedKSeedError(
            f"the server's recipe names the base model {name!r}, and a client opens or downloads no model by a "
            "server's wish; start the client with --model, the name or the place of the same model"
        )
