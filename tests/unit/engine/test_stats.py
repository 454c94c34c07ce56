"""The price of vLLM's metrics."""

from __future__ import annotations

from app.engine.stats import ThinnedHistogram


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
