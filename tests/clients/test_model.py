"""The client of clients/browser in a headless Chromium: recipes, rows, tokens, weights and losses beside ours."""

import base64
import csv
import gzip
import hashlib
import io
import json
import re
from copy import deepcopy
from pathlib import Path
from tomllib import loads
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from pydantic import BaseModel
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaForCausalLM

from fedkseed import Pool
from fedkseed.data.batches import Encoded, collate
from fedkseed.data.layouts import Example
from fedkseed.data.wording import Wording
from fedkseed.directions.numba_cpu.gguf import LAYOUTS
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.models.loss import batch_loss
from fedkseed.models.quantised import PLAIN
from fedkseed.network.https.browser_page import files_of
from fedkseed.network.protocol.client.policy import Policy
from fedkseed.network.protocol.networked_recipe import recipe_for_clients, with_network_defaults
from fedkseed.recipe import schema
from fedkseed.recipe.reading import parse
from fedkseed.tuned.gguf import write_gguf
from fedkseed.weights.modes import hold

from ..conftest import recipe_text, rows, tiny_llama
from ..encoding import encode_all
from ..models.test_quantised import finish, random_blocks
from .conftest import run

SAMPLE = Path(schema.__file__).parents[1] / "data" / "dolly-sample.jsonl.gz"
PREPARE = """
    const folder = async (name) => (await fetch('/model/' + name)).blob();
    const blob = (text) => new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))]);
    const json = async (name) => JSON.parse(await (await folder(name)).text()); """


def wished(folder: Path, **changes: str) -> str:
    """A recipe as clients get it."""
    lines = {"count": 'split = "files"', "generated": "generated = 0"} | changes
    recipe = with_network_defaults(parse(loads(recipe_text(folder, folder, **lines))))
    return recipe_for_clients(recipe, 3).decode()


# --- recipes ------------------------------------------------------------------------------------


def parts(of: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The tables of a recipe, with their types."""
    found = {}
    for name, field in of.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found


def test_the_client_knows_the_keys_of_a_recipe_and_no_others(page):
    keys = {table: text.split() for table, text in run(page, "recipe", "return recipe.KEYS").items()}
    tables = parts(schema.Recipe)
    assert keys.pop("") == [*schema.Recipe.model_fields]
    assert {name: set(own) for name, own in keys.items()} == {
        name: {*kind.model_fields} for name, kind in tables.items()
    }


def test_the_limits_of_a_page_are_our_defaults(page):
    limits, own = run(page, "recipe", "return recipe.LIMITS"), Policy()
    work, rows_ = own.training, own.data
    assert limits == {
        "heldOut": [*rows_.held_out], "separators": [*rows_.separators], "leastExamples": rows_.min_examples,
        "leastBatch": work.min_batch_size, "mostBatch": work.max_batch_size, "leastSteps": work.min_steps,
        "mostSteps": work.max_steps, "mostProbes": work.max_probes, "mostNumbers": work.max_numbers,
        "mostRounds": work.max_rounds, "mostTokens": rows_.max_tokens, "mostSeconds": work.max_seconds,
        "weightsPerDirection": work.weights_per_direction, "mostViews": rows_.max_views,
        "secretBatches": rows_.secret_batches,
    }  # fmt: skip


def test_a_recipe_is_read_as_ours(page, model_folder):
    text = wished(model_folder, lr="lr = 2e-5\nschedule = 'cosine'\nprobes = 2\nwire = 'sign'", seed=f"seed = {2**62}")
    body = "const of = recipe.readRecipe(text); return {...of, seed: String(of.seed)}"
    found = run(page, "recipe", body, text=text)
    ours = parse(loads(text))
    assert (found["seed"], found["model"]) == (str(2**62), model_folder.name)
    assert (found["heldOut"], found["template"], found["separator"]) == (["capital"], "paper", "\n")
    numbers = {name: getattr(ours.training, name) for name in ("rounds", "steps", "probes", "lr", "eps", "schedule")}
    assert {name: found[name] for name in numbers} == numbers
    assert (found["batch"], found["size"], found["count"], found["wire"]) == (2, 64, 3, "sign")


REFUSED = {
    "a key that nobody knows": {"seed": "seed = 1\nsurprise = 1"},
    "masks": {"seed": "seed = 1\n[secure]\nnorm = 1.0"},
    "noise": {"seed": "seed = 1\n[privacy]\nepsilon = 3.0"},
    "another algorithm": {"algorithm": 'algorithm = "fedkseed-backprop"'},
    "an objective of the server's": {"algorithm": 'objective = "evil.py:run"'},
    "another family": {"family": 'family = "gaussian"'},
    "a size that is no power of two": {"size": "size = 48"},
    "clients that share one file": {"count": 'split = "even"'},
    "a template that is a program": {"source": 'template = "chat"'},
    "a part of the weights": {"name": 'name = "m"\ntuned = ["*.bias"]'},
    "blocks that the page makes": {"name": 'name = "m"\nstorage = "Q8_0"'},
    "no TOML": {"rounds": "rounds = = 3"},
    "a date": {"rounds": "rounds = 1979-05-27"},
    "half a round": {"rounds": "rounds = 2.5"},
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_recipe_that_a_browser_cannot_follow_is_refused_with_one_word(page, what):
    lines = {"count": 'split = "files"'} | REFUSED[what]
    text = recipe_text(Path("m"), Path("d"), **lines)
    if what in ("masks", "noise"):
        text = recipe_text(Path("m"), Path("d"), count='split = "files"') + lines["seed"].partition("\n")[2]
    body = """try { recipe.readRecipe(text) } catch (error) { return [error.code, error.message] } return 'taken'"""
    code, why = run(page, "recipe", body, text=text)
    assert code == "recipe"
    assert len(why) > 10


def test_a_recipe_that_keeps_a_file_s_blocks_is_followed_since_its_weights_are_the_same(page, model_folder):
    text = wished(model_folder)
    changed = text.replace('storage = "dense"', 'storage = "as stored"')
    assert changed != text
    body = "return recipe.readRecipe(text).model"
    assert run(page, "recipe", body, text=changed) == run(page, "recipe", body, text=text)


def test_toml_is_read_as_tomllib_reads_it(page):
    text = '''
    # a comment
    a = 1_000
    "b c" = 'literal \\ text'   # behind a value
    d.e."f.g" = [1, -2.5, +3e2, 0x1F, 0o17, 0b101, [], ["x", """
long \\
      text "" with ""two"" quotes""""]]
    big = 9223372036854775807
    no = false
    inline = {x = 1, y.z = "\\u00fc\\U0001f600\\n"}
    [table."in quotes"]
    k = inf
    [[list]]
    n = 1
    [[list]]
    n = 2
    [list.sub]
    m = """'"""
    '''
    body = """const plain = (_, value) => typeof value === 'bigint' || value === Infinity ? String(value) : value;
        return JSON.parse(JSON.stringify(toml.parse(text), plain))"""
    ours = loads(text)
    ours["big"], ours["table"]["in quotes"]["k"] = str(ours["big"]), "Infinity"
    assert run(page, "toml", body, text=text) == ours
    for broken in (
        "a = 1\na = 2",
        "a",
        "a = ",
        "[a",
        "a = [1",
        'a = "x',
        "a = 01",
        "[a]\n[a]",
        "a = 1 b = 2",
        "a.b = 1\na = 2",
    ):
        found = run(page, "toml", "try { toml.parse(text) } catch (e) { return e.message } return 'taken'", text=broken)
        assert found.startswith("line "), broken


# --- rows and tokens ----------------------------------------------------------------------------


def test_rows_of_json_lines_json_and_csv_are_the_same(page):
    made = [row | {"context": 'He said: "no",\nand left.'} for row in rows()[:5]]
    table = io.StringIO()
    writer = csv.DictWriter(table, [*made[0]])
    writer.writeheader()
    writer.writerows(made)
    files = {"a.csv": table.getvalue(), "a.json": json.dumps(made), "a.jsonl": "\n".join(map(json.dumps, made)) + "\n"}
    body = "return Object.entries(files).map(([name, text]) => texts.readRows(name, text))"
    want = [row | {"turns": [], "plain": False} for row in made]
    assert run(page, "texts", body, files=files) == [want] * 3


def test_conversations_and_plain_texts_are_rows(page):
    talk = [{"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Yes?"), ("user", "Bye"))]
    body = "return texts.readRows('a.jsonl', lines.map((line) => JSON.stringify(line)).join('\\n'))"
    one, two = run(page, "texts", body, lines=[{"messages": talk}, {"text": "A story.", "category": "b"}])
    assert (one["turns"], one["response"]) == ([{"role": "user", "text": "Hi"}], "Yes?")
    assert (two["response"], two["plain"], two["category"]) == ("A story.", True, "b")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"instruction": "a"}', "row 1 has instruction; it needs instruction and response, messages, or text"),
        ('{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        ("", "0 rows"),
    ],
    ids=["columns", "cut", "empty"],
)
def test_a_file_that_holds_no_rows_is_refused(page, text, why):
    body = "try { return texts.readRows('a.jsonl', text).length + ' rows' } catch (error) { return error.message }"
    assert why in run(page, "texts", body, text=text)


def spoken(tokenizer: Tokenizer, words: list[str]) -> dict[str, Any]:
    """A tokenizer as its file says it, and the tokens that it gives texts."""
    one = AddedToken("<both>", normalized=True, special=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([one])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokens = [tokenizer.encode(text).ids for text in words]
    return {"file": json.loads(tokenizer.to_str()), "tokens": tokens}


def of_pieces() -> Tokenizer:
    """As SentencePiece's: spaces become ▁, and characters without a token bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", *[f"<0x{b:02X}>" for b in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([" ".join(row.values()).replace(" ", "▁") for row in rows()], trainer)
    return tokenizer


def of_bytes(split: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(row.values()) for row in rows()], trainer)
    return tokenizer


LATER = (  # of Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
TOKENIZERS = {
    "pieces": of_pieces,
    "bytes": lambda: of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes, digits apart": lambda: of_bytes(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=True)])
    ),
    "bytes, another pattern": lambda: of_bytes(
        pre_tokenizers.Sequence([
            pre_tokenizers.Split(pattern=Regex(LATER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_texts_become_the_tokens_that_the_library_gives(page, kind):
    lines = gzip.decompress(SAMPLE.read_bytes()).decode().splitlines()[:150]
    words = [" ".join(map(str, json.loads(line).values())) for line in lines]
    words += [
        "",
        " ",
        "  two  spaces \n\n\t x",
        "It's 12345 o'clock'LL",
        "a</s>b<s> c<both>d <both>",
        "naïve 🙂 日本語\u2009\x85\ufeffx",
    ]
    made = spoken(TOKENIZERS[kind](), words)
    body = """const own = new tokenizer.Tokenizer(file, {eos_token: {content: '</s>'}});
        return words.map((text) => own.encode(text, true))"""
    assert run(page, "tokenizer", body, words=words, file=made["file"]) == made["tokens"]


def test_a_tokenizer_with_parts_that_the_page_does_not_know_is_refused(page):
    file = json.loads(TOKENIZERS["bytes"]().to_str())
    for part, kind in (("model", "Unigram"), ("normalizer", "Nmt"), ("pre_tokenizer", "Metaspace")):
        body = "try { new tokenizer.Tokenizer(file, {}) } catch (error) { return error.message }"
        assert "which this page does not know" in run(page, "tokenizer", body, file=file | {part: {"type": kind}})


# --- weights and losses -------------------------------------------------------------------------


def test_the_model_has_our_digests_and_the_batch_our_loss(page, model_folder):
    pool = Pool((1 << 64) - 5, 64, "hadamard")
    model = load_model(str(model_folder))
    weights = hold(model, pool, mode="materialized")
    c = (np.random.default_rng(0).normal(size=64) * 1e-2).astype(np.float32)
    base = weights.base_digest.hex()
    weights.load(c)
    given = [Example(row["instruction"], row["response"], row["context"], row["category"]) for row in rows()[:5]]
    encoded = encode_all(given, AutoTokenizer.from_pretrained(model_folder), Wording("paper", "\n"))
    encoded.append(Encoded((5, 9), 0, Example("", "")))  # two tokens, of which the first is never counted
    body = (
        PREPARE
        + """
        const config = await json('config.json');
        const spoken = new tokenizer.Tokenizer(await json('tokenizer.json'), await json('tokenizer_config.json'));
        const own = await model.readWeights(await folder('weights'), config, BigInt(key), c.length, () => 0);
        const net = new llama.Llama(own, config);
        const base = await own.digest(false);
        const examples = given.map((row) => texts.example(
            texts.pieces('paper', '\\n', {...row, turns: [], plain: false}), spoken.encode, spoken.end));
        examples.push({tokens: [5, 9], counted: [[0, 2]]});
        const loss = net.loss(Float32Array.from(c), examples);
        return {base, tuned: await own.digest(true), loss, again: net.loss(Float32Array.from(c), examples),
            tokens: examples.map((one) => one.tokens)}"""
    )
    found = run(
        page, "model llama tokenizer texts", body, c=c.tolist(), key=str(pool.key),
        given=[{"instruction": e.instruction, "response": e.response, "context": e.context} for e in given],
    )  # fmt: skip
    assert found["tokens"] == [list(one.tokens) for one in encoded]
    assert (found["base"], found["tuned"]) == (base, weights.digest().hex()), "bit for bit"
    assert found["loss"] == pytest.approx(batch_loss(model, collate(encoded, 0)), rel=1e-5)  # float32 of 96 products
    assert found["again"] == found["loss"]


KINDS = {"F32": gguf.GGMLQuantizationType.F32} | {kind: gguf.GGMLQuantizationType[kind] for kind in (*LAYOUTS, *PLAIN)}


def in_base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def test_blocks_of_every_type_are_the_numbers_that_the_library_gives(page, tmp_path):
    """Bytes of all values and float16 numbers of all sizes; the smallest and the largest among them."""
    path, want = tmp_path / "m.gguf", {}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "\u00fc"] * 50)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    for number, (name, kind) in enumerate(KINDS.items()):
        dense = np.random.default_rng(number).normal(size=(6, 768)).astype(np.float32)
        raw = dense if name == "F32" else random_blocks(name, 6, 768)
        writer.add_tensor(f"blk.{number}.ffn_up.weight", raw, raw_dtype=kind)
        with np.errstate(over="ignore"):
            values = dense if name == "F32" else gguf.dequantize(raw, kind)
        want[f"model.layers.{number}.mlp.up_proj.weight"] = [6, 768], hashlib.sha256(values.tobytes()).hexdigest()
    finish(writer)
    body = (
        PREPARE
        + """
        const found = {};
        const config = {num_attention_heads: 4, rms_norm_eps: 1e-6};
        for (const {name, shape, read} of await gguf.readGguf(blob(file), config, 64))
            found[name] = [shape, bytes.hex(await bytes.sha256(new Uint8Array((await read()).buffer)))];
        return found"""
    )
    assert run(page, "gguf bytes", body, file=in_base64(path)) == {name: [*pair] for name, pair in want.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_is_the_model_that_we_load_of_it(page, tmp_path, model_folder, tied):
    """Its rows of queries and keys, its ties, and the tokenizer and configuration that a server makes of it."""
    path, pool = tmp_path / "m.gguf", Pool(7, 64, "hadamard")
    tokenizer, config = load_tokenizer(str(model_folder)), deepcopy(tiny_llama().config)
    config.hidden_size, config.tie_word_embeddings = 64, tied  # whole blocks
    with torch.random.fork_rng():
        torch.manual_seed(1)
        write_gguf(path, LlamaForCausalLM(config), tokenizer, "q8_0")
    base = hold(load_model(str(path), storage="as stored"), pool, mode="streamed").base_digest.hex()
    made = {name: json.loads(file) for name, file in files_of(path).items() if isinstance(file, bytes)}
    texts = ["What is it?  12 o'clock\n", "na\u00efve \U0001f642"]
    body = (
        PREPARE
        + """
        const config = made['config.json'];
        const own = await model.readWeights(blob(file), config, 7n, 64, () => 0);
        const net = new llama.Llama(own, config);
        const spoken = new tokenizer.Tokenizer(made['tokenizer.json'], made['tokenizer_config.json']);
        const row = {tokens: [5, 9, 3, 8, 1], counted: [[1, 5]]};
        return {base: await own.digest(false), tokens: texts.map((text) => spoken.encode(text, true)), end: spoken.end,
            loss: net.loss(new Float32Array(64), [row])}"""
    )
    found = run(page, "model llama tokenizer", body, file=in_base64(path), made=made, texts=texts)
    ours = load_tokenizer(str(path))
    assert (found["base"], found["end"]) == (base, ours.eos_token_id)
    assert found["tokens"] == [ours(text).input_ids for text in texts] == [tokenizer(text).input_ids for text in texts]
    row = Encoded((5, 9, 3, 8, 1), 1, Example("", ""))
    assert found["loss"] == pytest.approx(batch_loss(load_model(str(path)), collate([row], 0)), rel=1e-5)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A file whose matrices are blocks."""
    config = deepcopy(tiny_llama().config)
    config.hidden_size = 64
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = LlamaForCausalLM(config)
    write_gguf(path := tmp_path_factory.mktemp("gguf") / "m.gguf", net, load_tokenizer(str(model_folder)), "q8_0")
    return path


READ = """
    const config = {num_attention_heads: 4, num_key_value_heads: 2, rms_norm_eps: 1e-6, tie_word_embeddings: true};
    const tried = (file) => model.readWeights(file, {...config, ...change}, 7n, 64, () => 0)
        .then(() => 'read', (error) => error.constructor === Error || error.name === 'SyntaxError' ? error.message
            : 'a fault: ' + error.stack); """


@pytest.mark.parametrize("keep", [0, 2, 30, 5000, -40])
def test_a_cut_file_of_weights_is_refused(page, gguf_file, keep):
    cut = base64.b64encode(gguf_file.read_bytes()[:keep]).decode()
    found = run(page, "model", PREPARE + READ + "return tried(blob(file))", file=cut, change={})
    assert re.search(r"is no \.safetensors|is cut", found)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_attention_heads": 8}, "says 4 for heads, and config.json 8"),
        ({"num_key_value_heads": None}, "says 2 for pairs of keys, and config.json 4"),
        ({"rope_theta": 500000}, "says 10000 for the base of positions, and config.json 500000"),
        ({"rms_norm_eps": 1e-5}, "for epsilon, and config.json 0.00001"),
        ({}, "read"),
    ],
    ids=["heads", "keys", "positions", "epsilon", "the same"],
)
def test_a_gguf_file_beside_the_description_of_another_model_is_refused(page, gguf_file, change, why):
    body = PREPARE + READ + "return tried(blob(file))"
    assert why in run(page, "model", body, file=in_base64(gguf_file), change=change)


def test_gguf_files_with_flipped_bytes_are_read_or_refused_with_a_sentence(page, gguf_file):
    rng, size = np.random.default_rng(8), gguf_file.stat().st_size
    ends = [rng.integers(0, size, 20), rng.integers(0, 600, 40), rng.integers(9000, 16000, 60)]
    places = [[int(at), int(rng.integers(1, 256))] for at in np.concatenate(ends)]
    body = (
        PREPARE
        + READ
        + """
        const whole = new Uint8Array(await blob(file).arrayBuffer());
        const found = [];
        for (const [at, flip] of places) {
            const data = whole.slice();
            data[at] ^= flip;
            found.push(await tried(new Blob([data])));
        }
        return found"""
    )
    found = run(page, "model", body, file=in_base64(gguf_file), places=places, change={})
    assert not [text for text in found if text.startswith("a fault")]
    assert "read" in found
    assert len({*found}) > 5, "sentences of several kinds"


def test_a_model_that_the_page_cannot_run_is_refused_by_name(page, tmp_path):
    config = tiny_llama().config.to_dict()
    changes = {
        "a model of the type gpt2": {"model_type": "gpt2"},
        "the activation gelu": {"hidden_act": "gelu"},
        "positions of the type yarn": {"rope_parameters": {"rope_type": "yarn"}},
        "widths no multiple of 16": {"intermediate_size": 100},
        "an odd number of words": {"vocab_size": 401},
    }
    for what, change in changes.items():
        body = "try { new llama.Llama(null, config) } catch (error) { return error.message }"
        assert what in run(page, "llama", body, config=config | change)
