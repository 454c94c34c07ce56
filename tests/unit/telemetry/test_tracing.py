"""Spans as a receiver gets them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from app.config import TracingConfig
from app.errors import ConfigError
from app.telemetry.tracing import Tracing, add_events, carrier_from_headers, end_span, mark_outcome
from app.types import ClockReading, EngineCauses, Outcome, Timeline
from tests.support.records import DONE

CLOCK = ClockReading(boot_id="a", wall_offset=1000.0)
TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
PARENT = {"traceparent": f"00-{TRACE_ID:032x}-b7ad6b7169203331-01"}
CAUSES = EngineCauses(ahead_tokens=700, ahead_prefills=2, chunks=3, prefill_steps=5, preempted=(7.0,))
TIMELINE = Timeline(
    received=1.0,
    rendered=2.0,
    dispatched=3.0,
    queued=4.0,
    scheduled=5.0,
    first_token=6.0,
    first_sent=6.5,
    last_token=8.0,
    finished=9.0,
    causes=CAUSES,
)
RECORD = replace(DONE, timeline=TIMELINE, end=9.0, ttft_target_s=6.0)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Iterator[Tracing]:
    tracing = Tracing(TracingConfig(), "ingress", exporter)
    yield tracing
    tracing.shutdown()


def spans_by_name(tracing: Tracing, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    tracing._provider.force_flush()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_trace_continues_the_callers_and_nests_the_phases(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    server = tracing.start("POST /v1/completions", SpanKind.SERVER, PARENT, 1.0, CLOCK)
    names = ("render", "queue", "prefill", "decode", "relay")
    other = trace.SpanContext(1, 2, is_remote=False)
    tracing.write_phases(tracing.inject(server), RECORD, CLOCK, {"sluice.pool": "p"}, [other])
    end_span(server, 9.0, CLOCK)

    spans = spans_by_name(tracing, exporter)
    assert set(spans) == {*names, "queue.hold", "queue.engine_wait", server.name}  # type: ignore[attr-defined]
    assert {span.context.trace_id for span in spans.values() if span.context} == {TRACE_ID}
    root = spans["POST /v1/completions"]
    assert root.parent is not None
    assert root.parent.span_id == 0xB7AD6B7169203331
    assert root.context is not None
    for name in names:
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == root.context.span_id
    queue = spans["queue"]
    hold_parent = spans["queue.hold"].parent
    assert queue.context is not None
    assert hold_parent is not None
    assert hold_parent.span_id == queue.context.span_id
    assert (queue.start_time, queue.end_time) == (1_002_000_000_000, 1_005_000_000_000)
    assert queue.attributes is not None
    assert queue.attributes["sluice.queue.hold_seconds"] == 1.0
    assert queue.attributes["sluice.queue.engine_wait_seconds"] == 2.0
    assert queue.attributes["sluice.queue.ahead_tokens"] == 700
    assert [link.context for link in spans["queue.hold"].links] == [other]
    assert spans["prefill"].attributes is not None
    assert spans["prefill"].attributes["sluice.prefill.yielded_steps"] == 2


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ("cancelled", StatusCode.UNSET),
        ("rejected", StatusCode.UNSET),
        ("failed", StatusCode.ERROR),
        ("evicted", StatusCode.ERROR),
    ],
)
def test_a_request_that_ends_early_ends_its_phase_marked_as_what_it_is(
    tracing: Tracing, exporter: InMemorySpanExporter, outcome: Outcome, status: StatusCode
) -> None:
    timeline = Timeline(received=1.0, rendered=2.0, dispatched=3.0)
    tracing.write_phases(PARENT, replace(RECORD, timeline=timeline, end=7.0, outcome=outcome), CLOCK, {})
    spans = spans_by_name(tracing, exporter)
    assert set(spans) == {"render", "queue", "queue.hold", "queue.engine_wait"}
    assert spans["queue"].end_time == 1_007_000_000_000
    assert spans["queue"].attributes is not None
    assert spans["queue"].attributes["sluice.outcome"] == outcome
    assert spans["queue"].status.status_code is status


def test_an_unsampled_caller_is_not_traced(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    unsampled = {"traceparent": PARENT["traceparent"][:-2] + "00"}
    span = tracing.start("POST /", SpanKind.SERVER, unsampled, 1.0, CLOCK)
    mark_outcome(span, "finished")
    carrier = tracing.inject(span)
    assert not tracing.keeps(span, replace(RECORD, outcome="failed"))
    tracing.write_phases(carrier, RECORD, CLOCK, {})
    end_span(span, 2.0, CLOCK)
    assert carrier["traceparent"].endswith("-00")
    assert spans_by_name(tracing, exporter) == {}


def test_events_tell_what_happened_and_when(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    span = tracing.start("POST /", SpanKind.SERVER, {}, 1.0, CLOCK)
    add_events(span, replace(RECORD, steps=("max_tokens=64",)), CLOCK)
    end_span(span, 9.0, CLOCK)
    events = [(event.name, event.timestamp) for event in spans_by_name(tracing, exporter)["POST /"].events]
    assert events == [
        ("spillover", 1_003_000_000_000),
        ("degradation", 1_003_000_000_000),
        ("preemption", 1_007_000_000_000),
        ("first_token", 1_006_500_000_000),
    ]


def test_with_a_ratio_the_end_decides_unless_the_caller_did(exporter: InMemorySpanExporter) -> None:
    tracing = Tracing(TracingConfig(sample_ratio=0.0), "ingress", exporter)
    own = tracing.start("POST /", SpanKind.SERVER, {}, 1.0, CLOCK)
    asked = tracing.start("POST /", SpanKind.SERVER, PARENT, 1.0, CLOCK)
    assert own.is_recording()
    assert not tracing.keeps(own, RECORD)
    assert tracing.keeps(own, replace(RECORD, outcome="failed"))
    assert tracing.keeps(asked, RECORD)
    tracing.shutdown()


def test_only_trace_context_is_taken_from_the_headers() -> None:
    assert carrier_from_headers({"traceparent": "a", "tracestate": "b", "baggage": "c", "x": "d"}) == {
        "traceparent": "a",
        "tracestate": "b",
    }


def test_a_malformed_traceparent_starts_a_new_trace(tracing: Tracing) -> None:
    span = tracing.start("POST /", SpanKind.SERVER, {"traceparent": "not-a-context"}, 1.0, CLOCK)
    assert span.get_span_context().is_valid
    span.end()


def test_the_environment_chooses_the_exporter_unless_the_config_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    assert not Tracing(TracingConfig(), "ingress").enabled
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(ConfigError, match="OTEL_TRACES_EXPORTER: `zipkin`"):
        Tracing(TracingConfig(), "ingress")
    assert not Tracing(TracingConfig(exporter="none"), "ingress").enabled
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    tracing = Tracing(TracingConfig(), "ingress")
    assert tracing.enabled
    tracing.shutdown()


def test_the_sdk_can_be_switched_off_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, exporter: InMemorySpanExporter
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not Tracing(TracingConfig(), "ingress", exporter).enabled
