"""llama.cpp, as other programs use it: its server in this process, by the wheel `xllamacpp`."""

import json
from pathlib import Path
from urllib.request import Request, urlopen

from xllamacpp import CommonAdapterLoraInfo, CommonParams, Server, ggml_type, llama_flash_attn_type


class LlamaCpp:
    """A model of a GGUF file, and a LoRA beside it, on one thread; `template` replaces the file's chat template."""

    def __init__(self, path: Path, lora: Path | None = None, template: str = "") -> None:
        options = CommonParams()
        options.chat_template = template
        options.model.path, options.n_ctx, options.n_parallel = str(path), 512, 1
        options.cache_type_k = options.cache_type_v = ggml_type.GGML_TYPE_F32
        options.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # its sums are float16
        options.warmup, options.verbosity = False, -1
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
        if lora is not None:
            adapter = CommonAdapterLoraInfo()
            adapter.path, adapter.scale = str(lora), 1.0
            options.lora_adapters = [adapter]
        self.server = Server(options)

    def ask(self, prompt: list[int] | str, count: int, **options: object) -> dict:
        """The native answer of the server to a prompt, of `count` tokens, the likeliest each."""
        asked = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "cache_prompt": False, **options}
        return self._post("completion", asked)

    def greedy(self, prompt: list[int] | str, count: int) -> list[int]:
        return self.ask(prompt, count, return_tokens=True)["tokens"]

    def text(self, prompt: list[int] | str, count: int) -> str:
        return self.ask(prompt, count)["content"]

    def tokens(self, text: str) -> list[int]:
        return self._post("tokenize", {"content": text, "add_special": True})["tokens"]

    def worded(self, messages: list[dict[str, str]]) -> str:
        """The prompt that llama.cpp makes of messages, by the file's chat template."""
        return self._post("apply-template", {"messages": messages})["prompt"]

    def losses(self, tokens: list[int], first: int, words: int) -> list[float]:
        """Nats of each token from number `first` on, given those before it; `words`: size of the vocabulary."""
        return [-self._logprobs(tokens[:at], words)[tokens[at]] for at in range(first, len(tokens))]

    def _logprobs(self, prompt: list[int], words: int) -> dict[int, float]:
        """Log-probabilities of all tokens, from the logits. The answer itself is a letter in any case.

        An answer that is the end of text, or a part of a character, has no probabilities.
        """
        (letter,) = self.tokens("a")
        (found,) = self.ask(prompt, 1, n_probs=words, logit_bias=[[letter, 1e4]])["completion_probabilities"]
        assert found["id"] == letter
        return {one["id"]: one["logprob"] for one in found["top_logprobs"]}

    def _post(self, path: str, content: dict) -> dict:
        headers = {"Content-Type": "application/json"}
        request = Request(f"{self.server.listening_address}/{path}", json.dumps(content).encode(), headers)  # noqa: S310
        with urlopen(request, timeout=60) as reply:  # noqa: S310 - a server of this process
            return json.load(reply)
