"""The first tokens that a tuned chat model answers, asked by four programs, for templates on real tokenizers.

SmolLM2-135M with its own template and with Qwen 3's, and a Llama of stories (a SentencePiece tokenizer) with Llama 2's
and Zephyr's are tuned on conversations made of pairs of Dolly's rows, exported, and asked three questions by
`fedkseed`, transformers, peft and llama.cpp. Each program words the question by the template that it was given.

    PYTHONPATH=. python benchmarks/chat.py --llama FOLDER
"""

import json
import tempfile
from operator import eq
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from peft import PeftModel
from rich.markup import escape
from tests.cases.chat_formats import FORMATS
from tests.models.llama_cpp import LlamaCpp
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedkseed.data.layouts import Example
from fedkseed.data.sources import read
from fedkseed.evaluation.evaluate import greedy, respond
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.start_and_resume import start
from fedkseed.tuned.export import export
from fedkseed.tuned.load import open_tuned
from table import MODEL, Row, commit, new_parser, show

QUESTIONS = ("How many legs has an ant?", "Name a colour of the sky.", "What is the capital of France?")
COUNT = 16  # tokens of an answer
RECIPE = """
seed = 1
[model]
name = {model}
[data]
source = {data}
held_out = 0.1
max_tokens = 192
[clients]
split = "even"
count = 2
cohort = 2
[directions]
family = "separable"
size = 4096
[training]
algorithm = "fedkseed-backprop"
rounds = 2
steps = 4
batch_size = 4
[derivatives]
lr = 2e-5
[evaluation]
examples = "all"
every = 2
"""


def tune(base: str, template: str | None, folder: Path) -> str:
    """Tune a model with a chat template and export it in three formats; returns the change of its loss."""
    tokenizer = load_tokenizer(base)
    tokenizer.chat_template = template or tokenizer.chat_template
    parts: list[Any] = [load_model(base), tokenizer]
    for part in parts:
        part.save_pretrained(folder / "base")
    rows = [row for row in read("dolly-sample") if len(row.instruction + row.response) < 200][:160]
    pairs = zip(rows[::2], rows[1::2], strict=True)
    talks = [[message for row in pair for message in (asked(row.instruction), said(row.response))] for pair in pairs]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    recipe = RECIPE.format(model=json.dumps(str(folder / "base")), data=json.dumps(str(folder / "rows.jsonl")))
    (folder / "recipe.toml").write_text(recipe)
    result = start(load_recipe(folder / "recipe.toml"), folder / "run")
    tuned = open_tuned(folder / "run")
    export(tuned, folder / "hf")
    export(tuned, folder / "peft", "peft")
    export(tuned, folder / "gguf", "gguf", kind="f32")
    return f"{mean(result.before.losses):.3f} to {mean(result.after.losses):.3f}"


def asked(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def answers(folder: Path) -> dict[str, list[list[int]]]:
    """The tokens of each program's prompts and answers."""
    tuned = open_tuned(folder / "run")
    tokenizer = tuned.tokenizer()
    words, model = tuned.words(tokenizer), tuned.load()
    prompts = [words.prompt(Example(question, ""), tokenizer) for question in QUESTIONS]
    settings = greedy(model, tokenizer, words.ends(tokenizer), COUNT)
    own = [generated(model, prompt, generation_config=settings) for prompt in prompts]
    texts = [respond(model, tokenizer, [prompt], COUNT, words.ends(tokenizer))[0] for prompt in prompts]
    assert texts == [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in own]
    theirs = AutoTokenizer.from_pretrained(folder / "hf")
    worded = [
        theirs.apply_chat_template([asked(question)], add_generation_prompt=True, return_dict=False)
        for question in QUESTIONS
    ]
    hf = AutoModelForCausalLM.from_pretrained(folder / "hf")
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), str(folder / "peft"))
    llama = LlamaCpp(folder / "gguf" / "model-f32.gguf")
    by_llama = [llama.tokens(llama.worded([asked(question)])) for question in QUESTIONS]
    plain = {"do_sample": False, "max_new_tokens": COUNT, "eos_token_id": words.ends(tokenizer)}
    return {
        "fedkseed": [p + a for p, a in zip(prompts, own, strict=True)],
        "transformers": [p + generated(hf, p, do_sample=False, max_new_tokens=COUNT) for p in worded],
        "peft": [p + generated(peft, p, **plain) for p in worded],
        "llama.cpp": [p + llama.greedy(p, COUNT) for p in by_llama],
    }


def generated(model: Any, prompt: list[int], **settings: Any) -> list[int]:
    with torch.inference_mode():
        return model.generate(input_ids=torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--llama", required=True, help="folder of a Llama with a SentencePiece tokenizer")
    given, rows = parser.parse_args(), list[Row]()
    cases = [(MODEL, None), (MODEL, "qwen 3"), (given.llama, "llama 2"), (given.llama, "zephyr")]
    for base, name in cases:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            loss = tune(base, name and FORMATS[name].template, folder)
            every = answers(folder)
        same = {program: f"{sum(map(eq, each, every['fedkseed']))} of {len(each)}" for program, each in every.items()}
        text = load_tokenizer(base).decode(every["fedkseed"][0])
        rows.append(
            {
                "model": Path(base).stem,
                "template": name or "its own",
                "loss": loss,
                **same,
                "first": escape(repr(text[-60:])),
            }
        )
    title = f"Questions whose prompt and first {COUNT} tokens are those of fedkseed"
    show(title, rows, as_json=given.json, notes={"commit": commit()})


if __name__ == "__main__":
    main()
