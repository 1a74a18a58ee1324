"""Datasets as clients' batches: who is a client, and every row once."""

import pytest
from torch.utils.data import Dataset, IterableDataset

from fedkseed import FedKSeedError
from fedkseed.trainer.datasets import shares, shuffled


class Squares(Dataset):
    """A dataset with a length and without an iterator of its own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"Squares({self.count})"  # names of tests are the same in all processes

    def __getitem__(self, row: int) -> tuple[int, int]:
        return row, row * row


class Endless(IterableDataset):
    def __repr__(self) -> str:
        return "Endless()"

    def __iter__(self):
        return iter([1])


def test_batches_have_every_row_once_and_the_last_may_be_left_out():
    batches = shuffled(Squares(10), 4, list, 3, 0)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    order = [row for batch in batches for row, _ in batch]
    assert sorted(order) == list(range(10))
    others = [[row for batch in shuffled(Squares(10), 4, list, *of) for row, _ in batch] for of in ((3, 1), (4, 1))]
    assert list(range(10)) != order != others[0] != others[1]
    assert len(shuffled(Squares(10), 4, list, 3, 0, drop_last=True)) == 2
    with pytest.raises(IndexError):
        batches[3]


ROW = {"x": 1}


@pytest.mark.parametrize(
    ("dataset", "names"),
    [
        ([ROW, ROW], ["0"]),
        ([(1, 2), (3, 4)], ["0"]),
        ([[1, 2], [3, 4]], ["0"]),  # rows of tokens
        ([[ROW], [ROW, ROW]], ["0", "1"]),
        ([Squares(2), Squares(3)], ["0", "1"]),
        ({"ward": Squares(2), "clinic": [ROW]}, ["ward", "clinic"]),
    ],
    ids=str,
)
def test_a_list_of_datasets_is_clients_and_a_list_of_rows_is_one(dataset, names):
    assert list(shares(dataset)) == names


def test_a_column_names_clients_in_the_order_in_which_they_come():
    rows = [{"who": name, "x": k} for k, name in enumerate("bab")]
    found = shares(rows, "who")
    assert {name: [row["x"] for row in own] for name, own in found.items()} == {"b": [0, 2], "a": [1]}


@pytest.mark.parametrize(
    ("dataset", "column", "text"),
    [
        (Endless(), None, "the dataset '0' is a Endless; give one whose length is known"),
        ({"a": [ROW], "b": []}, None, "the dataset 'b' has no row"),
        ({}, None, "train_dataset has no client"),
        (Squares(2), "who", "client_column = 'who' is no column"),
        ([ROW], "who", "client_column = 'who' is no column"),
    ],
    ids=str,
)
def test_what_is_no_dataset_is_refused(dataset, column, text):
    with pytest.raises(FedKSeedError, match=text):
        shares(dataset, column)
