"""The worker: a client's long-lived process, which keeps the model loaded and answers tasks.

    python -m fedkseed.network.protocol.client.worker DIRECTORY

The process that has the connection to the server loads no model; it hands each task to the worker and waits. A lock
allows one worker a directory. It does one task at a time, and ends after some idle time. It gives up a task when the
process that handed it in is gone, or when the task's time is over, because then nothing waits for the answer.
"""

import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ....errors import FedKSeedError
from ....files import exclusive, read_whole, write_atomically
from ....weights.adapter import ADAPTER
from ..envelope import Code, RefusedError, refusing
from ..masking_keys import listed_keys, masking_key, note_masked
from ..signatures import ClientSigning
from . import worker_process as process
from .policy import RowView
from .privacy_spent import PrivacyLedger, ledger_path
from .recipe_consent import Owner, OwnerSettings, RecipeJournal, accepted_recipe
from .task_handler import AbandonedError, TaskHandler
from .training_client import TrainingClient, load_client

if TYPE_CHECKING:
    from ....secure.member import MaskingClient

BATCH_SEED, STEPS = "batches.secret", "steps.kept"  # in the directory of a client


def serve(directory: Path) -> None:
    """Answer tasks until none has come for the idle time.

    Raises:
        FedKSeedError: another worker runs in this directory, or its settings can't be read.
    """
    settings = OwnerSettings.read(directory)
    with exclusive(directory / process.LOCK, f"{directory} has a worker"), process.listening(directory) as listener:
        owner, signing = settings.owner, settings.signing(directory)
        if owner.policy.data.secret_batches:
            owner = replace(owner, secret=batch_secret(directory))
        members = None if owner.members is None else listed_keys(Path(owner.members))
        masks = None if signing is None else partial(masking_client, directory, signing, members)
        server = b"" if signing is None else signing.audience
        ledger = PrivacyLedger(ledger_path(), server, directory)
        load = partial(load_client, masks=masks, ledger=ledger, keeps=directory / ADAPTER, steps=directory / STEPS)
        handler = TaskHandler(partial(follow_recipe, RecipeJournal(directory, server), owner, load=load), signing)
        listener.settimeout(settings.idle)
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                (directory / process.SOCKET).unlink(missing_ok=True)  # still locked: a successor's is not touched
                return
            with connection, suppress(AbandonedError, OSError, FedKSeedError):  # of this task; the next may succeed
                task = process.receive(connection, process.HAND_IN)
                reply = handler.reply(task, partial(process.gone, connection))
                process.send(connection, reply.encode(), process.HAND_IN)
                connection.close()
                handler.afterwards()


def follow_recipe(
    journal: RecipeJournal, owner: Owner, recipe: bytes, load: Callable[..., TrainingClient] = load_client
) -> TrainingClient:
    """A client that follows a recipe, which is noted before, and the decision after.

    Raises:
        RefusedError: the recipe is not followed.
    """
    with refusing(Code.WORKER):  # the disk may be full
        journal.asked(recipe)
        try:
            view = RowView.of(accepted_recipe(recipe, owner))
            journal.require_room(view, owner.policy.data.max_views)
            journal.decided(recipe, "followed", view)
            return load(owner, recipe)
        except RefusedError as error:
            journal.decided(recipe, f"{error.code}: {error}")
            raise


def batch_secret(directory: Path) -> int:
    """The secret number by which a client draws its batches, made once for its directory.

    A server that knew which rows are in which batch could solve the scalars of a round for those of each row.

    Raises:
        FedKSeedError: the file can't be read or written, or holds something else.
    """
    path = directory / BATCH_SEED
    if not path.exists():
        write_atomically(path, secrets.token_hex(16).encode())
    try:
        return int(read_whole(path, 64, str(path)), 16)
    except ValueError as error:
        raise FedKSeedError(f"{path} holds no secret: {error}; remove it, and another is made") from error


def masking_client(
    directory: Path, signing: ClientSigning, members: Mapping[int, bytes] | None, number: int, nonce: bytes
) -> "MaskingClient":
    """A client's side of masked uploads in one run, with its memory in its directory.

    Args:
        members: the keys that the client's owner lists; None: the server is believed.

    Raises:
        FedKSeedError: a package is missing.
    """
    try:
        from ....secure.member import MaskingClient
    except ModuleNotFoundError as error:
        raise FedKSeedError(f"masked uploads need the package {error.name}: pip install 'fedkseed[secure]'") from error
    once = partial(note_masked, directory, nonce)
    return MaskingClient(number, masking_key(signing.key), nonce, once, members=members)


if __name__ == "__main__":
    try:
        serve(Path(sys.argv[1]))
    except FedKSeedError as refusal:
        sys.exit(f"fedkseed: {refusal}")
