"""Base models whose weights stay quantised, in blocks of GGUF that are read when an operation needs them.

w_0 takes 4.5 to 8.5 bits a weight, and full-parameter tuning still works: the update is added to the
dequantised weights as they are made and never has to be representable in the stored type. A GGUF
file is memory-mapped as it is; any other model can be quantised while it is loaded.
"""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, cast
from warnings import catch_warnings, simplefilter, warn

import gguf
import numpy as np
import torch
from accelerate import init_empty_weights
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from ..errors import FedKSeedError
from ..weights.lazy import TILE, Lazy, Workspace
from .checkpoint import require_none_unused
from .gguf_config import FACTORS, architecture_of, gguf_config

QUANTISABLE = ("Q8_0", "Q4_0", "Q4_1")  # what a dense model can be quantised to; 8.5, 4.5 and 5 bits a weight
PLAIN = {"F16": torch.float16, "BF16": torch.bfloat16}  # types of GGUF that are PyTorch's own


class Blocks:
    """A `Source`: a matrix in GGUF blocks.

    Args:
        raw: uint8, a row of blocks a row of the matrix.
        kind: the name of GGUF's type, `Q4_1` say.
        dtype: the type of the weights it is read as; float32 values are rounded once to it.
        device: where it is kept and read. Types without a kernel are kept and read on the CPU.
    """

    def __init__(
        self, raw: NDArray[np.uint8], kind: str, shape: Sequence[int], dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self.kind, self.shape, self.dtype = kind, torch.Size(shape), dtype
        self.device = torch.empty(0, device=device).device  # with its number, as cuda:0 for cuda
        with catch_warnings():
            simplefilter("ignore", UserWarning)  # a mapped file can't be written to, which PyTorch tells once
            in_file = torch.from_numpy(raw).contiguous()
        self.raw = in_file.to(self.device) if has_kernel(kind) else in_file

    def read(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        from ..directions.numba_cpu.gguf import LAYOUTS, dequantise

        (_, width), columns, first = self.raw.shape, self.shape[1], self.raw.data_ptr()
        if self.kind in LAYOUTS and self.device.type == "cpu":
            places = ((first + start // columns * width, out) for start, out in parts)
            dequantise([(place, out.data_ptr(), out.numel()) for place, out in places], self.kind, self.dtype)
            return
        for start, out in parts:
            rows = self.raw[start // columns : (start + out.numel()) // columns]
            if has_kernel(self.kind):
                weights = widened(rows, self.kind)
            else:
                weights = torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[self.kind]))
            if 4 not in (weights.itemsize, out.itemsize) and weights.dtype != out.dtype:
                weights = weights.float()  # PyTorch is several times slower from one 16-bit type to another
            out.copy_(weights.view(out.shape))


def has_kernel(kind: str) -> bool:
    """Tell a type that this package reads by a kernel from one that the package `gguf` reads."""
    from ..directions.numba_cpu.gguf import LAYOUTS

    return kind in LAYOUTS or kind in PLAIN


def widened(rows: Tensor, kind: str) -> Tensor:
    """Rows of blocks as rows of weights, in float32 or in a type of PLAIN: plain PyTorch operations on any device."""
    from ..directions.numba_cpu.gguf import LAYOUTS, Codes

    if kind in PLAIN:
        return rows.view(PLAIN[kind])
    layout = LAYOUTS[kind]
    blocks = rows.reshape(-1, layout.size)

    def integers(of: Codes) -> Tensor:
        total = torch.zeros((), dtype=torch.int16, device=blocks.device)
        for byte, shift, count, place in of.parts:
            picked = blocks[:, torch.from_numpy(byte).to(blocks.device)].short()
            total = total | (picked >> torch.from_numpy(shift).to(picked) & (1 << count) - 1) << place
        if of.table:
            total = torch.tensor(of.table, device=blocks.device)[total.int()]
        return ((total ^ 128) - 128 if of.signed else total - of.minus).float()

    def half(first: int) -> Tensor:
        return blocks[:, first : first + 2].contiguous().view(torch.float16).float()

    q, scales = integers(layout.q).view(len(blocks), layout.group_count, -1), half(layout.d)
    plus = [half(layout.d + 2)] if layout.m else []
    if layout.groups is not None:
        factors = integers(layout.groups).split(layout.group_count, 1)
        scales, plus = scales * factors[0], [m * -t for m, t in zip(plus, factors[1:], strict=True)]
    weights = q * scales[:, :, None]
    return sum((m[:, :, None] for m in plus), weights).view(len(rows), -1)


def quantise(model: nn.Module, kind: str, device: str = "cpu") -> nn.Module:
    """Quantise the matrices of a model, in place; tensors that are no matrix of whole blocks stay as they are.

    Args:
        kind: one of QUANTISABLE.
        device: where the model goes.
    """
    type_, workspace, quantised = gguf.GGMLQuantizationType[kind], Workspace(), dict[int, Lazy]()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.ndim == 2 and parameter.shape[1] % 32 == 0:
                if id(parameter) not in quantised:
                    tiles = parameter.data.split(max(1, TILE // parameter.shape[1]))  # small copies in float32
                    raw = np.concatenate([gguf.quantize(rows.float().numpy(), type_) for rows in tiles])
                    blocks = Blocks(raw, kind, parameter.shape, parameter.dtype, device)
                    quantised[id(parameter)] = Lazy(blocks, workspace)
                setattr(module, name, quantised[id(parameter)])
    return moved(model, device)


def moved(model: nn.Module, device: str) -> nn.Module:
    """Move a model's dense parameters and its buffers; lazy tensors stay where their blocks are."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, Lazy):
            tensor.data = tensor.data.to(device)
    return model


def load_gguf(path: Path, dtype: torch.dtype, device: str = "cpu", config: Any = None) -> nn.Module:
    """Load the model of a GGUF file, its quantised matrices as they are in the file, memory-mapped.

    Values are those that `transformers` gives the dequantised model, bit for bit.

    Raises:
        FedKSeedError: the file lacks a weight of the model, or has one that the model has no place for.
    """
    model, reader = empty_model(config or gguf_config(path), dtype=dtype), gguf.GGUFReader(str(path))
    processor, names = names_in_file(model, reader, str(path))
    workspace, tensors = Workspace(), dict[str, Tensor]()
    for tensor in reader.tensors:
        if tensor.name in names:
            tensors[names[tensor.name]] = _read(tensor, processor, dtype, workspace, device)
    _fill(model, tensors, path)
    _warn_of_slow_types(list(tensors.values()), path)
    return moved(model, device)


def empty_model(config: Any, include_buffers: bool = False, **options: Any) -> Any:
    """A model of a configuration, without memory for its weights, or for its buffers either."""
    with init_empty_weights(include_buffers):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    model.tie_weights()
    return model


def names_in_file(model: nn.Module, reader: gguf.GGUFReader, file: str) -> tuple[Any, dict[str, str]]:
    """The changes that transformers makes to a file's tensors, and the model's names of them.

    Raises:
        FedKSeedError: the model has no place for a tensor of the file.
    """
    processor = processor_of(architecture_of(reader), model.config)
    names = get_gguf_hf_weights_map(model, processor)
    # gpt2's processor reads output.weight by itself; of experts the names without their ends are known
    known = {*names, *(f"{name}.weight" for name in names), FACTORS}
    require_none_unused([tensor.name for tensor in reader.tensors if tensor.name not in known], file)
    return processor, names


def processor_of(architecture: str, config: Any) -> Any:
    """The changes that transformers makes to the tensors of a GGUF file.

    Args:
        architecture: llama.cpp's name of it.
    """
    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())


def row_order(processor: Any, name: str, count: int) -> NDArray[np.int64] | None:
    """The file's row for each of a tensor's `count` rows; None where more than the order of rows differs."""
    rows = np.arange(count)
    processed = processor.process(weights=np.stack([rows, rows + 0.5], 1), name=name).weights
    order = processed[:, 0].astype(np.int64) if processed.shape == (count, 2) else rows[:0]
    return order if order.size and np.array_equal(processed, np.stack([order, order + 0.5], 1)) else None


def _read(tensor: Any, processor: Any, dtype: torch.dtype, workspace: Workspace, device: str) -> Tensor:
    """One tensor of a file: lazy if it is a quantised matrix whose rows stay whole, else dense."""
    kind, shape = tensor.tensor_type.name, [int(size) for size in reversed(tensor.shape)]
    if kind not in ("F32", "F64") and len(shape) == 2:
        order = row_order(processor, tensor.name, shape[0])
        if order is not None:
            rows = tensor.data if np.array_equal(order, np.arange(shape[0])) else tensor.data[order]
            return Lazy(Blocks(rows.view(np.uint8), kind, shape, dtype, device), workspace)
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    dense = np.array(processor.process(weights=values, name=tensor.name).weights, order="C")
    return torch.from_numpy(dense).to(dtype)


def _warn_of_slow_types(tensors: Sequence[Tensor], path: Path) -> None:
    """Say how long a forward pass spends on matrices of types without a kernel, by one tile of each type.

    Raises:
        FedKSeedError: the `gguf` package doesn't read a type either.
    """
    by_kind: dict[str, list[Lazy]] = {}
    for tensor in tensors:
        if isinstance(tensor, Lazy) and not has_kernel(kind := cast(Blocks, tensor.source).kind):
            by_kind.setdefault(kind, []).append(tensor)
    seconds, other = 0.0, "take a file of other types, as Q4_K_M has"
    for kind, (one, *more) in by_kind.items():
        begin, rows = perf_counter(), min(one.step, len(one))
        try:
            tile = one.rows(0, rows)
        except NotImplementedError as error:
            raise FedKSeedError(f"it has matrices of type {kind}, which is not read here; {other}") from error
        seconds += (perf_counter() - begin) / tile.numel() * sum(tensor.numel() for tensor in (one, *more))
    if by_kind:
        warn(
            f"{path}: {sum(map(len, by_kind.values()))} matrices of type {' and '.join(by_kind)} have no kernel: "
            f"reading them takes about {seconds:.2g} s in each forward pass; {other}, or storage = 'dense'",
            stacklevel=2,
        )


def _fill(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Put tensors into an empty model, tied parameters together."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for where, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((f"{where}.{name}" if where else name, module, name))
    for tied in places.values():
        (name, module, attribute), *_ = tied
        tensor = next((tensors[full] for full, _, _ in tied if full in tensors), None)
        if tensor is None:
            raise FedKSeedError(f"the file {path} lacks the weights {name}; get the whole model")
        empty = module._parameters[attribute]
        if empty is not None and tensor.shape != empty.shape:
            got, expected = tuple(tensor.shape), tuple(empty.shape)
            raise FedKSeedError(f"the file {path} has {name} of shape {got}, its own description says {expected}")
        value = tensor if isinstance(tensor, Lazy) else nn.Parameter(tensor, requires_grad=False)
        for _, module, attribute in tied:
            setattr(module, attribute, value)
