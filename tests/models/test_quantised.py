"""Base models that stay quantised: the library's values bit for bit, and tuning on top of them."""

import logging
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fedkseed import FedKSeedError, Pool, hold
from fedkseed.directions.numba_cpu.gguf import LAYOUTS
from fedkseed.models.load import load_model
from fedkseed.models.quantised import PLAIN, QUANTISABLE, Blocks, has_kernel, quantise, widened
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.start_and_resume import start
from fedkseed.weights.adapter import Adapter
from fedkseed.weights.layout import Layout
from fedkseed.weights.lazy import Lazy

from ..conftest import EVERYWHERE, recipe_text, tiny_llama
from ..weights.test_streamed import coefficients, loss_of

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KIND = gguf.GGMLQuantizationType


def llama() -> LlamaForCausalLM:
    """Rows of 64: two blocks of GGUF; two heads share a key, so that query and key rows move apart."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=128,
        )  # fmt: skip
        return LlamaForCausalLM(config).requires_grad_(False).eval()


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps the two halves of a rotary head's rows by turns."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def describe(writer: gguf.GGUFWriter, sizes: dict[str, float]) -> None:
    """Write a model's sizes, and a vocabulary of 96 words."""
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_vocab_size(96)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{k}" for k in range(96)])
    writer.add_token_merges([])


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_llama(path: Path, *kinds: gguf.GGMLQuantizationType) -> Path:
    """A file of a Llama, its matrices in these types of blocks by turns."""
    model, writer = llama(), gguf.GGUFWriter(path, "llama")
    sizes = {
        "block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96, "head_count": 4,
        "head_count_kv": 2, "layer_norm_rms_eps": 1e-6, "rope_dimension_count": 16,
    }  # fmt: skip
    describe(writer, sizes)
    for number, (name, tensor) in enumerate(model.named_parameters()):
        values = tensor.numpy()
        if ".q_proj." in name or ".k_proj." in name:
            values = interleaved(values, 4 if ".q_proj." in name else 2)
        if values.ndim == 2:
            kind = kinds[number % len(kinds)]
            by_hand = np.zeros(gguf.quant_shape_to_byte_shape(values.shape, kind), np.uint8)  # of what gguf can't write
            raw = by_hand if kind == KIND.Q8_1 else gguf.quantize(values, kind)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    finish(writer)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of several types of blocks, and of plain numbers of 16 bits."""
    kinds = KIND.Q8_0, KIND.Q4_0, KIND.Q4_1, KIND.Q5_0, KIND.BF16, KIND.F16
    return write_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf", *kinds)


def random_blocks(kind: str, rows: int, columns: int) -> np.ndarray:
    """Bytes of all values, and float16 numbers of all sizes; 0, −0, the smallest and the largest among them."""
    rng = np.random.default_rng(len(kind) + columns)
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = bits[bits & 0x7C00 != 0x7C00]
    if kind in PLAIN:
        return rng.choice(finite, (rows, columns)).view(np.uint8)
    layout = LAYOUTS[kind]
    raw = rng.integers(0, 256, (rows * columns // layout.weights, layout.size), np.uint8)
    for first in (layout.d, layout.d + 2) if layout.m else (layout.d,):
        halves = rng.choice(finite, len(raw))
        halves[:6] = 0, 0x8000, 1, 0x8001, 0x3FF, 0x7BFF
        raw[:, first : first + 2] = halves.view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("kind", [*LAYOUTS, *PLAIN])
def test_blocks_are_read_as_the_library_reads_them(kind, dtype):
    rows, columns = 40, 768
    raw, type_ = random_blocks(kind, rows, columns), KIND[kind]
    with np.errstate(over="ignore"):
        want = torch.from_numpy(gguf.dequantize(raw, type_)).to(dtype)
    blocks = Blocks(raw, kind, (rows, columns), dtype)
    whole, parts = torch.empty(rows, columns, dtype=dtype), torch.empty(rows, columns, dtype=dtype)
    blocks.read([(0, whole)])
    blocks.read([(0, parts[:1]), (columns, parts[1:3]), (3 * columns, parts[3:])])
    bits = {4: torch.int32, 2: torch.int16}[whole.element_size()]
    assert torch.equal(whole.view(bits), want.view(bits))
    assert torch.equal(parts.view(bits), want.view(bits))
    plain = widened(torch.from_numpy(raw[5:9]), kind)  # what other devices use
    assert torch.equal(plain.to(dtype).view(bits), want[5:9].view(bits))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_file_becomes_a_dense_model_without_a_warning_of_packed_weights(file, dtype):
    said = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        model = load_model(str(file), dtype)
    finally:
        logger.removeHandler(handler)
    assert said == []
    assert {type(module) for module in model.modules() if hasattr(module, "weight")} >= {nn.Linear, nn.Embedding}
    assert {parameter.dtype for parameter in model.parameters()} == {TYPES[dtype]}


def test_the_number_of_threads_changes_no_weight():
    values = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)  # 8,192 blocks: enough to share out
    raw = gguf.quantize(values, KIND.Q4_1)
    out, before = torch.empty(4096, 64), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        Blocks(raw, "Q4_1", out.shape, torch.float32).read([(0, out[:1000]), (64_000, out[1000:])])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, torch.from_numpy(gguf.dequantize(raw, KIND.Q4_1)))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_file_kept_as_stored_is_the_dequantised_model_bit_for_bit(file, dtype):
    kept, dense = load_model(str(file), dtype, "as stored"), load_model(str(file), dtype)
    lazy = [name for name, t in kept.named_parameters() if isinstance(t, Lazy)]
    assert set(lazy) == {name for name, t in dense.named_parameters() if t.ndim == 2}
    assert kept.lm_head.weight is kept.model.embed_tokens.weight
    assert Layout(kept).digest() == Layout(dense).digest()
    assert loss_of(kept)() == loss_of(dense)()


@pytest.mark.parametrize("family", EVERYWHERE)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_quantised_base_is_tuned_like_its_dequantised_self(file, family, dtype):
    pool, found = Pool(3, 32, family), []
    whole = "materialized" if pool.transformed else "in place"  # which adds a point to its running sum, as `auto` does
    for storage, mode in (("as stored", "auto"), ("dense", whole)):
        model = load_model(str(file), dtype, storage)
        weights = hold(model, pool, mode=mode)
        weights.load(coefficients(32))
        found.append((weights.base_digest, weights.digest(), weights.both(3, 1e-2, loss_of(model))))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_blocks_without_a_kernel_are_read_in_and_out_of_inference_mode_and_said_to_be_slow(tmp_path):
    path = write_llama(tmp_path / "slow.gguf", KIND.MXFP4, KIND.Q8_0)
    assert not has_kernel("MXFP4")
    with pytest.warns(UserWarning, match=r"8 matrices of type MXFP4 have no kernel: reading them takes about \S+ s in"):
        model = load_model(str(path), "float32", "as stored")
    loss = loss_of(model)
    before = loss()
    weights = hold(model, Pool(3, 32, "hadamard"))
    weights.load(coefficients(32))
    tuned = weights.digest()
    assert loss() != before
    assert weights.digest() == tuned


def test_blocks_that_nothing_here_reads_are_refused(tmp_path):
    path = write_llama(tmp_path / "unknown.gguf", KIND.Q8_1)
    with pytest.raises(FedKSeedError, match="matrices of type Q8_1, which is not read here; take a file of"):
        load_model(str(path), "float32", "as stored")


@pytest.mark.parametrize("kind", QUANTISABLE)
def test_a_dense_model_is_quantised_while_it_is_loaded(kind):
    model, dense = quantise(llama(), kind), llama()
    for name, t in dense.named_parameters():
        kept = model.get_parameter(name)
        if t.ndim == 2:
            want = gguf.dequantize(gguf.quantize(t.numpy(), KIND[kind]), KIND[kind])
            assert isinstance(kept, Lazy)
            assert torch.equal(kept.whole(), torch.from_numpy(want))
        else:
            assert torch.equal(kept, t)
    assert loss_of(model)() == pytest.approx(loss_of(dense)(), abs=0.05)


def test_matrices_of_no_whole_blocks_stay_dense():
    model = quantise(tiny_llama(), "Q8_0")  # rows of 48 and 96
    lazy = {name for name, t in model.named_parameters() if isinstance(t, Lazy)}
    assert lazy == {f"model.layers.{k}.mlp.down_proj.weight" for k in (0, 1)}
    assert np.isfinite(loss_of(model)())


def test_a_transposed_file_is_dequantised_where_it_must_be(tmp_path):
    """GPT-2's matrices lie the other way round in a file: blocks run across the rows of the model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=96, n_positions=1024)).eval()
    names = {
        "transformer.wte.weight": "token_embd.weight", "transformer.wpe.weight": "position_embd.weight",
        "transformer.ln_f.weight": "output_norm.weight", "transformer.ln_f.bias": "output_norm.bias",
        "h.0.ln_1": "attn_norm", "h.0.ln_2": "ffn_norm", "h.0.attn.c_attn": "attn_qkv",
        "h.0.attn.c_proj": "attn_output", "h.0.mlp.c_fc": "ffn_up", "h.0.mlp.c_proj": "ffn_down",
    }  # fmt: skip
    path = tmp_path / "gpt2.gguf"
    writer = gguf.GGUFWriter(path, "gpt2")
    sizes = {"block_count": 1, "context_length": 1024, "embedding_length": 64, "head_count": 2, "layer_norm_eps": 1e-5}
    describe(writer, sizes)
    for name, tensor in model.named_parameters():
        if name in names:
            target = names[name]
        else:
            part, suffix = name.removeprefix("transformer.").rsplit(".", 1)
            target = f"blk.0.{names[part]}.{suffix}"
        values = tensor.detach().numpy()
        if values.ndim == 2:
            values = values if name.startswith("transformer.w") else values.T
            writer.add_tensor(target, gguf.quantize(np.ascontiguousarray(values), KIND.Q8_0), raw_dtype=KIND.Q8_0)
        else:
            writer.add_tensor(target, values)
    finish(writer)
    kept, dense = load_model(str(path), "float32", "as stored"), load_model(str(path))
    assert isinstance(kept.transformer.wte.weight, Lazy)
    assert not isinstance(kept.transformer.h[0].attn.c_attn.weight, Lazy)
    assert Layout(kept).digest() == Layout(dense).digest()
    assert loss_of(kept)() == loss_of(dense)()


@pytest.mark.parametrize(
    ("storage", "message"),
    [("as stored", "only a .gguf file can be kept as stored"), ("Q2_X", "no storage of weights")],
)
def test_a_storage_that_does_not_fit_is_refused(model_folder, storage, message):
    with pytest.raises(FedKSeedError, match=message):
        load_model(str(model_folder), "float32", storage)


def test_a_quantised_model_is_not_written_to():
    model = quantise(llama(), "Q4_0")
    with pytest.raises(FedKSeedError, match="hold it in mode 'streamed'"):
        hold(model, Pool(3, 32, "hadamard"), mode="materialized")


def test_a_whole_run_on_a_quantised_base_and_its_adapter(tmp_path, model_folder, data_file):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe_text(model_folder, data_file, name=f'name = "{model_folder}"\nstorage = "Q8_0"'))
    start(load_recipe(recipe), tmp_path / "run")
    adapter = Adapter.load(tmp_path / "run/adapter.safetensors")
    assert adapter.storage == "Q8_0"
    model = load_model(str(model_folder), "float32", "Q8_0")
    base = loss_of(model)()
    adapter.apply(model)
    assert loss_of(model)() != base
    with pytest.raises(FedKSeedError, match="float32, Q8_0"):
        adapter.apply(load_model(str(model_folder)))


def test_a_recipe_with_a_quantised_base_that_would_be_written_is_refused(tmp_path, model_folder, data_file):
    recipe = tmp_path / "recipe.toml"
    change = f'name = "{model_folder}"\nstorage = "Q8_0"\nmode = "materialized"'
    recipe.write_text(recipe_text(model_folder, data_file, name=change))
    with pytest.raises(FedKSeedError, match="set mode = 'streamed'"):
        load_recipe(recipe)


@pytest.mark.parametrize(
    "count", [40, pytest.param(200, marks=pytest.mark.slow(seconds=37, guards="a damaged file that ends the process"))]
)
def test_gguf_files_with_flipped_bytes_are_loaded_or_refused(file, tmp_path, count):
    """Of the header, of which a byte says how many layers to build, and of what follows."""
    rng, whole, path = np.random.default_rng(8), file.read_bytes(), tmp_path / "damaged.gguf"
    ends = (24, 400, 2500, len(whole))
    for k in range(count):
        flipped = bytearray(whole)
        flipped[rng.integers(ends[k % 4])] ^= int(rng.integers(1, 256))
        path.write_bytes(flipped)
        with suppress(FedKSeedError):
            load_model(str(path), "float32", "as stored")
