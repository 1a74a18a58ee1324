"""A tuned model as a folder that other programs load: Hugging Face, peft, llama.cpp, Ollama; each with a card."""

import json
import shutil
from pathlib import Path
from typing import Any

from ..data.layouts import Example
from ..data.wording import Wording
from ..errors import FedKSeedError
from ..files import folder, read_table
from ..models.load import DTYPES
from ..weights.adapter import Adapter
from ..weights.lazy import densify
from .gguf import KINDS, write_gguf, write_gguf_lora
from .load import ADAPTER, CARD, TunedModel
from .lora import CONFIG, WEIGHTS, Lora, as_lora, nearest_lora, require_low_rank
from .model_card import card, require_known_format

LORAS = ("peft", "lora-gguf")


def export(
    tuned: TunedModel,
    output: Path,
    format_: str = "hf",
    *,
    kind: str = "f16",
    rank: int | None = None,
    dtype: str | None = None,
) -> list[str]:
    """Write a tuned model into a new folder.

    Args:
        format_: `hf`, a whole model for transformers; `peft`, a LoRA or other adapters; `gguf`, a whole model for
            llama.cpp, with a Modelfile for Ollama; `lora-gguf`, a LoRA for llama.cpp; `fedkseed`, the coefficients.
        kind: of the matrices in a GGUF file.
        rank: of a LoRA that is only near to the tuned model; None: only an exact one is written.
        dtype: of the weights of `hf`; None: as they were tuned.

    Returns:
        Sentences on what was written.

    Raises:
        FedKSeedError: the model can't be written in this format, or the folder exists.
    """
    _require(tuned, output, format_, kind, rank, dtype)
    tokenizer = tuned.tokenizer()
    if tuned.worded:  # programs that put messages to the model do it in the words on which it was tuned
        tokenizer.chat_template = tuned.wording.chat_template(tokenizer)
    with folder(output, 0o777) as part:
        if format_ == "hf":
            notes = _write_hf(tuned, tokenizer, part, dtype)
        elif format_ == "gguf":
            notes = _write_gguf(tuned, tokenizer, part, kind)
        elif tuned.adapter is not None and format_ == "fedkseed":
            notes = _write_coefficients(tuned.adapter, part)
        else:
            notes = _write_lora(tuned, part, format_, rank)
        options = {"gguf": f" --kind {kind}"}.get(format_, "")
        options += f" --rank {rank}" if rank is not None else ""
        options += f" --dtype {dtype}" if dtype is not None else ""
        command = f"fedkseed export {tuned.path.resolve().name} {output.name} --format {format_}{options}"
        text = card(tuned, tokenizer, format_, command, dtype or tuned.dtype, notes)
        (part / CARD).write_text(text, encoding="utf-8")
    return notes


def _require(tuned: TunedModel, output: Path, format_: str, kind: str, rank: int | None, dtype: str | None) -> None:
    """Refuse, before a minute of loading, what can't be written."""
    require_known_format(format_)
    if output.exists():
        raise FedKSeedError(f"{output} exists already; choose another folder")
    if kind not in KINDS:
        raise FedKSeedError(f"no kind of GGUF is called {kind!r}; choose one of {', '.join(KINDS)}")
    if dtype is not None and (format_ != "hf" or dtype not in DTYPES):
        raise FedKSeedError(f"--dtype is one of {', '.join(DTYPES)}, for --format hf; got {dtype!r} for {format_}")
    if rank is not None and format_ not in LORAS:
        raise FedKSeedError(f"--rank is for --format {' and '.join(LORAS)}, got {rank} for {format_}")
    if format_ == "fedkseed" and tuned.adapter is None:
        raise FedKSeedError(f"the model of {tuned.path} is not a function of K coefficients; choose another format")
    if format_ in LORAS and rank is None and tuned.adapters is None:
        if tuned.adapter is None:
            raise FedKSeedError(
                f"all weights of {tuned.path} were tuned, at full rank, which LoRA can't hold; give --rank for the "
                "nearest change of that rank, or export the whole model: --format hf"
            )
        require_low_rank(tuned.adapter.pool)


def _write_hf(tuned: TunedModel, tokenizer: Any, part: Path, dtype: str | None) -> list[str]:
    model: Any = tuned.merged()
    densify(model)
    if dtype is not None:
        model.to(DTYPES[dtype])
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    return [f"The folder holds the whole model in {dtype or tuned.dtype}, for `transformers`."]


def _write_gguf(tuned: TunedModel, tokenizer: Any, part: Path, kind: str) -> list[str]:
    file = f"model-{kind}.gguf"
    write_gguf(part / file, tuned.merged(), tokenizer, kind, tuned.source)
    (part / "Modelfile").write_text(modelfile(file, tokenizer, tuned.wording), encoding="utf-8")
    return [f"The file `{file}` holds the whole model, for `llama.cpp`; `Modelfile` is for Ollama."]


def _write_coefficients(adapter: Adapter, part: Path) -> list[str]:
    adapter.save(part / ADAPTER)
    return [f"The file `{ADAPTER}` holds {adapter.pool.size:,} coefficients, which fedkseed adds to the base model."]


def _write_lora(tuned: TunedModel, part: Path, format_: str, rank: int | None) -> list[str]:
    if format_ == "peft" and rank is None and tuned.adapters is not None:
        return _copy_adapters(tuned.adapters, part, tuned.base or "")
    lora, config, notes = _lora(tuned, rank)
    size = f"a LoRA of {lora.size / 1e6:,.1f} MB, of rank {lora.rank} at most"
    if format_ == "peft":
        lora.write(part, tuned.base or "")
        return [f"The folder holds {size}, for `peft`, to use beside the base model.", *notes]
    write_gguf_lora(part / "lora.gguf", lora, config)
    return [f"The file `lora.gguf` holds {size}, for `llama.cpp`, to load beside the base model.", *notes]


def _lora(tuned: TunedModel, rank: int | None) -> tuple[Lora, Any, list[str]]:
    """The LoRA of a tuned model, the configuration of its base model, and sentences on its error."""
    if rank is not None:
        model: Any = tuned.merged()
        found = nearest_lora(model, tuned.load_base(), rank)
        error = (
            f"It is the nearest change of rank {rank} to the tuned model's: {found.error:.1%} of the change are left "
            f"out, by the Frobenius norm, and of that of {found.worst}, the worst, {found.errors[found.worst]:.1%}."
        )
        return found.lora, model.config, [error]
    if tuned.adapter is not None:
        model, own = tuned.load(), tuned.adapter
        return as_lora(model, own.patterns, own.pool, own.coefficients, own.basis), model.config, []
    model = tuned.load_base()
    return Lora.read(tuned.adapters or tuned.path), model.config, []


def _copy_adapters(adapters: Path, part: Path, base: str) -> list[str]:
    shutil.copyfile(adapters / WEIGHTS, part / WEIGHTS)
    about = read_table(adapters / CONFIG, by_hand=True) | {"base_model_name_or_path": base}
    (part / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
    return [f"The folder holds adapters of the kind {about['peft_type']}, for `peft`, to use beside the base model."]


def modelfile(file: str, tokenizer: Any, wording: Wording) -> str:
    """The text of a Modelfile, with which Ollama puts questions as the model was tuned on them."""
    prompt = wording.text(Example("{{ .Prompt }}", ""), tokenizer)
    adds_begin = tokenizer.bos_token and tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    if wording.template == "chat" and adds_begin:  # Ollama lets the tokenizer add it, and would have two
        prompt = prompt.removeprefix(tokenizer.bos_token)
    return f'FROM ./{file}\nTEMPLATE """{prompt}"""\nPARAMETER stop "{tokenizer.eos_token}"\n'
