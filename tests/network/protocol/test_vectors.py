"""The vectors of docs/session.md: made by our code to the byte, and by a slow reading of the document."""

import json
import math
from itertools import islice
from typing import Any

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from fedkseed import FedKSeedError
from fedkseed.local.zeroth_order import zeroth_order_steps
from fedkseed.network.https.task_files import Stub
from fedkseed.network.protocol.envelope import Reply, Task
from fedkseed.network.protocol.signatures import public_key, verify
from fedkseed.weights.adapter import Adapter

from . import reading
from . import vectors as made_anew
from .vectors import PATH

VECTORS = json.loads(PATH.read_text())
WIRE = json.loads(PATH.parents[2].joinpath("wire", "vectors.json").read_text())
ROUNDED = ("losses", "steps")  # parts with losses, which another processor may round otherwise in the last bit


def each(part: str, name: str = "name"):
    return pytest.mark.parametrize("vector", VECTORS[part], ids=lambda vector: str(vector.get(name, "")))


def real(x: float | str | None) -> float:
    return math.nan if x is None else float(x)


# --- by our code --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def anew() -> dict[str, Any]:
    return json.loads(made_anew.text())


@pytest.mark.parametrize("part", VECTORS)
def test_the_vectors_are_those_that_the_command_writes(part, anew):
    assert list(anew) == list(VECTORS)
    if part not in ROUNDED:
        assert VECTORS[part] == anew[part], "run `make vectors` and look at what has changed"
        return
    for ours, published in zip(anew[part], VECTORS[part], strict=True):
        assert close(ours, published), "run `make vectors` and look at what has changed"


def close(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) if isinstance(a, float) else a == b


@each("tasks")
def test_published_tasks_are_read_and_written(vector):
    task = Task.decode(bytes.fromhex(vector["bytes"]))
    assert made_anew.plain(task) == {name: vector[name] for name in made_anew.plain(task)}
    assert task.encode().hex() == vector["bytes"]


@each("replies", "code")
def test_published_replies_are_read_and_written(vector):
    reply = Reply.decode(bytes.fromhex(vector["bytes"]))
    assert (reply.status, reply.message.hex(), reply.text) == (vector["status"], vector["upload"], vector["code"])
    assert reply.encode().hex() == vector["bytes"]


@each("stubs")
def test_published_stubs_are_whole_tasks(vector):
    files = {bytes.fromhex(name): bytes.fromhex(data) for name, data in vector["files"].items()}
    found = Stub.decode(bytes.fromhex(vector["bytes"]))
    assert found.task(files.__getitem__).hex() == vector["task"]
    with pytest.raises(FedKSeedError, match="other bytes came under that name"):
        found.task(lambda name: files[name] + b"\0")


@each("statements")
def test_published_signatures_verify_and_others_do_not(vector):
    line = next(row["line"] for row in VECTORS["keys"] if row["name"] == vector["key"])
    statement, signature = bytes.fromhex(vector["statement"]), bytes.fromhex(vector["signature"])
    assert verify(public_key(line.encode(), "the vectors"), statement, signature) is vector["verifies"]


class Replayed:
    """Weights whose losses are given: what a step makes of them is our code's."""

    def __init__(self, vector: dict[str, Any]) -> None:
        self.c, self.moves = np.array(vector["before"], np.float32), list[list[float]]()
        self.pairs = iter([[real(x) for x in pair] for pair in vector["losses"]])

    def both(self, direction, eps, loss):
        return next(self.pairs)

    def move(self, direction, step):
        self.moves.append([direction, float(np.float32(step))])
        self.c[direction] += np.float32(step)

    def settle(self):
        pass


@each("steps")
def test_published_losses_give_the_published_scalars_moves_and_loss(vector):
    weights: Any = Replayed(vector)
    directions = np.array(vector["directions"], np.uint32)
    settings = {name: vector[name] for name in ("lr", "eps", "probes", "wire")} | {"clip": real(vector["clip"])}
    done = zeroth_order_steps(weights, lambda batch: 0.0, range(len(directions)), directions, **settings)
    np.testing.assert_array_equal(done.scalars, [real(x) for x in vector["scalars"]])
    assert weights.moves == vector["moves"]
    assert weights.c.tolist() == vector["after"]
    np.testing.assert_equal(done.loss, real(vector["loss"]))
    assert "skipped" not in vector["name"] or done.skipped == 2


def test_a_published_adapter_is_read(tmp_path):
    for vector in VECTORS["adapters"]:
        (tmp_path / "a.safetensors").write_bytes(bytes.fromhex(vector["bytes"]))
        found = Adapter.load(tmp_path / "a.safetensors")
        assert (f"{found.pool.key:016x}", found.coefficients.tolist()) == (vector["key"], vector["coefficients"])
        assert found.provenance == vector["provenance"]


# --- by the document ----------------------------------------------------------------------------


@each("generators", "entropy")
def test_the_document_has_all_of_the_generator(vector):
    entropy = [int(text) for text in vector["entropy"]]
    assert [f"{word:016x}" for word in reading.seed_of(entropy)] == vector["seed"]
    generator = reading.Generator(*entropy)
    assert [f"{generator.word():016x}" for _ in range(4)] == vector["words"]
    generator = reading.Generator(*entropy)
    assert [generator.double() for _ in range(3)] == vector["doubles"]
    one = reading.Generator(*entropy)
    mixed = [one.permutation(6), one.double(), one.permutation(37), one.double()]
    assert mixed == vector["permutation, double, permutation, double"]


def test_the_document_has_all_draws():
    draws = VECTORS["draws"]
    for of in draws["keys"]:
        assert f"{reading.Generator(of['seed'], 1).word():016x}" == of["key"]
    for of in draws["batches"]:
        generator = reading.Generator(of["seed"], 5, of["round"], of["client"])
        found = reading.batches_of(generator, of["examples"], of["batch_size"])
        assert list(islice(found, 6)) == of["batches"]
    for of in draws["cohorts"]:
        turns = of["draw"] == "in turns"
        assert reading.cohort_of(of["seed"], of["round"], of["count"], of["cohort"], turns) == of["clients"]
    of = draws["shared"]
    drawn = reading.directions_of(int(of["key"], 16), of["round"], (1 << 32) - 1, len(of["directions"]), of["size"])
    assert drawn == of["directions"]


def test_the_document_has_the_draws_of_the_wire():
    for v in WIRE["draws"]:
        p = None if v["probabilities"] is None else np.array(v["probabilities"], np.float32)
        count = len(v["directions"])
        found = reading.directions_of(int(v["key"], 16), v["round"], v["client"], count, v["size"], p)
        assert found == v["directions"]


def test_the_document_has_the_scalars_of_the_wire():
    for v in WIRE["scalars"]:
        np.testing.assert_equal(reading.scalar_of(real(v["found"]), real(v["clip"]), v["wire"]), real(v["sent"]))


def test_the_document_has_the_learning_rates():
    for v in VECTORS["rates"]:
        assert reading.rate_of(v["schedule"], v["lr"], v["round"], v["rounds"]) == pytest.approx(v["value"], rel=1e-12)


@each("tasks")
def test_the_document_has_all_of_a_task(vector):
    task = reading.task_of(bytes.fromhex(vector["bytes"]))
    assert (task["magic"], task["version"], task["number"]) == (b"FKSt", 3, 128 * vector["keep"])
    for name in ("digest", "recipe", "certificate", "nonce", "links", "head", "stem", "message", "signature"):
        assert task[name].hex() == vector[name]
    assert [task["client"], task["seconds"], str(task["issued"])] == [
        vector[name] for name in ("client", "seconds", "issued")
    ]


@each("stubs")
def test_the_document_makes_a_task_of_a_stub(vector):
    files = {bytes.fromhex(name): bytes.fromhex(data) for name, data in vector["files"].items()}
    assert reading.whole_task(bytes.fromhex(vector["bytes"]), files).hex() == vector["task"]


@each("keys")
def test_the_document_has_fingerprints_of_91_bytes(vector):
    assert len(vector["public"]) == 2 * 91
    assert reading.sha256(bytes.fromhex(vector["public"])).hex() == vector["fingerprint"]


@each("audiences")
def test_the_document_has_audiences(vector):
    assert reading.audience(bytes.fromhex(vector["authority"]), vector["name"]).hex() == vector["bytes"]


def test_the_document_has_the_statements():
    keys = {row["name"]: bytes.fromhex(row["fingerprint"]) for row in VECTORS["keys"]}
    rows = {row["name"]: row["statement"] for row in VECTORS["statements"]}
    data = bytes.fromhex(VECTORS["tasks"][0]["bytes"])
    messages = {row["name"]: bytes.fromhex(row["bytes"]) for row in WIRE["messages"]}
    task = reading.task_of(data) | {"head": bytes(32)}
    broadcast, upload = messages["broadcast, exact"], messages["upload, exact"]
    there = bytes.fromhex(VECTORS["audiences"][0]["bytes"])
    made = {
        "connection": reading.CONNECTION + there + bytes(range(32)) + keys["client 0"],
        "task": reading.task_statement(there, data, keys["client 0"]),
        "answer": reading.answer_statement(there, task, broadcast, upload),
        "answer with a lack": reading.answer_statement(there, task, messages["delta"], messages["lack"]),
        "answer of a kept model": reading.answer_statement(there, task, broadcast, b""),
    }
    assert made == {name: bytes.fromhex(rows[name]) for name in made}


@each("statements")
def test_signatures_are_those_of_another_library_call(vector):
    """Of DER and the public key alone, without our code."""
    der = next(row["public"] for row in VECTORS["keys"] if row["name"] == vector["key"])
    key = serialization.load_der_public_key(bytes.fromhex(der))
    assert isinstance(key, ec.EllipticCurvePublicKey)
    signature = bytes.fromhex(vector["signature"])
    r, s = (int.from_bytes(half, "big") for half in (signature[:32], signature[32:]))
    try:
        key.verify(encode_dss_signature(r, s), bytes.fromhex(vector["statement"]), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        assert not vector["verifies"]
    else:
        assert vector["verifies"]


def test_the_document_has_the_log():
    head = None
    for row in VECTORS["log"]:
        receipts = b"".join(
            int(client).to_bytes(4, "little") + b"".join(reading.sha256(bytes.fromhex(part)) for part in both)
            for client, both in sorted(row["receipts"].items(), key=lambda one: int(one[0]))
        )
        parts = bytes.fromhex(row["state"]), (row["report"] or "").encode(), receipts
        stem = reading.sha256(*map(reading.sha256, parts))
        link = reading.sha256(stem, reading.sha256(bytes.fromhex(row["broadcast"])))
        head = reading.head_of(head, link)
        assert (stem.hex(), link.hex(), head.hex()) == (row["stem"], row["link"], row["head"])


def test_the_document_follows_the_logs_that_our_client_follows():
    rows = {row["name"]: row for row in VECTORS["received"]}

    def task(name: str) -> dict[str, Any]:
        return reading.task_of(bytes.fromhex(rows[name]["bytes"]))

    assert reading.follow(task("links of a run that is not known are missing"), (-1, None)) is None
    with pytest.raises(ValueError, match="another log"):
        reading.follow(task("a head that does not follow"), (-1, None))
    known = reading.follow(task("followed, and the recipe is not there"), (-1, None))
    assert known is not None
    known = reading.follow(task("two rounds later"), known)
    assert known is not None
    assert known[0] == 2
    with pytest.raises(ValueError, match="gone back"):
        reading.follow(task("a round back"), known)
    with pytest.raises(ValueError, match="another log"):
        reading.follow(task("a round that was changed"), known)
    assert reading.follow(task("links between are missing"), known) is None


@pytest.mark.parametrize("template", sorted({vector["template"] for vector in VECTORS["prompts"]}))
def test_the_document_has_the_prompts(template):
    for vector in VECTORS["prompts"]:
        if vector["template"] != template:
            continue
        pieces = reading.pieces_of(template, vector["separator"], vector["row"])
        assert pieces == [(piece["prompt"], piece["response"], piece["ended"]) for piece in vector["pieces"]]
        tokens, counted = list[int](), list[list[int]]()
        for k, (prompt, response, ended) in enumerate(pieces):
            if not k and (template != "chat" or vector["row"]["plain"]):
                tokens.append(256)
            tokens += of_bytes(prompt)
            start = len(tokens)
            tokens += of_bytes(response) + [257] * ended
            counted.append([start, len(tokens)])
        assert (tokens, counted) == (vector["tokens"], vector["counted"])


def test_the_document_has_blocks_of_plain_texts_and_cut_examples():
    blocks, *cuts = VECTORS["lengths"]
    texts = [(row["category"], of_bytes(row["text"])) for row in blocks["texts"]]
    assert reading.packed(texts, blocks["max_tokens"], [256], 257) == blocks["blocks"]
    assert blocks["prompts"] == [1] * len(blocks["blocks"])
    for of in cuts:
        prompt = [256, *of_bytes(of["row"]["instruction"])]
        whole = [*prompt, *of_bytes(of["row"]["response"]), 257]
        assert of["tokens"] == whole[: of["max_tokens"]]
        assert of["left out"] == (len(of["tokens"]) <= len(prompt))
    assert [of["left out"] for of in cuts] == [False, True]


def of_bytes(text: str) -> list[int]:
    """The tokens of the vectors: bytes, but for two special texts."""
    parts = text.replace("<|im_start|>", "\0\1").replace("<|im_end|>", "\0\2").split("\0")
    found = list(parts[0].encode())
    for part in parts[1:]:
        found += [{"\1": 258, "\2": 257}[part[0]], *part[1:].encode()]
    return found


@each("losses")
def test_the_document_has_the_loss(vector):
    assert reading.loss_of(np.array(vector["logits"]), vector["rows"]) == pytest.approx(vector["loss"], rel=1e-6)


@each("steps")
def test_the_document_has_the_step(vector):
    settings = {name: vector[name] for name in ("lr", "eps", "probes", "wire")} | {"clip": real(vector["clip"])}
    pairs = [(real(a), real(b)) for a, b in vector["losses"]]
    before = np.array(vector["before"], np.float32)
    scalars, moves, after, loss = reading.steps_of(pairs, vector["directions"], before, **settings)
    np.testing.assert_array_equal(scalars, [real(x) for x in vector["scalars"]])
    assert [[j, float(step)] for j, step in moves] == vector["moves"]
    assert after.tolist() == vector["after"]
    np.testing.assert_equal(loss, real(vector["loss"]))


def test_the_document_has_layout_and_digest():
    for vector in VECTORS["layouts"]:
        first = {alias: min(names) for names in vector["tied"] for alias in names}
        tensors = {
            first.get(p["name"], p["name"]): (p["type"], p["shape"], bytes.fromhex(p["bits"]))
            for p in vector["parameters"]
            if 0 not in p["shape"]
        }
        assert sorted(tensors) == [entry["name"] for entry in vector["layout"]]
        assert [entry["number"] for entry in vector["layout"]] == list(range(len(tensors)))
        assert reading.digest_of([(name, *of) for name, of in tensors.items()]) == vector["digest"]


@each("blocks", "type")
def test_the_document_has_the_weights_of_quantised_blocks(vector):
    found = reading.weights_of(vector["type"], bytes.fromhex(vector["blocks"]))
    assert found.tobytes().hex() == vector["float32"]
    if "numbers" in vector:  # a type that models are quantised to
        assert found.astype(np.float16).tobytes().hex() == vector["float16"]
        assert reading.blocks_of(vector["type"], vector["numbers"]).hex() == vector["blocks"]


def test_the_document_has_names_and_rows_of_a_gguf_file():
    of = VECTORS["gguf"]
    assert {name: reading.name_in_model(name) for name in of["names"]} == of["names"]
    assert len(of["names"]) == 3 + 2 * 9
    for name, heads in (("attn_q", of["heads"]), ("attn_k", of["pairs"])):
        assert reading.rows_in_file(heads, of["head size"]) == of["rows"][name]


def test_the_document_has_the_adapter():
    for vector in VECTORS["adapters"]:
        about, c = reading.adapter_of(bytes.fromhex(vector["bytes"]))
        assert c.tolist() == vector["coefficients"]
        pool = {"key": int(vector["key"], 16), "size": vector["size"], "family": vector["family"]}
        assert (about["format"], about["pool"]) == (1, pool)
        assert all(about[name] == vector[name] for name in ("base", "tuned", "patterns", "provenance"))
