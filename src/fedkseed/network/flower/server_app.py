"""The ServerApp for Flower: a run in a directory of its own, continued by the next `flwr run` that names it."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from ...errors import FedKSeedError
from ...files import exclusive
from ...recipe.rules import Where
from ...round import Report
from ...run.loop import Result
from ...run.progress import Progress, Silent
from ...run.store import Store
from ..https.registered_keys import keys_of_run
from ..protocol.carrier import MAX_MESSAGE, Arrival, Parcel
from ..protocol.envelope import printable
from ..protocol.server import serving
from ..protocol.server.client_numbers import ClientNumbers
from .compat import ERRORS, NODE_GONE
from .messages import client_number, packed, unpacked

FOLDER = "flower"  # in a run's directory
QUESTION_SECONDS = 60.0  # for a SuperNode to say which client it is; it is asked again then

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry out the remaining rounds of the run that Flower's run configuration names.

    Its values: `recipe`, a file; `run`, the directory of the run; `certs`, the directory of `fedkseed certs`, or "" for
    tasks and answers without signatures. All lie on the machine of the SuperLink.

    Raises:
        FedKSeedError: the recipe can't be followed, or the run can't go on; all finished rounds are kept.
    """
    recipe, run, keys = (str(context.run_config.get(name, "")) for name in ("recipe", "run", "certs"))
    if not recipe or not run:
        raise FedKSeedError('there is no recipe or no run: flwr run … --run-config \'recipe="FILE" run="DIRECTORY"\'')
    result = run_rounds(Path(recipe), Path(run), Path(keys).resolve() if keys else None, grid, FlowerLog())
    print(f"digest of the tuned model: {result.digest}", flush=True)


def run_rounds(recipe: Path, directory: Path, keys: Path | None, grid: Grid, progress: Progress) -> Result:
    """Begin a run, or go on with it from its last finished round.

    Args:
        keys: directory of `fedkseed certs`; None: tasks and answers are not signed.

    Raises:
        FedKSeedError: see `main`.
    """
    wanted, folder = serving.begin(recipe, (), directory, Where.FLOWER_SERVER), directory / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    with exclusive(folder / "server.lock", f"another ServerApp works on {directory}; stop it first"):
        Store(directory).change_recipe(wanted.to_toml())  # [network] may be another than the last time
        if keys is not None:
            keys_of_run(directory, keys, progress, FOLDER).register()
        elif wanted.clients.count is not None:  # else `serve` asks for it
            ClientNumbers.register(directory, range(wanted.clients.count))
        return serve(directory, grid, progress)


def serve(directory: Path, grid: Grid, progress: Progress) -> Result:
    """Carry out the remaining rounds of a run with the clients behind a Grid, see `serving.serve`."""
    return serving.serve(directory, GridCarrier(grid, progress.note), FOLDER, progress)


class FlowerLog(Silent):
    """The progress of a run as lines in Flower's log, which `flwr run --stream` shows."""

    def note(self, text: str) -> None:
        print(text, flush=True)

    def round_done(self, report: Report) -> None:
        print(f"round {report.round + 1}: clients {list(report.clients)}, local loss {report.loss:.4f}", flush=True)


class GridCarrier:
    """The clients behind a Grid, under their own numbers.

    Flower's id of a SuperNode says nothing about whose rows it has, and may be another after a restart. So each id that
    is new is asked once for its number, the `partition-id` of its --node-config.

    Args:
        note: takes lines for whoever runs the server.
    """

    name, largest = "Flower", MAX_MESSAGE

    def __init__(self, grid: Grid, note: Callable[[str], object]) -> None:
        self.grid, self.note = grid, note
        self._node_of: dict[int, int] = {}  # client -> SuperNode; the last that has said this number
        self._client_of: dict[int, int] = {}  # SuperNode -> client
        self._questions: dict[str, int] = {}  # id of a question -> SuperNode
        self._tasks: dict[str, tuple[int, int]] = {}  # id of a task that is not answered -> client, SuperNode
        self._reported: set[int] = set()  # SuperNodes whose questions have failed

    def nodes(self) -> list[int]:
        connected = {*self.grid.get_node_ids()}
        unknown = sorted(connected - self._client_of.keys() - {*self._questions.values()})
        questions = [
            Message(packed(b""), node, MessageType.QUERY, ttl=QUESTION_SECONDS, group_id="partition-id")
            for node in unknown
        ]
        if questions:
            self._questions |= zip(self.grid.push_messages(questions), unknown, strict=True)
        if self._questions:
            for message in self.grid.pull_messages([*self._questions]):
                self._hear(message)
        return sorted(client for client, node in self._node_of.items() if node in connected)

    def send(self, parcels: Sequence[Parcel]) -> list[str | None]:
        nodes = [self._node_of[parcel.node] for parcel in parcels]
        messages = [
            Message(packed(parcel.data), node, MessageType.TRAIN, ttl=parcel.seconds, group_id=str(parcel.round + 1))
            for parcel, node in zip(parcels, nodes, strict=True)
        ]
        keys: list[str | None] = [*self.grid.push_messages(messages)] or [None] * len(messages)
        sent = zip(keys, parcels, nodes, strict=True)
        self._tasks |= {key: (parcel.node, node) for key, parcel, node in sent if key is not None}
        return keys

    def arrived(self, keys: Collection[str]) -> list[Arrival]:
        arrivals = [self._arrival(message) for message in self.grid.pull_messages([*keys])]
        for key in [*keys]:
            client, node = self._tasks.get(key, (None, None))
            if client is not None and self._node_of[client] != node:  # the SuperLink would say so after a minute
                del self._tasks[key]
                arrivals.append(Arrival(key, client, trouble="its SuperNode was started again"))
        return arrivals

    def _hear(self, answer: Message) -> None:
        """Take a SuperNode's answer to the question for its number."""
        node = self._questions.pop(answer.metadata.reply_to_message_id)
        try:
            if answer.has_error():
                raise FedKSeedError(_trouble(answer))
            client = client_number(answer)
        except FedKSeedError as error:
            if node not in self._reported:
                self._reported.add(node)
                self.note(f"SuperNode {node} does not say which client it is: {error}; it is asked again")
            return
        if (before := self._node_of.get(client)) is not None:
            self.note(f"client {client} is SuperNode {node} now, and was {before}")
        self._node_of[client], self._client_of[node] = node, client

    def _arrival(self, message: Message) -> Arrival:
        key, node = message.metadata.reply_to_message_id, message.metadata.src_node_id
        self._tasks.pop(key, None)
        client = self._client_of.get(node, node)
        if message.has_error():
            return Arrival(key, client, trouble=_trouble(message), gone=message.error.code == NODE_GONE)
        try:
            return Arrival(key, client, unpacked(message))
        except FedKSeedError as error:
            return Arrival(key, client, broken=str(error))


def _trouble(message: Message) -> str:
    """Flower's error in place of an answer, in words."""
    text = ERRORS.get(message.error.code, f"Flower's error {message.error.code}")
    return f"{text} ({printable(message.error.reason or '')[:200]})"
