"""Rendering without an engine: from a client's JSON to token ids, with vLLM's own request types and renderer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.renderers import renderer_from_config
from vllm.renderers.hf import safe_apply_chat_template
from vllm.renderers.inputs.preprocess import extract_prompt_components, extract_prompt_len
from vllm.renderers.online_renderer import OnlineRenderer

from app.config import SluiceConfig
from app.engine.arguments import chat_template, render_args
from app.errors import InvalidRequest, RequestError, from_engine
from app.types import JsonObject, Rendered, Route

# Where validation errors of one request are many, the first few say enough.
_MAX_REPORTED_ERRORS = 3
_MAX_MESSAGE_CHARS = 500
# Rendering this much takes less than a millisecond.
_SMALL_TEXT_CHARS = 4096
_SMALL_MESSAGES = 32

_is_small: ContextVar[bool] = ContextVar("is_small", default=False)


class Renderer:
    """Checks and renders requests as the pools' engines would, with the longest context of any pool."""

    def __init__(self, config: SluiceConfig) -> None:
        args = render_args(config.model, dict(config.pools))
        self._model_config = args.create_model_config()
        vllm_config = VllmConfig(model_config=self._model_config)
        self._models = OpenAIModelRegistry(
            self._model_config, [BaseModelPath(name=config.model.name, model_path=config.model.name)]
        )
        self._renderer = OnlineRenderer(
            self._model_config,
            renderer_from_config(vllm_config),
            request_logger=None,
            chat_template=chat_template(config.model),
            chat_template_content_format="auto",
            enable_auto_tools=config.model.tool_call_parser is not None,
            tool_parser=config.model.tool_call_parser,
            reasoning_parser=config.model.reasoning_parser,
        )
        _run_small_inline(self._renderer.renderer)
        self._default_sampling = self._model_config.get_diff_sampling_param()
        self._max_choices = config.ingress.max_choices

    def warm_up(self) -> None:
        """Do what the first request would otherwise wait for."""
        self._renderer.warmup()

    async def models(self) -> JsonObject:
        """OpenAI's list of models."""
        listing: JsonObject = (await self._models.show_available_models()).model_dump()
        return listing

    def count(self, texts: list[str]) -> list[int]:
        """Tokens of each text, by itself."""
        if not texts:
            return []
        tokenizer = self._renderer.renderer.get_tokenizer()
        return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    async def render(self, route: Route, body: JsonObject) -> Rendered:
        """Check and render one request.

        Raises:
            RequestError: what is wrong with it, as a 4xx.
        """
        _is_small.set(_text_length(route, body) <= _SMALL_TEXT_CHARS)
        try:
            # Building the request validates it, and may raise; none of it may pass for a fault of the server.
            request = _parse(route, body)
            await self._check_model(request.model)
            choices = getattr(request, "n", None) or 1
            self._check_choices(choices * _count_prompts(body.get("prompt")))
            return await self._render(route, request, choices)
        except (RequestError, asyncio.CancelledError):
            raise
        except ValidationError as error:
            raise _from_validation(error) from None
        except Exception as error:
            raise _from_error_response(create_error_response(error)) from error

    def _check_choices(self, sequences: int) -> None:
        if sequences > self._max_choices:
            raise InvalidRequest(
                f"The request asks for {sequences} sequences (prompts times n); "
                f"at most {self._max_choices} are allowed.",
                param="n",
            )

    async def _check_model(self, name: str | None) -> None:
        error = await self._models.check_model(name)
        if error is not None:
            raise _from_error_response(error)

    async def _render(self, route: Route, request: Any, choices: int) -> Rendered:
        if route == "chat":
            result = await self._renderer.render_chat(request, skip_mm_cache=True)
            inputs = result if isinstance(result, ErrorResponse) else result[1]
        else:
            inputs = await self._renderer.render_completion(request, skip_mm_cache=True)
        if isinstance(inputs, ErrorResponse):
            raise _from_error_response(inputs)
        self._check_choices(choices * len(inputs))
        lengths = [extract_prompt_len(self._model_config, item) for item in inputs]
        if route == "chat" and request.max_completion_tokens is not None:
            max_output_tokens = request.max_completion_tokens
        else:
            max_output_tokens = request.max_tokens
        self._check_sampling(request, max(1, self._model_config.max_model_len - max(lengths)))
        return Rendered(
            model=request.model or self._models.model_name(),
            stream=bool(request.stream),
            prompt_token_ids=self._reusable_ids(route, request, inputs),
            prompt_tokens=sum(lengths),
            longest_prompt=max(lengths),
            max_output_tokens=max_output_tokens,
            sequences=choices * len(inputs),
            sampling={
                name: value
                for name in ("temperature", "top_p")
                if isinstance(value := getattr(request, name, None), int | float)
            },
        )

    def _check_sampling(self, request: Any, room: int) -> None:
        """Let vLLM find what is wrong with the sampling parameters, before anything queues."""
        if request.use_beam_search:
            request.to_beam_search_params(room, self._default_sampling)
        else:
            request.to_sampling_params(room, self._default_sampling)

    def _reusable_ids(self, route: Route, request: Any, inputs: list[Any]) -> list[list[int]] | None:
        # With echo, vLLM's answer contains the prompt's text, which token ids do not carry.
        if getattr(request, "echo", False) or getattr(request, "return_prompt_text", False):
            return None
        if route == "completions" and request.prompt_embeds is not None:
            return None
        ids: list[list[int]] = []
        for item in inputs:
            if item.get("type") != "token":
                return None
            token_ids = extract_prompt_components(self._model_config, item).token_ids
            if not token_ids:
                return None
            ids.append(list(token_ids))
        return ids


def _run_small_inline(renderer: Any) -> None:
    """Render small requests on the event loop: handing them to vLLM's thread takes longer than doing it."""
    for name, inline in (
        ("_apply_chat_template_async", safe_apply_chat_template),
        ("_tokenize_prompt_async", renderer._tokenize_prompt),
    ):
        setattr(renderer, name, _inline_if_small(inline, getattr(renderer, name)))


def _inline_if_small(inline: Callable[..., Any], threaded: Callable[..., Any]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        return inline(*args, **kwargs) if _is_small.get() else await threaded(*args, **kwargs)

    return run


def _text_length(route: Route, body: JsonObject) -> float:
    """Characters to render; infinite for anything but plain text."""
    if route == "completions":
        prompt = body.get("prompt")
        return len(prompt) if isinstance(prompt, str) else math.inf
    messages = body.get("messages")
    if body.get("tools") or not isinstance(messages, list) or len(messages) > _SMALL_MESSAGES:
        return math.inf
    contents = [message.get("content") if isinstance(message, dict) else None for message in messages]
    return sum(len(content) if isinstance(content, str) else math.inf for content in contents)


def _parse(route: Route, body: JsonObject) -> Any:
    return ChatCompletionRequest(**body) if route == "chat" else CompletionRequest(**body)


def _count_prompts(prompt: object) -> int:
    """How many prompts a completions request holds, before any of them is tokenised."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def _from_error_response(response: Any) -> RequestError:
    error = response.error
    return from_engine(error.code, error.type, error.message, error.param)


def _from_validation(error: ValidationError) -> InvalidRequest:
    mistakes = error.errors(include_url=False, include_context=False, include_input=False)
    told: list[str] = []
    param: str | None = None
    for mistake in mistakes[:_MAX_REPORTED_ERRORS]:
        location = [str(part) for part in mistake["loc"]]
        param = param or (location[0] if location else None)
        message = mistake["msg"].removeprefix("Value error, ")
        told.append(f"{'.'.join(location[:1])}: {message}" if location else message)
    more = len(mistakes) - len(told)
    text = "; ".join(dict.fromkeys(told)) + (f"; and {more} more" if more > 0 else "")
    return InvalidRequest(text[:_MAX_MESSAGE_CHARS], param=param)
