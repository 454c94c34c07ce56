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
from app.types import EngineCauses
from tests.support.records import DONE, NOTHING


def slowed(**causes: Any) -> RequestRecord:
    """One whose engine tells what delayed it."""
    return replace(DONE, timeline=replace(DONE.timeline, causes=EngineCauses(**causes)))


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
        (
            slowed(ahead_tokens=12_345, ahead_prefills=3, waited_steps=40),
            "It waited 1.8 s in the engine of pool batch behind 12,345 prompt tokens of 3 other requests.",
        ),
        (
            slowed(ahead_tokens=200, ahead_prefills=1, waited_steps=40, no_room_steps=30),
            "It waited 1.8 s in the engine of pool batch behind 200 prompt tokens of 1 other request, for want of a "
            "slot or KV cache in 30 of 40 steps.",
        ),
        (
            replace(slowed(waited_steps=40, no_room_steps=40), ttft_target_s=2.0),
            "Its first token came 500 ms late: it waited 1.8 s in the engine of pool batch, for want of a slot or KV "
            "cache in 40 of 40 steps (predicted: 400 ms).",
        ),
        (
            replace(
                slowed(chunks=3, prefill_steps=9),
                timeline=replace(slowed(chunks=3, prefill_steps=9).timeline, scheduled=10.3),
            ),
            "It took 2.1 s to prefill 800 tokens in 3 parts, standing back for others in 6 of 9 steps.",
        ),
        (
            replace(slowed(slow_gaps=5, longest_gap_s=0.31), tpot_target_s=0.04),
            "Its tokens came every 50 ms, and should every 40 ms: 5 steps took longer, the longest 310 ms.",
        ),
        (
            replace(DONE, end=19.4, timeline=replace(DONE.timeline, finished=19.4), predicted_wait_s=0.0),
            "It waited 1.8 s in the engine of pool batch, and its client took 5.0 s longer to read it.",
        ),
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
    with caplog.at_level(logging.INFO, "ray.serve.sluice.access"):
        AccessLog().ended(replace(DONE, key="team", trace_id="t"))
        AccessLog().ended(replace(NOTHING, outcome="failed", reason="replica_lost"))
    first, second = (json.loads(record.message) for record in caplog.records)
    assert (first["id"], first["class"], first["key"], first["trace_id"]) == ("r-1", "interactive", "team", "t")
    assert first["phases"]["queue"] == 1900.0
    assert second["reason"] == "replica_lost"
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
