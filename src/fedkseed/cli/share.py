"""Commands that hand models on: tuned ones as folders or by an endpoint, base models pinned, converted or untied."""

import secrets
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from ..errors import INTERRUPTED
from ..report.bars import Bars
from ..report.terminal import note, say
from .options import AdapterFile, BaseModel, Ensemble, RecipeFile


def export(
    adapter: AdapterFile,
    output: Annotated[Path, Argument(help="New folder for the tuned model; it must not exist yet.")],
    ensemble: Ensemble = 1,
    model: BaseModel = None,
    format_: Annotated[
        str,
        Option(
            "--format",
            help="hf: a whole model, for transformers. peft: a LoRA, for the library peft. gguf: a whole model, for "
            "llama.cpp, Ollama, LM Studio. lora-gguf: a LoRA, for llama.cpp. fedkseed: the coefficients.",
        ),
    ] = "hf",
    kind: Annotated[str, Option(help="Of --format gguf: f32, f16, bf16, q8_0, q4_1, q4_0.")] = "f16",
    rank: Annotated[
        int | None,
        Option(
            help="Of --format peft, lora-gguf: the nearest LoRA of this rank, where none is exact; says how far.", min=1
        ),
    ] = None,
    dtype: Annotated[str | None, Option(help="Of --format hf: float32, bfloat16, float16; default: as tuned.")] = None,
) -> None:
    """Write the tuned model as a folder, with a model card, for programs that know nothing of fedkseed.

    `fedkseed docs export` says how each format is loaded.

    fedkseed export runs/recipe tuned
    fedkseed export runs/recipe tuned-gguf --format gguf --kind q8_0
    """
    from ..tuned.formats import require_format
    from ..tuned.load import open_ready

    tuned = open_ready(adapter, model, note, ensemble)
    require_format(tuned, output, format_, kind, rank, dtype)
    from ..tuned.export import export as write

    for sentence in write(tuned, output, format_, kind=kind, rank=rank, dtype=dtype):
        say(sentence)
    say(f"wrote the model to {output}")


def serve_model(
    adapter: AdapterFile,
    host: Annotated[str, Option(help="Address to listen at; others than this machine need 0.0.0.0.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen at; 0: any free one.", min=0, max=65535)] = 8000,
    model: BaseModel = None,
) -> None:
    """Answer OpenAI-compatible requests with the tuned model, and with the base model beside it, until Ctrl-C.

    The models are called tuned and base. Messages are put to both in the words on which the first was tuned. Requests
    need the key that is printed, drawn anew at each start. Nothing is encrypted: use a tunnel of SSH between machines.

    fedkseed serve-model runs/recipe --port 8000
    """
    from ..network.http_server import listen, listening_at, serve_locally
    from ..tuned.endpoint import application, load, require_server
    from ..tuned.load import open_ready

    require_server()
    opened = open_ready(adapter, model, note)
    with suppress(KeyboardInterrupt), listen(host, port) as at:
        models, key = load(opened), secrets.token_urlsafe(16)
        names, place = " and ".join(models), f"http://{listening_at(at)}/v1"
        serve_locally(
            application(models), at, host, key, lambda: say(f"models {names} at {place}, key {key}, until Ctrl-C")
        )
    raise Exit(INTERRUPTED)


def untie(
    model: Annotated[str, Argument(help="Folder, .gguf file, package:NAME/FILE.gguf or name on the hub.")],
    output: Annotated[Path, Argument(help="New folder for the model; it must not exist yet.")],
    dtype: Annotated[str, Option(help="Type of its weights: float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Write a model with an output matrix of its own, where it shares one with the input embedding.

    Its predictions stay the same. Clients of fedkseed-plus then run each of their rows through the layers once, and
    a step costs the output layer alone.

    fedkseed untie models/SmolLM2-135M-Instruct models/untied
    """
    from ..tuned.untie import untie as write

    note(f"loading the model {model}")
    more = write(model, output, dtype)
    say(f"wrote the model to {output}, with {more:,} weights more")


def convert(
    model: Annotated[Path, Argument(help="Folder with pytorch_model*.bin.")],
    output: Annotated[Path, Argument(help="New folder for the model; it must not exist yet.")],
) -> None:
    """Write a model whose weights are pickles as safetensors, with a tokenizer.json; no other command opens a pickle.

    A pickle can run code when it is read: one that calls anything but what makes tensors is refused. What was written
    is compared with the pickle, and loaded, before the folder gets its name.

    fedkseed convert downloads/open_llama_3b models/open_llama_3b
    """
    from ..tuned.convert import convert as write

    note(f"reading the pickles of {model}")
    count, size = write(model, output)
    say(f"wrote the model to {output}: {count} tensors of {size:,} bytes, equal to those of {model}, and loaded once")


def pin(recipe: RecipeFile) -> None:
    """Write the digest of the base model into a recipe: clients then check their copy, and a server needs no model.

    The model is loaded once, here. The keys written are [model] digest and, for an algorithm that tunes the output
    layer, [model] tuned with the names of that layer's weights; [directions] basis_digest, where there is a basis.
    Comments and order of the file stay as they are.

    fedkseed pin recipe.toml
    """
    from ..planning.pin import pin as write

    with Bars(0) as bars:
        written = write(recipe, bars)
    for table, keys in written.items():
        for key, digest in keys.items():
            say(f"{key} = {digest!r}")
        say(f"written to {recipe}, [{table}]")
