"""Contract: every algorithm x every property that a federation rests on, with real messages and a real model."""

import math
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tomllib import loads

import numpy as np
import psutil
import pytest
import torch

from fedkseed import Broadcast, Client, FedKSeedError, Run, Upload, answer, decode, encode, hold, run_round, start
from fedkseed.data.batches import Batch
from fedkseed.models.loss import batch_loss, graph_loss, output_loss
from fedkseed.models.peft_adapters import PATTERNS, attach
from fedkseed.randomness import Purpose, draw_directions, generator
from fedkseed.recipe.algorithms import ALGORITHMS, OUTPUT, algorithm_of
from fedkseed.recipe.reading import load_recipe, parse
from fedkseed.recipe.schema import (
    ClientsTable,
    DerivativesTable,
    DirectionsTable,
    ModelTable,
    PeftTable,
    Recipe,
    TrainingTable,
)
from fedkseed.round import Round, decode_once
from fedkseed.run.progress import Silent
from fedkseed.run.simulation import Simulation
from fedkseed.run.store import Store
from fedkseed.strategies.replay import Replay
from fedkseed.weights.full import FullWeights
from fedkseed.weights.layout import Layout
from fedkseed.wire.numbers import WIRES, scalar
from fedkseed.wire.records import Change, Delta, History, Masked, Secured, Shares, Survivors, Values

from .conftest import EVERYWHERE, recipe_text, tiny_llama
from .wire.codec_calls import counted

NEWCOMER = (1 << 32) - 1  # number of a client that has seen no round
MIXED = "mixed"  # fedkseed, where clients 5 and 7 backpropagate and the others run the model forward
OWN = str(Path(__file__).parents[1] / "docs" / "examples" / "strategy.py:median")  # a stranger's, see docs/extending.md
every_algorithm = pytest.mark.parametrize("name", [*ALGORITHMS, MIXED, OWN], ids=lambda name: Path(name).name)
POOLED = [name for name, algorithm in ALGORITHMS.items() if algorithm.pooled]
REPLAYED = [name for name, algorithm in ALGORITHMS.items() if algorithm.strategy is Replay]
TRAINING = TrainingTable(rounds=5, steps=6, lr=1e-3, eps=1e-3)
BYTES_OF_SCALARS = {"fedkseed", "fedkseed-pro", "unlimited-seeds", "uplink-seeds", MIXED, OWN}


class Federation:
    """Four clients with data of their own, each with its own copy of the model."""

    def __init__(self, name: str, family: str = "hadamard", dtype: torch.dtype = torch.float32) -> None:
        self.algorithm, self.dtype = algorithm_of("fedkseed" if name == MIXED else name), dtype
        self.backpropagating = {5, 7} if name == MIXED else set()
        self.recipe = Recipe(
            model=ModelTable(name="tiny"),
            clients=ClientsTable(backpropagating=0.5 if name == MIXED else 0.0),
            directions=DirectionsTable(family=family, size=64),
            training=TRAINING.model_copy(update={"algorithm": "fedkseed" if name == MIXED else name}),
            derivatives=DerivativesTable(lr=1e-3),
        )
        self.pool = self.algorithm.pool(self.recipe)
        self.clients = {number: self.client(number) for number in (2, 3, 5, 7)}
        first = self.clients[2].weights
        start = first.values() if isinstance(first, FullWeights) else np.empty(0, np.float32)
        tensors = tuple((entry.number, entry.tensor.numel()) for entry in first.layout.tuned)
        self.strategy = self.algorithm.make(self.recipe, Run(self.pool, first.base_digest), start, tensors)
        self.messages: list[tuple[dict[int, bytes], dict[int, bytes]]] = []

    def client(self, number: int) -> Client:
        model = tiny_llama().to(self.dtype)
        if self.algorithm.adapts:
            model = attach(model, self.algorithm.tuned, PeftTable(virtual_tokens=3), 1)

        def batches(round_: int):
            rng = generator(0, Purpose.BATCHES, round_, number)
            while True:
                tokens = torch.from_numpy(rng.integers(0, 400, (2, 12)))
                yield Batch(tokens, torch.ones_like(tokens), tokens)

        return Client(
            number,
            self.hold(model),
            10 + number,
            batches,
            lambda batch: batch_loss(model, batch),
            graph=self.graph(number, model),
        )

    def graph(self, number: int, model):
        if self.algorithm.local == OUTPUT:
            return lambda batch: output_loss(model, batch)
        if self.algorithm.backpropagates or number in self.backpropagating:
            return lambda batch: graph_loss(model, batch)
        return None

    def hold(self, model):
        if self.algorithm.pooled:
            return hold(model, self.pool, ["lm_head*"] if self.algorithm.tuned == "output" else ["*"])
        return FullWeights(Layout(model, PATTERNS.get(self.algorithm.tuned, ("*",))), self.pool)

    def transport(self, messages):
        replies = {n: answer(self.strategy, message, self.clients[n]) for n, message in messages.items()}
        self.messages.append((dict(messages), replies))
        return replies.items()

    def run(self, rounds: int, cohort: tuple[int, ...] = (2, 3, 5, 7), state=None):
        state = self.strategy.server.init() if state is None else state
        for _ in range(rounds):
            state, report = run_round(self.strategy, state, [n for n in self.clients if n in cohort], self.transport)
        return state, report

    def message(self, state, client: int = 5) -> bytes:
        return Round.begin(self.strategy, state, [client]).whole[client]


def changed(federation: Federation, **changes):
    """The federation's strategy with other local steps."""
    settings = federation.strategy.settings
    return federation.algorithm.strategy_of(replace(settings, local=replace(settings.local, **changes)))


def same(one, other) -> bool:
    """Are two states equal, bit for bit?"""
    pairs = [(np.asarray(getattr(one, n)), np.asarray(getattr(other, n))) for n in type(one).__slots__]
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def moved(federation: Federation, number: int, down: Broadcast, up: Upload | Change) -> np.ndarray:
    """The c with which a client ends round 1, by its messages alone."""
    c = down.coefficients.copy()
    if isinstance(up, Change):
        return c + up.values
    drawn = draw_directions(federation.pool.key, 1, number, 6, federation.pool.size, down.probabilities)
    for j, rho in zip(drawn[up.found], up.scalars[up.found], strict=True):
        c[j] += np.float32(-down.lr * float(rho))
    return c


@pytest.mark.parametrize("name", [*POOLED, MIXED])
@pytest.mark.parametrize("family", EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_model_rebuilt_from_messages_is_the_one_that_the_client_trained(name, family, dtype):
    federation = Federation(name, family, dtype)
    federation.run(2)
    messages, replies = federation.messages[-1]
    for number, reply in replies.items():
        trained = federation.clients[number].weights
        tuned = ["lm_head*"] if federation.algorithm.tuned == "output" else ["*"]
        rebuilt = hold(tiny_llama().to(dtype), federation.pool, tuned, "materialized")
        down, up = decode(messages[number], Broadcast), decode(reply, *federation.strategy.aggregator.replies)
        c = moved(federation, number, down, up)
        assert c.any()
        rebuilt.load(c)
        assert trained.digest() == rebuilt.digest()


@pytest.mark.parametrize("name", ["fedkseed", "fedkseed-pro", MIXED])
@pytest.mark.parametrize("wire", WIRES)
def test_server_and_clients_hold_the_same_model_whatever_numbers_travel_like(name, wire):
    """Replayed from messages alone, a client's steps end at its c; the server's next c is the mean of those."""
    federation = Federation(name)
    settings = changed(federation, lr=1e-2 if wire == "sign" else 1e-3).settings
    federation.strategy = federation.algorithm.strategy_of(replace(settings, wire=wire))
    before, _ = federation.run(1)
    after, report = federation.run(1, state=before)
    messages, replies = federation.messages[-1]
    ended = {}
    for number, reply in replies.items():
        down, up = decode(messages[number], Broadcast), decode(reply, *federation.strategy.aggregator.replies)
        c = moved(federation, number, down, up)
        assert isinstance(up, Change) or (set(np.abs(up.scalars)) == {1}) == (wire == "sign")
        assert federation.clients[number].weights.c.tobytes() == c.tobytes()
        ended[federation.clients[number].examples] = c.astype(float)
    mean = sum(examples * c for examples, c in ended.items()) / sum(ended)
    kept_back = before.coefficients - decode(messages[2], Broadcast).coefficients
    assert (np.abs(kept_back).max() > 1e-6) == (wire != "exact")
    np.testing.assert_allclose(after.coefficients, mean + kept_back, atol=2e-6)
    assert report.skipped == 0


@pytest.mark.parametrize("name", ["uplink-seeds", "unlimited-seeds", "decomfl"])
@pytest.mark.parametrize("family", ["gaussian", "rademacher"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pairs_and_shared_scalars_rebuild_the_model_of_the_client_that_sent_them(name, family, dtype):
    federation = Federation(name, family, dtype)
    after_one, _ = federation.run(1)
    federation.run(1, state=after_one)
    messages, replies = federation.messages[-1]
    for number, reply in replies.items():
        rebuilt = federation.client(number).weights
        if isinstance(federation.strategy.server, Replay):
            federation.strategy.load(after_one, rebuilt)
        else:
            federation.strategy.client.sync(decode(messages[number], federation.strategy.client.message), rebuilt)
        up = decode(reply, *federation.strategy.aggregator.replies)
        if isinstance(up, Change):
            pairs = zip(federation.strategy.server.implied(1, 6).tolist(), up.values.tolist(), strict=True)
        else:
            drawn = draw_directions(federation.pool.key, 1, number, 6, federation.pool.size, None)
            pairs = zip(drawn.tolist(), up.scalars.tolist(), strict=True)
        for j, rho in pairs:
            rebuilt.move(j, -TRAINING.lr * rho)
        rebuilt.settle()
        assert rebuilt.digest() == federation.clients[number].weights.digest()


@pytest.mark.parametrize("name", [*POOLED, MIXED])
def test_the_next_model_is_the_weighted_mean_of_those_that_the_clients_ended_with(name):
    federation = Federation(name)
    before, _ = federation.run(1)
    after, _ = federation.run(1, state=before)
    ended = {client.examples: client.weights.c.astype(float) for client in federation.clients.values()}
    mean = sum(examples * c for examples, c in ended.items()) / sum(ended)
    sent = decode(federation.messages[-1][0][2], Broadcast).coefficients
    kept_back = before.coefficients - sent  # what 8 bits could not say: the server keeps it
    assert np.abs(kept_back).max() > 1e-6
    np.testing.assert_allclose(after.coefficients, mean + kept_back, atol=2e-7)


def test_one_round_has_clients_that_backpropagate_and_clients_that_can_not():
    federation = Federation(MIXED)
    state, report = federation.run(1)
    kinds = {n: type(decode(reply, Upload, Change)) for n, reply in federation.messages[-1][1].items()}
    assert kinds == {2: Upload, 3: Upload, 5: Change, 7: Change}
    assert state.counts.sum() == 2 * TRAINING.steps
    assert report.skipped == 0


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n not in {*POOLED, *REPLAYED, "uplink-seeds"}])
def test_weights_sent_are_those_that_the_client_trained(name):
    federation = Federation(name)
    federation.run(2)
    for number, reply in federation.messages[-1][1].items():
        sent = decode(reply, Change).values
        assert sent.tobytes() == federation.clients[number].weights.values().tobytes()
        assert (
            sent.tobytes()
            != decode(federation.messages[-1][0][number], federation.strategy.client.message).values.tobytes()
        )


@every_algorithm
def test_the_order_of_replies_makes_no_difference(name):
    forward, backward = Federation(name), Federation(name)
    backward.clients = dict(reversed(backward.clients.items()))
    assert same(forward.run(2)[0], backward.run(2)[0])


@every_algorithm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_newcomer_has_the_model_of_a_veteran(name, dtype):
    federation = Federation(name, dtype=dtype)
    state, _ = federation.run(2)
    state, _ = federation.run(1, (3, 7), state)  # the veteran was away
    veteran, newcomer = federation.clients[5], federation.client(5)
    replies = [
        answer(federation.strategy, federation.message(state, 5), veteran),
        answer(federation.strategy, federation.message(state, NEWCOMER), newcomer),
    ]
    assert replies[0] == replies[1]
    assert veteran.weights.digest() == newcomer.weights.digest()


@pytest.mark.parametrize("name", REPLAYED)
def test_a_message_tells_of_the_rounds_that_its_client_missed_and_no_others(name):
    federation = Federation(name)
    state, _ = federation.run(1)
    state, _ = federation.run(3, (3, 7), state)
    messages = federation.strategy.server.addressed(state, [3, 5, NEWCOMER])
    assert [messages[n].since for n in (3, 5, NEWCOMER)] == [3, 0, 0]
    state, report = federation.run(1, (3, 5), state)
    assert federation.strategy.server.addressed(state, [5])[5].since == 4
    down = {n: decode(m, History) for n, m in federation.messages[-1][0].items()}
    assert report.replayed == down[5].coefficients.size > 2 * down[3].coefficients.size
    with pytest.raises(FedKSeedError, match="holds the model after 0 rounds, the message tells of rounds 3 to 4"):
        federation.strategy.client.sync(messages[3], federation.client(3).weights)


@every_algorithm
def test_bytes_counted_are_bytes_encoded(name):
    federation = Federation(name)
    _, report = federation.run(2)
    messages, replies = federation.messages[-1]
    assert report.bytes_down == max(map(len, messages.values()))
    assert report.bytes_up == max(map(len, replies.values()))
    assert report.bytes_total == sum(map(len, messages.values())) + sum(map(len, replies.values()))
    assert report.clients == (2, 3, 5, 7)
    assert (report.scalar is not None) == (name in BYTES_OF_SCALARS)


@every_algorithm
def test_a_state_comes_back_from_the_store_as_it_was(name, tmp_path):
    federation = Federation(name)
    state, report = federation.run(2)
    with Store.create(tmp_path / "run", "") as store:
        for done in range(state.round):
            store.commit(replace(state, round=done), None)
        store.commit(state, report)
        assert same(store.state(federation.strategy.server.state), state)


@every_algorithm
def test_one_client_cannot_make_the_reported_loss_what_it_likes(name):
    """The attack: 4 billion claimed examples and a loss of nearly nothing, or of 3e38, which hides all others."""
    honest = Federation(name)
    _, expected = honest.run(1)
    for lie in (1e-30, 3e38):
        federation = Federation(name)
        most = [0.0]

        def lying(messages, federation=federation, most=most, lie=lie):
            for client, reply in federation.transport(messages):
                upload = decode(reply, *federation.strategy.aggregator.replies)
                most[0] = max(most[0], upload.loss if client != 7 else 0.0)
                yield client, reply if client != 7 else encode(replace(upload, examples=(1 << 32) - 1, loss=lie))

        state = federation.strategy.server.init()
        _, report = run_round(federation.strategy, state, [*federation.clients], lying)
        assert 0 < report.loss <= most[0], "between those of the others"
        assert report.loss == pytest.approx(expected.loss, rel=0.1)


@every_algorithm
def test_the_model_moves_and_the_local_loss_is_reported(name):
    federation = Federation(name)
    before = federation.client(2)
    start = before.weights.digest()
    state, report = federation.run(1)
    federation.strategy.load(state, before.weights)
    assert before.weights.digest() != start
    assert report.loss == pytest.approx(np.log(400), rel=0.1)  # a random model knows nothing of 400 tokens


@every_algorithm
def test_a_client_of_another_base_model_is_refused_and_unchanged(name):
    federation = Federation(name)
    message = federation.message(federation.strategy.server.init())
    stranger = Federation(name, dtype=torch.bfloat16).clients[2]
    before = stranger.weights.digest()
    with pytest.raises(FedKSeedError, match=f"digest {federation.strategy.run.base.hex()}.*{before.hex()}"):
        answer(federation.strategy, message, stranger)
    assert stranger.weights.digest() == before


def test_a_message_is_decoded_again_only_where_other_bytes_came_between():
    federation = Federation("fedavg")
    data, read = federation.message(federation.strategy.server.init()), decode_once()
    first = read(data, Values)
    assert read(data, Values) is first
    np.testing.assert_array_equal(first.values, decode(data, Values).values)
    again = read(bytes(bytearray(data)), Values)  # another object with the same bytes: nobody has looked at it
    assert again is not first
    with pytest.raises(FedKSeedError, match="checksum does not fit"):
        read(data[:-1] + bytes([data[-1] ^ 1]), Values)
    assert read(data, Values) is not first


@pytest.mark.parametrize("name", ["fedavg", "fedkseed-pro", "ferret"])
def test_clients_that_share_a_decoded_broadcast_answer_as_those_that_do_not(name):
    apart, (shared, read) = Federation(name), (Federation(name), decode_once())

    def transport(messages):
        return [(n, answer(shared.strategy, data, shared.clients[n], read)) for n, data in messages.items()]

    want, _ = apart.run(2)
    found = shared.strategy.server.init()
    for _ in range(2):
        found, _ = run_round(shared.strategy, found, list(shared.clients), transport)
    assert same(found, want)


def test_each_client_that_shares_a_decoded_broadcast_checks_its_run():
    federation, read = Federation("fedavg"), decode_once()
    message = federation.message(federation.strategy.server.init())
    answer(federation.strategy, message, federation.clients[2], read)
    stranger = Federation("fedavg", dtype=torch.bfloat16).clients[3]
    with pytest.raises(FedKSeedError, match=f"digest {federation.strategy.run.base.hex()}"):
        answer(federation.strategy, message, stranger, read)


@every_algorithm
def test_a_reply_signed_by_another_client_is_refused(name):
    federation = Federation(name)

    def swapped(messages):
        return {3: answer(federation.strategy, messages[2], federation.clients[2])}.items()

    with pytest.raises(FedKSeedError, match="reply of client 3 is signed by client 2"):
        run_round(federation.strategy, federation.strategy.server.init(), [2, 3], swapped)


@pytest.mark.parametrize("name", [*POOLED, "fedavg", "decomfl"])
def test_a_reply_to_another_round_than_was_sent_is_refused(name):
    federation = Federation(name)
    after, _ = federation.run(1)

    def old(messages):
        federation.strategy.load(after, federation.clients[2].weights)
        return {2: replies[2]}.items()

    replies = federation.messages[-1][1]
    with pytest.raises(FedKSeedError, match="client 2 was sent round 1 and answered round 0"):
        run_round(federation.strategy, after, [2], old)


def test_a_step_whose_loss_is_not_finite_moves_nothing_and_is_not_reported():
    federation = Federation("fedkseed")
    losses = iter([float("nan"), 1.0, 2.0, float("inf"), 3.0, 1.0] + [1.0] * 6)
    client = replace(federation.clients[2], loss=lambda batch: next(losses))
    message = federation.message(federation.strategy.server.init())
    reply = answer(federation.strategy, message, client)
    up = decode(reply, Upload)
    np.testing.assert_array_equal(up.found, [False, False, True, True, True, True])
    assert up.scalars[2] == (3.0 - 1.0) / (2 * TRAINING.eps)  # 1,000 has 16 bits
    assert np.isfinite(client.weights.c).all()


def test_scalars_are_clipped_before_they_are_applied():
    federation = Federation("fedkseed")
    strategy = changed(federation, clip=5.0)
    losses = iter([100.0, 1.0] * 6)
    client = replace(federation.clients[2], loss=lambda batch: next(losses))
    up = decode(answer(strategy, encode(strategy.server.broadcast(strategy.server.init())), client), Upload)
    np.testing.assert_array_equal(up.scalars, np.full(6, 5.0))
    assert client.weights.c.sum() == pytest.approx(-6 * 5 * 1e-3)


def test_steps_that_were_skipped_are_counted_and_leave_the_other_losses_alone():
    federation = Federation("fedkseed")
    federation.clients[3] = replace(federation.clients[3], loss=lambda batch: float("nan"))
    state, report = federation.run(1)
    assert report.skipped == TRAINING.steps
    assert report.loss == pytest.approx(np.log(400), rel=0.1)
    assert state.counts.sum() == 3 * TRAINING.steps


def test_a_client_that_answers_twice_is_refused():
    federation = Federation("fedkseed")

    def twice(messages):
        for _ in range(2):
            yield 2, answer(federation.strategy, messages[2], federation.clients[2])

    with pytest.raises(FedKSeedError, match="client 2 answered twice"):
        run_round(federation.strategy, federation.strategy.server.init(), [2], twice)


def test_several_directions_a_step_are_averaged_on_one_batch_at_one_point():
    federation = Federation("fedkseed")
    strategy = changed(federation, steps=2, probes=3)
    strategy = federation.algorithm.strategy_of(replace(strategy.settings, wire="exact"))
    local = strategy.settings.local
    client, pool = federation.clients[2], federation.pool
    reply = answer(strategy, encode(strategy.server.broadcast(strategy.server.init())), client)
    up = decode(reply, Upload)
    drawn = draw_directions(pool.key, 0, 2, 6, pool.size, None)
    # by hand: the second step's first probe, at the point that the first step's mean leads to
    other = federation.client(2)
    batches = other.batches(0)
    next(batches)
    c = np.zeros(pool.size, np.float32)
    for j, rho in zip(drawn[:3], up.scalars[:3], strict=True):
        c[j] += np.float32(-local.lr / 3 * float(rho))
    batch, losses = next(batches), []
    for sign in (1, -1):
        point = c.copy()
        point[drawn[3]] += np.float32(sign * local.eps)
        other.weights.load(point)
        losses.append(other.loss(batch))
    assert up.scalars[3] == scalar((losses[0] - losses[1]) / (2 * local.eps), math.inf, "exact")
    after = strategy.aggregate(strategy.server.init(), [up])
    np.testing.assert_allclose(after.coefficients, client.weights.c, atol=1e-9)


@pytest.mark.parametrize("name", ["fedavg", "evofed"])
def test_a_client_whose_weights_diverge_is_told_of(name):
    federation = Federation(name)
    client = federation.clients[2]
    weight = client.weights.layout.tuned[0].places[0]
    steep = replace(client, graph=lambda batch: getattr(*weight).sum() * 1e38)
    strategy = changed(federation, lr=1e3)
    with pytest.raises(FedKSeedError, match="weights of client 2 have diverged in round 1; use a smaller lr than 1000"):
        answer(strategy, encode(strategy.server.broadcast(strategy.server.init())), steep)


@pytest.mark.parametrize("masked", [False, True])
def test_a_simulation_encodes_each_broadcast_once_and_decodes_each_upload_once(
    tmp_path, monkeypatch, model_folder, data_file, masked
):
    calls, rounds, clients = counted(monkeypatch), 3, 4
    text = recipe_text(model_folder, data_file, rounds=f"rounds = {rounds}", cohort=f"cohort = {clients}")
    start(parse(loads(text + "[secure]\nnorm = 0.1\n" * masked)), tmp_path / "run")
    assert calls["encode", Broadcast] == rounds + 1, "that of the last state is the end of the run's chain"
    up = [Masked, Shares] if masked else [Upload]
    assert {calls[name, kind] for kind in up for name in ("encode", "decode")} == {rounds * clients}
    if masked:
        assert (calls["encode", Secured], calls["encode", Survivors]) == (rounds, rounds * clients)
    else:
        assert calls["encode", Delta] <= rounds - 1, "one for all clients that have kept the same broadcast"
        assert calls["decode", Broadcast] == rounds, "clients of one process share the decoded one"


@every_algorithm
def test_an_upload_that_is_refused_leaves_the_sum_as_it_was(name):
    federation = Federation(name)
    state = federation.strategy.server.init()
    after, _ = federation.run(1)
    messages, replies = federation.messages[-1]
    aggregator = federation.strategy.aggregator
    accumulator = aggregator.start(state, dict.fromkeys(messages))
    for reply in replies.values():
        upload = decode(reply, *aggregator.replies)
        for wrong, why in [({"round": 1}, "answered round 1"), ({"client": 99}, "client 99 is none of the 4 clients")]:
            with pytest.raises(FedKSeedError, match=why):
                aggregator.add_(accumulator, replace(upload, **wrong))
        aggregator.add_(accumulator, upload)
        with pytest.raises(FedKSeedError, match="twice"):
            aggregator.add_(accumulator, upload)
    assert same(aggregator.finish(accumulator), after)


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries keep no freed memory, or can't be asked")
def test_what_a_pass_back_has_freed_goes_back_to_the_system(tmp_path, model_folder, data_file):
    """Blocks between blocks that live on, which glibc keeps: 64 KiB are below what it maps by itself."""
    text = recipe_text(model_folder, data_file, algorithm='algorithm = "fedkseed-backprop"', lr="", eps="")
    (tmp_path / "recipe.toml").write_text(text)
    process, highest, lasting = psutil.Process(), list[int](), list[bytes]()

    class Freeing(Silent):
        def advance(self, count: int = 1, loss: float | None = None) -> None:
            blocks = [bytes(1 << 16) for _ in range(6_000)]
            lasting.extend(blocks[::20])
            highest.append(process.memory_info().rss)
            del blocks

    with closing(Simulation(load_recipe(tmp_path / "recipe.toml"), Freeing())) as simulation:
        message = encode(simulation.strategy.server.broadcast(simulation.strategy.server.init()))
        simulation.answer(message, 0)
        assert max(highest) - process.memory_info().rss > 200e6
