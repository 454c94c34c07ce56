"""The way of the scheduler's counters through vLLM's statistics."""

import math

from app.engine.counters import Counters, Reader, encode


def test_totals_arrive_as_increases() -> None:
    counters, reader = Counters(steps=3, wasted_tokens=10, ttft_misses={"interactive": 2, "": 1}), Reader()
    first = reader.read(encode(counters, {"model_error_p90": 0.125}))
    assert first is not None
    assert first.counts[("steps", None)] == 3
    assert first.counts[("ttft_misses", "interactive")] == 2
    assert first.counts[("ttft_misses", "")] == 1
    assert first.errors == {"model_error_p90": 0.125}
    counters.steps += 4
    counters.count(counters.ttft_misses, "interactive")
    second = reader.read(encode(counters, {"model_error_p90": math.nan}))
    assert second is not None
    assert second.counts[("steps", None)] == 4
    assert second.counts[("wasted_tokens", None)] == 0
    assert second.counts[("ttft_misses", "interactive")] == 1
    assert second.errors == {}


def test_vllms_own_entries_are_left_alone() -> None:
    assert Reader().read({"waiting_to_start": 3}) is None


def test_classes_are_bounded() -> None:
    counters = Counters()
    for index in range(1000):
        counters.count(counters.tpot_misses, f"class{index}")
    assert len(counters.tpot_misses) == 17
    assert sum(counters.tpot_misses.values()) == 1000


def test_everything_sent_is_whole_numbers() -> None:
    assert all(type(value) is int for value in encode(Counters(ttft_misses={"a": 1}), {"e": 0.1}).values())
