"""An OpenAI-compatible endpoint for a tuned model beside its base model, by the server of `transformers`."""

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import FedKSeedError, first_line
from .load import TunedModel

Models: TypeAlias = Mapping[str, tuple[Any, Any]]  # name -> a model and its tokenizer
LONGEST = 600.0  # seconds of an answer
# Settings of requests that do not change an answer, and values of others that ask for what is done.
HARMLESS = {
    "user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls", "include", "prediction",
    "max_tool_calls",
}  # fmt: skip
DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of"), (1,)),
    "modalities": (["text"],), "response_format": ({"type": "text"},), "text": ({"format": {"type": "text"}},),
    **dict.fromkeys(("tool_choice", "function_call"), ("auto", "none")), "reasoning_effort": ("none",),
    "truncation": ("disabled",),
}  # fmt: skip
NEEDED = {"ChatCompletionHandler": "messages", "CompletionHandler": "prompt", "ResponseHandler": "input"}
ITEMS = ("input_text", "function_call", "function_call_output", "reasoning")  # of an input, that have no role
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_gone: ContextVar[threading.Event | None] = ContextVar("_gone", default=None)  # set once the asking client is gone


def require_server() -> None:
    """Refuse, before a model or PyTorch is loaded, where the packages of the server are missing."""
    lacking = [name for name in ("fastapi", "openai") if find_spec(name) is None]
    transformers: Any = find_spec("transformers")
    if not Path(transformers.origin).with_name("cli").joinpath("serving", "server.py").is_file():
        lacking.append("its server in transformers 5.23")
    if lacking:
        needs = "serving a model needs the packages fastapi and openai"
        raise FedKSeedError(f"{needs}: pip install 'fedkseed[serve]' ({lacking[0]} is missing)")


def load(tuned: TunedModel) -> Models:
    """The tuned model, and the base model where it is known, under the names `tuned` and `base`.

    Both are asked in the words on which the tuned one was tuned, and answer as `respond` does, unless the request says
    something else.
    """
    from transformers.utils import logging

    from ..evaluation.evaluate import greedy

    logging.set_verbosity_error()  # the server warns of each request
    tokenizer = tuned.chat_tokenizer()
    models: dict[str, Any] = {"base": tuned.load_base()} if tuned.base is not None else {}
    models["tuned"] = tuned.load()
    for model in models.values():
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        inner.generation_config = greedy(model, tokenizer, tuned.words(tokenizer).ends(tokenizer))
        model.generate = partial(_bounded, model, model.generate)
    return {name: (model, tokenizer) for name, model in models.items()}


def _bounded(model: Any, generate: Callable[..., Any], **request: Any) -> Any:
    """End an answer at the model's last position, after `LONGEST` seconds, or once its client has disconnected."""
    import torch

    from ..models.loss import room_for

    settings, ids, end = request["generation_config"], request["input_ids"], time.monotonic() + LONGEST
    prompt, gone = ids.shape[1], settings.__dict__.pop("gone", None)
    settings.max_new_tokens = room_for(model, prompt, settings.max_new_tokens)

    def ends(so_far: Any, scores: Any, **_: Any) -> Any:
        over = time.monotonic() > end or (gone is not None and gone.is_set())
        if over:
            settings.max_new_tokens = so_far.shape[1] - prompt  # the answer says that its length has ended it
        return torch.full((so_far.shape[0],), over, device=so_far.device)

    if gone is not None and gone.is_set():  # while it waited for others
        if (streamer := request.get("streamer")) is not None:
            streamer.end()
        return ids
    return generate(**request, stopping_criteria=[ends])


def _fault(body: dict[str, Any], unused: Collection[str], needed: str, template: str) -> str:
    """The reason why a request can't be answered as it asks; empty for most. Names and numbers are put in one form.

    Args:
        unused: names of settings that the server knows and does not use.
        needed: the key of what is asked.
        template: the chat template of the model.
    """
    refused = {*unused, *(() if needed == "messages" else ("logit_bias", "suffix"))} - HARMLESS
    refused |= set() if "tools" in template else {"tools"}
    for name in sorted(refused & body.keys()):
        if body[name] not in (None, False, 0, "", [], {}) and body[name] not in DEFAULTS.get(name, ()):
            return f"{name} = {str(body[name])[:60]} is not done here; leave it out"
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        tokens = body.get(name)
        if tokens is not None and not (isinstance(tokens, int | float) and tokens >= 1 and tokens % 1 == 0):
            return f"{name} is a number of tokens, at least 1, got {str(tokens)[:60]}"
        body |= {name: int(tokens)} if tokens is not None else {}
    if not isinstance(heat := body.get("temperature") or 0, int | float) or not 0 <= heat < math.inf:
        return f"temperature is a number, at least 0, got {str(heat)[:60]}"
    stops = [stop] if isinstance(stop := body.get("stop", []), str) else stop or []
    if not isinstance(stops, list) or not all(text and isinstance(text, str) for text in stops):
        return "stop is a text or a list of texts, none of them empty"
    if not isinstance(body.get("model"), str):
        return "model is the name of a model"
    asked = body.get(needed)
    if not asked or not isinstance(asked, list if needed == "messages" else str | list):
        return f"{needed} is needed, and not empty"
    for message in asked if isinstance(asked, list) and needed != "prompt" else ():
        if needed == "input" and isinstance(message, dict) and "role" not in message and message.get("type") in ITEMS:
            continue
        if not isinstance(message, dict) or not isinstance(role := message.get("role"), str) or role not in ROLES:
            return f"a message has a role, one of {', '.join(ROLES)}, and a content"
        message["role"], parts = ROLES[role], message.get("content")
        for part in parts if isinstance(parts, list) else [] if parts is None else [{"type": "text", "text": parts}]:
            is_text = isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text")
            if not is_text or not isinstance(part.get("text"), str):
                return f"a message's content is text, got {str(part)[:60]}"
    if isinstance(biases := body.get("logit_bias"), dict):
        body["logit_bias"] = {token: float(bias) for token, bias in biases.items()}
    return ""


def application(models: Models) -> Any:
    """The server's ASGI application, for models that are loaded already and no others."""
    from fastapi import HTTPException
    from jinja2 import TemplateError
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.systemone import SystemOneHandler
    from transformers.cli.serving.transcription import TranscriptionHandler
    from transformers.cli.serving.utils import GenerationState

    class Loaded(ModelManager):
        """The server's table of models, which would otherwise look for names on the hub."""

        def load_model_and_processor(self, model_id_and_revision: str, *_: Any, **__: Any) -> tuple[Any, Any]:
            name = model_id_and_revision.partition("@")[0]  # the server adds a revision
            if name not in models:
                raise HTTPException(404, f"no model is called {name!r}; choose {' or '.join(models)}")
            return models[name]

        def list_models(self, cache_dir: str | None = None) -> list[dict]:
            return [{"id": name, "object": "model", "created": 0, "owned_by": "fedkseed"} for name in models]

    class Asked:
        """A request that asks for what is not done is refused, and one that names a temperature over 0 is sampled.

        The server would leave out the first in silence, and leave the second to the model's files.
        """

        async def handle_request(self, body: dict, request_id: str) -> Any:
            above: Any = super()
            template = str(getattr(models.get(str(body.get("model")), (None, None))[1], "chat_template", ""))
            try:
                if fault := _fault(body, above._unused_fields, NEEDED[type(self).__name__], template):
                    raise HTTPException(400, fault)
                return await above.handle_request(body, request_id)
            # Of settings that can't be read, and of messages that the chat template refuses.
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, TemplateError) as error:
                raise HTTPException(400, f"the request can't be answered: {first_line(error)}") from error

        def _build_generation_config(self, body: dict, *args: Any, **options: Any) -> Any:
            above: Any = super()
            settings = above._build_generation_config(body, *args, **options)
            if body.get("generation_config") is None:
                settings.do_sample, settings.top_k = bool(body.get("temperature")), 0
            settings.gone = _gone.get()
            return settings

    manager, state = Loaded(device="cpu"), GenerationState()
    writing = (ChatCompletionHandler, CompletionHandler, ResponseHandler)
    kinds: Any = (
        *(type(kind.__name__, (Asked, kind), {}) for kind in writing),
        TranscriptionHandler,
        SystemOneHandler,
    )
    chat, completion, response, transcription, systemone = (kind(manager, state) for kind in kinds)
    server = build_server(manager, chat, completion, response, transcription, systemone, state)

    async def asked(scope: Any, receive: Any, send: Any) -> None:
        connection = scope.get("state", {}).get("connection")  # see network/http_server.py
        _gone.set(connection and connection.gone)
        await server(scope, receive, send)

    return asked
