"""Facts about the Flower that is tested, and one workaround; no other file names a version.

For an upgrade: change TESTED, run tests/network/flower, and `pytest -m network tests/network/flower`.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from ...errors import FedKSeedError

# 1.41: parties of different minor versions refuse each other.
TESTED = "1.41."

# 1.41: Flower and its libraries send usage data and ask for updates. They read some of these variables when they are
# imported, so that the simulation sets them before. Whoever starts Flower's own programs sets them, or does not.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_DISABLE_TELEMETRY": "1",
}  # fmt: skip

# 1.41: an error is a number and a reason in Flower's terms; these words come first for whoever runs a server.
NODE_GONE = 5
ERRORS = {
    1: "its ClientApp can't be loaded",
    2: "its ClientApp failed",
    3: "its reply is missing, or its message",
    4: "its reply was lost",
    NODE_GONE: "it is gone",
    8: "its ClientApp was killed",
}


def require_flower(simulated: bool = False) -> None:
    """Refuse to go on without Flower, without what it needs for simulations, or with a version that was not tested.

    Raises:
        FedKSeedError: a tested version is not installed; the message says what to install.
    """
    install = "install it with: pip install 'fedkseed[flower]'"
    try:
        installed = version("flwr")
    except PackageNotFoundError as error:
        raise FedKSeedError(f"Flower's engine needs Flower; {install}") from error
    if simulated and find_spec("ray") is None:
        raise FedKSeedError("Flower's simulation engine needs Ray; install it with: pip install 'flwr[simulation]'")
    if not installed.startswith(TESTED):
        raise FedKSeedError(f"Flower {installed} is installed, fedkseed was tested with {TESTED}*; {install}")
