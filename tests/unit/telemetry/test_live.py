"""What each class got of late."""

from dataclasses import replace

import pytest

from app.telemetry.live import ClassSample, merged, percentiles, sample, slow
from app.telemetry.record import RequestRecord
from tests.support.records import DONE, NOTHING

LATE = replace(DONE, ttft_target_s=1.0)
REFUSED = replace(NOTHING, outcome="rejected", status=503, reason="no_room")


def at(record: RequestRecord, ended_at: float) -> RequestRecord:
    """The record of a request that ended at that Unix time."""
    return replace(record, received_at=ended_at - (record.end - record.timeline.received))


def test_only_what_ended_of_late_counts() -> None:
    records = [at(DONE, 130.0), at(LATE, 120.0), at(REFUSED, 110.0), at(DONE, 90.0)]
    figures = sample(records, 100.0)["interactive"].figures(60.0)
    assert figures["requests"] == 3
    assert figures["attainment"] == pytest.approx(1 / 3, abs=1e-4)
    assert figures["goodput_per_s"] == pytest.approx(1 / 60, abs=1e-3)
    assert figures["verdicts"] == {"met": 1, "ttft_missed": 1, "refused": 1}
    assert figures["refused_by_reason"] == {"no_room": 1}
    assert figures["output_tokens_per_s"] == pytest.approx(82 / 60, abs=0.1)
    # Those that had first tokens, both after 2.5 s.
    assert figures["ttft_ms"] == {"p50": 2500.0, "p95": 2500.0, "p99": 2500.0}
    assert figures["phases_ms"]["queue"]["p50"] == pytest.approx(1900.0)
    assert figures["spilled"] == 2


def test_nothing_is_not_zero() -> None:
    figures = ClassSample().figures(60.0)
    assert (figures["attainment"], figures["ttft_ms"], figures["requests"]) == (None, None, 0)


def test_what_several_ingress_replicas_saw_counts_as_one() -> None:
    here = sample([at(DONE, 110.0)], 100.0)
    there = sample([at(LATE, 110.0), at(replace(DONE, service_class="batch"), 110.0)], 100.0)
    together = merged([here, there])
    assert together["interactive"].figures(60.0)["attainment"] == 0.5
    assert together["batch"].requests == 1
    # Neither of them has changed.
    assert here["interactive"].requests == 1
    assert there["interactive"].requests == 1


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentiles([]) is None
    assert percentiles([number / 1000 for number in range(100, 0, -1)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([0.2]) == {"p50": 200.0, "p95": 200.0, "p99": 200.0}


def test_misses_come_before_what_was_slow_and_that_by_its_target() -> None:
    quick = replace(DONE, request_id="quick", ttft_target_s=100.0)
    close = replace(DONE, request_id="close", ttft_target_s=2.6)
    missed = replace(LATE, request_id="missed")
    refused = replace(REFUSED, request_id="refused")
    gone = replace(NOTHING, request_id="gone", outcome="cancelled", status=None)
    order = [record.request_id for record in slow([quick, missed, gone, close, refused], 3)]
    assert order == ["missed", "refused", "close"]
