"""The paper's accounting of bytes, for any Llama-type model: Table 3 and its appendix on communication overhead.

The cells of Table 3 come out exactly with these conventions, which the paper's text states only in part:
- GB, MB and KB are powers of 1,024;
- FedAvg, FedZO and FedMeZO count 4 bytes a weight in all, that is 16 bits both ways or 32 bits one way, although the
  text says 32 bits in both directions;
- adapters and prompts count 32 bits both ways, 8 bytes a trainable weight.
"""

from ..models.sizes import Architecture, sizes_of
from ..recipe.algorithms import ALGORITHMS
from ..recipe.schema import PeftTable

FLOAT = INTEGER = 4  # bytes

DATAJUICER = Architecture(2048, 5504, 24, 32000, 2048, 2048)
LLAMA = Architecture(3200, 8640, 26, 32000, 3200, 3200)
PAPER = {"datajuicer/LLaMA-1B-dj-refine-150B": DATAJUICER, "openlm-research/open_llama_3b": LLAMA}
TITLES = {"DataJuicer-1.3B": DATAJUICER, "LLaMA-3B": LLAMA}
SEEDS = {title: {"fedkseed": 4096, "fedkseed-pro": k} for title, k in zip(TITLES, (1024, 2048), strict=True)}  # K

# Table 3 as printed: method -> for each model the communication, and the measured peak GPU memory.
TABLE_3 = {
    "fedavg": (("5.01 GB", "17.8 GB"), ("12.76 GB", "39.1 GB")),
    "fedzo": (("5.01 GB", "3.4 GB"), ("12.76 GB", "7.6 GB")),
    "fedmezo": (("5.01 GB", "3.5 GB"), ("12.76 GB", "7.8 GB")),
    "fedptuning": (("96.36 MB", "11.9 GB"), ("234.9 MB", "16.3 GB")),
    "fedprompt": (("320.0 KB", "11.8 GB"), ("500.0 KB", "19.0 GB")),
    "fedit-sgd": (("12.00 MB", "12.4 GB"), ("20.31 MB", "18.2 GB")),
    "fedit": (("12.00 MB", "12.4 GB"), ("20.31 MB", "18.3 GB")),
    "fedkseed": (("17,988 B", "3.5 GB"), ("17,988 B", "7.8 GB")),
    "fedkseed-pro": (("9,796 B", "3.5 GB"), ("17,988 B", "7.8 GB")),
}


def architecture(model: str) -> Architecture:
    """The sizes of a named model without its weights; FedKSeedError where there is none, or not one of Llama's type."""
    return PAPER[model] if model in PAPER else sizes_of(model)


def kseed(size: int, steps: int = 200, *, importance: bool = False) -> tuple[int, int]:
    """Bytes of FedKSeed: down a seed and K scalars (with Pro also K probabilities), up τ pairs of seed and scalar."""
    return INTEGER + size * FLOAT * (2 if importance else 1), steps * (INTEGER + FLOAT)


def communication(method: str, sizes: Architecture, size: int = 4096) -> int:
    """Bytes of a client in a round, down and up together, as the paper counts them."""
    if method in ("fedkseed", "fedkseed-pro"):
        return sum(kseed(size, importance=method == "fedkseed-pro"))
    ways = 1 if method in ("fedavg", "fedzo", "fedmezo") else 2  # see this file's docstring
    return ways * FLOAT * sizes.tuned(ALGORITHMS[method].tuned, PeftTable())


def printed(count: float) -> str:
    """A number of bytes as Table 3 prints it: two decimals, at most four digits, powers of 1,024."""
    for power, unit in ((3, "GB"), (2, "MB"), (1, "KB")):
        value = count / 1024**power
        if value >= 1 and not (unit == "KB" and count < 100_000):  # the table gives FedKSeed's in bytes
            return f"{value:.2f} {unit}" if value < 99.995 else f"{value:.1f} {unit}"
    return f"{count:,.0f} B"
