"""What is trained is what is asked later: the same tokens in training, evaluation, generation and an exported model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, tzinfo
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

from fedkseed import FedKSeedError
from fedkseed.data.layouts import Example, Turn
from fedkseed.data.wording import Wording, encode_each
from fedkseed.run.progress import Silent

from ..models.llama_cpp import LlamaCpp
from .chat_formats import FORMATS, ChatFormat
from .tiny import tokenizer

CHAT = Wording("chat")


def sentencepiece(of: ChatFormat) -> PreTrainedTokenizerFast:
    """A tokenizer in SentencePiece's way, as Llama 2's: spaces are a letter, one is put before each text."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    first = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=first, show_progress=False)
    made.train_from_iterator(
        ["a b c is it. the station 1 + 1 is 2 ### Instruction: Response: user assistant"] * 3, trainer
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", chat_template=of.template)
    special = dict.fromkeys(text for text in (of.begin, of.end, *of.special) if text)
    fast.add_tokens([AddedToken(text, special=True, normalized=False) for text in special], special_tokens=True)
    fast.eos_token = of.end
    if of.begin:
        fast.bos_token = of.begin
    return fast


@cache
def tokenizer_of(name: str, way: str) -> PreTrainedTokenizerFast:
    of = FORMATS[name]
    if way == "sentencepiece":
        return sentencepiece(of)
    begins = bool(of.begin)
    return tokenizer(of.special, begin=of.begin, end=of.end, adds_begin=begins, template=of.template)


TEXTS = st.text(st.sampled_from("ab .,1ü\n文😀"), max_size=12).filter(lambda text: "\r" not in text)
WORDS = TEXTS.filter(lambda text: text.strip())


@st.composite
def conversations(draw: st.DrawFn, of: ChatFormat) -> list[tuple[str, str]]:
    """Messages of all shapes that a format takes, an answer last."""
    if of.alternates:
        count = draw(st.integers(1, 4))
        talk = [(role, draw(WORDS)) for _ in range(count) for role in ("user", "assistant")]
    else:
        roles = draw(st.lists(st.sampled_from(["user", "assistant"]), max_size=6))
        talk = [(role, draw(WORDS if role == "user" else TEXTS)) for role in roles]
        talk = [("user", draw(WORDS)), *talk, ("assistant", draw(WORDS))]
    return [("system", draw(WORDS)), *talk] if of.system and draw(st.booleans()) else talk


def example_of(talk: Sequence[tuple[str, str]], counted: Sequence[bool] | None = None) -> Example:
    turns = tuple(Turn(role, text, counted is None or counted[k]) for k, (role, text) in enumerate(talk[:-1]))
    return Example("", talk[-1][1], turns=turns)


def messages_of(talk: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in talk]


def texts_of(of: PreTrainedTokenizerFast, tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[str]:
    return [str(of.decode(list(tokens[begin:end]))) for begin, end in spans]


def bare(text: str) -> str:
    """A text without spaces: SentencePiece's way puts some in where a special token is before."""
    return text.replace(" ", "")


@pytest.mark.parametrize("way", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("name", FORMATS)
def test_training_has_the_templates_tokens_and_counts_what_a_model_would_say(name, way):
    """The oracles are transformers' tokens of a whole conversation and of the request in it, and a format by hand."""
    own, of = FORMATS[name], tokenizer_of(name, way)

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(conversations(own))
    def check(talk: list[tuple[str, str]]) -> None:
        (encoded,) = encode_each([example_of(talk)], of, CHAT)
        if isinstance(encoded, FedKSeedError):  # a thought is before an answer that is the last alone
            assert (name, "it asks by" in str(encoded)) == ("qwen 3", True)
            assert ("assistant", "assistant") in pairwise(role for role, _ in talk)
            return
        messages: Any = messages_of(talk)
        whole: Any = of.apply_chat_template(messages, return_dict=False)
        by_hand = own.parts(talk)
        assert "".join(text for text, _ in by_hand) == of.apply_chat_template(messages, tokenize=False)
        asked = of.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        assert list(encoded.tokens[: encoded.prompt]) == asked
        assert str(of.decode(whole)).startswith(str(of.decode(list(encoded.tokens))))
        if list(encoded.tokens) != whole[: len(encoded.tokens)]:  # a token would reach over the edge of an answer
            assert any(text[:1].isspace() or text != text.strip() for _, text in talk)
        counted = [bare(text) for text, is_counted in by_hand if is_counted]
        assert [bare(text) for text in texts_of(of, encoded.tokens, encoded.counted)] == counted
        end = of.convert_tokens_to_ids(own.turn_end)
        assert all(end in encoded.tokens[begin:stop][-4:] for begin, stop in encoded.counted)
        assert CHAT.ends(of) == list(dict.fromkeys([of.eos_token_id, end]))

    check()


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_is_not_counted_leaves_the_others_as_they_are(name):
    own, of = FORMATS[name], tokenizer_of(name, "byte-level")

    @settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(conversations(own), st.data())
    def check(talk: list[tuple[str, str]], data: st.DataObject) -> None:
        assume(("assistant", "assistant") not in pairwise(role for role, _ in talk))
        flags = [data.draw(st.booleans()) for _ in talk]
        every, some = encode_each([example_of(talk), example_of(talk, flags)], of, CHAT)
        assert not isinstance(every, FedKSeedError)
        assert not isinstance(some, FedKSeedError)
        assert some.tokens == every.tokens
        answers = [k for k, (role, text) in enumerate(talk) if role == "assistant" and text.strip()]
        kept = [span for k, span in zip(answers, every.counted, strict=True) if flags[k] or k == len(talk) - 1]
        assert list(some.counted) == kept

    check()


ROWS = [[("user", f"What is {n} plus {k}?"), ("assistant", f"It is {n + k}.")] for n in range(20) for k in range(2)]


def test_the_answers_of_a_template_with_an_end_of_its_own_are_alike(tiny_model: Callable[[str], Path]):
    """Issue 3754 of axolotl: the last answer was fed with the end of text, where the template writes </turn>."""
    from fedkseed.models.load import load_tokenizer

    of = load_tokenizer(str(tiny_model("turn")))
    talk = [*ROWS[0], *ROWS[1]]
    (encoded,) = encode_each([example_of(talk)], of, CHAT)
    assert not isinstance(encoded, FedKSeedError)
    whole: Any = of.apply_chat_template(messages_of(talk), return_dict=False)
    assert list(encoded.tokens) == whole[:-1]  # a line end is behind the last turn
    assert texts_of(of, encoded.tokens, encoded.counted) == ["It is 0.</turn>", "It is 1.</turn>"]
    assert CHAT.ends(of) == [of.eos_token_id, of.convert_tokens_to_ids("</turn>")]


@pytest.mark.parametrize("wording", ["paper", "plain", "chat"])
def test_a_tokenizer_that_ends_texts_by_itself_ends_no_prompt(wording):
    of = tokenizer(begin="<s>", end="</s>", adds_begin=True, adds_end=True, template=FORMATS["zephyr"].template)
    examples = [Example("Hi", "Hello."), example_of([*ROWS[0], *ROWS[1]]), Example("", "A text.", plain=True)]
    for example, encoded in zip(examples, encode_each(examples, of, Wording(wording)), strict=True):
        assert not isinstance(encoded, FedKSeedError)
        begins = wording != "chat" or example.plain
        assert encoded.tokens.count(of.bos_token_id) == begins
        assert encoded.tokens[0] == of.bos_token_id or not begins
        if wording != "chat":
            assert encoded.tokens.count(of.eos_token_id) == len(encoded.counted)
        assert encoded.tokens[-1] == of.eos_token_id
        assert encoded.tokens[-2] != of.eos_token_id


def test_a_run_goes_on_after_midnight(tiny_model, recipe_for, tmp_path, monkeypatch):
    """Issue 6692 of text-generation-webui: a template that writes today's date; each day had other prompts."""
    from fedkseed.data import encoder
    from fedkseed.data.federated import own_share, share_out
    from fedkseed.models.load import load_tokenizer
    from fedkseed.recipe.reading import load_recipe
    from fedkseed.run.start_and_resume import resume, start
    from fedkseed.run.store import Store
    from fedkseed.tuned.export import export
    from fedkseed.tuned.load import open_tuned

    class Clock(datetime):
        day = 7

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime(2026, 3, cls.day, 23, 59, tzinfo=tz)

    monkeypatch.setattr(encoder, "datetime", Clock)
    rows = [{"messages": messages_of(talk)} for talk in ROWS]
    asked = load_recipe(recipe_for("dated", rows))
    whole = start(asked, tmp_path / "whole")
    kept = load_recipe(tmp_path / "whole" / "recipe.toml")
    assert kept.data.date == date(2026, 3, 7)
    Clock.day = 8
    Store(tmp_path / "whole").rollback(1)
    assert resume(tmp_path / "whole").digest == whole.digest
    of = load_tokenizer(str(tiny_model("dated")))
    shares = share_out(kept, of)
    assert shares.settled == {}
    text = str(of.decode(list(shares.clients[0][0].tokens)))
    assert text.startswith("<s><turn>system\nToday is 07 Mar 2026.</s><turn>user\n")
    with pytest.raises(FedKSeedError, match=r"\[data\] date = 20"):
        own_share(asked.model_copy(update={"data": asked.data.model_copy(update={"template": "chat"})}), of)
    tuned = open_tuned(tmp_path / "whole")
    export(tuned, tmp_path / "hf")
    trained = shares.clients[0][0]
    earlier = replace(tuned, wording=Wording("chat"))  # of a release that kept no date
    assert earlier.words(of) == Wording("chat", date=datetime.now(UTC).date())
    of = load_tokenizer(str(tmp_path / "hf"))
    asks: Any = [{"role": turn.role, "content": turn.text} for turn in trained.example.turns]
    theirs = of.apply_chat_template(asks, add_generation_prompt=True, return_dict=False)
    assert theirs == list(trained.tokens[: trained.prompt])


def test_a_model_that_was_not_tuned_is_asked_by_its_own_template(tiny_model, tmp_path):
    """A base model, the folders that it was exported to, and a run on conversations see the same tokens."""
    from fedkseed.models.load import load_tokenizer
    from fedkseed.tuned.export import export
    from fedkseed.tuned.load import open_tuned
    from fedkseed.tuned.measure import measure

    folder = tiny_model("chatml")
    export(open_tuned(folder), tmp_path / "hf")
    export(open_tuned(folder), tmp_path / "gguf", "gguf", kind="f32")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": messages_of(talk)}) + "\n" for talk in ROWS))
    of = load_tokenizer(str(folder))
    asked: Any = [{"role": "user", "content": "What is 1 plus 1?"}]
    prompt = of.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    example = Example("What is 1 plus 1?", "")
    losses = []
    for place in (folder, tmp_path / "hf", tmp_path / "gguf"):
        tuned = open_tuned(place)
        assert tuned.words(tuned.tokenizer()).prompt(example, tuned.tokenizer()) == prompt
        theirs = tuned.chat_tokenizer().apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        assert theirs == prompt
        _, scores = measure(tuned, str(tmp_path / "rows.jsonl"), [], Silent())
        losses.append(scores.losses)
    assert losses[0] == losses[1] == pytest.approx(losses[2], abs=1e-5)
    (encoded,) = encode_each([example_of(ROWS[0])], of, CHAT)
    assert not isinstance(encoded, FedKSeedError)
    model = open_tuned(folder).load()
    with torch.inference_mode():
        by_hand = model(torch.tensor([encoded.tokens])).logits[0].log_softmax(-1)
    (begin, end) = encoded.counted[0]
    loss = -sum(float(by_hand[k - 1, encoded.tokens[k]]) for k in range(begin, end)) / (end - begin)
    assert min(abs(other - loss) for other in losses[0]) < 1e-5  # rows are drawn in another order
    turn = open_tuned(folder).words(of).text(example, of)
    assert (
        f"{{{{ else }}}}{turn.replace(example.instruction, '{{ .Prompt }}')}{{{{ end }}}}{{{{ .Response }}}}"
        in (tmp_path / "gguf" / "Modelfile").read_text()
    )


@pytest.mark.parametrize("name", ["turn", "chatml", "not begun"])
def test_a_model_that_learned_to_end_its_turn_ends_it_wherever_it_is_asked(tiny_model, recipe_for, tmp_path, name):
    """By a run's own evaluation, `generate`, transformers and llama.cpp; the end of text is another token in one.

    In another the tokenizer begins texts with a token that the chat template does not write, and llama.cpp would.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fedkseed.evaluation.evaluate import answers_to, respond
    from fedkseed.recipe.reading import load_recipe
    from fedkseed.run.start_and_resume import start
    from fedkseed.tuned.export import export
    from fedkseed.tuned.load import open_tuned

    rows = [{"messages": messages_of([("user", f"Say {word}"), ("assistant", word)])} for word in ("one", "two")] * 12
    fast = {"lr": "lr = 0.2", "rounds": "rounds = 5", "steps": "steps = 30"}
    fedavg = {"algorithm": 'algorithm = "fedavg"', "[derivatives]": ""}
    recipe = load_recipe(recipe_for(name, rows, **fast, **fedavg))
    result = start(recipe, tmp_path / "run")
    assert sum(result.after.losses) < 0.05 * sum(result.before.losses)
    tuned = open_tuned(tmp_path / "run")
    of, model = tuned.tokenizer(), tuned.load()
    (encoded,) = encode_each([example_of([("user", "Say two"), ("assistant", "two")])], of, tuned.wording)
    assert not isinstance(encoded, FedKSeedError)
    assert answers_to(model, of, [encoded], 8) == ["two"]
    prompt = tuned.words(of).prompt(Example("Say two", ""), of)
    assert respond(model, of, [prompt], 8, tuned.words(of).ends(of)) == ["two"]
    export(tuned, tmp_path / "hf")
    export(tuned, tmp_path / "gguf", "gguf", kind="f32")
    theirs, there = (
        AutoTokenizer.from_pretrained(tmp_path / "hf"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf"),
    )
    asked: Any = theirs.apply_chat_template(
        [{"role": "user", "content": "Say two"}], add_generation_prompt=True, return_tensors="pt"
    )
    written = there.generate(**asked, do_sample=False, max_new_tokens=8)[0, asked["input_ids"].shape[1] :].tolist()
    assert written == list(encoded.tokens[encoded.prompt :])
    llama = LlamaCpp(tmp_path / "gguf" / "model-f32.gguf")
    messages = [{"role": "user", "content": "Say two"}]
    assert llama.tokens(llama.worded(messages)) == prompt
    assert llama.text(llama.worded(messages), 8) == "two"
    stops = [
        line.split('"')[1] for line in (tmp_path / "gguf" / "Modelfile").read_text().splitlines() if "stop" in line
    ]
    assert [of.convert_tokens_to_ids(stop) for stop in stops] == tuned.words(of).ends(of)
