"""Request metrics by OTLP, beside those that Ray exports: names of OpenTelemetry's conventions for generative AI where
they have one, `sluice.` for the rest. With exemplars: each histogram's bucket names traces that are kept.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics as gen_ai_names
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from app import __version__
from app.errors import ConfigError
from app.telemetry.metrics import PER_TOKEN_SECONDS, SECONDS, STEPS, TTFT_SECONDS, why_wasted
from app.telemetry.record import RequestRecord
from app.telemetry.timeline import phases, queue_parts, time_per_output_token, time_to_first_token

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader
    from opentelemetry.util.types import AttributeValue

    from app.config import OtlpMetricsConfig

_OPERATIONS = {"chat": "chat", "completions": "text_completion"}


def _exporter(config: OtlpMetricsConfig) -> MetricExporter | None:
    name = config.exporter or os.environ.get("OTEL_METRICS_EXPORTER", "none").strip().lower()
    if name in ("none", ""):
        return None
    if name != "otlp":
        raise ConfigError(f"OTEL_METRICS_EXPORTER: `{name}` is not supported; use otlp or none")
    protocol = config.protocol or os.environ.get(
        "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        return GrpcExporter(endpoint=config.endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

        return HttpExporter(endpoint=config.endpoint)
    raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: `{protocol}` is not supported; use grpc or http/protobuf")


class OtlpMetrics:
    """Measures every request that ended, from its record."""

    def __init__(self, reader: MetricReader, service_name: str, model: str) -> None:
        """`reader`: what takes the figures away; `model`: the served model's name."""
        self._model = model
        self._provider = MeterProvider(
            [reader],
            Resource.create({"service.name": service_name, "service.version": __version__, "process.pid": os.getpid()}),
            shutdown_on_exit=True,
        )
        meter = self._provider.get_meter("sluice", __version__)

        def seconds(name: str, text: str, bounds: list[float] = SECONDS) -> Histogram:
            return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=bounds)

        self._duration = seconds(gen_ai_names.GEN_AI_SERVER_REQUEST_DURATION, "Received to ended.")
        self._ttft = seconds(
            gen_ai_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN, "Received to first token sent.", TTFT_SECONDS
        )
        self._tpot = seconds(
            gen_ai_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN, "(last - first token) / (n - 1).", PER_TOKEN_SECONDS
        )
        names = ("render", "queue", "hold", "engine_wait", "prefill", "decode", "relay")
        self._phases = {name: seconds(f"sluice.{name}.duration", f"The phase {name}.") for name in names}
        self._aborts = seconds("sluice.abort.duration", "From when a client had left until its engine had dropped it.")
        self._tokens = meter.create_counter("sluice.tokens", "{token}", "Tokens of finished requests, by type.")
        self._verdicts = meter.create_counter(
            "sluice.slo.requests", "{request}", "Requests that were promised something, by what became of it."
        )
        self._refusals = meter.create_counter("sluice.refusals", "{request}", "Requests refused, by reason.")
        self._degradations = meter.create_counter("sluice.degradations", "{request}", "What requests gave up, by step.")
        self._spillovers = meter.create_counter("sluice.spillovers", "{request}", "Served outside the home pool.")
        self._preemptions = meter.create_counter("sluice.preemptions", "{preemption}", "Slots or KV taken back.")
        self._wasted = meter.create_counter(
            "sluice.wasted_tokens", "{token}", "Computed for requests that did not get what they were promised."
        )

    @classmethod
    def configured(cls, config: OtlpMetricsConfig, service_name: str | None, model: str) -> OtlpMetrics | None:
        """As configured; None where metrics go nowhere by OTLP."""
        exporter = _exporter(config)
        if exporter is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return None
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=config.interval_s * 1000)
        return cls(reader, service_name or os.environ.get("OTEL_SERVICE_NAME") or "sluice", model)

    def ended(self, record: RequestRecord) -> None:
        """A request ended."""
        timeline = record.timeline
        where = _context(record)
        base: dict[str, AttributeValue] = {"sluice.class": record.service_class, "sluice.pool": record.pool}
        whole: dict[str, AttributeValue] = {
            **base,
            gen_ai.GEN_AI_OPERATION_NAME: _OPERATIONS[record.route],
            gen_ai.GEN_AI_PROVIDER_NAME: "sluice",
            gen_ai.GEN_AI_REQUEST_MODEL: self._model,
        }
        is_error = record.outcome in ("failed", "evicted", "rejected")
        told = {**whole, "error.type": record.outcome} if is_error else whole
        self._duration.record(record.end - timeline.received, told, where)
        verdict = record.verdict
        if verdict is not None:
            self._verdicts.add(1, {**base, "sluice.verdict": verdict}, where)
        if verdict == "refused":
            self._refusals.add(1, {"sluice.class": record.service_class, "sluice.reason": record.reason}, where)
        for step in record.steps:
            name = step.partition("=")[0]
            if name in STEPS:
                self._degradations.add(1, {**base, "sluice.step": name}, where)
        if record.is_spilled:
            self._spillovers.add(1, {**base, "sluice.home_pool": record.home_pool}, where)
        if timeline.preemptions:
            self._preemptions.add(timeline.preemptions, base, where)
        if record.wasted_tokens:
            self._wasted.add(record.wasted_tokens, {**base, "sluice.why": why_wasted(record)}, where)
        if record.abort_s is not None:
            self._aborts.record(record.abort_s, base, where)
        if record.outcome == "finished":
            self._time(record, base, whole)

    def _time(self, record: RequestRecord, base: dict[str, AttributeValue], whole: dict[str, AttributeValue]) -> None:
        timeline, where = record.timeline, _context(record)
        for phase in [*phases(timeline, record.end), *queue_parts(timeline, record.end)]:
            self._phases[phase.name].record(phase.seconds, base, where)
        ttft, tpot = time_to_first_token(timeline), time_per_output_token(timeline)
        if ttft is not None:
            self._ttft.record(ttft, whole, where)
        if tpot is not None:
            self._tpot.record(tpot, whole, where)
        for kind, count in (
            ("input", timeline.prompt_tokens),
            ("cached", timeline.cached_tokens),
            ("output", timeline.output_tokens),
        ):
            if count:
                self._tokens.add(count, {**base, gen_ai.GEN_AI_TOKEN_TYPE: kind}, where)

    def shutdown(self) -> None:
        """Export what is pending, then stop."""
        self._provider.shutdown()


def _context(record: RequestRecord) -> otel_context.Context:
    """Where exemplars come from: the request's span, if its trace is kept."""
    if not record.trace_id:
        return otel_context.Context()
    span = SpanContext(int(record.trace_id, 16), int(record.span_id, 16), False, TraceFlags(TraceFlags.SAMPLED))
    return trace.set_span_in_context(NonRecordingSpan(span), otel_context.Context())
