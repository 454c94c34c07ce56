"""vLLM's own metrics and the scheduler's, exported through Ray at a price that a token can bear.

Relies on RayPrometheusStatLogger: `histogram_inter_token_latency`, which it observes once per token, `record`, and the
classes of its metrics, `_counter_cls` and `_gauge_cls`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

from app.engine.counters import BY_CLASS, TEXTS, Progress, Reader
from app.engine.load import decode_load
from app.types import EngineLoad

# Ray's agent handles each observation of a histogram again, in Python: about 10 µs per token, a tenth of what the
# token costs in all. A regular sample keeps the distribution; its count and sum are of the sample.
ITL_SAMPLE = 16


class ThinnedHistogram:
    """Passes on every so-manieth observation."""

    def __init__(self, histogram: Any, every: int) -> None:
        self._histogram = histogram
        self._every = every
        self._seen = 0

    def observe(self, value: float) -> None:
        """One observation."""
        self._seen += 1
        if self._seen == self._every:
            self._seen = 0
            self._histogram.observe(value)


class SchedulerMetrics:
    """The deadline scheduler's counters as metrics; `counter`, `gauge`: classes like Prometheus' client's."""

    def __init__(self, counter: Any, gauge: Any) -> None:
        self._counters = {
            name: counter(f"sluice:scheduler_{name}", text, ["class"] if name in BY_CLASS else [])
            for name, text in TEXTS.items()
        }
        text = "Relative error of the predicted step time, of the last steps: this percentile."
        self._error = gauge("sluice:scheduler_step_time_error", text, ["percentile"])

    def record(self, progress: Progress) -> None:
        """Add what has come since the last report."""
        for (name, service_class), increase in progress.counts.items():
            metric = self._counters[name]
            (metric if service_class is None else metric.labels(service_class)).inc(increase)
        for name, share in progress.errors.items():
            self._error.labels(name.rpartition("_")[2]).set(share)


class LoadWatch(StatLoggerBase):
    """Passes on what the engine core tells of its load. `told`: called for every report, with None if it has none."""

    def __init__(self, told: Callable[[EngineLoad | None], None]) -> None:
        self._told = told

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """What an engine reports after a step."""
        if scheduler_stats is not None:
            self._told(decode_load(scheduler_stats.num_kv_fetch_reqs_by_stage))

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


class SampledRayStatLogger(RayPrometheusStatLogger):
    """RayPrometheusStatLogger with a sampled histogram of the gaps between tokens, and the scheduler's counters."""

    histogram_inter_token_latency: dict[int, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        histograms = self.histogram_inter_token_latency
        self.histogram_inter_token_latency = {
            engine: ThinnedHistogram(histogram, ITL_SAMPLE) for engine, histogram in histograms.items()
        }
        self._scheduler_metrics = SchedulerMetrics(self._counter_cls, self._gauge_cls)
        self._readers: dict[int, Reader] = {}

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """What an engine reports after a step."""
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        if scheduler_stats is not None:
            reader = self._readers.setdefault(engine_idx, Reader())
            progress = reader.read(scheduler_stats.num_kv_fetch_reqs_by_stage)
            if progress is not None:
                self._scheduler_metrics.record(progress)
