"""Every backend against the definition, bit for bit; without a GPU, Triton runs in its interpreter."""

import os
import platform
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from numba.core.codegen import get_host_cpu_features

from fedkseed import FedKSeedError, Pool, accumulate_, materialize, project
from fedkseed.directions import backends, reference, vectors
from fedkseed.directions.operations import DirectionSum, Piece

from . import PLAIN
from .test_operations import DTYPES, NO_TERMS, TENSOR, expected, weights

KEY = 0x9123456789ABCDEF  # both words have their highest bit set
RANGES = [(0, 300), (4090, 4100), (4096, 8192)]


@pytest.fixture(params=["triton", "torch", "numba"])
def name(request):
    if request.param == "triton" and not find_spec("triton"):
        pytest.skip("Triton is not installed: it has no packages for this system")
    return request.param


@pytest.fixture
def backend(name):
    return backends.load(name)


@pytest.fixture
def device(name):
    return torch.device("cuda", 0) if torch.cuda.is_available() and name != "numba" else torch.device("cpu")


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    words = {4: torch.int32, 2: torch.int16}[want.element_size()]
    return got.dtype == want.dtype and torch.equal(got.cpu().view(words), want.view(words))


def some(pool: Pool, count: int) -> tuple[np.ndarray, np.ndarray]:
    """So many directions of a pool and their coefficients."""
    rng = np.random.default_rng(pool.size)
    directions = rng.choice(pool.size, min(count, pool.size), replace=False)
    return np.sort(directions).astype(np.uint32), rng.normal(size=directions.size).astype(np.float32)


def make(backend, device, pool, directions, coefficients, base, start, addend=None):
    """The backend's answer for base weights on the CPU, which stay as they are."""
    base = base.to(device)
    out, more = torch.full_like(base, torch.nan), None if addend is None else torch.from_numpy(addend).to(device)
    backend.combine([(TENSOR, start, base, out, more)], backend.plan(pool, directions, coefficients, base.device))
    return out


@pytest.mark.parametrize("size", [1, 2, 8, 32, 4096, 8192])
@pytest.mark.parametrize("family", PLAIN)
def test_weights_equal_the_definition(backend, device, family, size):
    pool = Pool(KEY, size, family)
    for (start, stop), dtype in zip(RANGES, DTYPES.values(), strict=True):
        base = weights(stop - start, dtype)
        addend = np.random.default_rng(start).normal(size=stop - start).astype(np.float32)
        few, many = some(pool, 1), some(pool, size if family in ("hadamard", "hashed") else 5)
        for (directions, coefficients), more in ((few, None), (many, addend)):
            got = make(backend, device, pool, directions, coefficients, base, start, more)
            want = expected(pool, directions, coefficients, base, start, more)
            assert same_bits(got, want), f"{start}:{stop}, {dtype}, {directions.size} directions"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("family", PLAIN)
def test_every_type_equals_the_definition_across_a_border(name, backend, device, family, dtype):
    pool = Pool(KEY, 64, family)
    base, addend = weights(800, dtype), np.random.default_rng(0).normal(size=800).astype(np.float32)
    addend[::7] = 0.0 if name == "numba" else -0.0  # which no sum of directions is; Numba's kernels make 0 of it
    for more in (None, addend):
        for count in (0, 3):
            directions, coefficients = some(pool, count)
            got = make(backend, device, pool, directions, coefficients, base, 3700, more)
            assert same_bits(got, expected(pool, directions, coefficients, base, 3700, more))


def test_positions_beyond_32_bits_equal_the_definition(backend, device):
    start, base = (1 << 34) - 50, weights(50, torch.float32)
    for family in PLAIN:
        pool = Pool(KEY, 4, family)
        directions, coefficients = some(pool, 2)
        got = make(backend, device, pool, directions, coefficients, base, start)
        assert same_bits(got, expected(pool, directions, coefficients, base, start)), family


@pytest.mark.parametrize("size", [16, 1 << 15])
@pytest.mark.parametrize("family", PLAIN)
def test_many_pieces_at_once_equal_the_definition(backend, device, family, size):
    """Rows of one matrix, of which some lie across a border, rows of another length, in place, and with an addend."""
    pool, rng = Pool(KEY, size, family), np.random.default_rng(size)
    directions, coefficients = some(pool, size if pool.transformed else 3)
    table, columns = weights(200 * 90, torch.bfloat16), 90
    base, rows = table.to(device), [*rng.choice(200, 12, replace=False) * columns, 45 * columns, 7]
    memory = torch.full((14 * columns + 50,), torch.nan, dtype=table.dtype, device=device)
    outs = [memory[k * columns : (k + 1) * columns] for k in range(14)]
    pieces = [(TENSOR, int(p), base[p : p + columns], out, None) for p, out in zip(rows, outs, strict=True)]
    outs.append(memory[14 * columns :])
    pieces.append((TENSOR, 11, base[11:61], outs[-1], None))
    outs += [base[p : p + columns].clone() for p in (0, 4080)]
    pieces += [(TENSOR, p, out, out, None) for p, out in zip((0, 4080), outs[-2:], strict=True)]
    outs.append(torch.empty_like(outs[-1]))
    more = rng.normal(size=columns).astype(np.float32)
    pieces.append((TENSOR, 9, base[9 : 9 + columns], outs[-1], torch.from_numpy(more).to(device)))
    backend.combine(pieces, backend.plan(pool, directions, coefficients, device))
    for (_, start, *_, addend), out in zip(pieces, outs, strict=True):
        part = table[start : start + out.numel()]
        want = expected(pool, directions, coefficients, part, start, None if addend is None else more)
        assert same_bits(out, want), start


@pytest.mark.parametrize("family", ["hadamard", "hashed"])
def test_transforms_larger_than_a_program_equal_the_definition(backend, device, family):
    pool = Pool(KEY, 1 << 15, family)
    directions, coefficients = some(pool, pool.size)
    base, start = weights(3000, torch.bfloat16), (1 << 15) - 1000
    got = make(backend, device, pool, directions, coefficients, base, start)
    assert same_bits(got, expected(pool, directions, coefficients, base, start))
    v = weights(3000, torch.float32)
    products = backend.project([(3, start, v.to(device))], pool)
    np.testing.assert_array_equal(products, reference.project(pool, v.numpy(), 3, start))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, in Triton's interpreter, at signalling NaN
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pattern_of_16_bits_survives_a_sum_of_zero(backend, device, dtype):
    """Reading and writing a type are inverse, NaN stays NaN, −0 becomes +0."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    got = make(backend, device, Pool(0, 4, "hadamard"), *NO_TERMS, every, 0).cpu()
    number = ~torch.isnan(every)
    assert torch.equal(torch.isnan(got), ~number)
    assert same_bits(got[number], torch.where(every == 0, 0, every)[number])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy, in Triton's interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even(backend, device, dtype):
    """float32 sums around every halfway point of the 16-bit type, in all magnitudes."""
    base = torch.arange(0, 32768, 7, dtype=torch.int32).to(torch.int16).view(dtype)
    base = base[torch.isfinite(base)]
    for fraction in (0.25, 0.5, 0.75, 1.5):
        step = (torch.nextafter(base, torch.full_like(base, torch.inf)) - base).float()
        addend = torch.nan_to_num(step, posinf=1e30) * fraction
        got = make(backend, device, Pool(0, 1, "gaussian"), *NO_TERMS, base, 0, addend.numpy())
        assert torch.equal(got.cpu(), (base.float() + addend).to(dtype))


@pytest.mark.parametrize("size", [2, 64])
@pytest.mark.parametrize("family", PLAIN)
def test_project_equals_the_definition(backend, device, family, size):
    """Parts of three blocks, on both sides of a segment's border."""
    pool, start = Pool(KEY, size, family), reference.SEGMENT - 4200
    v = weights(5000 if size == 64 else 4300, torch.float32)
    if family in ("gaussian", "rademacher"):
        pool = Pool(KEY, min(size, 9), family)  # the definition makes every direction of every block
    got = backend.project([(3, start, v.to(device))], pool)
    np.testing.assert_array_equal(got, reference.project(pool, v.numpy(), 3, start))
    for dtype in (torch.bfloat16, torch.float16):
        narrow = v.to(dtype)
        got = backend.project([(3, start, narrow.to(device))], pool)
        np.testing.assert_array_equal(got, reference.project(pool, narrow.float().numpy(), 3, start))


@pytest.mark.parametrize("family", ["hadamard", "hashed"])
def test_project_with_as_many_directions_as_a_block_equals_the_definition(backend, device, family):
    pool, v = Pool(KEY, 4096, family), weights(9000, torch.float32)
    got = backend.project([(3, 100, v.to(device))], pool)
    np.testing.assert_array_equal(got, reference.project(pool, v.numpy(), 3, 100))


@pytest.mark.parametrize(
    ("family", "size"), [("gaussian", 9), ("rademacher", 9), ("hadamard", 1 << 15), ("hashed", 64)]
)
def test_the_bound_of_the_scratch_memory_changes_no_bit(name, backend, device, family, size, monkeypatch):
    pool, start = Pool(KEY, size, family), reference.SEGMENT - 4500
    directions, coefficients = some(pool, 3)
    base, v = weights(40_000 if size == 1 << 15 else 5000, torch.float32), weights(5000, torch.float32)
    made = []
    for _ in range(2):
        w = make(backend, device, pool, directions, coefficients, base, start)
        made.append((w.cpu().numpy(), backend.project([(3, start, v.to(device))], pool)))
        bound = {"triton": "SCRATCH", "torch": "CHUNK", "numba": "WIDENED"}[name]
        monkeypatch.setattr(backend, bound, 16)  # one unit at a time
    np.testing.assert_array_equal(made[0][0].view(np.uint32), made[1][0].view(np.uint32))
    np.testing.assert_array_equal(made[0][1], made[1][1])


def test_the_published_vectors_are_met(name, device):
    wrong = [
        case["name"]
        for section, case in vectors.cases_of(name)
        if vectors.SECTIONS[section](case, name, str(device)) != case["bits"]
    ]
    assert wrong == []


OLDER = {  # x86 processors by the lanes of a register: their names and features for Numba
    "4": ("x86-64-v2", "+sse4.2,+ssse3,+popcnt"),
    "8": ("x86-64-v3", "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt"),
}
SUMS = """
import hashlib, sys
import numpy as np, torch
from fedkseed import Pool, materialize, project
from fedkseed.directions.numba_cpu import simd
found = hashlib.sha256()
for family, size in (("hadamard", 8), ("hadamard", 64), ("hadamard", 4096), ("hadamard", 8192), ("hashed", 512)):
    for dtype in (torch.float32, torch.bfloat16):
        pool, c = Pool(7, size, family), np.random.default_rng(size).normal(size=size).astype(np.float32)
        materialize(torch.ones(9000, dtype=dtype), pool, c, out := torch.empty(9000, dtype=dtype))
        found.update(out.view(torch.uint8).numpy().tobytes() + project(out.float(), pool).tobytes())
print(simd.PART, found.hexdigest())
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="features of other processors are unknown")
def test_kernels_for_older_processors_make_the_same_model(tmp_path):
    """A transform goes through registers in parts, which are smaller there."""

    def found(**environment: str) -> list[str]:
        command, settings = [sys.executable, "-c", SUMS], os.environ | environment
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    _, ours = found()
    here = {*get_host_cpu_features().split(",")}
    for lanes, (cpu, features) in OLDER.items():
        if not here.issuperset(features.split(",")):
            continue
        places = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
        assert found(**places) == [lanes, ours]


def test_pieces_of_several_tensors_are_moved_in_one_call(backend, device):
    pool = Pool(KEY, 16, "hadamard")
    directions, coefficients = some(pool, 4)
    bases = [weights(n, dtype) for n, dtype in zip((10, 0, 4097), DTYPES.values(), strict=True)]
    out = [base.clone().to(device) for base in bases]
    plan = backend.plan(pool, directions, coefficients, out[0].device)
    backend.combine([(t, 5, w, w, None) for t, w in enumerate(out)], plan)
    for t, (base, w) in enumerate(zip(bases, out, strict=True)):
        total = reference.total(pool, directions, coefficients, t, 5, 5 + base.numel())
        made = reference.combine(base.float().numpy(), total, str(base.dtype).removeprefix("torch."))
        assert w.cpu().view(torch.int16).numpy().tobytes() == made.tobytes()
    v = [weights(n, torch.float32).to(device) for n in (10, 0, 4097)]
    together = backend.project([(t, 5, x) for t, x in enumerate(v)], pool)
    one_by_one = sum((backend.project([(t, 5, x)], pool) for t, x in enumerate(v)), np.zeros(16))
    np.testing.assert_array_equal(together, one_by_one)


@pytest.mark.parametrize("dtype", [*DTYPES.values(), None])
@pytest.mark.parametrize("family", PLAIN)
def test_the_check_before_the_first_use_passes(name, device, family, dtype):
    backends.require_bits(name, device, family, 8, dtype)


def test_a_wrong_bit_is_refused_with_both_values():
    words = np.array([0x3F800000, 0x3F800001], np.uint32)
    with pytest.raises(FedKSeedError, match=r"gaussian.*on mps by torch.*1 of 2.*3f800000 instead of 3f800001"):
        backends.compare("torch", torch.device("mps"), Pool(0, 4, "gaussian"), words, words[[0, 0]])


def test_the_device_chooses_the_backend():
    cuda = ("triton", "torch") if find_spec("triton") else ("torch",)
    chosen = {kind: backends.names(torch.device(kind)) for kind in ("cpu", "cuda", "mps", "xpu")}
    assert chosen == {"cpu": ("numba", "torch"), "cuda": cuda, "mps": ("torch",), "xpu": ("torch",)}


def test_tensors_of_one_piece_must_share_a_device():
    w, elsewhere = torch.zeros(4), torch.zeros(4, device="meta")
    for piece in (Piece(0, w, elsewhere), Piece(0, w, w, addend=elsewhere)):
        with pytest.raises(FedKSeedError, match="on one device, got cpu and meta"):
            DirectionSum(Pool(0, 4, "hadamard"), *NO_TERMS).combine([piece])


def test_tensors_without_numbers_are_refused():
    v = torch.zeros(4, device="meta")
    with pytest.raises(FedKSeedError, match="on meta have no numbers"):
        project(v, Pool(0, 4, "hadamard"))
    with pytest.raises(FedKSeedError, match="on meta have no numbers"):
        materialize(v, Pool(0, 4, "hadamard"), np.zeros(4), v)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", PLAIN)
def test_a_gpu_and_the_cpu_make_the_same_model(family):
    pool, w = Pool(KEY, 256, family), weights(300_000, torch.bfloat16)
    other = w.cuda()
    for tensor in (w, other):
        accumulate_(tensor, pool, [3, 77], [0.5, -0.125], tensor=2, start=11)
    assert same_bits(other, w)
    np.testing.assert_array_equal(project(other.float(), pool), project(w.float(), pool))
