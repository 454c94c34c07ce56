"""What is kept of a request that ended, and what is said about it."""

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from app.telemetry.access_log import AccessLog
from app.telemetry.explain import describe, why
from app.telemetry.ledger import Ledger
from app.telemetry.record import RequestRecord, Verdict
from app.types import Timeline

DONE = RequestRecord(
    request_id="r-1",
    route="chat",
    timeline=Timeline(
        received=10.0,
        rendered=10.1,
        dispatched=10.2,
        queued=10.2,
        scheduled=12.0,
        first_token=12.4,
        first_sent=12.5,
        last_token=14.4,
        finished=14.5,
        prompt_tokens=900,
        cached_tokens=100,
        output_tokens=41,
    ),
    end=14.5,
    received_at=1_700_000_000.0,
    outcome="finished",
    service_class="interactive",
    home_pool="interactive",
    pool="batch",
    status=200,
    ttft_target_s=3.0,
    tpot_target_s=0.06,
    predicted_ttft_s=0.4,
    predicted_wait_s=0.2,
)
# It went away, was refused, failed before it had a first token.
NOTHING = replace(DONE, timeline=Timeline(received=10.0, rendered=10.1), end=10.2, pool="interactive")


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "met"),
        ({"ttft_target_s": 2.4}, "ttft_missed"),
        ({"tpot_target_s": 0.04}, "tpot_missed"),
        ({"ttft_target_s": None, "tpot_target_s": None}, "met"),
        ({"outcome": "failed"}, "failed"),
        # Left in time, and left when it was late already.
        ({"outcome": "cancelled"}, None),
        ({"outcome": "cancelled", "ttft_target_s": 2.4}, "ttft_missed"),
    ],
)
def test_what_became_of_the_promise(changes: dict[str, Any], verdict: Verdict | None) -> None:
    assert replace(DONE, **changes).verdict == verdict


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"outcome": "rejected", "status": 503}, "refused"),
        ({"outcome": "rejected", "status": 429}, "refused"),
        ({"outcome": "evicted", "status": 503}, "refused"),
        # The request's own fault.
        ({"outcome": "rejected", "status": 400}, None),
        ({"outcome": "cancelled", "status": None}, None),
        ({"outcome": "cancelled", "status": None, "end": 20.0}, "ttft_missed"),
    ],
)
def test_what_had_no_first_token_is_judged_by_why(changes: dict[str, Any], verdict: Verdict | None) -> None:
    assert replace(NOTHING, **changes).verdict == verdict


def test_tokens_are_wasted_on_what_was_late_or_not_wanted_any_more() -> None:
    assert DONE.wasted_tokens == 0
    assert replace(DONE, ttft_target_s=1.0).wasted_tokens == 900 - 100 + 41
    assert replace(DONE, outcome="cancelled").wasted_tokens == 900 - 100 + 41
    assert replace(NOTHING, outcome="rejected", status=503).wasted_tokens == 0


def test_a_record_is_told_in_milliseconds() -> None:
    told = describe(DONE)
    assert (told["ttft_ms"], told["tpot_ms"], told["total_ms"]) == (2500.0, 50.0, 4500.0)
    assert [(phase["name"], phase["within"], phase["duration_ms"]) for phase in told["phases"]] == [
        ("render", None, 100.0),
        ("queue", None, 1900.0),
        ("prefill", None, 400.0),
        ("decode", None, 2000.0),
        ("relay", None, 100.0),
        ("hold", "queue", 100.0),
        ("engine_wait", "queue", 1800.0),
    ]
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (DONE, "It waited 1.8 s in the engine of pool batch, with 200 ms of others' work before it when it came."),
        (
            replace(DONE, ttft_target_s=1.0, predicted_wait_s=0.0),
            "Its first token came 1.5 s late: it waited 1.8 s in the engine of pool batch (predicted: 400 ms).",
        ),
        (replace(DONE, tpot_target_s=0.04), "Its tokens came every 50 ms, and should every 40 ms."),
        (replace(DONE, outcome="cancelled"), "Its client gave it up in the phase relay, after 4.5 s."),
        (replace(DONE, outcome="cancelled", is_slow_reader=True), "Its client stopped reading."),
        (
            replace(NOTHING, outcome="rejected", status=503, reason="predicted_late"),
            "It was refused: predicted_late (predicted: 400 ms).",
        ),
        (replace(NOTHING, outcome="failed", reason="replica_lost"), "It ended with an error: replica_lost."),
        (
            replace(NOTHING, outcome="rejected", status=400, reason="invalid_request"),
            "It ended with an error: invalid_request.",
        ),
    ],
)
def test_one_sentence_says_why(record: RequestRecord, text: str) -> None:
    assert why(record) == text


def test_prefill_and_queue_are_both_named_where_both_took_long() -> None:
    slow = replace(DONE, timeline=replace(DONE.timeline, scheduled=11.3), predicted_wait_s=None)
    assert why(slow) == "It waited 1.1 s in the engine of pool batch and took 1.1 s to prefill 800 tokens."


def test_the_last_requests_are_kept_and_no_more() -> None:
    ledger = Ledger(2)
    for number in range(4):
        ledger.ended(replace(DONE, request_id=f"r-{number}"))
    assert [record.request_id for record in ledger.last()] == ["r-3", "r-2"]
    assert ledger.find("r-1", "") is None
    assert ledger.find("r-2", "") is not None
    # An id is the client's choice, and may come again.
    for _ in range(5):
        ledger.ended(replace(DONE, request_id="same", key="me"))
    assert len(ledger) == 2
    assert ledger.find("r-3", "") is None
    assert ledger.find("same", "") is None
    assert ledger.find("same", "me") is not None


def test_none_are_kept_where_none_are_wanted() -> None:
    ledger = Ledger(0)
    ledger.ended(DONE)
    assert len(ledger) == 0


def test_a_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sluice.access"):
        AccessLog().ended(replace(DONE, key="team", trace_id="t"))
        AccessLog().ended(replace(NOTHING, outcome="failed", reason="replica_lost"))
    first, second = (json.loads(record.message) for record in caplog.records)
    assert (first["id"], first["class"], first["key"], first["trace_id"]) == ("r-1", "interactive", "team", "t")
    assert first["phases"]["queue"] == 1900.0
    assert second["reason"] == "replica_lost"
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
