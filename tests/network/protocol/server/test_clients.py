"""The server's loop on a loopback Grid: ServerApp, ClientApp, worker and store as they are, no network between them."""

import json
import shutil
import time
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
from flwr.app import Error, Message, MessageType, RecordDict
from transformers import AutoModelForCausalLM

from fedkseed import Adapter, FedKSeedError, apply
from fedkseed.data.tokenizer_digest import tokenizer_digest
from fedkseed.models.known_losses import losses
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.network.flower.compat import ERRORS, NODE_GONE
from fedkseed.network.flower.messages import packed, unpacked
from fedkseed.network.flower.server_app import serve
from fedkseed.network.protocol.carrier import Arrival
from fedkseed.network.protocol.client.task_handler import TaskHandler
from fedkseed.network.protocol.client.training_client import load_client
from fedkseed.network.protocol.envelope import Reply, Status, Task
from fedkseed.network.protocol.server import clients as remote
from fedkseed.network.protocol.server.client_numbers import ClientNumbers
from fedkseed.network.protocol.server.serving import begin, kept_before
from fedkseed.recipe.schema import NetworkTable
from fedkseed.report.watch_state import Watched
from fedkseed.run.store import Store
from fedkseed.weights.layout import Layout
from fedkseed.wire.codec import decode, encode, kind_of
from fedkseed.wire.records import Lack

from ....conftest import widened_folder
from ...flower.conftest import NODES, Notes, Setting, recorded, to_workers
from ...flower.loopback import LoopbackGrid

ONE_OF_THREE = "minimum = 1\ndeadline = 60.0\nattempts = 1\npatience = 0.5"
ALL = "minimum = 3\ndeadline = 60.0\nattempts = 3\npatience = 0.5"
SHORT = "minimum = 3\ndeadline = 4.0\nattempts = 3\npatience = 0.5"  # some of these pass: seconds


def number_of(message: Message) -> int:
    return NODES.index(message.metadata.dst_node_id)


def round_of(message: Message) -> int:
    return int(message.metadata.group_id) - 1


def without(gone: list[int]):
    """The nodes that are connected while those that are gone grow more."""
    return lambda: [node for node in NODES if node not in gone]


def test_a_federation_ends_with_the_digest_of_the_same_recipe_in_one_process(setting, undisturbed, tmp_path):
    directory = setting.begin(tmp_path / "run")
    result = setting.serve(directory)
    assert result.digest == undisturbed.digest
    assert [asdict(result.before), asdict(result.after)] == [asdict(undisturbed.before), asdict(undisturbed.after)]
    for name in ("clients", "bytes_down", "bytes_up", "bytes_total"):  # differences to kept messages, too
        assert [r[name] for r in result.reports] == [r[name] for r in undisturbed.reports]
    assert Store(directory).adapter.exists()


def test_the_recipe_travels_once_to_each_client(setting, tmp_path):
    with_recipe, deliver = Counter(), setting.deliver()

    def counting(message):
        with_recipe[number_of(message), bool(Task.decode(unpacked(message)).recipe)] += 1
        yield from deliver(message)

    setting.serve(setting.begin(tmp_path / "run"), counting)
    assert with_recipe == {(client, first): 1 if first else 3 for client in range(3) for first in (True, False)}


def test_a_worker_that_was_started_again_gets_the_recipe_again(setting, undisturbed, tmp_path):
    workers, died = setting.workers(), []
    deliver = to_workers(workers)

    def killing(message):
        if round_of(message) == 1 and not died:
            died.append(workers[222])
            workers[222] = TaskHandler(workers[222].follow)
        yield from deliver(message)

    assert setting.serve(setting.begin(tmp_path / "run", ALL), killing).digest == undisturbed.digest


def keeping(setting, folder):
    """Workers whose clients keep the tuned model in a file of their own, as those of `fedkseed join` do."""
    files = [folder / f"client-{number}.safetensors" for number in range(3)]
    made = [TaskHandler(partial(load_client, setting.owner(k), keeps=file)) for k, file in enumerate(files)]
    return to_workers(dict(zip(NODES, made, strict=True))), files


def test_each_client_ends_with_the_tuned_model_and_one_that_was_away_gets_it_later(setting, undisturbed, tmp_path):
    directory, notes, there = setting.begin(tmp_path / "run"), Notes(), [*NODES]
    deliver, files = keeping(setting, tmp_path)

    def leaving(message):
        yield from deliver(message)
        if round_of(message) == 2 and number_of(message) == 1:
            there.remove(NODES[1])

    setting.serve(directory, leaving, lambda: there, notes)
    assert [file.exists() for file in files] == [True, False, True]
    assert notes.has(
        "2 of 3 clients have kept the tuned model; the same command waits for client 1, and sends it again"
    )
    there.clear()  # those that have the model have ended

    def coming():
        there.extend([NODES[1]] if notes.has("0 of 3 clients are connected; waiting for client 1") else [])
        return there

    setting.serve(directory, deliver, coming, notes)  # the finished run once more
    assert notes.told[-1] == "3 of 3 clients have kept the tuned model"
    before = len(notes.told)
    setting.serve(directory, deliver, list, notes)
    assert notes.told[-1] == "3 of 3 clients have kept the tuned model", "nobody is forgotten"
    assert not [note for note in notes.told[before:] if "waiting for" in note], "nobody is waited for"
    assert kept_before(Store(directory)) == [0, 1, 2]
    served = Adapter.load(Store(directory).adapter)
    for file in files:
        kept = Adapter.load(file)
        assert kept.coefficients.tobytes() == served.coefficients.tobytes()
        assert (kept.tuned, kept.provenance["rounds"]) == (undisturbed.digest, 3)
        model = apply(load_model(str(setting.model)), file)
        assert Layout(model).digest().hex() == undisturbed.digest
    Store(directory).rollback(2)
    assert kept_before(Store(directory)) == []


def test_clients_keep_the_round_that_the_validation_part_has_chosen(setting, tmp_path):
    choosing = 'examples = 8\nevery = 1\nvalidation = 0.5\nbest = "loss"'
    directory = setting.begin(tmp_path / "run", examples=choosing, lr="lr = 0.3")  # so that the last is not the best
    deliver, files = keeping(setting, tmp_path)
    setting.serve(directory, deliver)
    tuned = Store(directory).tuned
    assert tuned is not None
    assert tuned < 3
    for file in files:
        assert Adapter.load(file).provenance["rounds"] == tuned
        assert Adapter.load(file).tuned == Adapter.load(Store(directory).adapter).tuned


def test_a_tuned_model_that_the_history_does_not_name_is_not_kept(setting, tmp_path):
    task = replace(recorded(setting.first(0)), keep=True)
    member = load_client(setting.owner(0), task.recipe, keeps=tmp_path / "kept.safetensors")
    assert Task.decode(task.encode()) == task

    def refuse(broadcast):
        raise FedKSeedError("another broadcast")

    with pytest.raises(FedKSeedError, match="another broadcast"):
        member.answer(task, lambda loss: None, refuse)
    assert not (tmp_path / "kept.safetensors").exists()
    assert member.answer(task, lambda loss: None) == (task.message, b"")
    assert not Adapter.load(tmp_path / "kept.safetensors").coefficients.any()


def test_an_upload_in_answer_to_the_tuned_model_is_left_out(setting, tmp_path):
    deliver, notes = setting.deliver(), Notes()

    def training(message):
        task = Task.decode(unpacked(message))
        if task.keep and task.client == 1:
            yield lacking(message)
        else:
            yield from deliver(message)

    setting.serve(setting.begin(tmp_path / "run"), training, notes=notes)
    assert notes.has("the tuned model: the answer of client 1 is left out: it was sent the tuned model, and answers")
    assert notes.has("2 of 3 clients have kept the tuned model")


@pytest.mark.parametrize("code", [2, 4, 5, 8])
def test_a_client_that_flower_reports_lost_is_asked_again_and_nothing_shows(setting, undisturbed, tmp_path, code):
    deliver, lost, notes = setting.deliver(), [], Notes()

    def losing(message):
        if (round_of(message), number_of(message)) == (1, 2) and not lost:
            lost.append(True)
            yield lost_to(message, code)
        else:
            yield from deliver(message)

    assert setting.serve(setting.begin(tmp_path / "run", ALL), losing, notes=notes).digest == undisturbed.digest
    assert notes.has(f"round 2: client 2 did not answer: {ERRORS[code]}")


def lacking(message: Message) -> Message:
    """The answer of a client that says that it has not kept what a difference is to, whatever it was sent."""
    task = Task.decode(unpacked(message))
    about = decode(task.message, kind_of(task.message))
    reply = Reply(Status.DONE, encode(Lack(about.run, about.round, task.client)))
    return Message(packed(reply.encode()), reply_to=message)


def test_a_client_that_lacks_what_it_was_sent_whole_is_left_out(setting, tmp_path):
    deliver, notes = setting.deliver(), Notes()

    def never_content(message):
        return [lacking(message)] if number_of(message) == 2 else deliver(message)

    result = setting.serve(setting.begin(tmp_path / "run", "minimum = 2"), never_content, notes=notes)
    assert [report["clients"] for report in result.reports] == [[0, 1]] * 3
    assert notes.has("round 1: the answer of client 2 is left out: expected a message of kind Upload, got Lack")


def test_a_client_that_lacks_a_message_and_goes_leaves_the_round_to_the_others(setting, tmp_path):
    """It was counted when it answered, and does not count when it does not answer again."""
    deliver, notes, gone = setting.deliver(), Notes(), []

    def leaving(message):
        if number_of(message) != 2 or round_of(message) == 0:
            yield from deliver(message)
        elif not gone:
            gone.append(NODES[2])
            yield lacking(message)

    directory = setting.begin(tmp_path / "run", "minimum = 2\ndeadline = 60.0\nattempts = 1\npatience = 0.5")
    result = setting.serve(directory, leaving, without(gone), notes)
    assert [report["clients"] for report in result.reports] == [[0, 1, 2], [0, 1], [0, 1]]


def test_too_few_who_answer_are_too_few_whatever_they_lack(setting, tmp_path):
    deliver, gone = setting.deliver(), []

    def leaving(message):
        if round_of(message) == 0 or number_of(message) == 0:
            yield from deliver(message)
        elif NODES[number_of(message)] not in gone:
            gone.append(NODES[number_of(message)])
            yield lacking(message)

    directory = setting.begin(tmp_path / "run", "minimum = 2\ndeadline = 2.0\nattempts = 2\npatience = 0.5")
    with pytest.raises(FedKSeedError, match="0 clients answered, 1 are needed"):
        setting.serve(directory, leaving, without(gone))
    assert len(Store(directory).reports()) == 1


def lost_to(message: Message, code: int) -> Message:
    """The SuperLink's answer for a node."""
    reply = Message(Error(code, "why"), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = 1
    return reply


def test_a_client_that_is_gone_is_waited_for_however_often(setting, undisturbed, tmp_path, monkeypatch):
    """Flower lists it until it is missed: a list that was asked for before that must not lead to asking it in vain."""
    monkeypatch.setattr(remote, "LOOK", 0.2)
    deliver, notes, back = setting.deliver(), Notes(), []
    times = iter(range(2 * remote.TRIES))

    def leaving(message):
        if (round_of(message), number_of(message)) == (1, 2) and next(times, None) is not None:
            back[:] = [time.monotonic() + 1.5 * remote.LOOK]
            yield lost_to(message, NODE_GONE)
        else:
            yield from deliver(message)

    def nodes():
        return NODES[:2] if back and time.monotonic() < back[0] else NODES

    result = setting.serve(setting.begin(tmp_path / "run", ALL), leaving, nodes, notes)
    assert result.digest == undisturbed.digest
    assert sum("client 2 did not answer: it is gone" in told for told in notes.told) == 2 * remote.TRIES


def test_replies_that_come_twice_or_from_an_old_round_are_told_and_change_nothing(setting, undisturbed, tmp_path):
    deliver, notes, old = setting.deliver(), Notes(), {}

    def repeating(message):
        (reply,) = deliver(message)
        yield reply
        yield reply
        key = round_of(message), number_of(message)
        old[key] = unpacked(reply)
        if key == (1, 1):
            again = Message(packed(old[0, 1]), reply_to=message)  # of round 1, in reply to nothing that is asked now
            again.metadata.__dict__["_reply_to_message_id"] = "0" * 64
            yield again

    assert setting.serve(setting.begin(tmp_path / "run", ALL), repeating, notes=notes).digest == undisturbed.digest
    assert sum("twice" in line for line in notes.told) == 13


@pytest.fixture
def soon(monkeypatch):
    """Clients are asked again after five seconds of the deadline's sixty, rather than thirty."""
    monkeypatch.setattr(remote, "AGAIN", 12)


@pytest.mark.parametrize("lost", ["message", "reply"])
def test_a_message_or_a_reply_that_is_lost_without_a_word_is_made_up_for(setting, undisturbed, tmp_path, lost, soon):
    deliver, notes, asked = setting.deliver(), Notes(), Counter()

    def losing(message):
        asked[round_of(message), number_of(message)] += 1
        first = asked[1, 2] == 1 and (round_of(message), number_of(message)) == (1, 2)
        if not first or lost == "reply":
            replies = list(deliver(message))
            yield from [] if first else replies

    assert setting.serve(setting.begin(tmp_path / "run", ALL), losing, notes=notes).digest == undisturbed.digest
    once = dict.fromkeys(product(range(4), range(3)), 1)  # in the last of four, they get the tuned model
    assert asked == once | {(1, 2): 2}
    assert notes.has("round 2: client 2 is silent; it is asked again")


def test_a_client_that_is_asked_again_answers_once(setting, undisturbed, tmp_path, soon):
    """Its first answer is only slow: the second is the same, and is left out."""
    deliver, kept = setting.deliver(), []

    def slow(message):
        replies = list(deliver(message))
        if (round_of(message), number_of(message)) != (1, 0):
            yield from replies
        elif kept:
            yield from [*kept, *replies]
        else:
            kept.extend(replies)

    result = setting.serve(setting.begin(tmp_path / "run", ALL), slow)
    assert result.digest == undisturbed.digest
    assert [r["clients"] for r in result.reports] == [[0, 1, 2]] * 3


def test_an_old_answer_in_place_of_a_new_one_is_left_out_and_the_round_goes_on(setting, tmp_path):
    deliver, notes, old = setting.deliver(), Notes(), {}

    def replaying(message):
        (reply,) = deliver(message)
        key = round_of(message), number_of(message)
        old[key] = unpacked(reply)
        yield Message(packed(old[0, 1]), reply_to=message) if key == (1, 1) else reply

    result = setting.serve(setting.begin(tmp_path / "run", ONE_OF_THREE), replaying, notes=notes)
    assert [r["clients"] for r in result.reports] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert notes.has("round 2: the answer of client 1 is left out: client 1 was sent round 1 and answered round 0")


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (b"", "at least 6 bytes, got 0"),
        (b"FKSt\x03\x00" + bytes(164), "not a fedkseed message"),
        (b"XXXX\x01\x00", "starts with b'XXXX'"),
        (b"FKSt\x03\x09", "status 0 to 3, got 9"),
        (b"FKSt\x07\x00", "speaks version 7"),
        (b"FKSt\x07\x02this is fedkseed 9", "refuses: this is fedkseed 9"),
        (b"FKSt\x01\x02" + "\x1b[2Jred\n\u202eevil".encode(), "refuses: [2Jred evil"),
        (None, "is it of another Flower app?"),
    ],
)
def test_a_client_that_answers_nonsense_is_left_out_and_the_round_goes_on(setting, tmp_path, broken, why):
    deliver, notes = setting.deliver(), Notes()

    def breaking(message):
        (reply,) = deliver(message)
        record = RecordDict({}) if broken is None else packed(broken)
        yield Message(record, reply_to=message) if number_of(message) == 0 else reply

    result = setting.serve(setting.begin(tmp_path / "run", ONE_OF_THREE), breaking, notes=notes)
    assert [r["clients"] for r in result.reports] == [[1, 2]] * 3
    assert notes.has(why), notes.told


def test_an_answer_signed_by_another_client_is_left_out(setting, tmp_path):
    deliver, notes, other = setting.deliver(), Notes(), {}

    def impersonating(message):
        (reply,) = deliver(message)
        other.setdefault(round_of(message), unpacked(reply))  # of client 0, who is asked first
        yield Message(packed(other[round_of(message)]), reply_to=message) if number_of(message) == 1 else reply

    result = setting.serve(setting.begin(tmp_path / "run", ONE_OF_THREE), impersonating, notes=notes)
    assert [r["clients"] for r in result.reports] == [[0, 2]] * 3
    assert notes.has("the answer of client 1 is left out: a reply of client 1 is signed by client 0")


def test_a_reply_that_came_after_its_time_between_two_rounds_is_still_fetched(tmp_path, monkeypatch):
    """Else a server over HTTPS holds it, perhaps an open file of all weights, until it ends."""
    monkeypatch.setattr(remote, "POLL", 0.0)
    fetched, answer = [], Reply(Status.DONE, b"an answer").encode()

    class Between:
        name, largest = "a carrier", 1 << 20

        def nodes(self):
            return [0]

        def dialled(self, node):
            return ""

        def send(self, parcels):
            return ["new" for _ in parcels]

        def arrived(self, keys):
            fetched.append({*keys})
            return [Arrival("old" if "old" in keys else "new", 0, answer)]

    ClientNumbers.register(tmp_path, range(1))
    clients = remote.RemoteClients(Between(), ClientNumbers(tmp_path, None), b"", 1, NetworkTable(), notes := Notes())
    clients._tasks["old"] = remote.OpenTask(0, 0, -1, 0, with_recipe=True, end=time.monotonic() - 1)
    assert dict(clients.transport(1, {0: b"broadcast"}, 1, lambda *answer: None)) == {0: b"an answer"}
    assert fetched == [{"old", "new"}, {"new"}]
    assert notes.has("the answer of client 0 to round 1 is too late")


def test_a_client_that_is_late_is_left_out_and_told_when_it_comes(setting, tmp_path):
    deliver, notes, kept = setting.deliver(), Notes(), []

    class Slow(LoopbackGrid):
        def pull_messages(self, message_ids):
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                if (reply.metadata.group_id, reply.metadata.src_node_id) == ("1", 111):
                    kept.append(reply)
                else:
                    yield reply
            if any(reply.metadata.group_id == "2" for reply in replies):
                yield from kept
                kept.clear()

    network = "minimum = 1\ndeadline = 5.0\nattempts = 1"
    result = serve(setting.begin(tmp_path / "run", network), Slow(lambda: NODES, deliver), notes)
    assert [r["clients"] for r in result.reports] == [[1, 2], [0, 1, 2], [0, 1, 2]]
    assert notes.has("round 1 goes on without client 0")
    assert notes.has("the answer of client 0 to round 1 is too late")
    assert notes.standings[0][:2] == ["waiting", "training"]
    assert notes.standings[0].index("late") < notes.standings[0].index("answered")
    assert notes.standings[0].count("answered") == 3  # two rounds, and the tuned model
    assert "late" not in notes.standings[1]


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A clock that is moved by the wait for answers, so that tests do not wait; a grace has half a second."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(remote, "GRACE", 0.5)
    monkeypatch.setattr(remote, "STARTING", 0.5)
    monkeypatch.setattr(remote.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: setattr(clock, "now", clock.now + seconds))
    return clock


@pytest.mark.parametrize(("network", "most"), [("", 0.5), ("grace = 0.2", 0.2), ("grace = 30.0", 30.0)])
def test_a_client_that_is_silent_costs_a_grace_and_not_the_deadline(setting, tmp_path, clock, network, most):
    deliver, begun = setting.deliver(), []

    def silent(message):
        if number_of(message) == 0:
            begun.append(clock.now)
        return [] if number_of(message) == 2 else deliver(message)

    text = f"minimum = 2\ndeadline = 600.0\nattempts = 1\n{network}"
    result = setting.serve(setting.begin(tmp_path / "run", text), silent)
    assert [r["clients"] for r in result.reports] == [[0, 1]] * 3
    assert all(b - a < most + 0.1 for a, b in pairwise(begun))
    assert all(b - a >= most for a, b in pairwise(begun)), "the others have had that long"


@pytest.mark.parametrize(
    ("network", "has_recipe", "connected", "took", "grace"),
    [
        ({}, True, True, 4, 10),
        ({}, True, True, 50, 25),
        ({}, False, True, 4, 60),
        ({}, False, True, 50, 100),
        ({}, False, False, 4, 10),
        ({"grace": 5.0}, False, True, 4, 5),
    ],
    ids=["usual", "long", "starts", "starts, long", "away", "as the recipe says"],
)
def test_one_that_has_just_started_is_waited_for_longer(tmp_path, network, has_recipe, connected, took, grace):
    """It loads the model: with the usual grace, a site that was killed once missed nine rounds of ten."""
    ClientNumbers.register(tmp_path, range(2))
    options = NetworkTable(**network)
    clients = remote.RemoteClients(None, ClientNumbers(tmp_path, None), b"", 1, options, Notes())  # type: ignore[arg-type]
    clients._online = dict.fromkeys(range(1 + connected), 0)
    clients._clients[1].has_recipe = has_recipe
    messages = dict.fromkeys(range(2), b"")
    exchange = remote.Exchange(0, messages, messages, 1, answered={0})
    attempt = remote.Attempt(0.0, 600.0, enough=False)
    over = [now for now in range(took, 300) if clients._grace_is_over(exchange, attempt, now)]
    assert over[0] == took + grace


def test_clients_have_the_names_of_their_keys(tmp_path):
    ClientNumbers.register(tmp_path, range(30))
    signing = SimpleNamespace(names={1: "it"})
    numbers = ClientNumbers(tmp_path, None)
    clients = remote.RemoteClients(None, numbers, b"", 1, NetworkTable(), Notes(), signing)  # type: ignore[arg-type]
    assert (clients.named(0), clients.named(0, 1)) == ("client 0", "clients 0, 1 (it)")
    assert clients.named(*range(30)).endswith(" 19 and 10 more")


def test_a_client_that_is_always_silent_is_not_asked_for_some_rounds(setting, tmp_path, clock, monkeypatch):
    """Else it would cost the others a grace in every round for ever."""
    monkeypatch.setattr(remote, "REST", 3)
    deliver, notes, asked = setting.deliver(), Notes(), Counter()

    def silent(message):
        asked[round_of(message), number_of(message)] += 1
        return [] if number_of(message) == 2 else deliver(message)

    directory = setting.begin(tmp_path / "run", "minimum = 2\ndeadline = 600.0\nattempts = 1", rounds="rounds = 8")
    result = setting.serve(directory, silent, notes=notes)
    assert [r["clients"] for r in result.reports] == [[0, 1]] * 8
    assert [round_ for round_ in range(8) if asked[round_, 2]] == [0, 1, 2, 6, 7]
    assert notes.told.count("connected: clients 0, 1, 2") == 1
    assert notes.has("round 1 counts the uploads of clients 0, 1, none of client 2")
    assert notes.has("client 2 has let 3 rounds in a row pass without an answer in time; it rests for 3 rounds")


def test_tasks_that_nobody_will_answer_any_more_are_forgotten(setting, tmp_path, clock, monkeypatch):
    """Else a server would keep one, and ask its carrier for it, for each round that a client has let pass."""
    monkeypatch.setattr(remote, "REST", 0)
    monkeypatch.setattr(remote, "LATE", 1.0)
    deliver, awaited = setting.deliver(), []

    class Counting(LoopbackGrid):
        def pull_messages(self, message_ids):
            awaited.append(len(message_ids))
            return super().pull_messages(message_ids)

    def silent(message):
        return [] if number_of(message) == 2 else deliver(message)

    network = "minimum = 2\ndeadline = 4.0\nattempts = 1"  # a round takes a grace of half a second
    directory = setting.begin(tmp_path / "run", network, rounds="rounds = 30")
    result = serve(directory, Counting(lambda: NODES, silent), Notes())
    assert [r["clients"] for r in result.reports] == [[0, 1]] * 30
    assert max(awaited) <= 3 + (4 + 2) / 0.5, "those of six seconds"


def test_a_client_whose_answers_cannot_be_used_is_not_asked_for_some_rounds(setting, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "REST", 3)
    deliver, notes, asked = setting.deliver(), Notes(), Counter()

    def breaking(message):
        asked[round_of(message), number_of(message)] += 1
        (reply,) = deliver(message)
        yield Message(packed(b"nonsense"), reply_to=message) if number_of(message) == 0 else reply

    directory = setting.begin(tmp_path / "run", "minimum = 2\ndeadline = 60.0", rounds="rounds = 6")
    result = setting.serve(directory, breaking, notes=notes)
    assert [r["clients"] for r in result.reports] == [[1, 2]] * 6
    assert [round_ for round_ in range(6) if asked[round_, 0]] == [0, 4], "three times in each"
    assert notes.has("client 0 has sent 3 answers that can't be used; it rests for 3 rounds")


def test_a_client_whose_answers_cannot_be_used_is_asked_where_all_are_needed(setting, undisturbed, tmp_path):
    deliver, broken = setting.deliver(), Counter()

    def mended(message):
        (reply,) = deliver(message)
        broken[number_of(message)] += 1
        first = number_of(message) == 0 and broken[0] <= 2
        yield Message(packed(b"nonsense"), reply_to=message) if first else reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "OFFENCES", 1)
        assert setting.serve(setting.begin(tmp_path / "run", ALL), mended).digest == undisturbed.digest


class Failing(LoopbackGrid):
    """A Grid whose calls about nodes and tasks fail a few times each, as when the SuperLink answers 500."""

    def __init__(self, *arguments, times: int = 3) -> None:
        super().__init__(*arguments)
        self.left = Counter(dict.fromkeys(("nodes", "push", "pull"), times))

    def fail(self, what: str) -> None:
        self.left[what] -= 1
        if self.left[what] >= 0:
            raise RuntimeError(f"Server error 500: database is locked, {what}")

    def get_node_ids(self):
        self.fail("nodes")
        return super().get_node_ids()

    def push_messages(self, messages):
        if any(message.metadata.message_type == MessageType.TRAIN for message in messages):
            self.fail("push")
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        sent = [self._sent[key] for key in message_ids if key in self._sent]
        if any(message.metadata.message_type == MessageType.TRAIN for message in sent):
            self.fail("pull")
        yield from super().pull_messages(message_ids)


def test_errors_of_flowers_do_not_end_a_run(setting, undisturbed, tmp_path):
    notes = Notes()
    grid = Failing(lambda: NODES, setting.deliver())
    assert serve(setting.begin(tmp_path / "run", ALL), grid, notes).digest == undisturbed.digest
    said = [line for line in notes.told if line.startswith("Flower can't")]
    assert len(said) == 3, "once for errors in a row"
    assert notes.has("Flower can't fetch answers (RuntimeError: Server error 500: database is locked, pull); trying")


def test_an_error_of_flowers_that_lasts_until_the_deadline_ends_the_process_and_not_the_run(setting, tmp_path):
    """A new process is started then (processes.py); as a `FedKSeedError` it would end the server."""
    directory = setting.begin(tmp_path / "run", "minimum = 3\ndeadline = 1.0\npatience = 0.5")
    grid = Failing(lambda: NODES, setting.deliver())
    grid.left["push"] = 1 << 30
    with pytest.raises(RuntimeError, match="database is locked, push"):
        serve(directory, grid, Notes())


def test_nobody_waits_for_a_client_whose_key_was_revoked(setting, tmp_path):
    directory, notes = setting.begin(tmp_path / "run", "minimum = 2\npatience = 600.0"), Notes()
    ClientNumbers.register(directory, range(3), revoked=[1])
    result = setting.serve(directory, nodes=lambda: (NODES[0], NODES[2]), notes=notes)
    assert [r["clients"] for r in result.reports] == [[0, 2]] * 3
    assert notes.has("without client 1")


@pytest.mark.parametrize(
    ("required", "said"),
    [
        ("[0, 1]", r"after 0\.5 s \[network\] required still lacks client 1: start them, or look at their logs"),
        ("[2, 3]", r"\[network\] required names \[3\], and no such client of 3 has a key"),
    ],
)
def test_a_run_begins_with_the_clients_that_it_must_have(setting, tmp_path, required, said):
    directory = setting.begin(tmp_path / "run", f"{ONE_OF_THREE}\nrequired = {required}")
    with pytest.raises(FedKSeedError, match=said):
        setting.serve(directory, nodes=lambda: (NODES[0], NODES[2]))
    present = setting.begin(tmp_path / "present", f"{ONE_OF_THREE}\nrequired = [0, 2]")
    result = setting.serve(present, nodes=lambda: (NODES[0], NODES[2]))
    assert [r["clients"] for r in result.reports] == [[0, 2]] * 3


def test_a_client_with_another_base_model_says_so_in_a_word_and_the_others_go_on(setting, tmp_path, capsys):
    other = AutoModelForCausalLM.from_pretrained(setting.model)
    other.model.norm.weight.data[0] += 1
    other.save_pretrained(tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "other" / name).write_bytes((setting.model / name).read_bytes())
    notes, workers = Notes(), setting.workers()
    owner = replace(setting.owner(2), model=str(tmp_path / "other"))
    workers[333] = TaskHandler(partial(load_client, owner))
    result = setting.serve(setting.begin(tmp_path / "run", ONE_OF_THREE), to_workers(workers), notes=notes)
    assert [r["clients"] for r in result.reports] == [[0, 1]] * 3
    (line,) = {line for line in notes.told if "client 2 refuses" in line and line.startswith("round 1")}
    assert line == "round 1: client 2 refuses: model"
    assert notes.standings[2][:9] == ["waiting", "training", "refused"] * 3
    log = capsys.readouterr().err
    assert "the message is for a base model with digest" in log
    assert "load the same weights, in the same type" in log


def go_on_without_the_third(setting, tmp_path):
    """A run whose third client has the model of another folder, and refuses."""
    notes, workers = Notes(), setting.workers()
    workers[333] = TaskHandler(partial(load_client, replace(setting.owner(2), model=str(tmp_path / "other"))))
    (tmp_path / "recipe.toml").write_text(setting.text(ONE_OF_THREE))
    begin(tmp_path / "recipe.toml", (), directory := tmp_path / "run", note=print)
    ClientNumbers.register(directory, range(3))
    result = setting.serve(directory, to_workers(workers), notes=notes)
    assert [r["clients"] for r in result.reports] == [[0, 1]] * 3
    assert notes.has("round 1: client 2 refuses: model")
    return directory, result


def test_a_client_with_another_tokenizer_of_the_same_weights_says_so_and_the_others_go_on(setting, tmp_path, capsys):
    shutil.copytree(setting.model, tmp_path / "other")
    table = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    del table["model"]["merges"][9:]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(table))
    directory, _ = go_on_without_the_third(setting, tmp_path)
    log = capsys.readouterr().err
    assert f"the tokenizer of {tmp_path / 'other'} is not the run's: unlike are its tokens of the same texts" in log
    expected = tokenizer_digest(load_tokenizer(str(setting.model)), "paper")
    assert Store(directory).load_recipe().model.tokenizer_digest == expected
    assert begin(tmp_path / "recipe.toml", (), directory, note=print).model.tokenizer_digest == expected


def test_a_client_with_the_same_weights_and_another_config_says_so_and_the_others_go_on(setting, tmp_path, capsys):
    setting = Setting(setting.folder, widened_folder(setting.model, tmp_path / "model"))
    shutil.copytree(setting.model, tmp_path / "other")
    about = json.loads((tmp_path / "other" / "config.json").read_text())
    about["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    (tmp_path / "other" / "config.json").write_text(json.dumps(about))
    directory, result = go_on_without_the_third(setting, tmp_path)
    assert f"the model {tmp_path / 'other'} computes otherwise than the run's" in capsys.readouterr().err
    expected = losses(load_model(str(setting.model)))
    assert Store(directory).load_recipe().model.losses == expected == Adapter.load(result.output).provenance["losses"]
    assert begin(tmp_path / "recipe.toml", (), directory, note=print).model.losses == expected


def test_a_server_is_watched_by_its_directory(setting, tmp_path):
    directory = setting.begin(tmp_path / "run")
    watched, views = Watched(directory), []
    assert watched.look().state == "not begun"

    class Looking(Notes):
        def clients(self, numbers, standing):
            super().clients(numbers, standing)
            views.append(watched.look())

    setting.serve(directory, notes=Looking())
    assert {view.state for view in views} == {"running"}
    assert [view.done for view in views] == sorted(view.done for view in views)
    clients = [view.moment.clients for view in views if view.done == 1 and "training" in view.moment.clients]
    assert clients[0] == {"training": [0, 1, 2]}
    assert {"training": [1, 2], "answered": [0]} in clients
    assert watched.look().state == "ended"


def test_a_node_that_nobody_knows_is_told_and_never_asked(setting, undisturbed, tmp_path):
    notes = Notes()
    result = setting.serve(setting.begin(tmp_path / "run"), nodes=lambda: (*NODES, 999), notes=notes)
    assert result.digest == undisturbed.digest
    assert notes.has("node 999 is none of the 3 clients")


def test_a_client_that_is_offline_is_skipped_and_said_so(setting, tmp_path):
    notes = Notes()
    result = setting.serve(setting.begin(tmp_path / "run", ONE_OF_THREE), nodes=lambda: NODES[:2], notes=notes)
    assert [r["clients"] for r in result.reports] == [[0, 1]] * 3
    assert notes.has("going on without client 2")
    assert notes.has("round 1: offline, left out unless back in time: client 2")
    assert {*notes.standings[2]} == {"offline"}


def test_too_few_clients_stop_the_run_and_it_goes_on_when_they_are_back(setting, undisturbed, tmp_path):
    directory, notes, deliver, gone = setting.begin(tmp_path / "run", SHORT), Notes(), setting.deliver(), []

    def leaving(message):
        if round_of(message) == 1:
            gone.append(NODES[0])
        if message.metadata.dst_node_id not in gone:
            yield from deliver(message)

    with pytest.raises(FedKSeedError, match=r"round 2: 2 clients answered, 3 are needed.*it goes on with this round"):
        setting.serve(directory, leaving, without(gone), notes)
    assert notes.has("trying again, 3 of 3")
    assert len(Store(directory).reports()) == 1
    assert setting.serve(directory).digest == undisturbed.digest


def test_too_few_clients_at_the_start_are_waited_for_and_then_told(setting, tmp_path):
    with pytest.raises(FedKSeedError, match=r"after 0.5 s 1 clients are connected, a round needs 3"):
        setting.serve(setting.begin(tmp_path / "run", ALL), nodes=lambda: NODES[:1])


def test_clients_that_all_refuse_end_the_round_at_once_with_their_reasons(setting, tmp_path):
    def refusing(message):
        yield Message(packed(Reply(Status.REFUSED, text="no, thank you").encode()), reply_to=message)

    slow = "minimum = 3\ndeadline = 600.0\nattempts = 3"
    with pytest.raises(FedKSeedError, match=r"0 clients answered, 3 are needed \(client 0: no, thank you;"):
        setting.serve(setting.begin(tmp_path / "run", slow), refusing)


def test_a_server_killed_after_any_round_goes_on_with_the_same_digest(setting, undisturbed, tmp_path):
    class Killed(BaseException):
        pass

    for round_ in range(3):
        directory, deliver = setting.begin(tmp_path / str(round_)), setting.deliver()

        def killing(message, deliver=deliver, round_=round_):
            if (round_of(message), number_of(message)) == (round_, 1):
                raise Killed
            yield from deliver(message)

        with pytest.raises(Killed):
            setting.serve(directory, killing)
        assert len(Store(directory).reports()) == round_
        assert setting.serve(directory).digest == undisturbed.digest


def test_a_run_does_not_go_on_with_other_clients_than_it_began_with(setting, tmp_path):
    directory = setting.begin(tmp_path / "run")
    setting.serve(directory)
    ClientNumbers.register(directory, range(2))
    with pytest.raises(FedKSeedError, match="a cohort of 3 can't be drawn from 2 clients"):
        setting.serve(directory)
    ClientNumbers.register(directory, range(4))
    with pytest.raises(FedKSeedError, match="began with a number of clients of 3, now it is 4"):
        setting.serve(directory, nodes=lambda: (*NODES, 444))


def test_a_server_without_data_evaluates_nothing_and_tunes_the_same(setting, undisturbed, tmp_path):
    notes = Notes()
    directory = setting.begin(tmp_path / "run", source='source = "/not/on/this/machine"')
    result = setting.serve(directory, notes=notes)
    assert result.digest == undisturbed.digest
    assert result.before.losses == []
    assert notes.has("there is no data at /not/on/this/machine on this machine: nothing is evaluated")


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ({"count": "count = 3"}, "split = 'dirichlet' shares out data that one party holds"),
        ({"held_out": "held_out = 0.1"}, "draws from the rows of all parties, which no party sees"),
        ({"algorithm": 'algorithm = "evofed"'}, "have to remember every round"),
        ({"eps": 'objective = "f.py:score"'}, "would run a function on the clients' machines"),
        (
            {"examples": 'every = 1\nvalidation = 0.5\nbest = "loss"', "source": 'source = "/nowhere"'},
            r"\[evaluation\] best = 'loss' chooses by held-out rows, and there is no data",
        ),
        (
            {"network": '[[evaluation.sets]]\nname = "own"\nclients = 0.1\n'},
            r"\[evaluation.sets\] 'own': clients = 0.1 keeps back rows .* no server sees over a network: take path",
        ),
    ],
)
def test_a_recipe_that_a_network_cannot_run_is_refused_before_anything_is_sent(setting, tmp_path, lines, match):
    directory = setting.begin(tmp_path / "run", **lines)
    with pytest.raises(FedKSeedError, match=match):
        setting.serve(directory, lambda message: pytest.fail("a message was sent"))


def test_a_minimum_above_the_cohort_is_refused():
    with pytest.raises(FedKSeedError, match="minimum = 4 is more than the 3 clients"):
        NetworkTable(minimum=4).minimum_of(3)
    assert [NetworkTable().minimum_of(count) for count in (1, 2, 3, 10)] == [1, 1, 2, 5]
