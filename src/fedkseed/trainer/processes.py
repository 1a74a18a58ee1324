"""Processes that `torchrun` starts with one script: each trains its part of a cohort, and all add up all uploads.

No process is a server: what one knows, all know, so callbacks, evaluations and the end of a training are those of one
process. Uploads are kilobytes, and travel over gloo.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Any

import torch
import torch.distributed as dist

from ..errors import FedKSeedError
from ..run.ranks import PATIENCE

HEAD = Struct("<qq")  # of an upload: client, bytes


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
        for data in self.gather(b"".join(HEAD.pack(number, len(data)) + data for number, data in uploads)):
            at = 0
            while at < len(data):
                number, size = HEAD.unpack_from(data, at)
                at += HEAD.size + size
                yield number, data[at - size : at]

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of each process, in the order of their ranks."""
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(data)]), self._group)
        most = max(1, *(int(size) for size in sizes))
        padded = torch.frombuffer(bytearray(data.ljust(most, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, self._group)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def first(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """The first process's numbers, for all to use: timings and last bits may differ elsewhere."""
        return json.loads(self.gather(json.dumps(numbers).encode())[0])

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse processes whose training differs from the first one's."""
        first = self.first(facts)
        for name, value in json.loads(json.dumps(facts)).items():
            if value != first[name]:
                raise FedKSeedError(
                    f"process {self.rank} trains with {name} {value}, the first with {first[name]}: all processes of "
                    "torchrun need the same model, rows and arguments"
                )

    def wait(self) -> None:
        """Wait until all processes are here, as before they read what the first has written."""
        dist.barrier(self._group)
