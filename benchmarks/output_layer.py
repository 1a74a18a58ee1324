"""A fit of the whole output layer to the examples of all clients, in one place: how far that layer alone can go.

    python benchmarks/output_layer.py RUN [--seeds 0 1 2] [--penalties 1e-2 1e-3 1e-4] [--json]

RUN has the recipe, of which `--seeds` makes other splits. Hidden states are those of the base model. The rows of the
output matrix for the tokens that responses have get a change D by L-BFGS, which minimises the mean loss of a response
token plus penalty / 2 · |D|². No directions, no clients and no input embedding that moves along are in the way, as they
are in a run of FedKSeed-Plus: what is missing here is missing to the layer, or to the number of examples. Penalties are
compared by the held-out examples themselves, so that the best one is an upper bound.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedkseed.data.batches import Encoded, collate
from fedkseed.data.federated import share_out
from fedkseed.evaluation.evaluate import evaluate
from fedkseed.evaluation.metrics import metrics_of
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.recipe.reading import load_recipe
from table import Row, new_parser, show


@torch.no_grad()
def hidden_states(model: Any, examples: Sequence[Encoded], pad: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Hidden states that the output layer reads before a response's tokens, (n, width), and these tokens, (n,)."""
    read: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    states, tokens = [], []
    for start in range(0, len(examples), size):
        batch = collate(examples[start : start + size], pad)
        model(input_ids=batch.tokens, attention_mask=batch.mask)
        labels, counted = batch.labels[:, 1:], batch.labels[:, 1:] >= 0
        states.append(read.pop()[:, :-1][counted].float())
        tokens.append(labels[counted])
    hook.remove()
    return torch.cat(states), torch.cat(tokens)


def fitted(weight: Tensor, states: Tensor, tokens: Tensor, penalty: float) -> Tensor:
    """The output matrix with changed rows, those of `tokens`, shape (vocabulary, width)."""
    known, place = torch.unique(tokens, return_inverse=True)
    others = torch.ones(len(weight), dtype=torch.bool)
    others[known] = False
    rest = (states @ weight[others].T).logsumexp(1, keepdim=True)  # of tokens whose rows stay
    change = torch.zeros(len(known), weight.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([change], max_iter=300, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = torch.cat([states @ (weight[known] + change).T, rest], 1)
        loss = nn.functional.cross_entropy(logits, place) + penalty / 2 * change.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    after = weight.clone()
    after[known] += change.detach()
    return after


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", help="default: the run's own")
    parser.add_argument("--penalties", type=float, nargs="+", default=[1e-2, 1e-3, 1e-4])
    options = parser.parse_args()
    path, rows = options.run / "recipe.toml", list[Row]()
    for seed in options.seeds or [load_recipe(path).seed]:
        recipe = load_recipe(path, [f"seed={seed}"])
        tokenizer = load_tokenizer(recipe.model.name)
        model: Any = load_model(recipe.model.name)
        shares = share_out(recipe, tokenizer, lambda line: None)
        examples = [encoded for own in shares.clients for encoded in own]
        states, tokens = hidden_states(model, examples, tokenizer.pad_token_id)
        base = model.get_output_embeddings().weight.detach().clone()
        for penalty in options.penalties:
            weight = fitted(base, states, tokens, penalty)
            model.get_output_embeddings().weight = nn.Parameter(weight)  # of its own: the input embedding stays
            metrics = metrics_of(recipe.evaluation, shares.options)
            size, train = recipe.evaluation.batch_size, nn.functional.cross_entropy(states @ weight.T, tokens).item()
            found = evaluate(model, tokenizer, shares.held_out, metrics=metrics, batch_size=size)
            row: Row = {"split": f"seed {seed}", "examples": len(examples), "penalty": penalty}
            losses = {"loss of clients' tokens": train, **found.means}
            rows.append(row | {name: round(value, 4) for name, value in losses.items()})
    show("the output layer alone, all of it, on the examples of all clients", rows, as_json=options.json)


if __name__ == "__main__":
    main()
