"""A client over HTTPS that its server does not answer; rounds of such clients are in tests/flower/test_network.py."""

import pytest

from fedkseed.errors import FedKSeedError
from fedkseed.flower.certs import make
from fedkseed.flower.children import free_port
from fedkseed.flower.client.consent import Owner
from fedkseed.https.join import Attendance


class StopError(Exception):
    """The end of a test's patience."""


def test_a_client_without_a_server_says_so_at_once_and_once_and_tries_again_later_and_later(tmp_path, data_file):
    make(tmp_path, 1, ["localhost"], 2)
    url = f"https://localhost:{free_port()}"
    client = Attendance(tmp_path / "c", url, tmp_path / "ca.pem", tmp_path / "client-0", Owner(str(data_file)), 60)
    said, slept = list[str](), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            raise StopError

    with pytest.raises(StopError):
        client.serve(said.append, sleep)
    assert len(said) == 2
    assert said[1].startswith(f"no answer from {url} (")
    assert said[1].endswith("is the server running?; trying again until it answers")
    assert all(0.5 * 2**k <= seconds < 1.5 * 2**k for k, seconds in enumerate(slept)), "twice as long each time"


@pytest.mark.parametrize("url", ["http://localhost:1", "localhost:8443", "https://localhost:1/rounds"])
def test_an_address_that_is_none_is_refused(tmp_path, data_file, url):
    make(tmp_path, 1, ["localhost"], 2)
    with pytest.raises(FedKSeedError, match="a server is https://HOST:PORT, got"):
        Attendance(tmp_path / "c", url, tmp_path / "ca.pem", tmp_path / "client-0", Owner(str(data_file)), 60)
