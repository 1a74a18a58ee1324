"""The definition itself: known answers, and the properties the method rests on."""

import math

import numpy as np
import pytest

from fedkseed import FedKSeedError, Pool
from fedkseed.directions import FAMILIES, reference, vectors

from . import PLAIN

PUBLISHED = vectors.load()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, words):
    assert tuple(int(word[0]) for word in reference.philox(counter, key)) == words


@pytest.mark.parametrize(
    ("backend", "section", "case"),
    [(backend, *case) for backend in ("numpy", "numba", "torch") for case in vectors.cases_of(backend)],
    ids=lambda part: part["name"] if isinstance(part, dict) else part,
)
def test_every_backend_gives_the_published_bits(section, case, backend):
    assert vectors.SECTIONS[section](case, backend) == case["bits"]


def test_the_published_vectors_cover_every_family_and_type():
    covered = {(case["family"], case["dtype"]) for case in PUBLISHED["weights"]}
    assert covered == {(family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16", "float16")}


@pytest.mark.parametrize("family", PLAIN)
def test_elements_do_not_depend_on_how_the_range_is_cut(family):
    pool = Pool(7, 64, family)
    whole = reference.elements(pool, 5, 2, 0, 10_000)
    cuts = [0, 3, 517, 1000, 4096, 8191, 10_000]
    parts = [reference.elements(pool, 5, 2, a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("change", [{"key": 8}, {"tensor": 3}, {"direction": 6}])
def test_another_key_tensor_or_direction_gives_other_elements(family, change):
    one = {"key": 7, "tensor": 2, "direction": 5}
    other = one | change
    a, b = (reference.elements(Pool(v["key"], 64, family), v["direction"], v["tensor"], 0, 4096) for v in (one, other))
    # two unrelated vectors of 4,096 unit-variance elements have an inner product of 64 standard deviation
    assert abs(float(a @ b)) < 5 * 64


@pytest.mark.parametrize("family", ["rademacher", "hadamard", "hashed"])
def test_signs_are_plus_and_minus_one_equally_often(family):
    z = reference.elements(Pool(1, 1024, family), 77, 0, 0, 1 << 18)
    assert set(np.unique(z)) == {-1.0, 1.0}
    assert abs(z.mean()) < 4 / math.sqrt(z.size)  # four standard errors
    neighbours = (z[1:] * z[:-1]).mean()
    assert abs(neighbours) < 4 / math.sqrt(z.size)


def test_normals_have_the_exact_moments_that_the_docs_state():
    """Every radius and every angle, not a sample: moments are sums over 2^18 radii times 2^14 angles."""
    radii = np.arange(1 << 18, dtype=np.uint32) << np.uint32(14)  # angle bits zero: the same angle for all
    angles = np.arange(1 << 14, dtype=np.uint32) | np.uint32(1 << 31)
    a, b = (x.astype(np.float64) for x in reference.normals(angles))
    assert abs(a.mean()) == 0
    assert abs(b.mean()) == 0
    assert abs((a * b).mean()) < 1e-7
    length = np.hypot(a, b)
    assert length.max() - length.min() < 3e-5 * length.mean()  # cos and sin fit together on the circle
    first, second = (x.astype(np.float64) for x in reference.normals(radii))
    squares = first**2 + second**2  # radius², exponential with mean 2
    # a radius and an angle are independent, so moments multiply; word 0 has the first radius' angle
    at_first_angle = a[0] ** 2 + b[0] ** 2
    for of_angle in (a, b):
        variance = squares.mean() * (of_angle**2).mean() / at_first_angle
        assert variance == pytest.approx(1, abs=5e-6)
        fourth = (squares**2).mean() * (of_angle**4).mean() / at_first_angle**2
        assert fourth == pytest.approx(3, rel=1e-3)
    assert math.sqrt(squares.max()) == pytest.approx(5.13, abs=0.01)


def test_normals_are_distributed_like_normals():
    z = np.sort(reference.elements(Pool(3, 16, "gaussian"), 9, 1, 0, 1 << 20).astype(np.float64))
    exact = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in z[:: 1 << 6]])
    empirical = np.arange(z.size)[:: 1 << 6] / z.size
    assert np.abs(exact - empirical).max() < 1.95 / math.sqrt(z.size)  # Kolmogorov–Smirnov at 0.1 %


@pytest.mark.parametrize("family", ["hadamard", "hashed"])
@pytest.mark.parametrize("size", [2, 16, 128])
def test_different_directions_are_exactly_orthogonal_on_whole_blocks(family, size):
    pool = Pool(11, size, family)
    z = np.stack([reference.elements(pool, j, 4, 0, 4 * size) for j in range(size)])
    np.testing.assert_array_equal(z @ z.T, 4 * size * np.eye(size))


@pytest.mark.parametrize("family", PLAIN)
def test_the_sum_over_directions_is_the_sum_of_elements(family):
    pool, rng = Pool(5, 32, family), np.random.default_rng(0)
    directions = np.array([0, 3, 17, 31], np.uint32)
    c = rng.normal(size=4).astype(np.float32)
    expected = sum(
        float(k) * reference.elements(pool, int(j), 1, 100, 5000) for j, k in zip(directions, c, strict=True)
    )
    got = reference.total(pool, directions, c, 1, 100, 5000)
    np.testing.assert_allclose(got, expected, atol=4 * 2**-22)  # four roundings of sums below 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 8, "gaussian"), "64-bit"),
        ((1 << 64, 8, "gaussian"), "64-bit"),
        ((0, 0, "gaussian"), "1 to 4294967296 directions, got 0"),
        ((0, (1 << 32) + 1, "rademacher"), "got 4294967297"),
        ((0, 1000, "hadamard"), "power of two as its size K, got 1000; the next one is 1024"),
        ((0, 1 << 21, "hashed"), "1 to 1048576 directions"),
        ((0, 8, "sobol"), "no family of directions is called 'sobol'"),
    ],
)
def test_a_pool_that_is_not_allowed_is_refused(arguments, message):
    with pytest.raises(FedKSeedError, match=message):
        Pool(*arguments)


@pytest.mark.parametrize(
    ("directions", "coefficients", "message"),
    [
        ([1, 2], [1.0], "2 directions and 1 coefficients"),
        ([8], [1.0], "0 to 7, got 8"),
        ([-1], [1.0], "got -1"),
        ([2, 1], [1.0, 1.0], "ascending"),
        ([2, 2], [1.0, 1.0], "each once"),
        ([2], [math.nan], "finite"),
        ([2], [1e39], "finite"),
    ],
)
def test_coefficients_that_are_not_allowed_are_refused(directions, coefficients, message):
    with pytest.raises(FedKSeedError, match=message):
        Pool(0, 8, "gaussian").select(directions, coefficients)
