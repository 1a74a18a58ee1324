"""A basis as a file: the factors of a model's tensors, from which informed directions are made.

The file is a safetensors file. A tensor NAME has four entries in it: `NAME.left` (o, r_u) and `NAME.right` (i, r_v),
int8, `NAME.left_scale` (r_u,) and `NAME.right_scale` (r_v,), float32. One metadata entry, `fedkseed`, is a JSON object:
the format, the digest over all entries (`Basis.digest`), and where the basis comes from.
"""

import json
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as packed

from ..directions.factors import Basis, Factor
from ..errors import FedKSeedError
from ..files import border, require_fetched, write_atomically

FORMAT = 1
MAX_BYTES = 1 << 30  # a rank of 64 in every matrix of a model of 10^10 weights takes half of it
KINDS = {"left": np.int8, "right": np.int8, "left_scale": np.float32, "right_scale": np.float32}


def save_basis(basis: Basis, path: Path) -> None:
    """Write a basis file; a reader never sees a half-written one."""
    about = {"format": FORMAT, "digest": basis.digest().hex(), "about": dict(basis.about)}
    write_atomically(path, packed(entries(basis), metadata={"fedkseed": json.dumps(about, sort_keys=True)}))


def load_basis(path: Path) -> Basis:
    """Read and check a basis file.

    Raises:
        FedKSeedError: the file is missing, cut short, damaged, no basis, or of another version.
    """
    with opened(path, "basis", MAX_BYTES) as (file, about):
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    if not isinstance(about, dict) or about.get("format") != FORMAT or not isinstance(about.get("about"), dict):
        got = shown(about.get("format") if isinstance(about, dict) else about)
        raise FedKSeedError(f"the basis {path} has format {got}, this program reads {FORMAT}; use a matching release")
    basis = from_entries(arrays, about["about"], f"the basis {path}")
    if about.get("digest") != (digest := basis.digest().hex()):
        raise FedKSeedError(
            f"the basis {path} is damaged: its digest is {digest}, it says {shown(about.get('digest'))}; get it again"
        )
    return basis


@contextmanager
def opened(path: Path, kind: str, most: int) -> Iterator[tuple[Any, Any]]:
    """A safetensors file of ours of at most `most` bytes, and its metadata; FedKSeedError, also while it is read."""
    try:
        with border(f"the {kind} {path}"):
            require_size(path, kind, most)
            require_fetched(path)
            with safe_open(path, framework="np") as file:
                yield file, json.loads((file.metadata() or {})["fedkseed"])
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, FedKSeedError):
            raise
        raise FedKSeedError(f"{path} is not a whole fedkseed {kind} ({error}); get the file again") from error


def require_size(path: Path, kind: str, most: int) -> None:
    """Refuse what is no regular file, or a larger one."""
    if not stat.S_ISREG((there := path.stat()).st_mode) or there.st_size > most:
        raise FedKSeedError(f"{path} is no {kind}: one is a regular file of at most {most:,} bytes")


def shown(value: Any) -> str:
    """A value of a stranger's file, in an error message: short, and without characters that a terminal follows."""
    return ascii(value)[:80]


def entries(basis: Basis) -> dict[str, NDArray[Any]]:
    """The entries of a safetensors file that hold a basis."""
    return {f"{name}.{part}": np.ascontiguousarray(getattr(factor, part)) for name, factor in basis for part in KINDS}


def from_entries(arrays: Mapping[str, NDArray[Any]], about: Mapping[str, Any], what: str) -> Basis:
    """The basis in the entries of a file.

    Raises:
        FedKSeedError: an entry is missing, too many, or of another type or shape.
    """
    if not isinstance(about, dict):
        raise FedKSeedError(f"{what} must have a table of how its basis was made, got {shown(about)}")
    names = sorted({name.rpartition(".")[0] for name in arrays})
    if not names or {f"{name}.{part}" for name in names for part in KINDS} != set(arrays):
        raise FedKSeedError(f"{what} must hold {', '.join(KINDS)} of each tensor, it has {len(arrays)} entries")
    factors, first = dict[str, Factor](), 0
    for name in names:
        parts = {part: arrays[f"{name}.{part}"] for part in KINDS}
        if any(parts[part].dtype != kind or parts[part].ndim != 1 + (kind == np.int8) for part, kind in KINDS.items()):
            raise FedKSeedError(f"{what} must hold int8 matrices and float32 scales; those of {shown(name)} are others")
        factors[name] = Factor(len(parts["left"]), len(parts["right"]), first, **parts)
        first = factors[name].directions.stop
    return Basis(factors, about)
