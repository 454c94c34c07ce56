"""Spans really leave the process, over both of OTLP's protocols, configured either way."""

import pytest
from opentelemetry.trace import SpanKind

from app.config import TracingConfig
from app.telemetry.timeline import read_clock
from app.telemetry.tracing import Tracing, end_span
from tests.support.otlp import Receiver, grpc_receiver, http_receiver


def send_one(config: TracingConfig, receiver: Receiver) -> None:
    tracing = Tracing(config, "interactive")
    clock = read_clock()
    span = tracing.start("engine", SpanKind.INTERNAL, {}, 1.0, clock)
    trace_id = format(span.get_span_context().trace_id, "032x")
    end_span(span, 2.0, clock)
    tracing.shutdown()
    received = receiver.trace(trace_id, "engine")["engine"]
    assert received.seconds == pytest.approx(1.0, abs=1e-6)
    assert received.resource["sluice.role"] == "interactive"
    assert received.resource["service.name"] == "from-test"


def test_grpc_by_config() -> None:
    with grpc_receiver() as receiver:
        send_one(TracingConfig(exporter="otlp", endpoint=receiver.endpoint, service_name="from-test"), receiver)


def test_http_by_config() -> None:
    with http_receiver() as receiver:
        config = TracingConfig(
            exporter="otlp", protocol="http/protobuf", endpoint=receiver.endpoint, service_name="from-test"
        )
        send_one(config, receiver)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_by_the_standard_environment_variables(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    with (grpc_receiver if protocol == "grpc" else http_receiver)() as receiver:
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "from-test")
        send_one(TracingConfig(), receiver)
