"""Processes that `torchrun` starts, on one machine or several: rank 0 keeps the run, each trains its part of a cohort.

They exchange the messages that a network would carry, over gloo: kilobytes, of which rank 0 makes the sum in the one
place that does so. Any rule of aggregation works, and the tuned model is that of one process, bit for bit.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from struct import Struct, pack, unpack_from
from tomllib import loads
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ..errors import FedKSeedError
from ..recipe.reading import parse
from ..recipe.schema import Recipe
from .workers import Answer, computing_with, require_same

PATIENCE = timedelta(days=365)  # rank 0 evaluates for as long as it takes, and the others wait
SIZE = Struct("<q")
FAILED = -1  # in place of a client's number: what follows is the text of an error


class Ranks(AbstractContextManager["Ranks"]):
    """The processes of one `torchrun`, as a context; rank 0 takes them as the workers of its simulation.

    Attributes:
        rank: the number of this process; those above 0 call `serve`, and nothing else.
        count: number of processes.
        restarted: whether torchrun has started them again after one of them had died.

    Raises:
        FedKSeedError: torchrun did not start this process.
    """

    def __init__(self) -> None:
        if not dist.is_torchelastic_launched():
            raise FedKSeedError(
                "--engine torch is of processes that torchrun starts: "
                "torchrun --nproc-per-node 2 -m fedkseed run RECIPE --engine torch"
            )
        self.restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("gloo", timeout=PATIENCE)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._unchecked: dict[str, str] = {}  # of the run, as long as the others have not said theirs
        self._answer: Answer
        self._threads = 1
        self._sent: list[tuple[Any, torch.Tensor]] = []  # with what each sends, which must live as long

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:  # after one the others end with this process, whose connections break
            for rank in range(1, self.count if self.rank == 0 else 1):
                self._send(b"", rank)
            self._settle()
            dist.destroy_process_group()

    def begin(self, recipe: Recipe, secret: bytes, answer: Answer, identity: dict[str, str]) -> None:
        """Send a run to the other ranks, which load its model and its rows.

        Args:
            secret: of the noise of a run with [privacy].
            answer: that of this rank.
            identity: digests that the other ranks have to have, too.
        """
        self._answer, self._unchecked = answer, identity
        self._threads = recipe.clients.threads or torch.get_num_threads()
        for rank in range(1, self.count):
            for part in (recipe.to_toml().encode(), secret):
                self._send(part, rank)

    def answers(self, messages: Mapping[int, bytes]) -> Iterator[tuple[int, bytes, list[float]]]:
        """The triples (client, upload, seconds of its local steps): those of rank 0, then those of each other rank.

        Raises:
            FedKSeedError: another rank has another model or other rows, or one of its clients failed.
        """
        numbers = list(messages)
        parts = [numbers[rank :: self.count] for rank in range(self.count)]
        for rank, part in enumerate(parts[1:], 1):
            if self._unchecked:
                require_same(f"rank {rank}", json.loads(self._receive(rank)), self._unchecked, "rank 0")
            for data in {id(messages[number]): messages[number] for number in part}.values():
                alike = [number for number in part if messages[number] is data]
                self._send(pack(f"<q{len(alike)}q", len(alike), *alike) + data, rank)
        self._unchecked = {}
        for number in parts[0]:
            with computing_with(self._threads):
                reply = self._answer(messages[number], number)
            yield number, *reply
        for rank, part in enumerate(parts[1:], 1):
            for _ in part:
                reply = self._receive(rank)
                number, steps = unpack_from("<qq", reply)
                start = 16 + 8 * steps
                if number == FAILED:
                    raise FedKSeedError(f"rank {rank} failed: {reply[start:].decode()}")
                yield number, reply[start:], [*unpack_from(f"<{steps}d", reply, 16)]
        self._settle()

    def serve(self, prepare: Callable[[Recipe, bytes], tuple[Answer, dict[str, str]]]) -> None:
        """Train clients for rank 0 until its run has ended.

        Args:
            prepare: makes `answer` and `identity` of a recipe and a secret, see `begin`.

        Raises:
            FedKSeedError: rank 0 ended before.
        """
        if not (recipe := self._receive(0)):  # it had nothing to train
            return
        read = parse(loads(recipe.decode()))
        answer, identity = prepare(read, self._receive(0))
        self._send(json.dumps(identity).encode(), 0)
        with computing_with(read.clients.threads or torch.get_num_threads()):
            while task := self._receive(0):
                (count,) = SIZE.unpack_from(task)
                data = task[SIZE.size * (1 + count) :]
                for number in unpack_from(f"<{count}q", task, SIZE.size):
                    self._send(_reply(answer, data, number), 0)
                self._settle()

    def _send(self, data: bytes, rank: int) -> None:
        """Begin to send some bytes, which goes on beside this process's own work."""
        parts = [torch.tensor([len(data)])]
        if data:
            parts.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._sent += [(dist.isend(part, rank), part) for part in parts]

    def _receive(self, rank: int) -> bytes:
        """Receive the bytes that a rank sends; FedKSeedError where it has ended."""
        size = torch.empty(1, dtype=torch.int64)
        try:
            dist.recv(size, rank)
            data = torch.empty(int(size), dtype=torch.uint8)
            if size:
                dist.recv(data, rank)
        except RuntimeError as broken:  # gloo's
            raise FedKSeedError(
                f"rank {self.rank} lost rank {rank}, which said why it ended, or was killed"
            ) from broken
        return data.numpy().tobytes()

    def _settle(self) -> None:
        """Wait until all that was sent has arrived."""
        for sending, _ in self._sent:
            sending.wait()
        self._sent = []


def _reply(answer: Answer, data: bytes, number: int) -> bytes:
    try:
        upload, seconds = answer(data, number)
    except (FedKSeedError, RuntimeError) as error:  # the latter PyTorch's, as for a full GPU
        number, upload, seconds = FAILED, str(error).encode(), []
    return pack(f"<qq{len(seconds)}d", number, len(seconds), *seconds) + upload
