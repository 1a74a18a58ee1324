"""Fuzzing of the reader of basis files: files that were broken, and files that were invented.

An invented file has entries of any name, type, shape and scale, any JSON beside them, and often the digest that fits.
Two outcomes are correct: `FedKSeedError`, or a basis that is the same when it is written and read again.
"""

import json
import random
import re
import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedkseed.directions import Pool
from fedkseed.directions.factors import Basis, Factor
from fedkseed.errors import FedKSeedError
from fedkseed.weights.basis_file import KINDS, from_entries, load_basis, save_basis

TYPES = {
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "I32": 4,
    "F64": 8,
    "I64": 8,
}
SCALES = (1.0, 0.5, 1e-45, 3.4e38, 0.0, -1.0, float("nan"), float("inf"))
NAMES = ("w", "a.weight", "", ".", "a b", "a\nb", "é", "left", "w.left", "x" * 5000, "\x7f", "basis/w")
SIDES = (1, 2, 3, 0, 1024, 1025, 1 << 31, 1 << 63, -1)
TEXTS = ("", "{}", "[]", "1", "null", "NaN", "[" * 100_000, '{"format": 1}', '{"format": 1, "about": {}}',
         '{"format": NaN, "about": {}}', '{"format": 1, "about": []}', "1" * 5000, '{"format": ' + "1" * 5000 + "}",
         '{"format": 1, "about": {}, "digest": 7}', '"\\ud800"')  # fmt: skip


def specimen() -> Basis:
    """A basis of two tensors."""
    left, right = np.arange(-6, 6, dtype=np.int8), np.arange(100, 108, dtype=np.int8)
    ones, half = np.ones(2, np.float32), np.full(3, 0.5, np.float32)
    first = Factor(4, 4, 0, left.reshape(4, 3), right.reshape(4, 2), half, ones)
    return Basis(
        {"a.weight": first, "b": Factor(2, 1, 6, left[:2, None], right[:1, None], half[:1], ones[:1])}, {"n": 1}
    )


def made(rng: random.Random, broken: Any) -> bytes:
    """One input.

    Args:
        broken: breaks bytes in one of many ways: (generator, bytes).
    """
    if rng.random() < 0.75:
        return _invented(rng)
    data = bytearray(_seed())
    for _ in range(rng.choice((1, 1, 2, 4))):
        broken(rng, data)
    return bytes(data)


def judge(data: bytes) -> tuple[str, str]:
    """The word `Basis` for an accepted file and "", or "" and the words of the refusal.

    Raises:
        AssertionError: an accepted basis is another one when it is written and read again, or fits no model.
    """
    with _folder() as folder:
        path = Path(folder) / "basis.safetensors"
        path.write_bytes(data)
        try:
            basis = load_basis(path)
        except FedKSeedError as error:
            return "", re.split(r"[0-9(,;:'\"]", str(error).replace(str(path), "FILE"))[0].strip()
        save_basis(basis, path)
        again, shapes = load_basis(path), {name: (factor.rows, factor.columns) for name, factor in basis}
    if again.digest() != basis.digest() or again.about != basis.about:
        raise AssertionError("an accepted basis is another one when it is written and read again")
    if basis.size <= 1 << 20:
        Pool(0, basis.size, "informed", basis.digest()).fitted(shapes, basis)
    return "Basis", ""


def _folder() -> TemporaryDirectory[str]:
    memory = Path("/dev/shm")  # noqa: S108 - 15 times as many inputs a second as on a disk, which is waited for
    return TemporaryDirectory(prefix="fedkseed-fuzz-", dir=memory if memory.is_dir() else None)


@cache
def _seed() -> bytes:
    with _folder() as folder:
        save_basis(specimen(), path := Path(folder) / "basis.safetensors")
        return path.read_bytes()


def _invented(rng: random.Random) -> bytes:
    """A file from entries that are mostly those of a basis, and a digest that fits where there can be one."""
    wrong = rng.choice((0, 0.05, 0.05, 0.2))  # share of everything that may be wrong
    arrays = {}
    for name in {_some(rng, wrong, "abc"[k], NAMES) for k in range(rng.choice((1, 1, 2, 3)))}:
        sides = [_some(rng, wrong, rng.choice((1, 2, 5)), SIDES) for _ in range(4)]
        shapes = [[sides[0], sides[1]], [sides[2], sides[3]], [sides[1]], [sides[3]]]
        for (part, kind), shape in zip(KINDS.items(), shapes, strict=True):
            if rng.random() < wrong / 4:
                continue
            of = _some(rng, wrong, "I8" if kind == np.int8 else "F32", tuple(TYPES))
            shape = _some(rng, wrong, shape, ([], [1], [2, 2], [1, 1, 1]))
            arrays[f"{name}.{part}"] = of, shape, _values(rng, wrong, of, shape)
    about: Any = {"format": _some(rng, wrong, 1, (2, "1", None, 1.0, True)), "about": {"n": 1}, "digest": ""}
    about["digest"] = _some(rng, wrong, _digest(arrays), ("", "00" * 32, 7))
    text = _some(rng, wrong, json.dumps(about), TEXTS)
    header: dict[str, Any] = {"__metadata__": {_some(rng, wrong, "fedkseed", ("other", "")): text}}
    body = b""
    for name, (of, shape, data) in arrays.items():
        offsets = [len(body), len(body := body + data)]
        header[name] = {"dtype": of, "shape": shape, "data_offsets": _some(rng, wrong / 4, offsets, ([0, 1], [9, 2]))}
    packed = json.dumps(header).encode()
    length = _some(rng, wrong / 4, len(packed), (0, 1 << 40, (1 << 64) - 1, len(packed) + 1))
    return struct.pack("<Q", length) + packed + body + bytes(_some(rng, wrong / 4, 0, (1, 8)))


def _some(rng: random.Random, wrong: float, right: Any, others: Any) -> Any:
    """The right value, or, with the given probability, another."""
    return rng.choice(others) if rng.random() < wrong else right


def _values(rng: random.Random, wrong: float, of: str, shape: list[int]) -> bytes:
    """The bytes of an array, at most 64 KB: those that its shape asks for, if these are few."""
    count = min(max(int(np.prod(shape, dtype=object)), 0), 1 << 13)
    if of != "F32":
        return rng.randbytes(count * TYPES[of])
    scales = np.full(count, 1.5, "<f4")
    scales[:1] = _some(rng, wrong, 1.5, SCALES)
    return scales.tobytes()


def _digest(arrays: dict[str, tuple[str, list[int], bytes]]) -> str:
    """The digest of a basis of these arrays, if they make one."""
    types = {"I8": np.int8, "F32": np.float32}
    try:
        made = {name: np.frombuffer(data, types[of]).reshape(shape) for name, (of, shape, data) in arrays.items()}
        return from_entries(made, {}, "it").digest().hex()
    except (FedKSeedError, KeyError, ValueError, OverflowError):
        return "no basis"
