"""Exported folders: each is loaded by the program that it is for, and is the tuned model there."""

import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub.repocard import metadata_load
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedkseed import Adapter, FedKSeedError
from fedkseed.data.layouts import Example
from fedkseed.data.wording import Wording
from fedkseed.models.load import load_tokenizer
from fedkseed.tuned.export import export, modelfile
from fedkseed.tuned.load import open_tuned
from fedkseed.weights.layout import Layout

from ..models.llama_cpp import LlamaCpp

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # peft uses what transformers renames
QUESTION = Example("How many legs has an ant?", "", "A child asks.")


@pytest.fixture(scope="module")
def runs(finished) -> dict[str, Path]:
    """A run of K coefficients at full rank, of low rank, of all weights, of LoRA, of one vector, and of a prompt."""
    return {
        "hadamard": finished(lr="lr = 3e-3"),
        "separable": finished(family='family = "separable"', lr="lr = 3e-3", tuned='["*proj*"]'),
        "fedavg": finished(algorithm='algorithm = "fedavg"', lr="lr = 1e-2"),
        "fedit": finished(algorithm='algorithm = "fedit"', lr="lr = 1e-2"),
        "fedunilora": finished(algorithm='algorithm = "fedunilora"', lr="lr = 1e-1"),
        "fedprompt": finished(algorithm='algorithm = "fedprompt"', lr="lr = 1e-1"),
    }


def prompt(run: Path) -> list[int]:
    opened = open_tuned(run)
    return opened.wording.prompt(QUESTION, opened.tokenizer())


def logits(model, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits.float()[:, -len(tokens) :]  # virtual tokens have some, too


def nats(model, tokens: list[int]) -> np.ndarray:
    """The losses of all tokens from the 20th on."""
    ours = -torch.log_softmax(logits(model, tokens)[0].double(), -1)
    return np.array([float(ours[at - 1, tokens[at]]) for at in range(20, len(tokens))])


def change(run: Path, tokens: list[int]) -> float:
    """The most by which a run has moved a logit."""
    opened = open_tuned(run)
    return float((logits(opened.load(), tokens) - logits(opened.load_base(), tokens)).abs().max())


@pytest.mark.parametrize("way", ["hadamard", "separable", "fedavg", "fedit", "fedunilora"])
def test_a_whole_model_has_the_tuned_logits_in_transformers_and_its_losses_in_llama_cpp(way, runs, tmp_path):
    tokens, tuned = prompt(runs[way]), open_tuned(runs[way])
    expected = logits(tuned.load(), tokens)
    assert change(runs[way], tokens) > 1e-3
    export(tuned, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert (logits(model, tokens) - expected).abs().max() < 1e-5  # a merged LoRA is rounded once more
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("a cat").input_ids == tuned.tokenizer()("a cat").input_ids
    export(tuned, tmp_path / "gguf", "gguf", kind="f32")
    assert {p.name for p in (tmp_path / "gguf").iterdir()} == {"model-f32.gguf", "Modelfile", "README.md"}
    there = LlamaCpp(tmp_path / "gguf" / "model-f32.gguf")
    assert np.abs(there.losses(tokens, 20, 400) - nats(tuned.load(), tokens)).max() < 1e-5
    answer = model.generate(torch.tensor([tokens]), max_new_tokens=16, do_sample=False)[0, len(tokens) :].tolist()
    export(tuned, tmp_path / "f16", "gguf", kind="f16")
    assert LlamaCpp(tmp_path / "f16" / "model-f16.gguf").greedy(tokens, 16) == answer


def test_a_run_of_coefficients_is_exported_to_the_bit(runs, tmp_path):
    export(open_tuned(runs["hadamard"]), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert Layout(model).digest().hex() == Adapter.load(runs["hadamard"] / "adapter.safetensors").tuned


@pytest.mark.parametrize("way", ["separable", "fedit", "fedunilora", "fedprompt"])
def test_peft_gives_the_tuned_logits(way, runs, tmp_path, model_folder):
    tokens, tuned = prompt(runs[way]), open_tuned(runs[way])
    export(tuned, tmp_path / "peft", "peft")
    names = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert {p.name for p in (tmp_path / "peft").iterdir()} == names
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "peft")
    assert change(runs[way], tokens) > 1e-3
    assert (logits(model, tokens) - logits(tuned.load(), tokens)).abs().max() < 1e-5
    about = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(model_folder)


@pytest.mark.parametrize("way", ["hadamard", "fedavg"])
def test_a_change_of_full_rank_is_a_lora_with_the_error_that_it_states(way, runs, tmp_path, model_folder):
    tuned = open_tuned(runs[way])
    with pytest.raises(FedKSeedError, match="at full rank, which LoRA can't hold; give --rank"):
        export(tuned, tmp_path / "peft", "peft")
    (_, error) = export(tuned, tmp_path / "peft", "peft", rank=4)
    stated = float(error.partition("tuned model's: ")[2].partition("%")[0]) / 100
    base, after = (dict(m.named_parameters()) for m in (tuned.load_base(), tuned.load()))
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    left, whole = 0.0, 0.0
    for name, value in after.items():
        path = "base_model.model." + name.removesuffix(".weight")
        if value.ndim == 2 and "embed" not in name:
            kept = tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"]
        elif value.ndim == 2:
            kept = (tensors[f"{path}.lora_embedding_B"] @ tensors[f"{path}.lora_embedding_A"]).T
        else:
            continue
        left += float((value - base[name] - kept).double().square().sum())
        whole += float((value - base[name]).double().square().sum())
    assert stated == pytest.approx((left / whole) ** 0.5, abs=6e-4)  # printed to a tenth of a percent
    assert error in (tmp_path / "peft" / "README.md").read_text()


@pytest.mark.parametrize("way", ["separable", "fedit"])
def test_llama_cpp_gives_the_tuned_losses_with_the_base_and_the_lora(way, runs, tmp_path, model_folder):
    tokens, tuned = prompt(runs[way]), open_tuned(runs[way])
    export(open_tuned(model_folder), tmp_path / "base", "gguf", kind="f32")
    export(tuned, tmp_path / "lora", "lora-gguf")
    there = LlamaCpp(tmp_path / "base" / "model-f32.gguf", tmp_path / "lora" / "lora.gguf")
    wanted = nats(tuned.load(), tokens)
    assert np.abs(there.losses(tokens, 20, 400) - wanted).max() < 1e-5
    assert np.abs(LlamaCpp(tmp_path / "base" / "model-f32.gguf").losses(tokens, 20, 400) - wanted).max() > 1e-4


def test_coefficients_are_exported_as_they_are(runs, tmp_path):
    export(open_tuned(runs["hadamard"]), tmp_path / "own", "fedkseed")
    before, after = (folder / "adapter.safetensors" for folder in (runs["hadamard"], tmp_path / "own"))
    assert after.read_bytes() == before.read_bytes()
    with pytest.raises(FedKSeedError, match="is not a function of K coefficients"):
        export(open_tuned(runs["fedit"]), tmp_path / "fedit", "fedkseed")


def test_weights_are_written_in_the_type_that_is_asked_for(runs, tmp_path):
    export(open_tuned(runs["hadamard"]), tmp_path / "hf", dtype="bfloat16")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    exact = dict(open_tuned(runs["hadamard"]).load().named_parameters())
    for name, tensor in tensors.items():
        assert torch.equal(tensor, exact[name].to(torch.bfloat16))
    assert metadata_load(tmp_path / "hf" / "README.md")["fedkseed"]["dtype"] == "bfloat16"


def test_a_quantised_base_in_a_gguf_file_is_tuned_and_written_again(finished, tmp_path, model_folder):
    export(open_tuned(model_folder), tmp_path / "base", "gguf", kind="q8_0")
    base = tmp_path / "base" / "model-q8_0.gguf"
    run = finished(base, tuned='["*down_proj*"]\nstorage = "as stored"', lr="lr = 3e-2")
    export(open_tuned(run), tmp_path / "tuned", "gguf", kind="q8_0")
    assert base.read_bytes() != (tmp_path / "tuned" / base.name).read_bytes()
    tokens, tuned = prompt(run), open_tuned(run)
    export(tuned, tmp_path / "exact", "gguf", kind="f32")
    found = LlamaCpp(tmp_path / "exact" / "model-f32.gguf").losses(tokens, 20, 400)
    assert np.abs(found - nats(tuned.load(), tokens)).max() < 1e-5


def test_a_modelfile_puts_questions_as_the_model_was_tuned_on_them(runs, model_folder):
    tuned = open_tuned(runs["hadamard"])
    tokenizer = load_tokenizer(str(model_folder))
    text = modelfile("model-f16.gguf", tokenizer, tuned.wording)
    parts = r'TEMPLATE """\{\{ if .System \}\}(.*)\{\{ else \}\}(.*)\{\{ end \}\}\{\{ .Response \}\}<end>"""'
    system, alone = re.search(parts, text, re.DOTALL).groups()
    for words, context in ((alone, ""), (system, "Be brief.")):
        asked = words.replace("{{ .Prompt }}", QUESTION.instruction).replace("{{ .System }}", context)
        assert tokenizer(asked).input_ids == tuned.wording.prompt(Example(QUESTION.instruction, "", context), tokenizer)
    assert text.startswith("FROM ./model-f16.gguf\n")
    assert 'PARAMETER stop "<end>"' in text


def test_a_modelfile_of_a_chat_template_leaves_out_what_the_tokenizer_adds(runs, model_folder):
    tokenizer = copy.deepcopy(load_tokenizer(str(model_folder)))
    turns = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
    asked = "<user>{{ .Prompt }}<assistant>"
    both = f"{{{{ if .System }}}}<system>{{{{ .System }}}}{asked}{{{{ else }}}}{asked}{{{{ end }}}}"
    assert f'TEMPLATE """{both}{{{{ .Response }}}}"""' in modelfile("a.gguf", tokenizer, Wording("chat"))
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refuses + tokenizer.chat_template
    assert f'TEMPLATE """{asked}{{{{ .Response }}}}"""' in modelfile("a.gguf", tokenizer, Wording("chat"))
    tokenizer.chat_template = '{{ \'"""\' }}' + tokenizer.chat_template
    with pytest.raises(FedKSeedError, match="would end a Modelfile's text"):
        modelfile("a.gguf", tokenizer, Wording("chat"))


@pytest.mark.parametrize("end", ["<|im_end|>\n", "{{ eos_token }}", "\n"])
@pytest.mark.parametrize("first", ["", "{{ bos_token }}"])
def test_turns_that_ollama_puts_one_after_the_other_are_the_chat_templates(model_folder, end, first):
    """By the documented way: the template of each turn with its answer, and the last without one."""
    tokenizer = copy.deepcopy(load_tokenizer(str(model_folder)))
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    turns = "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}" + end + "{% endfor %}"
    tokenizer.chat_template = first + turns + "{% if add_generation_prompt %}<assistant>\n{% endif %}"
    text = modelfile("a.gguf", tokenizer, Wording("chat"))
    worded = re.search(r'\{\{ else \}\}(.*)\{\{ end \}\}(.*)"""', text, re.DOTALL)
    said, turn = ["One?", "A", "Two?", "B", "Three?"], "".join(worded.groups())
    asked = "".join(
        turn.replace("{{ .Prompt }}", question).replace("{{ .Response }}", answer)
        for question, answer in zip(said[::2], [*said[1::2], "\0"], strict=True)
    )
    messages = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(said)]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert asked.partition("\0")[0] == whole.removeprefix(tokenizer.bos_token or "")


def test_a_system_message_of_the_template_and_a_begin_in_each_turn_are_kept(model_folder):
    """The ways of SmolLM2 and of Llama 2."""
    tokenizer = copy.deepcopy(load_tokenizer(str(model_folder)))
    tokenizer.add_tokens(["<|im_end|>", "<s>"], special_tokens=True)
    turns = "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    always = "{% if messages[0]['role'] != 'system' %}<system>\nBe good.<|im_end|>\n{% endif %}"
    tokenizer.chat_template = always + turns + "{% if add_generation_prompt %}<assistant>\n{% endif %}"
    assert '{{ .Response }}<|im_end|>\n"""' in modelfile("a.gguf", tokenizer, Wording("chat"))
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<s>[INST] {{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] }} <|im_end|>{% endif %}{% endfor %}"
    )
    text = modelfile("a.gguf", tokenizer, Wording("chat"))
    assert '{{ else }}[INST] {{ .Prompt }} [/INST]{{ end }}{{ .Response }} <|im_end|><s>"""' in text


def test_a_word_among_the_bases_ends_ends_no_answer_of_an_export(runs, tmp_path, monkeypatch):
    """As `generate` ends none by it."""
    tuned = open_tuned(runs["fedavg"])
    load = type(tuned).load
    word = tuned.tokenizer()("the", add_special_tokens=False).input_ids[0]

    def loaded(opened, *given):
        model = load(opened, *given)
        model.generation_config.eos_token_id = [word, *opened.wording.ends(opened.tokenizer())]
        return model

    monkeypatch.setattr(type(tuned), "load", loaded)
    export(tuned, tmp_path / "out")
    ends = json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"]
    assert ends in (tuned.wording.ends(tuned.tokenizer()), *tuned.wording.ends(tuned.tokenizer()))


def test_programs_that_put_messages_to_an_exported_model_use_the_words_on_which_it_was_tuned(
    runs, tmp_path, model_folder
):
    """In transformers and in llama.cpp, of a base model that is a folder or a GGUF file; a folder of words that nobody
    knows keeps its own."""
    tuned = open_tuned(runs["hadamard"])
    export(tuned, tmp_path / "hf")
    export(tuned, tmp_path / "gguf", "gguf", kind="f32")
    export(open_tuned(tmp_path / "gguf"), tmp_path / "again", "gguf", kind="f32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    messages = [{"role": "system", "content": "A child asks."}, {"role": "user", "content": QUESTION.instruction}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert asked == prompt(runs["hadamard"])
    for folder in ("gguf", "again"):
        there = LlamaCpp(tmp_path / folder / "model-f32.gguf")
        assert there.tokens(there.worded(messages)) == asked
    export(open_tuned(model_folder), tmp_path / "plain")
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").chat_template is None


def test_what_can_not_be_written_is_refused_before_a_model_is_loaded(runs, tmp_path):
    tuned = open_tuned(runs["hadamard"])
    (tmp_path / "there").mkdir()
    for words, match in (
        ({"format_": "onnx"}, "no format is called 'onnx'; choose one of hf, peft, gguf, lora-gguf, fedkseed"),
        ({"format_": "gguf", "kind": "q6_k"}, "no kind of GGUF is called 'q6_k'; choose one of f32, f16"),
        ({"dtype": "int8"}, "--dtype is one of float32"),
        ({"format_": "gguf", "dtype": "float16"}, "for --format hf; got 'float16' for gguf"),
        ({"rank": 4}, "--rank is for --format peft and lora-gguf, got 4 for hf"),
    ):
        with pytest.raises(FedKSeedError, match=match):
            export(tuned, tmp_path / "new", **words)
    with pytest.raises(FedKSeedError, match="exists already"):
        export(tuned, tmp_path / "there")
    for way, kind in (("fedprompt", "PROMPT_TUNING"), ("fedunilora", "UNILORA")):
        with pytest.raises(FedKSeedError, match=f"'{kind}', which are no change of matrices"):
            export(open_tuned(runs[way]), tmp_path / "new", "lora-gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
