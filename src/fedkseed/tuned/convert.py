"""A published model whose weights are pickles, as a folder of safetensors: nothing else here opens a pickle."""

import shutil
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import FedKSeedError, first_line
from ..files import folder, read_table, require_absent
from ..models.checkpoint import PICKLE_INDEX

MOST_TABLE = 1 << 26  # bytes of a pickle without its tensors' numbers; it has some 150 for each tensor
MOST_REPEATED = 2  # times a file's bytes its tensors may have: tied matrices are there twice
SHARD = 1 << 30  # bytes of a file that is written, for which there is room in memory
LEFT = shutil.ignore_patterns("*.bin", "*.bin.index.json", "*safetensors*", "*.pt", "*.pth", "*.h5", "*.msgpack", ".*")


def convert(model: Path, output: Path) -> tuple[int, int]:
    """Write the model of a folder of pickles as a folder of safetensors; returns the numbers of tensors and of bytes.

    Each tensor has the bits that it has in its pickle, which is checked on what was written. That is then loaded as any
    model, by which tensors are refused that are missing or that the configuration has no place for.

    Raises:
        FedKSeedError: a file is missing, damaged or calls more than a table of tensors needs, the written model can't
            be loaded, or the output exists.
    """
    require_absent(output)
    if not (files := sorted(model.glob("pytorch_model*.bin"))):
        raise FedKSeedError(f"{model} has no pytorch_model*.bin; a model in safetensors or GGUF is used as it is")
    with folder(output, 0o777) as part:
        shutil.copytree(model, part, ignore=LEFT, dirs_exist_ok=True)
        try:
            return _write(files, model / PICKLE_INDEX, part)
        except FedKSeedError as error:
            raise FedKSeedError(str(error).replace(str(part), str(model))) from error


def _write(files: list[Path], index: Path, part: Path) -> tuple[int, int]:
    """Write the tensors of some files beside the other files of the model."""
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import load_file

    from ..models.load import DTYPES, load_model, load_tokenizer, save_tokenizer
    from .read_back import require_same, require_same_tokenizer

    tokenizer = load_tokenizer(str(part))
    tensors, places = dict[str, Any](), dict[str, str]()
    for file in files:
        table = _tensors(file)
        if twice := sorted(places.keys() & table):
            raise FedKSeedError(f"{twice[0]} is in {places[twice[0]]} and in {file}; get the model again")
        tensors, places = tensors | table, places | dict.fromkeys(table, file.name)
    named = read_table(index, by_hand=True).get("weight_map") if index.is_file() else places
    named = named if isinstance(named, dict) else {}
    if wrong := [name for name in sorted(named | places) if named.get(name) != places.get(name)]:
        raise FedKSeedError(
            f"{index} has {wrong[0]} in {named.get(wrong[0], 'no file')}, it is in {places.get(wrong[0], 'none')}; get "
            "the whole model"
        )
    owners = {tensor.data_ptr(): name for name, tensor in tensors.items()}  # of numbers that tied matrices share
    apart = {name: each if owners[each.data_ptr()] == name else each.clone() for name, each in tensors.items()}
    save_torch_state_dict(apart, part, max_shard_size=SHARD, metadata={"format": "pt"})
    written = dict(pair for file in part.glob("model*.safetensors") for pair in load_file(file).items())
    require_same(written, tensors, str(part))
    kinds = Counter(tensor.dtype for tensor in tensors.values())
    load_model(str(part), max(DTYPES, key=lambda name: kinds[DTYPES[name]]))
    save_tokenizer(tokenizer, part)  # as tokenizer.json, where it was in another form
    require_same_tokenizer(part, tokenizer)
    return len(tensors), sum(tensor.nbytes for tensor in tensors.values())


def _tensors(file: Path) -> dict[str, Any]:
    """The tensors of a pickle by name, memory-mapped, each within the bytes that the file has for it."""
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        with zipfile.ZipFile(file) as archive:
            (size,) = (entry.file_size for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
            packed = any(entry.compress_type for entry in archive.infolist())
            if size > MOST_TABLE or packed or archive.testzip() is not None:
                why = f"{size:,} bytes of instructions" if size > MOST_TABLE else "compressed, or a wrong checksum"
                raise zipfile.BadZipFile(why)
        calls = get_unsafe_globals_in_checkpoint(file)
        table: Any = None if calls else torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of whatever kind a damaged file raises
        why = f"is damaged, not complete, or from a PyTorch before 1.6, of 2020 ({first_line(error)})"
        raise FedKSeedError(f"{file} {why}; get it again, or take the model in safetensors") from error
    if calls:
        raise FedKSeedError(
            f"{file} is no table of tensors alone: reading it would call {', '.join(calls)}; it was not read. Take the "
            "model in safetensors, from a place that you trust"
        )
    if not isinstance(table, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in table.values()):
        raise FedKSeedError(f"{file} is no table of tensors by name; take the file that has the model's weights alone")
    claimed = sum(tensor.nbytes for tensor in table.values())
    large = [name for name, tensor in table.items() if tensor.nbytes > tensor.untyped_storage().nbytes()]
    if large or claimed > MOST_REPEATED * file.stat().st_size:
        what = large[0] if large else f"tensors of {claimed:,} bytes"
        raise FedKSeedError(f"{file} has too few numbers for {what}; get it again")
    return {name: tensor.detach().contiguous() for name, tensor in table.items()}
