"""A tuned model as a folder that other programs load: Hugging Face, peft, llama.cpp, Ollama; each with a card."""

import json
import shutil
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from ..data.chat_template import ANSWER, ChatTemplate
from ..data.layouts import ASSISTANT, SYSTEM, USER, Example, Turn
from ..data.wording import Wording
from ..errors import FedKSeedError
from ..evaluation.evaluate import greedy
from ..files import folder
from ..models.checkpoint import ADAPTERS, adapter_config
from ..models.load import DTYPES, load_model, save_model, save_tokenizer
from ..models.peft_adapters import load_adapters
from ..weights.adapter import ADAPTER, Adapter
from ..weights.lazy import densify
from .formats import require_format
from .gguf import write_gguf, write_gguf_lora
from .load import CARD, TunedModel
from .lora import WEIGHTS, Lora, as_lora, nearest_lora
from .model_card import card, plain
from .read_back import Reference, probe, require_finite, require_same, require_same_tokenizer


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
        kind: the type of the matrices in a GGUF file, a name of KINDS.
        rank: the rank of a LoRA that is only near to the tuned model; None: only an exact one is written.
        dtype: the type of the weights of `hf`; None: as they were tuned.

    Returns:
        Sentences on what was written.

    Raises:
        FedKSeedError: the model can't be written in this format, or the folder exists.
    """
    require_format(tuned, output, format_, kind, rank, dtype)
    # Programs that put messages to the model do it in the words on which it was tuned.
    tokenizer = tuned.chat_tokenizer() if tuned.worded else tuned.tokenizer()
    words = tuned.words(tokenizer)
    with folder(output, 0o777) as part:
        if format_ == "hf":
            notes = _write_hf(tuned, tokenizer, part, dtype)
        elif format_ == "gguf":
            file = f"model-{kind}.gguf"
            model = tuned.merged() if tuned.adapters is None else _merged(tuned)[0]
            tuned.note(f"writing {file}, and reading it back")
            of_tuning = words if tuned.worded else None
            write_gguf(part / file, model, tokenizer, kind, tuned.source, of_tuning)
            if tuned.source is None:  # of a GGUF file the fields are copied
                require_same_tokenizer(part / file, tokenizer, of_tuning)
            (part / "Modelfile").write_text(modelfile(file, tokenizer, words), encoding="utf-8")
            notes = [f"The file `{file}` holds the whole model, for `llama.cpp`; `Modelfile` is for Ollama."]
        elif tuned.adapter is not None and format_ == "fedkseed":
            tuned.adapter.save(part / ADAPTER)
            Adapter.load(part / ADAPTER)  # it has a digest
            size = f"{tuned.adapter.pool.size:,} coefficients"
            notes = [f"The file `{ADAPTER}` holds {size}, which fedkseed adds to the base model."]
        elif tuned.adapters is not None and format_ == "peft" and rank is None:
            notes = _copy_adapters(tuned, tuned.adapters, part)
        else:
            notes = _write_lora(tuned, part, format_, rank)
        given = {"kind": kind if format_ == "gguf" else None, "rank": rank, "dtype": dtype}
        options = "".join(f" --{name} {value}" for name, value in given.items() if value is not None)
        command = f"fedkseed export {tuned.path.resolve().name} {output.name} --format {format_}{options}"
        text = card(tuned, tokenizer, format_, command, dtype or tuned.dtype, notes)
        (part / CARD).write_text(text, encoding="utf-8")
    return notes


def _write_hf(tuned: TunedModel, tokenizer: Any, part: Path, dtype: str | None) -> list[str]:
    (model, reference), kind = _merged(tuned), dtype or tuned.dtype
    if tuned.worded:  # answers end where those of tuning do
        ends: Any = greedy(model, tokenizer, tuned.wording.ends(tokenizer)).eos_token_id
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    densify(model)
    if dtype is not None:
        model.to(DTYPES[dtype])
        for name, tensor in model.named_parameters():
            require_finite(tensor.isfinite(), name, dtype)
    tuned.note("writing the model, and reading it back")
    save_model(model, part)
    save_tokenizer(tokenizer, part)
    loaded = load_model(str(part), kind)
    require_same(loaded.state_dict(), model.state_dict(), str(part))
    notes = reference.compare(loaded, kind, "the folder")
    require_same_tokenizer(part, tokenizer)
    return [f"The folder holds the whole model in {kind}, for `transformers`.", *notes]


def _merged(tuned: TunedModel) -> tuple[Any, Reference]:
    """The tuned model with all of its change in its own weights, and what its exported form is compared with."""
    loaded, reference = _with_reference(tuned)
    model = tuned.merged(loaded)
    if tuned.adapters is not None:  # a file of llama.cpp is not loaded again, and peft's merging can be wrong
        reference.compare(model, tuned.dtype, "the model with its adapters merged")
    return model, reference


def _with_reference(tuned: TunedModel) -> tuple[nn.Module, Reference]:
    """The tuned model, adapters of peft beside its weights, and what its exported form is compared with."""
    base = None
    with suppress(*[FedKSeedError] if tuned.weights is not None else []):  # a whole model needs no base
        base = None if tuned.base is None else probe(tuned.load_base())
    loaded = tuned.load()
    return loaded, Reference(base, probe(loaded))


def _copy_adapters(tuned: TunedModel, adapters: Path, part: Path) -> list[str]:
    """Write the adapters of a run as they are, beside the name of its base model."""
    reference = _with_reference(tuned)[1]
    shutil.copyfile(adapters / WEIGHTS, part / WEIGHTS)
    about = adapter_config(adapters) | {"base_model_name_or_path": tuned.base or ""}
    (part / ADAPTERS).write_text(json.dumps(about, indent=2) + "\n")
    note = (
        f"The folder holds adapters of the kind {plain(str(about['peft_type']))}, for `peft`, to use beside the base "
    )
    return [f"{note}model.", *_compared_by_peft(tuned, reference, part)]


def _compared_by_peft(tuned: TunedModel, reference: Reference, adapters: Path) -> list[str]:
    """Refuse a folder of adapters that `peft` does not make the tuned model with; returns sentences for the user."""
    if find_spec("peft") is None:
        return ["It was not tried by `peft`, which is not installed."]
    return reference.compare(load_adapters(tuned.load_base(), str(adapters)), tuned.dtype, "the LoRA")


def _write_lora(tuned: TunedModel, part: Path, format_: str, rank: int | None) -> list[str]:
    if rank is not None:
        model: Any = tuned.merged()
        lora, errors, error = nearest_lora(model, tuned.load_base(), rank)
        worst = max(errors, key=lambda name: errors[name])
        notes = [
            f"It is the nearest change of rank {rank} to the tuned model's: {error:.1%} of the change are left out, by "
            f"the Frobenius norm, and of that of {worst}, the worst, {errors[worst]:.1%}."
        ]
    else:
        model, reference = _with_reference(tuned)
        lora = _lora(tuned, model)
        with TemporaryDirectory(dir=part) as adapters:
            lora.write(Path(adapters), tuned.base or "")
            notes = _compared_by_peft(tuned, reference, Path(adapters))
    if format_ == "peft":
        lora.write(part, tuned.base or "")
        return [f"The folder holds {_size(lora)}, for `peft`, to use beside the base model.", *notes]
    write_gguf_lora(part / "lora.gguf", lora, model.config)
    return [f"The file `lora.gguf` holds {_size(lora)}, for `llama.cpp`, to load beside the base model.", *notes]


def _lora(tuned: TunedModel, model: nn.Module) -> Lora:
    """The exact LoRA of a tuned model: that of its directions, or the one that was tuned."""
    if (adapter := tuned.adapter) is not None:
        return as_lora(model, adapter.patterns, adapter.pool, adapter.coefficients, adapter.basis)
    return Lora.read(tuned.adapters or tuned.path)


def _size(lora: Lora) -> str:
    size = sum(tensor.nbytes for tensor in lora.tensors.values())
    return f"a LoRA of {size / 1e6:,.1f} MB, of rank {max(lora.ranks.values())} at most"


def _behind_an_answer(wording: Wording, tokenizer: Any, later: str) -> str:
    """The text between an answer and a further request, which ends as a request alone does, `later`, of "b"."""
    if wording.template != "chat":
        return tokenizer.eos_token
    template, begin = ChatTemplate.of(tokenizer, wording.date), tokenizer.bos_token or "\0"
    turns = [{"role": role, "content": text} for role, text in ((USER, "a"), (ASSISTANT, ANSWER), (USER, "b"))]
    with suppress(FedKSeedError):  # some take one exchange
        closed, whole = template.render(turns[:2]), template.render(turns, asks=True)
        behind = whole.partition(ANSWER)[2]
        if whole.startswith(closed):
            begins = whole.startswith(begin, len(closed)) and not later.startswith(begin)
            return closed.partition(ANSWER)[2] + begin * begins
        ends = (behind.removesuffix(later[k:]) for k in range(len(later)) if behind.endswith(later[k:]))
        return next((end for end in ends if end.startswith(template.tail)), template.tail)
    return template.tail


def modelfile(file: str, tokenizer: Any, wording: Wording) -> str:
    """The text of a Modelfile, with which Ollama puts questions as the model was tuned on them.

    Ollama words each turn of a conversation by it: an opening of ours, or a chat template's own system message, comes
    again in each.
    """
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
    template += "{{ .Response }}" + _behind_an_answer(wording, tokenizer, prompts[1].replace(asked, "b"))
    ends = [tokenizer.decode([end]) for end in wording.ends(tokenizer)]
    if '"""' in template or any(mark in end for end in ends for mark in '"\n'):
        raise FedKSeedError("the prompt has three quotes, or an end of answers one, which would end a Modelfile's text")
    stops = "".join(f'PARAMETER stop "{end}"\n' for end in ends)
    return f'FROM ./{file}\nTEMPLATE """{template}"""\n{stops}'
