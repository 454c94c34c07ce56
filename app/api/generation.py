"""The two generation routes. `Generation._handle` reads as a request's way through the ingress."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.trace import Span, SpanKind
from starlette.datastructures import Headers

from app.api.edge import received_at
from app.api.http import (
    ClientGone,
    ReaderWatch,
    Responder,
    clean_request_id,
    error_event,
    read_json_object,
    until_client_gone,
)
from app.config import SluiceConfig
from app.errors import InternalError, InvalidRequest, ReplicaLost, RequestError, from_engine
from app.routing.classify import classify, home_pool
from app.telemetry.timeline import read_clock, server_timing, with_facts
from app.telemetry.tracing import Tracing, carrier_from_headers, end_span, mark_outcome
from app.types import UNKNOWN, ClockReading, EngineRequest, Head, JsonObject, Outcome, Rendered, Route, Tail, Timeline

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from app.pools.client import PoolClient, ReplicaStream
    from app.telemetry.metrics import RequestMetrics

logger = logging.getLogger("sluice.ingress")

_MIB = 1 << 20
_PATHS: dict[Route, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_OPERATIONS: dict[Route, str] = {"chat": "chat", "completions": "text_completion"}

# Fields of vLLM's requests that steer the server, not the answer. The first kind would let a client put words into
# another request's place, the second is decided by the class.
_REFUSED_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_DROPPED_FIELDS = ("priority", "request_id")


class RendererPort(Protocol):
    """What the generation routes need of a renderer."""

    async def render(self, route: Route, body: JsonObject) -> Rendered:
        """Check and render one request; raises RequestError."""


@dataclass(slots=True)
class _Exchange:
    """One request and what has become known of it."""

    request_id: str
    route: Route
    clock: ClockReading
    timeline: Timeline
    headers: Headers
    responder: Responder
    span: Span
    carrier: dict[str, str]
    service_class: str = UNKNOWN
    pool: str = UNKNOWN
    stream: ReplicaStream | None = None
    outcome: Outcome = "failed"
    error_type: str | None = None
    lost: bool = False
    attributes: dict[str, str | int | float | bool] = field(default_factory=dict)


class Generation:
    """The ASGI app of one generation route."""

    def __init__(
        self,
        route: Route,
        config: SluiceConfig,
        renderer: RendererPort,
        pools: Mapping[str, PoolClient],
        tracing: Tracing,
        metrics: RequestMetrics,
        readers: ReaderWatch,
    ) -> None:
        self._route = route
        self._config = config
        self._renderer = renderer
        self._pools = pools
        self._tracing = tracing
        self._metrics = metrics
        self._readers = readers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises only when it is cancelled from outside."""
        exchange = self._open(scope, send)
        try:
            body = await read_json_object(
                receive, exchange.headers.get("content-length"), int(self._config.ingress.max_body_mib * _MIB)
            )
            await until_client_gone(receive, self._handle(exchange, body))
            exchange.outcome = exchange.outcome if exchange.error_type else "finished"
        except ClientGone:
            exchange.outcome, exchange.error_type = "cancelled", None
        except asyncio.CancelledError:
            exchange.outcome, exchange.error_type = "cancelled", None
            if not self._readers.gave_up(exchange.responder):
                raise
            # The server closes the connection, as the answer is not complete.
            exchange.attributes["sluice.slow_reader"] = True
            self._metrics.slow_reader(exchange.service_class)
        except RequestError as error:
            await self._fail(exchange, error)
        except Exception:
            logger.exception("request %s failed", exchange.request_id)
            await self._fail(exchange, InternalError("The server failed to handle the request."))
        finally:
            self._close(exchange)

    def _open(self, scope: Scope, send: Send) -> _Exchange:
        clock = read_clock()
        headers = Headers(scope=scope)
        received = received_at(headers, time.monotonic(), clock)
        given_id = headers.get("x-request-id")
        request_id = clean_request_id(given_id)
        span = self._tracing.start(
            f"POST {_PATHS[self._route]}", SpanKind.SERVER, carrier_from_headers(headers), received, clock
        )
        span.set_attributes(
            {
                "http.request.method": "POST",
                "http.route": _PATHS[self._route],
                gen_ai.GEN_AI_OPERATION_NAME: _OPERATIONS[self._route],
                gen_ai.GEN_AI_PROVIDER_NAME: "sluice",
                "sluice.request_id": request_id,
            }
        )
        # Ray Serve's entry answers with the id that it was given; a second header would only repeat it.
        responder = Responder(send, {} if request_id == given_id else {"x-request-id": request_id})
        return _Exchange(
            request_id=request_id,
            route=self._route,
            clock=clock,
            timeline=Timeline(received=received),
            headers=headers,
            responder=responder,
            span=span,
            carrier=self._tracing.inject(span),
        )

    async def _handle(self, exchange: _Exchange, body: JsonObject) -> None:
        """A request's way: render, classify, place, dispatch, stream."""
        timeline = exchange.timeline
        service_tier = body.pop("service_tier", None)
        body = _without_steering_fields(body)

        rendered = await self._renderer.render(self._route, body)
        timeline.rendered = time.monotonic()
        timeline.prompt_tokens = rendered.prompt_tokens

        service_class = classify(self._config.classes, service_tier, exchange.headers.get("x-priority"))
        pool = home_pool(
            self._config.routing,
            self._config.pools,
            service_class,
            rendered.longest_prompt,
            rendered.max_output_tokens,
        )
        self._classified(exchange, service_class, pool, rendered)

        timeline.dispatched = time.monotonic()
        targets = self._config.classes[service_class].targets
        stream = self._pools[pool].dispatch(
            EngineRequest(
                request_id=exchange.request_id,
                route=self._route,
                body=body,
                prompt_token_ids=rendered.prompt_token_ids,
                service_class=service_class,
                service_tier=self._config.classes[service_class].service_tier,
                pool=pool,
                ttft_s=targets.ttft_s(rendered.longest_prompt),
                tpot_s=targets.tpot_s,
                timeline=timeline,
                clock=exchange.clock,
                trace_context=exchange.carrier,
            )
        )
        exchange.stream = stream
        try:
            await stream.accepted(self._pools[pool].accept_timeout_s)
            exchange.attributes["sluice.replica"] = stream.replica_id or ""
            await self._relay(exchange, stream)
        except BaseException:
            stream.cancel()
            raise

    def _classified(self, exchange: _Exchange, service_class: str, pool: str, rendered: Rendered) -> None:
        exchange.service_class, exchange.pool = service_class, pool
        self._metrics.entered(service_class)
        exchange.responder.add_headers({"x-sluice-class": service_class, "x-sluice-pool": pool})
        exchange.attributes.update({"sluice.class": service_class, "sluice.pool": pool})
        exchange.span.set_attributes(
            {
                gen_ai.GEN_AI_REQUEST_MODEL: rendered.model,
                gen_ai.GEN_AI_REQUEST_STREAM: rendered.stream,
                gen_ai.GEN_AI_REQUEST_CHOICE_COUNT: rendered.sequences,
                **{f"gen_ai.request.{name}": value for name, value in rendered.sampling.items()},
            }
        )
        if rendered.max_output_tokens is not None:
            exchange.span.set_attribute(gen_ai.GEN_AI_REQUEST_MAX_TOKENS, rendered.max_output_tokens)

    async def _relay(self, exchange: _Exchange, stream: ReplicaStream) -> None:
        responder = exchange.responder
        head = await stream.head()
        self._learn(exchange, head)
        if head.error is not None:
            kind, message, param = head.error
            raise from_engine(head.status, kind, message, param)
        if head.final:
            timing = server_timing(exchange.timeline, time.monotonic())
            await responder.send_json(head.status, head.body, {"server-timing": timing})
            return
        await responder.begin_stream(head.body)
        exchange.timeline.first_sent = time.monotonic()
        with self._readers.watching(responder):
            while not isinstance(item := await stream.more(), Tail):
                await responder.stream(item)
        self._learn(exchange, item)
        if item.failed:
            exchange.outcome, exchange.error_type = "failed", "stream_error"
        await responder.end_stream(item.body)

    def _learn(self, exchange: _Exchange, item: Head | Tail) -> None:
        exchange.timeline = with_facts(exchange.timeline, item.facts, exchange.clock)

    async def _fail(self, exchange: _Exchange, error: RequestError) -> None:
        exchange.outcome, exchange.error_type = error.outcome, error.kind
        exchange.lost = isinstance(error, ReplicaLost)
        try:
            if exchange.responder.started:
                await exchange.responder.end_stream(error_event(error))
            else:
                await exchange.responder.send_error(error)
        except OSError:
            # Nobody is there to be told.
            logger.debug("request %s: the client left before its error was sent", exchange.request_id)

    def _close(self, exchange: _Exchange) -> None:
        """Whatever happened: end the spans, count the request."""
        end = time.monotonic()
        timeline, outcome = exchange.timeline, exchange.outcome
        if timeline.last_token is not None and outcome == "finished":
            timeline.finished = end
        accepted = exchange.stream is not None and exchange.stream.replica_id is not None
        names = ("render", "relay") if accepted and not exchange.lost else ("render", "queue", "prefill", "decode")
        if self._tracing.enabled:
            self._tracing.write_phases(
                exchange.carrier, timeline, exchange.clock, end, names, outcome, exchange.attributes
            )
        span = exchange.span
        span.set_attributes(
            {
                **exchange.attributes,
                gen_ai.GEN_AI_USAGE_INPUT_TOKENS: timeline.prompt_tokens,
                gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: timeline.cached_tokens,
                gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: timeline.output_tokens,
                "sluice.preemptions": timeline.preemptions,
            }
        )
        if exchange.responder.status is not None:
            span.set_attribute("http.response.status_code", exchange.responder.status)
        mark_outcome(span, outcome, exchange.error_type)
        end_span(span, end, exchange.clock)
        if exchange.service_class != UNKNOWN:
            self._metrics.left(exchange.service_class)
        self._metrics.ended(exchange.service_class, exchange.pool, outcome, timeline, end)


def _without_steering_fields(body: JsonObject) -> JsonObject:
    for name in _REFUSED_FIELDS:
        if body.get(name) is not None:
            raise InvalidRequest(f"`{name}` cannot be set by clients of this server.", param=name)
    return {name: value for name, value in body.items() if name not in _REFUSED_FIELDS + _DROPPED_FIELDS}
