"""Fuzzing of the decoder with millions of broken and invented messages, and of the reader of basis files.

An input is a message that was broken, or bytes that were invented in a message's layout. Most have a correct checksum,
so that the checks behind it are reached. Two outcomes are correct: `FedKSeedError`, or a record that encodes to the
same bytes. An accepted upload is then also aggregated, and an accepted difference restored, each of which must succeed
or be refused. Any other exception, a warning, an input that takes seconds, or one that needs more than MEMORY is a
finding: the campaign stops and prints the input. fuzz_basis.py has the same for files of bases,
fuzz_files.py for recipes, policies, bodies of a session, adapters and files of data and models.

Inputs come in blocks; the inputs of a block follow from the campaign's seed and the block's number.
"""

import argparse
import random
import re
import resource
import struct
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as Late
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf, nan
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from fedkseed.directions import FAMILIES, Pool
from fedkseed.errors import FedKSeedError
from fedkseed.local.work import LocalWork
from fedkseed.strategies.kseed import KSeed, State
from fedkseed.strategies.tree import tree
from fedkseed.strategy import Settings
from fedkseed.wire import KINDS, Broadcast, Change, Delta, History, Lack, Run, Subtotal, Upload, Values
from fedkseed.wire.codec import HEADER, MAGIC, TRAILER, VERSION, Head, Record, decode, encode, header_size, sealed
from fedkseed.wire.delta import restore, shorten
from fedkseed.wire.int8 import compact, pack, packed_size
from fedkseed.wire.records import Masked, Secured, Shares, Survivors

from ..weights import fuzz_basis
from . import fuzz_files

BLOCK = 1000  # inputs
SLOW = 2.0  # processor seconds; an input that takes longer is a finding
HANGS = 120.0  # seconds until a block is given up; a block normally takes less than one second
MEMORY = 256 << 20  # bytes that a process may ask for beyond those that it has at the start
QUIET = 5.0  # seconds between two lines about the progress

BASE = bytes(range(32))
RUN = Run(Pool(0x0123456789ABCDEF, 16), BASE)
BLOCKS = Run(Pool(0x0123456789ABCDEF, 256), BASE)  # two blocks of compact numbers
INFORMED = Run(Pool(0x0123456789ABCDEF, 16, "informed", bytes(range(32, 64))), BASE)
UNLIMITED = Run(Pool(0x0123456789ABCDEF, 1 << 32, "rademacher"), BASE)
WORDS = (0, 1, 2, 3, 127, 128, 255, 256, 1 << 16, 1 << 24, 1 << 31, (1 << 32) - 1, 0x7FC00000, 0x7F800000, 0xFF800000,
         0x7F800001, 0xFFC00000, 0x80000000, 0x3F800000, 0x3F800001, 0x00000100, 0x7F7FFFFF)  # fmt: skip
FIELDS = {  # by type of a field: values that an invented message has there
    "d": (1.0, 3e-7, inf, nan, -1.0, 0.0),
    "f": (1.0, inf, nan, 0.0, -1.0),
    "B": (*range(14), 31, 32, 33, 255),
    "H": (*range(8), 10, 255, 256, 1 << 15, (1 << 16) - 1),
    "I": (*range(8), *WORDS),
    "Q": (*range(12), 128, 256, 1 << 32, 1 << 63),
}
MOST = 1 << 12  # bytes of an array of an invented message, at most
COMPACT = {packed_size(count): count for count in range(1, 257)}  # bytes -> number of compact numbers in them


def specimens() -> dict[str, Record]:
    """Short messages of every kind and flag, by name; docs/wire.md and its test vectors show them."""
    c = (np.arange(-8, 8) / 1024).astype(np.float32)
    many, wide = _broadcasts()[0].coefficients, np.arange(RUN.pool.size)
    p, scalars = np.arange(1, 17, dtype=np.float32), np.array([8.5, -0.25, nan, 0, 3, -1000], np.float32)
    signs, numbers = np.array([1, -1, 1, 1, -1, -1, 1, 1, -1], np.float32), (np.arange(1, 10) / 8).astype(np.float32)
    counts, none = np.array([[2, 1], [0, 2], [3, 1]], np.uint32), np.empty(0, np.uint32)
    broadcast = Broadcast(RUN, 7, 3e-7, 5e-4, 3, inf, c, probes=2)
    upload = Upload(RUN, 7, 12, 345, 2.5, scalars)
    change = Change(UNLIMITED, 7, 12, 345, nan, 1, numbers, none)
    kept, whole = (encode(record) for record in _broadcasts())
    members, keys = np.array([3, 12, 40], np.uint32), np.arange(96, dtype=np.uint8).reshape(3, 32)
    rows = np.arange(20, dtype=np.uint8).reshape(2, 10)
    return {
        "broadcast, exact": broadcast,
        "broadcast, exact, probabilities": replace(broadcast, probabilities=p, clip=100.0),
        "broadcast, compact": replace(broadcast, run=BLOCKS, coefficients=many, wire="compact"),
        "broadcast, compact, probabilities": replace(
            broadcast, coefficients=compact(c), probabilities=compact(p), wire="compact"
        ),
        "broadcast, sign": replace(broadcast, coefficients=compact(c), wire="sign"),
        "broadcast, sign, probabilities": replace(
            broadcast, coefficients=compact(c), probabilities=compact(p), wire="sign"
        ),
        "upload, exact": upload,
        "upload, compact": replace(upload, wire="compact"),
        "upload, sign": replace(upload, scalars=signs, wire="sign"),
        "upload, sign, some skipped": replace(upload, scalars=np.array([1, nan, -1] * 3, np.float32), wire="sign"),
        "values": Values(UNLIMITED, 7, 3e-4, numbers),
        "history": History(UNLIMITED, 7, 3e-4, 4, counts, none, numbers),
        "history, directions": History(
            UNLIMITED, 7, 3e-4, 4, np.array([[3], [2], [4]], np.uint32), np.arange(7, 16, dtype=np.uint32), numbers
        ),
        "history, nothing missed": History(UNLIMITED, 7, 3e-4, 7, counts[:0], none, numbers[:0]),
        "change, exact, counts": replace(change, counts=np.array([4, 5], np.uint32)),
        "change, exact": change,
        "change, compact": replace(change, loss=2.5, values=compact(numbers), wire="compact"),
        "broadcast, informed": replace(broadcast, run=INFORMED),
        "upload, informed": replace(upload, run=INFORMED),
        "change, informed": replace(change, run=INFORMED, values=c),
        "delta, informed": Delta(INFORMED, 7, 1, 2, zlib.compress(bytes(9), 9)[2:-4]),
        "lack, mixed": Lack(Run(replace(INFORMED.pool, family="mixed"), BASE), 7, 12),
        "broadcast, separable": replace(broadcast, run=Run(replace(RUN.pool, family="separable"), BASE)),
        "delta": decode(shorten(whole, kept), Delta),
        "lack": Lack(RUN, 7, 12),
        "secured": Secured(RUN, 7, members, keys, encode(broadcast)),
        "masked": Masked(RUN, 7, 12, 11, np.arange(2030, 2048, dtype=np.uint32), rows),
        "survivors": Survivors(RUN, 7, members, keys, BASE, np.array([True, False, True]), rows),
        "shares": Shares(RUN, 7, 12, bytes(range(17))),
        "subtotal": Subtotal(
            RUN, 7, 2, np.array([3, 12], np.uint32), 9, 2.5, 1, wide - 5, wide, wide.astype(np.uint32)
        ),
    }  # fmt: skip


@cache
def _broadcasts() -> tuple[Broadcast, Broadcast]:
    """The broadcasts of two rounds, which differ in a few coefficients."""
    one = np.concatenate([np.arange(-127, 1), np.arange(128)]) / 1024
    other = one + np.where(np.arange(256) % 16 == 3, 1 / 256, 0)
    messages = (
        Broadcast(BLOCKS, 6 + k, 3e-7, 5e-4, 3, 100.0, compact(c), wire="compact") for k, c in enumerate((one, other))
    )
    return next(messages), next(messages)


@dataclass(slots=True)
class Tally:
    """Counts of inputs by outcome."""

    accepted: Counter[str] = field(default_factory=Counter)  # by kind
    refused: Counter[str] = field(default_factory=Counter)  # by the first refusal of its line of code

    def add(self, other: "Tally") -> None:
        self.accepted.update(other.accepted)
        self.refused.update(other.refused)

    @property
    def inputs(self) -> int:
        return self.accepted.total() + self.refused.total()


def campaign(
    inputs: int,
    seed: int = 0,
    start: int = 0,
    processes: int = 1,
    tell: Callable[[str], None] = print,
    target: str = "messages",
) -> Tally:
    """Try `inputs` inputs of a seed, beginning with number `start`, in whole blocks.

    Args:
        target: one of TARGETS.

    Raises:
        FedKSeedError: an input is neither refused nor sound, and the text has it; or there is no such target.
    """
    if target not in TARGETS:
        raise FedKSeedError(f"nothing to fuzz is called {target!r}; choose {' or '.join(TARGETS)}")
    blocks = range(start // BLOCK, -(-(start + inputs) // BLOCK))
    tally, begin = Tally(), time.perf_counter()
    said = begin
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_prepare)
    try:
        waiting = [pool.submit(try_block, seed, block, target) for block in blocks[: 2 * processes]]
        for number, block in enumerate(blocks):
            try:
                tally.add(_result(waiting.pop(0)))
            except Late as late:
                raise FedKSeedError(f"block {block} of seed {seed} hangs: try --start {block * BLOCK}") from late
            except BrokenProcessPool as died:
                raise FedKSeedError(f"a process died in or after block {block} of seed {seed}") from died
            if number + 2 * processes < len(blocks):
                waiting.append(pool.submit(try_block, seed, blocks[number + 2 * processes], target))
            if (now := time.perf_counter()) - said > QUIET:
                said, done, rate = now, (block + 1) * BLOCK, tally.inputs / (now - begin)
                tell(f"{tally.inputs:,} of {len(blocks) * BLOCK:,} inputs, {rate:,.0f} a second; next {done:,}")
    finally:
        for process in (pool._processes or {}).values():
            process.terminate()
        pool.shutdown(cancel_futures=True)
    return tally


def _result(block: Future[Tally]) -> Tally:
    """The tally of a block. Waits are short, so that a campaign stopped for an hour (SIGSTOP) is not taken for hung."""
    for _ in range(int(HANGS / QUIET) - 1):
        try:
            return block.result(timeout=QUIET)
        except Late:
            continue
    return block.result(timeout=QUIET)


def try_block(seed: int, block: int, target: str = "messages") -> Tally:
    """Judge the inputs of one block.

    Raises:
        FedKSeedError: an input is a finding.
    """
    tally = Tally()
    make, right = TARGETS[target]
    for number, data in enumerate(make(seed, block)):
        begin = time.process_time()
        try:
            kind, refusal = right(data)
        except Exception as error:  # of any kind: a finding
            raise _finding(seed, block * BLOCK + number, f"{type(error).__name__}: {error}", data) from error
        if (took := time.process_time() - begin) > SLOW:
            raise _finding(seed, block * BLOCK + number, f"took {took:.1f} s", data)
        (tally.refused if refusal else tally.accepted)[refusal or kind] += 1
    return tally


def made(seed: int, block: int) -> Iterator[bytes]:
    """The inputs of one block."""
    rng, seeds = random.Random(f"{seed}/{block}"), _seeds()
    for _ in range(BLOCK):
        if rng.random() < 0.25:
            yield _invented(rng)
            continue
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
            rng.choice(MUTATIONS)(rng, data)
        yield _resealed(data) if rng.random() < 0.85 else bytes(data)


def judge(data: bytes) -> tuple[str, str]:
    """The kind of an accepted message and "", or "" and the words of the refusal.

    Raises:
        AssertionError: an accepted message encodes to other bytes, or is restored or aggregated wrongly.
    """
    try:
        record = decode(data, *(kind.record for kind in KINDS.values()))
    except FedKSeedError as error:
        return "", re.split(r"[0-9(,;:]", str(error))[0].strip()
    if encode(record) != data:
        raise AssertionError(f"accepted as {type(record).__name__}, which encodes to other bytes")
    if isinstance(record, Delta):
        _follow(data)
    if isinstance(record, Upload | Change | Subtotal):
        _aggregate(record)
    return type(record).__name__, ""


def _follow(data: bytes) -> None:
    """Check that a client restores the message meant by a difference, or refuses, or reports a missing message."""
    kept, whole = pair()
    try:
        restored = restore(data, kept)
    except FedKSeedError:
        return
    if restored not in (None, whole):
        raise AssertionError("a difference was restored to something else than was meant")


def _aggregate(record: Upload | Change | Subtotal) -> None:
    """Check that a server refuses a contribution, or has a state afterwards that it can broadcast."""
    if not record.run.pool.size <= 256:
        return
    wire = "compact" if isinstance(record, Subtotal) else record.wire
    steps = (record.scalars.size or 1) if isinstance(record, Upload) else 1
    strategy = KSeed.make(Settings(record.run, LocalWork(1 << 32, steps=steps), wire=wire))
    if isinstance(record, Subtotal):  # of clients that have taken as many steps as it has scalars
        many = KSeed.make(Settings(record.run, LocalWork(1 << 32, steps=1 << 20), wire=wire))
        strategy = tree(many, lambda _: range(1 << 8), lambda _: range(1 << 8))
    size = record.run.pool.size
    before = State(record.round, np.zeros(size), np.zeros(size, np.int64), np.zeros(size, np.int64))
    try:
        strategy.server.broadcast(strategy.aggregate(before, [record]))
    except FedKSeedError:
        return
    finally:
        if before.coefficients.any() or before.counts.any():
            raise AssertionError("a server's state was changed")


# --- inputs -------------------------------------------------------------------------------------


@cache
def _seeds() -> list[bytes]:
    return [encode(record) for record in specimens().values()]


@cache
def pair() -> tuple[bytes, bytes]:
    """The message that a client has kept, and the one that the specimen of a difference makes of it."""
    kept, whole = _broadcasts()
    return encode(kept), encode(whole)


def _flip(rng: random.Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _byte(rng: random.Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 2, 127, 128, 255))


def _word(rng: random.Random, data: bytearray) -> None:
    """Replace four bytes by a number that a check may have missed, mostly where a field begins."""
    at = rng.randrange(max(1, len(data) - 4)) & (~3 if rng.random() < 0.8 else ~0)
    data[at : at + 4] = struct.pack("<I", rng.choice(WORDS))


def _cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _drop(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    del data[at : at + rng.choice((1, 2, 4, 8))]


def _insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))


def _splice(rng: random.Random, data: bytearray) -> None:
    """Replace the rest of the message, from a random place on, by that of another message."""
    at = rng.randrange(len(data) + 1)
    data[at:] = rng.choice(_seeds())[at:]


def _header(rng: random.Random, data: bytearray) -> None:
    """Replace the version, kind, family or flags."""
    if len(data) > 7:
        data[rng.choice((4, 5, 6, 7, 7))] = rng.randrange(17)


def _array(rng: random.Random, data: bytearray) -> None:
    """Copy some bytes of the body to another place in it."""
    if len(data) > HEADER.size + 16:
        one, other = (rng.randrange(HEADER.size, len(data) - 8) for _ in range(2))
        data[one : one + 8] = data[other : other + 8]


def files(seed: int, block: int) -> Iterator[bytes]:
    """The inputs of one block for the reader of bases."""
    rng, breaks = random.Random(f"basis/{seed}/{block}"), (_flip, _byte, _word, _cut, _drop, _insert)
    for _ in range(BLOCK):
        yield fuzz_basis.made(rng, lambda rng, data: rng.choice(breaks)(rng, data))


MUTATIONS = (_flip, _byte, _word, _word, _cut, _drop, _insert, _splice, _header, _array)


TARGETS: dict[str, tuple[Callable[[int, int], Iterator[bytes]], Callable[[bytes], tuple[str, str]]]] = {
    "messages": (made, judge),
    "bases": (files, fuzz_basis.judge),
    **fuzz_files.targets((_flip, _byte, _word, _cut, _drop, _insert), BLOCK),
}


def _resealed(data: bytearray) -> bytes:
    """The same message with a correct checksum, as a hostile party would send it."""
    return sealed(bytes(data[: -TRAILER.size]))


@cache
def _sound() -> dict[int, list[tuple[int, tuple[Any, ...]]]]:
    """The flags and fixed numbers of the specimens, by the number of the message's kind."""
    found: dict[int, list[tuple[int, tuple[Any, ...]]]] = {}
    for data in _seeds():
        kind = KINDS[data[5]]
        found.setdefault(kind.number, []).append((data[7], kind.fixed.unpack_from(data, header_size(data))))
    return found


def _invented(rng: random.Random) -> bytes:
    """An invented message: a header, fields, and the bytes whose number follows from them; only values may be wrong.

    Flags are allowed ones. Most fields are those of a specimen, the others numbers that a check may have missed. The
    number of bytes that follow is the codec's, up to MOST an array.
    """
    number, run = rng.choice(list(_sound())), Run(_pool(rng), BASE)
    kind = KINDS[number]
    flags, fields = rng.choice(_sound()[number])
    types = kind.fixed.format.lstrip("<")
    share = rng.choice((0, 0, 0.2, 0.5))  # of fields that are changed
    fields = [rng.choice(FIELDS[t]) if rng.random() < share else old for t, old in zip(types, fields, strict=True)]
    if rng.random() < 0.5:
        flags = rng.choice(kind.flags)
    if kind.sizes:
        try:
            parts = [_part(rng, min(count, MOST)) for count in kind.sizes(Head(run, 7, flags), fields)]
        except FedKSeedError:  # more numbers than a message may announce
            parts = []
    else:  # the rest of the body of a difference: deflated bytes
        noise = rng.randbytes(rng.choice((9, len(pair()[0]) - HEADER.size - TRAILER.size)))
        parts = [rng.choice((zlib.compress(noise, 9, -15), noise))]
    pool = run.pool
    header = HEADER.pack(MAGIC, VERSION, number, pool.record.number, flags, 7, pool.key, pool.size - 1, BASE)
    return sealed(header, pool.basis, kind.fixed.pack(*fields), *parts)


def _pool(rng: random.Random) -> Pool:
    """A pool of any family, with a size that it takes."""
    while True:
        family, size = rng.choice(list(FAMILIES.values())), rng.choice((1, 2, 8, 128, 256))
        with suppress(FedKSeedError):
            return Pool(RUN.pool.key, size, family.name, INFORMED.pool.basis * family.informed)


def _part(rng: random.Random, size: int) -> bytes:
    """An array of `size` bytes: small counts, or compact numbers that are right up to a byte or two, or words."""
    match rng.randrange(5):
        case 0:
            return struct.pack(f"<{size // 4}I", *(rng.randrange(4) for _ in range(size // 4))).ljust(size, b"\0")
        case 1 | 2 if size in COMPACT:
            made = bytearray(pack(compact(np.array([rng.uniform(-1, 1) for _ in range(COMPACT[size])]))))
            for _ in range(rng.choice((0, 0, 1, 2))):
                _byte(rng, made)
            return bytes(made)
        case _:
            return _bytes(rng, size)


def _bytes(rng: random.Random, count: int) -> bytes:
    """An array of `count` bytes with few different values, many of them allowed."""
    words = [rng.choice((0x3F800000, 0x00003F80, *WORDS)) for _ in range(-(-count // 4))] if rng.random() < 0.7 else ()
    return struct.pack(f"<{len(words)}I", *words)[:count] or bytes(count)


# --- processes ----------------------------------------------------------------------------------


def _prepare() -> None:
    """Prepare a process of the campaign: turn warnings and the use of too much memory into exceptions."""
    warnings.simplefilter("error")
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    limit = int(held.split()[1]) * 1024 + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _finding(seed: int, number: int, what: str, data: bytes) -> FedKSeedError:
    return FedKSeedError(f"input {number} of seed {seed} is neither refused nor sound: {what}; it is {data.hex()}")


def main() -> None:
    """Run a campaign as the command line asks for it, and print its tally; a finding ends it with exit code 1."""
    parser = argparse.ArgumentParser("python -m tests.wire.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=1_000_000, help="number of inputs, widened to whole blocks")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs; with a number it decides the bytes")
    parser.add_argument("--start", type=int, default=0, help="number of the first input, to continue an earlier call")
    parser.add_argument("--processes", type=int, default=1, help="processes that try inputs side by side")
    parser.add_argument("--target", choices=TARGETS, default="messages")
    asked, begin = parser.parse_args(), time.perf_counter()
    try:
        tally = campaign(asked.inputs, asked.seed, asked.start, asked.processes, print, asked.target)
    except FedKSeedError as finding:
        raise SystemExit(f"finding: {finding}") from None
    for outcome, count in [*tally.accepted.most_common(), *tally.refused.most_common()]:
        print(f"{count:>12,}  {'accepted: ' if outcome in tally.accepted else ''}{outcome}")
    seconds = time.perf_counter() - begin
    print(
        f"{tally.inputs:,} inputs of seed {asked.seed} from {asked.start // BLOCK * BLOCK:,} on, "
        f"{tally.accepted.total():,} accepted, no finding; {seconds:,.0f} s, {tally.inputs / seconds:,.0f} a second"
    )


if __name__ == "__main__":
    main()
