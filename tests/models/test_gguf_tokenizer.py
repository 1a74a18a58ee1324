"""Tokenizers in GGUF files: llama.cpp cuts texts into the tokens into which our tokenizer cuts them."""

import json
from contextlib import nullcontext

import pytest
import torch
from gguf import GGUFReader, GGUFWriter, SpecialVocab
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fedkseed import FedKSeedError
from fedkseed.data.sources import read
from fedkseed.data.wording import Wording
from fedkseed.models.gguf_tokenizer import BY_NAME, BYTE_TOKENS, CONTRACTIONS, CUTS, REST, WORDS
from fedkseed.models.load import load_tokenizer
from fedkseed.models.sentencepiece import add_ends
from fedkseed.tuned.gguf import write_gguf
from fedkseed.tuned.read_back import require_same_tokenizer

from .llama_cpp import LlamaCpp

TEXTS = [
    "How many legs has an ant? It's 6, they'LL say; we'd 12345 67.",
    "  two  spaces\n\n\nlines\t\ttabs \n  end ",
    "naïve café — “quotes” … 東京 Ελλάδα привет 👩‍🚀 e\u0301",
    "x=[1,2];\r\nprint('a'*10)//ok",
    "",
    " ",
]
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
CUT = pre_tokenizers.ByteLevel(add_prefix_space=False)
WAYS = {
    "gpt-2": CUT,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), CUT]),
    "llama-bpe": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(CONTRACTIONS + WORDS + r"\p{N}{1,3}" + REST), "isolated"), BYTES]
    ),
    "qwen2": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(CONTRACTIONS + WORDS + r"\p{N}" + REST), "isolated"), BYTES]
    ),
}


# Letters of scripts with and without capitals, digits, signs and white space; capitals of other scripts than Latin are
# cut by llama.cpp's own form of two expressions otherwise than by the models' own tokenizers.
LETTERS = [*"abcXYZéß가東や٣½²0123456789'!?.,:;|$+<=>^~`(_/-…。“", " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "\u00a0"]


def texts() -> list[str]:
    return [f"{e.instruction} {e.response}" for e in read("dolly-sample")[:300]]


def of_bytes(way: pre_tokenizers.PreTokenizer, ignore_merges: bool = False) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    made.pre_tokenizer, made.decoder = way, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<begin>", "<end>"],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<begin>", eos_token="<end>")


def of_pieces(prepends: bool) -> PreTrainedTokenizerFast:
    """A tokenizer as those of Llama 2 are: pieces of text with their merges, and a token for each byte."""
    steps = [normalizers.Prepend("▁")] * prepends + [normalizers.Replace(" ", "▁")]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence(steps)
    trained.train_from_iterator(
        texts(), trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    words = ["<unk>", "<s>", "</s>", *sorted(BYTE_TOKENS)]
    words += [word for word, _ in sorted(model["vocab"].items(), key=lambda pair: pair[1]) if word not in words]
    made = Tokenizer(
        models.BPE(
            {word: number for number, word in enumerate(words)},
            [tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    made.normalizer = normalizers.Sequence(steps)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def model_for(tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3,  # some models have rows for words that there are not
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).requires_grad_(False).eval()


@pytest.mark.parametrize("name", WAYS)
def test_bytes_are_cut_and_merged_as_here(name, tmp_path):
    tokenizer = of_bytes(WAYS[name], name == "llama-bpe")
    write_gguf(tmp_path / "a.gguf", model_for(tokenizer), tokenizer, "f16")
    assert GGUFReader(tmp_path / "a.gguf").fields["tokenizer.ggml.pre"].contents() == name
    there = LlamaCpp(tmp_path / "a.gguf")
    for text in [*TEXTS, *texts()[:40]]:
        assert there.tokens(text) == tokenizer(text).input_ids, text


@pytest.mark.parametrize("prepends", [True, False])
def test_pieces_are_merged_as_here_and_the_beginning_is_added(prepends, tmp_path):
    tokenizer = of_pieces(prepends)
    write_gguf(tmp_path / "a.gguf", model_for(tokenizer), tokenizer, "f16")
    there = LlamaCpp(tmp_path / "a.gguf")
    for text in [*TEXTS[:-2], *texts()[:40]]:
        assert there.tokens(text) == tokenizer(text).input_ids, text


@pytest.mark.parametrize("prepends", [True, False])
def test_pieces_of_a_file_cut_texts_as_llama_cpp_does_behind_special_tokens_too(prepends, tmp_path):
    """The files of Llama 2, TinyLlama and Vicuna."""
    tokenizer = of_pieces(prepends)
    write_gguf(tmp_path / "a.gguf", model_for(tokenizer), tokenizer, "f16")
    there, here = LlamaCpp(tmp_path / "a.gguf"), load_tokenizer(str(tmp_path / "a.gguf"))
    assert (here.bos_token, here.eos_token, here.unk_token) == ("<s>", "</s>", "<unk>")
    for text in [*TEXTS, *texts()[:40], "one</s>two", "</s><s> three </s>\nfour", "5</s></s> 6"]:
        assert here(text).input_ids == there.tokens(text), text
        words = here(text, add_special_tokens=False).input_ids
        assert here.decode(words).strip(" ") == text.strip(" ") or "</s>" in text


def of_cuts(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer that cuts texts as one of llama.cpp's names says, with tokens of letters beyond ASCII."""
    steps = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in CUTS[name].expressions]
    tokenizer = of_bytes(pre_tokenizers.Sequence([*steps, BYTES]), CUTS[name].whole)
    tokenizer.add_tokens([AddedToken("<｜User｜>", special=True, normalized=False), "of a naïve"])
    return tokenizer


@pytest.mark.parametrize("name", CUTS)
def test_texts_are_cut_as_llama_cpp_cuts_them_by_each_of_its_names(name, tmp_path, monkeypatch):
    """By another name of the same steps, too; tokens of letters beyond ASCII, as DeepSeek's, are one token."""
    made, write = of_cuts(name), GGUFWriter.add_tokenizer_pre
    write_gguf(tmp_path / "a.gguf", model_for(made), made, "f16")
    assert GGUFReader(tmp_path / "a.gguf").fields["tokenizer.ggml.pre"].contents() == name
    other = [other for other, cuts in BY_NAME.items() if cuts is CUTS[name]][-1]
    monkeypatch.setattr(GGUFWriter, "add_tokenizer_pre", lambda writer, _: write(writer, other))
    write_gguf(tmp_path / "b.gguf", model_for(made), made, "f16")
    there, here = LlamaCpp(tmp_path / "b.gguf"), load_tokenizer(str(tmp_path / "b.gguf"))
    first = load_tokenizer(str(tmp_path / "a.gguf"))

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.sampled_from([*LETTERS, "<｜User｜>", "<end>"]), max_size=20).map("".join))
    def agree(text: str) -> None:
        assert here(text).input_ids == there.tokens(text) == first(text).input_ids

    agree()
    for text in [*TEXTS, *texts()[:40], "a<｜User｜>b of a naïve<｜User｜> c"]:
        tokens = here(text).input_ids
        assert tokens == there.tokens(text) == made(text).input_ids, text
        assert here.decode(tokens) == text
    assert here.convert_tokens_to_ids("<｜User｜>") in here("it<｜User｜>").input_ids


def test_a_file_that_does_not_say_it_begins_texts_as_llama_cpp_does(tmp_path, monkeypatch):
    monkeypatch.setattr(GGUFWriter, "add_add_bos_token", lambda *_: None)
    for name in ("llama-bpe", "qwen2"):
        made, path = of_cuts(name), tmp_path / f"{name}.gguf"
        write_gguf(path, model_for(made), made, "f16")
        tokens = load_tokenizer(str(path))("so").input_ids
        assert (tokens[0] == made.bos_token_id) == (name == "llama-bpe")
        assert tokens == LlamaCpp(path).tokens("so")


def test_a_name_that_is_not_known_is_refused_and_none_is_the_default(tmp_path, monkeypatch):
    made, write = of_cuts("default"), GGUFWriter.add_tokenizer_pre
    monkeypatch.setattr(GGUFWriter, "add_tokenizer_pre", lambda writer, _: write(writer, "kimi-k2"))
    write_gguf(tmp_path / "a.gguf", model_for(made), made, "f16")
    with pytest.raises(FedKSeedError, match=r"a\.gguf .*cuts texts as llama.cpp's 'kimi-k2' \(tokenizer.ggml.pre\)"):
        load_tokenizer(str(tmp_path / "a.gguf"))
    monkeypatch.setattr(GGUFWriter, "add_tokenizer_pre", lambda *_: None)
    write_gguf(tmp_path / "b.gguf", model_for(made), made, "f16")
    with pytest.warns(UserWarning, match=r"b\.gguf does not say how its tokenizer cuts texts"):
        here, there = load_tokenizer(str(tmp_path / "b.gguf")), LlamaCpp(tmp_path / "b.gguf")
    for text in TEXTS:
        assert here(text).input_ids == there.tokens(text)


def test_what_llama_cpp_would_cut_otherwise_is_refused(tmp_path):
    for way, match in (
        (pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), BYTES]), r'"Whitespace".* gpt-2, smollm, llama-bpe'),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(), CUT]), "Digits"),  # not single ones
    ):
        tokenizer = of_bytes(way)
        with pytest.raises(FedKSeedError, match=match):
            write_gguf(tmp_path / "a.gguf", model_for(tokenizer), tokenizer, "f16")
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("</s>", 0.0)], 0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=unigram, eos_token="</s>", bos_token="</s>")
    with pytest.raises(FedKSeedError, match="type Unigram can't be written"):
        write_gguf(tmp_path / "a.gguf", model_for(tokenizer), tokenizer, "f16")
    letters = of_bytes(CUT)
    letters.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(FedKSeedError, match=r"changes letters \(Lowercase\)"):
        write_gguf(tmp_path / "a.gguf", model_for(letters), letters, "f16")
    with_merges = of_bytes(WAYS["qwen2"], ignore_merges=True)
    with pytest.raises(FedKSeedError, match="Split"):
        write_gguf(tmp_path / "a.gguf", model_for(with_merges), with_merges, "f16")


# As DeepSeek publishes them, with line ends as they are, and a normaliser that has no steps.
PUBLISHED = {
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
        " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tokenizer_as_it_is_published_has_its_name(name, tmp_path):
    steps = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in PUBLISHED[name]]
    digits = [pre_tokenizers.Digits(individual_digits=True)] * (name == "deepseek-coder")
    tokenizer = of_bytes(pre_tokenizers.Sequence([*steps, *digits, BYTES]))
    for letters in (normalizers.Sequence([]), normalizers.NFC(), normalizers.Sequence([normalizers.NFC()])):
        tokenizer.backend_tokenizer.normalizer = letters
        write_gguf(tmp_path / "a.gguf", model_for(tokenizer), tokenizer, "f16")
        require_same_tokenizer(tmp_path / "a.gguf", tokenizer)
    assert GGUFReader(tmp_path / "a.gguf").fields["tokenizer.ggml.pre"].contents() == name


@pytest.mark.parametrize(
    ("written", "change", "message"),
    [
        ("merges", lambda merges: [*merges, "zq xj"], "its merge 'zq', 'xj' is not of tokens of its vocabulary"),
        ("merges", lambda merges: ["zqxj", *merges], "its merge 'zqx'"),
        ("merges", lambda merges: ["e t h", *merges], "its merge 'e', 't h'"),
        ("list", lambda texts: [*texts[:-1], texts[9]], "two tokens of its vocabulary are"),
    ],
)
def test_damaged_fields_of_a_tokenizer_are_refused(written, change, message, tmp_path, monkeypatch):
    name, made = f"add_token_{written}", of_bytes(CUT)
    write = getattr(GGUFWriter, name)
    monkeypatch.setattr(GGUFWriter, name, lambda writer, content: write(writer, change(content)))
    write_gguf(tmp_path / "a.gguf", model_for(made), made, "f16")
    with pytest.raises(FedKSeedError, match=rf"a\.gguf can't be loaded: {message}"):
        load_tokenizer(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("name", ["my-Phi-3-mini", "other"])
def test_special_tokens_of_phi_3_take_the_space_behind_them(name, tmp_path):
    tokenizer = of_pieces(prepends=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</s>", "<|user|>", "<|endoftext|>"]})
    model = model_for(tokenizer)
    model.config.name_or_path = name
    write_gguf(tmp_path / "a.gguf", model, tokenizer, "f16")
    there, here = LlamaCpp(tmp_path / "a.gguf"), load_tokenizer(str(tmp_path / "a.gguf"))
    texts = [f"{token}{space}How many{space}{token}" for token in ("<|user|>", "</s>", "<|endoftext|>", "<s>")
             for space in ("\n", " ", " \n\n ", "")]  # fmt: skip
    for text in texts:
        assert here(text).input_ids == there.tokens(text), text
    assert (here("<|user|>\nHow").input_ids == here("<|user|>How").input_ids) == (name != "other")


TEMPLATE = "{% for m in messages %}{{ m.role }}<end> {{ m.content }}<end>{% endfor %}"


@pytest.mark.parametrize("strips", [False, True])
def test_a_written_file_cuts_messages_as_the_tokenizer_or_is_refused(strips, tmp_path):
    tokenizer = of_bytes(WAYS["qwen2"])
    tokenizer.add_tokens([AddedToken("<end>", special=True, normalized=False, rstrip=strips)])
    tokenizer.chat_template = TEMPLATE
    write_gguf(tmp_path / "a.gguf", model_for(tokenizer), tokenizer, "f16")
    with pytest.raises(FedKSeedError, match=r"into other tokens.*--format hf") if strips else nullcontext():
        require_same_tokenizer(tmp_path / "a.gguf", tokenizer)
    loaded = load_tokenizer(str(tmp_path / "a.gguf"))
    letters = pre_tokenizers.Split(Regex("."), "isolated")
    loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([letters, BYTES])
    loaded.save_pretrained(tmp_path / "folder")
    model_for(tokenizer).save_pretrained(tmp_path / "folder")
    with pytest.raises(FedKSeedError, match="please report this"):
        require_same_tokenizer(tmp_path / "folder", tokenizer)


@pytest.mark.parametrize("begins", [True, False])
def test_a_space_before_the_first_word_alone_is_none_in_messages_that_a_special_token_begins(begins, tmp_path):
    tokenizer = of_pieces(prepends=False)
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</s>"]})
    template = "</s>" * begins + "say: {{ messages[0].content }}" + "</s>" * begins + "{# #}"
    tokenizer.chat_template = template
    write_gguf(tmp_path / "a.gguf", model_for(tokenizer), tokenizer, "f16")
    require_same_tokenizer(tmp_path / "a.gguf", tokenizer)
    there = LlamaCpp(tmp_path / "a.gguf")
    tokenizer.chat_template = Wording("paper").chat_template(tokenizer)  # in words of its own
    write_gguf(tmp_path / "b.gguf", model_for(tokenizer), tokenizer, "f16", words=Wording("paper"))
    require_same_tokenizer(tmp_path / "b.gguf", tokenizer, Wording("paper"))
    tokenizer.chat_template = template
    for text in TEXTS[:4]:
        said = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
        assert there.tokens(said)[1:] == tokenizer(said, add_special_tokens=False).input_ids


@pytest.mark.parametrize("begin", ["<s>", "<im:start>"])
def test_the_converter_of_llama_cpp_finds_the_token_that_begins_texts(tmp_path, begin):
    """A tokenizer.json names it by its text, but where a template of the library could not have it."""
    trained = Tokenizer(models.BPE({begin: 0, "</s>": 1, "a": 2, "b": 3}, []))
    add_ends(trained, {"bos_token": begin, "eos_token": "</s>"}, True, False)
    assert trained.encode("ab").tokens == [begin, "a", "b"]
    PreTrainedTokenizerFast(tokenizer_object=trained, bos_token=begin, eos_token="</s>").save_pretrained(tmp_path)
    if begin == "<s>":
        assert SpecialVocab(tmp_path).add_special_token["bos"] is True
