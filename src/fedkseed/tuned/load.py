"""Tuned models on disk, whatever they are kept as: a run, an adapter file, a folder that `fedkseed export` wrote."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import metadata_load
from torch import nn

from ..data.wording import Wording
from ..errors import FedKSeedError
from ..files import read_table
from ..models.load import DTYPES, find, load_model, load_tokenizer
from ..run.store import Store
from ..weights.adapter import Adapter
from .lora import CONFIG

ADAPTER, CARD = "adapter.safetensors", "README.md"
PLAIN = Wording()  # where nothing says in which words a model was tuned
OWN = "fedkseed"  # the entry of a card's front matter in which an exported folder keeps what evaluation needs


@dataclass(frozen=True, slots=True)
class TunedModel:
    """A tuned model, and what is known of its making. One of `adapter`, `adapters` and `weights` is there.

    Args:
        path: the place that a user named.
        base: the base model, as `load_model` takes it; None: not known.
        adapter: K coefficients.
        adapters: folder of adapters of the `peft` library.
        weights: a whole model, as `load_model` takes it.
        store: the run, where it is there.
        worded: whether it is known on which words it was tuned; `wording` is else a guess.
    """

    path: Path
    base: str | None
    wording: Wording = field(default_factory=Wording)
    dtype: str = "float32"
    storage: str = "dense"
    adapter: Adapter | None = None
    adapters: Path | None = None
    weights: str | None = None
    store: Store | None = None
    worded: bool = True

    def load_base(self) -> nn.Module:
        """The base model.

        Raises:
            FedKSeedError: it is not known or can't be loaded.
        """
        return load_model(self._base, self.dtype, self.storage)

    def load(self) -> nn.Module:
        """The tuned model, as the run evaluated it: adapters of `peft` stay beside the base model's weights."""
        if self.weights is not None:
            return load_model(self.weights, self.dtype)
        model: Any = self.load_base()
        if self.adapter is not None:
            self.adapter.apply(model)
            return model
        try:
            from peft import PeftModel
        except ImportError as error:
            raise FedKSeedError("adapters need the extra `peft`: pip install 'fedkseed[peft]'") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft's, of transformers
            adapted: Any = PeftModel.from_pretrained(model, str(self.adapters))
        return adapted.requires_grad_(False).eval()

    def merged(self) -> nn.Module:
        """The tuned model with all of its change in its own weights.

        Raises:
            FedKSeedError: the change is none of weights.
        """
        if self.adapters is None:
            return self.load()
        about = read_table(self.adapters / CONFIG, by_hand=True)
        if about.get("peft_type") != "LORA" or about.get("ensure_weight_tying"):
            what = "virtual tokens" if about.get("peft_type") != "LORA" else "a change of a matrix that is used twice"
            raise FedKSeedError(
                f"{self.adapters} holds {what}, which can't be merged into weights: export with --format peft, or the "
                "run itself"
            )
        adapted: Any = self.load()
        return adapted.merge_and_unload()

    def tokenizer(self) -> Any:
        """The tokenizer, which tuning leaves as it is."""
        return load_tokenizer(self.weights or self._base)

    @property
    def source(self) -> Path | None:
        """The GGUF file that the base model comes from, or the whole model; None: it comes from no such file."""
        name = self.base or self.weights
        found = None if name is None else find(name)
        return None if found is None or found.gguf is None else Path(found.name) / found.gguf

    @property
    def _base(self) -> str:
        if self.base is None:
            raise FedKSeedError(f"the base model of {self.path} is not known; name it: --model FOLDER")
        return self.base


def open_tuned(path: Path, model: str | None = None) -> TunedModel:
    """Find the tuned model at a place.

    Args:
        path: directory of a run, adapter file, folder of `fedkseed export`, any folder of a model or of a LoRA, or a
            GGUF file.
        model: the base model, if it has moved.

    Raises:
        FedKSeedError: there is no tuned model.
    """
    if path.is_dir() and (path / "recipe.toml").is_file():
        return _of_run(Store(path), model)
    if not path.is_dir() and path.suffix != ".gguf":
        return _of_adapter(path, path, model)
    if (path / ADAPTER).is_file():
        return _of_adapter(path, path / ADAPTER, model)
    known = _known(path)
    worded = "template" in known
    wording = Wording(known.get("template", PLAIN.template), known.get("separator", PLAIN.separator))
    if (path / CONFIG).is_file():
        name = model or read_table(path / CONFIG, by_hand=True).get("base_model_name_or_path")
        return TunedModel(path, name, wording, known.get("dtype", "float32"), adapters=path, worded=worded)
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if files or (path / "config.json").is_file():
        if len(files) > 1:
            raise FedKSeedError(f"{path} has {len(files)} GGUF files; name one of them")
        weights = str(files[0] if files else path)
        return TunedModel(path, model, wording, known.get("dtype") or _dtype(path), weights=weights, worded=worded)
    raise FedKSeedError(
        f"{path} is no tuned model: give a run's directory, an adapter file, a folder of `fedkseed export`, or a "
        ".gguf file"
    )


def _of_run(store: Store, model: str | None) -> TunedModel:
    if store.adapter.is_file():
        return _of_adapter(store.directory, store.adapter, model, store)
    if not store.model.is_dir():
        raise FedKSeedError(
            f"{store.directory} has no tuned model yet, or its recipe says save = false; "
            f"go on with: fedkseed resume {store.directory}"
        )
    recipe = store.load_recipe()
    wording = Wording(recipe.data.template, recipe.data.separator)
    made = TunedModel(store.directory, model or recipe.model.name, wording, recipe.model.dtype, store=store)
    adapts = (store.model / CONFIG).is_file()
    return replace(made, adapters=store.model) if adapts else replace(made, weights=str(store.model))


def _of_adapter(path: Path, file: Path, model: str | None, store: Store | None = None) -> TunedModel:
    adapter = Adapter.load(file)
    about = adapter.provenance
    wording = Wording(about["template"] or PLAIN.template, about["separator"])
    return TunedModel(path, model or about["model"], wording, about["dtype"], adapter.storage, adapter, store=store)


def _known(path: Path) -> Mapping[str, Any]:
    """The entry of an exported folder's card; empty for other folders."""
    card = (path if path.is_dir() else path.parent) / CARD
    try:
        found = (metadata_load(card) or {}).get(OWN) if card.is_file() else None
    except Exception as error:  # YAML's errors are of many kinds
        raise FedKSeedError(f"the front matter of {card} can't be read: {error}; mend or remove the file") from error
    return found if isinstance(found, dict) else {}


def _dtype(path: Path) -> str:
    """The type of a folder's weights."""
    if path.suffix == ".gguf" or not (path / "config.json").is_file():
        return "float32"
    about = read_table(path / "config.json", by_hand=True)
    name = about.get("dtype") or about.get("torch_dtype")
    return name if name in DTYPES else "float32"
