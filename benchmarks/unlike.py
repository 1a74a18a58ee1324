"""Public text of two kinds that is unlike the clients', for bases of informed directions: random tokens, and stories.

    python benchmarks/unlike.py FOLDER --stories MODEL [--examples 64]
    fedkseed basis RECIPE --data FOLDER/random.jsonl --output FOLDER/random.safetensors
    fedkseed basis RECIPE --data FOLDER/stories.jsonl --output FOLDER/stories.safetensors

random.jsonl has instructions and responses of tokens that are drawn uniformly from SmolLM2's vocabulary; stories.jsonl
the beginnings of stories, and how MODEL (stories15M) goes on with them. recipes/paper/unlike.toml compares what clients
learn along such bases.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedkseed.models.load import load_tokenizer
from fedkseed.randomness import Purpose, generator
from table import MODEL

LENGTHS = 24, 48  # tokens of an instruction, and of a response
NAMES = ("Lily", "Tom", "Mia", "Ben", "Sara", "Max", "Anna", "Tim")
BEGINNINGS = ("{} found a", "{} and the dog", "One day, {} wanted", "{} was sad because", "{} had a big",
              "A bird sang for {}", "{} went to the", "In the garden, {}")  # fmt: skip


def random_rows(count: int) -> list[dict[str, str]]:
    tokenizer = load_tokenizer(MODEL)
    rng = generator(0, Purpose.SUBSAMPLE)

    def text(length: int) -> str:
        return tokenizer.decode(rng.integers(0, len(tokenizer), length).tolist())

    return [{"instruction": text(LENGTHS[0]), "response": text(LENGTHS[1])} for _ in range(count)]


def stories(count: int, folder: str) -> list[dict[str, str]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    rows = []
    for number in range(count):
        begin = BEGINNINGS[number // len(NAMES) % len(BEGINNINGS)].format(NAMES[number % len(NAMES)])
        ids = tokenizer(begin, return_tensors="pt").input_ids
        with torch.inference_mode():
            whole = model.generate(ids, max_new_tokens=LENGTHS[1], do_sample=False, pad_token_id=0)[0]
        rest = tokenizer.decode(whole[ids.shape[1] :], skip_special_tokens=True)
        rows.append({"instruction": begin, "response": rest})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stories", required=True, metavar="MODEL")
    parser.add_argument("--examples", type=int, default=64)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    made = {"random": random_rows(options.examples), "stories": stories(options.examples, options.stories)}
    for name, rows in made.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (options.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
