"""vLLM's own metrics, exported through Ray at a price that a token can bear.

Relies on RayPrometheusStatLogger's `histogram_inter_token_latency`, which it observes once per token.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

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


class SampledRayStatLogger(RayPrometheusStatLogger):
    """RayPrometheusStatLogger with a sampled histogram of the gaps between tokens."""

    histogram_inter_token_latency: dict[int, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        histograms = self.histogram_inter_token_latency
        self.histogram_inter_token_latency = {
            engine: ThinnedHistogram(histogram, ITL_SAMPLE) for engine, histogram in histograms.items()
        }
