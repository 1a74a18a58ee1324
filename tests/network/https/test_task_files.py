"""Tasks in parts: whole again to the byte, or refused."""

import hashlib

import pytest

from fedkseed import FedKSeedError
from fedkseed.network.https.task_files import DIGEST, KEY, LARGEST, NOTHING, Stub
from fedkseed.network.protocol.envelope import LINK, Task, recipe_digest

RECIPE = b"[model]\n"


def task(client: int = 1, recipe: bytes = RECIPE, certificate: bytes = b"DER", links: int = 2) -> Task:
    about = {"certificate": certificate, "since": 3, "links": bytes(LINK * links), "head": b"h" * LINK}
    return Task(
        client, 60.0, recipe_digest(recipe), recipe, b"a broadcast" * 40, b"n" * 16, 7, **about, signature=b"s" * 64
    )


@pytest.mark.parametrize("recipe", [RECIPE, b""])
@pytest.mark.parametrize("certificate", [b"DER", b""])
@pytest.mark.parametrize("links", [0, 1, 65535])
def test_a_task_in_parts_is_whole_again(recipe, certificate, links):
    data = task(recipe=recipe, certificate=certificate, links=links).encode()
    stub, files = Stub.of(b"k" * KEY, data)
    assert Stub.decode(stub.encode()) == stub
    assert stub.task(files.__getitem__) == data
    assert len(stub.encode()) == len(data) - sum(map(len, files.values())) + KEY + 3 * DIGEST
    assert len(files) == 1 + bool(recipe) + bool(certificate)
    assert [name == NOTHING for name in stub.names] == [not recipe, not certificate, False]


def test_the_largest_task_has_the_largest_stub():
    assert len(Stub.of(b"k" * KEY, task(links=65535).encode())[0].encode()) == LARGEST


def test_clients_of_a_round_share_their_files():
    both = [Stub.of(bytes([client]) * KEY, task(client).encode()) for client in (1, 2)]
    assert both[0][1] == both[1][1]
    assert both[0][0].names == both[1][0].names
    assert both[0][0].frame != both[1][0].frame


def test_another_file_under_the_name_is_refused():
    stub, files = Stub.of(b"k" * KEY, task().encode())
    wrong = {name: data + b"!" for name, data in files.items()}
    with pytest.raises(FedKSeedError, match=r"the task's recipe is the file [0-9a-f]{64}, and 9 other bytes came"):
        stub.task(wrong.__getitem__)
    message = hashlib.sha256(task().message).digest()
    with pytest.raises(FedKSeedError, match="the task's message is the file"):
        stub.task((files | {message: b""}).__getitem__)


@pytest.mark.parametrize("size", [0, KEY, 285, LARGEST + 1])
def test_a_stub_of_another_length_is_refused(size):
    with pytest.raises(FedKSeedError, match=f"has [0-9]+ to {LARGEST} bytes, got {size}"):
        Stub.decode(bytes(size))


def test_a_task_that_is_cut_short_has_no_stub():
    with pytest.raises(FedKSeedError, match="a task has status"):
        Stub.of(b"k" * KEY, task().encode()[:50])
