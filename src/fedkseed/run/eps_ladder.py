"""Errors of a base model's scalars ρ, by rounding and by curvature, along a ladder of perturbation scales ε."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..evaluation.statistics import Estimate, estimate
from ..local.client import Client
from ..randomness import Purpose, generator
from ..recipe.algorithms import ONE
from .simulation import Simulation

LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # ε
QUIET = 3e-4  # ε up to which two-point scalars of neighbouring ε differ by rounding, hardly by curvature
SAMPLES = 4  # pairs of a client's first batch and a direction
TOLERANCE = 0.1  # relative error that does not harm tuning: one scalar is a far coarser measure of d derivatives

Clock: TypeAlias = Callable[[], float]  # seconds


@dataclass(frozen=True, slots=True)
class Rung:
    """The scalars ρ at one eps, and their errors: root mean squares over the samples, in the unit of ρ."""

    eps: float
    scalar: float  # mean |ρ|
    noise: float  # error by rounding of the losses
    bias: float  # error by curvature
    error: float  # both together, relative to ρ
    apart: float  # distance of ρ from ρ at the best eps, relative to the latter


@dataclass(frozen=True, slots=True)
class Scalars:
    """Rounding, scalars and curvature of the base model, from losses at w₀ ± ε z."""

    rungs: list[Rung]
    rounding: float  # standard deviation of one loss, nats a token
    samples: int
    square: float  # mean ρ², an estimate of |g|² of a batch
    curvature: Estimate  # mean zᵀHz, an estimate of tr H

    @property
    def best(self) -> Rung:
        return min(self.rungs, key=lambda rung: rung.error)

    @property
    def eps(self) -> float | None:
        """The eps of least error; None if even there the error is half of a scalar or more."""
        return self.best.eps if self.best.error < 0.5 else None

    @property
    def usable(self) -> list[float]:
        """All values of eps whose error is within `TOLERANCE`."""
        return [rung.eps for rung in self.rungs if rung.error <= TOLERANCE]


def measure(simulation: Simulation, until: float = math.inf, clock: Clock = time.monotonic) -> Scalars:
    """Measure losses at w₀ ± ε z on clients' first batches, for all ε; the model is w₀ afterwards.

    Args:
        until: time, by `clock`, after which no further sample is begun.
    """
    state = simulation.strategy.server.init()
    rng = generator(simulation.recipe.seed, Purpose.TUNE, 0)
    order, losses = rng.permutation(len(simulation.shares.clients)), []
    for sample, j in enumerate(rng.integers(simulation.strategy.run.pool.size, size=SAMPLES).tolist()):
        client = simulation.client(int(order[sample % order.size]))
        simulation.progress.begin(f"scalars of client {client.number}", len(LADDER))
        simulation.setup.load(state)
        losses.append(ladder(client, j, partial(simulation.progress.advance, 1)))
        if clock() > until:
            break
    simulation.setup.load(state)
    return judge(np.array(losses), points=1 if simulation.setup.algorithm.local == ONE else 2)


def ladder(
    client: Client[Any], direction: int, on_eps: Callable[[float], object] = lambda loss: None
) -> list[tuple[float, float, float]]:
    """The losses of a client's first batch at w ± ε z and w for every ε; the model then is stale.

    Refuses a base model whose loss at w is not finite.
    """
    loss, rows = partial(client.loss, next(client.batches(0))), []
    if not math.isfinite(here := loss()):
        raise FedKSeedError(f"the base model's loss on client {client.number}'s first batch is {here}; check dtype")
    for eps in LADDER:
        rows.append((*client.weights.both(direction, eps, loss), here))
        on_eps(here)
    return rows


def judge(losses: NDArray[np.float64], points: int = 2) -> Scalars:
    """Rounding, scalars and curvature from losses at w₀ + ε z, w₀ − ε z and w₀, shape (samples, ladder, 3).

    Two points: ρ = (L₊ − L₋) / 2ε, whose noise is σ/√2ε and whose bias grows as ε². One point:
    ρ = (L₊ − L₀) / ε, with noise √2σ/ε and a bias that grows as ε. σ, the rounding of a loss, is estimated from the
    differences between two-point scalars of neighbouring small ε. A difference larger than noise explains is bias,
    which is taken not to fall as ε grows. tr H is the mean of zᵀHz = (L₊ + L₋ − 2 L₀) / ε², at the ε that is best for
    two points.

    Raises:
        FedKSeedError: losses are not finite even for small ε.
    """
    kept = np.all(np.isfinite(losses), axis=(0, 2))  # a large ε may break the model
    if not kept[np.array(LADDER) <= QUIET].all():
        raise FedKSeedError(f"losses are not finite within eps = {QUIET:g} of the base model; use dtype = 'float32'")
    (above, below, here), ladder = np.moveaxis(losses[:, kept], 2, 0), np.array(LADDER)[kept]
    two = (above - below) / (2 * ladder)
    apart = _rms(np.diff(two)) / np.hypot(_noise(1.0, ladder[1:], 2), _noise(1.0, ladder[:-1], 2))
    rounding = float(_rms(apart[ladder[1:] <= QUIET]))
    rungs = _rungs(two, rounding, ladder, 2)
    best = min(range(len(rungs)), key=lambda k: rungs[k].error)
    bends = ((above + below - 2 * here) / ladder**2)[:, best]
    square = max(float(np.mean(two[:, best] ** 2)) - rungs[best].noise ** 2, 0.0)
    if points == 1:
        rungs = _rungs((above - here) / ladder, rounding, ladder, 1)
    return Scalars(rungs, rounding, len(losses), square, estimate(bends))


def _rungs(rho: NDArray[np.float64], rounding: float, ladder: NDArray[np.float64], points: int) -> list[Rung]:
    noise = _noise(rounding, ladder, points)
    jumps, expected = _rms(np.diff(rho)), np.hypot(noise[1:], noise[:-1])
    beyond = np.where(jumps > 2 * expected, np.sqrt(np.maximum(jumps**2 - expected**2, 0)), 0.0)
    shrink = (ladder[:-1] / ladder[1:]) ** points  # of the bias, one rung down
    bias = np.maximum.accumulate(np.append(0.0, beyond / (1 - shrink)))
    bias[0] = bias[1] * shrink[0]
    error = np.hypot(noise, bias)
    best = int(error.argmin())
    signal = math.sqrt(max(float(np.mean(rho[:, best] ** 2)) - noise[best] ** 2, 0.0))
    apart = _rms(rho - rho[:, best : best + 1])
    relative, apart = (x / signal if signal else np.full_like(x, np.inf) for x in (error, apart))
    columns = (ladder, abs(rho).mean(0), noise, bias, relative, apart)
    return [Rung(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _noise(rounding: float, ladder: NDArray[np.float64], points: int) -> NDArray[np.float64]:
    return math.sqrt(2) * rounding / (points * ladder)


def _rms(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sqrt(np.mean(values**2, 0))
