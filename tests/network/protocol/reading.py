"""docs/session.md and docs/wire.md read slowly: plain Python and NumPy, and nothing of fedkseed.

A second opinion on the documents: what is computed here is computed as the pages say it, and not as our code does.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORD, LONG = (1 << 32) - 1, (1 << 128) - 1
AUDIENCE = b"fedkseed, version 3: whom a signature is for\n"
CONNECTION = b"fedkseed, version 3: a client proves its key to a server over HTTPS\n"
TASK = b"fedkseed, version 3: a server asks one client for its answer\n"
ANSWER = b"fedkseed, version 3: a client answers a broadcast of the server\n"
LOG = b"fedkseed, version 2: the rounds of a run\n"


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


# --- the generator of draws ---------------------------------------------------------------------


def seed_of(entropy: Sequence[int]) -> list[int]:
    """The four words of the seed."""
    a = [word for n in entropy for word in ([n] if n <= WORD else [n & WORD, n >> 32])]
    h = 0x43B0D7E5

    def hashed(v: int) -> int:
        nonlocal h
        v, h = v ^ h, h * 0x931E8875 & WORD
        v = v * h & WORD
        return v ^ v >> 16

    def mixed(x: int, y: int) -> int:
        r = (0xCA01F9DD * x - 0x4973F715 * y) & WORD
        return r ^ r >> 16

    p = [hashed(a[i] if i < len(a) else 0) for i in range(4)]
    for s in range(4):
        for d in range(4):
            if s != d:
                p[d] = mixed(p[d], hashed(p[s]))
    for s in range(4, len(a)):
        for d in range(4):
            p[d] = mixed(p[d], hashed(a[s]))
    h, o = 0x8B51F9DD, []
    for i in range(8):
        v, h = p[i % 4] ^ h, h * 0x58F38DED & WORD
        v = v * h & WORD
        o.append(v ^ v >> 16)
    return [o[2 * k] + (o[2 * k + 1] << 32) for k in range(4)]


class Generator:
    """The words, doubles and permutations of an entropy."""

    def __init__(self, *entropy: int) -> None:
        s = seed_of(entropy)
        self.increment, self.upper = (2 * ((s[2] << 64) + s[3]) + 1) & LONG, None
        self.t = self._next(self.increment + (s[0] << 64) + s[1])

    def _next(self, t: int) -> int:
        return (t * 0x2360ED051FC65DA44385DF649FCCF645 + self.increment) & LONG

    def word(self) -> int:
        self.t = self._next(self.t)
        x, turn = self.t >> 64 ^ self.t & (1 << 64) - 1, self.t >> 122
        return (x >> turn | x << 64 - turn) & (1 << 64) - 1

    def double(self) -> float:
        return (self.word() >> 11) * 2.0**-53

    def number(self) -> int:
        """The next number of 32 bits."""
        if self.upper is not None:
            found, self.upper = self.upper, None
            return found
        word = self.word()
        self.upper = word >> 32
        return word & WORD

    def permutation(self, n: int) -> list[int]:
        x = list(range(n))
        for i in range(n - 1, 0, -1):
            mask = (1 << i.bit_length()) - 1
            while (j := self.number() & mask) > i:
                pass
            x[i], x[j] = x[j], x[i]
        return x


def batches_of(generator: Generator, examples: int, size: int) -> Iterator[list[int]]:
    size, queue = min(size, examples), list[int]()
    while True:
        while len(queue) < size:
            queue += generator.permutation(examples)
        yield queue[:size]
        del queue[:size]


def cohort_of(seed: int, round_: int, count: int, m: int, in_turns: bool) -> list[int]:
    t = count // m
    turn, place = divmod(round_, t) if in_turns else (round_, 0)
    return sorted(Generator(seed, 4, turn).permutation(count)[m * place : m * place + m])


def directions_of(
    key: int, round_: int, drawer: int, count: int, size: int, p: NDArray[np.float32] | None = None
) -> list[int]:
    generator, found = Generator(key, 6, round_, drawer), []
    sums = None if p is None else list(np.cumsum(p.astype(np.float64)))
    for _ in range(count):
        u = generator.double()
        if sums is None:
            found.append(min(math.floor(u * size), size - 1))
        else:
            found.append(min(next((j for j, total in enumerate(sums) if total > u * sums[-1]), size - 1), size - 1))
    return found


def rate_of(schedule: str, lr: float, round_: int, rounds: int) -> float:
    x = round_ / rounds
    of = {"constant": 1.0, "linear": max(1 - x, 1e-6), "cosine": max((1 + math.cos(math.pi * x)) / 2, 1e-6)}
    return lr * of[schedule]


# --- tasks, replies, the log --------------------------------------------------------------------

FIXED = struct.Struct("<4sBBIf16sIH16sQIH32s32s")
FIELDS = (
    "magic", "version", "number", "client", "seconds", "digest", "recipe", "certificate", "nonce", "issued", "since",
    "links", "head", "stem",
)  # fmt: skip


def task_of(data: bytes) -> dict[str, Any]:
    """The fields of a whole task; parts by their names."""
    task = dict(zip(FIELDS, FIXED.unpack_from(data), strict=True))
    at = FIXED.size
    for name, size in (("recipe", task["recipe"]), ("certificate", task["certificate"]), ("links", 32 * task["links"])):
        task[name], at = data[at : at + size], at + size
    done = task["since"] + len(task["links"]) // 32 - 1
    return task | {"message": data[at:-64], "signature": data[-64:], "done": done}


def whole_task(stub: bytes, files: dict[bytes, bytes]) -> bytes:
    names = [stub[at : at + 32] for at in (16, 48, 80)]
    recipe, certificate, message = (b"" if name == bytes(32) else files[name] for name in names)
    for name, part in zip(names, (recipe, certificate, message), strict=True):
        assert name == (sha256(part) if part else bytes(32)), "another file under the name"
    rest = stub[112:]
    return rest[:130] + recipe + certificate + rest[130:-64] + message + rest[-64:]


def audience(authority: bytes, name: str) -> bytes:
    return sha256(AUDIENCE, authority, name.encode())


def task_statement(audience: bytes, data: bytes, fingerprint: bytes) -> bytes:
    return TASK + audience + data[36:52] + data[52:60] + fingerprint + sha256(data[:-64])


def answer_statement(audience: bytes, task: dict[str, Any], broadcast: bytes, upload: bytes) -> bytes:
    number = struct.pack("<I", task["client"])
    return ANSWER + audience + task["nonce"] + number + task["head"] + sha256(broadcast) + sha256(upload)


def head_of(before: bytes | None, link: bytes) -> bytes:
    return sha256(LOG if before is None else before, link)


def follow(task: dict[str, Any], known: tuple[int, bytes | None]) -> tuple[int, bytes] | None:
    """The rounds and the head after a task; None: links are missing."""
    a, head = known
    if task["done"] < a:
        raise ValueError("the server has gone back")
    if task["since"] > a + 1:
        return None
    for r in range(a + 1, task["done"] + 1):
        at = 32 * (r - task["since"])
        head = head_of(head, task["links"][at : at + 32])
    if head != task["head"]:
        raise ValueError("another log")
    return task["done"], head


# --- texts --------------------------------------------------------------------------------------

A = "Write a response that appropriately completes the request."
R = "Write a response for the task request."
W = "Below is an instruction that describes a task, paired with an input that provides further context. "
V = "Below is an instruction that describes a task. "


def section(instruction: str, context: str, always: bool = False) -> str:
    context = f"### Input:\n{context}\n\n" if context or always else ""
    return f"### Instruction:\n{instruction}\n\n{context}### Response:"


def plain(instruction: str, context: str) -> str:
    return instruction + ("\n\n" + context if context else "")


def template(name: str, instruction: str, context: str) -> str:
    whole = W + A + "\n\n" + section(instruction, context)
    match name:
        case "paper":
            return whole
        case "alpaca":
            return whole if context else V + A + "\n\n" + section(instruction, "")
        case "official-dolly":
            return (W if context else V) + R + "\n\n" + section(instruction, context)
        case "official-ni":
            return W + A + "\n\n" + section(instruction, context, always=True)
        case _:
            return plain(instruction, context)


def chatml(messages: Sequence[tuple[str, str]]) -> str:
    """The chat template of the vectors, by hand."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)


def pieces_of(name: str, separator: str, row: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Prompt, response and whether the end of text is counted, for each answer in a row."""
    if row["plain"]:
        return [("", row["response"], True)]
    turns = [(turn["role"], turn["text"]) for turn in row["turns"]]
    if name == "chat":
        return chat_pieces(turns or [("user", plain(row["instruction"], row["context"]))], row["response"])
    if not turns:
        return [(template(name, row["instruction"], row["context"]) + separator, row["response"], True)]
    found, asked, system = [], [], []
    for role, text in [*turns, ("assistant", row["response"])]:
        if role != "assistant":
            (system if role == "system" else asked).append(text)
        elif text.strip():
            request, context = "\n\n".join(asked), "\n\n".join(system)
            later = plain(request, context) if name == "plain" else section(request, context)
            prompt = "\n\n" + later if found else template(name, request, context)
            found.append((prompt + separator, text, True))
            asked, system = [], []
    return found


def chat_pieces(messages: Sequence[tuple[str, str]], response: str) -> list[tuple[str, str, bool]]:
    every = [*messages, ("assistant", response)]
    whole, at, found = chatml(every), 0, []
    for k, (role, text) in enumerate(every):
        if role == "assistant" and (text.strip() or k == len(messages)):
            begin = len(chatml(every[:k]) + "<|im_start|>assistant\n")
            found.append((whole[at:begin], text, True))
            at = begin + len(text + "<|im_end|>")
    return found


def packed(texts: Sequence[tuple[str, list[int]]], limit: int, begin: list[int], end: int) -> list[list[int]]:
    """Blocks of plain texts, each given with its category and as its tokens without special ones."""
    blocks = []
    for category in dict.fromkeys(category for category, _ in texts):
        joined = [token for own, tokens in texts if own == category for token in [*begin, *tokens, end]]
        blocks += [joined[at : at + limit] for at in range(0, len(joined), limit)]
    return [block for block in blocks if len(block) > 1]


# --- loss and step ------------------------------------------------------------------------------


def loss_of(logits: Sequence[NDArray[np.floating]], rows: Sequence[dict[str, Any]]) -> float:
    total, count = 0.0, 0
    for each, row in zip(logits, rows, strict=True):
        for begin, end in row["counted"]:
            for t in range(max(begin, 1), end):
                before = np.asarray(each[t - 1], np.float64)
                top = before.max()
                total += float(top + np.log(np.exp(before - top).sum()) - before[row["tokens"][t]])
                count += 1
    return total / count


def scalar_of(x: float, clip: float, wire: str) -> float:
    """The ρ made of x; NaN: none."""
    if not math.isfinite(x):
        return math.nan
    m = min(clip, 2.0**20)
    steps = round(min(max(x, -m), m) * 2.0**16)  # half to even
    if abs(steps) > m * 2.0**16:
        steps -= 1 if steps > 0 else -1
    rho = np.float32(steps * 2.0**-16)
    if wire == "sign":
        return math.copysign(1.0, rho) if rho else math.nan
    if wire == "compact":
        bits = int(rho.view(np.uint32))
        upper = (bits >> 16) + ((bits & 0xFFFF) + (bits >> 16 & 1) > 0x8000)
        value = np.uint32(upper << 16).view(np.float32)
        rho = np.uint32(upper - 1 << 16).view(np.float32) if abs(value) > m else value
    return float(rho)


def steps_of(
    pairs: Sequence[tuple[float, float]], directions: Sequence[int], c: NDArray[np.float32], *,
    lr: float, eps: float, probes: int, clip: float, wire: str,
) -> tuple[list[float], list[tuple[int, float]], NDArray[np.float32], float]:  # fmt: skip
    """Scalars, moves, c afterwards and the reported loss, from the losses at both points of each probe."""
    scalars, moves, means, c = [], [], [], c.copy()
    for (a, b), j in zip(pairs, directions, strict=True):
        rho = scalar_of((a - b) / (2 * eps), clip, wire)
        scalars.append(rho)
        if not math.isnan(rho):
            means.append((a + b) / 2)
            moves.append((j, np.float32(-lr / probes * rho)))
            c[j] += moves[-1][1]
    return scalars, moves, c, sum(means) / len(means) if means else math.nan


# --- tensors ------------------------------------------------------------------------------------


def digest_of(tensors: Sequence[tuple[str, str, Sequence[int], bytes]]) -> str:
    """The digest of a model, from name, type, shape and bytes of each tensor of the layout."""
    lines = [
        f"{name} {kind} [{', '.join(map(str, shape))}] {hashlib.sha256(data).hexdigest()}\n"
        for name, kind, shape, data in sorted(tensors, key=lambda tensor: tensor[0])
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def weights_of(kind: str, blocks: bytes) -> NDArray[np.float32]:
    """The weights of quantised blocks."""
    n, size, halves, of_q, of_groups, count = TYPES[kind]
    found = list[np.float32]()
    for at in range(0, len(blocks), size):
        block = blocks[at : at + size]
        d, *m = np.frombuffer(block[halves[0] : halves[-1] + 2], "<f2").astype(np.float32)
        groups = six(block) if of_groups == "six" else integers_of(block, of_groups, count * len(halves))
        s, t = (np.array(of, np.float32) for of in (groups[:count], groups[count:]))
        for i, q in enumerate(integers_of(block, of_q, n)):
            weight, g = np.float32(CURVE[q] if kind.startswith("IQ4") else q), i * count // n
            weight *= d * s[g] if count else d
            found.append(weight - m[0] * t[g] if m and count else weight + m[0] if m else weight)
    return np.array(found, np.float32)


def integers_of(block: bytes, formula: str, count: int) -> list[int]:
    """The integers of a block, by the table's formula: terms such as 16 · 1@2:1, then what is subtracted."""
    if not count:
        return []
    terms, _, less = formula.partition(" − ")
    found = [-int(less or 0)] * count
    for term in terms.split(" + "):
        times, _, place = term.rpartition(" · ")
        width, at, run = (int(number) for number in re.split("[@:]", place.removeprefix("signed ")))
        for i in range(count):
            byte = block[at + i // (run * (8 // width)) * run + i % run]
            number = byte >> width * (i // run % (8 // width)) & (1 << width) - 1
            found[i] += int(times or 1) * (number - 256 if place.startswith("signed") and number > 127 else number)
    return found


def six(block: bytes) -> list[int]:
    """The eight s and then the eight t of Q4_K and Q5_K."""
    a, b, c = block[4:8], block[8:12], block[12:16]
    s = [x & 63 for x in a] + [z & 15 | x >> 6 << 4 for x, z in zip(a, c, strict=True)]
    return s + [y & 63 for y in b] + [z >> 4 | y >> 6 << 4 for y, z in zip(b, c, strict=True)]


CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TYPES = {  # weights and bytes of a block, places of d and m, q, s and t, groups
    "Q4_0": (32, 18, [0], "4@2:16 − 8", "", 0),
    "Q4_1": (32, 20, [0, 2], "4@4:16", "", 0),
    "Q5_0": (32, 22, [0], "4@6:16 + 16 · 1@2:1 − 16", "", 0),
    "Q5_1": (32, 24, [0, 2], "4@8:16 + 16 · 1@4:1", "", 0),
    "Q8_0": (32, 34, [0], "signed 8@2:32", "", 0),
    "IQ4_NL": (32, 18, [0], "4@2:16", "", 0),
    "Q2_K": (256, 84, [80, 82], "2@16:32", "4@0:16", 16),
    "Q3_K": (256, 110, [108], "2@32:32 + 4 · 1@0:32 − 4", "4@96:8 + 16 · 2@104:4 − 32", 16),
    "Q4_K": (256, 144, [0, 2], "4@16:32", "six", 8),
    "Q5_K": (256, 176, [0, 2], "4@48:32 + 16 · 1@16:32", "six", 8),
    "Q6_K": (256, 210, [208], "4@0:64 + 16 · 2@128:32 − 32", "signed 8@192:16", 16),
    "IQ4_XS": (256, 136, [0], "4@8:16", "4@4:1 + 16 · 2@2:1 − 32", 8),
}


def blocks_of(kind: str, numbers: Sequence[float]) -> bytes:
    """The quantised blocks of numbers."""
    found, one = b"", np.float32(1)
    for at in range(0, len(numbers), 32):
        x = np.array(numbers[at : at + 32], np.float32)
        m = x.min()
        top = max(x.tolist(), key=abs)
        d = {"Q8_0": abs(x).max() / np.float32(127), "Q4_0": np.float32(top) / np.float32(-8)}.get(kind)
        d = (x.max() - m) / np.float32(15) if d is None else d
        by = one / d if d else np.float32(0)
        scale = np.array([d, m] if kind == "Q4_1" else [d], "<f2").tobytes()
        if kind == "Q8_0":
            q = [int(math.copysign(math.floor(abs(float(v * by)) + 0.5), v)) for v in x]
            found += scale + np.array(q, np.int8).tobytes()
            continue
        raised = x * by + np.float32(8.5) if kind == "Q4_0" else (x - m) * by + np.float32(0.5)
        q = [min(15, int(v)) for v in raised]
        found += scale + bytes(q[i] | q[i + 16] << 4 for i in range(16))
    return found


LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
OUTER = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}


def name_in_model(name: str) -> str:
    """The model's name of a tensor of a Llama's GGUF file."""
    *layer, own, weight = name.split(".")
    return f"model.layers.{layer[1]}.{LAYER[own]}.{weight}" if layer else f"{OUTER[own]}.{weight}"


def rows_in_file(heads: int, size: int) -> list[int]:
    """The file's row for each row of a Llama's `attn_q` or `attn_k`."""
    return [h * size + 2 * b + a for h in range(heads) for a in range(2) for b in range(size // 2)]


def adapter_of(data: bytes) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """The description in an adapter file, whose checksum was checked, and c."""
    size = int.from_bytes(data[:8], "little")
    head, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    about = json.loads(head["__metadata__"]["fedkseed"])
    begin, end = head["coefficients"]["data_offsets"]
    checksum = about.pop("checksum")
    text = json.dumps(about, sort_keys=True).encode()
    assert checksum == hashlib.sha256(text + rest[begin:end]).hexdigest()
    return about, np.frombuffer(rest[begin:end], "<f4")
