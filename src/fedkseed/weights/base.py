"""A model as a function of K numbers: w(c) = w_0 + Σ_j c_j z_j.

`Weights` is the protocol of all ways to hold a model's weights, `Pooled` that of the four ways to hold w(c), which
`modes` lists. Any PyTorch module works: no code per architecture.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..directions import Pool
from ..directions.operations import DirectionSum, project_pieces
from ..errors import FedKSeedError, first_line
from .layout import Layout
from .side_by_side import Value

NO_GRADIENT = (
    "the loss does not depend on the tuned weights; set [model] tuned, or tuned= in Python, to weights that it depends "
    "on, and compute it without detach() and torch.inference_mode()"
)
NO_TERMS = np.empty(0, np.uint32), np.empty(0, np.float32)  # of a sum of directions


class Weights(ABC):
    """The weights w of one model, which its forward passes use.

    Args:
        layout: the model's tensors. They must hold w_0 now, and belong to this object from now on.
        pool: the directions; those of a factored family become fitted to the layout.
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        self.layout, self.pool = layout, pool if pool.tensors is not None else pool.fitted(layout.shapes)
        self.base_digest = layout.digest()

    @abstractmethod
    def shift(self, direction: int, eps: float) -> None:
        """Set the model to w + ε z_j; w stays."""

    @abstractmethod
    def move(self, direction: int, step: float) -> None:
        """Add step z_j to w; the model is stale until the next `shift` or `settle`."""

    @abstractmethod
    def settle(self) -> None:
        """Set the model to w."""

    def both(self, direction: int, eps: float, loss: Callable[[], Value]) -> tuple[Value, Value]:
        """The loss, or what else `loss` returns, at w + ε z_j and at w − ε z_j; the model is stale afterwards."""
        self.shift(direction, eps)
        above = loss()
        self.shift(direction, -eps)
        return above, loss()

    def checkpoint(self) -> Any:
        """Everything that a later broadcast can't restore; None where a broadcast restores everything."""
        return None

    def rewind(self, checkpoint: Any) -> None:  # noqa: B027 - most have nothing to do
        """Go back to a checkpoint, and forget the rounds since."""

    def digest(self) -> bytes:
        """The digest (`layout.digest`) of the model as it is now."""
        return self.layout.digest()


class Pooled(Weights):
    """Weights w = w(c): `shift` goes to w(c + ε e_j), `move` adds to c_j in float32.

    Attributes:
        c: the coefficients, float32, shape (K,).
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        super().__init__(layout, pool)
        self.c = np.zeros(pool.size, np.float32)

    def load(self, c: NDArray[np.floating]) -> None:
        """Set c, and the model to w(c); nothing changes if c is refused."""
        self.pool.dense(c)
        self.c = np.array(c, dtype=np.float32).reshape(-1)
        self.settle()

    def shift(self, direction: int, eps: float) -> None:
        c = self._shifted(direction, eps)
        self._use(c, DirectionSum.over(self.pool, c))

    def move(self, direction: int, step: float) -> None:
        self.c[direction] += np.float32(step)

    def settle(self) -> None:
        self._use(self.c, DirectionSum(self.pool, *self.pool.dense(self.c)))

    @abstractmethod
    def _use(self, c: NDArray[np.float32], total: DirectionSum) -> None:
        """Set the model to w(c) = w_0 + `total`."""

    @abstractmethod
    def restore(self) -> None:
        """Set the model to w_0, bit for bit, and c to zero."""

    @abstractmethod
    def keep(self) -> None:
        """Leave w(c) in the model, where its memory can hold it, and let go of the model."""

    def gradient(self, loss: Callable[[], Tensor]) -> tuple[float, NDArray[np.float64]]:
        """The loss L(w(c)) and its K derivatives Zᵀ∇L by c, shape (K,), from one backward pass.

        The gradient of a tensor, or of some rows of a streamed one, is projected on the directions and dropped at once.

        Raises:
            FedKSeedError: the loss does not depend on the tuned weights.
        """
        slope = np.zeros(self.pool.size)

        def project(number: int, start: int, part: Tensor) -> None:
            slope[:] += project_pieces([(number, start, part)], self.pool)

        with self._trainable(project):
            return backpropagate(loss), slope

    def _trainable(self, on_gradient: Callable[[int, int, Tensor], None]) -> AbstractContextManager[None]:
        """Give tuned tensors gradients; `on_gradient` gets parts: tensor, first position, values."""
        raise NotImplementedError  # each way to hold w(c) has its own

    def _shifted(self, direction: int, eps: float) -> NDArray[np.float32]:
        """The coefficients c + ε e_j."""
        c = self.c.copy()
        c[direction] += np.float32(eps)
        return c


def backpropagate(loss: Callable[[], Tensor]) -> float:
    """Compute a loss and, where it is finite, the gradients of all that it depends on.

    Raises:
        FedKSeedError: the loss does not depend on the tuned weights.
    """
    with torch.enable_grad():
        value = loss()
        if not value.requires_grad:
            raise FedKSeedError(NO_GRADIENT)
        if bool(torch.isfinite(value.detach())):
            try:
                value.backward()
            except RuntimeError as error:  # such as a tensor that the model or the loss has changed in place
                raise FedKSeedError(f"the pass back from the loss raised an error: {first_line(error)}") from error
    return float(value.detach())
