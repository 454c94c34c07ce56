"""The two generation routes. `Generation._handle` reads as a request's way through the ingress."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.trace import Span, SpanContext, SpanKind
from starlette.datastructures import Headers

from app.api.demand import engine_request
from app.api.edge import received_at
from app.api.http import (
    BodyOnly,
    ClientGone,
    ReaderWatch,
    Responder,
    clean_request_id,
    error_event,
    read_json_object,
    until_client_gone,
)
from app.api.preparation import Preparation, Prepared
from app.api.requests import Entry, Recording, Requests, play
from app.config import SluiceConfig
from app.errors import (
    HoldExpired,
    InternalError,
    InvalidRequest,
    PoolUnavailable,
    ReplicaLost,
    RequestCancelled,
    RequestError,
    Saturated,
    from_engine,
)
from app.routing.classify import classify
from app.routing.keys import Caller, Grant, Keys
from app.telemetry.record import RecordSink, RequestRecord
from app.telemetry.timeline import clock_shift, read_clock, server_timing, with_facts
from app.telemetry.tracing import Tracing, add_events, carrier_from_headers, end_span, ids, mark_outcome
from app.types import UNKNOWN, Aborted, ClockReading, Head, JsonObject, Outcome, Rendered, Route, Tail, Timeline

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from app.pools.client import PoolClient, ReplicaStream
    from app.pools.dispatcher import Dispatcher, Ticket
    from app.telemetry.metrics import RequestMetrics

logger = logging.getLogger("ray.serve.sluice.ingress")

_MIB = 1 << 20
_PATHS: dict[Route, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_OPERATIONS: dict[Route, str] = {"chat": "chat", "completions": "text_completion"}

# Fields of vLLM's requests that steer the server, not the answer. The first kind would let a client put words into
# another request's place, the second is decided by the class.
_REFUSED_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_DROPPED_FIELDS = ("priority", "request_id")


# How often a request whose replica was lost before it gave anything is placed again.
_MOST_ATTEMPTS = 4

# Requests that go on without the connection that they came by.
_background: set[asyncio.Task[None]] = set()


class RendererPort(Protocol):
    """What the generation routes need of a renderer."""

    async def render(self, route: Route, body: JsonObject) -> Rendered:
        """Check and render one request; raises RequestError."""

    def count(self, texts: list[str]) -> list[int]:
        """Tokens of each text."""


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
    caller: Caller = field(default_factory=Caller)
    grant: Grant | None = None
    entry: Entry | None = None
    recording: Recording | None = None
    is_cancelled: bool = False
    outcome: Outcome = "failed"
    error_type: str | None = None
    reason: str = ""
    waited_for: tuple[SpanContext, ...] = ()
    home_pool: str = UNKNOWN
    replica_id: str = ""
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    predicted_ttft_s: float | None = None
    predicted_wait_s: float | None = None
    attempts: int = 0
    steps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_slow_reader: bool = False
    attributes: dict[str, str | int | float | bool] = field(default_factory=dict)


class Generation:
    """The ASGI app of one generation route."""

    def __init__(
        self,
        route: Route,
        config: SluiceConfig,
        pools: Mapping[str, PoolClient],
        dispatcher: Dispatcher,
        tracing: Tracing,
        metrics: RequestMetrics,
        sinks: Sequence[RecordSink],
        readers: ReaderWatch,
        keys: Keys,
        preparation: Preparation,
        requests: Requests,
    ) -> None:
        self._route = route
        self._config = config
        self._pools = pools
        self._dispatcher = dispatcher
        self._tracing = tracing
        self._metrics = metrics
        self._sinks = sinks
        self._readers = readers
        self._keys = keys
        self._preparation = preparation
        self._requests = requests

    def configure(self, config: SluiceConfig) -> None:
        """Go by another configuration, with the same pools, from the next request on."""
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises only when it is cancelled from outside."""
        if Headers(scope=scope).get("x-sluice-resume") == "allow":
            await self._serve_resumable(scope, receive, send)
        else:
            await self._run(self._open(scope, send), receive)

    async def _serve_resumable(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request whose stream goes on when its client leaves, and can be read again."""
        recording = Recording(int(self._config.ingress.resume_buffer_mib * _MIB))
        exchange = self._open(scope, recording.send)
        exchange.recording = recording
        body = BodyOnly(receive)
        # Ray Serve cancels what was called in the context of a request whose client has left.
        detached = contextvars.Context()
        work = asyncio.get_running_loop().create_task(self._run(exchange, body.receive), context=detached)
        work.add_done_callback(lambda _: recording.end())
        _background.add(work)
        work.add_done_callback(_background.discard)
        await body.read.wait()
        with contextlib.suppress(ClientGone):
            await until_client_gone(receive, play(recording, send))

    def _enter(self, exchange: _Exchange) -> None:
        """From now on the request is known by its id."""
        task = asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            exchange.is_cancelled = True
            task.cancel()

        exchange.entry = Entry(exchange.request_id, exchange.caller.name, cancel, exchange.recording)
        self._requests.add(exchange.entry)
        if exchange.recording is not None:
            self._requests.watch(exchange.entry, self._config.ingress.resume_window_s)

    async def _run(self, exchange: _Exchange, receive: Receive) -> None:
        try:
            exchange.caller = self._keys.identify(exchange.headers.get("authorization"))
            self._enter(exchange)
            body = await read_json_object(
                receive, exchange.headers.get("content-length"), int(self._config.ingress.max_body_mib * _MIB)
            )
            await until_client_gone(receive, self._handle(exchange, body))
            exchange.outcome = exchange.outcome if exchange.error_type else "finished"
        except ClientGone:
            exchange.outcome, exchange.error_type = "cancelled", None
        except asyncio.CancelledError:
            exchange.outcome, exchange.error_type = "cancelled", None
            if exchange.is_cancelled:
                asyncio.current_task().uncancel()  # type: ignore[union-attr]
                await self._fail(exchange, RequestCancelled("The request was cancelled by its id."))
                return
            if not self._readers.gave_up(exchange.responder):
                raise
            # The server closes the connection, as the answer is not complete.
            exchange.attributes["sluice.slow_reader"] = exchange.is_slow_reader = True
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
        """A request's way: classify, fit, render, admit, place, dispatch, stream."""
        config = self._config
        timeline = exchange.timeline
        service_tier = body.pop("service_tier", None)
        body = _without_steering_fields(body)

        service_class = classify(config.classes, service_tier, exchange.headers.get("x-priority"))
        prepared = await self._preparation.prepare(
            config, service_class, self._route, body, exchange.caller, timeline.received
        )
        timeline.rendered = time.monotonic()
        timeline.prompt_tokens = prepared.rendered.prompt_tokens
        self._classified(config, exchange, prepared)
        exchange.grant = self._keys.take(exchange.caller, prepared.demand.tokens, time.monotonic())

        while True:
            exchange.attempts += 1
            ticket, prepared = await self._admit(config, exchange, prepared)
            try:
                await self._serve(config, exchange, ticket, prepared)
                return
            except (ReplicaLost, PoolUnavailable):
                # Nothing of the answer has left, so another replica can give it.
                if exchange.responder.started or exchange.attempts >= _MOST_ATTEMPTS:
                    raise
                exchange.attributes["sluice.attempts"] = exchange.attempts + 1
                if exchange.stream is not None and exchange.stream.replica_id is not None:
                    ticket.lost()
                exchange.stream = None
            finally:
                ticket.close()

    async def _admit(self, config: SluiceConfig, exchange: _Exchange, prepared: Prepared) -> tuple[Ticket, Prepared]:
        """Wait until the request, or where that is allowed a lesser one, may be dispatched."""
        name = prepared.demand.service_class
        self._dispatcher.set_weight(name, exchange.caller)
        try:
            return await self._dispatcher.admit(prepared.demand, exchange.span.get_span_context()), prepared
        except (Saturated, HoldExpired) as error:
            is_allowed = exchange.headers.get("x-sluice-degrade") == "allow" or config.classes[name].degrade.allowed
            if not is_allowed:
                raise
            refusal: RequestError = error
        async for lesser in self._preparation.lesser(config, prepared):
            try:
                ticket = await self._dispatcher.admit(lesser.demand, exchange.span.get_span_context())
            except (Saturated, HoldExpired) as error:
                refusal = error
                continue
            exchange.responder.add_headers({"x-sluice-degraded": ", ".join(lesser.steps)})
            exchange.attributes["sluice.degraded"] = ", ".join(lesser.steps)
            exchange.steps = lesser.steps
            exchange.timeline.prompt_tokens = lesser.rendered.prompt_tokens
            if lesser.demand.service_class != name:
                self._metrics.left(name)
                self._classified(config, exchange, lesser)
            return ticket, lesser
        raise refusal

    async def _serve(self, config: SluiceConfig, exchange: _Exchange, ticket: Ticket, prepared: Prepared) -> None:
        client = self._pools[ticket.placement.pool]
        self._placed(exchange, ticket)
        stream = client.dispatch(
            engine_request(
                config,
                ticket,
                self._route,
                prepared.body,
                prepared.rendered,
                request_id=exchange.request_id,
                timeline=exchange.timeline,
                clock=exchange.clock,
                trace_context=exchange.carrier,
                notes=(*prepared.notes, *prepared.steps),
            )
        )
        exchange.stream = stream
        try:
            await stream.accepted(client.accept_timeout_s)
            exchange.attributes["sluice.replica"] = exchange.replica_id = stream.replica_id or ""
            await self._relay(exchange, stream, ticket)
        except BaseException:
            stream.cancel()
            raise

    def _placed(self, exchange: _Exchange, ticket: Ticket) -> None:
        exchange.timeline.dispatched = time.monotonic()
        if isinstance(ticket.waited_for, SpanContext):
            exchange.waited_for = (*exchange.waited_for, ticket.waited_for)
        placement = ticket.placement
        exchange.pool = placement.pool
        exchange.responder.add_headers({"x-sluice-pool": placement.pool})
        exchange.attributes["sluice.pool"] = placement.pool
        exchange.attributes["sluice.spilled"] = placement.spilled
        if placement.prediction is not None:
            exchange.predicted_ttft_s = placement.prediction.ttft_s
            exchange.predicted_wait_s = placement.prediction.wait_s
            predicted_ms = placement.prediction.ttft_s * 1000
            exchange.attributes["sluice.predicted_ttft_ms"] = round(predicted_ms, 1)
            exchange.responder.add_headers({"x-sluice-predicted-ttft-ms": f"{predicted_ms:.0f}"})

    def _classified(self, config: SluiceConfig, exchange: _Exchange, prepared: Prepared) -> None:
        demand, rendered, notes = prepared.demand, prepared.rendered, prepared.notes
        # Until it is placed, the pool that it was meant for.
        exchange.service_class, exchange.pool = demand.service_class, demand.pools[0]
        exchange.home_pool, exchange.notes = demand.pools[0], notes
        exchange.ttft_target_s = demand.ttft_s
        exchange.tpot_target_s = config.classes[demand.service_class].targets.tpot_s
        self._metrics.entered(exchange.service_class)
        exchange.responder.add_headers({"x-sluice-class": exchange.service_class, "x-sluice-pool": exchange.pool})
        exchange.attributes.update({"sluice.class": exchange.service_class, "sluice.pool": exchange.pool})
        if exchange.caller.name:
            exchange.attributes["sluice.key"] = exchange.caller.name
        if notes:
            exchange.responder.add_headers({"x-sluice-notes": ", ".join(notes)})
            exchange.attributes["sluice.notes"] = ", ".join(notes)
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

    async def _relay(self, exchange: _Exchange, stream: ReplicaStream, ticket: Ticket) -> None:
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
        ticket.first_token()
        with self._readers.watching(responder):
            while not isinstance(item := await stream.more(), Tail):
                await responder.stream(item)
        self._learn(exchange, item)
        if item.failed:
            exchange.outcome, exchange.error_type = "failed", "stream_error"
        await responder.end_stream(item.body)

    def _learn(self, exchange: _Exchange, item: Head | Tail | Aborted) -> None:
        timeline = with_facts(exchange.timeline, item.facts, exchange.clock)
        if isinstance(item, Aborted) or (isinstance(item, Head) and not item.final):
            # The last so far.
            timeline.last_token = None
        exchange.timeline = timeline

    async def _fail(self, exchange: _Exchange, error: RequestError) -> None:
        exchange.outcome, exchange.error_type = error.outcome, error.kind
        exchange.reason = error.reason
        try:
            if exchange.responder.started:
                await exchange.responder.end_stream(error_event(error))
            else:
                await exchange.responder.send_error(error)
        except OSError:
            # Nobody is there to be told.
            logger.debug("request %s: the client left before its error was sent", exchange.request_id)

    def _close(self, exchange: _Exchange) -> None:
        """Whatever happened: the request is not in hand any more."""
        if exchange.entry is not None and exchange.recording is None:
            self._requests.remove(exchange.entry)
        end = time.monotonic()
        timeline, outcome = exchange.timeline, exchange.outcome
        if timeline.last_token is not None and outcome == "finished":
            timeline.finished = end
        if exchange.grant is not None:
            self._keys.release(exchange.grant, timeline.prompt_tokens + timeline.output_tokens)
        if exchange.service_class != UNKNOWN:
            self._metrics.left(exchange.service_class)
        if outcome == "cancelled" and exchange.stream is not None:
            # What it had cost by then, its engine knows.
            after = asyncio.get_running_loop().create_task(
                self._record_aborted(exchange, exchange.stream, end), context=contextvars.Context()
            )
            _background.add(after)
            after.add_done_callback(_background.discard)
        else:
            self._record(exchange, end)

    async def _record_aborted(self, exchange: _Exchange, stream: ReplicaStream, end: float) -> None:
        aborted = await stream.aborted()
        abort_s = None
        if aborted is not None:
            self._learn(exchange, aborted)
            abort_s = max(0.0, aborted.at + clock_shift(aborted.facts.clock, exchange.clock) - end)
        self._record(exchange, end, abort_s)

    def _record(self, exchange: _Exchange, end: float, abort_s: float | None = None) -> None:
        """Tell everybody who wants to know what became of a request."""
        timeline = exchange.timeline
        record = RequestRecord(
            request_id=exchange.request_id,
            route=exchange.route,
            timeline=timeline,
            end=end,
            received_at=timeline.received + exchange.clock.wall_offset,
            outcome=exchange.outcome,
            service_class=exchange.service_class,
            home_pool=exchange.home_pool,
            pool=exchange.pool,
            replica_id=exchange.replica_id,
            key=exchange.caller.name,
            status=exchange.responder.status,
            reason=exchange.reason,
            ttft_target_s=exchange.ttft_target_s,
            tpot_target_s=exchange.tpot_target_s,
            predicted_ttft_s=exchange.predicted_ttft_s,
            predicted_wait_s=exchange.predicted_wait_s,
            attempts=max(1, exchange.attempts),
            steps=exchange.steps,
            notes=exchange.notes,
            is_slow_reader=exchange.is_slow_reader,
            abort_s=abort_s,
        )
        if self._tracing.keeps(exchange.span, record):
            record = self._write_trace(exchange, record)
        for sink in self._sinks:
            sink.ended(record)

    def _write_trace(self, exchange: _Exchange, record: RequestRecord) -> RequestRecord:
        """The record, with where its trace is found."""
        span, clock, timeline = exchange.span, exchange.clock, record.timeline
        self._tracing.write_phases(exchange.carrier, record, clock, exchange.attributes, exchange.waited_for)
        span.set_attributes(
            {
                **exchange.attributes,
                gen_ai.GEN_AI_USAGE_INPUT_TOKENS: timeline.prompt_tokens,
                gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: timeline.cached_tokens,
                gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: timeline.output_tokens,
                "sluice.preemptions": timeline.preemptions,
            }
        )
        if record.status is not None:
            span.set_attribute("http.response.status_code", record.status)
        if record.verdict is not None:
            span.set_attribute("sluice.verdict", record.verdict)
        add_events(span, record, clock)
        mark_outcome(span, record.outcome, exchange.error_type)
        end_span(span, record.end, clock)
        trace_id, span_id = ids(span)
        return replace(record, trace_id=trace_id, span_id=span_id)


def _without_steering_fields(body: JsonObject) -> JsonObject:
    for name in _REFUSED_FIELDS:
        if body.get(name) is not None:
            raise InvalidRequest(f"`{name}` cannot be set by clients of this server.", param=name)
    return {name: value for name, value in body.items() if name not in _REFUSED_FIELDS + _DROPPED_FIELDS}
