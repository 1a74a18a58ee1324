"""A module's tensors: their order, the choice of those that are tuned, and the digest over all."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..errors import FedKSeedError
from .lazy import TILE, Lazy

# A pattern may come from a server or a stranger's adapter; the time to translate one grows by the square of its length.
MAX_PATTERN = 256  # characters of it; the longest names in transformers' models have about 100
MAX_PATTERNS = 256  # with wildcards; names as they are cost a look-up each


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the layout."""

    number: int  # place in the sorted order of all names: the `tensor` of its directions
    name: str
    tensor: Tensor  # a `Lazy` one in a quantised model
    tuned: bool
    places: tuple[tuple[nn.Module, str], ...]  # the modules that own it, and what they call it


class Layout:
    """A module's parameters, sorted by name, tied ones once, numbered from 0.

    Tensors that are not tuned keep their numbers, so a party that tunes a part of the model moves
    that part along the same directions as a party that tunes all of it.

    Args:
        model: any module.
        tuned: shell patterns of parameter names (`*`, `model.layers.*`, `*.mlp.*`).

    Raises:
        FedKSeedError: nothing is tuned, a pattern fits nothing, patterns are beyond a limit, or two parameters share
            only a part of their memory.
    """

    def __init__(self, model: nn.Module, tuned: Sequence[str] = ("*",)) -> None:
        named: dict[str, Tensor] = {}
        owners: dict[str, tuple[nn.Module, str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for name, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
                if tensor.numel():
                    full = f"{path}.{name}" if path else name
                    named[full] = tensor if isinstance(tensor, Lazy) else tensor.data
                    owners[full] = module, name
        for name, tensor in named.items():
            if not isinstance(tensor, Lazy) and not tensor.is_contiguous():
                raise FedKSeedError(f"the parameter {name} is a strided view; give it memory of its own: .contiguous()")
        first: dict[tuple[int, int], str] = {}  # (begin, end) in memory -> smallest name
        for name in sorted(named):
            first.setdefault(_memory(named[name]), name)
        aliases = {name: first[_memory(tensor)] for name, tensor in named.items()}
        chosen = {aliases[name] for name in _fitting(tuned, named)}
        names = sorted(first.values())
        places = {name: tuple({owners[a]: None for a in sorted(named) if aliases[a] == name}) for name in names}
        self.entries = [TensorEntry(k, name, named[name], name in chosen, places[name]) for k, name in enumerate(names)]
        self.tuned = [entry for entry in self.entries if entry.tuned]
        if not self.tuned:
            raise FedKSeedError("the model has no tuned tensors; give patterns of parameter names, or '*' for all")
        if any(end > start for (_, end), (start, _) in pairwise(sorted(first))):
            raise FedKSeedError("some parameters are overlapping views of one memory; give each its own")

    @property
    def size(self) -> int:
        """d, the number of tuned weights."""
        return sum(entry.tensor.numel() for entry in self.tuned)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of every tensor by name, tuned or not, in order."""
        return {entry.name: entry.tensor.shape for entry in self.entries}

    @contextmanager
    def trainable(self) -> Iterator[list[nn.Parameter]]:
        """The tuned parameters, which have gradients for as long."""
        places = [entry.places[0] for entry in self.tuned]
        parameters = [parameter for module, name in places if (parameter := module._parameters[name]) is not None]
        before = [parameter.requires_grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.requires_grad_(True)
            yield parameters
        finally:
            for parameter, was_trainable in zip(parameters, before, strict=True):
                parameter.requires_grad_(was_trainable)
                parameter.grad = None

    def digest(self) -> bytes:
        """The digest of the tensors as they are now."""
        return digest(self.entries)


def digest(entries: Sequence[TensorEntry]) -> bytes:
    """The SHA-256 over parameters: names, types, shapes and the weights' bits, in layout order.

    It is a hash of the tensors' hashes, so that tensors can be hashed side by side.
    """

    def hash_line(entry: TensorEntry) -> str:
        t, bits = entry.tensor, hashlib.sha256()
        for part in _parts(t):
            bits.update(part.view(torch.uint8).numpy().data)
        return f"{entry.name} {str(t.dtype).removeprefix('torch.')} {list(t.shape)} {bits.hexdigest()}\n"

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        # lazy ones are hashed in this thread: kernels have threads of their own
        jobs = [None if isinstance(e.tensor, Lazy) else threads.submit(hash_line, e) for e in entries]
        lines = [hash_line(e) if job is None else job.result() for e, job in zip(entries, jobs, strict=True)]
    return hashlib.sha256("".join(lines).encode()).digest()


def _fitting(patterns: Sequence[str], named: Mapping[str, Tensor]) -> set[str]:
    """The names that one of the patterns fits."""
    wild = {pattern for pattern in patterns if any(mark in pattern for mark in "*?[")}
    longest = max(map(len, wild), default=0)
    if longest > MAX_PATTERN or len(wild) > MAX_PATTERNS:
        raise FedKSeedError(
            f"at most {MAX_PATTERNS} patterns of {MAX_PATTERN} characters can have wildcards, got {len(wild):,}, the "
            f"longest of {longest:,}; shorten [model] tuned"
        )
    fitting = set[str]()
    for pattern in dict.fromkeys(patterns):
        fits = {name for name in named if fnmatchcase(name, pattern)} if pattern in wild else {pattern} & named.keys()
        if not fits:
            raise FedKSeedError(
                f"no parameter's name fits the pattern {pattern[:MAX_PATTERN]!r}; names look like "
                f"{next(iter(named), '—')!r}"
            )
        fitting |= fits
    return fitting


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """All weights of a tensor on the CPU, flat; a lazy one some rows at a time."""
    if not isinstance(tensor, Lazy) or not tensor.ndim:
        yield (tensor.whole() if isinstance(tensor, Lazy) else tensor.detach()).cpu().contiguous().view(-1)
        return
    rows, step = tensor.shape[0], max(1, TILE // tensor.shape[1:].numel())
    for first in range(0, rows, step):
        yield tensor.rows(first, min(first + step, rows)).cpu().view(-1)


def _memory(tensor: Tensor) -> tuple[int, int]:
    if isinstance(tensor, Lazy):
        return id(tensor), id(tensor)
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
