"""What the server keeps of every round, small enough to check by hand."""

import numpy as np
import pytest
import torch

from fedkseed import FedKSeedError, Pool, Run, Upload
from fedkseed.directions import reference
from fedkseed.local.client import Client
from fedkseed.local.work import LocalWork
from fedkseed.randomness import draw_directions
from fedkseed.strategies.replay import Replay, ReplayState
from fedkseed.strategy import Settings, Strategy
from fedkseed.weights.full import FullWeights
from fedkseed.weights.layout import Layout
from fedkseed.wire.records import Change, History

from ..conftest import tiny_llama

RUN = Run(Pool(1, 1 << 32, "rademacher"), bytes(32))
POOL = Pool(1, 4, "hadamard")
NONE = np.empty(0, np.uint32)


def strategy(kind: str, run: Run = RUN, pool: Pool = POOL, **changes) -> Strategy[ReplayState]:
    steps_of = "sgd" if kind in ("projected", "by tensor") else "two points"
    server_lr = changes.pop("server_lr", 1.0)
    local = LocalWork(**{"rounds": 10, "steps_of": steps_of, "steps": 2, "lr": 0.5, **changes})
    settings = Settings(run, local, tensors=((0, 8), (1, 128)), pool=pool, server_lr=server_lr)
    return Replay.make(settings, kind=kind)


def change(client: int, values: list[float], counts: list[int] | None = None, examples: int = 1, round_: int = 0):
    numbers = np.array(values, np.float32)
    return Change(
        RUN, round_, client, examples, 1.0, 0, numbers, NONE if counts is None else np.array(counts, np.uint32)
    )


def test_settings_that_do_not_exist_are_refused():
    with pytest.raises(FedKSeedError, match="no kind is called 'draw'; choose one of drawn, shared"):
        strategy("draw")
    with pytest.raises(FedKSeedError, match="no kind is called 'shared'; choose one of projected, by tensor"):
        strategy("shared", steps_of="sgd")


def upload(client: int, found: list[float], examples: int = 1, round_: int = 0, run: Run = RUN) -> Upload:
    return Upload(run, round_, client, examples, 1.0, np.array(found, np.float32))


def test_drawn_scalars_are_kept_with_their_directions_merged_and_ascending():
    few = Run(Pool(3, 2, "rademacher"), bytes(32))
    replay = strategy("drawn", few, steps=3)
    one, two = upload(4, [4.0, np.nan, 1.0], 1, run=few), upload(1, [1.0, 2.0, 3.0], 3, run=few)
    (a, _, c), (i, j, k) = (draw_directions(3, 0, client, 3, 2, None) for client in (4, 1))
    sums = np.zeros(2)
    np.add.at(sums, [a, c, i, j, k], [0.25 * 4, 0.25 * 1, 0.75 * 1, 0.75 * 2, 0.75 * 3])
    assert {a, c, i, j, k} == {0, 1}  # so that some are added up
    state = replay.aggregate(replay.server.init(), [one, two])
    np.testing.assert_array_equal(state.directions, [0, 1])
    np.testing.assert_allclose(state.coefficients, -0.5 * sums)
    np.testing.assert_array_equal(state.counts, [[2]])
    np.testing.assert_array_equal(state.clients, [1, 4])
    np.testing.assert_array_equal(state.seen, [0, 0])


def test_shared_scalars_are_averaged_and_need_no_directions():
    replay = strategy("shared", probes=2)
    state = replay.aggregate(replay.server.init(), [change(0, [4, 0, 0, 8], examples=3), change(1, [0, 4, 0, 8])])
    np.testing.assert_allclose(state.coefficients, [-0.25 * v for v in (3, 1, 0, 8)])
    assert state.directions.size == 0
    np.testing.assert_array_equal(replay.server.implied(2, 4), [8, 9, 10, 11])


def test_a_projection_is_averaged_and_scaled():
    replay = strategy("projected", server_lr=2.0)
    state = replay.aggregate(replay.server.init(), [change(0, [4, 0, 0, 8], examples=3), change(1, [0, 4, 0, 8])])
    np.testing.assert_allclose(state.coefficients, [6, 2, 0, 16])
    pools = [replay.server.round_pool(round_) for round_ in (0, 0, 1)]
    assert pools[0] == pools[1] != pools[2]


def test_clients_draw_directions_of_their_own_for_each_tensor_and_those_not_drawn_count_as_zeros():
    replay = strategy("by tensor")
    one, two = change(0, [1, 2, 3, 4], [3, 1]), change(1, [10, 20, 30], [1, 2])
    state, expected = replay.aggregate(replay.server.init(), [one, two]), np.zeros((2, 4))
    drawn = {client: replay.server.drawn(0, client, sent.counts) for client, sent in enumerate((one, two))}
    for tensor, direction, value in [(0, *pair) for pair in zip(drawn[0][:3], [1, 2, 3], strict=True)] + [
        (1, drawn[0][3], 4), (0, drawn[1][0], 10), (1, drawn[1][1], 20), (1, drawn[1][2], 30),
    ]:  # fmt: skip
        expected[tensor, direction] += value / 2
    np.testing.assert_array_equal(state.counts, [(expected != 0).sum(1)])
    np.testing.assert_array_equal(state.directions, np.nonzero(expected)[1])
    np.testing.assert_allclose(state.coefficients, expected[expected != 0])


def test_directions_are_drawn_without_replacement_anew_for_each_round_client_and_tensor():
    replay = strategy("by tensor", pool=Pool(1, 64, "hadamard")).server
    counts = np.array([32, 32, 64], np.uint32)
    one = replay.drawn(0, 0, counts)
    parts = [one[:32], one[32:64], one[64:]]
    for part in parts:
        assert (np.diff(part.astype(int)) > 0).all()
    np.testing.assert_array_equal(parts[2], np.arange(64))
    others = [parts[1], replay.drawn(1, 0, counts)[:32], replay.drawn(0, 1, counts)[:32]]
    assert all(set(parts[0]) != set(other) for other in others)
    np.testing.assert_array_equal(replay.drawn(0, 0, counts), one)
    seen = np.bincount(
        np.concatenate([replay.drawn(r, 0, np.array([16], np.uint32)) for r in range(400)]), minlength=64
    )
    assert abs(seen / 400 - 1 / 4).max() < 5 * (3 / 16 / 400) ** 0.5  # 5 deviations of a share of 1/4 in 400


class Moved:
    """Clients of a module of two tensors whose loss is linear: two SGD steps move w by exactly −η Σ of the slopes."""

    def __init__(self, replay: Strategy[ReplayState], slopes: list[list[np.ndarray]]) -> None:
        self.replay, self.slopes = replay, slopes
        self.weights = [FullWeights(Layout(self.module()), RUN.pool) for _ in slopes]

    @staticmethod
    def module() -> torch.nn.Module:
        made = torch.nn.Linear(16, 8).requires_grad_(False)
        for parameter in made.parameters():
            parameter.zero_()
        return made

    def uploads(self, examples: list[int]) -> tuple[History, list[Change]]:
        first = self.replay.server.broadcast(self.replay.server.init())
        found = []
        for number, (weights, slopes) in enumerate(zip(self.weights, self.slopes, strict=True)):
            self.replay.client.sync(first, weights)
            batches = [torch.from_numpy(np.concatenate([s.ravel() for s in slopes]))] * 2

            def graph(batch: torch.Tensor, weights: FullWeights = weights) -> torch.Tensor:
                parameters = [entry.places[0][0]._parameters[entry.places[0][1]] for entry in weights.layout.tuned]
                return torch.cat([p.flatten() for p in parameters]) @ batch

            client = Client(number, weights, examples[number], lambda _, b=batches: iter(b), float, graph=graph)
            found.append(self.replay.client.train(first, client))
        return first, found

    def after(self, uploads: list[Change]) -> np.ndarray:
        """The weights of a newcomer after the round."""
        state = self.replay.aggregate(self.replay.server.init(), uploads)
        newcomer = FullWeights(Layout(self.module()), RUN.pool)
        self.replay.load(state, newcomer)
        return newcomer.values()


def slopes_of(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=8).astype(np.float32), rng.normal(size=(8, 16)).astype(np.float32)]  # bias, weight


def test_ferret_rebuilds_the_mean_update_by_the_papers_formula():
    # Shu et al., 2025: Δ̃_l = (ρ_l K_l)⁻¹ V_l V_lᵀ Δ_l, ρ_l = E v² of an entry of V_l; the blocks' K_l and the draws
    # are those of the official code. Here V = z / √d, so that ‖v‖ = 1 and ρ_l = 1 / d_l.
    size = 16
    replay = strategy("by tensor", pool=Pool(1, size, "hadamard"), server_lr=2.0)
    examples, slopes = [3, 1], [slopes_of(1), slopes_of(2)]
    moved = Moved(replay, slopes)
    _, uploads = moved.uploads(examples)
    expected = [np.zeros(8), np.zeros(128)]
    for client, own in enumerate(slopes):
        deltas = [-0.5 * 2 * part.ravel().astype(np.float64) for part in own]
        most = max(np.linalg.norm(delta) for delta in deltas)
        counts = [max(int(size * np.linalg.norm(delta) / most), 2) for delta in deltas]
        np.testing.assert_array_equal(uploads[client].counts, counts)
        drawn = np.split(replay.server.drawn(0, client, np.array(counts, np.uint32)), [counts[0]])
        for block, (delta, chosen) in enumerate(zip(deltas, drawn, strict=True)):
            d, tensor = delta.size, moved.weights[0].layout.tuned[block].number
            v = np.stack([reference.elements(replay.server.round_pool(0), j, tensor, 0, d) for j in chosen], 1) / d**0.5
            rebuilt = v @ (v.T @ delta) / (1 / d * len(chosen))
            expected[block] += 2.0 * examples[client] / 4 * rebuilt
    assert 2 < counts[0] < size == counts[1]
    np.testing.assert_allclose(moved.after(uploads), np.concatenate(expected), rtol=1e-4, atol=1e-5)  # float32 sums


@pytest.mark.parametrize("kind", ["projected", "by tensor"])
def test_an_update_that_is_not_finite_is_refused_and_the_rate_named(kind):
    slopes = slopes_of(1)
    slopes[1][0, 0] = 3e38  # the sum of two steps has no float32; a step whose loss is not finite is left out
    moved = Moved(strategy(kind), [slopes, slopes_of(2)])
    with pytest.raises(FedKSeedError, match=r"client 0 diverged in round 0: .*; take a smaller \[training\] lr"):
        moved.uploads([3, 1])


def test_evofed_takes_the_step_of_a_mirrored_population_whose_fitness_is_closeness():
    # Rahimi et al., 2023: members θ ± σ z_j, fitness −‖member − θ'‖² to the trained model θ', and the step of evolution
    # strategies, θ + α / (2 K σ) Σ_j (F_j⁺ − F_j⁻) z_j, with F the mean of the clients' fitness and α = server_lr / 2.
    replay, sigma, examples = strategy("projected", server_lr=3.0), 0.1, [3, 1]
    slopes = [slopes_of(3), slopes_of(4)]
    moved = Moved(replay, slopes)
    _, uploads = moved.uploads(examples)
    sizes, tuned = (8, 128), moved.weights[0].layout.tuned
    blocks = [(entry.number, 0, d) for entry, d in zip(tuned, sizes, strict=True)]
    pool = replay.server.round_pool(0)
    members = np.stack([np.concatenate([reference.elements(pool, j, *block) for block in blocks]) for j in range(4)])
    trained = [-0.5 * 2 * np.concatenate([s.ravel() for s in own]).astype(np.float64) for own in slopes]
    share = np.array(examples) / 4
    fitness = [
        sum(s * -(((way * sigma * members) - to) ** 2).sum(1) for s, to in zip(share, trained, strict=True))
        for way in (1, -1)
    ]
    expected = 3.0 / 2 / (2 * 4 * sigma) * ((fitness[0] - fitness[1]) @ members)
    np.testing.assert_allclose(moved.after(uploads), expected, rtol=1e-4, atol=1e-5)  # float32 sums


@pytest.mark.parametrize("kind", ["drawn", "shared", "projected", "by tensor"])
def test_a_client_is_sent_the_rounds_since_it_last_took_part(kind):
    replay = strategy(kind)
    state = replay.server.init()
    for round_, cohort in enumerate([(1, 2), (2,), (2, 3)]):
        if kind == "drawn":
            found = [1.0, 2.0] if len(cohort) == 1 else [1.0, np.nan]  # two of each round
            uploads = [upload(client, found, round_=round_) for client in cohort]
        else:
            values = {"shared": [1, 2], "projected": [1, 2, 3, 4], "by tensor": [1, 2, 3, 4] * 2}[kind]
            counts = [4, 4] if kind == "by tensor" else None
            uploads = [change(client, values, counts, round_=round_) for client in cohort]
        state = replay.aggregate(state, uploads)
    sent = replay.server.addressed(state, [1, 2, 3, 9])
    assert {client: message.since for client, message in sent.items()} == {1: 0, 2: 2, 3: 2, 9: 0}
    assert sent[2] is sent[3]
    size = state.coefficients.size // 3
    assert [sent[client].coefficients.size for client in (1, 2, 9)] == [3 * size, size, 3 * size]


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        ("projected", {"counts": np.array([[1, 1], [1, 1]], np.uint32)}, "has 1 counts a round.*got 2 counts"),
        ("by tensor", {}, "has 2 counts a round.*got 1 counts"),
        ("projected", {"directions": np.arange(4, dtype=np.uint32)}, "got 1 counts and 4 directions"),
        ("drawn", {}, "0 directions and 2 coefficients"),
        ("projected", {"counts": np.array([[1], [5]], np.uint32)}, "directions must lie in 0 to 3, got 0 to 4"),
    ],
)
def test_a_history_that_does_not_fit_is_refused_and_changes_nothing(kind, changes, match):
    weights = FullWeights(Layout(tiny_llama()), RUN.pool)
    before = weights.digest()
    history = {"counts": np.array([[2], [2]], np.uint32), "directions": NONE, **changes}
    total = int(history["counts"].sum())
    message = History(RUN, 2, 1.0, 0, coefficients=np.ones(total, np.float32), **history)
    with pytest.raises(FedKSeedError, match=match):
        strategy(kind).client.sync(message, weights)
    assert weights.digest() == before
    assert weights.version == 0


def test_scalars_that_overflow_are_refused():
    with pytest.raises(FedKSeedError, match="round 0 would overflow float32"):
        strategy("drawn", lr=1e34).aggregate(strategy("drawn").server.init(), [upload(5, [1e6, 1e6])])


def test_what_does_not_fit_is_refused():
    for replay, sent, message in [
        (strategy("drawn"), upload(5, [1.0]), "client 5 reports 1 scalars, 2 were asked for"),
        (strategy("shared"), change(5, [1]), "client 5 sent 1 numbers, 2 were asked for"),
        (strategy("projected"), change(5, [1]), "sent 1 numbers, 4 were asked for"),
        (strategy("by tensor"), change(5, [1, 2]), "up to 4 numbers for each of 2 tensors"),
        (strategy("by tensor"), change(5, [1] * 6, [5, 1]), "up to 4 numbers for each of 2 tensors"),
        (strategy("shared", clip=3.0), change(5, [1, -4]), "client 5 reports a scalar gradient of 4, at most 3"),
        (strategy("projected", server_lr=1e3), change(5, [1, 2, 3, 3e38]), "round 0 would overflow float32"),
        (strategy("shared", lr=1e3), change(5, [1, 3e38]), "round 0 would overflow float32"),
    ]:
        with pytest.raises(FedKSeedError, match=message):
            replay.aggregate(replay.server.init(), [sent])
