"""Request metrics as an OTLP receiver gets them."""

from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from app.config import OtlpMetricsConfig
from app.errors import ConfigError
from app.telemetry.otlp_metrics import OtlpMetrics
from tests.support.records import DONE, NOTHING

TRACED = replace(DONE, trace_id="0af7651916cd43dd8448eb211c80319c", span_id="b7ad6b7169203331")


def told(*records: Any) -> dict[str, list[Any]]:
    """The data points by metric, after these requests."""
    reader = InMemoryMetricReader()
    metrics = OtlpMetrics(reader, "from-test", "tiny")
    for record in records:
        metrics.ended(record)
    data = reader.get_metrics_data()
    metrics.shutdown()
    assert data is not None
    (resource,) = data.resource_metrics
    assert resource.resource.attributes["service.name"] == "from-test"
    return {metric.name: list(metric.data.data_points) for scope in resource.scope_metrics for metric in scope.metrics}


def test_the_conventions_names_are_used_where_there_are_some() -> None:
    points = told(DONE)
    for name, seconds in (
        ("gen_ai.server.request.duration", 4.5),
        ("gen_ai.server.time_to_first_token", 2.5),
        ("gen_ai.server.time_per_output_token", 0.05),
        ("sluice.prefill.duration", 0.4),
        ("sluice.hold.duration", 0.1),
    ):
        (point,) = points[name]
        assert (point.count, point.sum) == (1, pytest.approx(seconds)), name
    attributes = dict(points["gen_ai.server.time_to_first_token"][0].attributes)
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sluice",
        "gen_ai.request.model": "tiny",
        "sluice.class": "interactive",
        "sluice.pool": "batch",
    }
    tokens = {point.attributes["gen_ai.token.type"]: point.value for point in points["sluice.tokens"]}
    assert tokens == {"input": 900, "cached": 100, "output": 41}


def test_buckets_name_traces_that_are_kept() -> None:
    (point,) = told(TRACED)["gen_ai.server.time_to_first_token"]
    (exemplar,) = point.exemplars
    assert format(exemplar.trace_id, "032x") == TRACED.trace_id
    assert format(exemplar.span_id, "016x") == TRACED.span_id
    (point,) = told(DONE)["gen_ai.server.time_to_first_token"]
    assert not point.exemplars


def test_what_went_wrong_is_counted_by_what_it_was() -> None:
    points = told(
        replace(DONE, ttft_target_s=1.0, steps=("max_tokens=64",)),
        replace(NOTHING, outcome="rejected", status=503, reason="predicted_late"),
    )
    verdicts = {point.attributes["sluice.verdict"]: point.value for point in points["sluice.slo.requests"]}
    assert verdicts == {"ttft_missed": 1, "refused": 1}
    (refusal,) = points["sluice.refusals"]
    assert dict(refusal.attributes) == {"sluice.class": "interactive", "sluice.reason": "predicted_late"}
    (step,) = points["sluice.degradations"]
    assert step.attributes["sluice.step"] == "max_tokens"
    (spill,) = points["sluice.spillovers"]
    assert (spill.attributes["sluice.home_pool"], spill.attributes["sluice.pool"]) == ("interactive", "batch")
    (wasted,) = points["sluice.wasted_tokens"]
    assert (wasted.value, wasted.attributes["sluice.why"]) == (841, "ttft_missed")
    durations = {point.attributes.get("error.type") for point in points["gen_ai.server.request.duration"]}
    assert durations == {None, "rejected"}


def test_they_go_nowhere_unless_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_METRICS_EXPORTER", raising=False)
    assert OtlpMetrics.configured(OtlpMetricsConfig(), None, "tiny") is None
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "prometheus")
    with pytest.raises(ConfigError, match="OTEL_METRICS_EXPORTER: `prometheus`"):
        OtlpMetrics.configured(OtlpMetricsConfig(), None, "tiny")
    assert OtlpMetrics.configured(OtlpMetricsConfig(exporter="none"), None, "tiny") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier pigeon")
    with pytest.raises(ConfigError, match="carrier pigeon"):
        OtlpMetrics.configured(OtlpMetricsConfig(exporter="otlp"), None, "tiny")
