"""A server without a model: as a process of its own, with real clients, and what it needs one for."""

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Collection, Iterable
from functools import partial
from multiprocessing.connection import Listener
from pathlib import Path
from tempfile import SpooledTemporaryFile
from tomllib import loads
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedkseed import Adapter, FedKSeedError, apply, load_recipe, start
from fedkseed.data.federated import digest, own_share, share_out
from fedkseed.files import read_table
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.network.flower.messages import unpacked
from fedkseed.network.https.connections import Connections
from fedkseed.network.protocol.carrier import Arrival, Parcel
from fedkseed.network.protocol.client.privacy_spent import LEDGER, PrivacyLedger
from fedkseed.network.protocol.client.recipe_consent import accepted_recipe
from fedkseed.network.protocol.client.task_handler import TaskHandler
from fedkseed.network.protocol.client.training_client import load_client
from fedkseed.network.protocol.client.worker import masking_client
from fedkseed.network.protocol.envelope import Reply, Status, Task
from fedkseed.network.protocol.masking_keys import MASKED_ROUNDS
from fedkseed.network.protocol.networked_recipe import recipe_for_clients
from fedkseed.network.protocol.server.client_numbers import ClientNumbers
from fedkseed.network.protocol.server.clients import RemoteClients
from fedkseed.network.protocol.server.rounds import FIRST_LEG, NO_DATA, NetworkRounds, federation, why_model
from fedkseed.network.protocol.signatures import ClientSigning, certificate, private_key
from fedkseed.planning.pin import pin
from fedkseed.recipe.algorithms import ALGORITHMS, algorithm_of
from fedkseed.recipe.reading import parse, tables
from fedkseed.recipe.schema import HeldOutSetTable, NetworkTable
from fedkseed.round import Broadcasts
from fedkseed.run.loop import work
from fedkseed.run.progress import Silent
from fedkseed.run.store import Store
from fedkseed.secure.accounting import epsilon_of
from fedkseed.wire.codec import encode, kind_of
from fedkseed.wire.records import Broadcast, Change, Delta, Run, Survivors, Upload

from ....wire.codec_calls import Alive, counted
from ...accounts import amounts
from ...audiences import AUDIENCES
from ...flower.conftest import NODES, OPEN, to_workers, with_keys

SERVER = """
import sys
from multiprocessing.connection import Client
from pathlib import Path

from fedkseed.network.protocol.carrier import Arrival
from fedkseed.network.protocol.server.serving import serve
from fedkseed.run.loop import peak_memory
from fedkseed.run.progress import Silent


class Pipe:
    # Carries tasks to the process of this test.

    name, largest = "a pipe", 1 << 30

    def __init__(self, connection):
        self.connection, self.answers = connection, {}

    def nodes(self):
        return [0, 1, 2]

    def dialled(self, node):
        return ""

    def send(self, parcels):
        parcels = [*parcels]
        for parcel in parcels:
            self.connection.send((parcel.node, parcel.data))
            self.answers[str(id(parcel))] = Arrival(str(id(parcel)), parcel.node, self.connection.recv())
        return list(self.answers)[-len(parcels):]

    def arrived(self, keys):
        return [self.answers.pop(key) for key in keys if key in self.answers]


directory, address = sys.argv[1:]
with Client(address) as connection:
    result = serve(Path(directory), Pipe(connection), "flower", Silent())
    connection.send(None)
assert result.digest is None and result.weights is None and not result.before.losses
print([name for name in ("torch", "numba", "transformers") if name in sys.modules], peak_memory())
"""


@pytest.fixture(scope="module")
def pinned(setting, tmp_path_factory) -> str:
    """The recipe of the other tests with the model's digest, for a server that has neither model nor data."""
    path = tmp_path_factory.mktemp("pinned") / "recipe.toml"
    path.write_text("# a comment that stays\n" + setting.text())
    found = pin(path)
    text = path.read_text()
    assert text.startswith("# a comment that stays\nseed = 3\n")
    assert load_recipe(path).model.digest == found["model"]["digest"]
    return text.replace(str(setting.model), "owner/model").replace(str(setting.folder / "data"), "/nowhere")


def test_a_server_without_a_model_imports_no_pytorch_and_stays_under_200_mb(setting, undisturbed, pinned, tmp_path):
    """Clients are workers of this process, behind a pipe."""
    with Store.create(tmp_path / "run", parse(loads(pinned)).to_toml()):
        ClientNumbers.register(tmp_path / "run", range(3))
    workers = setting.workers()
    with Listener(family="AF_UNIX") as listener:
        command = [sys.executable, "-c", SERVER, tmp_path / "run", listener.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            with listener.accept() as connection:
                while (asked := connection.recv()) is not None:
                    client, task = asked
                    connection.send(workers[NODES[client]].reply(task).encode())
            printed, _ = server.communicate(timeout=60)
    assert server.returncode == 0
    loaded, used = printed.strip().splitlines()[-1].rsplit(" ", 1)
    assert loaded == "[]"
    assert int(used) < 200e6
    written, whole = Adapter.load(tmp_path / "run" / "adapter.safetensors"), Adapter.load(undisturbed.output)
    assert (written.tuned, written.base) == (None, whole.base)
    np.testing.assert_array_equal(written.coefficients, whole.coefficients)
    tuned = apply(load_model(str(setting.model)), tmp_path / "run" / "adapter.safetensors")
    assert tuned is not None
    assert Store(tmp_path / "run").evaluations() == {}


def test_a_server_measures_on_its_own_rows_what_a_run_in_one_process_does(setting, tmp_path):
    """A function of the server's runs on the server: clients get a recipe that does not name it."""
    (tmp_path / "own.py").write_text("def score(answers, examples):\n    return [len(a) for a in answers]\n")
    names = f'examples = 8\nmetrics = ["choice", "{tmp_path}/own.py:score"]'
    changes = {"examples": names, "generated": "generated = 2", "rounds": "rounds = 1", "steps": "steps = 1"}
    alone = start(parse(loads(setting.text(**changes))), tmp_path / "alone")
    sent = recipe_for_clients(parse(loads(setting.text(**changes))), 3)
    assert b"metrics" not in sent
    assert b"own.py" not in sent
    result = setting.serve(setting.begin(tmp_path / "run", **changes))
    assert result.digest == alone.digest
    found = Store(tmp_path / "run").evaluations()
    assert found == Store(tmp_path / "alone").evaluations()
    assert [len(found[1]["scores"][name]) for name in ("choice", f"{tmp_path}/own.py:score")] == [8, 2]


def test_a_server_measures_its_further_sets_and_chooses_as_a_run_in_one_process_does(setting, tmp_path):
    """Clients leave the category out of their files, and are sent neither the server's file nor its choosing."""
    own = [{"instruction": f"Count to {k}.", "response": "1, 2, 3"} for k in range(4)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    sets = f"""
[[evaluation.sets]]
name = "unseen"
held_out = "number"
[[evaluation.sets]]
name = "general"
path = "{tmp_path}/own.jsonl"
"""
    changes = {"examples": 'every = 1\nexamples = 8\nvalidation = 0.5\nbest = "loss"', "steps": "steps = 1"}
    recipe = parse(loads(setting.text(sets, **changes)))
    alone = start(recipe, tmp_path / "alone")
    sent = parse(tables(recipe_for_clients(recipe, 3)))
    assert sent.evaluation == recipe.evaluation.model_copy(
        update={"validation": None, "best": None, "sets": [HeldOutSetTable(name="unseen", held_out="number")]}
    )
    rows = OPEN.data.model_copy(update={"held_out": ("capital", "number")})
    allowed = OPEN.model_copy(update={"data": rows})
    workers = setting.workers(policy=allowed)
    result = setting.serve(setting.begin(tmp_path / "run", sets, **changes), to_workers(workers))
    assert (result.digest, result.best) == (alone.digest, alone.best)
    found = Store(tmp_path / "run").evaluations()
    assert found == Store(tmp_path / "alone").evaluations()
    assert {name: len(one["losses"]) for name, one in found[3]["sets"].items()} == {
        "validation": 4, "unseen": 8, "general": 4
    }  # fmt: skip


def test_a_clients_training_rows_have_no_row_of_a_set(setting):
    sets = '[[evaluation.sets]]\nname = "unseen"\nheld_out = "number"\n'
    recipe = parse(loads(setting.text(sets)))
    own = recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": str(setting.files[0])})})
    share, *_ = own_share(own, load_tokenizer(str(setting.model)))
    assert {e.example.category for e in share} == {"colour"}
    together = share_out(recipe, load_tokenizer(str(setting.model)))
    assert together.clients[0] == share


def test_a_client_loads_no_metric_that_a_server_names(setting):
    changes = {"examples": 'examples = 8\nmetrics = ["/nowhere.py:score"]', "generated": "generated = 2"}
    recipe = parse(loads(setting.text(**changes)))
    with pytest.raises(FedKSeedError, match=r"there is no file /nowhere\.py"):
        start(recipe, setting.folder / "never")
    assert load_client(setting.owner(0), recipe.to_toml().encode()).examples


def test_a_client_whose_model_is_another_than_the_recipe_pins_is_refused_before_it_trains(setting, pinned):
    other = parse(loads(pinned)).model_dump(exclude_none=True)
    other["model"]["digest"] = 64 * "0"
    text = parse(other).to_toml().encode()
    owner = setting.owner(0)
    assert accepted_recipe(text, owner).model.digest == 64 * "0"
    with pytest.raises(FedKSeedError, match=f"digest is {64 * '0'}, the base model .* has [0-9a-f]{{64}}: load"):
        load_client(owner, text)


def test_pin_writes_the_names_of_the_output_layer_where_the_algorithm_tunes_it(setting, tmp_path):
    (tmp_path / "recipe.toml").write_text(setting.text(algorithm='algorithm = "fedkseed-plus"'))
    assert pin(tmp_path / "recipe.toml")["model"]["tuned"] == ["model.embed_tokens.weight", "lm_head.weight"]
    recipe = load_recipe(tmp_path / "recipe.toml")
    assert recipe.model.tuned == ["model.embed_tokens.weight", "lm_head.weight"]
    assert pin(tmp_path / "recipe.toml")["model"].keys() == {"digest", "tokenizer_digest", "losses"}, "once is enough"


@pytest.mark.parametrize(
    ("algorithm", "change", "why"),
    [
        ("fedkseed", {}, None),
        ("fedkseed-pro", {}, None),
        ("fedkseed-backprop", {}, None),
        ("fedkseed", {"digest": None}, "for its digest: `fedkseed pin RECIPE`"),
        ("fedkseed-plus", {}, "for the names of its output layer: `fedkseed pin RECIPE`"),
        ("fedkseed-plus", {"tuned": ["lm_head.weight"]}, None),
        ("fedavg", {}, "because fedavg aggregates weights"),
    ],
)
def test_a_server_says_why_it_needs_a_model(pinned, algorithm, change, why):
    table = parse(loads(pinned)).model_dump(exclude_none=True)
    table["training"]["algorithm"], table["model"] = algorithm, table["model"] | change
    if algorithm == "fedavg":
        del table["trust"]  # which it does not read
    if change.get("digest", "") is None:
        del table["model"]["digest"]
    found = why_model(parse(table), ALGORITHMS[algorithm])
    assert (found is None) if why is None else found is not None and found.startswith(why)
    table["data"]["source"] = "dolly-sample"
    assert why_model(parse(table), ALGORITHMS[algorithm]) == "to evaluate on the data of this machine"


def test_no_data_has_the_digest_that_a_server_with_a_model_finds():
    assert digest([[]]) == NO_DATA


def test_an_adapter_of_a_server_without_a_model_is_for_its_base_alone(pinned, setting, tmp_path):
    recipe = parse(loads(pinned))
    Adapter(
        recipe.pool, np.zeros(64, np.float32), str(recipe.model.digest), None, ("*",),
        {"model": "m", "dtype": "float32", "template": "paper", "separator": ""},
    ).save(Path(tmp_path / "a.safetensors"))  # fmt: skip
    model = load_model(str(setting.model))
    apply(model, tmp_path / "a.safetensors")
    model.get_parameter("model.norm.weight").data[0] += 1
    with pytest.raises(FedKSeedError, match="the adapter is for a base model with digest"):
        apply(model, tmp_path / "a.safetensors")


def test_the_second_leg_needs_as_many_as_take_off_the_masks_and_not_the_whole_minimum(tmp_path):
    """With a minimum of all nine, one that stays silent after its upload would stop the run."""
    needed = []

    def transport(number, messages, minimum, check, whole):
        needed.append(minimum)
        return []

    remote: Any = SimpleNamespace(transport=transport, signing=None)
    legs = iter([{0: b"first"}, {0: b"second"}])
    round_: Any = SimpleNamespace(
        exchanges=lambda: legs, answered=set(), state=SimpleNamespace(round=0), whole={}, add_=None
    )
    strategy: Any = None
    rounds = NetworkRounds(0, strategy, remote, 9, False, tmp_path / "first-leg.json")
    rounds._two_legs(round_, 9, 7)
    assert needed == [9, 7]


def signing_workers(setting, keys, folder: Path, accounts: bool = False) -> dict[int, TaskHandler]:
    """Workers with keys for signatures and masks, each with a folder, and with a secret and an account if asked."""
    workers = {}
    for number, node in enumerate(NODES):
        (own := folder / str(number)).mkdir()
        signing = ClientSigning(private_key(keys / f"client-{number}"), certificate(keys / "ca.pem"))
        masks = partial(masking_client, own, signing, None)
        owner = setting.owner(number, secret=number if accounts else None)
        ledger = PrivacyLedger(own / LEDGER, signing.audience) if accounts else None
        workers[node] = TaskHandler(partial(load_client, owner, masks=masks, ledger=ledger), signing)
    return workers


def test_a_run_rolled_back_between_the_legs_begins_its_masked_round_again(setting, keys, tmp_path):
    """Uploads under the old nonce stay in the directory, and no share under the new one takes off their masks."""
    directory = setting.begin(tmp_path / "run", "minimum = 3", rounds="rounds = 1", more="[secure]\nnorm = 0.05\n")
    with_keys(directory, keys)
    deliver = to_workers(signing_workers(setting, keys, tmp_path))

    def stopped(message):
        if kind_of(Task.decode(unpacked(message)).message) is Survivors:
            raise KeyboardInterrupt
        yield from deliver(message)

    with pytest.raises(KeyboardInterrupt):
        setting.serve(directory, stopped)
    kept = read_table(directory / FIRST_LEG)
    assert len(kept["uploads"]) == 3
    Store(directory).rollback(0)
    assert setting.serve(directory, deliver).digest
    assert not (directory / FIRST_LEG).exists()
    runs = read_table(tmp_path / "0" / MASKED_ROUNDS)
    assert [one["round"] for one in runs.values()] == [0, 0], "the round of both nonces was masked, each once"


@pytest.mark.parametrize("masked", [False, True])
def test_clients_that_protect_their_examples_end_a_run_with_the_stated_epsilon(setting, keys, tmp_path, masked):
    """Each with a secret and an account of its own; two of three take part in a round, and with masks all three."""
    more = '[privacy]\nunit = "example"\nepsilon = 8.0\nnorm = 1.0\n' + "[secure]\nnorm = 0.05\n" * masked
    cohort = {} if masked else {"cohort": "cohort = 2"}
    directory = with_keys(setting.begin(tmp_path / "run", more=more, **cohort), keys)
    result = setting.serve(directory, to_workers(signing_workers(setting, keys, tmp_path, accounts=True)))
    reports = Store(directory).reports()
    assert reports[-1]["epsilon"] == pytest.approx(8)
    assert [report["loss"] for report in reports] == [None] * 3
    assert Adapter.load(result.output).provenance["privacy"]["unit"] == "example"
    spent = [amounts(tmp_path / str(number) / LEDGER) for number in range(3)]
    taken = [sum(number in report["clients"] for report in reports) for number in range(3)]
    assert sum(taken) == (9 if masked else 6)
    for (answers, each), times in zip(spent, taken, strict=True):
        assert answers == times
        assert epsilon_of(1, each * 3 / times, 1e-6) == pytest.approx(8)  # the plan's most: three


class Answering:
    """A carrier whose clients answer at once, by a function of their task."""

    name, largest = "a list", 1 << 30

    def __init__(self, answer: Callable[[Parcel], bytes]) -> None:
        self.answer = answer
        self.waiting: dict[str, Arrival] = {}

    def nodes(self) -> list[int]:
        return [*NODES]

    def dialled(self, node: int) -> str:
        return ""

    def send(self, parcels: Iterable[Parcel]) -> list[str | None]:
        keys = list[str | None]()
        for parcel in parcels:
            keys.append(key := f"{parcel.round} {parcel.node}")
            self.waiting[key] = Arrival(key, parcel.node, Reply(Status.DONE, self.answer(parcel)).encode())
        return keys

    def arrived(self, keys: Collection[str]) -> list[Arrival]:
        return [self.waiting.pop(key) for key in keys if key in self.waiting]


def test_a_server_of_weights_holds_as_much_of_18_uploads_as_of_2(tmp_path, monkeypatch):
    """Uploads wait as files until their turn; of the broadcast there is one copy for all clients."""
    monkeypatch.setattr("fedkseed.network.https.connections.AT_ONCE", 1)
    size, peaks = 1 << 20, list[int]()
    recipe = parse({"model": {"name": "none"}, "training": {"algorithm": "fedavg"}})
    row = algorithm_of("fedavg")
    start_ = np.ones(size, np.float32)
    strategy = row.make(recipe, Run(row.pool(recipe), bytes(32)), start_, ((0, size),))
    for count in (2, 18):
        (tmp_path / str(count)).mkdir()
        ClientNumbers.register(tmp_path / str(count), range(count))
        keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(count)]
        hub = Connections(AUDIENCES, [key.public_key() for key in keys])
        monkeypatch.setattr(hub, "nodes", lambda count=count: [*range(count)])
        answered, most = set[str](), 0

        def answering(hub=hub, answered=answered) -> None:  # in place of the clients, between two looks of the server
            nonlocal most
            for key, task in [*hub._tasks.items()]:
                if key not in answered:
                    answered.add(key)
                    change = Change(strategy.run, 0, task.client, 10, 1.0, 0, np.full(size, task.client, np.float32))
                    body = SpooledTemporaryFile(1 << 10, dir=tmp_path)  # noqa: SIM115 - the hub closes it
                    body.write(Reply(Status.DONE, encode(change)).encode())
                    hub._arrivals[key] = Arrival(key, task.client), body

        numbers = ClientNumbers(tmp_path / str(count), None)
        remote = RemoteClients(hub, numbers, b"recipe", count, NetworkTable(), Silent(), interrupt=answering)
        alive = Alive(monkeypatch)
        rounds = NetworkRounds(3, strategy, remote, count, False, tmp_path / "first leg")
        tracemalloc.start()
        after, _ = rounds.next(strategy.server.init(), strategy.server.init, Broadcasts(strategy.server))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert alive.most == 1
        np.testing.assert_array_equal(after.values, np.float32((count - 1) / 2))
    assert peaks[1] < 1.05 * peaks[0], [f"{peak / size:.1f} bytes a weight" for peak in peaks]


def test_a_network_encodes_each_broadcast_once_and_decodes_each_upload_once(tmp_path, monkeypatch):
    """A server without a model, and clients whose answers are random numbers."""
    calls, rounds = counted(monkeypatch), 3
    recipe = parse(
        {
            "model": {"name": "none", "digest": 64 * "0"},
            "data": {"source": "/nowhere", "held_out": "none"},
            "clients": {"split": "files", "cohort": len(NODES)},
            "directions": {"size": 64},
            "training": {"rounds": rounds, "steps": 8},
        }
    )
    ClientNumbers.register(tmp_path, NODES)

    def upload(parcel: Parcel) -> bytes:
        client = Task.decode(parcel.data).client
        rng = np.random.default_rng([client, parcel.round])
        return encode(server.strategy.client.example(parcel.round, client, 10, False, rng))

    numbers, settings = ClientNumbers(tmp_path, None), NetworkTable()
    remote = RemoteClients(Answering(upload), numbers, b"recipe", len(NODES), settings, Silent())
    server = federation(recipe, remote)
    with Store.create(tmp_path / "run", recipe.to_toml()) as store:
        result = work(store, server)
    assert [len(report["clients"]) for report in result.reports] == [len(NODES)] * rounds
    assert calls["encode", Broadcast] == rounds + 1, "that of the last state is the end of the run's chain"
    assert calls["decode", Broadcast] == 0
    assert calls["decode", Upload] == rounds * len(NODES)
    assert calls["encode", Delta] <= rounds - 1, "one for all clients that have kept the same broadcast"
