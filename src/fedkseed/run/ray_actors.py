"""Processes of Ray that train a simulation's clients, on this machine or on those of a cluster.

They get the messages that a network would carry, so the tuned model is that of one process, bit for bit. Each loads the
model and the rows by itself: all machines need the same files in the same places.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from itertools import islice
from math import ceil
from tomllib import loads
from types import TracebackType
from typing import Any, TypeAlias

import torch

from ..errors import FedKSeedError
from ..recipe.reading import parse
from ..recipe.schema import Recipe
from .workers import Answer, require_same, threads_of

Prepare: TypeAlias = Callable[[Recipe, bytes], tuple[Answer, dict[str, str]]]


class RayActors(AbstractContextManager["RayActors"]):
    """Actors of Ray, as a context; a simulation takes them as its workers, `[clients] at_once` of them.

    `RAY_ADDRESS`, which Ray itself reads, names a cluster; without it Ray runs on this machine, as long as the context.

    Args:
        prepare: makes the function that answers broadcasts, and the digests of what it has loaded, of a recipe and the
            secret of its noise; a function of a module, which actors on other machines import.
    """

    restarted = False  # nobody starts this process again, see `Ranks`

    def __init__(self, prepare: Prepare) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it sends data about its use
        self._ray: Any = import_module("ray")
        self._prepare, self._actors = prepare, list[Any]()
        self._unchecked: dict[str, str] = {}  # of the run, as long as the actors have not said theirs

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ray.shutdown()  # which ends the actors

    @property
    def count(self) -> int:
        """The number of actors."""
        return len(self._actors)

    def begin(self, recipe: Recipe, secret: bytes, answer: Answer, identity: dict[str, str]) -> None:
        """Start the actors, which load the run's model and its rows.

        Args:
            secret: of the noise of a run with [privacy].
            answer: that of this process, which trains nothing.
            identity: digests that the actors have to have, too.

        Raises:
            FedKSeedError: Ray has too few processors for all of them at once.
        """
        count, threads = recipe.clients.at_once, threads_of(recipe)
        own = {"num_cpus": count * threads, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        self._ray.init(log_to_driver=False, logging_level="error", **({} if os.environ.get("RAY_ADDRESS") else own))
        there = self._ray.cluster_resources()
        if there.get("CPU", 0) < count * threads:
            raise FedKSeedError(
                f"[clients] at_once = {count} processes of {threads} threads need {count * threads} processors, Ray "
                f"has {there.get('CPU', 0):.0f}: set at_once or [clients] threads to fewer"
            )
        gpus = 0 if recipe.model.device == "cpu" else int(there.get("GPU", 0))
        part = 1 / ceil(count / gpus) if gpus else 0  # of a GPU, as many of which as need be have an actor more
        started = self._ray.remote(num_cpus=threads, num_gpus=part)(_Trainer)
        self._actors = [started.remote(self._prepare, recipe.to_toml(), secret, threads) for _ in range(count)]
        self._unchecked = identity

    def answers(self, messages: Mapping[int, bytes]) -> Iterator[tuple[int, bytes, list[float]]]:
        """The triples (client, upload, seconds of its local steps), in the order in which they come.

        Raises:
            FedKSeedError: an actor has another model or other rows, ended, or one of its clients failed.
        """
        ray, free = self._ray, [*self._actors]
        try:
            if self._unchecked:
                for number, theirs in enumerate(ray.get([actor.identity.remote() for actor in free])):
                    require_same(f"actor {number}", theirs, self._unchecked, "this process")
                self._unchecked = {}
            distinct = {id(data): data for data in messages.values()}
            stored = {key: ray.put(data) for key, data in distinct.items()}  # once a machine, not once a client
            waiting, asked = iter(messages.items()), dict[Any, tuple[int, Any]]()
            while True:
                for client, data in islice(waiting, len(free)):
                    actor = free.pop()
                    asked[actor.answer.remote(stored[id(data)], client)] = client, actor
                if not asked:
                    return
                (done,), _ = ray.wait([*asked])
                client, actor = asked.pop(done)
                free.append(actor)
                yield client, *ray.get(done)
                del done  # its upload can be all weights
        except ray.exceptions.RayError as error:
            why = getattr(error, "cause", None) or error
            again = "`fedkseed resume RUN --engine ray` goes on from the last finished round"
            raise FedKSeedError(f"a process of Ray failed: {why}; {again}") from error


class _Trainer:
    """The clients of a recipe in one of Ray's processes, any of which may be asked there."""

    def __init__(self, prepare: Prepare, recipe: str, secret: bytes, threads: int) -> None:
        torch.set_num_threads(threads)
        logging.getLogger("transformers").setLevel(logging.ERROR)  # this run's first process has shown the warnings
        self._answer, self._identity = prepare(parse(loads(recipe)), secret)

    def identity(self) -> dict[str, str]:
        return self._identity

    def answer(self, data: bytes, client: int) -> tuple[bytes, list[float]]:
        return self._answer(data, client)
