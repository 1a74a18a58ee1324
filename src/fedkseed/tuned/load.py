"""Tuned models on disk, whatever they are kept as: a run, an adapter file, a folder that `fedkseed export` wrote."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from huggingface_hub.repocard import metadata_load

from ..data.chat_template import uses_clock
from ..data.wording import Wording
from ..errors import FedKSeedError, others_border
from ..files import read_table
from ..models.checkpoint import ADAPTERS, adapter_config, require_no_adapters, settle_ties
from ..models.place import find, require_there
from ..recipe.basis_digest import with_basis
from ..recipe.rules import checked_algorithm
from ..recipe.schema import BEHAVIOUR, Dtype
from ..run.ensemble import mean_state, require_coefficients
from ..run.loop import WithoutModel
from ..run.store import Store, runs_near
from ..run.verify import begun_with, with_noise_of
from ..weights.adapter import ADAPTER, Adapter

if TYPE_CHECKING:  # a place is looked at before PyTorch is loaded
    from torch import nn

CARD = "README.md"
DTYPES = get_args(Dtype)
CARD_ENTRY = "fedkseed"  # in a card's front matter: what evaluation needs to know of the exported model


@dataclass(frozen=True, slots=True)
class TunedModel:
    """A tuned model, and what is known of its making. One of `adapter`, `adapters` and `weights` is there."""

    path: Path  # the place that a user named
    base: str | None  # the base model, as `load_model` takes it; None: not known
    wording: Wording = field(default_factory=Wording)
    dtype: str = "float32"
    storage: str = "dense"
    adapter: Adapter | None = None  # K coefficients
    adapters: Path | None = None  # folder of adapters of the `peft` library
    weights: str | None = None  # a whole model, as `load_model` takes it
    store: Store | None = None  # the run, where it is there
    tokenizer_digest: str | None = None  # of the run's tokenizer; None: not known, or the tokenizer is the model's own
    losses: list[float] | None = None  # of the run's base model; None: not known
    worded: bool = True  # whether it is known on which words it was tuned; `wording` is else a guess
    remark: str = ""  # which rounds' model it is, where it is not the one that the run ended with
    ensemble: int = 1  # how many of the run's last rounds the model is the mean of
    note: Callable[[str], None] = lambda text: None  # called with what is being loaded

    def load_base(self) -> "nn.Module":
        """The base model, if it is known.

        Raises:
            FedKSeedError: it can't be loaded, or computes otherwise than that of the run.
        """
        from ..models.known_losses import losses, require_losses
        from ..models.load import load_model

        self.note(f"loading the model {self._base}")
        model = load_model(self._base, self.dtype, self.storage)
        if self.losses is not None:
            require_losses(losses(model), self.losses, self.dtype, self._base)
        return model

    def load(self) -> "nn.Module":
        """The tuned model, as the run evaluated it: adapters of `peft` stay beside the base model's weights."""
        from ..models.load import load_model
        from ..models.peft_adapters import load_adapters

        if self.weights is not None:
            self.note(f"loading the model {self.weights}")
            return load_model(self.weights, self.dtype)
        model: Any = self.load_base()
        if self.adapter is not None:
            self.note("adding what was tuned")
            self.adapter.apply(model)
            return model
        return load_adapters(model, str(self.adapters))

    def merged(self, loaded: "nn.Module | None" = None) -> "nn.Module":
        """The tuned model with all of its change in its own weights; a change that is none of weights is refused.

        Args:
            loaded: the model from `load`, which is changed in place; None: it is loaded.
        """
        if self.adapters is None:
            return self.load() if loaded is None else loaded
        about = adapter_config(self.adapters)
        matrices = about.get("peft_type") in ("LORA", "UNILORA")
        if not matrices or about.get("ensure_weight_tying"):
            what = "a change of a matrix that is used twice" if matrices else "virtual tokens"
            raise FedKSeedError(
                f"{self.adapters} holds {what}, which can't be merged into weights: export with --format peft, "
                "or measure it by `fedkseed eval` without --tasks"
            )
        adapted: Any = self.load() if loaded is None else loaded
        _untie_adapted(adapted.get_base_model())
        with others_border(f"{self.adapters} can't be merged into weights", "export with --format peft"):
            return adapted.merge_and_unload()

    def tokenizer(self) -> Any:
        """The tokenizer, which tuning leaves as it is; with the chat template that others' adapters have beside them.

        Raises:
            FedKSeedError: it can't be loaded, or is another than that of the run.
        """
        from ..data.tokenizer_digest import require_tokenizer
        from ..models.load import load_tokenizer

        tokenizer = load_tokenizer(self.place)
        require_tokenizer(tokenizer, self.tokenizer_digest, self.wording.template, self.place)
        if self.adapters is not None and not self.worded and (template := _template_beside(self.adapters)):
            tokenizer.chat_template = template
        return tokenizer

    def words(self, tokenizer: Any) -> Wording:
        """The wording of tuning; of a model that nobody knows to be tuned, its own chat template if it has one."""
        words = self.wording if self.worded or not tokenizer.chat_template else Wording("chat")
        if words.template == "chat" and words.date is None and uses_clock(tokenizer):
            return replace(words, date=datetime.now(UTC).date())  # also of runs of releases that kept no date
        return words

    def chat_tokenizer(self) -> Any:
        """The tokenizer with a chat template that puts messages in the model's words."""
        tokenizer = self.tokenizer()
        tokenizer.chat_template = self.words(tokenizer).chat_template(tokenizer)
        return tokenizer

    @property
    def place(self) -> str:
        """The place of the whole model, or of the base model, whose tokenizer is also the tuned one's."""
        return self.weights or self._base

    @property
    def source(self) -> Path | None:
        """The GGUF file that the base model comes from, or the whole model; None: it comes from no such file."""
        name = self.base or self.weights
        return None if name is None else find(name).gguf_path

    @property
    def _base(self) -> str:
        if self.base is None:
            raise FedKSeedError(f"the base model of {self.path} is not known; name it: --model FOLDER")
        return self.base


def _template_beside(folder: Path) -> str:
    """The chat template in a folder of adapters, by which their maker may have worded the rows; empty: none."""
    if (file := folder / "chat_template.jinja").is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FedKSeedError(f"the chat template {file} can't be read: {error}; get the folder again") from error
    file = folder / "tokenizer_config.json"
    template = read_table(file, by_hand=True).get("chat_template") if file.is_file() else None
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def open_tuned(path: Path, model: str | None = None, ensemble: int = 1) -> TunedModel:
    """Find the tuned model at a place.

    Args:
        path: directory of a run, adapter file, folder of `fedkseed export`, any folder of a model or of a LoRA, or a
            GGUF file, also as package:NAME/FILE.gguf.
        model: the base model, if it has moved.
        ensemble: of a run, how many of its last rounds the model is the mean of.

    Raises:
        FedKSeedError: there is no tuned model.
    """
    if str(path).startswith("package:"):
        path = find(str(path)).gguf_path or path
    if path.is_dir() and (path / "recipe.toml").is_file():
        return _of_run(Store(path), model, ensemble)
    if ensemble > 1:
        raise FedKSeedError(
            f"--ensemble {ensemble} needs the states of a run's rounds, and {path} is no run's directory"
        )
    if not path.exists():
        raise FedKSeedError(f"no tuned model at {path}: no such file or folder; {runs_near(path)}")
    if not path.is_dir() and path.suffix != ".gguf":
        return _of_adapter(Adapter.load(path), path, model)
    if (path / ADAPTER).is_file():
        return _of_adapter(Adapter.load(path / ADAPTER), path, model)
    entry = _card_entry(path)
    worded = "template" in entry
    wording = Wording.read(entry)
    if (path / ADAPTERS).is_file():
        if any(path.glob("model*.safetensors")):  # whose, and merged or not: both can be meant
            require_no_adapters(path)
        name = model or adapter_config(path).get("base_model_name_or_path")
        facts = {"dtype": entry.get("dtype", "float32"), "tokenizer_digest": entry.get("tokenizer_digest")}
        return TunedModel(path, name, wording, **facts, adapters=path, worded=worded)
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if files or (path / "config.json").is_file():
        if len(files) > 1:
            raise FedKSeedError(f"{path} has {len(files)} GGUF files; name one of them")
        config = path / "config.json"  # also beside a GGUF file
        about = read_table(config, by_hand=True) if config.is_file() else {}
        named = about.get("dtype") or about.get("torch_dtype")
        dtype = entry.get("dtype") or (str(named) if named in DTYPES else "float32")
        return TunedModel(path, model, wording, dtype, weights=str(files[0] if files else path), worded=worded)
    raise FedKSeedError(
        f"{path} is no tuned model: give a run's directory, an adapter file, an exported folder, or a .gguf file"
    )


def open_ready(path: Path, model: str | None, note: Callable[[str], None], ensemble: int = 1) -> TunedModel:
    """Find the tuned model at a place as `open_tuned`; its base model, or the whole one, is there, and so is `peft`.

    Say by `note` which rounds' model it is, where it is not the run's last, and later what is loaded.
    """
    tuned = replace(open_tuned(path, model, ensemble), note=note)
    if tuned.remark:
        ended = tuned.store is not None and (tuned.store.forgotten or tuned.store.adapter.is_file())
        note(tuned.remark + ("" if ended else f": `fedkseed resume {path}` goes on"))
    require_there(tuned.place)
    if tuned.adapters is not None and find_spec("peft") is None:
        raise FedKSeedError(f"the adapters in {tuned.adapters} need the package peft: pip install 'fedkseed[peft]'")
    return tuned


def _of_run(store: Store, model: str | None, ensemble: int) -> TunedModel:
    if ensemble > 1:
        require_coefficients(store.load_recipe(model), ensemble)
        return _of_rounds(store, model, ensemble)
    if store.adapter.is_file():
        return _of_adapter(Adapter.load(store.adapter), store.directory, model, store)
    if not store.model.is_dir():
        return _of_rounds(store, model)
    recipe = store.load_recipe()
    wording = Wording.of(recipe.data)
    place: Any = {"adapters": store.model} if (store.model / ADAPTERS).is_file() else {"weights": str(store.model)}
    place |= {"store": store, **{name: getattr(recipe.model, name) for name in BEHAVIOUR}}
    return TunedModel(store.directory, model or recipe.model.name, wording, recipe.model.dtype, **place)


def _of_rounds(store: Store, model: str | None, ensemble: int = 1) -> TunedModel:
    """The model of the last finished round, or of the best so far; or the mean of it and some before it."""
    lacking, go_on = f"{store.directory} has no tuned model yet", f"go on with: fedkseed resume {store.directory}"
    if not store.path.exists() or (rounds := store.rounds) < 1:
        raise FedKSeedError(f"{lacking}, since no round is finished; {go_on}")
    recipe, best = store.load_recipe(model), store.tuned
    algorithm = checked_algorithm(recipe)
    if not algorithm.pooled:
        raise FedKSeedError(f"{lacking}: {recipe.training.algorithm} writes it at the end, or save = false; {go_on}")
    clear = recipe.having(secure=None, privacy=None)  # a state is the same where uploads are masked
    strategy, (_, basis) = algorithm.make(clear, begun_with(store, recipe)), with_basis(recipe)
    done = rounds if best is None else best
    state = mean_state(store, recipe, strategy.server.state, done, ensemble)
    patterns = recipe.model.tuned or ["*"]
    if recipe.model.tuned is None and (algorithm.tuned == "output" or recipe.model.last_layers):
        from ..models.load import skeleton
        from ..run.setup import tuned_patterns

        patterns = tuned_patterns(recipe, algorithm, skeleton(recipe.model.name))
    adapter = WithoutModel(with_noise_of(store, recipe), strategy, basis).adapter(state, patterns)
    which = f"round {done}" if ensemble == 1 else f"the mean of rounds {done - ensemble + 1} to {done}"
    remark = f"{'' if best is None else 'the best so far, '}{which} of {recipe.training.rounds}"
    if store.forgotten:
        remark += f"; recomputed without {store.forgotten}"
    elif not store.adapter.is_file():
        remark += "; the run is not finished"
    return replace(_of_adapter(adapter, store.directory, model, store), remark=remark, ensemble=ensemble)


def _of_adapter(adapter: Adapter, path: Path, model: str | None, store: Store | None = None) -> TunedModel:
    about = adapter.provenance
    wording = Wording.read(about)
    facts = {"store": store, **{name: about.get(name) for name in BEHAVIOUR}}
    return TunedModel(path, model or about["model"], wording, about["dtype"], adapter.storage, adapter, **facts)


def _untie_adapted(model: Any) -> None:
    """Give the output layer a matrix of its own, where one use of a tied matrix is adapted and would change both."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or not any(hasattr(layer, "base_layer") for layer in (embedding, head)):
        return
    inner, other = (getattr(layer, "base_layer", layer) for layer in (head, embedding))
    if inner.weight is other.weight:
        from torch import nn

        inner.weight = nn.Parameter(inner.weight.detach().clone(), requires_grad=False)
        settle_ties(model)


def _card_entry(path: Path) -> Mapping[str, Any]:
    """The facts about the model on an exported folder's card; empty for other folders."""
    card = (path if path.is_dir() else path.parent) / CARD
    with others_border(f"the front matter of {card} can't be read", "mend or remove the file"):
        entry = (metadata_load(card) or {}).get(CARD_ENTRY) if card.is_file() else None
    return entry if isinstance(entry, dict) else {}
