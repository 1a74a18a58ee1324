"""The test vectors of docs/session.md, src/fedkseed/network/protocol/vectors.json. `make vectors` prints them anew.

Floats are decimal numbers that are exact in their type; null is NaN, or no ρ. Bytes are hexadecimal.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, get_gguf_hf_weights_map

from fedkseed import Pool, encode
from fedkseed.data.batches import Encoded, collate, endless_batches
from fedkseed.data.layouts import Example, Turn
from fedkseed.data.wording import Wording, cut, packed
from fedkseed.directions.numba_cpu.gguf import LAYOUTS
from fedkseed.local.schedules import SCHEDULES, scheduled
from fedkseed.local.zeroth_order import zeroth_order_steps
from fedkseed.models.loss import graph_loss
from fedkseed.models.quantised import QUANTISABLE, row_order, widened
from fedkseed.network.https.task_files import Stub
from fedkseed.network.protocol.client.recipe_consent import Owner
from fedkseed.network.protocol.client.task_handler import TaskHandler
from fedkseed.network.protocol.client.training_client import load_client
from fedkseed.network.protocol.envelope import Reply, Status, Task, recipe_digest
from fedkseed.network.protocol.run_history import RunHistory
from fedkseed.network.protocol.signatures import (
    ClientSigning,
    audience,
    client_statement,
    fingerprint,
    task_statement,
    upload_statement,
)
from fedkseed.randomness import EVERYONE, Purpose, draw_directions, generator, pool_key
from fedkseed.run import digest_chain as chain
from fedkseed.run.cohort import EACH_ROUND, IN_TURNS, cohort
from fedkseed.weights.adapter import Adapter
from fedkseed.weights.in_memory import Materialized
from fedkseed.weights.layout import Layout
from tests.wire.fuzz import specimens

from ...encoding import encode_all
from ...wire.vectors import in_lines, number

PATH = Path(str(files("fedkseed.network.protocol") / "vectors.json"))
NONCE, EPOCH = bytes(range(16)), 1_795_000_000_000_000_000
HASH = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)  # so that the vectors are the same each time
PRIVATE = {"authority": 11, "server": 12, "client 0": 13, "client 1": 14, "another authority": 15}
KEYS = {name: ec.derive_private_key(number, ec.SECP256R1()) for name, number in PRIVATE.items()}
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256: r ‖ n − s signs the same
NAMES = ("fl.example.org", "2001:db8::7", "")  # by which a server is dialled; over Flower by none
RECIPE = b"""seed = 3
[model]
name = "a model"
[clients]
split = "files"
count = 2
cohort = 2
[training]
batch_size = 4
"""
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def vectors() -> dict[str, Any]:
    return {
        "generators": generators(),
        "draws": draws(),
        "rates": [
            {"schedule": s, "lr": 3e-7, "rounds": 7, "round": r, "value": scheduled(3e-7, s, r, 7)}
            for s in SCHEDULES
            for r in (0, 3, 6, 7)
        ],
        "keys": [key(name) for name in KEYS],
        "audiences": [
            {"authority": print_of("authority").hex(), "name": n, "bytes": audience_of(n).hex()} for n in NAMES
        ],
        "statements": statements(),
        "certificates": [{"name": name, "bytes": of.hex()} for name, of in certificates().items()],
        "tasks": [
            {"name": name, **plain(task), "bytes": task.encode().hex()}
            for name, task in {"first": first(), "later": later(), "kept model": replace(later(), keep=True)}.items()
        ],
        "received": received(),
        "replies": replies(),
        "stubs": [stub(name, task) for name, task in {"first": first(), "later": later()}.items()],
        "log": log(),
        "prompts": list(prompts()),
        "lengths": lengths(),
        "losses": [loss(*case) for case in LOSSES],
        "steps": [step(**case) for case in STEPS],
        "layouts": [layout(["*"]), layout(["layers.*", "z.*"])],
        "blocks": list(blocks()),
        "gguf": gguf_of_a_llama(),
        "adapters": [adapter()],
    }


# --- draws --------------------------------------------------------------------------------------


def generators() -> list[dict[str, Any]]:
    entropies = [[3, 1], [3, 4, 0], [(1 << 63) - 1, 5, 2, 7], [(1 << 64) - 1, 6, 9, EVERYONE], [1 << 32], [0, 0, 0]]
    made = []
    for entropy in entropies:
        seed = np.random.SeedSequence(entropy)
        new = partial(np.random.Generator, np.random.PCG64(seed))
        words = np.random.PCG64(seed).random_raw(4)
        one = new()
        mixed = [one.permutation(6).tolist(), one.random(), one.permutation(37).tolist(), one.random()]
        found = {"seed": seed.generate_state(4, np.uint64), "words": words}
        made.append({"entropy": [str(e) for e in entropy]} | {k: [f"{w:016x}" for w in v] for k, v in found.items()})
        doubles = np.random.Generator(np.random.PCG64(seed)).random(3).tolist()
        made[-1] |= {"doubles": doubles, "permutation, double, permutation, double": mixed}
    return made


def draws() -> dict[str, Any]:
    def batches(seed: int, round_: int, client: int, count: int, size: int) -> dict[str, Any]:
        examples = [Encoded((k, 0), 1, Example("", "")) for k in range(count)]
        endless = endless_batches(examples, size, 0, generator(seed, Purpose.BATCHES, round_, client))
        drawn = [[e.tokens[0] for e in batch.examples] for batch in islice(endless, 6)]
        named = {"seed": seed, "round": round_, "client": client, "examples": count, "batch_size": size}
        return named | {"batches": drawn}

    rounds = [
        {"seed": 3, "round": r, "count": 11, "cohort": 4, "draw": d} for d in (EACH_ROUND, IN_TURNS) for r in (0, 2, 5)
    ]
    return {
        "keys": [{"seed": seed, "key": f"{pool_key(seed):016x}"} for seed in (0, 3, 1 << 33)],
        "batches": [batches(3, 0, 1, 5, 2), batches(3, 4, 0, 3, 8), batches(1 << 33, 2, 7, 1, 1)],
        "cohorts": [
            of | {"clients": cohort(of["seed"], of["round"], of["count"], of["cohort"], of["draw"])} for of in rounds
        ],
        "shared": {
            "key": f"{pool_key(3):016x}", "round": 5, "size": 64,
            "directions": draw_directions(pool_key(3), 5, EVERYONE, 8, 64, None).tolist(),
        },
    }  # fmt: skip


# --- keys and tasks -----------------------------------------------------------------------------


def key(name: str) -> dict[str, str]:
    public, form = KEYS[name].public_key(), serialization.PublicFormat
    der = public.public_bytes(serialization.Encoding.DER, form.SubjectPublicKeyInfo)
    line = public.public_bytes(serialization.Encoding.OpenSSH, form.OpenSSH).decode()
    private = f"{PRIVATE[name]:064x}"
    return {"name": name, "private": private, "public": der.hex(), "line": line, "fingerprint": print_of(name).hex()}


def print_of(name: str) -> bytes:
    return fingerprint(KEYS[name].public_key())


def audience_of(name: str = "") -> bytes:
    return audience(x509.load_der_x509_certificate(certificates()["authority"]), name)


def signed(name: str, statement: bytes) -> bytes:
    r, s = decode_dss_signature(KEYS[name].sign(statement, HASH))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def statements() -> list[dict[str, Any]]:
    upload, broadcast = encode(specimens()["upload, exact"]), encode(specimens()["broadcast, exact"])
    lack, delta = encode(specimens()["lack"]), encode(specimens()["delta"])
    there = audience_of(NAMES[0])
    made = {
        "connection": ("client 0", client_statement(there, bytes(range(32)), print_of("client 0"))),
        "task": ("server", task_statement(there, first(), print_of("client 0"))),
        "answer": ("client 0", upload_statement(there, NONCE, 0, bytes(32), broadcast, upload)),
        "answer with a lack": ("client 0", upload_statement(there, NONCE, 0, bytes(32), delta, lack)),
        "answer of a kept model": ("client 0", upload_statement(there, NONCE, 0, bytes(32), broadcast, b"")),
    }
    found: list[dict[str, Any]] = []
    for name, (of, text) in made.items():
        good = signed(of, text)
        other = good[:32] + (ORDER - int.from_bytes(good[32:], "big")).to_bytes(32, "big")
        cases = [
            ("", good, True),
            (", the other s", other, True),
            (", by another key", signed("client 1", text), False),
            (", of other bytes", signed(of, text + b"\0"), False),
            (", a bit flipped", good[:40] + bytes([good[40] ^ 1]) + good[41:], False),
            (", s before r", good[32:] + good[:32], False),
            (", none", bytes(64), False),
        ]
        for what, signature, right in cases:
            case = {"name": name + what, "key": of, "statement": text.hex(), "signature": signature.hex()}
            found.append(case | {"verifies": right})
    return found


def certificate(of: str, by: str, usage: bool = True, until: int = 2099) -> bytes:
    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    made = (
        x509.CertificateBuilder(named(by), named(of), KEYS[of].public_key(), 1)
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(until, 1, 1, tzinfo=UTC))
    )
    if usage:
        made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    signed_ = made.sign(KEYS[by], hashes.SHA256(), ecdsa_deterministic=True)
    return signed_.public_bytes(serialization.Encoding.DER)


def certificates() -> dict[str, bytes]:
    return {
        "authority": certificate("authority", "authority", usage=False),
        "server": certificate("server", "authority"),
        "server of another authority": certificate("server", "another authority"),
        "server without the usage of one": certificate("server", "authority", usage=False),
        "server until 2001": certificate("server", "authority", until=2001),
    }


def linked(count: int, other: int = -1) -> list[tuple[bytes, bytes]]:
    """Stem and broadcast of each state of a made-up run; `other`: that state is another."""
    c = specimens()["broadcast, exact"]
    return [(chain.digest(b"stem %d %d" % (r, r == other)), encode(replace(c, round=r))) for r in range(count)]


def asked(done: int, since: int = 0, issued: int = 0, other: int = -1, **more: Any) -> Task:
    """The task about the state after some rounds, with the log from `since` on, unsigned."""
    run, head, links = linked(done + 1, other), None, list[bytes]()
    for stem, broadcast in run:
        links.append(chain.link(stem, chain.digest(broadcast)))
        head = chain.head(head, links[-1])
    stem, broadcast = run[-1]
    values = {"client": 0, "seconds": 600.0, "digest": recipe_digest(RECIPE), "recipe": b"", "message": broadcast}
    about = {"nonce": NONCE, "issued": EPOCH + issued, "since": since, "links": b"".join(links[since:])}
    return Task(**{**values, **about, "head": head, "stem": stem, **more})


def sealed(task: Task, by: str = "server", to: str = "client 0", name: str = NAMES[0]) -> Task:
    return replace(task, signature=signed(by, task_statement(audience_of(name), task, print_of(to))))


def first() -> Task:
    return sealed(asked(0, recipe=RECIPE, certificate=certificates()["server"]))


def later() -> Task:
    return sealed(asked(2, since=1, issued=5))


def plain(task: Task) -> dict[str, Any]:
    values = {field.name: getattr(task, field.name) for field in fields(task)}
    values["issued"] = str(task.issued)  # beyond what JSON readers with doubles hold
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in values.items()}


def received() -> list[dict[str, Any]]:
    """Tasks to client 0, one after the other, and its replies without an answer; no two in a row have one reason."""
    proof, whole, new = certificates(), first().encode(), partial(replace, first())
    heads = {"recipe": RECIPE, "certificate": proof["server"]}

    def changed(at: int, to: bytes) -> bytes:
        return whole[:at] + to + whole[at + len(to) :]

    def with_recipe(old: bytes, other: bytes) -> bytes:
        """A task of another run, with a recipe that has one word changed."""
        text = RECIPE.replace(old, other)
        of = {
            "recipe": text,
            "digest": recipe_digest(text),
            "certificate": proof["server"],
            "nonce": recipe_digest(text),
        }
        return sealed(asked(0, issued=3, **of)).encode()

    cases: list[tuple[str, bytes]] = [
        ("another version", changed(4, b"\x02")),
        ("193 bytes", sealed(asked(0)).encode()[:193]),
        ("a sixth byte of 1", changed(5, b"\x01")),
        ("a recipe longer than the task", changed(30, b"\xff\xff\0\0")),
        ("no seconds", changed(10, bytes(4))),
        ("a recipe of another digest", changed(14, bytes(16))),
        ("not signed", new(signature=bytes(64)).encode()),
        ("no certificate yet", sealed(asked(0)).encode()),
        *(
            (f"certificate: {name}", sealed(replace(first(), certificate=one)).encode())
            for name, one in proof.items()
            if name != "server"
        ),
        ("signed by client 1", sealed(first(), by="client 1").encode()),
        ("meant for client 1", sealed(first(), to="client 1").encode()),
        ("for a server of another name", sealed(first(), name="fl.example.com").encode()),
        ("a bit of the broadcast flipped", new(message=first().message[:-1] + b"\0").encode()),
        ("a head that does not follow", sealed(asked(0, issued=1, head=bytes(32), **heads)).encode()),
        ("links of a run that is not known are missing", sealed(asked(2, since=1, issued=2, **heads)).encode()),
        ("split = 'even'", with_recipe(b'"files"', b'"even"')),
        ("batches of 1", with_recipe(b"batch_size = 4", b"batch_size = 1")),
        ("followed, and the recipe is not there", sealed(asked(0, issued=10)).encode()),
        ("the same again", sealed(asked(0, issued=10)).encode()),
        ("two rounds later", sealed(asked(2, since=1, issued=11)).encode()),
        ("another number", sealed(asked(2, since=1, issued=12, client=1)).encode()),
        ("another recipe", sealed(asked(2, since=1, issued=13, digest=bytes(16))).encode()),
        ("a round back", sealed(asked(1, issued=14)).encode()),
        ("a round that was changed", sealed(asked(3, issued=15, since=3, other=1)).encode()),
        ("links between are missing", sealed(asked(5, issued=16, since=5)).encode()),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rows.jsonl").write_text("")
        owner = Owner(str(Path(folder) / "rows.jsonl"))
        authority = x509.load_der_x509_certificate(proof["authority"])
        signing = ClientSigning(KEYS["client 0"], authority, RunHistory(Path(folder)), NAMES[0])
        worker = TaskHandler(partial(load_client, owner), signing, disclose=lambda code, text: str(code))
        replies_ = [(name, data, worker.reply(data)) for name, data in cases]
    return [
        {"name": name, "status": int(reply.status), "code": reply.text, "bytes": data.hex()}
        for name, data, reply in replies_
    ]


def replies() -> list[dict[str, Any]]:
    upload, there = encode(specimens()["upload, exact"]), audience_of(NAMES[0])
    signature = signed("client 0", upload_statement(there, NONCE, 0, first().head, first().message, upload))
    made = [
        Reply(Status.DONE, upload, signature=signature),
        Reply(Status.DONE, b"", signature=signature),
        Reply(Status.UNPREPARED),
        Reply(Status.REFUSED, text="policy"),
        Reply(Status.FAILED, text="error"),
    ]
    return [
        {"status": int(one.status), "upload": one.message.hex(), "code": one.text, "bytes": one.encode().hex()}
        for one in made
    ]


def stub(name: str, task: Task) -> dict[str, Any]:
    found, named = Stub.of(bytes(range(100, 116)), task.encode())
    return {
        "name": name, "key": found.key.hex(), "bytes": found.encode().hex(), "task": task.encode().hex(),
        "files": {digest.hex(): data.hex() for digest, data in named.items()},
    }  # fmt: skip


def log() -> list[dict[str, Any]]:
    """States of a run, each with its stem from all its parts, link and head."""
    made, head = list[dict[str, Any]](), None
    for r, (_, broadcast) in enumerate(linked(3)):
        upload = encode(replace(specimens()["upload, exact"], round=r))
        receipts = {client: chain.Receipt(upload, bytes([client]) * 64) for client in (12, 3)[: 2 * r]}
        state, report = b"state %d" % r, None if not r else json.dumps({"round": r - 1})
        parts = chain.parts(state, report, receipts, chain.digest(broadcast))
        head = chain.head(head, chain.link_of(parts))
        answered = {str(client): [one.upload.hex(), one.signature.hex()] for client, one in receipts.items()}
        row = {"state": state.hex(), "report": report, "receipts": answered, "broadcast": broadcast.hex()}
        made.append(row | {"stem": chain.stem(parts).hex(), "link": chain.link_of(parts).hex(), "head": head.hex()})
    return made


# --- texts --------------------------------------------------------------------------------------

BEGIN, END, SAID = 256, 257, 258


def tokenizer() -> Any:
    """A tokenizer of bytes: a token is a byte of UTF-8; 256 begins a text, 257 ends one, 258 is `<|im_start|>`."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {char: byte for byte, char in bytes_to_unicode().items()}
    special = {"<s>": BEGIN, "<|im_end|>": END, "<|im_start|>": SAID}
    made = Tokenizer(models.BPE(vocab=vocabulary | special, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_special_tokens(list(special))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=CHATML
    )


EXAMPLES = [
    Example("Name a colour.", "Blue."),
    Example("Übersetze ins Englische.", "No.\n", "Nein."),
    Example(
        "And Spain?", "Madrid.",
        turns=(
            Turn("system", "Be brief."), Turn("user", "Hello."), Turn("user", "Capital of France?"),
            Turn("assistant", " Paris."), Turn("tool", "42"), Turn("user", "And Spain?"),
        ),
    ),
    Example("", "A text.", plain=True),
]  # fmt: skip


PIECE = "prompt", "response", "ended"


def prompts() -> Iterator[dict[str, Any]]:
    bytes_ = tokenizer()
    for template in ("paper", "alpaca", "official-dolly", "official-ni", "plain", "chat"):
        for separator in ("\n", ""):
            if template == "chat" and not separator:
                continue
            wording = Wording(template, separator)
            for example, encoded in zip(EXAMPLES, encode_all(EXAMPLES, bytes_, wording), strict=True):
                pieces = [dict(zip(PIECE, piece, strict=False)) for piece in wording.exchanges(example, bytes_)]
                row = {"instruction": example.instruction, "context": example.context, "response": example.response}
                row |= {
                    "turns": [{"role": turn.role, "text": turn.text} for turn in example.turns],
                    "plain": example.plain,
                }
                more = {"chat_template": CHATML} if template == "chat" else {}
                named = {"template": template, "separator": separator, **more, "row": row, "pieces": pieces}
                yield named | {"tokens": encoded.tokens, "counted": encoded.counted}


TEXTS = [("One, two.", "a"), ("Größe", "b"), ("three four five", "a"), ("", "c")]


def lengths() -> list[dict[str, Any]]:
    """Plain texts in blocks, and an example that is cut as the protocol of the official code does."""
    of, wording = tokenizer(), Wording("plain", "")
    texts = [Example("", text, category=category, plain=True) for text, category in TEXTS]
    blocks_ = packed(encode_all(texts, of, wording), 12, of)
    shared = {"max_tokens": 12, "texts": [{"text": text, "category": category} for text, category in TEXTS]}
    found = [shared | {"blocks": [list(block.tokens) for block in blocks_], "prompts": [b.prompt for b in blocks_]}]
    for limit in (20, 15):
        one = cut(encode_all(EXAMPLES[:1], of, wording)[0], limit)
        row = {"instruction": EXAMPLES[0].instruction, "context": "", "response": EXAMPLES[0].response}
        more = {"tokens": list(one.tokens), "counted": one.counted, "left out": one.prompt >= limit}
        found.append({"max_tokens": limit, "protocol": "official-code", "row": row} | more)
    return found


# --- loss and steps -----------------------------------------------------------------------------

# Lengths of rows, and the spans that are counted: a token at 0 is not, although a label is there.
LOSSES: list[tuple[str, list[tuple[int, list[tuple[int, int]]]]]] = [
    ("one row", [(4, [(2, 4)])]),
    ("padding", [(6, [(3, 6)]), (3, [(1, 3)]), (5, [(4, 5)])]),
    ("an earlier answer, and no prompt", [(7, [(1, 3), (5, 7)]), (3, [(0, 3)])]),
]


class Given(nn.Module):
    """A model with given logits."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits, requires_grad=False)

    def forward(self, input_ids: Any, attention_mask: Any, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.logits)


def loss(name: str, rows: Sequence[tuple[int, list[tuple[int, int]]]]) -> dict[str, Any]:
    rng, size, width = np.random.default_rng(len(rows)), 5, max(length for length, _ in rows)
    logits = np.round(rng.normal(size=(len(rows), width, size)) * 64) / 16  # exact decimals
    encoded = [
        Encoded(tuple(rng.integers(0, size, length).tolist()), spans[-1][0], Example("", ""), tuple(spans[:-1]))
        for length, spans in rows
    ]
    found = float(graph_loss(Given(torch.tensor(logits, dtype=torch.float32)), collate(encoded, 0)))
    made = [{"tokens": list(one.tokens), "counted": one.counted} for one in encoded]
    return {"name": name, "rows": made, "logits": logits.tolist(), "loss": found}


NAN, INF = float("nan"), float("inf")
STEPS: list[dict[str, Any]] = [
    {"name": "one probe", "wire": "exact", "clip": INF, "probes": 1, "factors": [1.0, 300.0, 0.0]},
    {"name": "two probes, clipped, skipped", "wire": "compact", "clip": 0.3, "probes": 2, "factors": [90.0, NAN, 3.0]},
    {"name": "infinite losses", "wire": "exact", "clip": 100.0, "probes": 1, "factors": [INF, 2.0]},
    {"name": "signs", "wire": "sign", "clip": 1000.0, "probes": 3, "factors": [5.0, 0.0, -5.0]},
    {"name": "nothing found", "wire": "compact", "clip": 1000.0, "probes": 1, "factors": [NAN, NAN]},
]


class Noting(Materialized):
    """Weights that note the losses at both points and the moves."""

    def both(self, direction: int, eps: float, loss: Any) -> tuple[Any, Any]:
        self.losses = [*getattr(self, "losses", []), found := super().both(direction, eps, loss)]
        return found

    def move(self, direction: int, step: float) -> None:
        self.moves = [*getattr(self, "moves", []), [direction, float(np.float32(step))]]
        super().move(direction, step)


def step(name: str, wire: str, clip: float, probes: int, factors: list[float]) -> dict[str, Any]:
    """Steps down a factor, one for each batch, times a square distance in eight weights along four directions."""
    model, clip = nn.Linear(8, 1, bias=False), float(np.float32(clip))
    model.requires_grad_(False).weight.zero_()
    weights, before = Noting(Layout(model), Pool(7, 4, "hadamard")), np.array([0.5, -0.25, 1.0, 0.0], np.float32)
    weights.load(before)
    target, directions = torch.arange(8) / 8, np.array([2, 0, 3, 3, 1, 2, 2, 0, 1], np.uint32)[: probes * len(factors)]
    lr, eps = 0.02, 1e-3
    done = zeroth_order_steps(
        weights,
        lambda factor: float(factor * (model.weight - target).square().sum()),
        factors,
        directions,
        lr=lr, eps=eps, probes=probes, clip=clip, wire=wire,
    )  # fmt: skip
    return {
        "name": name, "lr": lr, "eps": eps, "probes": probes, "clip": number(clip), "wire": wire,
        "directions": directions.tolist(), "before": before.tolist(),
        "losses": [[number(x) for x in pair] for pair in weights.losses],
        "scalars": [number(x) for x in done.scalars.tolist()], "moves": getattr(weights, "moves", []),
        "after": weights.c.tolist(), "loss": number(done.loss),
    }  # fmt: skip


# --- tensors ------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of several types and names; two are tied, one is empty, one is a buffer."""

    def __init__(self) -> None:
        super().__init__()

        def holder(shape: tuple[int, ...], dtype: torch.dtype, first: int) -> nn.Module:
            made = nn.Module()
            count = int(np.prod(shape))
            made.weight = nn.Parameter((torch.arange(count) + first).to(dtype).view(shape) / 8, requires_grad=False)
            return made

        self.a, self.B = holder((3,), torch.float32, -2), holder((2, 3), torch.bfloat16, 5)
        self.layers = nn.ModuleDict({"10": holder((1, 2), torch.float16, 1), "2": holder((2, 1), torch.float16, -1)})
        self.one, self.none = holder((), torch.float32, 9), holder((0, 4), torch.float32, 0)
        self.z = nn.Module()
        self.z.weight = self.B.weight
        self.register_buffer("kept", torch.ones(2))


def layout(tuned: list[str]) -> dict[str, Any]:
    model = Odd()
    found = Layout(model, tuned)
    named = [
        {"name": name, "type": str(p.dtype).removeprefix("torch."), "shape": list(p.shape), "bits": bits(p)}
        for name, p in model.named_parameters(remove_duplicate=False)
    ]
    entries = [{"number": e.number, "name": e.name, "tuned": e.tuned} for e in found.entries]
    same = {"tuned": tuned, "parameters": named, "tied": [["B.weight", "z.weight"]], "layout": entries}
    return same | {"digest": found.digest().hex()}


def bits(tensor: torch.Tensor) -> str:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()


def blocks() -> Iterator[dict[str, Any]]:
    numbers = ((np.arange(64) * 37 % 64 - 20) / 16).astype(np.float32).reshape(2, 32)
    for kind in QUANTISABLE:
        raw = gguf.quantize(numbers, gguf.GGMLQuantizationType[kind])
        whole = widened(torch.from_numpy(np.array(raw)).view(-1, raw.shape[1]), kind)
        types = {"float32": whole, "bfloat16": whole.bfloat16(), "float16": whole.half()}
        made = {"type": kind, "numbers": numbers.reshape(-1).tolist(), "blocks": raw.tobytes().hex()}
        yield made | {name: bits(value) for name, value in types.items()}
    for kind, layout in LAYOUTS.items():  # the library writes few of these: any bytes with finite scales are some
        if kind not in QUANTISABLE:
            raw = (np.arange(layout.size) * 89 + 17).astype(np.uint8)
            halves = np.array([0.011, -0.37][: 1 + layout.m], np.float16)
            raw[layout.d : layout.d + halves.nbytes] = halves.view(np.uint8)
            weights = gguf.dequantize(raw[None], gguf.GGMLQuantizationType[kind])
            yield {"type": kind, "blocks": raw.tobytes().hex(), "float32": weights.tobytes().hex()}


def gguf_of_a_llama() -> dict[str, Any]:
    config = LlamaConfig(
        vocab_size=8, hidden_size=48, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    processor = TENSOR_PROCESSORS["llama"](config=config.to_dict())
    names = get_gguf_hf_weights_map(LlamaForCausalLM(config), processor)
    rows = {}
    for name, count in (("attn_q", 48), ("attn_k", 24)):
        order = row_order(processor, f"blk.0.{name}.weight", count)
        rows[name] = [] if order is None else order.tolist()
    return {"heads": 4, "pairs": 2, "head size": 12, "names": dict(sorted(names.items())), "rows": rows}


def adapter() -> dict[str, Any]:
    provenance = {
        "model": "a/model", "dtype": "bfloat16", "template": "paper", "separator": "\n", "algorithm": "fedkseed",
        "rounds": 40, "seed": 3, "über": "ä\u2028",
    }  # fmt: skip
    pool, c = Pool((1 << 64) - 1, 8, "hadamard"), (np.arange(8) / 1024).astype(np.float32)
    made = Adapter(pool, c, "ab" * 32, None, ("*.weight", "layers.[0-3].*"), provenance)
    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder) / "adapter.safetensors")
        data = (Path(folder) / "adapter.safetensors").read_bytes()
    of = {"key": f"{pool.key:016x}", "size": pool.size, "family": pool.family, "coefficients": c.tolist()}
    more = {"base": made.base, "tuned": None, "patterns": list(made.patterns), "provenance": provenance}
    return {**of, **more, "bytes": data.hex()}


def text() -> str:
    return in_lines(vectors())


if __name__ == "__main__":
    PATH.write_text(text())
    print(f"wrote {PATH}")
