"""One vLLM engine with vLLM's own OpenAI layer: the only importer of vLLM's serving side.

Relies on these parts of vLLM that are not public: `AsyncLLM.output_processor` and its `add_request`, `process_outputs`,
`request_states` (`RequestState.stats`, `.num_cached_tokens`, `.prompt_len`), the SSE text of its streams, and the reuse
of token ids carried in `kv_transfer_params.prompt_token_ids`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextvars import ContextVar
from typing import Any

from starlette.requests import Request
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from app.config import ModelConfig, PoolConfig
from app.engine.arguments import chat_template, engine_args
from app.engine.causes import GAP_SAMPLE, WAITED_KEY, Gaps, causes
from app.engine.deltas import DeltaSink, DeltaTap, is_plain, template_of
from app.engine.load import at_rest
from app.engine.stats import LoadWatch, SampledRayStatLogger
from app.engine.targets import Targets, engine_priority, with_targets
from app.telemetry.timeline import read_clock, usage_metrics, with_facts
from app.types import ClockReading, EngineFacts, EngineLoad, EngineRequest, Head, JsonObject, Tail

_ERROR_CHUNK = 'data: {"error"'
_CHUNK_START = 'data: {"id"'
_DONE = "data: [DONE]"
# Only the usage chunk has no choices; within a JSON string the quotes would be escaped.
_USAGE_CHUNK = '"choices":[]'
# What vLLM says of a request that its engine core ended with an error.
_NO_REASON = str(GenerationError())
# A client's mistake that vLLM reports as a fault of its own carries one of these as its cause.
_CLIENT_MISTAKES = (ValueError, TypeError, OverflowError, NotImplementedError)


# An engine that has requests and takes no step for so long has stopped, even where its process has not.
_STALLED_S = 300.0


class EngineCall:
    """What the engine does for one request: its sequences, and what went wrong."""

    def __init__(self, clock: ClockReading, tpot_s: float | None = None) -> None:
        self._clock = clock
        self.tpot_s = math.inf if tpot_s is None else tpot_s
        self.states: list[Any] = []
        self.gaps: list[Gaps] = []
        self.error: Exception | None = None
        # Where the middle of a plain answer goes, instead of being asked for.
        self.sink: DeltaSink | None = None
        # The engine has given everything that it will.
        self.has_ended = False

    def facts(self) -> EngineFacts:
        """What is known by now."""
        stats = [state.stats for state in self.states if state.stats is not None]
        # The sequences of one prompt share it; their parent tells which belong together.
        prompts = {id(state.parent_req) if state.parent_req is not None else id(state): state for state in self.states}

        def known(name: str) -> list[float]:
            return [value for value in (getattr(entry, name) for entry in stats) if value > 0]

        return EngineFacts(
            clock=self._clock,
            queued=min(known("queued_ts"), default=None),
            scheduled=min(known("scheduled_ts"), default=None),
            first_token=min(known("first_token_ts"), default=None),
            last_token=max(known("last_token_ts"), default=None),
            prompt_tokens=sum(state.prompt_len for state in prompts.values()),
            cached_tokens=sum(state.num_cached_tokens or 0 for state in prompts.values()),
            output_tokens=sum(entry.num_generation_tokens for entry in stats),
            sequences=max(1, len(self.states)),
            preemptions=sum(entry.num_preemptions for entry in stats),
            causes=causes(self.gaps),
        )


_current_call: ContextVar[EngineCall | None] = ContextVar("current_call", default=None)


class _ObservedLLM(AsyncLLM):
    """AsyncLLM that tells each request's EngineCall what becomes of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        processor = self.output_processor
        add_request, process_outputs = processor.add_request, processor.process_outputs
        numbers = itertools.count()
        # By request, while it has an EngineCall.
        self.gaps: dict[str, Gaps] = {}

        # The one place where a sequence gets its state, before anything can be awaited or cancelled.
        def observed_add_request(request: Any, *args: Any, **kwargs: Any) -> None:
            add_request(request, *args, **kwargs)
            call = _current_call.get()
            if call is not None:
                call.states.append(processor.request_states[request.request_id])
                gaps = self.gaps[request.request_id] = Gaps(call.tpot_s, next(numbers) % GAP_SAMPLE)
                call.gaps.append(gaps)

        def observed_process_outputs(outputs: Any, timestamp: float | None = None, *args: Any, **kwargs: Any) -> Any:
            now = time.monotonic() if timestamp is None else timestamp
            for output in outputs:
                gaps = self.gaps.get(output.request_id)
                if gaps is not None:
                    gaps.note(now, len(output.new_token_ids))
                    for event in output.events or ():
                        if event.type == EngineCoreEventType.PREEMPTED:
                            gaps.preempted.append(event.timestamp)
                told = output.kv_transfer_params
                if told is not None and WAITED_KEY in told:
                    # It is not for clients, who would find it in their answers.
                    output.kv_transfer_params = None
                    if gaps is not None:
                        gaps.waited = tuple(told[WAITED_KEY])
            return process_outputs(outputs, timestamp, *args, **kwargs)

        processor.add_request = observed_add_request
        processor.process_outputs = observed_process_outputs

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().add_request(*args, **kwargs)
        except Exception as error:
            call = _current_call.get()
            if call is not None:
                call.error = error
            raise


class VLLMEngine:
    """A running engine of one pool."""

    def __init__(self, model: ModelConfig, pool: PoolConfig, *, ray_metrics: bool) -> None:
        """Start the engine; blocks until it can serve. `ray_metrics`: export vLLM's own metrics through Ray.

        The process must have been prepared by `environment.prepare_engine_process` on this thread.
        """
        self._load: EngineLoad | None = None
        self._load_taken = 0.0
        self._last_step = time.monotonic()
        loggers: list[Any] = [lambda vllm_config, engine_index: LoadWatch(self._learn_load)]
        if ray_metrics:
            loggers.append(SampledRayStatLogger)
        self._llm = _ObservedLLM.from_engine_args(
            engine_args(model, pool), usage_context=UsageContext.OPENAI_API_SERVER, stat_loggers=loggers
        )
        self._scheduler = pool.engine.scheduler
        self._clock = read_clock()
        template = chat_template(model)
        models = OpenAIServingModels(self._llm, [BaseModelPath(name=model.name, model_path=model.name)])
        renderer = OnlineRenderer(
            self._llm.model_config,
            self._llm.renderer,
            request_logger=None,
            chat_template=template,
            chat_template_content_format="auto",
            enable_auto_tools=model.tool_call_parser is not None,
            tool_parser=model.tool_call_parser,
            reasoning_parser=model.reasoning_parser,
        )

        def chat(tool_parser: str | None) -> Any:
            return OpenAIServingChat(
                self._llm,
                models,
                "assistant",
                online_renderer=renderer,
                request_logger=None,
                chat_template=template,
                chat_template_content_format="auto",
                enable_auto_tools=tool_parser is not None,
                tool_parser=tool_parser,
                reasoning_parser=model.reasoning_parser or "",
                enable_prompt_tokens_details=True,
            )

        self._chat_with_tools = chat(model.tool_call_parser)
        # A tool parser reads the whole answer again with every token, so requests without tools do without it.
        self._chat = chat(None) if model.tool_call_parser is not None else self._chat_with_tools
        self._has_reasoning = model.reasoning_parser is not None
        self._completions = OpenAIServingCompletion(
            self._llm, models, online_renderer=renderer, request_logger=None, enable_prompt_tokens_details=True
        )

    @property
    def unfinished_requests(self) -> int:
        """Sequences that the engine has not finished."""
        count: int = self._llm.get_num_unfinished_requests()
        return count

    def load(self) -> tuple[EngineLoad | None, float]:
        """What the engine has to do, None where its scheduler does not tell, and when that was, by `time.monotonic()`.

        Without requests it is as of now; where nothing is told, as of the last step.
        """
        if self.unfinished_requests:
            return self._load, self._last_step if self._load is None else self._load_taken
        if self._load is None:
            return None, time.monotonic()
        now = time.monotonic()
        return at_rest(self._load, now - self._load_taken), now

    def _learn_load(self, load: EngineLoad | None) -> None:
        self._last_step = time.monotonic()
        if load is not None:
            self._load, self._load_taken = load, self._last_step

    def new_call(self, tpot_s: float | None = None) -> EngineCall:
        """A call to follow one request by; `tpot_s`: its TPOT target, None for none."""
        return EngineCall(self._clock, tpot_s)

    @property
    def is_dead(self) -> bool:
        """Whether the engine's process died: it will answer nothing any more."""
        errored: bool = self._llm.errored
        return errored

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine died."""
        if self.is_dead or self._has_stalled():
            raise EngineDeadError()
        await self._llm.check_health()

    def _has_stalled(self) -> bool:
        """Whether there are requests, and no step has ended for longer than any takes."""
        now = time.monotonic()
        if not self.unfinished_requests:
            self._last_step = now
        return now - self._last_step > _STALLED_S

    def shutdown(self) -> None:
        """Stop the engine's processes."""
        self._llm.shutdown()

    async def answer(self, request: EngineRequest, call: EngineCall) -> AsyncGenerator[Head | bytes | Tail, None]:
        """The answer to a request: a Head and, when it is streamed, SSE bytes and a Tail.

        Each item holds what vLLM had ready when it was asked for: deltas that accumulated while the reader was busy
        come merged. Leaving the iteration early, by cancellation or by closing it, aborts the request in the engine.
        """
        _current_call.set(call)
        events: AsyncGenerator[str, None] | None = None
        try:
            # vLLM swallows a cancellation of its non-streaming calls; that of our own waiting it cannot.
            task = asyncio.ensure_future(self._create(request))
            try:
                result = await asyncio.shield(task)
            except asyncio.CancelledError:
                task.cancel()
                raise
            if isinstance(result, ErrorResponse):
                yield self._error_head(request, call, result)
            elif isinstance(result, AsyncGenerator):
                events = result
                async for item in self._stream(request, events, call):
                    yield item
            else:
                result.service_tier = request.service_tier
                yield Head(200, _whole(result, request), final=True, facts=call.facts())
        except Exception as error:
            yield self._error_head(request, call, create_error_response(error))
        finally:
            for state in call.states:
                self._llm.gaps.pop(state.request_id, None)
            await self._abort(call)
            if events is not None:
                # Closing a generator that waits for the engine can only fail for reasons that abort has settled.
                with contextlib.suppress(Exception):
                    await events.aclose()

    async def _create(self, request: EngineRequest) -> Any:
        raw_request = Request(
            {
                "type": "http",
                "headers": [
                    (name.encode("latin-1"), value.encode("latin-1"))
                    for name, value in {"x-request-id": request.request_id, **request.trace_context}.items()
                ],
            }
        )
        body = _engine_body(request, self._scheduler)
        if request.route == "chat":
            chat = self._chat_with_tools if request.body.get("tools") else self._chat
            return await chat.create_chat_completion(ChatCompletionRequest(**body), raw_request)
        return await self._completions.create_completion(CompletionRequest(**body), raw_request)

    async def _stream(
        self, request: EngineRequest, events: AsyncGenerator[str, None], call: EngineCall
    ) -> AsyncIterator[Head | bytes | Tail]:
        first = await anext(events)
        begin = [first]
        if request.route == "chat" and not first.startswith(_ERROR_CHUNK):
            # Roles, one per choice, come right before the first token; sent with it they cost nothing.
            for _ in range(request.body.get("n") or 1):
                event = await anext(events, None)
                if event is None:
                    break
                begin.append(event)
        error = next((event for event in begin if event.startswith(_ERROR_CHUNK)), None)
        if error is not None:
            # Nothing has been sent yet, so it can still have a status.
            yield self._error_head(request, call, _parse_error(error))
            return
        begin[0] = _with_service_tier(first, request.service_tier)
        yield Head(200, "".join(begin).encode(), final=False, facts=call.facts())
        async for data in self._plain_middle(request, begin[-1], call):
            yield data
        failed = False
        last: list[str] = []
        async for event in events:
            if event.startswith(_ERROR_CHUNK):
                failed = True
            elif _USAGE_CHUNK in event:
                event = self._with_metrics(event, request, call)
            # What follows the last token is ready at once, and leaves as one. With `[DONE]` clients hang up, so nothing
            # that is still to be told may come after it.
            if failed or call.has_ended or event.startswith(_DONE):
                last.append(event)
            else:
                yield event.encode()
        yield Tail(call.facts(), failed, "".join(last).encode())

    async def _plain_middle(self, request: EngineRequest, chunk: str, call: EngineCall) -> AsyncIterator[bytes]:
        """The chunks that need no more than text; none where the request asks for more."""
        if self._has_reasoning or not is_plain(request.route, request.body) or len(call.states) != 1:
            return
        template = template_of(request.route, chunk)
        if template is None:
            return
        tap = DeltaTap(call.states[0].queue)
        if call.sink is not None:
            await tap.pour(call.sink, template)
        else:
            while (text := await tap.take()) is not None:
                if text:
                    yield template.event(text)
        call.has_ended = True

    def _with_metrics(self, event: str, request: EngineRequest, call: EngineCall) -> str:
        chunk = json.loads(event.removeprefix("data: "))
        timeline = with_facts(request.timeline, call.facts(), request.clock)
        chunk["service_tier"] = request.service_tier
        chunk["metrics"] = usage_metrics(timeline)
        if request.notes:
            chunk["usage"]["notes"] = list(request.notes)
        return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"

    def _error_head(self, request: EngineRequest, call: EngineCall, response: Any) -> Head:
        facts = call.facts()
        if self._llm.errored:
            error = ("ServiceUnavailableError", "The engine stopped; please retry.", None)
            return Head(503, b"", final=True, facts=facts, error=error)
        if response.error.code >= 500:
            if isinstance(call.error, _CLIENT_MISTAKES):
                response = create_error_response(call.error)
            elif response.error.message == _NO_REASON and _is_constrained(request.body):
                # vLLM reports a grammar that does not compile, or that no token satisfies, as a fault of its own.
                message = "The constraint on the output (response_format, structured_outputs or tools) cannot be met."
                error = ("BadRequestError", message, None)
                return Head(400, b"", final=True, facts=facts, error=error)
        told = response.error
        return Head(told.code, b"", final=True, facts=facts, error=(told.type, told.message, told.param))

    async def _abort(self, call: EngineCall) -> None:
        unfinished = [
            state.request_id for state in call.states if state.request_id in self._llm.output_processor.request_states
        ]
        if unfinished and not self._llm.errored:
            await self._llm.abort(unfinished, internal=True)


def _engine_body(request: EngineRequest, scheduler: str) -> JsonObject:
    """The client's JSON with what the ingress has worked out already."""
    targets = Targets(request.ttft_s, request.tpot_s, request.service_class)
    received = request.clock.wall_offset + request.timeline.received
    body = {
        **request.body,
        "priority": engine_priority(scheduler, received, request.ttft_s),
        "vllm_xargs": with_targets(request.body.get("vllm_xargs"), targets),
    }
    if request.prompt_token_ids is not None:
        if request.route == "chat":
            body["kv_transfer_params"] = {"prompt_token_ids": request.prompt_token_ids[0]}
        else:
            body["prompt"] = request.prompt_token_ids
            # Already applied when the prompt was rendered.
            body.pop("truncate_prompt_tokens", None)
            body.pop("suffix", None)
    return body


def _whole(result: Any, request: EngineRequest) -> bytes:
    """An answer in one piece, as JSON."""
    if not request.notes:
        return bytes(result.model_dump_json().encode())
    answer = result.model_dump(mode="json")
    answer["usage"]["notes"] = list(request.notes)
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def _is_constrained(body: JsonObject) -> bool:
    return any(body.get(name) for name in ("response_format", "structured_outputs", "tools"))


def _parse_error(event: str) -> Any:
    return ErrorResponse(**json.loads(event.removeprefix("data: ")))


def _with_service_tier(event: str, service_tier: str) -> str:
    if not event.startswith(_CHUNK_START):
        return event
    return f'data: {{"service_tier":"{service_tier}",' + event.removeprefix("data: {")
