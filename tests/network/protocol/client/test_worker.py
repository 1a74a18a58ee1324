"""The worker as its own process, the socket to it, and the ClientApp that hands it bytes."""

import math
import os
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tomllib import loads
from types import SimpleNamespace

import numpy as np
import pytest

from fedkseed import FedKSeedError, Simulation, decode, encode
from fedkseed.files import locked
from fedkseed.network.protocol.client import training_client
from fedkseed.network.protocol.client import worker_process as process
from fedkseed.network.protocol.client.policy import Policy
from fedkseed.network.protocol.client.privacy_spent import LEDGER, PrivacyLedger
from fedkseed.network.protocol.client.recipe_consent import Owner, OwnerSettings
from fedkseed.network.protocol.client.task_handler import TaskHandler
from fedkseed.network.protocol.client.training_client import TrainingClient, load_client
from fedkseed.network.protocol.client.worker import BATCH_SEED, STEPS, AbandonedError, batch_secret, serve
from fedkseed.network.protocol.client.worker_process import ask_worker
from fedkseed.network.protocol.envelope import Reply, Status, Task, recipe_digest
from fedkseed.network.protocol.networked_recipe import recipe_for_clients
from fedkseed.network.protocol.signatures import ServerSigning, certificate, private_key, public_key
from fedkseed.recipe.reading import parse
from fedkseed.round import Round
from fedkseed.run.cohort import cohort
from fedkseed.run.privacy_plan import with_noise
from fedkseed.secure.accounting import epsilon_of
from fedkseed.secure.member import MaskingClient
from fedkseed.strategies.masked import simulated_key
from fedkseed.wire.records import Broadcast, Change, Masked, Secured, Upload

from ...accounts import amounts
from ...flower.conftest import recorded


@pytest.fixture(scope="module")
def first(setting) -> Task:
    return setting.first(1)


@pytest.fixture(scope="module")
def owner(setting) -> Owner:
    return setting.owner(1)


@pytest.fixture(scope="module")
def directory(owner, tmp_path_factory):
    """Of a client whose worker runs on from test to test, as it does in life: starting one takes seconds."""
    made = tmp_path_factory.mktemp("w") / "c"
    OwnerSettings(owner, idle=60.0).write(made)
    yield made
    if locked(made / process.LOCK):
        os.kill(int((made / process.LOCK).read_text()), signal.SIGKILL)
    for started in process._started.values():  # Python warns of those that nobody has waited for
        started.wait(60)


def longer(task: Task, steps: int) -> Task:
    """The same task with so many local steps."""
    message, recipe = decode(task.message, Broadcast), task.recipe.replace(b"steps = 3", f"steps = {steps}".encode())
    return Task(task.client, task.seconds, recipe_digest(recipe), recipe, encode(replace(message, steps=steps)))


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def test_one_worker_answers_task_after_task_and_only_its_user_can_reach_it(directory, first, owner):
    expected = TaskHandler(partial(load_client, owner)).reply(first.encode())
    assert expected.status is Status.DONE
    assert Reply.decode(ask_worker(first.encode(), directory)) == expected
    pid = (directory / process.LOCK).read_text()
    without = Task(first.client, first.seconds, first.digest, b"", first.message)
    assert Reply.decode(ask_worker(without.encode(), directory)) == expected
    assert (directory / process.LOCK).read_text() == pid
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / process.SOCKET).stat().st_mode) == 0o600
    with pytest.raises(FedKSeedError, match="has a worker"):
        serve(directory)


def test_a_worker_with_keys_refuses_a_task_that_is_not_the_servers_and_loads_nothing(owner, keys, first, tmp_path):
    """The real process: the attacker has the node id of client 1, and so reaches its ClientApp."""
    OwnerSettings(owner, 60.0, str(keys / "client-1"), str(keys / "ca.pem")).write(tmp_path / "c")
    publics = [public_key((keys / f"client-{k}.pub").read_bytes(), k) for k in range(2)]
    proofs = certificate(keys / "server.pem"), certificate(keys / "ca.pem")
    genuine = ServerSigning(private_key(keys / "server.key"), *proofs, publics, bytes(16))
    attacker = ServerSigning(private_key(keys / "client-0"), *proofs, publics, bytes(16))
    first = recorded(first)
    try:
        for forged in (first, attacker.signed(first), genuine.signed(replace(first, client=0))):
            reply = Reply.decode(ask_worker(forged.encode(), tmp_path / "c"))
            assert (reply.status, reply.text) == (Status.REFUSED, "task")
        assert "is not signed" in (tmp_path / "c" / process.LOG).read_text()
        task = genuine.signed(first)
        reply = Reply.decode(ask_worker(task.encode(), tmp_path / "c"))
        genuine.require(1, task.head, task.message, reply.message, reply.signature)
        again = Reply.decode(ask_worker(task.encode(), tmp_path / "c"))
        assert (again.status, again.text) == (Status.FAILED, "task")
    finally:
        lock = tmp_path / "c" / process.LOCK
        if locked(lock):
            os.kill(int(lock.read_text()), signal.SIGKILL)
            process._started[tmp_path / "c"].wait(60)


def test_a_worker_that_starts_is_not_started_twice_and_one_that_has_ended_is_no_zombie(
    owner, first, tmp_path, monkeypatch
):
    """Importing PyTorch takes seconds, in which a server can go on with another round, whose task needs it, too."""
    OwnerSettings(owner, idle=60.0).write(tmp_path / "c")
    real, started = process.start_worker, []
    monkeypatch.setattr(process, "start_worker", lambda directory: started.append(real(directory)) or started[-1])
    asked = [threading.Thread(target=ask_worker, args=(first.encode(), tmp_path / "c")) for _ in range(2)]
    try:
        asked[0].start()
        wait_for(lambda: started)
        asked[1].start()
        for thread in asked:
            thread.join(120)
        assert len(started) == 1
        os.kill(started[0].pid, signal.SIGKILL)
        wait_for(lambda: not locked(tmp_path / "c" / process.LOCK))
        assert Reply.decode(ask_worker(first.encode(), tmp_path / "c")).status is Status.DONE
        assert started[0].returncode == -signal.SIGKILL, "it was waited for"
    finally:
        for one in started:
            one.kill()
            one.wait(60)


def test_batches_are_drawn_by_a_secret_of_the_clients(owner, first, tmp_path):
    """By the recipe's seed a server knows each batch: 200 scalars of 40 rows are equations for each row's own."""
    public = TaskHandler(partial(load_client, owner)).reply(first.encode())
    made = {TaskHandler(partial(load_client, replace(owner, secret=k))).reply(first.encode()).message for k in (1, 2)}
    assert len({public.message, *made}) == 3
    again = TaskHandler(partial(load_client, replace(owner, secret=1))).reply(first.encode()).message
    assert again in made, "of one run, also by a worker that was started again"
    moved = replace(first, nonce=b"x" * 16)
    other = TaskHandler(partial(load_client, replace(owner, secret=1))).reply(moved.encode()).message
    assert other not in made, "the attack: another model for the same batches, under another nonce"
    kept = batch_secret(tmp_path)
    assert batch_secret(tmp_path) == kept > 2**64
    assert stat.S_IMODE((tmp_path / BATCH_SEED).stat().st_mode) == 0o600
    (tmp_path / BATCH_SEED).write_text("no number")
    with pytest.raises(FedKSeedError, match="holds no secret"):
        batch_secret(tmp_path)
    assert Policy().data.secret_batches


def private_task(setting, client: int, **changes: str) -> Task:
    """The task of a client in the first round of a recipe that protects single examples; two of three take part."""
    more = '[privacy]\nunit = "example"\nepsilon = 8.0\nnorm = 1.0\n'
    recipe = with_noise(parse(loads(setting.text(more=more, cohort="cohort = 2"))), 3)
    text = recipe_for_clients(recipe, 3)
    for before, after in changes.items():
        assert before.encode() in text
        text = text.replace(before.encode(), after.encode())
    with closing(Simulation(recipe)) as simulation:
        strategy = simulation.strategy
        message = encode(strategy.server.broadcast(strategy.server.init()))
    return Task(client, 600.0, recipe_digest(text), text, message)


def test_a_client_adds_its_own_noise_for_the_rounds_of_the_plan_and_no_others(setting, owner, tmp_path):
    recipe = parse(loads(setting.text(more='[privacy]\nunit = "example"\nepsilon = 8.0\nnorm = 1.0\n')))
    inside, other = cohort(recipe.seed, 0, 3, 2, recipe.clients.draw)
    (outside,) = {0, 1, 2} - {inside, other}
    task, said = private_task(setting, inside), []

    def replied(asked: Task, secret: int | None = 1) -> Reply:
        (folder := tmp_path / str(secret)).mkdir(exist_ok=True)
        follow = partial(load_client, replace(owner, secret=secret), ledger=PrivacyLedger(folder / LEDGER))
        return TaskHandler(follow, disclose=lambda code, text: said.append(text) or text).reply(asked.encode())

    upload = decode(replied(task).message, Upload)
    assert math.isnan(upload.loss)
    assert (upload.examples, upload.skipped) == (1, 0)
    made = [replied(task).message, replied(task, 2).message, replied(replace(task, nonce=b"x" * 16)).message]
    assert made[0] == encode(upload)
    assert len({*made}) == 3
    answers, each = amounts(tmp_path / "1" / LEDGER)  # of one round of three in each of two runs
    assert answers == 2
    assert epsilon_of(1, 3 * each / 2, 1e-6) == pytest.approx(8)
    assert replied(task, None).status is Status.REFUSED
    assert "secret_batches = true" in said[-1]
    assert replied(private_task(setting, outside)).status is Status.REFUSED
    assert "has no noise for rounds out of turn" in said[-1]
    # A server that counts fewer rounds than its plan has would get less noise than was promised.
    few = replied(private_task(setting, inside, **{"times = 3": "times = 1"}))
    assert few.status is Status.REFUSED
    assert "leave times out" in said[-1]


@pytest.mark.parametrize("changes", [{"lr": 1e-30}, {"eps": 1.0}, {"clip": 1e-3}])
def test_a_message_that_asks_for_another_rate_than_its_recipe_is_refused(owner, first, changes):
    """With lr near 0, all scalars of a round are of one model."""
    message = replace(decode(first.message, Broadcast), **changes)
    reply = TaskHandler(partial(load_client, owner)).reply(replace(first, message=encode(message)).encode())
    assert (reply.status, reply.text) == (Status.REFUSED, "task")


def test_a_worker_killed_at_work_is_told_and_the_next_task_starts_another(directory, first):
    long, replies = longer(first, 100_000), []
    thread = threading.Thread(target=lambda: replies.append(Reply.decode(ask_worker(long.encode(), directory))))
    thread.start()
    lock = directory / process.LOCK
    wait_for(lambda: lock.exists() and locked(lock) and (directory / process.SOCKET).exists())
    time.sleep(0.5)
    os.kill(int(lock.read_text()), signal.SIGKILL)
    thread.join(60)
    assert replies[0].status is Status.FAILED
    assert replies[0].text == "worker"
    assert "the worker ended in the middle of a task" in (directory / process.LOG).read_text()
    wait_for(lambda: not locked(lock))  # its socket may outlive its end by a moment
    assert Reply.decode(ask_worker(first.encode(), directory)).status is Status.DONE


def test_a_worker_killed_at_work_goes_on_with_its_steps_when_the_task_comes_again(directory, first, owner):
    long, replies = longer(first, 30), []
    expected = TaskHandler(partial(load_client, owner)).reply(long.encode())
    thread = threading.Thread(target=lambda: replies.append(Reply.decode(ask_worker(long.encode(), directory))))
    lock, kept = directory / process.LOCK, directory / STEPS
    kept.unlink(missing_ok=True)
    thread.start()
    wait_for(kept.exists, process.START)
    os.kill(int(lock.read_text()), signal.SIGKILL)
    thread.join(60)
    assert replies[0].status is Status.FAILED
    wait_for(lambda: not locked(lock))
    so_far = kept.stat().st_size
    assert Reply.decode(ask_worker(long.encode(), directory)) == expected
    assert so_far < kept.stat().st_size, "the worker was killed before its last step"


KINDS = {
    "two points": lambda setting: setting.first(1),
    "importance": lambda setting: setting.first(1, algorithm='algorithm = "fedkseed-pro"'),
    "derivatives": lambda setting: setting.first(1, algorithm='algorithm = "fedkseed-backprop"'),
    "noise": lambda setting: private_task(setting, cohort(parse(loads(setting.text())).seed, 0, 3, 2, "in turns")[0]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_that_is_given_up_within_its_steps_goes_on_and_its_upload_is_that_of_an_undisturbed_client(
    setting, owner, tmp_path, kind
):
    """Each time by a client that was loaded anew, as after a power cut; at most the step at work is lost."""
    task, secret, passes = KINDS[kind](setting), replace(owner, secret=1), list[int]()

    def load(recipe: bytes, steps: Path | None = tmp_path / STEPS, of: Owner = secret) -> TrainingClient:
        member = load_client(of, recipe, ledger=PrivacyLedger(tmp_path / LEDGER), steps=steps)
        member.setup.model.register_forward_pre_hook(lambda *_: passes.append(1))
        return member

    def count(handler: TaskHandler, asked: Task, gone: Callable[[], bool] = lambda: False) -> tuple[Reply | None, int]:
        passes.clear()
        with suppress(AbandonedError):
            return handler.reply(asked.encode(), gone), len(passes)
        return None, len(passes)

    expected, whole = count(TaskHandler(partial(load, steps=None)), task)
    assert expected is not None
    assert expected.status is Status.DONE
    assert whole % 3 == 0, "of three steps"
    kept = tmp_path / STEPS
    kept.touch()
    for _ in range(2):  # the process that waits is gone as soon as one more step is kept
        before = kept.read_bytes()
        assert count(TaskHandler(load), task, lambda was=before: kept.read_bytes() != was) == (None, whole // 3)
    assert count(TaskHandler(load), task) == (expected, whole // 3)
    assert count(TaskHandler(load), task) == (expected, 0), "the upload was lost, and costs no pass"
    # Nothing of it is taken up in another run, for another client, by another secret, or with other rows.
    other = replace(secret, secret=2)
    for asked, follow in (
        (replace(task, nonce=b"x" * 16), load),
        (task, partial(load, of=other)),
        (task, partial(load, of=replace(secret, data=setting.owner(0).data))),
    ):
        assert count(TaskHandler(follow), asked)[1] == whole
        assert count(TaskHandler(load), task) == (expected, whole)


def test_a_worker_turns_to_the_next_task_when_nobody_waits_for_this_one(directory, first):
    assert Reply.decode(ask_worker(first.encode(), directory)).status is Status.DONE
    pid = (directory / process.LOCK).read_text()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(process.socket_path(directory))
        process.send(connection, longer(first, 1_000_000).encode(), 60)
        time.sleep(1)
    assert Reply.decode(ask_worker(first.encode(), directory)).status is Status.DONE
    assert (directory / process.LOCK).read_text() == pid


def test_a_worker_ends_after_its_idle_time_and_leaves_no_socket(owner, tmp_path):
    OwnerSettings(owner, idle=0.2).write(tmp_path / "c")
    serve(tmp_path / "c")
    assert not (tmp_path / "c" / process.SOCKET).exists()


def test_a_task_whose_time_is_over_is_given_up(first, owner):
    worker = TaskHandler(partial(load_client, owner))
    assert worker.reply(first.encode()).status is Status.DONE
    with pytest.raises(AbandonedError):
        worker.reply(replace(longer(first, 1_000_000), seconds=0.2).encode())
    fresh = TaskHandler(partial(load_client, owner))
    assert worker.reply(first.encode()) == fresh.reply(first.encode()), "what is given up must leave no trace"


def test_a_task_that_comes_again_is_not_worked_on_again(first, owner):
    member = load_client(owner, first.recipe)
    steps = []

    def counting(task, *more):
        steps.append(task.message)
        return member.answer(task, *more)

    worker = TaskHandler(lambda recipe: SimpleNamespace(answer=counting, afterwards=member.afterwards))
    again = replace(first, seconds=1.0, recipe=b"")
    assert worker.reply(first.encode()) == worker.reply(again.encode())
    assert len(steps) == 1
    worker.reply(replace(first, client=2).encode())
    assert len(steps) == 2


def test_tasks_that_cannot_be_answered_are_refused_with_a_word_and_the_log_says_why(first, owner, capsys):
    worker = TaskHandler(partial(load_client, owner))
    unknown = replace(first, recipe=b"")
    assert worker.reply(unknown.encode()) == Reply(Status.UNPREPARED)
    assert worker.reply(b"nonsense of many bytes") == Reply(Status.REFUSED, text="task")
    assert "starts with b'nons'" in capsys.readouterr().err
    damaged = replace(first, message=first.message[:-1] + b"\0")
    assert worker.reply(damaged.encode()).status is Status.REFUSED
    wrong = TaskHandler(partial(load_client, replace(owner, model="/no/model"))).reply(first.encode())
    assert wrong == Reply(Status.REFUSED, text="model")
    assert "no model at /no/model" in capsys.readouterr().err
    assert worker.reply(first.encode()).status is Status.DONE


def test_a_worker_that_cannot_start_says_why(tmp_path):
    (tmp_path / "c").mkdir()
    reply = Reply.decode(ask_worker(Task(0, 1.0, bytes(16), b"", b"").encode(), tmp_path / "c"))
    assert (reply.status, reply.text) == (Status.FAILED, "worker")
    assert "the worker ended with code 1: fedkseed: can't read" in (tmp_path / "c" / process.LOG).read_text()


def test_a_directory_with_too_long_a_path_is_refused(tmp_path, first):
    refused = Reply(Status.REFUSED, text="worker")
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    assert Reply.decode(ask_worker(first.encode(), deep)) == refused
    assert "too long for a socket" in (deep / process.LOG).read_text()


def test_frames_arrive_whole_or_are_refused():
    here, there = socket.socketpair()
    with here, there:
        data = np.random.default_rng(0).bytes(3 << 20)
        sender = threading.Thread(target=process.send, args=(here, data, 10.0))
        sender.start()
        assert process.receive(there, 10.0) == data
        sender.join()
        here.sendall(struct.pack("<I", process.MAX_MESSAGE + 1))
        with pytest.raises(FedKSeedError, match="are announced"):
            process.receive(there, 10.0)
        here.sendall(struct.pack("<I", 5) + b"abc")
        with pytest.raises(TimeoutError):
            process.receive(there, 0.05)
        assert not process.gone(there)
        here.sendall(struct.pack("<I", 5))
        here.close()
        with pytest.raises(FedKSeedError, match="closed the connection after 0 of 5 bytes"):
            process.receive(there, 10.0)
        assert process.gone(there)


def asking(task: Task, **changes: object) -> Task:
    """The same task, whose message asks for something else than its recipe."""
    return replace(task, message=encode(replace(decode(task.message, Broadcast), **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 1, "probes": 1 << 24},  # in a step, between two looks at the clock
        {"steps": 1},
        {"steps": 300, "probes": 2},
        {"wire": "exact"},
        {"round": 3},
        {"round": (1 << 32) - 1},
    ],
    ids=str,
)
def test_a_message_that_asks_for_more_than_its_recipe_is_refused(first, owner, capsys, changes):
    worker = TaskHandler(partial(load_client, owner))
    assert worker.reply(asking(first, **changes).encode()) == Reply(Status.REFUSED, text="task")
    assert "its recipe says" in (said := capsys.readouterr().err) or "the recipe has 3 rounds" in said


def test_coefficients_of_one_step_are_not_had_by_a_rate_that_ruins_the_model_after_one_step(setting, owner, capsys):
    """The attack: no loss after the first step is finite, and K numbers are the derivatives of one batch."""
    ruinous = 'algorithm = "fedkseed-backprop"\nwire = "exact"'
    rate = 'max_new_tokens = 4\n[derivatives]\noptimizer = "sgd"\nlr = 1e30'
    asked = setting.first(1, algorithm=ruinous, max_new_tokens=rate)
    had = decode(TaskHandler(partial(load_client, owner)).reply(asked.encode()).message, Change)
    assert (had.skipped, bool(had.values.any())) == (2, True), "one step of three, where the owner allows that"
    careful = limited(owner, min_steps=3)
    assert TaskHandler(partial(load_client, careful)).reply(asked.encode()) == Reply(Status.REFUSED, text="policy")
    assert "1 steps had finite derivatives, the policy says min_steps = 3" in capsys.readouterr().err
    usual = setting.first(1, algorithm='algorithm = "fedkseed-backprop"')
    assert TaskHandler(partial(load_client, careful)).reply(usual.encode()).status is Status.DONE


def test_a_server_cannot_choose_with_whom_a_clients_upload_is_added_up(setting, owner, capsys):
    """The attack: two clients work with the server, which asks the third of them all in a round of three."""
    message, asked = masked_round(setting, owner)
    assert len(decode(asked(3, message).message, Masked).bundles) == 1, "of three holders, shares of two follow"
    for count in (4, 30):
        assert asked(count, message) == Reply(Status.REFUSED, text="task")
        assert f"of {count} clients the recipe's seed draws" in capsys.readouterr().err


def masked_round(setting, owner: Owner) -> tuple[bytes, Callable[[int, bytes], Reply]]:
    """The message to client 1 in a masked round, and its reply to a message in a run with so many clients."""
    recipe = parse(loads(setting.text(more="[secure]\nnorm = 0.05\n")))
    strategy = Simulation(recipe).strategy

    def masks(number: int, nonce: bytes) -> MaskingClient:
        return MaskingClient(number, simulated_key(recipe.seed, number))

    def asked(count: int, message: bytes) -> Reply:
        text, worker = recipe_for_clients(recipe, count), TaskHandler(partial(load_client, owner, masks=masks))
        return worker.reply(Task(1, 600.0, recipe_digest(text), text, message).encode())

    return Round.begin(strategy, strategy.server.init(), range(3)).whole[1], asked


def test_a_client_with_masks_sends_nothing_in_the_clear(setting, owner, capsys):
    """The attack: the plain broadcast of the same round, to a client that follows a recipe with [secure]."""
    whole, asked = masked_round(setting, owner)
    message = decode(whole, Secured)
    for data in (message.broadcast, encode(replace(message, broadcast=encode(message)))):
        assert asked(3, data) == Reply(Status.REFUSED, text="task")
        assert "message" in capsys.readouterr().err


def test_a_task_may_not_take_longer_than_the_owner_allows(first, owner, capsys):
    reply = TaskHandler(partial(load_client, limited(owner, max_seconds=1e-9))).reply(first.encode())
    assert reply == Reply(Status.REFUSED, text="policy")
    assert "longer than the policy's max_seconds = 1e-09" in capsys.readouterr().err


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Seconds by which the clock is ahead."""
    ahead, monotonic = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + ahead[0])
    return ahead


def limited(owner: Owner, **limits: float) -> Owner:
    training = owner.policy.training.model_copy(update=limits)
    return replace(owner, policy=owner.policy.model_copy(update={"training": training}))


@pytest.mark.parametrize("name", ["tokenizer_of", "build", "own_share"])
def test_the_time_in_which_a_recipes_model_and_rows_are_loaded_counts(first, owner, clock, monkeypatch, capsys, name):
    """The attack: recipe after recipe that wants the model loaded and quantised in another way."""
    load = getattr(training_client, name)

    def slow(*args, **options):
        clock[0] += 5000.0
        return load(*args, **options)

    monkeypatch.setattr(training_client, name, slow)
    worker = TaskHandler(partial(load_client, limited(owner, max_seconds=3600.0)))
    assert worker.reply(replace(first, seconds=1e9).encode()) == Reply(Status.REFUSED, text="policy")
    assert "longer than the policy's max_seconds = 3600" in capsys.readouterr().err
    clock[0] = 0.0
    slow_once = TaskHandler(partial(load_client, limited(owner, max_seconds=7200.0)))
    for number in range(3):
        task = first if not number else replace(first, recipe=b"", seconds=1e9, nonce=bytes([number] * 16))
        assert slow_once.reply(replace(task, seconds=1e9).encode()).status is Status.DONE, "later tasks load nothing"


def test_the_time_in_which_an_objective_writes_answers_counts_token_by_token(setting, owner, clock, capsys):
    """The attack: 1,024 tokens for each row of a batch, of which a step asks twice, and no step is ever done."""
    asked = setting.first(1, steps='steps = 3\nobjective = "exact match"', max_new_tokens="max_new_tokens = 64")
    member, passes = load_client(limited(owner, max_seconds=35.0), asked.recipe), []

    def slow(*_):
        passes.append(clock[0])
        clock[0] += 10.0

    with member.setup.model.register_forward_pre_hook(slow):
        reply = TaskHandler(lambda recipe: member).reply(replace(asked, seconds=1e9).encode())
    assert reply == Reply(Status.REFUSED, text="policy")
    assert len(passes) == 4
    assert not member.setup.model._forward_pre_hooks, "none is left behind"
    assert "longer than the policy's max_seconds = 35" in capsys.readouterr().err


def test_an_error_that_nobody_foresaw_is_a_word_to_the_server_and_a_traceback_in_the_log(first, owner, capsys):
    """By a GPU that is full, say; PyTorch's texts have sizes, paths and pieces of code."""
    member = load_client(owner, first.recipe)
    member.examples = []  # no batch can be made of none
    reply = TaskHandler(lambda recipe: member).reply(first.encode())
    assert reply == Reply(Status.FAILED, text="error")
    assert "Traceback" in capsys.readouterr().err


def test_the_relay_sends_no_text_of_the_systems_either(first, tmp_path):
    """A directory that is not there any more: the system's error names its path."""
    gone = tmp_path / "secret-project"
    assert Reply.decode(ask_worker(first.encode(), gone)) == Reply(Status.FAILED, text="worker")


def test_a_task_of_another_release_is_refused_as_such(first, tmp_path):
    (tmp_path / "c").mkdir()
    other = bytearray(first.encode())
    other[4] += 1
    assert Reply.decode(ask_worker(bytes(other), tmp_path / "c")) == Reply(Status.REFUSED, text="release")
