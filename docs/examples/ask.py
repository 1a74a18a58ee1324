"""Questions to models in llama.cpp, by the wheel `xllamacpp`: `python ask.py QUESTION MODEL.gguf [MODEL.gguf ...]`.

The chat template of the first file puts the question to all models, so that they are asked in the same words.
"""

import json
import sys
from urllib.request import Request, urlopen

from gguf import GGUFReader
from xllamacpp import CommonParams, Server  # pyright: ignore[reportAttributeAccessIssue]

MOST = 128  # tokens of an answer


def ask(question: str, path: str, template: str) -> str:
    """The likeliest answer of a GGUF file's model; one that has not ended after MOST tokens ends in "…"."""
    options = CommonParams()
    options.model.path, options.chat_template, options.use_jinja = path, template, True
    options.n_ctx, options.n_parallel, options.verbosity = 512, 1, -1
    server = Server(options)
    asked = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": MOST}
    place = f"{server.listening_address}/v1/chat/completions"
    request = Request(place, json.dumps(asked).encode(), {"Content-Type": "application/json"})  # noqa: S310
    with urlopen(request, timeout=300) as reply:  # noqa: S310 - a server of this process, on loopback
        answer = json.load(reply)["choices"][0]
    return answer["message"]["content"] + " …" * (answer["finish_reason"] == "length")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit('a question and files are expected, as: python ask.py "Who repairs my laptop?" model-q8_0.gguf')
    question, *paths = sys.argv[1:]
    field = GGUFReader(paths[0]).fields.get("tokenizer.chat_template")
    for path in paths:
        print(f"{path}: {ask(question, path, field.contents() if field else '')}")
