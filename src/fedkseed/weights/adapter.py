"""A tuned model as a 16 KB file: the coefficients, the pool, and the digest of the base model.

The file is a safetensors file with one tensor, `coefficients` (K,) float32, and one metadata entry,
`fedkseed`, a JSON object with everything else and a checksum over all of it.
"""

import hashlib
import json
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..directions import Pool
from ..errors import FedKSeedError
from ..files import border, write_atomically

if TYPE_CHECKING:  # a server without a model writes an adapter, too
    from torch import nn

FORMAT = 1
MAX_BYTES = 1 << 23  # 2^20 coefficients are 4 MiB; the rest describes them
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

    def __post_init__(self) -> None:
        if missing := [name for name in NEEDED if not isinstance(self.provenance.get(name), str)]:
            raise FedKSeedError(f"an adapter's provenance must name {', '.join(NEEDED)}; missing: {', '.join(missing)}")

    @property
    def storage(self) -> str:
        """The storage of the base weights, see `load_model`."""
        return str(self.provenance.get("storage", "dense"))

    def save(self, path: str | Path) -> None:
        """Write the adapter file; a reader never sees a half-written one."""
        path, about = Path(path), self._about()
        text = json.dumps({**about, "checksum": _checksum(about, self.coefficients)}, sort_keys=True)
        write_atomically(path, save({"coefficients": self.coefficients}, metadata={"fedkseed": text}))

    @classmethod
    def load(cls, path: Path) -> "Adapter":
        """Read and check an adapter file.

        Raises:
            FedKSeedError: the file is missing, cut short, damaged, or of another version.
        """
        try:
            with border(f"the adapter {path}"):
                there = path.stat()
                if not stat.S_ISREG(there.st_mode) or there.st_size > MAX_BYTES:
                    raise FedKSeedError(f"{path} is no adapter: one is a regular file of at most {MAX_BYTES:,} bytes")
                with safe_open(path, framework="np") as file:
                    about = json.loads((file.metadata() or {})["fedkseed"])
                    coefficients = file.get_tensor("coefficients")
        except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
            if isinstance(error, FedKSeedError):
                raise
            raise FedKSeedError(f"{path} is not a whole fedkseed adapter ({error}); get the file again") from error
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            got = about.get("format") if isinstance(about, dict) else about
            raise FedKSeedError(
                f"the adapter {path} has format {got}, this program reads {FORMAT}; use a matching release"
            )
        checksum = about.pop("checksum", None)
        if checksum != _checksum(about, coefficients):
            raise FedKSeedError(f"the adapter {path} is damaged: its checksum does not fit; get the file again")
        try:
            pool = Pool(**about["pool"])
            tuned = None if about["tuned"] is None else str(about["tuned"])
            described = str(about["base"]), tuned, tuple(about["patterns"]), dict(about["provenance"])
            if not all(isinstance(pattern, str) for pattern in about["patterns"]):
                raise TypeError("patterns are texts")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FedKSeedError(f"the adapter {path} lacks or mistakes a field: {error}") from error
        if (
            coefficients.shape != (pool.size,)
            or coefficients.dtype != np.float32
            or not np.isfinite(coefficients).all()
        ):
            raise FedKSeedError(f"the adapter {path} must hold {pool.size} finite float32 coefficients")
        return cls(pool, coefficients, *described)

    def apply(self, model: "nn.Module") -> None:
        """Turn the base model into the tuned one, in place, and check the result's digest.

        A quantised model keeps its base; the update is added whenever its weights are used.

        Raises:
            FedKSeedError: the model is not the base this adapter was made for; it is unchanged.
        """
        from .layout import Layout
        from .streamed import Streamed

        weights = Streamed(Layout(model, self.patterns), self.pool)
        if (digest := weights.base_digest.hex()) != self.base:
            raise FedKSeedError(
                f"the adapter is for a base model with digest {self.base}, this one has {digest}; "
                f"load {self.provenance['model']} in {self.provenance['dtype']}, {self.storage}"
            )
        weights.load(self.coefficients)
        try:
            digest = weights.digest().hex()
        except BaseException:
            weights.restore()
            raise
        if self.tuned is not None and digest != self.tuned:
            weights.restore()
            raise FedKSeedError(
                f"applying the adapter gave digest {digest} instead of {self.tuned}; run `fedkseed directions`"
            )
        weights.keep()

    def _about(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "pool": asdict(self.pool),
            "base": self.base,
            "tuned": self.tuned,
            "patterns": list(self.patterns),
            "provenance": self.provenance,
        }


def apply(model: "nn.Module", path: str | Path) -> "nn.Module":
    """Turn a base model into the tuned one with an adapter file; the model is changed in place.

    Example:
        model = fedkseed.apply(load_model("models/base"), "runs/quickstart/adapter.safetensors")
    """
    Adapter.load(Path(path)).apply(model)
    return model


def _checksum(about: dict[str, Any], coefficients: NDArray[np.float32]) -> str:
    text = json.dumps(about, sort_keys=True).encode()
    return hashlib.sha256(text + coefficients.tobytes()).hexdigest()
