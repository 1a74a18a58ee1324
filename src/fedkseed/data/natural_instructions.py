"""Super-NaturalInstructions: its tasks, its split lists, and the part of its data that the paper trains on.

Wang et al., 2022, https://arxiv.org/abs/2204.07705; Qin et al., 2024, Appendix C. docs/data.md lists the differences
between the paper and the official code of FedKSeed.
"""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Literal

from ..errors import FedKSeedError, first_line
from ..files import read_whole
from ..randomness import Purpose, generator
from .file_formats import parse, room_of
from .layouts import Example, text
from .text_encodings import decode

LISTS = ("splits/default/train_tasks.txt", "splits/default/test_tasks.txt")
TRAINING, TEST = 20, 2  # per cent of a task's examples
MAX_FILE = 1 << 28  # bytes of a task, as JSON or in a header of an archive: all of a task is in memory
MAX_ARCHIVE = 1 << 35  # bytes of an archive, unpacked: ten times the whole data set; an archive is read to its end
MAX_MEMBERS = 1 << 17  # files and folders in an archive, whose names are in memory; the data set has 1,800
LEAST = 20  # fewer examples than this are no client; the official code draws at least this many of a test task


@dataclass(frozen=True, slots=True)
class Subsample:
    """The examples of the tasks that remain after the protocol's draw, by the task's name, before tokenisation."""

    clients: dict[str, list[Example]]  # in the order of train_tasks.txt
    held_out: dict[str, list[Example]]  # in the order of test_tasks.txt
    too_small: list[str]  # training tasks with fewer than the least examples


def subsample(
    source: str,
    seed: int,
    held_out_seed: int | None = None,
    *,
    protocol: Literal["paper", "official-code"] = "paper",
    max_characters: int = 1024,
    least: int = LEAST,
) -> Subsample:
    """Draw 20 % of each training task and 2 % of each test task, rounded down.

    A task's draw depends on the seed and the task alone, not on which other tasks are there.

    Args:
        source: see `read`.
        held_out_seed: of the draw of test tasks; None: `seed`.
        protocol: `paper`: tasks that have at least `least` examples after the draw are clients.
            `official-code`: only inputs of fewer than `max_characters` count; tasks that have at least
            `least` of them before the draw are clients; of a test task at least 20 are drawn.

    Raises:
        FedKSeedError: see `read` and `split_lists`.
    """
    training, test = split_lists(source)
    official = protocol == "official-code"
    drawn = dict[str, list[Example]]()
    for name, examples in read(source, (*training, *test)):  # a task at a time: the whole data set is large
        examples = [e for e in examples if not official or len(e.context) < max_characters]
        of = seed if held_out_seed is None or name not in test else held_out_seed
        rng = generator(of, Purpose.SUBSAMPLE, int.from_bytes(sha256(name.encode()).digest()[:8]))
        order = rng.permutation(len(examples))
        if name in test:
            count = max(len(examples) * TEST // 100, LEAST if official else 0)
        else:
            count = len(examples) * TRAINING // 100
            if (len(examples) if official else count) < least:
                count = 0
        drawn[name] = [examples[i] for i in sorted(order[:count])]
    clients = {name: drawn[name] for name in training if drawn[name]}
    held_out = {name: drawn[name] for name in test}
    return Subsample(clients, held_out, too_small=[name for name in training if not drawn[name]])


def split_lists(source: str) -> tuple[list[str], list[str]]:
    """The names of the training and of the test tasks, from `splits/default`.

    Raises:
        FedKSeedError: a list is missing, empty or not text, or a task is in both.
    """
    lists = {file: decode(content, f"{source}, {file}").split() for file, content in _files(source, LISTS)}
    for file in LISTS:
        if not lists.get(file):
            raise FedKSeedError(
                f"{source}: {file} {'lists no task' if file in lists else 'is missing'}; "
                "Natural Instructions comes with lists of its training and test tasks, one name a line"
            )
    training, test = (list(dict.fromkeys(lists[name])) for name in LISTS)
    if twice := sorted({*training} & {*test}):
        raise FedKSeedError(f"{source}: {twice[0]} is both a training and a test task; remove it from one of the lists")
    return training, test


def read(source: str, names: Iterable[str]) -> Iterator[tuple[str, list[Example]]]:
    """The tasks with the given names, in the order in which the source holds them.

    Args:
        source: the folder of Natural Instructions, with `tasks` and `splits` in it, or a `.tar`,
            `.tar.gz` or `.tar.xz` of it. An archive is read from beginning to end and never unpacked.

    Raises:
        FedKSeedError: the source is missing or damaged, or a task is missing or broken.
    """
    wanted = {f"tasks/{name}.json": name for name in names}
    for file, content in _files(source, wanted):
        name = wanted.pop(file)
        yield name, _examples(name, content, f"{source}, {file}")
    if wanted:
        raise FedKSeedError(
            f"{source}: {min(wanted)} is missing, as are {len(wanted)} in all that splits/default lists; "
            "get the whole data set, or take their names from the lists"
        )


def _files(source: str, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """The name and content of each file of a folder or an archive whose path ends in a name, until all are there."""
    root, wanted = Path(source).expanduser(), set(names)
    try:
        if root.is_dir():
            for path in sorted((*root.glob("splits/default/*.txt"), *root.glob("tasks/*.json"))):
                if (name := path.relative_to(root).as_posix()) in wanted:
                    yield name, read_whole(path, MAX_FILE, str(path))
        elif root.is_file():
            with _unpacked(root) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
                for number, member in enumerate(archive):
                    parts, most = PurePosixPath(member.name).parts, stream.room - member.offset_data
                    ends = wanted & {"/".join(parts[-2:]), "/".join(parts[-3:])}
                    if ends:
                        most = min(most, MAX_FILE)
                    if number >= MAX_MEMBERS or not 0 <= member.size <= most:  # tarfile goes back, for ever, if < 0
                        raise FedKSeedError(
                            f"{root}: an archive has at most {MAX_MEMBERS:,} files of {stream.room:,} bytes in all, "
                            f"{MAX_FILE:,} in a task; file {number + 1}, {member.name[:80]!r}, claims {member.size:,}"
                        )
                    if not (member.isreg() or member.isdir()) or member.issparse() or {"..", "/"} & {*parts}:
                        raise FedKSeedError(
                            f"{root}: file {number + 1}, {member.name[:80]!r}, is a link, a device, sparse, or outside "
                            "of the archive's folder; take an archive of plain files and folders"
                        )
                    if ends and (file := archive.extractfile(member)):
                        wanted -= ends
                        yield ends.pop(), file.read()
                    if not wanted:
                        return
        else:
            raise FedKSeedError(
                f"no Natural Instructions at {root}; give the folder that holds tasks and splits, "
                "or a .tar, .tar.gz or .tar.xz of it"
            )
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error) as error:
        raise FedKSeedError(f"{root} can't be read: {first_line(error)}; get it again") from error


class _Limited(io.BufferedReader):
    """A stream of which no more than `MAX_FILE` bytes are read at once, and no more than `room` in all.

    A file in an archive, and also a header, may claim any size, and tarfile reads it whole.
    """

    room = MAX_ARCHIVE

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_FILE:
            raise FedKSeedError(f"a part of an archive has 0 to {MAX_FILE:,} bytes, one claims {size:,}")
        if self.tell() > self.room:
            raise FedKSeedError(f"an archive of this size unpacks to at most {self.room:,} bytes; get it again")
        return super().read(size)


def _unpacked(path: Path) -> _Limited:
    """The unpacked bytes of a `.tar`, `.tar.gz`, `.tar.bz2` or `.tar.xz`, as its first bytes say."""
    with path.open("rb") as file:
        start = file.read(6)
    openers = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
    opened = next((opener for magic, opener in openers.items() if start.startswith(magic)), open)
    limited = _Limited(opened(path, "rb"))
    limited.room = min(MAX_ARCHIVE, room_of(path)) if opened is not open else MAX_ARCHIVE
    return limited


def _examples(name: str, content: bytes, where: str) -> list[Example]:
    """A task's examples, with its first definition and their first outputs; an empty output is an empty answer."""
    table = parse(decode(content, where), where, "get the file again")
    if not isinstance(table, dict):
        raise FedKSeedError(f"{where}: expected a JSON object, got {type(table).__name__}")
    if missing := [key for key in ("Definition", "Instances") if not table.get(key)]:
        raise FedKSeedError(f"{where}: no {' and no '.join(missing)}; keys found: {', '.join(table) or 'none'}")
    definition, instances, examples = table["Definition"], table["Instances"], list[Example]()
    instruction = text(definition[0] if isinstance(definition, list) else definition, where, "Definition")
    if not isinstance(instances, list):
        raise FedKSeedError(f"{where}: Instances must be a list, got {type(instances).__name__}")
    for number, instance in enumerate(instances, 1):
        place = f"{where}, instance {number}"
        if not isinstance(instance, dict):
            raise FedKSeedError(f"{place}: expected a JSON object, got {type(instance).__name__}")
        outputs = instance.get("output")
        if not isinstance(outputs, list) or not outputs:
            raise FedKSeedError(f"{place}: output must be a list of one text or more, got {json.dumps(outputs)[:40]}")
        context = text(instance.get("input"), place, "input")
        examples.append(Example(instruction, text(outputs[0], place, "output"), context, name))
    return examples
