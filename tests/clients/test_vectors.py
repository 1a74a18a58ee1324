"""The client of clients/browser in a headless Chromium: all published vectors that say something to it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkseed.recipe import schema

from ..report.browser import Browser
from .conftest import run

PACKAGE = Path(schema.__file__).parents[1]
SESSION, WIRE, DIRECTIONS = (
    json.loads((PACKAGE / name / "vectors.json").read_text()) for name in ("network/protocol", "wire", "directions")
)
MESSAGES = {row["name"]: row for row in WIRE["messages"]}
KNOWN = ("exact", "compact", "sign", "exact, probabilities", "compact, probabilities", "sign, probabilities")
# A NaN travels as null, and an infinite number as text.
NUMBERS = """
    const real = (x) => x === null ? NaN : Number(String(x).replace('inf', 'Infinity'));
    const plain = (x) => Number.isNaN(x) ? null : x; """


# --- wire.md: draws and numbers -----------------------------------------------------------------


def test_the_generator_has_the_published_seeds_words_doubles_and_permutations(page):
    body = """return rows.map(({entropy}) => {
        const own = () => new draws.Generator(...entropy.map(BigInt));
        const digits = (word) => word.toString(16).padStart(16, '0');
        const [a, b, c] = [own(), own(), own()];
        return {entropy, seed: draws.seedOf(entropy.map(BigInt)).map(digits),
            words: [1, 2, 3, 4].map(() => digits(a.word())), doubles: [1, 2, 3].map(() => b.double()),
            'permutation, double, permutation, double':
                [c.permutation(6), c.double(), c.permutation(37), c.double()]}})"""
    assert run(page, "draws", body, rows=SESSION["generators"]) == SESSION["generators"]


def test_keys_batches_and_directions_are_drawn_as_published(page):
    of = SESSION["draws"]
    shared = of["shared"] | {"client": (1 << 32) - 1, "probabilities": None}
    body = """
        const keys = given.keys.map(({seed}) =>
            new draws.Generator(BigInt(seed), 1).word().toString(16).padStart(16, '0'));
        const batches = given.batches.map((of) => {
            const own = draws.batchesOf(
                new draws.Generator(of.seed, 5, of.round, of.client), of.examples, of.batch_size);
            return of.batches.map(() => own.next().value)});
        const directions = drawn.map((of) => Array.from(draws.directionsOf(BigInt('0x' + of.key), of.round, of.client,
            of.directions.length, of.size, of.probabilities && Float32Array.from(of.probabilities))));
        return {keys, batches, directions}"""
    drawn = [*WIRE["draws"], shared]
    found = run(page, "draws", body, given=of, drawn=drawn)
    assert found["keys"] == [row["key"] for row in of["keys"]]
    assert found["batches"] == [row["batches"] for row in of["batches"]]
    assert found["directions"] == [row["directions"] for row in drawn]


def test_scalars_steps_and_learning_rates_are_those_published(page):
    body = (
        NUMBERS
        + """
        const sent = scalars.map((of) => plain(steps.scalarOf(real(of.found), real(of.clip), of.wire)));
        const done = await Promise.all(given.map(async (of) => {
            const asked = {...of, clip: real(of.clip), steps: of.directions.length / of.probes,
                c: Float32Array.from(of.before)};
            const losses = of.losses.flat().map(real);
            const end = await steps.train(asked, of.directions, () => losses.shift());
            return {scalars: end.scalars.map(plain), after: Array.from(end.c), loss: plain(end.loss)}}));
        return {sent, done, rates: rates.map((of) => recipe.rateOf(of, of.round))}"""
    )
    found = run(page, "steps recipe", body, scalars=WIRE["scalars"], given=SESSION["steps"], rates=SESSION["rates"])
    assert found["sent"] == [row["sent"] for row in WIRE["scalars"]]
    assert found["done"] == [{key: row[key] for key in ("scalars", "after", "loss")} for row in SESSION["steps"]]
    assert found["rates"] == pytest.approx([row["value"] for row in SESSION["rates"]], rel=1e-12)


# --- wire.md: messages --------------------------------------------------------------------------


def refusals(page: Browser, call: str, rows: list[dict[str, Any]]) -> list[str]:
    """What a call says to each row: the code of its refusal, or its result."""
    body = f"""return Promise.all(rows.map(async (row) => {{
        try {{ return await (async () => {call})() }} catch (error) {{
            if (!(error instanceof task.Refusal)) throw error;
            return error.code }} }}))"""
    return run(page, "messages task bytes", body, rows=rows)


@pytest.mark.parametrize("name", KNOWN)
def test_published_broadcasts_are_read(page, name):
    row = MESSAGES[f"broadcast, {name}"]
    body = """const of = messages.readBroadcast(bytes.unhex(data));
        return {...of, key: of.key.toString(16).padStart(16, '0'), base: bytes.hex(of.base), clip: String(of.clip),
            c: Array.from(of.c), probabilities: of.probabilities && Array.from(of.probabilities)}"""
    found, fields = run(page, "messages bytes", body, data=row["bytes"]), row["fields"]
    clip = "Infinity" if fields["clip"] == "inf" else f"{fields['clip']:g}"
    assert (found["c"], found["probabilities"]) == (fields["coefficients"], fields["probabilities"])
    assert {key: found[key] for key in ("round", "lr", "eps", "steps", "probes", "wire")} == {
        key: fields[key] for key in ("round", "lr", "eps", "steps", "probes", "wire")
    }
    assert (found["clip"], found["family"]) == (clip, 2)
    run_of = fields["run"]
    assert (found["key"], found["size"], found["base"]) == (run_of["key"], run_of["size"], run_of["base"])


def test_broken_broadcasts_are_refused(page):
    rows = [row for row in WIRE["refused"] if row["kind"] == "Broadcast"]
    rows += [row for row in WIRE["messages"] if row["name"] not in {f"broadcast, {name}" for name in KNOWN}]
    rows = [row for row in rows if row["name"] != "broadcast, separable"]  # read, and refused by its family later
    assert len(rows) > 25
    assert set(refusals(page, "messages.readBroadcast(bytes.unhex(row.bytes))", rows)) == {"task"}


def test_every_bit_of_a_broadcast_counts(page):
    data = bytes.fromhex(MESSAGES["broadcast, compact, probabilities"]["bytes"])
    rows = []
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        rows.append({"bytes": flipped.hex()})
    rows += [{"bytes": data[:size].hex()} for size in range(len(data))]
    assert set(refusals(page, "messages.readBroadcast(bytes.unhex(row.bytes))", rows)) == {"task"}


@pytest.mark.parametrize("name", ["exact", "compact", "sign", "sign, some skipped"])
def test_published_uploads_are_written(page, name):
    row = MESSAGES[f"upload, {name}"]
    body = (
        NUMBERS
        + """return bytes.hex(messages.upload(
        bytes.unhex(like), of.client, of.examples, real(of.loss), of.scalars.map(real), of.wire))"""
    )
    like = MESSAGES["broadcast, exact"]["bytes"]
    assert run(page, "messages bytes", body, like=like, of=row["fields"]) == row["bytes"]


def test_differences_restore_what_was_meant_and_others_are_lacks_or_refused(page):
    call = """{ const whole = await messages.restored(bytes.unhex(row.delta), row.kept && bytes.unhex(row.kept));
        return whole ? bytes.hex(whole) : 'lack' }"""
    assert refusals(page, call, [WIRE["delta"]]) == [WIRE["delta"]["whole"]]
    outcomes = [{"lack": "lack", "refused": "task"}[row["outcome"]] for row in WIRE["deltas"]]
    assert refusals(page, call, WIRE["deltas"]) == outcomes
    body = "return bytes.hex(messages.lack(bytes.unhex(like), 12))"
    like = MESSAGES["broadcast, exact"]["bytes"]
    assert run(page, "messages bytes", body, like=like) == MESSAGES["lack"]["bytes"]


# --- directions.md ------------------------------------------------------------------------------


def test_philox_has_the_published_bits(page):
    rows = DIRECTIONS["philox"]
    body = """const words = (digits) => digits.map((word) => parseInt(word, 16));
        return rows.map((of) => Array.from(directions.philox(words(of.counter), words(of.key)),
            (word) => word.toString(16).padStart(8, '0')).join(''))"""
    assert run(page, "directions", body, rows=rows) == [row["bits"] for row in rows]


def test_sums_of_directions_have_the_published_bits(page):
    rows = [row for row in DIRECTIONS["weights"] if (row["family"], row["dtype"]) == ("hadamard", "float32")]
    assert len(rows) == 12
    body = """
        const words = (digits) => new Float32Array(Uint32Array.from(digits, (word) => parseInt(word, 16)).buffer);
        return rows.map((of) => {
            const c = new Float32Array(of.size);
            if (of.directions === 'all') c.forEach((_, j) => c[j] = (40503 * (j + 1) % 65536 - 32768) / 2 ** 24);
            else words(of.coefficients).forEach((number, k) => c[of.directions[k]] = number);
            const sum = directions.sum(
                BigInt('0x' + of.key), of.tensor, of.start, of.stop, c, of.addend ? words(of.addend) : null);
            const w = sum.map((s, at) => ((of.start + at) % 8 - 3 || -0) / 1024 + s);
            return Array.from(new Uint32Array(w.buffer), (word) => word.toString(16).padStart(8, '0')).join('') })"""
    assert run(page, "directions", body, rows=rows) == [row["bits"] for row in rows]


@pytest.mark.parametrize("size", [4, 8, 16, 64, 4096, 8192])
def test_the_fast_sums_are_the_definition_s_in_any_range(page, size):
    body = """
        const count = 9000, key = 0xfedcba9876543211n, number = 7;
        const own = new kernels.Kernels();
        const of = {name: 't', shape: [count], count, base: own.take(count)};
        const base = Float32Array.from({length: count}, (_, p) => p % 5 ? (p % 977 - 488) / 65536 : -0);
        own.floats(of.base, count).set(base);
        for (const [name, stream] of [['rows', 2], ['blocks', 3]]) {
            const words = directions.signWords(key, stream, number, size * Math.ceil(count / size));
            of[name] = own.take(words.length);
            new Uint32Array(own.memory.buffer, of[name], words.length).set(words);
        }
        const weights = new model.Weights(own, new Map([['t', of]]), size);
        const c = Float32Array.from({length: size}, (_, j) => (40503 * (j + 1) % 65536 - 32768) / 2 ** 24);
        c[1] = 2 ** -149; // a subnormal number is kept
        weights.load(c);
        const want = directions.sum(key, number, 0, count, c).map((s, p) => base[p] + s);
        const wrong = [];
        for (const [start, stop] of [[0, count], [4, 8], [4092, 4103], [8188, 9000], [4096, 8192], [20, 21]]) {
            const to = own.take(stop - start);
            weights.write('t', start, stop, to);
            const same = own.floats(to, stop - start).every((w, at) => Object.is(w, want[start + at]));
            if (!same) wrong.push([start, stop]);
        }
        return wrong"""
    assert run(page, "directions model kernels", body, size=size) == []


# --- session.md: keys, tasks, the log -----------------------------------------------------------


def test_fingerprints_lines_and_signatures_are_those_published(page):
    body = """
        const publics = new Map();
        for (const row of given) publics.set(row.name, await keys.publicKey(bytes.unhex(row.public)));
        const verified = await Promise.all(statements.map(async (of) =>
            keys.verify(publics.get(of.key).key, bytes.unhex(of.statement), bytes.unhex(of.signature))));
        const pair = await keys.makePair();
        const statement = bytes.utf8('a statement');
        const signature = await keys.sign(pair.private, statement);
        const own = await keys.verify(pair.public.key, statement, signature);
        return {verified, own, size: signature.length, private: pair.private.extractable,
            shown: [...publics.values()].map((one) => [bytes.hex(one.fingerprint), keys.publicLine(one)])}"""
    found = run(page, "keys bytes", body, given=SESSION["keys"], statements=SESSION["statements"])
    assert found["verified"] == [row["verifies"] for row in SESSION["statements"]]
    assert found["shown"] == [[row["fingerprint"], row["line"]] for row in SESSION["keys"]]
    assert (found["own"], found["size"], found["private"]) == (True, 64, False)


def test_certificates_are_trusted_as_the_document_says(page):
    body = """
        const [authority, ...others] = await Promise.all(
            given.map(({bytes: der}) => certificate.certificate(bytes.unhex(der))));
        const now = Date.parse('2030-01-01');
        const then = [Date.parse('1999-12-31'), Date.parse('2099-01-02')];
        return {now: await Promise.all(others.map((of) => certificate.isTrusted(of, authority, now))),
            then: await Promise.all(then.map((time) => certificate.isTrusted(others[0], authority, time)))}"""
    rows = SESSION["certificates"]
    assert [row["name"] for row in rows[:2]] == ["authority", "server"]
    found = run(page, "certificate bytes", body, given=rows)
    assert found == {"now": [True] + [False] * (len(rows) - 2), "then": [False, False]}


def test_broken_certificates_are_refused_and_nothing_else_happens(page):
    body = """
        const der = bytes.unhex(given);
        let refused = 0;
        for (let at = 0; at < der.length; at++) {
            const cut = await certificate.certificate(der.slice(0, at)).catch(() => null);
            const other = der.slice();
            other[at] ^= 255;
            const found = await certificate.certificate(other).catch(() => null);
            const trusted = found && await certificate.isTrusted(found, await certificate.certificate(
                bytes.unhex(authority)), Date.parse('2030-01-01')).catch(() => false);
            refused += !cut && !trusted;
        }
        return der.length - refused"""
    authority, own = (row["bytes"] for row in SESSION["certificates"][:2])
    assert run(page, "certificate bytes", body, given=own, authority=authority) == 0


def test_tasks_stubs_and_replies_are_those_published(page):
    body = """
        const tasks = await Promise.all(given.map(async (data) => {
            const of = await task.readTask(bytes.unhex(data));
            const texts = Object.fromEntries(Object.entries(of).map(
                ([name, value]) => [name, value instanceof Uint8Array ? bytes.hex(value) : value]));
            return {...texts, issued: String(of.issued)}}));
        const whole = await Promise.all(stubs.map(async (of) => bytes.hex(
            await task.readStub(bytes.unhex(of.bytes)).task(async (name) => bytes.unhex(of.files[bytes.hex(name)])))));
        const other = await task.readStub(bytes.unhex(stubs[0].bytes)).task(async () => bytes.unhex('00')).then(
            () => 'taken', (error) => error.message);
        const replies = rows.map((of) => bytes.hex(of.status ? new task.Refusal(of.status, of.code).reply
            : task.answer(bytes.unhex(of.bytes.slice(12, 140)), bytes.unhex(of.upload))));
        return {tasks, whole, replies, other}"""
    given = [row["bytes"] for row in SESSION["tasks"]]
    found = run(page, "task bytes", body, given=given, stubs=SESSION["stubs"], rows=SESSION["replies"])
    for task, row in zip(found["tasks"], SESSION["tasks"], strict=True):
        assert {name: task[name] for name in row if name in task} == {name: row[name] for name in row if name in task}
        assert len(row.keys() & task.keys()) > 10
    assert found["whole"] == [row["task"] for row in SESSION["stubs"]]
    assert found["replies"] == [row["bytes"] for row in SESSION["replies"]]
    assert found["other"] == "other bytes came under the name of a task's file"


def test_tasks_are_answered_as_our_client_answers_them(page):
    own = next(row for row in SESSION["keys"] if row["name"] == "client 0")
    body = """
        const digits = (data) => btoa(String.fromCharCode(...data)).replaceAll('+', '-').replaceAll('/', '_')
            .replaceAll('=', '');
        const point = bytes.unhex(own.public).slice(-64);
        const jwk = {kty: 'EC', crv: 'P-256', d: digits(bytes.unhex(own.private)), x: digits(point.slice(0, 32)),
            y: digits(point.slice(32))};
        const secret = await crypto.subtle.importKey('jwk', jwk, {name: 'ECDSA', namedCurve: 'P-256'}, false, ['sign']);
        const kept = new Map();
        const one = new client.Client({
            pair: {private: secret, public: await keys.publicKey(bytes.unhex(own.public))},
            authority: await certificate.certificate(bytes.unhex(authority)), dialled: name,
            store: {kept: async (name) => kept.get(name), keep: async (name, value) => kept.set(name, value)},
            folder: async () => { throw new Error('no model') }, rows: new File([], 'none'), limits: recipe.LIMITS,
            tell: () => 0});
        const trusted = one.owner.authority;
        one.owner.audience = await keys.audienceOf(trusted.fingerprint, one.owner.dialled);
        const found = [];
        for (const data of received) {
            const reply = await one.reply(bytes.unhex(data), new AbortController().signal);
            found.push([reply[5], new TextDecoder().decode(reply.slice(6))]);
        }
        return {found, runs: kept.get('logs').size, asked: kept.get('asked').length}"""
    rows = SESSION["received"]
    authority = SESSION["certificates"][0]["bytes"]
    received, name = [row["bytes"] for row in rows], SESSION["audiences"][0]["name"]
    modules = "client keys certificate recipe bytes"
    found = run(page, modules, body, own=own, authority=authority, received=received, name=name)
    names = [row["name"] for row in rows]
    assert dict(zip(names, found["found"], strict=True)) == {row["name"]: [row["status"], row["code"]] for row in rows}
    assert found["runs"] >= 1
    assert found["asked"] == 2


def test_links_and_heads_are_those_published(page):
    body = """
        const found = [];
        let known;
        for (const [done, of] of rows.entries()) {
            const link = await bytes.sha256(bytes.unhex(of.stem), await bytes.sha256(bytes.unhex(of.broadcast)));
            known = await task.follow({done, since: done, links: link, head: bytes.unhex(of.head), client: 0,
                digest: new Uint8Array(16)}, known);
            found.push([bytes.hex(link), bytes.hex(known.head)]);
        }
        return found"""
    rows = SESSION["log"]
    assert run(page, "task bytes", body, rows=rows) == [[row["link"], row["head"]] for row in rows]


# --- session.md: texts, tensors, files ----------------------------------------------------------

# The tokens of the vectors: bytes, with 256 before a text and 257 at its end.
BYTES = "const encode = (text, special) => [...(special ? [256] : []), ...new TextEncoder().encode(text)]; "


def test_prompts_spans_blocks_and_cuts_are_those_published(page):
    rows = [row for row in SESSION["prompts"] if row["template"] != "chat"]
    body = (
        BYTES
        + """
        const prompts = rows.map((of) => {
            const pieces = texts.pieces(of.template, of.separator, of.row);
            return {pieces: pieces.map((piece) => ({...piece, ended: true})), ...texts.example(pieces, encode, 257)} });
        const [blocks, ...cuts] = lengths;
        const packed = texts.packed(
            blocks.texts.map(({text, category}) => ({response: text, category})), blocks.max_tokens, encode, 257);
        const cut = cuts.map((of) => texts.shortened(texts.example(texts.pieces('plain', '',
            {...of.row, turns: [], plain: false}), encode, 257), of.max_tokens));
        return {prompts, packed, cut}"""
    )
    found = run(page, "texts", body, rows=rows, lengths=SESSION["lengths"])
    assert found["prompts"] == [{name: row[name] for name in ("pieces", "tokens", "counted")} for row in rows]
    blocks, *cuts = SESSION["lengths"]
    assert [block["tokens"] for block in found["packed"]] == blocks["blocks"]
    assert [cut["tokens"] for cut in found["cut"]] == [row["tokens"] for row in cuts]
    assert [cut["counted"] for cut in found["cut"]] == [[] if row["left out"] else row["counted"] for row in cuts]


def test_tensors_stand_in_the_published_order(page):
    body = "return rows.map((names) => names.sort(model.byCodePoint))"
    rows = [[tensor["name"] for tensor in row["layout"]] for row in SESSION["layouts"]]
    rows.append(["layers.10", "layers.2", "B", "a", "", "é", "\ue000", "\U0001f600", "a.b", "aa"])
    assert run(page, "model", body, rows=[row[::-1] for row in rows]) == [sorted(row) for row in rows]


def test_an_adapter_has_what_the_published_one_has(page):
    (of,) = SESSION["adapters"]
    body = """return bytes.hex(await adapter.adapter(
        Float32Array.from(of.coefficients), {...of, key: BigInt('0x' + of.key)}))"""
    assert run(page, "adapter bytes", body, of=of) == of["bytes"]


def test_the_adapter_of_a_browser_is_read_by_our_code(page, tmp_path):
    from fedkseed import Adapter

    about = {"base": "ab" * 32, "tuned": "cd" * 32, "patterns": ["*"]}
    provenance = {"model": "Größe \U0001f600 \x7f", "dtype": "float32", "template": "paper", "separator": "\n"}
    body = """return bytes.hex(await adapter.adapter(
        Float32Array.of(1, -0.5, 2 ** -149, 0), {...about, provenance, key: 2n ** 64n - 1n}))"""
    found = run(page, "adapter bytes", body, about=about, provenance=provenance)
    (tmp_path / "a.safetensors").write_bytes(bytes.fromhex(found))
    read = Adapter.load(tmp_path / "a.safetensors")
    assert (read.pool.key, read.provenance, read.tuned) == (2**64 - 1, provenance, about["tuned"])
    np.testing.assert_array_equal(read.coefficients, np.array([1, -0.5, 2.0**-149, 0], np.float32))
    assert math.isfinite(read.coefficients.sum())
