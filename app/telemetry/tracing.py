"""Spans: one trace per request, written from its timeline.

The ingress writes all of it when the request has ended, with what the engine told. Then it is known which traces are
worth keeping, and those that are not cost nothing more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app import __version__
from app.errors import ConfigError
from app.telemetry.record import RequestRecord
from app.telemetry.sampling import TailChoice
from app.telemetry.timeline import Phase, phases, queue_parts
from app.types import ClockReading, Outcome, Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.util.types import AttributeValue

    from app.config import TracingConfig

_PROPAGATOR = TraceContextTextMapPropagator()
_CARRIER_HEADERS = ("traceparent", "tracestate")


def carrier_from_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The W3C trace context among a request's headers."""
    return {name: headers[name] for name in _CARRIER_HEADERS if name in headers}


def _exporter(config: TracingConfig) -> SpanExporter | None:
    name = config.exporter or os.environ.get("OTEL_TRACES_EXPORTER", "none").strip().lower()
    if name in ("none", ""):
        return None
    if name == "console":
        return ConsoleSpanExporter()
    if name != "otlp":
        raise ConfigError(f"OTEL_TRACES_EXPORTER: `{name}` is not supported; use otlp, console or none")
    protocol = config.protocol or os.environ.get(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=config.endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=config.endpoint)
    raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: `{protocol}` is not supported; use grpc or http/protobuf")


class Tracing:
    """A process's tracer.

    It does not become OpenTelemetry's global tracer provider, so that it neither takes the place of Ray Serve's or
    vLLM's, nor loses its own.
    """

    def __init__(self, config: TracingConfig, role: str, exporter: SpanExporter | None = None) -> None:
        """`role` names the process in its spans. `exporter` replaces the configured one."""
        exporter = exporter or _exporter(config)
        self.enabled = exporter is not None and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true"
        service_name = config.service_name or os.environ.get("OTEL_SERVICE_NAME") or "sluice"
        self._provider = TracerProvider(
            sampler=self._sampler(config),
            resource=Resource.create(
                {
                    "service.name": service_name,
                    "service.version": __version__,
                    "process.pid": os.getpid(),
                    "sluice.role": role,
                }
            ),
            shutdown_on_exit=True,
        )
        if exporter is not None:
            # The console is for people watching; spans that come seconds late confuse them.
            processor = SimpleSpanProcessor if isinstance(exporter, ConsoleSpanExporter) else BatchSpanProcessor
            self._provider.add_span_processor(processor(exporter))
        self._tracer = self._provider.get_tracer("sluice", __version__)
        self._choice = None if config.sample_ratio is None else TailChoice(config.sample_ratio)

    def _sampler(self, config: TracingConfig) -> Sampler | None:
        if not self.enabled:
            return ALWAYS_OFF
        # What is worth keeping is known at the end; until then all are recorded, unless their callers decided.
        return None if config.sample_ratio is None else ParentBased(ALWAYS_ON)

    def start(self, name: str, kind: SpanKind, parent: Mapping[str, str], start: float, clock: ClockReading) -> Span:
        """A span that starts at `start` (seconds on `clock`) under the W3C context in `parent`, if it has one."""
        context = _PROPAGATOR.extract(parent, context=otel_context.Context())
        return self._tracer.start_span(name, context, kind, start_time=_unix_ns(start, clock))

    def inject(self, span: Span) -> dict[str, str]:
        """The W3C context that makes another process's spans children of `span`."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, otel_context.Context()))
        return carrier

    def keeps(self, span: Span, record: RequestRecord) -> bool:
        """Whether the trace of a request that ended is to be written."""
        if not self.enabled or not span.is_recording():
            return False
        # Each request counts for what is slow.
        is_chosen = self._choice is None or self._choice.keeps(span.get_span_context().trace_id, record)
        return is_chosen or (isinstance(span, ReadableSpan) and span.parent is not None)

    def write_phases(
        self,
        parent: Mapping[str, str],
        record: RequestRecord,
        clock: ClockReading,
        attributes: Mapping[str, AttributeValue],
        waited_for: Sequence[SpanContext] = (),
    ) -> None:
        """Spans for the phases that began. `waited_for`: requests whose end let a held one be dispatched."""
        context = _PROPAGATOR.extract(parent, context=otel_context.Context())
        timeline, end, outcome = record.timeline, record.end, record.outcome
        for phase in phases(timeline, end):
            span = self._tracer.start_span(phase.name, context, start_time=_unix_ns(phase.start, clock))
            span.set_attributes({**attributes, **_details(phase, timeline)})
            if phase.cut:
                mark_outcome(span, outcome)
            if phase.name == "queue":
                inner = trace.set_span_in_context(span, context)
                for part in queue_parts(timeline, end):
                    span.set_attribute(f"sluice.queue.{part.name}_seconds", part.seconds)
                    links = [Link(one) for one in waited_for] if part.name == "hold" else None
                    child = self._tracer.start_span(
                        f"queue.{part.name}", inner, links=links, start_time=_unix_ns(part.start, clock)
                    )
                    if part.cut:
                        mark_outcome(child, outcome)
                    child.end(_unix_ns(part.end, clock))
            span.end(_unix_ns(phase.end, clock))

    def shutdown(self) -> None:
        """Export what is pending, then stop."""
        self._provider.shutdown()


def mark_outcome(span: Span, outcome: Outcome, error_type: str | None = None) -> None:
    """Say on a span how its request ended. Only failures are errors of this server."""
    span.set_attribute("sluice.outcome", outcome)
    if error_type is not None:
        span.set_attribute("error.type", error_type)
    if outcome in ("failed", "evicted"):
        span.set_status(Status(StatusCode.ERROR, error_type))


def end_span(span: Span, end: float, clock: ClockReading) -> None:
    """End a span at `end`, seconds on `clock`."""
    span.end(_unix_ns(end, clock))


def add_events(span: Span, record: RequestRecord, clock: ClockReading) -> None:
    """What happened to a request, and when."""
    timeline = record.timeline
    if record.is_spilled and timeline.dispatched is not None:
        attributes = {"sluice.home_pool": record.home_pool, "sluice.pool": record.pool}
        span.add_event("spillover", attributes, _unix_ns(timeline.dispatched, clock))
    if record.steps and timeline.dispatched is not None:
        span.add_event("degradation", {"sluice.steps": record.steps}, _unix_ns(timeline.dispatched, clock))
    for at in timeline.causes.preempted:
        span.add_event("preemption", None, _unix_ns(at, clock))
    first = timeline.first_sent if timeline.first_sent is not None else timeline.first_token
    if first is not None:
        span.add_event("first_token", None, _unix_ns(first, clock))


def ids(span: Span) -> tuple[str, str]:
    """A span's trace id and its own, in hexadecimal digits."""
    context = span.get_span_context()
    return trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)


def _details(phase: Phase, timeline: Timeline) -> dict[str, AttributeValue]:
    """What only one phase has to tell."""
    causes = timeline.causes
    if phase.name == "queue":
        return {
            "sluice.queue.ahead_tokens": causes.ahead_tokens,
            "sluice.queue.ahead_requests": causes.ahead_prefills,
            "sluice.queue.steps": causes.waited_steps,
            "sluice.queue.no_room_steps": causes.no_room_steps,
        }
    if phase.name == "prefill":
        return {
            gen_ai.GEN_AI_USAGE_INPUT_TOKENS: timeline.prompt_tokens,
            "sluice.prompt.cached_tokens": timeline.cached_tokens,
            "sluice.prefill.chunks": causes.chunks,
            "sluice.prefill.yielded_steps": causes.prefill_steps - causes.chunks,
        }
    if phase.name == "decode":
        return {
            gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: timeline.output_tokens,
            "sluice.preemptions": timeline.preemptions,
            "sluice.decode.slow_gaps": causes.slow_gaps,
            "sluice.decode.longest_gap_seconds": causes.longest_gap_s,
        }
    return {}


def _unix_ns(stamp: float, clock: ClockReading) -> int:
    return int((stamp + clock.wall_offset) * 1e9)
