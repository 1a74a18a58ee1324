"""The federation of three clients that the tests of Flower begin with, where that extra is installed."""

from importlib.util import find_spec

if find_spec("flwr"):
    from ..flower.conftest import setting, undisturbed  # noqa: F401 - fixtures
