"""Bytes and seconds of rounds with masks, by real messages between real keys. `python benchmarks/secure.py`

It needs the extra `secure`: pip install 'fedkseed[secure]'

No model is run: clients send random changes. Down: broadcast, clients and keys, sealed shares; up: masked numbers and
shares. Seconds are of one core: a client's of both its legs, and the server's of taking off the masks. A tenth of the
clients (of five, one) are missing after the first broadcast. The clear note: the same algorithm without masks. Rows
with an epsilon are of [privacy], of clients that take part ten times: noise makes sums some bits wider.
"""

import time
from itertools import product
from typing import Any

import numpy as np

from fedkseed import LocalWork, Pool, Run, decode, encode
from fedkseed.round import Round
from fedkseed.secure.accounting import noise_for
from fedkseed.secure.member import MaskingClient
from fedkseed.strategies.kseed import KSeed
from fedkseed.strategies.masked import Masks, masked, simulated_key
from fedkseed.strategy import Masking, Noise, Settings
from fedkseed.wire.numbers import rounded
from fedkseed.wire.records import Change, Secured
from table import Row, show

K, STEPS = 4096, 200
TIMES, DELTA = 10, 1e-6  # of private rows
RUN = Run(Pool(0, K, "hadamard"), bytes(32))


def main() -> None:
    rows = [round_of(clients, shared, None) for clients, shared in product((3, 5, 10, 30, 100), (False, True))]
    rows.append(round_of(10, False, 6))
    private = product((10, 100), (8.0, 2.0), (False, True))
    rows += [round_of(clients, shared, None, epsilon) for clients, epsilon, shared in private]
    rng = np.random.default_rng(0)
    strategy = KSeed.make(settings(False, {}, None, None))
    clear = Change(RUN, 0, 1, 1, 1.0, 0, rounded(rng.normal(size=K), "compact"), np.empty(0, np.uint32), "compact")
    down, up = len(encode(strategy.server.broadcast(strategy.server.init()))), len(encode(clear))
    notes: Row = {"clear, K numbers": f"down {down:,}, up {up:,}, all {down + up:,}"}
    show(f"K = {K:,}, {STEPS} steps, 8 bits", rows, notes=notes)


def settings(shared: bool, keys: dict[int, bytes], neighbours: int | None, epsilon: float | None) -> Settings:
    work = LocalWork(rounds=1, steps=STEPS)
    noise = None if epsilon is None else Noise(noise_for(epsilon, DELTA, TIMES))
    masking = Masking(1.0, 8, neighbours, keys)
    return Settings(RUN, work, wire="compact", shared=shared, secure=masking, noise=noise)


def round_of(clients: int, shared: bool, neighbours: int | None, epsilon: float | None = None) -> Row:
    """A row of the table."""
    members = {n: MaskingClient(n, simulated_key(0, n)) for n in range(clients)}
    keys = {n: one.public for n, one in members.items()}
    strategy = masked(KSeed.make(settings(shared, keys, neighbours, epsilon)))
    state, rng = strategy.server.init(), np.random.default_rng(0)
    aggregator: Any = strategy.aggregator
    masks: Masks = aggregator.masks
    message = decode(Round.begin(strategy, state, range(clients)).whole[0], Secured)
    roster = masks.roster(message, b"")
    width, variance, took, uploads = masks.width(clients), masks.variance(clients, listed=True), 0.0, []
    for number in range(max(clients // 10, clients > 3), clients):
        change = rng.normal(size=masks.grid.size) / masks.grid.size
        begin = time.process_time()
        codes = masks.grid.coded(change, 0, number)
        if variance:
            codes = codes + members[number].noise(roster, variance, codes)
        uploads.append(members[number].masked(RUN, roster, codes, width))
        took = max(took, time.process_time() - begin)
    accumulator = aggregator.start(state, dict.fromkeys(members, message))
    for upload in uploads:
        aggregator.add_(accumulator, upload)
    requests = aggregator.requests(accumulator)
    begin = time.process_time()
    answers = [members[number].shares(request, roster) for number, request in requests.items()]
    took += (time.process_time() - begin) / len(answers)
    begin = time.process_time()
    for answer in answers:
        aggregator.add_shares_(accumulator, answer)
    aggregator.finish(accumulator)
    server = time.process_time() - begin
    sizes = [max(len(encode(one)) for one in leg) for leg in ([message], uploads, requests.values(), answers)]
    kind, stated = "shared directions" if shared else "K numbers", "" if epsilon is None else f"{epsilon:g}"
    row: Row = {"clients": clients, "uploads": kind, "neighbours": len(roster.others(0)), "ε": stated}
    row |= dict(zip(("down 1", "up 1", "down 2", "up 2"), sizes, strict=True))
    return row | {"all": sum(sizes), "client (s)": took, "server (s)": server}


if __name__ == "__main__":
    main()
