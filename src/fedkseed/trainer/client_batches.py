"""Batches of clients, in the forms in which PyTorch users keep them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..errors import FedKSeedError

EXPECTED = "batches is a list with the batches of each client, itself a list or a DataLoader"


class LoaderBatches(Sequence[Any]):
    """The batches of a DataLoader, made when they are asked for; which rows are in a batch is drawn once."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            raise FedKSeedError(
                "a DataLoader needs a dataset with numbered rows and a batch_size; put other batches into a list"
            )
        self.loader, self.places = loader, list(loader.batch_sampler)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: Any) -> Any:
        return self.loader.collate_fn([self.loader.dataset[row] for row in self.places[number]])


def batches_of(client: Any, name: object = 0) -> Sequence[Any]:
    """The batches of one client, or of held-out rows.

    Raises:
        FedKSeedError: they are of a kind that has no length or no batches, or there is none.
    """
    batches = LoaderBatches(client) if isinstance(client, DataLoader) else client
    sized = hasattr(batches, "__len__") and hasattr(batches, "__getitem__")
    if not sized or isinstance(batches, torch.utils.data.Dataset | Tensor | Mapping | str):
        kind = type(client).__name__
        raise FedKSeedError(f"client {name} is a {kind}; give a list of batches or a DataLoader: {EXPECTED}")
    if isinstance(batches, tuple) and _is_batch(batches):
        raise FedKSeedError(f"client {name} is {described(batches)}, one batch; put it into a list: {EXPECTED}")
    if not len(batches):
        raise FedKSeedError(f"client {name} has no batch, and every client needs one; leave it out")
    return batches


def batches_of_clients(batches: Any) -> list[Sequence[Any]]:
    """The batches of each client: of the values of a dict or the items of a list; a list of batches is one client's."""
    clients = dict(batches) if isinstance(batches, Mapping) else batches
    if isinstance(batches, DataLoader) or (isinstance(batches, Sequence) and batches and all(map(_is_batch, batches))):
        clients = [batches]
    if not isinstance(clients, Sequence | dict) or not clients:
        kind = f"a {type(batches).__name__}" + (" of length 0" if isinstance(clients, Sequence | dict) else "")
        raise FedKSeedError(f"batches is {kind}: {EXPECTED}")
    named = clients.items() if isinstance(clients, dict) else enumerate(clients)
    return [batches_of(client, name) for name, client in named]


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
        return f"a tensor of {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"a batch of {', '.join(map(str, batch))}"
    if isinstance(batch, list | tuple) and len(batch) <= 8:
        return f"a {type(batch).__name__} of {', '.join(map(described, batch)) or 'nothing'}"
    return f"a {type(batch).__name__}"
