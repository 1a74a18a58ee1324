"""The command directions; reproduce and basis have tests of their own."""

from ..commands import fedkseed, refused


def test_directions_checks_every_backend():
    result = fedkseed("directions")
    assert result.exit_code == 0
    assert all(backend in result.output for backend in ("numpy", "numba", "torch"))
    assert "can't use the device 'nonsense'" in refused("directions", "--device", "nonsense")
    assert "on meta have no numbers" in refused("directions", "--device", "meta")
