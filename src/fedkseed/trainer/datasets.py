"""Rows of a user's datasets as the batches of clients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from accelerate.utils import send_to_device
from torch.utils.data import BatchSampler, Dataset, Subset, default_collate
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, default_data_collator

from ..errors import FedKSeedError
from ..randomness import EVERYONE, Purpose, generator
from .client_batches import Batches

Collate: TypeAlias = Callable[[list[Any]], Any]  # of rows to the batch that a loss takes


@dataclass(frozen=True, slots=True)
class Collator:
    """A function of rows to a batch on a device.

    Args:
        columns: those that are kept of rows that are dicts; None: all.
        without: a column that is never kept.
        collate: of the rows; None: as transformers does for dicts, and PyTorch for others.
        tokenizer: pads rows of tokens where nothing else collates them.
    """

    device: torch.device
    columns: frozenset[str] | None = None
    without: str | None = None
    collate: Collate | None = None
    tokenizer: Any = None

    def __call__(self, rows: list[Any]) -> Any:
        collate = self.collate
        if isinstance(rows[0], Mapping):
            rows = [self._cut(row) for row in rows]
            of_text = isinstance(self.tokenizer, PreTrainedTokenizerBase)
            collate = collate or (DataCollatorWithPadding(self.tokenizer) if of_text else default_data_collator)
        return send_to_device((collate or default_collate)(rows), self.device)

    def _cut(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row with the columns that are kept."""
        names = {*row} - {self.without} if self.columns is None else self.columns - {self.without}
        kept = {name: column for name, column in row.items() if name in names}
        if not kept:
            raise FedKSeedError(
                f"a row has the columns {', '.join(map(str, row))}, and the model's forward takes none of them; rename "
                "columns, or set remove_unused_columns=False"
            )
        return kept


def shuffled(rows: Any, size: int, collate: Collate, seed: int, client: int, drop_last: bool = False) -> Batches:
    """The batches of a client's rows in an order of chance: those of a file may lie in the order of their labels.

    Args:
        size: rows of a batch; the last batch has what is left, or is left out with `drop_last`.
    """
    order = generator(seed, Purpose.BATCHES, EVERYONE, client).permutation(len(rows)).tolist()
    return Batches(rows, list(BatchSampler(order, size, drop_last)), collate)


def shares(dataset: Any, column: str | None = None) -> dict[str, Any]:
    """The dataset of each client by name: the values of a dict, the datasets of a list, or one.

    Args:
        column: the column that names the client of a row; None: rows don't say.

    Raises:
        FedKSeedError: a dataset has no length or no row, or a row lacks the column.
    """
    if column is not None:
        _require_rows({"train_dataset": dataset})
        return _by_column(dataset, column)
    if isinstance(dataset, Mapping):
        datasets = {str(name): rows for name, rows in dataset.items()}
    elif isinstance(dataset, list | tuple) and dataset and all(_is_dataset(rows) for rows in dataset):
        datasets = {str(number): rows for number, rows in enumerate(dataset)}
    else:
        datasets = {"0": dataset}
    _require_rows(datasets)
    return datasets


def _by_column(dataset: Any, column: str) -> dict[str, Any]:
    places: dict[str, list[int]] = {}
    try:
        of_datasets = hasattr(dataset, "column_names")  # reads the column alone, and not every image of a row
        values = dataset[column] if of_datasets else (dataset[row][column] for row in range(len(dataset)))
        for row, value in enumerate(values):
            places.setdefault(str(value), []).append(row)
    except (KeyError, TypeError, IndexError) as error:
        raise FedKSeedError(f"client_column = {column!r} is no column of each row; give dicts that have it") from error
    return {name: Subset(dataset, rows) for name, rows in places.items()}


def _is_dataset(item: Any) -> bool:
    """True if an item of a list is a client's dataset and not a row: a Dataset, or a list of rows."""
    of_rows = isinstance(item, list) and bool(item) and isinstance(item[0], Mapping | tuple)
    return of_rows or isinstance(item, Dataset) or hasattr(item, "column_names")


def _require_rows(datasets: Mapping[str, Any]) -> None:
    if not datasets:
        raise FedKSeedError("train_dataset has no client; give a dataset, a list or dict of datasets, one a client")
    for name, rows in datasets.items():
        if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            kind = type(rows).__name__
            raise FedKSeedError(f"the dataset {name!r} is a {kind}; give one whose length is known, with numbered rows")
        if not len(rows):
            raise FedKSeedError(f"the dataset {name!r} has no row; leave the client out")
