"""A real server: its models by name, and greedy answers that are those of `fedkseed generate`."""

import asyncio
import copy
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import httpx
import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from fedkseed import FedKSeedError
from fedkseed.data.layouts import Example
from fedkseed.evaluation.evaluate import respond
from fedkseed.tuned import endpoint as serve
from fedkseed.tuned.export import export
from fedkseed.tuned.load import open_tuned

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),  # peft uses what transformers renames
    pytest.mark.filterwarnings("ignore:Position ids are not supported"),  # peft's, which needs none
]
QUESTION = "How many legs has an ant?"


@pytest.fixture(scope="module")
def run(finished) -> Path:
    """A run in other words than the default's."""
    return finished(max_tokens='max_tokens = 200\ntemplate = "alpaca"', lr="lr = 3e-2")


@pytest.fixture(scope="module")
def application(run):
    return serve.application(serve.load(open_tuned(run)))


@contextmanager
def served(place: Path, ending: signal.Signals = signal.SIGINT):
    """The address of a server in a process of its own, and its key; it ends as with Ctrl-C."""
    command = [sys.executable, "-X", "faulthandler", "-m", "fedkseed", "serve-model", str(place), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        printed = (re.search(r"(http://127\.0\.0\.1:\d+/v1), key ([\w-]+)", line) for line in process.stdout)
        try:
            yield next(filter(None, printed)).groups()
        finally:
            process.send_signal(ending)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # the process says where its threads are
                pytest.fail(f"serve-model goes on after {ending.name}: {process.communicate()[1]}")
    assert process.returncode == 130


def post(address: str, key: str, **body: object) -> dict:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = Request(address, json.dumps(body).encode(), headers)  # noqa: S310
    with urlopen(request, timeout=120) as reply:  # noqa: S310 - a server of this test
        return json.load(reply)


def ask(application: object, path: str, body: dict | None = None) -> httpx.Response:
    """The answer of an application in this process."""

    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://here/v1", timeout=120) as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    return asyncio.run(once())


def answers(run: Path, tokens: int) -> dict[str, str]:
    """The answers of both models, as `fedkseed generate` has them."""
    opened = open_tuned(run)
    prompt = opened.wording.prompt(Example(QUESTION, ""), opened.tokenizer())
    models = {"base": opened.load_base, "tuned": opened.load}
    return {name: respond(load(), opened.tokenizer(), [prompt], tokens)[0] for name, load in models.items()}


def test_both_models_answer_under_their_names_as_generate_does(run):
    messages, expected = [{"role": "user", "content": QUESTION}], answers(run, 24)
    assert expected["base"] != expected["tuned"]
    with served(run) as (address, key):
        with urlopen(Request(f"{address}/models", headers={"Authorization": f"Bearer {key}"}), timeout=60) as reply:  # noqa: S310
            assert [one["id"] for one in json.load(reply)["data"]] == ["base", "tuned"]
        for name, text in expected.items():
            found = post(
                f"{address}/chat/completions", key, model=name, messages=messages, max_tokens=24, temperature=0
            )
            assert found["choices"][0]["message"]["content"] == text
            assert found["usage"]["completion_tokens"] <= 24
        page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
        (typed,) = re.findall(r"^    (curl .*\n.*)$", page, re.MULTILINE)
        command = (
            typed.replace("http://127.0.0.1:8000/v1", address)
            .replace("Bearer KEY", f"Bearer {key}")
            .replace('"max_tokens": 64', '"max_tokens": 24')
        )
        assert command.count(address) == command.count(": 24") == 1
        if shutil.which("curl"):
            printed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
            assert json.loads(printed)["choices"][0]["message"]["content"] == expected["tuned"]
        with pytest.raises(HTTPError, match="404"):
            post(f"{address}/chat/completions", key, model="gpt", messages=messages)


def test_answers_are_streamed_and_texts_continued(run):
    application = serve.application(serve.load(open_tuned(run)))
    asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
    lines = ask(application, "chat/completions", asked | {"model": "tuned", "stream": True}).text.splitlines()
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    text = "".join(one["choices"][0]["delta"].get("content") or "" for one in pieces)
    assert len(pieces) > 3
    assert text == answers(run, 24)["tuned"]
    opened = open_tuned(run)
    prompt = opened.wording.text(Example(QUESTION, ""), opened.tokenizer())
    asked = {"model": "base", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    assert ask(application, "completions", asked).json()["choices"][0]["text"] == answers(run, 24)["base"]


def test_virtual_tokens_are_served_and_of_a_whole_model_itself_alone(run, finished, tmp_path):
    own = finished(algorithm='algorithm = "fedprompt"', lr="lr = 1e-1")
    export(open_tuned(run), tmp_path / "hf")
    asked = {"model": "tuned", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
    for place, names, expected in (
        (own, ["base", "tuned"], answers(own, 24)["tuned"]),
        (tmp_path / "hf", ["tuned"], answers(run, 24)["tuned"]),
    ):
        application = serve.application(serve.load(open_tuned(place)))
        assert [one["id"] for one in ask(application, "models").json()["data"]] == names
        found = ask(application, "chat/completions", asked).json()
        assert found["choices"][0]["message"]["content"] == expected


def test_requests_without_the_key_or_from_pages_are_refused_and_sigterm_ends_an_answer_without_end(finished):
    asked = {"model": "tuned", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 10**8}
    with served(finished(), signal.SIGTERM) as (address, key), httpx.Client(timeout=60, trust_env=False) as http:
        headers, asks = {"authorization": f"Bearer {key}"}, partial(http.post, f"{address}/chat/completions")
        for wrong in ({}, {"authorization": "Bearer x"}):
            assert asks(json=asked, headers=wrong).status_code == 401
        for wrong in ({"host": "attacker.example"}, {"origin": "http://attacker.example"}):
            assert asks(json=asked, headers=headers | wrong).status_code == 403
        assert asks(content=bytes(1 << 21), headers=headers).status_code == 413
        with suppress(httpx.ReadTimeout):  # a tiny model may be quick
            asks(json=asked, headers=headers, timeout=0.2)


class Writing:
    """What `generate` is asked, and a stand-in for it that never ends by itself."""

    def __init__(self, gone: threading.Event, leaves_after: int) -> None:
        self.gone, self.leaves_after, self.steps = gone, leaves_after, 0
        self.request = {"input_ids": torch.zeros(1, 3, dtype=torch.long), "generation_config": GenerationConfig()}
        self.settings.max_new_tokens, self.settings.gone = 10**8, gone

    @property
    def settings(self) -> GenerationConfig:
        return self.request["generation_config"]

    def __call__(self, generation_config, input_ids, stopping_criteria) -> torch.Tensor:
        copy.deepcopy(generation_config)  # as transformers does
        while not all(one(input_ids, None).all() for one in stopping_criteria):
            self.steps += 1
            input_ids = torch.cat((input_ids, torch.ones(1, 1, dtype=torch.long)), 1)
            if self.steps == self.leaves_after:
                self.gone.set()
            assert self.steps < 100
        return input_ids


def test_an_answer_ends_with_its_client(model_folder, monkeypatch):
    model = LlamaForCausalLM.from_pretrained(model_folder)
    writing = Writing(threading.Event(), 5)
    assert serve._bounded(model, writing, **writing.request).shape == (1, 8)
    assert writing.settings.max_new_tokens == 5, "which says that the answer was cut"
    waiting = Writing(writing.gone, 5)
    assert serve._bounded(model, waiting, **waiting.request).shape == (1, 3)
    assert waiting.steps == 0
    monkeypatch.setattr(serve, "LONGEST", 0.0)
    late = Writing(threading.Event(), 5)
    assert serve._bounded(model, late, **late.request).shape == (1, 3)


def test_missing_packages_are_refused(monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "openai" else find_spec(name))
    with pytest.raises(FedKSeedError, match=r"pip install 'fedkseed\[serve\]' \(openai is missing"):
        serve.require_server()


ASKED = {"model": "tuned", "temperature": 0}
CHAT, TEXT, RESPONSE = "chat/completions", "completions", "responses"
USER = {"role": "user", "content": "a"}
OWN = {CHAT: {"messages": [USER], "max_tokens": 3}, TEXT: {"prompt": "a", "max_tokens": 3}}
OWN[RESPONSE] = {"input": [USER], "max_output_tokens": 3, "stream": False}
PICTURE = {"type": "input_image", "image_url": "data:,"}


@pytest.mark.parametrize(
    ("path", "more", "fault"),
    [
        (CHAT, {"n": 2}, "n = 2 is not done here"),
        (CHAT, {"logprobs": True}, "logprobs = True is not done"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format = "),
        (CHAT, {"tools": [{"type": "function"}]}, "tools = "),
        (CHAT, {"max_tokens": 0}, "max_tokens is a number of tokens, at least 1, got 0"),
        (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens is a number"),
        (CHAT, {"temperature": -1}, "temperature is a number, at least 0, got -1"),
        (CHAT, {"stop": ""}, "stop is a text or a list of texts"),
        (CHAT, {"model": None}, "model is the name of a model"),
        (CHAT, {"messages": None}, "messages is needed, and not empty"),
        (CHAT, {"messages": []}, "messages is needed, and not empty"),
        (CHAT, {"messages": "a"}, "messages is needed, and not empty"),
        (CHAT, {"messages": [{"role": "owner", "content": "a"}]}, "a message has a role, one of system"),
        (CHAT, {"messages": [{"role": ["user"], "content": "a"}]}, "a message has a role, one of system"),
        (CHAT, {"messages": [USER | {"content": [PICTURE]}]}, "a message's content is text, got"),
        (CHAT, {"messages": [USER | {"content": 5}]}, "a message's content is text, got"),
        (CHAT, {"messages": [USER | {"content": [{"type": "text"}]}]}, "a message's content is text, got"),
        (CHAT, {"frequency_penalty": -1}, "the request can't be answered: "),
        (CHAT, {"generation_config": "{"}, "the request can't be answered: "),
        (CHAT, {"logit_bias": {"5": 10**400}}, "the request can't be answered: "),
        (CHAT, {"chat_template_kwargs": {"chat_template": "{{ raise_exception('alternate') }}"}}, "alternate"),
        (TEXT, {"echo": True}, "echo = True is not done here"),
        (TEXT, {"best_of": 2}, "best_of = 2"),
        (TEXT, {"suffix": "z"}, "suffix = z"),
        (TEXT, {"logit_bias": {"5": 1}}, "logit_bias = "),
        (TEXT, {"prompt": ""}, "prompt is needed, and not empty"),
        (RESPONSE, {"input": []}, "input is needed, and not empty"),
        (RESPONSE, {"input": [USER | {"content": [PICTURE]}]}, "a message's content is text, got"),
        (RESPONSE, {"truncation": "auto"}, "truncation = auto is not done"),
    ],
)
def test_what_a_request_asks_for_is_done_or_refused_with_its_name(application, path, more, fault):
    answer = ask(application, path, ASKED | OWN[path] | more)
    assert answer.status_code == 400
    assert fault in answer.json()["detail"]


DEFAULTS = {
    CHAT: {
        "n": 1, "logprobs": False, "presence_penalty": 0, "response_format": {"type": "text"}, "tools": [], "user": "b",
        "modalities": ["text"], "max_tokens": 3.0, "stop": None, "stream_options": None, "tool_choice": "auto",
        "function_call": "none", "reasoning_effort": "none",
    },
    TEXT: {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "suffix": None},
    RESPONSE: {"truncation": "disabled", "text": {"format": {"type": "text"}}, "store": False, "include": []},
}  # fmt: skip


@pytest.mark.parametrize("path", OWN)
def test_settings_at_their_defaults_change_nothing(application, path):
    plain, same = (ask(application, path, ASKED | OWN[path] | more).json()["usage"] for more in ({}, DEFAULTS[path]))
    assert plain == same


def test_an_input_may_be_a_text_or_parts_of_one_message(application):
    asked = ("a", [USER], [{"type": "input_text", "text": "a"}])
    usages = [ask(application, RESPONSE, ASKED | OWN[RESPONSE] | {"input": each}).json()["usage"] for each in asked]
    assert usages[0] == usages[1] == usages[2]


def test_developers_are_the_system_and_biases_of_tokens_are_numbers(application):
    counts = []
    for role in ("system", "developer"):
        asked = ASKED | OWN[CHAT] | {"messages": [{"role": role, "content": "Be short."}, USER]}
        counts.append(ask(application, CHAT, asked).json()["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]
    plain, biased = (ask(application, CHAT, ASKED | OWN[CHAT] | more) for more in ({}, {"logit_bias": {"5": 10**6}}))
    assert biased.status_code == 200
    assert plain.json()["choices"] != biased.json()["choices"]
