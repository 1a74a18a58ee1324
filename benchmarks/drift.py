"""The drift of weights that zeroth-order steps change in place, as the paper's code and MeZO do.

    python benchmarks/drift.py [--model MODEL] [--tokens 128] [--steps 50] [--lr 3e-7]

A step adds +εz, −2εz, +εz and −ηρz to the weights, each sum rounded to their type (peers.py), and needs no copy of
them. Beside it, a float32 copy adds the same −ηρz. After some steps, over all weights:

- update: root mean square of the copy minus the weights of before, what the steps were to do.
- drift: the same of the weights minus the copy, over that of the update. 1: as large as the update.
- moved: share of the weights that are not those of before.
- losses on the batch, of the weights and of the copy, rounded into the same type; the last column is by how much the
  steps have moved each.

Steps of fedkseed compute w₀ + Σ cₖzₖ anew from c: their drift is 0 after any number of steps, which tests hold to the
bit. `streamed` needs no copy either; `in place` has one of float32.
"""

from torch import Tensor, nn

from fedkseed.data.batches import Batch
from fedkseed.models.load import load_model
from fedkseed.models.loss import batch_loss
from peers import EPS, LR, gaussian, paper_step
from step import make_batch
from table import MODEL, Row, new_parser, show

TYPES = ("bfloat16", "float16", "float32")


def rows(name: str, dtype: str, tokens: int, steps: int, lr: float) -> list[Row]:
    """A row after 1, 10, 100, … steps, and after all."""
    model, batch = load_model(name, dtype), make_batch(1, tokens)
    parameters = list(model.parameters())
    before = [p.data.float() for p in parameters]  # new memory: the steps write no old one
    copy, step = [w.clone() for w in before], paper_step(model, batch, lr)
    first, made = batch_loss(model, batch), list[Row]()
    for number in range(1, steps + 1):
        rho = step(number)
        for w, z in zip(copy, gaussian(parameters, number), strict=True):
            w.add_(z.float(), alpha=-lr * rho)
        if number == steps or 10 ** (len(str(number)) - 1) == number:
            weights = [p.data.float() for p in parameters]
            update = size(copy, before)
            moved = sum(int((w != v).sum()) for w, v in zip(weights, before, strict=True))
            here, there = batch_loss(model, batch), loss_of(model, copy, batch)
            made.append({
                "type": dtype, "steps": number, "update": f"{update:.1e}", "drift": size(weights, copy) / update,
                "moved": f"{moved / sum(w.numel() for w in before):.1%}",
                "loss of the weights": f"{here:.4f}", "of the copy": f"{there:.4f}",
                "moved by the steps": f"{here - first:+.4f}, {there - first:+.4f}",
            })  # fmt: skip
    return made


def size(a: list[Tensor], b: list[Tensor]) -> float:
    """The root mean square of a difference."""
    total = sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True))
    return (total / sum(x.numel() for x in a)) ** 0.5


def loss_of(model: nn.Module, weights: list[Tensor], batch: Batch) -> float:
    """The loss with other weights, after which the model has its own again."""
    own = [p.data for p in model.parameters()]
    for p, w in zip(model.parameters(), weights, strict=True):
        p.data = w.to(p.dtype)
    loss = batch_loss(model, batch)
    for p, w in zip(model.parameters(), own, strict=True):
        p.data = w
    return loss


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=LR)
    args = parser.parse_args()
    table = [row for dtype in TYPES for row in rows(args.model, dtype, args.tokens, args.steps, args.lr)]
    title = f"Steps in place, {args.model}, 1 x {args.tokens} tokens, η = {args.lr:g}, ε = {EPS:g}"
    show(title, table, as_json=args.json)


if __name__ == "__main__":
    main()
