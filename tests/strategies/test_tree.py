"""A tree of servers: subtotals of any grouping of the clients give the state of one server."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkseed import FedKSeedError
from fedkseed.directions import Pool
from fedkseed.local.work import LocalWork
from fedkseed.randomness import draw_directions
from fedkseed.strategies.kseed import KSeed, State
from fedkseed.strategies.sums import HEAVIEST
from fedkseed.strategies.tree import ShardAggregator, tree
from fedkseed.strategy import Settings, Strategy, Trust
from fedkseed.wire import Broadcast, Run, Subtotal, decode, encode
from fedkseed.wire.numbers import GRID

from ..test_round import same

RUN = Run(Pool(1, 16, "hadamard"), bytes(32))
CLIENTS = 12


def server(importance: bool = False, clip: float = 100.0, **changes) -> Strategy[State]:
    local = LocalWork(rounds=10, steps=3, lr=0.5, eps=0.25, clip=clip)
    derivatives = LocalWork(10, steps_of="sgd", lr=0.25, steps=2)
    return KSeed.make(Settings(RUN, local, **{"derivatives": derivatives, **changes}), importance=importance)


def rooted(inner: Strategy[State], members=lambda shard: range(CLIENTS)) -> Strategy[State]:
    return tree(inner, lambda round_: range(CLIENTS), members)


def subtotal(inner: Strategy[State], message: Broadcast, shard: int, uploads: list) -> Subtotal:
    sums = ShardAggregator(inner.server)
    accumulator = sums.start(message, range(CLIENTS))
    for upload in uploads:
        sums.add_(accumulator, upload)
    return sums.finish(accumulator, shard)


def uploads(inner: Strategy[State], round_: int, rng: np.random.Generator) -> list:
    """Of all clients, of which every third takes derivatives."""
    return [inner.client.example(round_, k, int(rng.integers(1, 500)), k % 3 == 0, rng) for k in range(CLIENTS)]


def members(of: np.ndarray, shard: int) -> list[int]:
    """The clients of a shard."""
    return np.flatnonzero(of == shard).tolist()


@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from(["exact", "compact", "sign"]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_shards_of_the_clients_give_the_state_of_one_server(seed, shards, wire, pro):
    """Over two rounds, the second of which draws by the sizes that the first has found; a shard may have no client."""
    rng, inner = np.random.default_rng(seed), server(wire=wire, importance=pro, trust=Trust(warmup=seed % 3))
    alone = together = inner.server.init()
    for round_ in range(2):
        made = uploads(inner, round_, rng)
        alone = inner.aggregate(alone, made)
        message = inner.server.broadcast(together)
        of = rng.integers(0, shards, CLIENTS)
        parts = [
            subtotal(inner, message, shard, [one for one in made if of[one.client] == shard]) for shard in range(shards)
        ]
        travelled = [decode(encode(part), Subtotal) for part in rng.permutation(np.array(parts, object))]
        together = rooted(inner, partial(members, of)).aggregate(together, travelled)
        assert same(alone, together)
        assert sorted(number for part in travelled for number in part.clients.tolist()) == list(range(CLIENTS))


def test_a_subtotal_has_20_bytes_a_direction_and_4_a_client():
    inner = server()
    some = uploads(inner, 0, np.random.default_rng(0))
    message = inner.server.broadcast(inner.server.init())
    sizes = [len(encode(subtotal(inner, message, 0, some[:count]))) for count in (0, 1, 5)]
    assert sizes == [56 + 20 + 16 * 20 + 4 + 4 * count for count in (0, 1, 5)]


def part(of: tuple[int, ...] = (2, 5), **changes) -> Subtotal:
    """The subtotal of some clients, with other values."""
    inner = server()
    some = [inner.client.example(0, client, 3, False, np.random.default_rng(client)) for client in of]
    return replace(subtotal(inner, inner.server.broadcast(inner.server.init()), 1, some), **changes)


def row(value: int, dtype: Any = np.int64) -> np.ndarray:
    return np.array([value, *[0] * 15], dtype)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "got no upload"),
        ([part(), part()], "answered round 0 twice"),
        ([part(round=1)], "answered round 1, the server is in round 0"),
        ([part(run=Run(RUN.pool, bytes(31) + b"1"))], "base model with digest"),
        ([part(clients=np.array([2, 12], np.uint32))], r"clients that are not its own, or not in round 1: \[12\]"),
        ([part(client=2)], r"shard 2 has clients that are not its own, or not in round 1: \[2, 5\]; .* says which"),
        ([part(weight=2 * (HEAVIEST // CLIENTS) + 1)], f"its 2 clients {HEAVIEST // CLIENTS} each at most"),
        ([part(values=row(6 * 301 << 16))], "a sum beyond what its clients may report along one direction"),
        ([part(values=row(-(2**63)))], "a sum beyond what its clients may report along one direction"),
        ([part(counts=row(7, np.uint32))], "has 7 scalars along direction 0, and its 2 clients have drawn it . times"),
        ([part(sizes=row(6 * 101 << 16))], "scalars above what a client may report, 100"),
        ([part(())], "no client of any shard is in the sums of round 1"),
    ],
)
def test_what_clients_of_a_shard_could_not_have_sent_is_refused(parts, message):
    inner = server()
    before = inner.server.init()
    with pytest.raises(FedKSeedError, match=message):
        rooted(inner, lambda shard: range(CLIENTS) if shard == 1 else range(0)).aggregate(before, parts)
    assert same(before, inner.server.init())


@given(st.integers(0, 2**32), st.booleans(), st.sampled_from(["exact", "sign"]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_shards_counts_are_within_its_draws(seed, shared, wire, pro):
    """The attack: 9 counts, or some of them, moved to directions that the public draws have less often."""
    rng, inner = np.random.default_rng(seed), server(derivatives=None, wire=wire, shared=shared, importance=pro)
    start, one = inner.server.init(), 1.0 if wire == "sign" else 100.0
    some = [inner.client.example(0, client, 1, False, rng) for client in (2, 5, 7)]
    good = subtotal(inner, inner.server.broadcast(start), 1, some)
    assert rooted(inner).aggregate(start, [good]).round == 1
    away = int(rng.choice(np.flatnonzero(good.counts)))
    to, counts = (away + int(rng.integers(1, 16))) % 16, good.counts.astype(np.int64)
    moved = int(rng.integers(1, counts[away] + 1))
    counts[away], counts[to] = counts[away] - moved, counts[to] + moved
    sizes, counts = counts * int(one / GRID), counts.astype(np.uint32)
    for changed in (replace(good, counts=counts), replace(good, counts=counts, sizes=sizes, values=sizes)):
        with pytest.raises(FedKSeedError, match=rf"scalars along direction {to}, and its 3 clients have drawn it"):
            rooted(inner).aggregate(start, [changed])


def test_a_shard_that_claims_little_weight_moves_no_direction_further_than_one_of_its_clients():
    """The draws of one client bound the mean, whatever the weight that is claimed."""
    inner = server(derivatives=None)
    some = [inner.client.example(0, client, 1, False, np.random.default_rng(0)) for client in (2, 5, 7)]
    good = subtotal(inner, inner.server.broadcast(inner.server.init()), 1, some)
    times = max(
        np.unique(draw_directions(1, 0, client, 3, 16, None), return_counts=True)[1].max() for client in (2, 5, 7)
    )
    full = good.counts.astype(np.int64) * int(100 / GRID)
    values = np.where(full == full.max(), good.weight * int(times * 100 / GRID) + 1000, 0)
    with pytest.raises(FedKSeedError, match="a sum beyond what its clients may report along one direction"):
        rooted(inner).aggregate(inner.server.init(), [replace(good, sizes=full, values=values)])


@pytest.mark.parametrize(
    ("changes", "wrong", "message"),
    [  # a shard whose clients send a few scalars each can't move all directions at once
        ({}, lambda good: {"values": good.values + (1 << 16)}, "a sum beyond what its clients may report along one"),
        (
            {"wire": "sign", "clip": 0.5},
            lambda good: {"sizes": 2 * good.sizes},
            "scalars above what a client may report",
        ),
    ],
)
def test_sums_of_scalars_alone_are_no_larger_than_their_sizes_and_signs_have_a_size_of_one(changes, wrong, message):
    inner = server(derivatives=None, **changes)
    one = inner.client.example(0, 2, 3, False, np.random.default_rng(2))
    good = subtotal(inner, inner.server.broadcast(inner.server.init()), 1, [one])
    assert rooted(inner).aggregate(inner.server.init(), [good]).round == 1
    with pytest.raises(FedKSeedError, match=message):
        rooted(inner).aggregate(inner.server.init(), [replace(good, **wrong(good))])


def test_any_number_of_skipped_steps_can_be_added_up():
    inner = server()
    some = [
        replace(inner.client.example(0, client, 3, True, np.random.default_rng(0)), skipped=2**32 - 1)
        for client in (0, 1)
    ]
    assert subtotal(inner, inner.server.broadcast(inner.server.init()), 1, some).skipped == 2**32 - 1


def test_weights_that_are_capped_are_capped_for_a_shard():
    inner = server(trust=Trust(most_examples=1))
    with pytest.raises(FedKSeedError, match="weighs 6, its 2 clients 1 each at most"):
        rooted(inner).aggregate(inner.server.init(), [part()])
    assert rooted(inner).aggregate(inner.server.init(), [part(weight=2, values=part().values // 3)]).round == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": np.array([5, 2], np.uint32)}, "each client once and in order"),
        ({"weight": 1}, "a subtotal's 2 clients weigh at least 1 each"),
        ({"clients": np.empty(0, np.uint32)}, "a subtotal's 0 clients weigh at least 1 each"),
        ({"clients": np.empty(0, np.uint32), "weight": 0, "values": row(1)}, "of no clients has values of 0"),
        ({"values": np.zeros(15, np.int64)}, r"has 16 values, got \(15,\)"),
        ({"sizes": row(-1)}, "sums of sizes are at least 0, got -1"),
    ],
)
def test_a_subtotal_that_is_not_sound_cannot_be_made(changes, message):
    with pytest.raises(FedKSeedError, match=message):
        part(**changes)
