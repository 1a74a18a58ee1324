"""Checks of a written model: its files are loaded as a user loads them, and compared with what was to be written.

Files are memory-mapped, so that no second model is in memory; a probe of a few tokens goes through the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.chat_template import request
from ..data.layouts import USER, Example
from ..data.wording import Wording
from ..errors import FedKSeedError
from ..models.load import load_tokenizer
from ..weights.lazy import Lazy

# ROUNDING: the share of their spread by which rounding weights and activations to a type moves logits at most: twice
# what it does to SmolLM2-135M and stories15M on an EPYC (0.029 and 0.034 in float16, 0.19 and 0.26 in bfloat16).
# SHARES: the further difference that is allowed, as a share of what tuning changed, since sums run in another order.
ROUNDING = {"float32": 1e-4, "float16": 0.07, "bfloat16": 0.5}
SHARES = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.1}
TEXT = "Question: 12 cafés — how  MANY? <b>Antwort</b>\n\tIt's 7.\n\n3) ﬁne Ａ"
CHAT = [{"role": USER, "content": TEXT}]


@torch.inference_mode()
def probe(model: Any) -> Tensor:
    """Logits of a model for the last 8 of 32 tokens."""
    size = int(model.get_input_embeddings().weight.shape[0])
    tokens = (torch.arange(1, 33) * 7919 % size)[None].to(next(model.parameters()).device)
    return model(input_ids=tokens, use_cache=False).logits[0, -8:].float().cpu()


@dataclass(frozen=True, slots=True)
class Reference:
    """The logits that an exported model must have.

    Args:
        base: the base model's; None: it is not known.
        tuned: the tuned model's, before anything was merged or rounded.
    """

    base: Tensor | None
    tuned: Tensor

    def compare(self, loaded: Any, dtype: str, what: str) -> list[str]:
        """Refuse a loaded model that is not the tuned one.

        Args:
            dtype: the type of its weights.
            what: a name of it, for the error.

        Returns:
            A sentence where rounding hides a part of the tuning.

        Raises:
            FedKSeedError: its logits differ by more than a share of what tuning changed, and than rounding explains; or
                they are the base model's; or rounding to float16 alone moves them by more than that share.
        """
        logits = probe(loaded)
        error = float((logits - self.tuned).abs().max())
        change = 0.0 if self.base is None else float((self.tuned - self.base).abs().max())
        rounding = ROUNDING[dtype] * float(self.tuned.std())
        # Of the base model's weights, where tuning did more than rounding. The right file is as near to the base and
        # nearer to it than tuning is only if rounding and tuning go against each other, by a correlation over 0.5.
        is_base = self.base is not None and (logits - self.base).norm() < min(
            (logits - self.tuned).norm(), (self.tuned - self.base).norm()
        )
        if is_base or not error <= max(SHARES[dtype] * change, rounding):
            raise FedKSeedError(
                f"{what} does not compute as the tuned model: its logits differ by {error:.3g}, tuning changed them by "
                f"{change:.3g}; nothing was written. Please report this, with the type of the model"
            )
        if change and error > SHARES[dtype] * change:
            if dtype == "float16":
                raise FedKSeedError(
                    f"{what} would lose what was learned: rounding to {dtype} moves its logits by {error:.2g}, tuning "
                    f"moved them by {change:.2g}; nothing was written. Export with --dtype float32"
                )
            return [f"Rounding to {dtype} moves its logits by {error:.2g}, tuning moved them by {change:.2g}."]
        return []


def require_same(written: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors of a file that are not those that were to be written: other names, other shapes, other bits."""
    if names := {*written} ^ {*expected}:
        lacks = "lacks" if min(names) in expected else "has in excess"
        raise FedKSeedError(f"{where} was not written as it should: it {lacks} {min(names)}; please report this")
    for name, tensor in expected.items():
        if not _same_bits(written[name], tensor):
            raise FedKSeedError(f"{where} was not written as it should: {name} differs; check the disk, and try again")


def exact(tensor: Tensor) -> Tensor:
    """A tensor's values on the CPU, of one that stays quantised all of them."""
    return (tensor.whole() if isinstance(tensor, Lazy) else tensor.detach()).cpu()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    other = exact(other)
    if one.shape != other.shape:
        return False
    # a model may keep some tensors in float32 when it is loaded, which loses nothing
    pairs = (part.detach().cpu().contiguous().view(-1).view(torch.uint8) for part in (one.to(other.dtype), other))
    return torch.equal(*pairs)


def require_finite(is_finite: Any, name: str, kind: str) -> None:
    """Refuse a tensor with numbers that its type can't hold, by which of them are finite."""
    if not bool(is_finite.all()):
        raise FedKSeedError(
            f"{name} has numbers that {kind} can't hold, the largest number of float16 is 65,504; nothing was written. "
            "Export in bfloat16 or float32 (--dtype, or --kind bf16 or f32)"
        )


def require_same_tokenizer(path: Path, tokenizer: Any, words: Wording | None = None) -> None:
    """Refuse a folder or GGUF file that cuts a message otherwise than the tokenizer that was to be written to it.

    Args:
        words: the wording of tuning, whose prompt the file's chat template has to make; None: the tokenizer's own.
    """
    again, is_file, day = load_tokenizer(str(path)), path.is_file(), (words and words.date) or date.today()

    def cut(of: Any) -> list[int]:
        """The tokens of a message, or of a text where there is no chat template."""
        return of(request(of, CHAT, day) if tokenizer.chat_template else TEXT, add_special_tokens=False).input_ids

    expected = words.prompt(Example(TEXT, ""), tokenizer) if words is not None else cut(tokenizer)
    is_same = cut(again) == expected and again.eos_token_id == tokenizer.eos_token_id
    if not is_file:  # in a GGUF file what begins a text is set by how messages begin
        is_same = is_same and again(TEXT).input_ids == tokenizer(TEXT).input_ids
    if not is_same:
        advice = "llama.cpp can't cut texts as it does: export with --format hf" if is_file else "please report this"
        raise FedKSeedError(f"the tokenizer in {path} cuts {TEXT[:20]!r}… into other tokens than the model's; {advice}")
