"""What is no argument of a run must not change its result: settings beside the weights, the user, the environment."""

import asyncio
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import fedkseed
from fedkseed import FedKSeedError
from fedkseed.cli import app
from fedkseed.evaluation.evaluate import respond
from fedkseed.evaluation.statistics import Evaluation, require_finite
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.run.store import Store
from fedkseed.tuned import endpoint
from fedkseed.tuned.load import open_tuned
from fedkseed.weights.side_by_side import SideBySide

from .tiny import llama, save, tokenizer

TEXT = "The quick brown fox jumps over the lazy dog, and again and again. " * 20
PADS = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
SAVED = {
    "truncation": {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0},
    "padding": {**PADS, "pad_token": "!"},
    "dropout": 0.5,
}


@pytest.mark.parametrize("name", SAVED)
def test_what_a_tokenizer_s_file_says_of_training_is_left_out(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    right = load_tokenizer(str(tiny_model("plain")))([TEXT, "Hi"]).input_ids
    file = shutil.copytree(tiny_model("plain"), tmp_path / "copy") / "tokenizer.json"
    table = json.loads(file.read_text())
    (table["model"] if name == "dropout" else table)[name] = SAVED[name]
    file.write_text(json.dumps(table))
    tokenizer = load_tokenizer(str(file.parent))
    assert tokenizer([TEXT, "Hi"]).input_ids == right
    tokenizer.save_pretrained(tmp_path / "exported")
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")([TEXT, "Hi"]).input_ids == right


def test_a_tokenizer_that_samples_is_refused(tiny_model: Callable[[str], Path], monkeypatch: Any) -> None:
    class Sampling:
        eos_token_id = pad_token_id = 0

        def __call__(self, texts: list[str], **_: Any) -> Any:
            return type("Batch", (), {"input_ids": [[i] for i in range(len(texts))]})

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: Sampling())
    with pytest.raises(FedKSeedError, match="other tokens each time"):
        load_tokenizer(str(tiny_model("plain")))


PROMPTS = ("How many legs has an ant?", "Say it again and again and again: ants, ants, ants")
TOKEN = st.integers(400, 799)  # what is forced and suppressed at once is refused by transformers
GENERATION = st.fixed_dictionaries(
    {},
    optional={
        "do_sample": st.just(True),
        "temperature": st.sampled_from([0.2, 1.7]),
        "top_k": st.integers(1, 50),
        "repetition_penalty": st.sampled_from([0.7, 1.05, 1.3]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "min_new_tokens": st.integers(1, 30),
        "min_length": st.integers(1, 60),
        "max_length": st.integers(1, 30),
        "max_new_tokens": st.integers(1, 3),
        "max_time": st.just(1e-9),
        "num_beams": st.integers(2, 4),
        "num_return_sequences": st.just(1),
        "length_penalty": st.sampled_from([-2.0, 3.0]),
        "bad_words_ids": st.just([[number] for number in range(0, 400, 2)]),
        "suppress_tokens": st.just([*range(400)]),
        "begin_suppress_tokens": st.just([*range(300)]),
        "forced_bos_token_id": TOKEN,
        "forced_eos_token_id": TOKEN,
        "eos_token_id": TOKEN | st.lists(TOKEN, min_size=1),
        "pad_token_id": TOKEN,
        "exponential_decay_length_penalty": st.just([1, 1.5]),
        "cache_implementation": st.sampled_from(["static", "dynamic"]),
        "use_cache": st.booleans(),
        "guidance_scale": st.just(3.0),
        "renormalize_logits": st.booleans(),
        "stop_strings": st.just(["a", "e"]),
        "prompt_lookup_num_tokens": st.integers(1, 4),
        "return_dict_in_generate": st.booleans(),
    },
)


def argmax_answer(model: Any, tokens: list[int], end: int, length: int) -> list[int]:
    """The definition: the likeliest token after all before it, again and again, without a cache."""
    answer = list[int]()
    while len(answer) < length and (not answer or answer[-1] != end):
        with torch.inference_mode():
            answer.append(int(model(input_ids=torch.tensor([tokens + answer])).logits[0, -1].argmax()))
    return answer


@settings(max_examples=20, deadline=None)
@given(table=GENERATION)
def test_a_greedy_answer_is_the_argmax_whatever_the_settings_beside_the_weights(
    table: dict[str, Any], tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = shutil.copytree(tiny_model("penalty"), tmp_path_factory.mktemp("generation") / "model")
    (folder / "generation_config.json").write_text(json.dumps(table))
    model, of = load_model(str(folder)), load_tokenizer(str(folder))
    before = model.generation_config.to_dict()  # pyright: ignore
    prompts = of(list(PROMPTS)).input_ids
    expected = [argmax_answer(model, prompt, of.eos_token_id, 12) for prompt in prompts]
    assert respond(model, of, prompts, 12) == of.batch_decode(expected, skip_special_tokens=True)
    assert model.generation_config.to_dict() == before  # pyright: ignore


@pytest.mark.parametrize(("stated", "length"), [("none", 6), ("a word", 6), ("<|eom|>", 3), ("a list", 3)])
def test_further_special_tokens_that_the_settings_call_ends_end_an_answer_and_words_do_not(
    stated: str, length: int, tmp_path: Path
) -> None:
    of = tokenizer(["<|eom|>"], pad="<|pad|>")
    model, eom = llama(len(of)), of.convert_tokens_to_ids("<|eom|>")
    prompt = of(PROMPTS[0]).input_ids
    words = argmax_answer(model, prompt, -1, 6)
    assert len({*words}) == 6
    with torch.no_grad():  # the fourth token of the answer becomes <|eom|>
        model.lm_head.weight[[words[3], eom]] = model.lm_head.weight[[eom, words[3]]]
    save(tmp_path, of, model)
    numbers = {"none": None, "a word": words[1], "<|eom|>": eom, "a list": [of.eos_token_id, eom, words[1]]}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": numbers[stated]}))
    (answer,) = respond(load_model(str(tmp_path)), of, [prompt], 6)
    assert answer.startswith(of.decode(words[:3]))
    assert (answer == of.decode(words[:3])) == (length == 3)


def test_an_answer_ends_at_the_last_of_the_model_s_positions_and_a_prompt_that_fills_them_is_refused() -> None:
    of = tokenizer(pad="<|pad|>")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = GPT2LMHeadModel(
            GPT2Config(vocab_size=len(of), n_positions=32, n_embd=16, n_layer=1, n_head=2)
        ).eval()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.lm_head.weight.data[of.eos_token_id] = 0
    texts = [of(PROMPTS[0] * 5).input_ids[:length] for length in (10, 28, 31)]
    longest = [argmax_answer(model, tokens, of.eos_token_id, 32 - len(tokens)) for tokens in texts]
    assert respond(model, of, texts, 64) == of.batch_decode(longest, skip_special_tokens=True)
    with pytest.raises(FedKSeedError, match="32 tokens leaves no answer of the model's 32 positions"):
        respond(model, of, [texts[0], (texts[2] * 2)[:32]], 4)


def test_two_answers_in_turns_leave_a_model_its_settings(tiny_model: Callable[[str], Path]) -> None:
    model, of = load_model(str(tiny_model("penalty"))), load_tokenizer(str(tiny_model("penalty")))
    prompts, before = of(list(PROMPTS)).input_ids, model.generation_config.to_dict()  # pyright: ignore
    right = [respond(model, of, [prompt], 8) for prompt in prompts]
    turns = SideBySide()
    hook = model.register_forward_pre_hook(lambda *_: turns.ask() and None)
    waiting = iter(prompts)
    assert turns.run(lambda: respond(model, of, [next(waiting)], 8), prompts, lambda prompt: None) == right
    hook.remove()
    assert model.generation_config.to_dict() == before  # pyright: ignore


def test_the_endpoint_is_greedy_unless_a_request_is_not_and_writes_no_more_than_positions_hold(
    tiny_model: Callable[[str], Path],
) -> None:
    models = endpoint.load(open_tuned(tiny_model("penalty")))
    model, of = models["tuned"]
    model.config.max_position_embeddings = 40
    application = endpoint.application(models)
    prompt = of(PROMPTS[0]).input_ids
    longest = 40 - len(prompt)

    def written(**more: Any) -> str:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(application)
            async with httpx.AsyncClient(transport=transport, base_url="http://here/v1") as client:
                return await client.post("completions", json={"model": "tuned", "prompt": PROMPTS[0], **more})

        return asyncio.run(ask()).json()["choices"][0]["text"]

    (right,) = respond(model, of, [prompt], 12)
    assert right == of.decode(argmax_answer(model, prompt, of.eos_token_id, 12))
    assert [written(max_tokens=12), written(max_tokens=12, temperature=0)] == [right, right]
    assert written() == respond(model, of, [prompt], longest)[0]
    sampled = [written(max_tokens=12, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert right not in sampled


ROWS = [{"instruction": f"What is {i} plus {i}?", "response": f"It is {2 * i}."} for i in range(20)]


def test_a_base_model_without_a_finite_loss_ends_a_run_after_its_first_evaluation(
    recipe_for: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = recipe_for("overflow", ROWS)
    recipe.write_text(recipe.read_text().replace("[data]", 'dtype = "float16"\n[data]'))
    ended = CliRunner().invoke(app, ["run", str(recipe), "--output", str(tmp_path / "run")])
    assert ended.exit_code == 2
    assert "no finite loss on 4 of 4 held-out rows (row 1: nan): float16 ends at 65,504" in ended.stderr
    assert "set [model] dtype = 'bfloat16'" in ended.stderr
    assert not (tmp_path / "run" / "adapter.safetensors").exists()
    assert Store(tmp_path / "run").reports() == []
    searched = CliRunner().invoke(app, ["tune", str(recipe), "--minutes", "0.1"])
    assert searched.exit_code == 2
    assert "has no finite loss on 16 of 16 training rows" in searched.stderr


def test_eval_refuses_rows_without_a_finite_loss(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    folder = shutil.copytree(tiny_model("overflow"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    ended = CliRunner().invoke(app, ["eval", str(folder), "--data", str(tmp_path / "rows.jsonl")])
    assert ended.exit_code == 2
    assert "the tuned model has no finite loss on 20 of 20 held-out rows" in ended.stderr


def test_one_row_without_a_finite_loss_is_named_and_not_averaged() -> None:
    own = Evaluation([1.0, math.inf, math.nan])
    with pytest.raises(FedKSeedError, match=r"M has no finite loss on 2 of 3 held-out rows \(row 2: inf\): look at"):
        require_finite(own, "M", "bfloat16")
    with pytest.raises(FedKSeedError, match="1 of 2 held-out rows of clients"):
        require_finite(Evaluation([1.0], sets={"clients": Evaluation([2.0, math.nan])}), "M", "float32")
    require_finite(Evaluation([1.0], sets={"clients": Evaluation([2.0])}), "M", "float32")


def test_tune_of_a_model_whose_losses_are_not_finite_is_refused_and_leaves_the_model() -> None:
    model = torch.nn.Linear(4, 1)
    before = model.weight.clone()
    with pytest.raises(FedKSeedError, match="the base model's loss is nan on batch 0 of client 0"):
        fedkseed.tune(
            model,
            lambda model, batch: model(batch).mean() * math.nan,
            [[torch.ones(2, 4)]],
            steps=2,
            pool=fedkseed.Pool(1, 64),
        )
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("charset", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_letters_that_a_terminal_lacks_end_no_command_and_break_no_json(
    charset: str, recipe_for: Callable[..., Path]
) -> None:
    letters = "µ ± \N{CJK UNIFIED IDEOGRAPH-6771}"
    rows = [{"instruction": f"{letters} {i}", "response": "é", "category": letters} for i in range(12)]
    recipe, runner = recipe_for("plain", rows), CliRunner(charset=charset)
    shown = runner.invoke(app, ["preview", str(recipe)], catch_exceptions=False)
    assert shown.exit_code == 0
    assert letters.encode(charset, "backslashreplace") in shown.stdout_bytes
    table = runner.invoke(app, ["preview", str(recipe), "--json"], catch_exceptions=False)
    assert letters in json.loads(table.stdout_bytes.decode(charset))["clients"][0]["categories"]
