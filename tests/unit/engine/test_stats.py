"""The price of vLLM's metrics."""

from __future__ import annotations

from typing import ClassVar

from app.engine.counters import Counters, Reader, encode
from app.engine.stats import SchedulerMetrics, ThinnedHistogram


class Histogram:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def observe(self, value: float) -> None:
        self.seen.append(value)


def test_a_regular_sample_is_observed() -> None:
    inner = Histogram()
    thinned = ThinnedHistogram(inner, 4)
    for value in range(12):
        thinned.observe(value)
    assert inner.seen == [3, 7, 11]


class Metric:
    """A counter or gauge like Prometheus' client's, or one of its label values."""

    made: ClassVar[dict[str, Metric]] = {}

    def __init__(self, name: str, text: str, labels: list[str]) -> None:
        assert text
        self.labelled: dict[str, Metric] = {}
        self.value = 0.0
        self.made[name] = self

    def labels(self, value: str) -> Metric:
        return self.labelled.setdefault(value, Metric("", "a label value", []))

    def inc(self, amount: float) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value


def test_the_schedulers_counters_become_metrics() -> None:
    metrics = SchedulerMetrics(Metric, Metric)
    reader = Reader()
    counters = Counters(steps=5, ttft_misses={"interactive": 2})
    for _ in range(2):
        # What was there at the last report is not counted again.
        progress = reader.read(encode(counters, {"step_time_error_p90": 0.125}))
        assert progress is not None
        metrics.record(progress)
    made = Metric.made
    assert made["sluice:scheduler_steps"].value == 5
    assert made["sluice:scheduler_ttft_misses"].labelled["interactive"].value == 2
    assert made["sluice:scheduler_step_time_error"].labelled["p90"].value == 0.125
