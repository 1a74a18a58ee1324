"""Batches as PyTorch users keep them: what is unambiguous works, and anything else gets a sentence."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fedkseed import FedKSeedError
from fedkseed.trainer.client_batches import batches_of_clients, described

X, Y = torch.randn(10, 3), torch.arange(10)
PAIR, NAMED = (X, Y), {"x": X}
ROWS = TensorDataset(X, Y)


def loader(**more):
    return DataLoader(ROWS, **{"batch_size": 4, **more})


class Endless(IterableDataset):
    def __iter__(self):
        return iter([1])


@pytest.mark.parametrize(
    ("batches", "counts"),
    [
        ([[PAIR, PAIR], [PAIR]], [2, 1]),
        ({"north": [PAIR], "south": (PAIR, PAIR)}, [1, 2]),
        ([[X, X], [X]], [2, 1]),  # a batch is a tensor
        ([loader(), loader(drop_last=True)], [3, 2]),
        ({"north": loader()}, [3]),
        # One client's batches:
        (loader(), [3]),
        ([PAIR, PAIR], [2]),
        ([NAMED, NAMED, NAMED], [3]),
        ([[X, Y], [X, Y]], [2]),  # as a DataLoader makes them
        ([X, X], [2]),
    ],
)
def test_what_is_unambiguous_works(batches, counts):
    assert [len(own) for own in batches_of_clients(batches).values()] == counts


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_s_batches_are_its_own_and_the_same_each_time(shuffle):
    draw = torch.Generator().manual_seed(1)
    (own,) = batches_of_clients(loader(shuffle=shuffle, generator=draw)).values()
    rows = torch.cat([labels for _, labels in (own[k] for k in range(len(own)))]).tolist()
    assert sorted(rows) == list(range(10))
    assert (rows == sorted(rows)) != shuffle
    assert all(torch.equal(own[1][0], own[1][0]) for _ in range(2))


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        ([], "batches is a list of length 0: batches is a list with the batches of each client"),
        ({}, "batches is a dict of length 0"),
        ((pair for pair in [PAIR]), "batches is a generator"),
        (X, "batches is a Tensor"),
        ("rows.csv", "client 0 is a str"),
        (None, "batches is a NoneType"),
        ([[PAIR], []], "client 1 has no batch, and every client needs one; leave it out"),
        ([ROWS], "client 0 is a TensorDataset; give a list of batches or a DataLoader"),
        ({"north": ROWS}, "client north is a TensorDataset"),
        (ROWS, "batches is a TensorDataset"),
        ([iter([PAIR])], "client 0 is a list_iterator"),
        ([[PAIR], 3], "client 1 is a int"),
        (DataLoader(Endless()), "a DataLoader needs a dataset with numbered rows and a batch_size"),
        (loader(batch_size=None), "a DataLoader needs a dataset with numbered rows and a batch_size"),
    ],
    ids=lambda case: str(case)[:30] if isinstance(case, str) else type(case).__name__,
)
def test_anything_else_gets_a_sentence(batches, text):
    with pytest.raises(FedKSeedError, match=text):
        batches_of_clients(batches)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (X, r"a tensor of (10, 3) float32"),
        ([X, Y], "a list of a tensor of (10, 3) float32, a tensor of (10,) int64"),
        (NAMED, "a batch of x: a tensor of (10, 3) float32"),
        ((), "a tuple of nothing"),
        (list(range(9)), "a list"),
        (3, "a int"),
    ],
    ids=lambda case: case if isinstance(case, str) else type(case).__name__,
)
def test_a_batch_in_words(batch, text):
    assert described(batch) == text
