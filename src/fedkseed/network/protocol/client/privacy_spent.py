"""The privacy that a client has given away, over all rounds of all runs, and the most that its owner allows.

Every answer under [privacy] spends 1 / noise² (secure/accounting.py): amounts add up exactly, whatever the order and
whoever asks, so that a server gains nothing by a new run of the same recipe.
"""

import math
from pathlib import Path

from ....errors import FedKSeedError
from ....files import read_table, write_table

PRIVACY_SPENT = "privacy.json"  # in the directory of a client


def spend_privacy(folder: Path, run: bytes, asked: bytes, amount: float, epsilon: float | None, delta: float) -> float:
    """Note an answer before it leaves this machine, and return ε of all answers so far.

    The second leg of a round, or a repeated task, costs nothing. What would be too much is refused, and not noted.

    Args:
        folder: of the client, with its account: run -> broadcast -> 1 / noise² of the answer.
        asked: digest of the broadcast: another one of the same round has another answer.
        amount: 1 / noise² of the answer.
        epsilon: the most that all answers together may spend, at `delta`; None: no limit.
    """
    from ....secure.accounting import epsilon_of

    path = folder / PRIVACY_SPENT
    table = read_table(path) if path.exists() else {}
    try:
        known = {name: {of: float(cost) for of, cost in answers.items()} for name, answers in table.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise FedKSeedError(
            f"{path} holds no account of what this client has answered: {error}; get it back from a copy: without "
            "it nothing says how much was spent, and a server could have it spent again"
        ) from error
    answers = known.setdefault(run.hex(), {})
    before = answers.get(asked.hex(), 0.0)
    answers[asked.hex()] = max(amount, before)
    total = math.fsum(cost for answers in known.values() for cost in answers.values())
    found = epsilon_of(1.0, total, delta)
    if epsilon is not None and found > epsilon * (1 + 1e-9):
        raise FedKSeedError(
            f"this answer would bring what the client has spent to epsilon = {found:.4g} at delta = {delta:g}, and "
            f"the policy says epsilon = {epsilon:g}; {path} has what was answered"
        )
    if amount > before:
        write_table(path, known)
    return found
