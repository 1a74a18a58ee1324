"""A client as algorithms see it: its model, its data, its loss; and the memory that it gives back."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .kept_steps import KeptSteps

if TYPE_CHECKING:  # a server aggregates without PyTorch
    from torch import Tensor

    from ..secure.member import MaskingClient
    from ..weights.base import Weights
    from .private_steps import Private

Held = TypeVar("Held", bound="Weights")


@dataclass(frozen=True, slots=True)
class Client(Generic[Held]):
    """One client: its model, its data and its loss, none of which leave it."""

    number: int
    weights: Held
    examples: int  # number of examples that the client holds
    batches: Callable[[int], Iterator[Any]]  # round -> endless batches, the same for the same round
    loss: Callable[[Any], float]  # of one batch: nats a token, or another objective of the recipe
    on_step: Callable[[float], None] = lambda loss: None
    graph: "Callable[[Any], Tensor] | None" = None  # the loss with its graph, of a client that takes derivatives
    member: "MaskingClient | None" = None  # its keys, where uploads are masked
    private: "Private | None" = None  # the noise of its steps; batches then are lists of batches of one example
    kept: KeptSteps | None = None  # where its steps of a round are kept; None: a client that is stopped begins anew

    @property
    def claimed(self) -> int:
        """The number of examples that it reports: 1 where steps have noise, so that all clients count alike."""
        return self.examples if self.private is None else 1


class _Malloc(ctypes.Structure):
    """The state of the memory that glibc manages: struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcdefgh", "freed", "top")]


def return_freed(beyond: int = 0) -> None:
    """Return the memory that was freed to the system, which glibc keeps in pieces where batches differ in length.

    After eight clients with a pass back, SmolLM2-135M in bfloat16, rows of up to 256 tokens: 1.4 GB in place of 2.9,
    for 0.15 s of a client's 16 s. Other C libraries have no such function.

    Args:
        beyond: bytes that may stay: the system clears each page that is asked for again.
    """
    with suppress(AttributeError, OSError, TypeError):  # no such function; no such library; Windows
        library = ctypes.CDLL(None)
        if beyond and (about := getattr(library, "mallinfo2", None)) is not None:  # glibc 2.33 or later
            about.restype = _Malloc
            if about().freed <= beyond:
                return
        library.malloc_trim(0)
