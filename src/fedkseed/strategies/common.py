"""What every algorithm's server does alike."""

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..messages import Change, Run, Upload

SCHEDULES = ("constant", "linear", "cosine")
NONE = np.empty(0, np.uint32)
Reply = TypeVar("Reply", Upload, Change)


def scheduled(lr: float, schedule: str, round_: int, rounds: int) -> float:
    """η of a round, from 0. Never 0: the state after the last round can still be broadcast, to load it."""
    done = min(round_ / rounds, 1.0)
    if schedule == "linear":
        return lr * max(1 - done, 1e-6)
    if schedule == "cosine":
        return lr * max((1 + math.cos(math.pi * done)) / 2, 1e-6)
    return lr


def require_settings(schedule: str, **counts: int) -> None:
    """Refuse a schedule that does not exist and counts below 1."""
    for name, value in counts.items():
        if value < 1:
            raise FedKSeedError(f"{name} must be at least 1, got {value}")
    require_choice("schedule", schedule, SCHEDULES)


def require_choice(what: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a setting that does not exist: a misspelt one must not fall through to another."""
    if value not in choices:
        raise FedKSeedError(f"no {what} is called {value!r}; choose one of {', '.join(map(str, choices))}")


def in_order(uploads: Sequence[Reply], run: Run, round_: int) -> list[Reply]:
    """Uploads in the order of their clients' numbers, so that float sums have one value.

    Raises:
        FedKSeedError: there is none, or one is of another round or run, or came twice.
    """
    if not uploads:
        raise FedKSeedError(f"round {round_} got no upload; it can't be aggregated")
    ordered = sorted(uploads, key=lambda upload: upload.client)
    for number, upload in enumerate(ordered):
        run.require(upload.run)
        if upload.round != round_:
            raise FedKSeedError(
                f"client {upload.client} answered round {upload.round}, the server is in round {round_}"
            )
        if number and ordered[number - 1].client == upload.client:
            raise FedKSeedError(f"client {upload.client} answered round {round_} twice; keep one of its uploads")
    return ordered


def require_scalars(upload: Upload, asked: int, clip: float) -> None:
    """Refuse more scalars than were asked for, and larger ones than are allowed."""
    if upload.scalars.size > asked:
        raise FedKSeedError(
            f"client {upload.client} reports {upload.scalars.size} scalars, at most {asked} were asked for"
        )
    require_clipped(upload.client, upload.scalars, clip)


def require_clipped(client: int, scalars: NDArray[np.float32], clip: float) -> None:
    """Refuse larger scalars than are allowed."""
    largest = float(abs(scalars).max(initial=0))
    if largest > clip * (1 + 1e-7):  # a clip is rounded to float32 on its way
        raise FedKSeedError(f"client {client} reports a scalar gradient of {largest:g}, at most {clip:g} is allowed")


def require_sendable(round_: int, numbers: NDArray) -> None:
    """Refuse a state that the next broadcast could not carry."""
    if not (np.abs(numbers) <= np.finfo(np.float32).max).all():
        raise FedKSeedError(f"round {round_} would overflow float32; set a clip on scalars, or a smaller lr")


def local_steps(steps: int, epochs: int | None, examples: int, batch_size: int) -> int:
    """Local steps of a client: so many, or as many as it takes to go through its data."""
    return steps if epochs is None else epochs * math.ceil(examples / min(batch_size, examples))


def merged(uploads: Sequence[Upload], lr: float) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """−η Σ_i (n_i / n) Σ ρ of every direction that was drawn, ascending.

    Raises:
        FedKSeedError: a sum overflows.
    """
    total = sum(upload.examples for upload in uploads)
    drawn = np.concatenate([upload.directions for upload in uploads])
    steps = np.concatenate([upload.scalars * np.float64(-lr * upload.examples / total) for upload in uploads])
    directions, places = np.unique(drawn, return_inverse=True)
    sums = np.bincount(places, steps, directions.size)
    require_sendable(uploads[0].round, sums)
    return directions.astype(np.uint32), sums.astype(np.float32)
