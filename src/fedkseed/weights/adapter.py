"""A tuned model as a 16 KB file: the coefficients, the pool, and the digest of the base model.

The file is a safetensors file with one tensor, `coefficients` (K,) float32, and one metadata entry,
`fedkseed`, a JSON object with everything else and a checksum over all of it. Where a basis has the directions, the
file holds it, too, so that it needs no other: format 2, with the entries of a basis' file under names that begin with
`basis/`. The digest in `pool` stands for them in the checksum.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from ..directions import Pool
from ..directions.factors import Basis
from ..errors import FedKSeedError
from ..files import write_atomically
from .basis_file import MAX_BYTES as MAX_BASIS
from .basis_file import entries, from_entries, opened, require_size, shown

if TYPE_CHECKING:  # a server without a model writes an adapter, too
    from torch import nn

FORMAT, WITH_BASIS = 1, 2
MAX_BYTES = 1 << 23  # beside a basis: 2^20 coefficients are 4 MiB; the rest describes them
PREFIX = "basis/"
ADAPTER = "adapter.safetensors"  # in a run's directory
NEEDED = ("model", "dtype", "template", "separator")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A file's content, which turns a base model into the tuned one: w(c) = w_0 + Σ_j c_j z_j."""

    pool: Pool
    coefficients: NDArray[np.float32]  # (K,), c
    base: str  # hexadecimal SHA-256 of w_0, see `Layout.digest`
    tuned: str | None  # digest of w(c), to check the result of `apply`; None from a server without a model
    patterns: tuple[str, ...]  # shell patterns of the tuned tensors' names
    provenance: dict[str, Any]  # at least model, dtype, template and separator: what `generate` needs
    basis: Basis | None = None  # of the pool's directions; None for other families, and from a server that has none

    def __post_init__(self) -> None:
        if missing := [name for name in NEEDED if not isinstance(self.provenance.get(name), str)]:
            raise FedKSeedError(f"an adapter's provenance must name {', '.join(NEEDED)}; missing: {', '.join(missing)}")
        if self.basis is not None and (digest := self.basis.digest()) != self.pool.basis:
            raise FedKSeedError(
                f"an adapter's basis is that of its pool, {self.pool.basis.hex() or 'none'}, got {digest.hex()}; get "
                "the run's file"
            )

    @property
    def storage(self) -> str:
        """The storage of the base weights, see `load_model`."""
        return str(self.provenance.get("storage", "dense"))

    def save(self, path: str | Path) -> None:
        """Write the adapter file; a reader never sees a half-written one."""
        pool, informed = self.pool, self.pool.informed
        of_pool = {"key": pool.key, "size": pool.size, "family": pool.family}
        about: dict[str, Any] = {
            "format": WITH_BASIS if informed else FORMAT,
            "pool": of_pool | ({"basis": pool.basis.hex()} if informed else {}),
            "base": self.base, "tuned": self.tuned, "patterns": list(self.patterns), "provenance": self.provenance,
        }  # fmt: skip
        if self.basis is not None:
            about["basis"] = dict(self.basis.about)
        text = json.dumps({**about, "checksum": _checksum(about, self.coefficients)}, sort_keys=True)
        factors = {} if self.basis is None else entries(self.basis)
        arrays = {"coefficients": self.coefficients, **{PREFIX + name: part for name, part in factors.items()}}
        write_atomically(Path(path), save(arrays, metadata={"fedkseed": text}))

    @classmethod
    def load(cls, path: str | Path) -> "Adapter":
        """Read and check an adapter file, or that of a finished run's directory.

        Raises:
            FedKSeedError: the file is missing, cut short, damaged, or of another version.
        """
        path = Path(path) / ADAPTER if Path(path).is_dir() else Path(path)
        with opened(path, "adapter", MAX_BYTES + MAX_BASIS) as (file, about):
            if about["format"] not in (FORMAT, WITH_BASIS):
                raise FedKSeedError(
                    f"the adapter {path} has format {shown(about['format'])}, this program reads {FORMAT} and "
                    f"{WITH_BASIS}; use a matching release"
                )
            if about["format"] == FORMAT:
                require_size(path, "adapter", MAX_BYTES)
            coefficients = file.get_tensor("coefficients")
            names = [name for name in file.keys() if name.startswith(PREFIX)]  # noqa: SIM118 - no mapping
            factors = {name.removeprefix(PREFIX): file.get_tensor(name) for name in names}
        if about.pop("checksum", None) != _checksum(about, coefficients):
            raise FedKSeedError(f"the adapter {path} is damaged: its checksum does not fit; get the file again")
        try:
            of_pool = about["pool"]
            if unknown := set(of_pool) - {"key", "size", "family", "basis"}:  # its tensors are a model's, not a file's
                raise TypeError(f"a pool has no {min(unknown)}")
            pool = Pool(of_pool["key"], of_pool["size"], of_pool["family"], bytes.fromhex(of_pool.get("basis", "")))
            basis = from_entries(factors, about["basis"], f"the adapter {path}") if factors else None
            tuned = None if about["tuned"] is None else str(about["tuned"])
            described = str(about["base"]), tuned, tuple(about["patterns"]), dict(about["provenance"])
            if not all(isinstance(pattern, str) for pattern in about["patterns"]):
                raise TypeError("patterns are texts")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FedKSeedError(f"the adapter {path} lacks or mistakes a field: {error}") from error
        kind = coefficients.shape, coefficients.dtype
        if kind != ((pool.size,), np.float32) or not np.isfinite(coefficients).all():
            raise FedKSeedError(f"the adapter {path} must hold {pool.size} finite float32 coefficients")
        return cls(pool, coefficients, *described, basis)

    def apply(self, model: "nn.Module") -> None:
        """Turn the base model into the tuned one, in place, and check the result's digest.

        A quantised model keeps its base; the update is added whenever its weights are used.

        Raises:
            FedKSeedError: the model is not the base this adapter was made for; it is unchanged.
        """
        from .layout import Layout
        from .streamed import Streamed

        if self.pool.informed and self.basis is None:
            raise FedKSeedError(
                f"the adapter lacks its basis, of digest {self.pool.basis.hex()}: a server without the basis wrote it. "
                "With the file of the run: dataclasses.replace(Adapter.load(…), basis=load_basis(FILE))"
            )
        layout = Layout(model, self.patterns)
        weights = Streamed(layout, self.pool.fitted(layout.shapes, self.basis))
        if (digest := weights.base_digest.hex()) != self.base:
            wanted = f"load {self.provenance['model']} in {self.provenance['dtype']}, {self.storage}"
            if not self.provenance["dtype"]:  # a model of a user's program
                wanted = f"it wants the {self.provenance['model']} with the weights that it had before the training"
            raise FedKSeedError(
                f"the adapter is for a base model with digest {self.base}, this one has {digest}; {wanted}"
            )
        weights.load(self.coefficients)
        try:
            digest = weights.digest().hex()
        except BaseException:
            weights.restore()
            raise
        if self.tuned is not None and digest != self.tuned:
            weights.restore()
            raise FedKSeedError(f"the adapter gave digest {digest} instead of {self.tuned}; run `fedkseed directions`")
        weights.keep()


def apply(model: "nn.Module", path: str | Path | Adapter) -> "nn.Module":
    """Turn a base model into the tuned one with an adapter, its file or a run's directory, in place.

    Example:
        model = fedkseed.apply(load_model("models/base"), "runs/dolly/adapter.safetensors")
    """
    adapter = path if isinstance(path, Adapter) else Adapter.load(path)
    adapter.apply(model)
    return model


def _checksum(about: dict[str, Any], coefficients: NDArray[np.float32]) -> str:
    text = json.dumps(about, sort_keys=True).encode()
    return hashlib.sha256(text + coefficients.tobytes()).hexdigest()
