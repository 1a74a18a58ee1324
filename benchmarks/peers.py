"""Other methods for comparison, rewritten in PyTorch: the paper's sync and local step, MeZO, backpropagation.

The weight decay of the paper's code, which takes another pass over the weights even when it is zero, is left out.

Qin et al., 2024, https://arxiv.org/abs/2312.06353, Algorithm 1 and "Further Optimization on Updating
Models", and its code; Malladi et al., 2023, https://arxiv.org/abs/2305.17333, Algorithm 1
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedkseed.data.batches import Batch
from fedkseed.models.loss import batch_loss

LR, EPS = 3e-7, 5e-4  # the paper's for LLaMA-3B


def paper_sync(tensors: list[Tensor], directions: int, step: float) -> None:
    """Sync in the paper's way: new memory for z, for its multiples and for the result; replaces the list's tensors."""
    for k in range(directions):
        rng = torch.Generator(tensors[0].device).manual_seed(k)
        for i, w in enumerate(tensors):
            z = torch.normal(0.0, 1.0, w.shape, generator=rng, device=w.device)
            tensors[i] = w - step * (1e-3 * z)


def efficient_sync(tensors: list[Tensor], buffer: Tensor, directions: int, step: float) -> None:
    """Sync in the paper's more efficient way: z in a buffer that is made once, and one pass to add z."""
    for k in range(directions):
        rng = torch.Generator(buffer.device).manual_seed(k)
        for w in tensors:
            w.add_(buffer[: w.numel()].normal_(generator=rng), alpha=-step)


def inference(model: nn.Module, batch: Batch) -> Callable[[], float]:
    """Inference instead of a step: one forward pass with our loss, which needs less memory than that of all logits."""
    return lambda: batch_loss(model, batch)


def paper_step(model: nn.Module, batch: Batch, lr: float = LR) -> Callable[..., float]:
    """The paper's and MeZO's step: + εz, − 2εz, + εz, − ηρz, with z drawn four times, in new memory each time.

    The step takes the seed of z, and returns ρ.
    """
    loss, parameters = inference(model, batch), list(model.parameters())

    def add(factor: float, seed: int) -> None:
        for p, z in zip(parameters, gaussian(parameters, seed), strict=True):
            p.data = p.data + factor * z

    def step(seed: int = 1) -> float:
        add(EPS, seed)
        above = loss()
        add(-2 * EPS, seed)
        below = loss()
        add(EPS, seed)
        add(-lr * (rho := (above - below) / (2 * EPS)), seed)
        return rho

    return step


def gaussian(parameters: Sequence[Tensor], seed: int) -> Iterator[Tensor]:
    """The direction of a seed, a tensor at a time, in the parameters' type."""
    rng = torch.Generator(parameters[0].device).manual_seed(seed)
    for p in parameters:
        yield torch.normal(0.0, 1.0, p.shape, generator=rng, dtype=p.dtype, device=p.device)


def copied_step(model: nn.Module, batch: Batch, dtype: torch.dtype) -> Callable[[], object]:
    """`paper_step` with a copy of the unperturbed weights, so that rounding to 16 bits does not make the weights drift.

    Args:
        dtype: type of the copy: float32 keeps updates that are too small for 16 bits; the weights' own type loses them.
    """
    loss, parameters = inference(model, batch), list(model.parameters())
    copies = [p.data.to(dtype, copy=True) for p in parameters]

    def add(factor: float, out: list[Tensor]) -> None:
        for w, p, z in zip(copies, out, gaussian(copies, 1), strict=True):
            p.copy_(w + factor * z)

    def step() -> None:
        perturbed = [p.data for p in parameters]
        add(EPS, perturbed)
        above = loss()
        add(-EPS, perturbed)
        below = loss()
        add(-LR * (above - below) / (2 * EPS), copies)

    return step


def backpropagation(
    model: nn.Module, batch: Batch, optimiser: Callable[..., torch.optim.Optimizer]
) -> Callable[[], object]:
    """An ordinary step by backpropagation, with gradients of all weights and the optimiser's state.

    The loss is the mean cross entropy of all logits in float32, as `transformers` computes it.
    """
    model.requires_grad_(True)
    made = optimiser(model.parameters(), lr=LR)

    def step() -> None:
        made.zero_grad()
        logits: Tensor = model(input_ids=batch.tokens, use_cache=False).logits
        cross_entropy(logits[:, :-1].float().flatten(0, 1), batch.labels[:, 1:].flatten()).backward()
        made.step()

    return step
