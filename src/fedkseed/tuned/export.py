"""A tuned model as a folder that other programs load: Hugging Face, peft, llama.cpp, Ollama; each with a card."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..data.layouts import SYSTEM, USER, Example, Turn
from ..data.wording import Wording
from ..errors import FedKSeedError
from ..files import folder, require_absent
from ..models.load import DTYPES, save_tokenizer
from ..weights.lazy import densify
from .gguf import MATRIX_TYPES, write_gguf, write_gguf_lora
from .load import ADAPTER, CARD, TunedModel
from .lora import CONFIG, WEIGHTS, Lora, adapter_config, as_lora, nearest_lora, require_low_rank
from .model_card import LIBRARIES, card

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
        kind: the type of the matrices in a GGUF file, a name of MATRIX_TYPES.
        rank: the rank of a LoRA that is only near to the tuned model; None: only an exact one is written.
        dtype: the type of the weights of `hf`; None: as they were tuned.

    Returns:
        Sentences on what was written.

    Raises:
        FedKSeedError: the model can't be written in this format, or the folder exists.
    """
    if format_ not in LIBRARIES:
        raise FedKSeedError(f"no format is called {format_!r}; choose one of {', '.join(LIBRARIES)}")
    require_absent(output)
    if kind not in MATRIX_TYPES:
        raise FedKSeedError(f"no kind of GGUF is called {kind!r}; choose one of {', '.join(MATRIX_TYPES)}")
    if dtype is not None and (format_ != "hf" or dtype not in DTYPES):
        raise FedKSeedError(f"--dtype is one of {', '.join(DTYPES)}, for --format hf; got {dtype!r} for {format_}")
    if rank is not None and format_ not in LORAS:
        raise FedKSeedError(f"--rank is for --format {' and '.join(LORAS)}, got {rank} for {format_}")
    _require_expressible(tuned, format_, rank)
    # Programs that put messages to the model do it in the words on which it was tuned.
    tokenizer = tuned.chat_tokenizer() if tuned.worded else tuned.tokenizer()
    words = tuned.words(tokenizer)
    with folder(output, 0o777) as part:
        if format_ == "hf":
            notes = _write_hf(tuned, tokenizer, part, dtype)
        elif format_ == "gguf":
            file = f"model-{kind}.gguf"
            write_gguf(part / file, tuned.merged(), tokenizer, kind, tuned.source, words if tuned.worded else None)
            (part / "Modelfile").write_text(modelfile(file, tokenizer, words), encoding="utf-8")
            notes = [f"The file `{file}` holds the whole model, for `llama.cpp`; `Modelfile` is for Ollama."]
        elif tuned.adapter is not None and format_ == "fedkseed":
            tuned.adapter.save(part / ADAPTER)
            size = f"{tuned.adapter.pool.size:,} coefficients"
            notes = [f"The file `{ADAPTER}` holds {size}, which fedkseed adds to the base model."]
        elif format_ == "peft" and rank is None and tuned.adapters is not None:
            shutil.copyfile(tuned.adapters / WEIGHTS, part / WEIGHTS)
            about = adapter_config(tuned.adapters) | {"base_model_name_or_path": tuned.base or ""}
            (part / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
            kept = f"adapters of the kind {about['peft_type']}"
            notes = [f"The folder holds {kept}, for `peft`, to use beside the base model."]
        else:
            notes = _write_lora(tuned, part, format_, rank)
        given = {"kind": kind if format_ == "gguf" else None, "rank": rank, "dtype": dtype}
        options = "".join(f" --{name} {value}" for name, value in given.items() if value is not None)
        command = f"fedkseed export {tuned.path.resolve().name} {output.name} --format {format_}{options}"
        text = card(tuned, tokenizer, format_, command, dtype or tuned.dtype, notes)
        (part / CARD).write_text(text, encoding="utf-8")
    return notes


def _require_expressible(tuned: TunedModel, format_: str, rank: int | None) -> None:
    """Refuse, before a minute of loading, a change that the format can't hold."""
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
    if tuned.worded:  # answers end where those of tuning do
        stated = model.generation_config.eos_token_id
        listed = [stated] if isinstance(stated, int) else stated or []
        ends = list(dict.fromkeys([*tuned.wording.ends(tokenizer), *listed]))
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    densify(model)
    if dtype is not None:
        model.to(DTYPES[dtype])
    model.save_pretrained(part)
    save_tokenizer(tokenizer, part)
    return [f"The folder holds the whole model in {dtype or tuned.dtype}, for `transformers`."]


def _write_lora(tuned: TunedModel, part: Path, format_: str, rank: int | None) -> list[str]:
    notes = list[str]()
    model: Any = tuned.load_base() if rank is None and tuned.adapter is None else tuned.merged()
    if rank is not None:
        lora, errors, error = nearest_lora(model, tuned.load_base(), rank)
        worst = max(errors, key=lambda name: errors[name])
        notes = [
            f"It is the nearest change of rank {rank} to the tuned model's: {error:.1%} of the change are left out, by "
            f"the Frobenius norm, and of that of {worst}, the worst, {errors[worst]:.1%}."
        ]
    elif (adapter := tuned.adapter) is not None:
        lora = as_lora(model, adapter.patterns, adapter.pool, adapter.coefficients, adapter.basis)
    else:
        lora = Lora.read(tuned.adapters or tuned.path)
    size = sum(tensor.nbytes for tensor in lora.tensors.values())
    size = f"a LoRA of {size / 1e6:,.1f} MB, of rank {max(lora.ranks.values())} at most"
    if format_ == "peft":
        lora.write(part, tuned.base or "")
        return [f"The folder holds {size}, for `peft`, to use beside the base model.", *notes]
    write_gguf_lora(part / "lora.gguf", lora, model.config)
    return [f"The file `lora.gguf` holds {size}, for `llama.cpp`, to load beside the base model.", *notes]


def modelfile(file: str, tokenizer: Any, wording: Wording) -> str:
    """The text of a Modelfile, with which Ollama puts questions as the model was tuned on them."""
    asked, system = "{{ .Prompt }}", "{{ .System }}"
    prompt = alone = wording.text(Example(asked, ""), tokenizer)
    with suppress(FedKSeedError):  # some chat templates take no message of the system
        turns = (Turn(SYSTEM, system), Turn(USER, asked)) if wording.template == "chat" else ()
        prompt = wording.text(Example(asked, "", system, turns=turns), tokenizer)
    prompts = [prompt, alone]
    adds_begin = tokenizer.bos_token and tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    if wording.template == "chat" and adds_begin:  # Ollama lets the tokenizer add it, and would have two
        prompts = [text.removeprefix(tokenizer.bos_token) for text in prompts]
    takes_system = system in prompt
    template = "{{{{ if .System }}}}{}{{{{ else }}}}{}{{{{ end }}}}".format(*prompts) if takes_system else prompts[1]
    stops = "".join(f'PARAMETER stop "{tokenizer.decode([end])}"\n' for end in wording.ends(tokenizer))
    return f'FROM ./{file}\nTEMPLATE """{template}"""\n{stops}'
