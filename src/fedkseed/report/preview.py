"""The output of `fedkseed preview`: an example as tokens with its loss mask, and the split of the data."""

from collections import Counter
from typing import Any

from rich.table import Table
from rich.text import Text

from ..data.batches import Encoded
from ..data.federated import ClientShares
from .terminal import console

CLIENTS_SHOWN = 10


def preview_table(example: Encoded, shares: ClientShares) -> dict[str, Any]:
    """An example and the split of the data, for JSON."""
    categories = [Counter(encoded.example.category for encoded in share) for share in shares.clients]
    return {
        "tokens": example.tokens, "counted": example.counted,
        "clients": [{"examples": counts.total(), "categories": counts} for counts in categories],
        "too_long": shares.too_long, "held_out": len(shares.held_out),
        "sets": {name: len(held_out.examples) for name, held_out in shares.sets.items()}, "notes": shares.notes,
    }  # fmt: skip


def print_preview(example: Encoded, shares: ClientShares, client: int, tokenizer: Any) -> None:
    """Print an example's text with the tokens that the loss counts in bold, its tokens, the mask, and the clients."""
    text, mask, end = Text(""), "", 0
    for first, stop in example.counted:
        text.append(tokenizer.decode(example.tokens[end:first]), style="dim")
        text.append(tokenizer.decode(example.tokens[first:stop]), style="bold green")
        mask, end = mask + "0" * (first - end) + "1" * (stop - first), stop
    last = "" if example.earlier else "the last "
    console.print(Text(f"client {client}: {len(example.tokens)} tokens, loss on {last}{mask.count('1')} (bold)"))
    console.print(text)
    console.print("tokens:", " ".join(map(str, example.tokens)), highlight=False)
    console.print("mask:  ", mask, highlight=False)
    sizes = sorted(len(share) for share in shares.clients)
    console.print(
        f"\n{len(sizes)} clients hold {sum(sizes)} examples, {sizes[0]} to {sizes[-1]} each, median "
        f"{sizes[len(sizes) // 2]}; {shares.too_long} are too long and left out; {len(shares.held_out)} are held out"
        + "".join(f", {len(held_out.examples)} in the set {name}" for name, held_out in shares.sets.items())
        + (f"; {shares.too_small} tasks are too small for a client" if shares.too_small else "")
    )
    table = Table("client", "examples", "categories")
    for number, share in enumerate(shares.clients[:CLIENTS_SHOWN]):
        counts = Counter(encoded.example.category or "-" for encoded in share).most_common()
        name = f" {shares.names[number]}" if shares.names else ""
        categories = ", ".join(f"{category} {count}" for category, count in counts)
        table.add_row(Text(f"{number}{name}"), str(len(share)), Text(categories))
    console.print(table)
