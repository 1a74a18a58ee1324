"""The formats of `fedkseed export`, and what each can hold: a request is checked before a model is loaded."""

from pathlib import Path

from ..directions import Pool
from ..errors import FedKSeedError, require_choice
from ..files import require_absent
from .load import DTYPES, TunedModel

LIBRARIES = {"hf": "transformers", "peft": "peft", "gguf": "gguf", "lora-gguf": "gguf", "fedkseed": "fedkseed"}
LORAS = ("peft", "lora-gguf")
NO_LORA = "LoRA can't hold; give --rank for the nearest change of that rank, or export the whole model: --format hf"
KINDS = ("f32", "f16", "bf16", "q8_0", "q4_1", "q4_0")  # of the matrices in a GGUF file


def require_format(
    tuned: TunedModel, output: Path, format_: str, kind: str, rank: int | None, dtype: str | None
) -> None:
    """Refuse an export that can't be written.

    Raises:
        FedKSeedError: the folder exists, an option is unknown or of another format, or the change is not one of it.
    """
    require_choice("format", format_, [*LIBRARIES])
    require_absent(output)
    require_choice("kind of GGUF", kind, KINDS)
    if dtype is not None and (format_ != "hf" or dtype not in DTYPES):
        raise FedKSeedError(f"--dtype is one of {', '.join(DTYPES)}, for --format hf; got {dtype!r} for {format_}")
    if rank is not None and format_ not in LORAS:
        raise FedKSeedError(f"--rank is for --format {' and '.join(LORAS)}, got {rank} for {format_}")
    if format_ == "fedkseed" and tuned.adapter is None:
        raise FedKSeedError(f"the model of {tuned.path} is not a function of K coefficients; choose another format")
    if format_ in LORAS and rank is None and tuned.adapters is None:
        if tuned.adapter is None:
            raise FedKSeedError(f"all weights of {tuned.path} were tuned, at full rank, which {NO_LORA}")
        require_low_rank(tuned.adapter.pool)


def require_low_rank(pool: Pool) -> None:
    """Refuse a pool whose directions have a full rank."""
    if not pool.factored:
        raise FedKSeedError(f"{pool.family} directions change every matrix at full rank, which {NO_LORA}")
