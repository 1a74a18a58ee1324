"""Processes that `torchrun` starts with one script: each trains its part of a cohort, and all add up all uploads.

No process is a server: what one knows, all know, so callbacks, evaluations and the end of a training are those of one
process. Uploads are kilobytes, and travel over gloo.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch.distributed as dist

from ..errors import FedKSeedError
from ..run.ranks import PATIENCE


class Processes:
    """The processes of `torchrun`, whose group transformers' TrainingArguments has begun."""

    def __init__(self) -> None:
        group: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._group = group
        self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def share(self, clients: Sequence[int]) -> Sequence[int]:
        """The clients of a cohort that train here."""
        return clients[self.rank :: self.count]

    def exchange(self, uploads: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """All processes' pairs (client, upload), once all have theirs."""
        yield from chain.from_iterable(self.gather([*uploads]))

    def gather(self, own: Any) -> list[Any]:
        """The objects of all processes, in the order of their ranks."""
        parts: list[Any] = [None] * self.count
        dist.all_gather_object(parts, own, self._group)
        return parts

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse processes whose training differs from the first one's."""
        first = self.gather(facts)[0]
        for name, value in facts.items():
            if value != first[name]:
                raise FedKSeedError(
                    f"process {self.rank} trains with {name} {value}, the first with {first[name]}: all processes of "
                    "torchrun need the same model, rows and arguments"
                )

    def wait(self) -> None:
        """Wait until all processes are here, as before they read what the first has written."""
        dist.barrier(self._group)
