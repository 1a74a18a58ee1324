"""Factored families: bits of the definition in every operation, factors that fit, and a basis that names itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedkseed import FedKSeedError, Pool, accumulate_, materialize, project
from fedkseed.directions import backends, reference
from fedkseed.directions.factors import Basis, Factor, Matrix

from . import FACTORED
from .test_operations import DTYPES, bits, weights

SHAPES = {"a": (100, 70), "b": (100, 70), "c": (5000, 33), "d": (9,), "e": (40, 6, 5), "f": (3, 3)}
SIZE = 64


def factor(first: int, shape: tuple[int, ...], ranks: tuple[int, int], seed: int) -> Factor:
    rng, matrix = np.random.default_rng([seed, first]), Matrix.of(shape)
    sides = ((matrix.rows, ranks[0]), (matrix.columns, ranks[1]))
    left, right = (rng.integers(-127, 128, side).astype(np.int8) for side in sides)
    scales = ((rng.random(rank) / 64 + 2**-8).astype(np.float32) for rank in ranks)
    return Factor(matrix.rows, matrix.columns, first, left, right, *scales)


def basis(seed: int = 0) -> Basis:
    """Factors of some ranks, two of them for matrices of one shape, and none for the tensor f."""
    factors, first = {}, 0
    for name, ranks in {"a": (3, 4), "b": (4, 3), "c": (5, 2), "d": (1, 1), "e": (2, 6)}.items():
        factors[name] = factor(first, SHAPES[name], ranks, seed)
        first = factors[name].directions.stop
    return Basis(factors)


def pool(family: str) -> Pool:
    made = basis() if family != "separable" else None
    return Pool(7, SIZE, family, b"" if made is None else made.digest()).fitted(SHAPES, made)


def numbers(count: int = SIZE) -> np.ndarray:
    return np.random.default_rng(count).normal(size=count).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("tensor", range(len(SHAPES)))
@pytest.mark.parametrize("family", FACTORED)
def test_sums_equal_the_definition_wherever_a_tensor_is_cut(family, tensor, dtype):
    p, c = pool(family), numbers()
    base = weights(int(np.prod(list(SHAPES.values())[tensor])), dtype)
    want = reference.total(p, np.arange(SIZE, dtype=np.uint32), c, tensor, 0, base.numel())
    made = reference.combine(base.float().numpy(), want, str(dtype).removeprefix("torch."))
    out, parts = torch.empty_like(base), torch.empty_like(base)
    materialize(base, p, c, out, tensor=tensor)
    np.testing.assert_array_equal(bits(out).view(made.dtype if made.itemsize == 2 else np.float32), made)
    for a, b in ((0, 2), (2, 8), (8, base.numel())):
        materialize(base[a:b], p, c, parts[a:b], tensor=tensor, start=a)
    assert torch.equal(out, parts)


@pytest.mark.parametrize("tensor", range(len(SHAPES)))
@pytest.mark.parametrize("family", FACTORED)
def test_inner_products_equal_the_definition(family, tensor):
    p, size = pool(family), int(np.prod(list(SHAPES.values())[tensor]))
    v = weights(size, torch.float32)
    np.testing.assert_array_equal(project(v, p, tensor=tensor), reference.project(p, v.numpy(), tensor, 0))
    part = v[2 : size - 1].contiguous()
    np.testing.assert_array_equal(
        project(part, p, tensor=tensor, start=2), reference.project(p, part.numpy(), tensor, 2)
    )


@pytest.mark.parametrize("family", FACTORED)
def test_sums_and_inner_products_are_those_of_the_directions(family):
    p, c, v = pool(family), numbers(), weights(7000, torch.float32, 3).clamp(-8, 8)
    z = np.stack([reference.elements(p, j, 1, 0, 7000) for j in range(SIZE)]).astype(np.float64)
    total = reference.total(p, np.arange(SIZE, dtype=np.uint32), c, 1, 0, 7000)
    np.testing.assert_allclose(total, c @ z, atol=1e-5 * np.abs(z).max() * np.abs(c).sum())
    products = project(v, p, tensor=1)
    np.testing.assert_allclose(products, z @ v.numpy(), atol=1e-5 * np.abs(z).max() * np.abs(v.numpy()).sum())


def test_separable_directions_are_signs_of_rank_one_and_orthogonal_on_whole_tiles():
    p = Pool(3, 64, "separable").fitted({"w": (16, 24)})
    z = np.stack([reference.elements(p, j, 0, 0, 384) for j in range(64)])
    assert set(np.unique(z)) == {-1.0, 1.0}
    assert all(np.linalg.matrix_rank(one.reshape(16, 24)) == 1 for one in z)
    np.testing.assert_array_equal(z @ z.T, 384 * np.eye(64))


def test_another_key_or_tensor_gives_other_separable_directions():
    a, b = (Pool(key, 64, "separable").fitted({"v": (64, 64), "w": (64, 64)}) for key in (3, 4))
    one = reference.elements(a, 5, 0, 0, 4096)
    for other in (reference.elements(b, 5, 0, 0, 4096), reference.elements(a, 5, 1, 0, 4096)):
        assert abs(float(one @ other)) < 5 * 64


def test_an_informed_direction_is_one_outer_product_in_one_tensor():
    p, made = pool("informed"), basis()
    b = made.factors["b"]
    j = b.first + 2 * 3 + 1  # u_2 v_1ᵀ
    u, v = b.left[:, 2] * b.left_scale[2], b.right[:, 1] * b.right_scale[1]
    np.testing.assert_allclose(reference.elements(p, j, 1, 0, 7000), np.outer(u, v).ravel(), rtol=1e-6)
    assert not reference.elements(p, j, 0, 0, 7000).any()
    assert not reference.elements(p, made.size, 1, 0, 7000).any()  # beyond the basis


def test_a_mixed_direction_touches_every_tensor_of_the_basis_and_no_other():
    p = pool("mixed")
    touched = [bool(reference.elements(p, 5, k, 0, int(np.prod(s))).any()) for k, s in enumerate(SHAPES.values())]
    assert touched == [True, True, True, True, True, False]


@pytest.mark.parametrize("family", FACTORED)
def test_a_pool_that_was_not_fitted_says_so(family):
    bare = replace(pool(family), tensors=None)
    with pytest.raises(FedKSeedError, match=r"depend on the shapes of tensors; call Pool\.fitted first"):
        accumulate_(torch.zeros(9), bare, [0], [1.0])


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("separable", 2048, "a power of four, as 256, 1024 or 4096, got 2048"),
        ("separable", 1 << 22, "holds 1 to 1048576 directions"),
        ("mixed", 96, "a power of two, got 96"),
    ],
)
def test_a_size_that_does_not_go_is_refused(family, size, message):
    with pytest.raises(FedKSeedError, match=message):
        Pool(0, size, family, b"" if family == "separable" else bytes(32))


def test_a_pool_and_its_basis_belong_together():
    with pytest.raises(FedKSeedError, match="named by the SHA-256 of its basis, got 0 bytes"):
        Pool(0, 64, "informed")
    with pytest.raises(FedKSeedError, match="named by no basis, got 32 bytes"):
        Pool(0, 64, "hadamard", bytes(32))
    p = Pool(0, 64, "informed", basis().digest())
    assert p != Pool(0, 64, "informed", basis(1).digest())
    with pytest.raises(FedKSeedError, match="needs its basis"):
        p.fitted(SHAPES)
    with pytest.raises(FedKSeedError, match=f"has digest {basis(1).digest().hex()}, the run's is"):
        p.fitted(SHAPES, basis(1))
    with pytest.raises(FedKSeedError, match="whose c is 5000 x 33, this one has 33 x 5000"):
        p.fitted({**SHAPES, "c": (33, 5000)}, basis())
    with pytest.raises(FedKSeedError, match="whose e is 40 x 30, this one has none"):
        p.fitted({name: shape for name, shape in SHAPES.items() if name != "e"}, basis())
    with pytest.raises(FedKSeedError, match="has 47 directions, the pool only 40"):
        Pool(0, 40, "informed", basis().digest()).fitted(SHAPES, basis())


def test_a_digest_names_everything_that_directions_depend_on():
    def changed(**parts):
        made = basis()
        return Basis({**made.factors, "d": replace(made.factors["d"], **parts)})

    one = basis()
    d = one.factors["d"]
    others = [
        changed(left=d.left ^ np.int8(1)), changed(right=d.right ^ np.int8(1)),
        changed(left_scale=d.left_scale * 2), changed(right_scale=d.right_scale * 2),
        Basis({name.replace("d", "da"): factor for name, factor in one}),
    ]  # fmt: skip
    assert len({made.digest() for made in (one, *others)}) == 6
    assert basis().digest() == one.digest()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"left": np.zeros((8, 1), np.int8)}, "factors of a 9 x 1 matrix have these rows"),
        ({"left": np.zeros((9, 0), np.int8)}, "1 to 1024 columns"),
        ({"left_scale": np.ones(2, np.float32)}, "has a positive finite scale"),
        ({"right_scale": np.array([np.nan], np.float32)}, "has a positive finite scale"),
        ({"right_scale": np.zeros(1, np.float32)}, "has a positive finite scale"),
    ],
)
def test_factors_that_do_not_fit_are_refused(parts, message):
    with pytest.raises(FedKSeedError, match=message):
        replace(factor(0, (9,), (1, 1), 0), **parts)


def test_directions_of_a_basis_follow_one_another_in_the_order_of_names():
    a, b = factor(0, (9,), (1, 1), 0), factor(2, (9,), (1, 1), 0)
    for factors, message in (
        ({"b": a, "a": a}, "in the order"),
        ({}, "at least one"),
        ({"a": a, "b": b}, "begin at 1"),
    ):
        with pytest.raises(FedKSeedError, match=message):
            Basis(factors)


@pytest.mark.parametrize("family", FACTORED)
def test_a_device_with_other_bits_is_refused(family, monkeypatch):
    torch_any = backends.load("torch")
    require = backends.require_bits.__wrapped__
    for dtype in (torch.float32, torch.bfloat16, None):
        require("torch", torch.device("cpu"), family, 16, dtype)
    monkeypatch.setattr(torch_any, "held", lambda factor, device: tuple(map(torch.ones_like, HELD(factor, device))))
    monkeypatch.setattr(torch_any, "separable_signs", lambda *given: tuple(map(torch.ones_like, SIGNS(*given))))
    with pytest.raises(FedKSeedError, match="are not those of the definition"):
        require("torch", torch.device("cpu"), family, 16, torch.float32)


HELD, SIGNS = backends.load("torch").held, backends.load("torch").separable_signs  # type: ignore[attr-defined]
