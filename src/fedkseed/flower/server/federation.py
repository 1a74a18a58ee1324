"""The federation of a server whose clients are elsewhere."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...data.federated import digest, own_held_out
from ...errors import FedKSeedError
from ...evaluation.statistics import Evaluation
from ...randomness import cohort
from ...recipe.schema import Recipe
from ...round import Report, run_round
from ...run.loop import NOT_EVALUATED, Federation
from ...run.progress import Progress
from ...run.setup import NEWCOMER
from ...wire.codec import decode, encode, kind_of
from ...wire.records import Delta, Lack
from ..recipes import require_networked
from .grid import Remote


class Server(Federation):
    """Rounds with clients of a network; held-out examples are the server's own, if it has any.

    Args:
        remote: the way to them.
    """

    def __init__(self, recipe: Recipe, remote: Remote, progress: Progress | None = None) -> None:
        require_networked(recipe)
        super().__init__(recipe, progress)
        if self.algorithm.remembers:
            raise FedKSeedError(
                f"clients of {recipe.training.algorithm} have to remember every round, and over a network one that is "
                "restarted forgets: choose another [training] algorithm"
            )
        self.count, self.size = remote.numbers.count, recipe.clients.cohort_of(remote.numbers.count)
        self.held_out = own_held_out(recipe, self.tokenizer)
        if not self.held_out:
            self.progress.note(f"there is no data at {recipe.data.source} on this machine: nothing is evaluated")
        self.take_model(serves=True)
        self.remote, self._gathered = remote, False
        self._kept: dict[int, bytes] = {}  # what clients were sent in the last round, if they have answered

    @property
    def identity(self) -> dict[str, str]:
        return {
            "directions": str(self.weights.pool),
            "a base model of digest": self.weights.base_digest.hex(),
            "held-out data of digest": digest([self.held_out]),
            "a number of clients of": str(self.count),
        }

    @property
    def reach(self) -> int:
        return 0

    def holdings(self) -> None:
        """Clients do not tell what they hold."""

    def evaluate(self, state: Any, what: str, write: bool = True) -> Evaluation:
        return self.score(state, self.held_out, what, write) if self.held_out else NOT_EVALUATED

    def round(self, state: Any, earlier: Callable[[int], Any]) -> tuple[Any, Report]:
        if not self._gathered:
            self.remote.gather()
            self._gathered = True
        asked = cohort(self.recipe.seed, state.round, self.count, self.size)

        needed = min(self.remote.minimum, len(asked))

        def transport(sent: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
            nonlocal needed

            def check(client: int, reply: bytes) -> None:
                """An answer is good if a round with it alone is: a bad one must not spoil the round of the others."""
                if kind_of(reply) is Lack and kind_of(sent[client]) is Delta:
                    decode(reply, Lack)  # it was restarted, and is sent the whole, by another call of `transport`
                else:
                    run_round(self.strategy, state, [client], lambda _: [(client, reply)])

            for client, reply in self.remote.transport(state.round, sent, max(0, needed), check):
                needed -= kind_of(reply) is not Lack
                yield client, reply

        after, report = run_round(self.strategy, state, asked, transport, kept=self._kept)
        if self.algorithm.pooled:
            message = encode(self.strategy.broadcast(state, [NEWCOMER])[NEWCOMER])
            self._kept = dict.fromkeys(report.clients, message)
        return after, report
