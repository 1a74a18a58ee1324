"""A tree of servers: two shards and a root end with the digest of the same recipe in one process."""

import itertools
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from tomllib import loads

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed, which the setting of these tests needs")


from fedkseed import FedKSeedError, start
from fedkseed.network.https.registered_keys import FOLDER, keys_of_run, keys_of_shard
from fedkseed.network.https.shard import Shard, ShardClients, ShardTasks
from fedkseed.network.protocol.carrier import Arrival, Parcel
from fedkseed.network.protocol.certs import add, make, request, revoke
from fedkseed.network.protocol.client.task_handler import AbandonedError, TaskHandler
from fedkseed.network.protocol.client.training_client import load_client
from fedkseed.network.protocol.envelope import Reply, Status
from fedkseed.network.protocol.receipt_checks import signature_check
from fedkseed.network.protocol.run_history import RunHistory
from fedkseed.network.protocol.server.client_numbers import ClientNumbers
from fedkseed.network.protocol.server.clients import RemoteClients
from fedkseed.network.protocol.server.serving import begin, serve
from fedkseed.network.protocol.signatures import ClientSigning, certificate, private_key
from fedkseed.recipe.reading import parse
from fedkseed.recipe.rules import Where
from fedkseed.recipe.schema import NetworkTable
from fedkseed.run.store import Store
from fedkseed.run.verify import verify

from ..flower.conftest import POLICY, Notes, Setting
from ..ports import free_port
from .network import Program, kill, processes

SHARDS = "shards = [2, 1]"
FIRST = (0, 2)  # numbers of the first clients of the shards


class Direct:
    """A carrier to workers in this process.

    Args:
        before: called with the node, before it answers.
    """

    name, largest = "memory", 1 << 24

    def __init__(self, workers: dict[int, TaskHandler], before: Callable[[int], object] = id) -> None:
        self.workers, self.before, self.sent = workers, before, dict[str, Parcel]()
        self._keys, self.refuses = map(str, itertools.count()), False

    def nodes(self) -> list[int]:
        return [*self.workers]

    def dialled(self, node: int) -> str:
        return ""

    def send(self, parcels: Sequence[Parcel]) -> list[str | None]:
        made = {next(self._keys): parcel for parcel in parcels}
        self.sent |= made
        return [*made]

    def arrived(self, keys: Collection[str]) -> list[Arrival]:
        here = {key: self.sent.pop(key) for key in keys if key in self.sent}
        if self.refuses:
            return [Arrival(key, one.node, Reply(Status.REFUSED, text="data").encode()) for key, one in here.items()]
        for parcel in here.values():
            self.before(parcel.node)
        return [Arrival(key, one.node, self.workers[one.node].reply(one.data).encode()) for key, one in here.items()]


class Tree:
    """A root, two shards and three clients in this process; only their carriers are not those of a network."""

    def __init__(self, folder: Path, setting: Setting, text: str) -> None:
        self.folder, self.setting, self.notes = folder, setting, Notes()
        self.text, self.carriers = text, dict[int, Direct]()
        make(folder / "root-keys", 2, ["localhost"], 2)
        for shard, clients in enumerate((2, 1)):
            make(self.keys(shard), clients, ["localhost"], 2)
        self.clients = {number: self.client(number) for number in range(3)}
        self.shards = {shard: self.shard(shard) for shard in range(2)}

    def keys(self, shard: int) -> Path:
        return self.folder / f"keys-{shard}"

    def client(self, number: int) -> TaskHandler:
        shard = int(number >= FIRST[1])
        owner = self.setting.owner(number)
        keys, key = self.keys(shard), f"client-{number - FIRST[shard]}"
        return TaskHandler(partial(load_client, owner), self.signing(keys, key, self.folder / f"c{number}"))

    def shard(self, shard: int) -> TaskHandler:
        """The shard as after a start of its process: it has forgotten all but its directory."""
        folder = self.folder / f"shard-{shard}"
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        keys = keys_of_shard(folder, self.keys(shard), FIRST[shard], self.notes)
        keys.register()
        mine = {n: worker for n, worker in self.clients.items() if (n >= FIRST[1]) == bool(shard)}
        signing = self.signing(self.folder / "root-keys", f"client-{shard}", folder)
        carrier = Direct(mine)
        self.carriers[shard] = carrier
        clients = ShardClients(FIRST[shard], keys, carrier, self.notes)
        return TaskHandler(partial(Shard, clients=clients), signing, remembers=lambda task: not task.keep)

    def signing(self, keys: Path, key: str, folder: Path) -> ClientSigning:
        folder.mkdir(exist_ok=True)
        return ClientSigning(private_key(keys / key), certificate(keys / "ca.pem"), RunHistory(folder))

    def run(self, before: Callable[[int], object] = id):
        """The result of the root's rounds."""
        directory = self.folder / "run"
        with Store.create(directory, parse(loads(self.text)).to_toml()):
            pass
        (directory / FOLDER).mkdir()
        keys_of_run(directory, self.folder / "root-keys", self.notes).register()
        return serve(directory, Direct(self.shards, before), FOLDER, self.notes)


def sharded(setting: Setting, **changes: str) -> str:
    return setting.text(SHARDS, **changes)


@pytest.mark.parametrize("algorithm", ["fedkseed", "fedkseed-pro"])
def test_a_tree_ends_with_the_digest_of_one_process(setting, tmp_path, algorithm):
    text = sharded(setting, algorithm=f'algorithm = "{algorithm}"')
    tree = Tree(tmp_path / "tree", setting, text)
    result = tree.run()
    assert result.digest == start(parse(loads(text)), tmp_path / "alone").digest
    reports = Store(tree.folder / "run").reports()
    assert [tuple(report["clients"]) for report in reports] == [(0, 1, 2)] * 3, "those of the shards, not the shards"
    assert tree.notes.has("round 3: the sum of 2 clients")
    assert tree.notes.has("the run has ended; 2 clients have kept the tuned model")
    assert tree.notes.has("2 of 2 shards have sent their clients the tuned model")
    verdict = verify(Store(tree.folder / "run"), signature_check(Store(tree.folder / "run")))
    assert (verdict.rounds, verdict.uploads, verdict.signed) == (3, 6, 6), "sums, signed by the shards"


def test_a_shard_that_is_started_again_gets_recipe_and_links_once_more(setting, tmp_path):
    tree, asked = Tree(tmp_path / "tree", setting, sharded(setting)), list[int]()

    def restart(shard: int) -> None:
        asked.append(shard)
        if asked.count(1) == 2:
            tree.shards[1] = tree.shard(1)
            asked.append(1)

    result = tree.run(restart)
    assert result.digest == start(parse(loads(tree.text)), tmp_path / "alone").digest


def test_a_cohort_is_drawn_from_the_clients_of_all_shards(setting, tmp_path):
    """In some rounds a shard has none of the cohort, and hands up a sum of nothing."""
    text = sharded(setting, cohort="cohort = 1", rounds="rounds = 4")
    tree = Tree(tmp_path / "tree", setting, text)
    assert tree.run().digest == start(parse(loads(text)), tmp_path / "alone").digest
    drawn = [tuple(report["clients"]) for report in Store(tree.folder / "run").reports()]
    assert [len(clients) for clients in drawn] == [1] * 4
    assert {client >= FIRST[1] for (client,) in drawn} == {True, False}
    assert tree.notes.has("the sum of 0 clients")


def test_a_client_whose_key_a_shard_has_removed_is_missing_in_its_sum(setting, tmp_path):
    tree = Tree(tmp_path / "tree", setting, sharded(setting))
    revoke(tree.keys(0), 1)
    tree.shards[0] = tree.shard(0)
    tree.run()
    assert [tuple(report["clients"]) for report in Store(tree.folder / "run").reports()] == [(0, 2)] * 3


def test_shards_are_refused_where_nothing_can_follow_them_before_a_run_is_made(setting, tmp_path):
    (tmp_path / "recipe.toml").write_text(sharded(setting))
    with pytest.raises(FedKSeedError, match="is for `fedkseed serve` without a page, and this is a server over Flower"):
        begin(tmp_path / "recipe.toml", (), tmp_path / "run", Where.FLOWER_SERVER, note=id)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (f"{SHARDS}\nminimum = 3", "minimum = 3 is more than the 2 shards"),
        ("shards = [1, 1, 1]", "shards has 3 shards, 2 keys are registered: one for each"),
    ],
    ids=["minimum", "keys"],
)
def test_as_many_shards_are_needed_and_registered_as_the_recipe_has(setting, tmp_path, own, text):
    with pytest.raises(FedKSeedError, match=text):
        Tree(tmp_path / "tree", setting, setting.text(own)).run()


def test_a_shard_with_too_few_clients_is_asked_again(setting, tmp_path):
    """Its answer is that asking again may help; one client was away for the first time."""
    tree, asked = Tree(tmp_path / "tree", setting, sharded(setting)), list[int]()

    def away(shard: int) -> None:
        asked.append(shard)
        carrier = tree.carriers[1]
        carrier.refuses = asked.count(1) == 1

    result = tree.run(away)
    assert asked.count(1) > 3
    assert tree.notes.has("client 1 did not answer: worker")
    assert result.digest == start(parse(loads(tree.text)), tmp_path / "alone").digest


def test_a_finished_run_that_is_served_again_reaches_the_clients_again(setting, tmp_path):
    tree = Tree(tmp_path / "tree", setting, sharded(setting))
    tree.run()
    kept = [note for note in tree.notes.told if "clients have kept the tuned model" in note]
    serve(tree.folder / "run", Direct(tree.shards), FOLDER, tree.notes)
    again = [note for note in tree.notes.told if "clients have kept the tuned model" in note]
    assert (len(kept), len(again)) == (2, 4)


def test_a_shard_whose_numbers_begin_elsewhere_is_refused(setting, tmp_path, capsys):
    tree = Tree(tmp_path / "tree", setting, setting.text("shards = [1, 2]\nattempts = 1"))
    with pytest.raises(FedKSeedError, match="client 1: recipe"):
        tree.run()
    assert "the clients of shard 1 are 1 to 2, and this one began with --first 2" in capsys.readouterr().err


def test_the_numbers_of_a_shards_clients_begin_where_its_operator_says(tmp_path):
    keys, folder = tmp_path / "keys", tmp_path / "shard"
    make(keys, 0, ["localhost"], 2)
    (folder / FOLDER).mkdir(parents=True)
    registered = keys_of_shard(folder, keys, 250, Notes())

    def present() -> list[bool]:
        registered.register()
        return [bool(line) for line in registered.lines]

    with pytest.raises(FedKSeedError, match=r"began with .*250.*, not with --first 25: give this one a --state"):
        keys_of_shard(folder, keys, 25, Notes())
    with pytest.raises(FedKSeedError, match="has no public key of a client; `fedkseed certs add` registers one"):
        registered.register()
    for name in ("a", "b", "c"):
        add(keys, request(tmp_path / name))
    assert present() == [False] * 250 + [True] * 3
    assert ClientNumbers(folder, None).expected == {250, 251, 252}
    assert registered.has(251)
    revoke(keys, 2)
    assert present()[250:] == [True, True, False], "a former client keeps its place"
    assert not registered.has(252)
    (keys / "client-old.pub").write_text("")
    with pytest.raises(FedKSeedError, match=r"client-old\.pub is no name of a client's key"):
        registered.register()
    assert registered.has(251), "those that were taken hold"


def test_a_task_for_which_the_root_does_not_wait_any_more_is_given_up(tmp_path):
    def still_awaited() -> None:
        raise AbandonedError

    ClientNumbers.register(tmp_path, range(1))
    numbers = ClientNumbers(tmp_path, None)
    remote = RemoteClients(Direct({}), numbers, b"recipe", 1, NetworkTable(), Notes(), interrupt=still_awaited)
    with pytest.raises(AbandonedError):  # and not tried again until the deadline, as after other errors of a carrier
        dict(remote.transport(0, {0: b"broadcast"}, 1, id))

    class Slow:
        def reply(self, task: bytes, gone: Callable[[], bool]):
            assert gone()
            raise AbandonedError

    desk = ShardTasks(Slow())  # type: ignore[arg-type]
    found = Reply.decode(desk.reply(b"", lambda give_up: give_up()))
    assert (found.status, found.text) == (Status.FAILED, "worker")


def test_tasks_of_a_shard_are_answered_one_after_the_other():
    """One that was given up may still be at its end, and both would use the same clients."""
    at_once, most = [0], [0]

    class Busy:
        def reply(self, task: bytes, gone: Callable[[], bool]) -> Reply:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
            time.sleep(0.1)
            at_once[0] -= 1
            return Reply(Status.DONE, task)

    desk, found = ShardTasks(Busy()), list[bytes]()  # type: ignore[arg-type]
    threads = [threading.Thread(target=lambda: found.append(desk.reply(b"sum", id))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), most) == (3, [1])


@pytest.mark.network
def test_a_tree_of_three_servers_over_tls_with_a_shard_killed(setting, tmp_path):
    """As its operators type it: a root, two shards, three clients, each a process of its own."""
    folder, ports, text = tmp_path, [free_port() for _ in range(3)], sharded(setting, rounds="rounds = 6")
    (folder / "recipe.toml").write_text(text)
    (folder / "policy.toml").write_text(POLICY)
    for name in ("root", "0", "1"):
        make(folder / f"keys-{name}", 0, ["localhost"], 2)
    for name in ("shard-0", "shard-1"):
        add(folder / "keys-root", request(folder / name))
    for number in range(3):
        add(folder / f"keys-{int(number >= FIRST[1])}", request(folder / f"client-{number}"))

    def shard(number: int) -> Program:
        own = ("--key", folder / f"shard-{number}", "--ca", folder / "keys-root" / "ca.pem")
        mine = ("--certs", folder / f"keys-{number}", "--first", FIRST[number], "--port", ports[1 + number])
        state = ("--state", folder / f"s{number}")
        return Program(folder / f"shard-{number}.log", "shard", f"https://localhost:{ports[0]}", *own, *mine, *state)

    def client(number: int) -> Program:
        of = int(number >= FIRST[1])
        own = ("--key", folder / f"client-{number}", "--ca", folder / f"keys-{of}" / "ca.pem")
        more = ("--data", setting.files[number], "--model", setting.model, "--policy", folder / "policy.toml")
        url = f"https://localhost:{ports[1 + of]}"
        return Program(folder / f"client-{number}.log", "join", url, *own, *more, "--state", folder / f"c{number}")

    programs = [client(number) for number in range(3)]
    shards = [shard(number) for number in range(2)]
    try:
        server = ("--certs", folder / "keys-root", "--output", folder / "run", "--port", ports[0])
        root = Program(folder / "root.log", "serve", folder / "recipe.toml", *server)
        programs.append(root)
        root.wait_for("round   2 of 6")
        shards[0].kill()
        time.sleep(1)
        shards[0] = shard(0)
        assert root.wait() == 0, root.output
        found = re.findall(r"digest of the tuned model\W+([0-9a-f]{64})", root.output)[-1]
        assert found == start(parse(loads(text)), tmp_path / "alone").digest
        for program in programs[:3]:
            program.wait_for("the run has ended; its tuned model is")
        for one in shards:
            one.wait_for("the run has ended; the clients were sent its model")
    except BaseException:
        print("\n".join(f"=== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log"))))
        raise
    finally:
        for program in [*programs, *shards]:
            program.stop()
        kill(processes("", folder))
