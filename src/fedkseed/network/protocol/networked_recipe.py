"""Recipes over a network: the stricter defaults there, and the form in which clients get them."""

from pathlib import Path
from typing import Any

from ...data.file_formats import SAMPLES
from ...recipe.algorithms import algorithm_of
from ...recipe.basis_digest import with_basis
from ...recipe.schema import NetworkTable, Recipe, ReportTable
from .carrier import MAX_MESSAGE

ENVELOPE = 1 << 15  # bytes of a request beside the numbers: Flower's own are some 1,500, a refusal in words 4,000

CLIP = 1000.0  # largest |ρ| where a recipe names none: models of 15 to 135 million weights have 10 to 300
WARMUP = 3  # rounds in which agreement does not yet leave out one of five (tests/strategies/test_agreement.py)
BATCH = 4  # what clients ask for, unless their owners say otherwise (client/policy.py)


def with_network_defaults(recipe: Recipe) -> Recipe:
    """A recipe with the defaults of a federation whose members may be hostile, where it names no values of its own.

    They are written out, so that `fedkseed run` on the same recipe gives the same digest. So is its basis' digest.

    Raises:
        FedKSeedError: the basis can't be read, or is another than the recipe says.
    """
    recipe, _ = with_basis(recipe)
    algorithm, training = algorithm_of(recipe.training.algorithm), recipe.training
    wished: dict[str, dict[str, Any]] = {"training": {"batch_size": BATCH}, "trust": {}}
    wished["evaluation"] = {"stop_when_diverged": False}  # [trust] guard is a server's: it goes back
    if "[trust]" in algorithm.strategy.reads:
        # Masked uploads can't be compared, nor those that come as sums; and no rule must undo the noise of clients.
        compared = recipe.secure is None and not recipe.protecting("client") and recipe.network.shards is None
        clear = {"rule": "clipped", "agreement": True} if compared else {}
        if compared and (recipe.trust.agreement or "agreement" not in recipe.trust.model_fields_set):
            clear["warmup"] = WARMUP
        wished["trust"] = clear | {"most_examples": 1}
        if training.wire != "sign":
            wished["training"]["clip"] = CLIP
    for name, values in wished.items():
        given = getattr(recipe, name).model_fields_set
        wished[name] = {key: value for key, value in values.items() if key not in given}
    return recipe.having(**wished)


def recipe_for_clients(recipe: Recipe, count: int) -> bytes:
    """The recipe as clients get it, without what is of the server's machine: paths, columns, layout, trackers, network.

    Metrics, which may be functions in files of the server's, are left out too: clients evaluate nothing. Of the further
    held-out sets they get those that are a category, which they leave out of their files.
    """
    name, source = recipe.model.name, recipe.data.source
    kept = source if source in SAMPLES else "the client's own file"
    categories = [one for one in recipe.evaluation.further if one.held_out is not None]
    choosing = dict.fromkeys(("metrics", "validation", "best", "patience"))
    rest = {"sets": categories or None, "stop_when_diverged": True}  # its default, whatever the server does
    shared = recipe.having(
        model={"name": Path(name).name if Path(name).exists() else name},
        data={"source": kept, "columns": {}, "layout": None, "leave_out_faulty": None},
        clients={"count": count}, directions={"basis": None}, evaluation=choosing | rest, report=ReportTable(),
        network=NetworkTable(shards=recipe.network.shards),  # by which a shard knows its clients
    )  # fmt: skip
    return shared.to_toml().encode()


def largest_request(recipe: Recipe) -> int:
    """The bytes that a client's request may have; nothing larger is read.

    An upload of K numbers has 4 bytes for each, so this is twice as much and the envelope. A shard's has 20, and 4 for
    each of its clients.
    """
    if recipe.network.shards is not None:
        return ENVELOPE + 20 * recipe.directions.size + 4 * max(recipe.network.shards)
    if not algorithm_of(recipe.training.algorithm).pooled:
        return MAX_MESSAGE + ENVELOPE
    shares = 0 if recipe.secure is None else 16 * ((recipe.secure.neighbours or 20) + 2) ** 2
    return ENVELOPE + 8 * max(recipe.directions.size, recipe.training.steps * recipe.training.probes) + shares
