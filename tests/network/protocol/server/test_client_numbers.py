"""Numbers of clients: fixed by registered keys, or given out as nodes come, and kept."""

import pytest

from fedkseed import FedKSeedError
from fedkseed.network.protocol.server.client_numbers import NUMBERS, ClientNumbers

from ....run.synthetic import flips, refused

NODES = (111, 222, 333)  # as a carrier names them


def test_nodes_without_registered_keys_get_numbers_as_they_come_and_keep_them(tmp_path):
    numbers = ClientNumbers(tmp_path, 3)
    assert numbers.clients_at([50]) == {0: 50}
    assert numbers.clients_at([50, 20, 40]) == {0: 50, 1: 20, 2: 40}
    assert ClientNumbers(tmp_path, 3).clients_at([40, 60]) == {2: 40}
    with pytest.raises(FedKSeedError, match="how many clients are there"):
        ClientNumbers(tmp_path / "none", None)


def test_one_flipped_bit_in_the_numbers_of_clients_is_refused(tmp_path):
    """Another node would have a client's number, or none."""
    ClientNumbers.register(tmp_path, NODES, revoked=[1])
    for where in flips(tmp_path / NUMBERS, 300):
        assert refused(lambda: ClientNumbers(tmp_path, 3)), where
        assert refused(lambda: ClientNumbers.registered(tmp_path)), where
    assert ClientNumbers(tmp_path, None).clients_at(NODES) == dict(enumerate(NODES))
