"""Inputs of the campaign for the readers of strangers' files and bodies: specimens of each kind, broken.

Two outcomes are correct: `FedKSeedError`, or that the file is read. Inputs follow from (seed, kind, block).
"""

import gzip
import io
import random
import re
import tarfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedkseed.data.natural_instructions import split_lists
from fedkseed.data.sources import Reader
from fedkseed.directions import Pool
from fedkseed.errors import FedKSeedError
from fedkseed.models.gguf_header import require_sane
from fedkseed.network.https.task_files import Stub
from fedkseed.network.peers.signed_upload import SignedUpload
from fedkseed.network.protocol.client.policy import load_policy
from fedkseed.network.protocol.client_gain import GainSum
from fedkseed.network.protocol.envelope import Reply, Status, Task, recipe_digest
from fedkseed.recipe.reading import load_recipe
from fedkseed.tuned.load import open_tuned
from fedkseed.weights.adapter import Adapter

from . import fuzz_http

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import datasets  # noqa: F401 - the reader of Parquet loads it, and memory is counted from here on

MEMORY = Path("/dev/shm")  # noqa: S108 - as in fuzz_basis.py
RECIPES = Path(__file__).parents[2] / "recipes"
WORDS = (b"[" * 99, b"a." * 40, b"9" * 5000, b'"', b"\n", b"\x1b[2J", b"\xff\xfe", b"\0", b"nan", b"-1", b"1e999",
         b"= [[", b"../", b"null", b"{", b"}", b"\xed\xa0\x80", b",", b";", b"'''")  # fmt: skip


def session() -> list[bytes]:
    recipe = (RECIPES / "dolly.toml").read_bytes()
    task = Task(3, 60.0, recipe_digest(recipe), recipe, b"message" * 9, certificate=b"c" * 40, links=bytes(64))
    replies = Reply(Status.DONE, b"answer"), *(Reply(status, text="why") for status in Status if status)
    parts = task, Task(0, 1.0, bytes(16), b"", b""), Stub.of(bytes(16), task.encode())[0], GainSum(12, -0.5), *replies
    return [*(part.encode() for part in parts), SignedUpload(3, bytes(32), b"upload", bytes(64)).encoded]


def table() -> list[bytes]:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    files = list[bytes]()
    for rows in ([{"instruction": f"q{k}", "response": "a" * 9, "n": k} for k in range(40)], [{"messages": turns}] * 9):
        for options in ({}, {"compression": "zstd"}, {"use_dictionary": False, "data_page_version": "2.0"}):
            pq.write_table(pa.Table.from_pylist(rows), out := io.BytesIO(), **options)
            files.append(out.getvalue())
    return files


def csv() -> list[bytes]:
    return [b"instruction,response\nq,a\n",
            b'sep=;\nx;question;answer\n1;"q\n2";a\n', b"Frage\tAntwort\r\n1?\t2\r\n3?\t4\r\n",
            "\ufeffFrage,Antwort\nä,ö\n".encode("utf-16")]  # fmt: skip


def archives() -> list[bytes]:
    with tarfile.open(fileobj=(out := io.BytesIO()), mode="w") as archive:
        for name in ("x/a", "x/splits/default/train_tasks.txt", "x/splits/default/test_tasks.txt"):
            entry = tarfile.TarInfo(name)
            entry.size, entry.pax_headers = 6, {"comment": "c"}
            archive.addfile(entry, io.BytesIO(b"task_" + name.rjust(16)[-13:-12].encode()))
    return [out.getvalue(), gzip.compress(out.getvalue(), 1)]


def model() -> list[bytes]:
    with TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(path := Path(folder) / "a.gguf", "llama")
        writer.add_block_count(1)
        writer.add_embedding_length(4)
        writer.add_vocab_size(2)
        writer.add_token_list(["a", "bc"])
        writer.add_tensor("token_embd.weight", np.zeros((2, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return [path.read_bytes()]


def adapters() -> list[bytes]:
    about = {"model": "m", "dtype": "float32", "template": "paper", "separator": "\n", "date": "2026-01-01"}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        made = list[bytes]()
        for changes in ({}, {"date": "x"}, {"template": "no"}, {"separator": "\x1b"}, {"storage": 3}, {"rounds": "#"}):
            adapter = Adapter(Pool(1, 8), np.ones(8, np.float32), "00", None, ("*",), about | changes)
            adapter.save(path)
            made.append(path.read_bytes())
        return made


def as_session(path: Path) -> None:
    data = path.read_bytes()
    for kind in (Task, GainSum, Stub, SignedUpload):
        with suppress(FedKSeedError):
            message: Any = kind.decode(data)
            if (message.encoded if kind is SignedUpload else message.encode()) != data:
                raise AssertionError(f"an accepted {kind.__name__} encodes to other bytes")
            return
    Reply.decode(data)


def as_rows(path: Path) -> None:
    Reader().file(str(path))


KINDS: dict[str, tuple[str, Callable[[], list[bytes]], Callable[[Path], Any]]] = {  # file's name, specimens, reader
    "session": ("body", session, as_session),
    "requests": ("body", fuzz_http.requests, fuzz_http.as_request),
    "answers": ("body", fuzz_http.answers, fuzz_http.as_answers),
    "recipes": ("a.toml", lambda: [path.read_bytes() for path in sorted(RECIPES.glob("[d-n]*.toml"))], load_recipe),
    "policies": ("a.toml", lambda: [(RECIPES / "policy.toml").read_bytes()], load_policy),
    "gguf": ("a.gguf", model, require_sane),
    "parquet": ("a.parquet", table, as_rows),
    "csv": ("a.csv", csv, as_rows),
    "archives": ("a.tar", archives, lambda path: split_lists(str(path))),
    "adapters": ("a.safetensors", adapters, open_tuned),
}


@cache
def specimens(kind: str) -> list[bytes]:
    return KINDS[kind][1]()


def made(kind: str, breaks: Any, inputs: int, seed: int, block: int) -> Iterator[bytes]:
    """The inputs of one block of a kind: some as they are, most broken in one place to four."""
    rng = random.Random(f"{kind}/{seed}/{block}")
    for _ in range(inputs):
        data = bytearray(rng.choice(specimens(kind)))
        for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 4))):
            if rng.random() < 0.25:
                at = rng.randrange(len(data) + 1)
                data[at : at + rng.choice((0, 0, 1, 8))] = rng.choice(WORDS)
            else:
                rng.choice(breaks)(rng, data)
        yield bytes(data)


def judge(kind: str, data: bytes) -> tuple[str, str]:
    """The kind of an input that is read and "", or "" and the words of the refusal; any other error is a finding."""
    with TemporaryDirectory(prefix="fedkseed-fuzz-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        path = Path(folder) / KINDS[kind][0]
        path.write_bytes(data)
        try:
            KINDS[kind][2](path)
        except FedKSeedError as error:
            return "", re.split(r"[0-9(,;:'\"]", str(error).replace(str(path), "FILE"))[0].strip()[:60]
    return kind, ""


def targets(breaks: Any, inputs: int) -> dict[str, Any]:
    """The kinds as targets of the campaign."""
    return {kind: (partial(made, kind, breaks, inputs), partial(judge, kind)) for kind in KINDS}
