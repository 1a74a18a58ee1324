"""llama.cpp, as other programs use it: its server in a process of its own, by the wheel `xllamacpp`."""

import json
import subprocess
import sys
import weakref
from pathlib import Path
from urllib.request import Request, urlopen


class LlamaCpp:
    """A model of a GGUF file, and a LoRA beside it, on one thread; `template` replaces the file's chat template.

    Its process is killed with the object: destroying a server in this process once took for ever.
    """

    def __init__(self, path: Path, lora: Path | None = None, template: str = "") -> None:
        asked = json.dumps({"path": str(path), "lora": str(lora or ""), "template": template})
        process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        weakref.finalize(self, _end, process)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(asked + "\n")
        process.stdin.flush()
        lines = iter(process.stdout.readline, "")
        self.address = next((line.split()[1] for line in lines if line.startswith("listening ")), None)
        assert self.address, f"llama.cpp did not load {path}"

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
        request = Request(f"{self.address}/{path}", json.dumps(content).encode(), headers)  # noqa: S310
        with urlopen(request, timeout=60) as reply:  # noqa: S310 - a server of this machine
            return json.load(reply)


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def serve(path: str, lora: str, template: str) -> None:
    """Serve until this process is killed, or its standard input ends."""
    from xllamacpp import CommonAdapterLoraInfo, CommonParams, Server, ggml_type, llama_flash_attn_type

    options = CommonParams()
    options.chat_template = template
    options.model.path, options.n_ctx, options.n_parallel = path, 512, 1
    options.cache_type_k = options.cache_type_v = ggml_type.GGML_TYPE_F32
    options.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # its sums are float16
    options.warmup, options.verbosity = False, -1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    if lora:
        adapter = CommonAdapterLoraInfo()
        adapter.path, adapter.scale = lora, 1.0
        options.lora_adapters = [adapter]
    server = Server(options)
    print(f"listening {server.listening_address}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(**json.loads(sys.stdin.readline()))
