"""A model with an output matrix of its own, in place of one that it shares with the input embedding."""

from pathlib import Path
from typing import Any

from ..errors import FedKSeedError
from ..files import folder, require_absent
from ..models.place import require_there


def untie(model: str, output: Path, dtype: str = "float32") -> int:
    """Write a model whose output matrix is a copy of its input embedding, as a folder; it predicts what it did.

    Where the output layer alone is tuned, the layers before it then stay as they are, and clients run each of their
    rows through them once, see `KeptStates`. All parties take the written folder, or write it themselves.

    Args:
        model: see `fedkseed.models.load.find`.
        output: new folder.
        dtype: the type of the weights that are written.

    Returns:
        The number of weights that it has more.

    Raises:
        FedKSeedError: the model can't be loaded, has no output matrix or one of its own, or the folder exists.
    """
    require_absent(output)
    require_there(model)
    from torch import nn

    from ..models.load import load_model, load_tokenizer, save_model, save_tokenizer
    from ..models.loss import output_layer

    tokenizer = load_tokenizer(model)
    loaded: Any = load_model(model, dtype)
    layer: Any = output_layer(loaded)
    if layer.weight is not loaded.get_input_embeddings().weight:
        raise FedKSeedError(f"the output matrix of {model} has memory of its own already: use the model as it is")
    layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    loaded.config.tie_word_embeddings = False
    with folder(output, 0o777) as part:
        save_model(loaded, part)
        save_tokenizer(tokenizer, part)
    return layer.weight.numel()
