"""Checkpoints of `fedkseed.Trainer`: a folder with the server's state, the log and a table of facts, whole or absent.

state.safetensors    K coefficients and what is known of each direction, 24 bytes a direction; 40 with Adam
trainer_state.json   transformers' TrainerState, with the log and the states of callbacks
fedkseed.json        the facts that a training must share to go on, eps, and the digests of the other two
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerState

from ..errors import FedKSeedError
from ..files import folder, read_table, read_whole, write_atomically, write_table
from ..run.digest_chain import digest
from ..run.store import pack, unpack
from ..strategies.kseed import State

STATE, FACTS, HISTORY = "state.safetensors", "fedkseed.json", "trainer_state.json"
MAX_BYTES = 1 << 30  # of a file
FORMAT = 2


def write(path: Path, state: State, history: TrainerState, facts: Mapping[str, Any]) -> None:
    """Write a checkpoint.

    Args:
        facts: as `read` returns them; `identity` is of those that a training must share to go on.
    """
    with folder(path) as part:
        write_atomically(part / STATE, pack(state))
        history.save_to_json(str(part / HISTORY))
        files = {name: digest((part / name).read_bytes()).hex() for name in (STATE, HISTORY)}
        write_table(part / FACTS, {"format": FORMAT, **facts, "files": files})


def read(path: Path, identity: Mapping[str, Any]) -> tuple[State, TrainerState, dict[str, Any]]:
    """The state, the log and the facts of a checkpoint.

    Raises:
        FedKSeedError: a file is lacking or has changed, or the checkpoint is of a training with another identity.
    """
    facts = read_table(path / FACTS)
    if facts.get("format") != FORMAT:
        raise FedKSeedError(f"{path} has format {facts.get('format')!r}, this program reads {FORMAT}; train anew")
    data = {name: read_whole(path / name, MAX_BYTES, str(path / name)) for name in (STATE, HISTORY)}
    for name, content in data.items():
        if digest(content).hex() != facts["files"][name]:
            raise FedKSeedError(f"{path / name} has changed since it was written; take another checkpoint")
    for name, value in identity.items():
        if (saved := facts["identity"].get(name)) != value:
            hint = "load the base model again" if name == "base" else "give the arguments with which it began"
            raise FedKSeedError(f"{path} is of a training with {name} {saved}, this one has {value}; {hint}")
    history = TrainerState.load_from_json(str(path / HISTORY))
    return unpack(data[STATE], State, history.global_step, path / STATE), history, facts
