"""A client written from docs/session.md, docs/wire.md and docs/directions.md alone: NumPy, and nothing of fedkseed.

It takes part with two-point steps of its own forward pass of a Llama, in float64, along directions of the family
`hadamard`; whatever else a recipe asks for, it refuses.
"""

import json
import struct
import time
import tomllib
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.x509.oid import ExtendedKeyUsageOID
from numpy.typing import NDArray
from tokenizers import Tokenizer

from . import reading
from .reading import sha256

HEADER = struct.Struct("<4sBBBBIQI32s")
BROADCAST = struct.Struct("<ddfII")
WIRES = {0: "exact", 2: "compact", 4: "sign"}
Floats = NDArray[np.float32]


class Reply(Exception):  # noqa: N818 - no error: a reply without an answer
    """The end of a task without an answer."""

    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(code)
        self.data = b"FKSt\x03" + bytes([status]) + code.encode()


# --- directions.md ------------------------------------------------------------------------------


def philox(counter: list[Any], key: int) -> list[NDArray[np.uint64]]:
    x = [np.asarray(word, np.uint64) & np.uint64(0xFFFFFFFF) for word in counter]
    low, high, mask = key & 0xFFFFFFFF, key >> 32, np.uint64(0xFFFFFFFF)
    for i in range(10):
        k0, k1 = (np.uint64((k + i * by) & 0xFFFFFFFF) for k, by in ((low, 0x9E3779B9), (high, 0xBB67AE85)))
        a, b = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [b >> np.uint64(32) ^ x[1] ^ k0, b & mask, a >> np.uint64(32) ^ x[3] ^ k1, a & mask]
    return x


def signs(stream: int, tensor: int, count: int, key: int) -> Floats:
    """The sign of positions 0 … count − 1."""
    groups = -(-count // 4096)
    calls = np.arange(32 * groups)
    words = philox([calls, tensor + 0 * calls, 0 * calls, stream + 0 * calls], key)
    of = np.stack([word.reshape(groups, 1, 32) for word in words], 1)  # group, w, 1, l
    bits = of >> np.arange(32, dtype=np.uint64).reshape(1, 1, 32, 1) & np.uint64(1)  # group, w, t, l
    return (1 - 2 * bits.reshape(-1)[:count].astype(np.float32)).astype(np.float32)


def transformed(x: Floats) -> Floats:
    """Each row transformed, in stages h = 1, 2, 4, …"""
    h, (rows, size) = 1, x.shape
    while h < size:
        pairs = x.reshape(rows, size // (2 * h), 2, h)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(rows, size)
        h *= 2
    return x


class Weights:
    """w(c) of the tensors of a safetensors file."""

    def __init__(self, folder: Path, key: int, size: int, tied: bool) -> None:
        data = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        head, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
        self.base: dict[str, Floats] = {}
        for name, about in head.items():
            if name != "__metadata__":
                begin, end = about["data_offsets"]
                self.base[name] = np.frombuffer(rest[begin:end], "<f4").reshape(about["shape"])
        if tied:  # the smallest of the names of a tensor
            self.base["lm_head.weight"] = self.base.pop("model.embed_tokens.weight")
        self.size, self.rows = size, {}
        for number, name in enumerate(sorted(self.base)):
            count = self.base[name].size
            blocks = -(-count // size)
            own = signs(2, number, count, key), signs(3, number, blocks * size, key).reshape(blocks, size)
            self.rows[name] = own

    def of(self, c: Floats) -> dict[str, Floats]:
        found = {}
        for name, (rows, columns) in self.rows.items():
            y = transformed(columns * c).reshape(-1)[: rows.size]
            found[name] = self.base[name] + (np.float32(0) + rows * y).reshape(self.base[name].shape)
        return found

    def digest(self, c: Floats) -> str:
        tensors = self.of(c)
        return reading.digest_of([(name, "float32", w.shape, w.astype("<f4").tobytes()) for name, w in tensors.items()])


# --- a model ------------------------------------------------------------------------------------


def logits_of(w: dict[str, Floats], config: dict[str, Any], tokens: list[int]) -> NDArray[np.float64]:
    """The logits of a Llama, (T, V)."""
    wide = {name: value.astype(np.float64) for name, value in w.items()}
    heads, pairs, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    table = wide.get("model.embed_tokens.weight", wide["lm_head.weight"])
    x, t = table[tokens], len(tokens)

    def norm(v: Any, name: str) -> Any:
        return v / np.sqrt((v * v).mean(-1, keepdims=True) + config["rms_norm_eps"]) * wide[name]

    theta = config["rope_parameters"]["rope_theta"]
    angle = np.outer(np.arange(t), theta ** (-np.arange(0, d, 2) / d))
    cos, sin = (np.concatenate([f(angle)] * 2, 1) for f in (np.cos, np.sin))

    def turned(v: Any) -> Any:
        return v * cos + np.concatenate([-v[..., d // 2 :], v[..., : d // 2]], -1) * sin

    for n in range(config["num_hidden_layers"]):
        own = f"model.layers.{n}."
        y = norm(x, own + "input_layernorm.weight")
        q, k, v = (
            (y @ wide[f"{own}self_attn.{name}_proj.weight"].T).reshape(t, count, d).swapaxes(0, 1)
            for name, count in (("q", heads), ("k", pairs), ("v", pairs))
        )
        k, v = (np.repeat(part, heads // pairs, 0) for part in (k, v))
        scores = turned(q) @ turned(k).swapaxes(1, 2) / np.sqrt(d) + np.triu(np.full((t, t), -np.inf), 1)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        y = (share / share.sum(-1, keepdims=True)) @ v
        x = x + y.swapaxes(0, 1).reshape(t, -1) @ wide[own + "self_attn.o_proj.weight"].T
        y = norm(x, own + "post_attention_layernorm.weight")
        gate = y @ wide[own + "mlp.gate_proj.weight"].T
        up = y @ wide[own + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ wide[own + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ wide["lm_head.weight"].T


# --- wire.md ------------------------------------------------------------------------------------


def compact_numbers(data: bytes, n: int) -> Floats:
    scales = np.frombuffer(data, "<f4", -(-n // 128))
    return (np.repeat(scales, 128)[:n] * np.frombuffer(data, np.int8, n, scales.nbytes)).astype(np.float32)


def broadcast_of(data: bytes) -> dict[str, Any]:
    """The fields of a whole broadcast.

    Raises:
        Reply: it is broken, or another message.
    """
    if len(data) < 88 or data[:6] != b"FKSd\x02\x01" or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise Reply(2, "task")
    *_, family, flags, round_, key, last, base = HEADER.unpack_from(data)
    names = "lr", "eps", "clip", "steps", "probes"
    found = dict(zip(names, BROADCAST.unpack_from(data, HEADER.size), strict=True))
    size, wire = last + 1, WIRES.get(flags & 6, "")
    width = 4 * size if wire == "exact" else size + 4 * -(-size // 128)
    parts = [data[84 + k * width : 84 + (k + 1) * width] for k in range(1 + (flags & 1))]
    if not wire or flags > 7 or len(data) != 88 + width * len(parts):
        raise Reply(2, "task")
    c, *p = [np.frombuffer(x, "<f4") if wire == "exact" else compact_numbers(x, size) for x in parts]
    about = {"family": family, "round": round_, "key": key, "size": size, "base": base, "wire": wire}
    return found | about | {"c": c, "p": p[0] if p else None}


def restored(data: bytes, kept: bytes | None) -> bytes | None:
    """The whole message of a difference; None: what it refers to was not kept.

    Raises:
        Reply: it does not restore what was announced.
    """
    if data[5:6] != b"\x06":
        return data
    if kept is None or kept[-4:] != data[56:60]:
        return None
    if (kept[6], kept[12:56]) != (data[6], data[12:56]):
        raise Reply(2, "task")
    inflate, body = zlib.decompressobj(-15), np.frombuffer(kept[56:-4], np.uint8)
    try:
        difference = inflate.decompress(data[64:-4], body.size + 1)
    except zlib.error:
        raise Reply(2, "task") from None
    if len(difference) != body.size or not inflate.eof or inflate.unused_data:
        raise Reply(2, "task")
    whole = kept[:8] + data[8:12] + kept[12:56] + (body + np.frombuffer(difference, np.uint8)).tobytes()
    whole += zlib.crc32(whole).to_bytes(4, "little")
    if whole[-4:] != data[60:64]:
        raise Reply(2, "task")
    return whole


def message(like: bytes, kind: int, flags: int, body: bytes) -> bytes:
    """A client's message about a server's."""
    data = like[:5] + bytes([kind, like[6], flags]) + like[8:56] + body
    return data + zlib.crc32(data).to_bytes(4, "little")


def upload_of(asked: bytes, client: int, examples: int, loss: float, scalars: list[float], wire: str) -> bytes:
    rho, none = np.array(scalars, np.float32), np.isnan(np.array(scalars))
    bits, flags = np.where(none, np.uint32(0x7FC00000), rho.view(np.uint32)), {"exact": 0, "compact": 2}.get(wire, 4)
    if wire == "sign":
        rows = [rho < 0, none] if none.any() else [rho < 0]
        packed, flags = b"".join(np.packbits(r, bitorder="little").tobytes() for r in rows), 4 + 8 * bool(none.any())
    else:
        packed = bits.astype("<u4").tobytes() if wire == "exact" else (bits >> 16).astype("<u2").tobytes()
    number = b"\0\0\xc0\x7f" if np.isnan(loss) else struct.pack("<f", loss)
    body = struct.pack("<II", client, examples) + number + struct.pack("<I", rho.size) + packed
    return message(asked, 2, flags, body)


# --- session.md ---------------------------------------------------------------------------------


class RunOverError(Exception):
    """The end of the run."""


class Port:
    """A client with its key, its model and its rows.

    Args:
        state: a file for the logs of runs.
        smallest: batch that it answers; the limit of its owner.
        dialled: the name of its server, until it dials one.
    """

    def __init__(
        self, key: ec.EllipticCurvePrivateKey, ca: x509.Certificate, model: Path | None, rows: Path, state: Path,
        smallest: int = 4, dialled: str = "",
    ) -> None:  # fmt: skip
        self.key, self.ca, self.model, self.rows, self.state, self.smallest = key, ca, model, rows, state, smallest
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        self.fingerprint = sha256(key.public_key().public_bytes(serialization.Encoding.DER, form))
        self.authority = sha256(ca.public_key().public_bytes(serialization.Encoding.DER, form))
        self.audience = reading.audience(self.authority, dialled)
        self.logs: dict[str, Any] = json.loads(state.read_text()) if state.exists() else {}
        self.issued: dict[bytes, int] = {}
        self.certificate: x509.Certificate | None = None
        self.recipe: dict[str, Any] | None = None
        self.digest, self.kept, self.last = b"", None, (None, b"")
        self.uploads: dict[int, list[float]] = {}  # round -> scalars
        self.tuned: tuple[int, str, Floats] | None = None

    def sign(self, statement: bytes) -> bytes:
        r, s = decode_dss_signature(self.key.sign(statement, ec.ECDSA(hashes.SHA256())))
        return r.to_bytes(32, "big") + s.to_bytes(32, "big")

    # Requests

    def serve(self, url: str, ca: Path) -> None:
        """Take part until the tuned model has come, or the run is over without one."""
        import ssl

        pause = 1.0
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=str(ca)), trust_env=False) as http:
            while self.tuned is None:
                try:
                    self._session(http)
                except RunOverError:
                    return
                except (httpx.TransportError, ConnectionError):
                    time.sleep(pause)
                    pause = min(2 * pause, 60)

    def _session(self, http: httpx.Client) -> None:
        def get(path: str, **headers: str) -> bytes:
            found = http.get(path, headers=headers, timeout=300)
            if found.status_code == 410:
                raise RunOverError
            if found.status_code not in (200, 204):
                raise ConnectionError(f"{path}: {found.status_code} {found.text}")
            return found.content

        challenge = get("/v1/challenge")
        name = http.base_url.host
        self.audience = reading.audience(self.authority, name)
        proof = challenge + self.fingerprint
        proof += self.sign(reading.CONNECTION + self.audience + proof) + name.encode()
        found = http.post("/v1/session", content=proof)
        if found.status_code != 200:
            raise ConnectionError(found.text)
        token = {"authorization": f"Bearer {found.json()['token']}"}
        self.number, files = found.json()["client"], dict[bytes, bytes]()
        while self.tuned is None:
            stub = get("/v1/task?wait=240&after=", **token)
            if not stub:
                continue
            for name in (stub[at : at + 32] for at in (16, 48, 80)):
                if name != bytes(32) and name not in files:
                    files[name] = get(f"/v1/file/{name.hex()}")
            reply = self.reply(reading.whole_task(stub, files))
            http.post(f"/v1/task/{stub[:16].hex()}", content=reply, headers=token)  # 410: nobody waits for it

    # A task

    def reply(self, data: bytes) -> bytes:
        try:
            return self._answered(data)
        except Reply as end:
            return end.data

    def _answered(self, data: bytes) -> bytes:
        task = self._sound(data)
        self._require_signed(task, data)
        self._follow(task)
        if task["recipe"] and task["digest"] != self.digest:
            self.recipe, self.digest, self.kept, self.last = None, b"", None, (None, b"")
            self._load(task["recipe"])
            self.digest = task["digest"]
        if self.recipe is None or task["digest"] != self.digest:
            raise Reply(1)
        asked = [task[name] for name in ("nonce", "head", "client", "number", "message")]
        if self.last[0] == asked:
            return self.last[1]
        if task["number"]:
            broadcast, upload = task["message"], b""
            self._keep(task)
        elif (whole := restored(task["message"], self.kept)) is None:
            broadcast, upload = task["message"], message(task["message"], 7, 0, struct.pack("<I", task["client"]))
        else:
            broadcast, upload = whole, self._trained(task, whole)
        reply = b"FKSt\x03\0" + self.sign(reading.answer_statement(self.audience, task, broadcast, upload)) + upload
        self.last = asked, reply
        return reply

    def _sound(self, data: bytes) -> dict[str, Any]:
        if data[:4] == b"FKSt" and data[4] != 3:
            raise Reply(2, "release")
        if len(data) < 194 or data[5] not in (0, 128):
            raise Reply(2, "task")
        r, s, links = (int.from_bytes(data[a:b], "little") for a, b in ((30, 34), (34, 36), (64, 66)))
        if 194 + r + s + 32 * links > len(data) or r > 65536:
            raise Reply(2, "task")
        task = reading.task_of(data)
        if not 0 < task["seconds"] < np.inf or (r and sha256(task["recipe"])[:16] != task["digest"]):
            raise Reply(2, "task")
        return task

    def _require_signed(self, task: dict[str, Any], data: bytes) -> None:
        if task["signature"] == bytes(64):
            raise Reply(2, "task")
        certificate = x509.load_der_x509_certificate(task["certificate"]) if task["certificate"] else self.certificate
        if certificate is None:
            raise Reply(1)
        now, r, s = datetime.now(UTC), *(int.from_bytes(task["signature"][a : a + 32], "big") for a in (0, 32))
        try:
            certificate.verify_directly_issued_by(self.ca)
            usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
            key: Any = certificate.public_key()
            assert ExtendedKeyUsageOID.SERVER_AUTH in usage
            assert all(one.not_valid_before_utc <= now <= one.not_valid_after_utc for one in (certificate, self.ca))
            statement = reading.task_statement(self.audience, data, self.fingerprint)
            key.verify(encode_dss_signature(r, s), statement, ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, ValueError, x509.ExtensionNotFound, AssertionError):
            raise Reply(2, "task") from None
        if task["issued"] <= self.issued.get(task["nonce"], 0):
            raise Reply(3, "task")
        self.certificate, self.issued[task["nonce"]] = certificate, task["issued"]

    def _follow(self, task: dict[str, Any]) -> None:
        nonce = task["nonce"].hex()
        known = self.logs.get(nonce)
        if known is None and len(self.logs) >= 256:
            raise Reply(2, "task")
        if known is not None and (known["client"], known["recipe"]) != (task["client"], task["digest"].hex()):
            raise Reply(2, "task")
        at = (known["done"], bytes.fromhex(known["head"])) if known else (-1, None)
        try:
            after = reading.follow(task, at)
        except ValueError:
            raise Reply(2, "task") from None
        if after is None:
            raise Reply(1)
        if after[0] > at[0]:
            own = {"client": task["client"], "recipe": task["digest"].hex(), "link": task["links"][-32:].hex()}
            self.logs[nonce] = own | {"done": after[0], "head": after[1].hex()}
            self.state.write_text(json.dumps(self.logs))

    def _require_bound(self, task: dict[str, Any], whole: bytes) -> None:
        known = self.logs[task["nonce"].hex()]
        if (known["done"], known["link"]) != (task["done"], sha256(task["stem"], sha256(whole)).hex()):
            raise Reply(2, "task")

    def _load(self, text: bytes) -> None:
        """Take over a recipe: model, directions, examples as tokens."""
        wished = tomllib.loads(text.decode())
        training, directions = wished["training"], wished.get("directions", {})
        objective, own = training.get("objective", "loss"), training.get("algorithm", "fedkseed")
        able = own in ("fedkseed", "fedkseed-pro") and objective == "loss" and not {"secure", "privacy"} & wished.keys()
        able &= wished["model"].get("storage", "dense") == "dense" and "asynchronous" not in wished
        able &= directions.get("family", "hadamard") == "hadamard" and "tuned" not in wished["model"]
        if not able or wished["clients"]["split"] != "files":
            raise Reply(2, "recipe")
        if training["batch_size"] < self.smallest:
            raise Reply(2, "policy")
        if self.model is None:
            raise Reply(2, "model")
        self.config = json.loads((self.model / "config.json").read_text())
        key = reading.Generator(wished["seed"], 1).word()
        self.weights = Weights(self.model, key, directions["size"], self.config["tie_word_embeddings"])
        self.base, self.pool = self.weights.digest(np.zeros(directions["size"], np.float32)), key
        tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        about = json.loads((self.model / "tokenizer_config.json").read_text())
        end, data = tokenizer.token_to_id(about["eos_token"]), wished["data"]
        self.examples = []
        for row in map(json.loads, self.rows.read_text().splitlines()):
            if row["category"] == data["held_out"]:
                continue
            whole = {"turns": [], "plain": False, **row}
            ((prompt, response, _),) = reading.pieces_of(data["template"], data["separator"], whole)
            tokens = tokenizer.encode(prompt).ids
            begin = len(tokens)
            tokens += [*tokenizer.encode(response, add_special_tokens=False).ids, end]
            if len(tokens) <= data["max_tokens"]:
                self.examples.append({"tokens": tokens, "counted": [(begin, len(tokens))]})
        self.recipe = wished

    def _trained(self, task: dict[str, Any], whole: bytes) -> bytes:
        recipe, asked = self.recipe or {}, broadcast_of(whole)
        self._require_bound(task, whole)
        training, round_ = recipe["training"], asked["round"]
        if task["client"] >= recipe["clients"]["count"]:
            raise Reply(2, "task")
        pool = asked["family"], asked["key"], asked["size"], asked["base"].hex()
        if pool != (2, self.pool, recipe["directions"]["size"], self.base):
            raise Reply(2, "model")
        rate = reading.rate_of(training["schedule"], training.get("lr", 3e-7), round_, training["rounds"])
        clip = float(np.float32(training.get("clip", np.inf)))
        right = [asked[name] == training[name] for name in ("steps", "probes", "eps")]
        right += [asked["wire"] == training.get("wire", "compact"), asked["clip"] == clip]
        if not all(right) or abs(asked["lr"] - rate) > 1e-12 * rate or not round_ == task["done"] < training["rounds"]:
            raise Reply(2, "task")
        self.kept = whole
        return self._steps(task["client"], whole, asked)

    def _steps(self, client: int, whole: bytes, asked: dict[str, Any]) -> bytes:
        recipe, round_, probes = self.recipe or {}, asked["round"], asked["probes"]
        drawer = (1 << 32) - 1 if recipe["directions"]["shared"] else client
        count = asked["steps"] * probes
        directions = reading.directions_of(self.pool, round_, drawer, count, asked["size"], asked["p"])
        drawn = reading.Generator(recipe["seed"], 5, round_, client)
        batches = reading.batches_of(drawn, len(self.examples), recipe["training"]["batch_size"])
        settings = {name: asked[name] for name in ("lr", "eps", "probes", "clip", "wire")}
        c, pairs, eps = asked["c"].copy(), list[tuple[float, float]](), np.float32(asked["eps"])
        for at in range(0, count, probes):
            rows, mine = [self.examples[k] for k in next(batches)], directions[at : at + probes]
            for j in mine:
                there = np.zeros_like(c)
                there[j] = eps
                pairs.append((self.loss(c + there, rows), self.loss(c - there, rows)))
            c = reading.steps_of(pairs[at:], mine, c, **settings)[2]
        scalars, _, ended, loss = reading.steps_of(pairs, directions, asked["c"], **settings)
        assert np.array_equal(c, ended)
        self.uploads[round_] = scalars
        return upload_of(whole, client, len(self.examples), loss, scalars, asked["wire"])

    def loss(self, c: Floats, rows: list[dict[str, Any]]) -> float:
        w = self.weights.of(c)
        return reading.loss_of([logits_of(w, self.config, row["tokens"]) for row in rows], rows)

    def _keep(self, task: dict[str, Any]) -> None:
        found = broadcast_of(task["message"])
        if found["round"] == task["done"]:
            self._require_bound(task, task["message"])
        if (found["key"], found["base"].hex()) != (self.pool, self.base):
            raise Reply(2, "model")
        self.tuned = found["round"], self.weights.digest(found["c"]), found["c"]
