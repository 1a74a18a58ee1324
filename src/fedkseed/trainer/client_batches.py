"""Batches of clients, in the forms in which PyTorch users keep them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..errors import FedKSeedError, first_line

EXPECTED = "batches is a list with the batches of each client, itself a list or a DataLoader"


class Batches(Sequence[Any]):
    """The batches of a dataset with numbered rows, made when they are asked for.

    Args:
        places: the numbers of the rows of each batch.
        collate: a function of rows to the batch that a loss takes.
    """

    def __init__(self, rows: Any, places: Sequence[Sequence[int]], collate: Callable[[list[Any]], Any]) -> None:
        self.rows, self.places, self.collate = rows, places, collate

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: Any) -> Any:
        return self.collate([self.rows[row] for row in self.places[number]])


@dataclass(frozen=True, slots=True)
class OwnedBatch:
    """A batch with its owner and number, which an error of a user's function is said with."""

    owner: str
    number: int
    batch: Any

    @classmethod
    def of(cls, owner: str, batches: Sequence[Any], number: int) -> "OwnedBatch":
        """One of the owner's batches."""
        with _users(f"your dataset or collate_fn, asked for batch {number} of {owner},"):
            return cls(owner, number, batches[number])

    def put_through(self, what: str, function: Callable[..., Any], *model: Any) -> Any:
        """Call a user's function with the batch."""
        with _users(f"your {what}, called with {self},"):
            return function(*model, self.batch)

    def __str__(self) -> str:
        return f"batch {self.number} of {self.owner}, {described(self.batch)}"


@contextmanager
def _users(code: str) -> Iterator[None]:
    """Say of an error whose code raised it, and with what; an error that this package has put in words stays."""
    try:
        yield
    except FedKSeedError:
        raise
    except Exception as error:
        raise FedKSeedError(f"{code} raised {type(error).__name__}: {first_line(error)}") from error


def batches_of(batches: Any, owner: str) -> Sequence[Any]:
    """The batches of one client, or of held-out rows.

    Raises:
        FedKSeedError: they are of a kind that has no length or no batches, or there is none.
    """
    if isinstance(loader := batches, DataLoader):  # which rows are in a batch is drawn once
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            raise FedKSeedError(
                "a DataLoader needs a dataset with numbered rows and a batch_size; put other batches into a list"
            )
        batches = Batches(loader.dataset, list(loader.batch_sampler), loader.collate_fn)
    sized = hasattr(batches, "__len__") and hasattr(batches, "__getitem__")
    if not sized or isinstance(batches, torch.utils.data.Dataset | Tensor | Mapping | str):
        kind = type(batches).__name__
        raise FedKSeedError(f"{owner} is a {kind}; give a list of batches or a DataLoader: {EXPECTED}")
    if isinstance(batches, tuple) and _is_batch(batches):
        raise FedKSeedError(f"{owner} is {described(batches)}, one batch; put it into a list: {EXPECTED}")
    if not len(batches):
        raise FedKSeedError(f"{owner} has no batch, and every client needs one; leave it out")
    return batches


def batches_of_clients(batches: Any) -> dict[str, Sequence[Any]]:
    """The batches of each client by name: of a dict, or of the items of a list; a list of batches is one client's."""
    clients = dict(batches) if isinstance(batches, Mapping) else batches
    if isinstance(batches, DataLoader) or (isinstance(batches, Sequence) and batches and all(map(_is_batch, batches))):
        clients = [batches]
    if not isinstance(clients, Sequence | dict) or not clients:
        kind = f"a {type(batches).__name__}" + (" of length 0" if isinstance(clients, Sequence | dict) else "")
        raise FedKSeedError(f"batches is {kind}: {EXPECTED}")
    named = clients.items() if isinstance(clients, dict) else enumerate(clients)
    return {f"client {name}": batches_of(client, f"client {name}") for name, client in named}


def _is_batch(part: Any) -> bool:
    """Whether an item of a list is a batch, and not a client: a dict, a tensor, or tensors of several kinds."""
    if isinstance(part, Mapping | Tensor):
        return True
    if not isinstance(part, list | tuple) or not part or not all(isinstance(each, Tensor) for each in part):
        return False
    return isinstance(part, tuple) or len({(each.dtype, each.shape[1:]) for each in part}) > 1


def described(batch: Any) -> str:
    """A batch in words."""
    if isinstance(batch, Tensor):
        place = "" if batch.device.type == "cpu" else f" on {batch.device}"
        return f"a tensor of {tuple(batch.shape)} {str(batch.dtype).removeprefix('torch.')}{place}"
    if isinstance(batch, Mapping):
        return f"a batch of {', '.join(f'{name}: {described(part)}' for name, part in batch.items())}"
    if isinstance(batch, list | tuple) and len(batch) <= 8:
        return f"a {type(batch).__name__} of {', '.join(map(described, batch)) or 'nothing'}"
    return f"a {type(batch).__name__}"
