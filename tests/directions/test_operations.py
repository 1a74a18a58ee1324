"""The fast kernels against the definition, bit for bit."""

import numpy as np
import pytest
import torch

from fedkseed import FedKSeedError, Pool, accumulate_, materialize, project
from fedkseed.directions import reference
from fedkseed.directions.operations import DirectionSum, Piece

from . import PLAIN

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANGES = [(0, 576), (37, 4000), (4090, 4100), (4096, 8192), (5000, 12345)]
TENSOR = 7
NO_TERMS = np.empty(0, np.uint32), np.empty(0, np.float32)


def bits(w: torch.Tensor) -> np.ndarray:
    return w.view({4: torch.int32, 2: torch.int16}[w.element_size()]).numpy()


def expected(pool, directions, coefficients, base, start, addend=None):
    """The definition's answer for a base tensor, as a tensor of its type."""
    total = reference.total(pool, directions, coefficients, TENSOR, start, start + base.numel(), addend)
    name = str(base.dtype).removeprefix("torch.")
    made = reference.combine(base.float().numpy(), total, name)
    return torch.from_numpy(made.view(np.int16)).view(base.dtype) if name == "bfloat16" else torch.from_numpy(made)


def weights(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Weights of many magnitudes, subnormal float16 ones and −0 among them."""
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=size) * 10.0 ** rng.integers(-8, 3, size)).astype(np.float32)
    values[::5] = -0.0
    return torch.from_numpy(values).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("size", [1, 2, 8, 32, 4096, 8192])
@pytest.mark.parametrize("family", PLAIN)
def test_kernels_equal_the_definition(family, size, dtype):
    pool, rng = Pool(0x123456789ABCDEF, size, family), np.random.default_rng(size)
    for start, stop in RANGES:
        for count in {1, min(size, 3), size if family in ("hadamard", "hashed") else 2}:
            count = min(count, size)
            directions = np.sort(rng.choice(size, count, replace=False)).astype(np.uint32)
            coefficients = rng.normal(size=count).astype(np.float32)
            addend = rng.normal(size=stop - start).astype(np.float32) if count % 2 else None
            base = weights(stop - start, dtype)
            out = torch.empty_like(base)
            piece = Piece(TENSOR, base, out, start, None if addend is None else torch.from_numpy(addend))
            DirectionSum(pool, directions, coefficients).combine([piece])
            want = expected(pool, directions, coefficients, base, start, addend)
            np.testing.assert_array_equal(bits(out), bits(want), err_msg=f"{start}:{stop}, {count} directions")


@pytest.mark.parametrize("family", PLAIN)
def test_a_sum_of_nothing_equals_the_definition(family):
    pool, base = Pool(3, 64, family), weights(5000, torch.float32)
    out = torch.empty_like(base)
    materialize(base, pool, np.zeros(64), out, tensor=TENSOR)
    want = expected(pool, *NO_TERMS, base, 0)
    np.testing.assert_array_equal(bits(out), bits(want))
    assert not torch.signbit(out[base == 0]).any()


@pytest.mark.parametrize("family", PLAIN)
def test_a_tensor_made_in_parts_equals_one_made_whole(family):
    pool, c = Pool(9, 256, family), np.random.default_rng(1).normal(size=256).astype(np.float32)
    base = weights(600_000, torch.float32)
    whole, parts = torch.empty_like(base), torch.empty_like(base)
    if family in ("gaussian", "rademacher"):
        c[8:] = 0  # eight directions are enough here and sixty times faster
    materialize(base, pool, c, whole, tensor=1)
    cuts = [0, 1, 4095, 262_144, 300_001, 600_000]
    for a, b in zip(cuts[:-1], cuts[1:], strict=True):
        materialize(base[a:b], pool, c, parts[a:b], tensor=1, start=a)
    np.testing.assert_array_equal(bits(parts), bits(whole))


@pytest.mark.parametrize("family", PLAIN)
def test_the_number_of_threads_changes_no_bit(family):
    pool, v = Pool(9, 16, family), weights(1_100_000, torch.float32) * 1e-3
    before, made, projected = torch.get_num_threads(), [], []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            w = v.clone()
            accumulate_(w, pool, [2, 5], [0.5, -0.25])
            made.append(bits(w))
            projected.append(project(v, pool))
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(*made)
    np.testing.assert_array_equal(*projected)


@pytest.mark.parametrize(
    ("family", "size"),
    [(family, size) for family in PLAIN for size in (1, 8, 64)]
    + [(family, size) for family in ("hadamard", "hashed") for size in (4096, 8192)],
)
def test_project_equals_the_definition(family, size):
    pool = Pool(21, size, family)
    v = weights(9000, torch.float32)
    np.testing.assert_array_equal(project(v, pool, tensor=3, start=100), reference.project(pool, v.numpy(), 3, 100))


@pytest.mark.parametrize("family", PLAIN)
def test_project_is_the_adjoint_of_accumulate(family):
    """⟨Σ c_j z_j, v⟩ = Σ c_j ⟨z_j, v⟩."""
    pool, rng = Pool(4, 64, family), np.random.default_rng(2)
    v = torch.from_numpy(rng.normal(size=50_000).astype(np.float32))
    c = rng.normal(size=64).astype(np.float32)
    w = torch.zeros(50_000)
    accumulate_(w, pool, np.arange(64), c, tensor=5)
    left = float(w.double() @ v.double())
    right = float(c.astype(np.float64) @ project(v, pool, tensor=5))
    scale = float(w.double().norm() * v.double().norm())
    assert abs(left - right) < 1e-6 * scale  # float32 products and block sums


def test_materialize_leaves_the_base_alone_and_accumulate_works_in_place():
    pool, base = Pool(1, 16, "hadamard"), torch.ones(100)
    out = torch.empty(100)
    c = np.zeros(16)
    c[3] = 0.5
    materialize(base, pool, c, out)
    assert torch.equal(base, torch.ones(100))
    accumulate_(base, pool, [3], [0.5])
    assert torch.equal(base, out)


@pytest.mark.parametrize(
    ("tensor", "start", "message"),
    [
        (torch.zeros(4, dtype=torch.float64), 0, "float32, bfloat16 or float16, got torch.float64"),
        (torch.zeros(4, 4)[:, :2], 0, "contiguous"),
        (torch.zeros(4, device="meta"), 0, "on meta"),
        (torch.zeros(4), -1, "positions"),
        (torch.zeros(4), 1 << 34, "positions"),
    ],
)
def test_weights_that_cannot_be_worked_on_are_refused(tensor, start, message):
    with pytest.raises(FedKSeedError, match=message):
        accumulate_(tensor, Pool(0, 4, "hadamard"), [1], [1.0], start=start)


def test_a_sum_over_a_pool_is_that_of_its_coefficients_that_are_not_zero():
    pool, c = Pool(1, 64, "hadamard"), np.zeros(64, np.float32)
    c[[3, 17]] = 0.5, -0.25
    found, want = torch.zeros(500), torch.zeros(500)
    DirectionSum.over(pool, c).combine([Piece(TENSOR, found, found)])
    DirectionSum(pool, *pool.select([3, 17], [0.5, -0.25])).combine([Piece(TENSOR, want, want)])
    assert torch.equal(found, want)
    assert found.any()


def test_a_sum_with_a_coefficient_that_is_not_finite_changes_nothing():
    w = torch.zeros(500)
    with pytest.raises(FedKSeedError, match="finite float32 numbers, got inf"):
        DirectionSum.over(Pool(1, 64, "hadamard"), np.full(64, np.inf, np.float32)).combine([Piece(TENSOR, w, w)])
    assert not w.any()


def test_only_types_of_weights_can_be_projected():
    with pytest.raises(FedKSeedError, match=r"weights must be float32, bfloat16 or float16, got torch\.float64"):
        project(torch.zeros(4, dtype=torch.float64), Pool(0, 4, "hadamard"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["hadamard", "hashed"])
def test_16_bits_are_projected_some_at_a_time_to_the_bits_of_float32(family, dtype, monkeypatch):
    pool, start, step = Pool(6, 16, family), 3_000_000, reference.SEGMENT
    v = torch.from_numpy(np.random.default_rng(1).normal(size=5 * step).astype(np.float32)).to(dtype)
    expected = project(v.float(), pool, tensor=2, start=start)
    held = []
    widen = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda self: (held.append(self.numel()), widen(self))[1])
    np.testing.assert_array_equal(project(v, pool, tensor=2, start=start), expected)
    assert sum(held) == v.numel()
    assert max(held) <= 4 * step


def test_a_vector_of_the_wrong_length_is_refused():
    with pytest.raises(FedKSeedError, match="4 directions, got 3 coefficients"):
        materialize(torch.zeros(4), Pool(0, 4, "hadamard"), np.zeros(3), torch.zeros(4))
