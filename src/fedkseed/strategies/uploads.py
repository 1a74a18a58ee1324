"""The meaning of an upload of FedKSeed, to the client that sends it and to the server that adds it up."""

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..randomness import EVERYONE, draw_directions
from ..strategy import Settings
from ..wire.numbers import GRID
from ..wire.records import Change, Upload
from .checks import require_scalars, require_size
from .sums import MOST

KSeedUpload: TypeAlias = Upload | Change


def wire_of(settings: Settings) -> str:
    """The precision of scalars and broadcasts."""
    return settings.wire or "compact"


def wire_of_changes(settings: Settings) -> str:
    """The precision of the numbers of clients that take derivatives: signs alone would say too little."""
    return "compact" if wire_of(settings) == "sign" else wire_of(settings)


def unit(settings: Settings, round_: int) -> float:
    """The change of a coefficient for a scalar gradient of GRID: η GRID / P."""
    return settings.local.learning_rate(round_) / settings.local.probes * GRID


def largest_change(settings: Settings, round_: int) -> float:
    """The furthest that a client may move a coefficient: that of all its two-point steps along one direction.

    Without a clip it is what integers hold (sums.py), less a half for the rounding of 8 bits.
    """
    local = settings.local
    return min(local.learning_rate(round_) * local.steps * local.clip, unit(settings, round_) * MOST / 2)


def drawn_directions(
    settings: Settings, round_: int, client: int, count: int, probabilities: NDArray[np.float32] | None
) -> NDArray[np.uint32]:
    """The directions of a client's probes in a round, in their order; where they are shared, all clients have them."""
    pool, drawer = settings.run.pool, EVERYONE if settings.shared else client
    return draw_directions(pool.key, round_, drawer, count, pool.size, probabilities)


def require_sound(settings: Settings, upload: KSeedUpload) -> None:
    """Refuse an upload of another size or wire than was asked for, or that reports more than the clip allows."""
    local, wire = settings.local, wire_of(settings)
    if isinstance(upload, Change):
        require_size(upload, settings.run.pool.size)
        far, most = float(abs(upload.values).max(initial=0)), largest_change(settings, upload.round)
        if far > most * (1 + 1e-3):  # 8 bits round
            raise FedKSeedError(f"client {upload.client} moves a coefficient by {far:g}, at most {most:g} is allowed")
    else:
        require_scalars(upload, local.scalars, math.inf if wire == "sign" else local.clip, wire)


def change_of_probes(settings: Settings, upload: Upload) -> NDArray[np.float64]:
    """The change −η ρ / P of c along the direction of each probe, in their order."""
    rho = np.nan_to_num(upload.scalars.astype(np.float64))
    return -settings.local.learning_rate(upload.round) / settings.local.probes * rho


def along_all(settings: Settings, round_: int, client: int, change: NDArray[np.float64]) -> NDArray[np.float64]:
    """The change of all K coefficients by one along each probe's direction, where all were equally likely."""
    total = np.zeros(settings.run.pool.size)
    np.add.at(total, drawn_directions(settings, round_, client, change.size, None), change)
    return total


def change_of(settings: Settings, upload: KSeedUpload) -> NDArray[np.float64]:
    """The change of all K coefficients that an upload stands for, where all directions were equally likely."""
    if isinstance(upload, Change):
        return upload.values.astype(np.float64)
    return along_all(settings, upload.round, upload.client, change_of_probes(settings, upload))
