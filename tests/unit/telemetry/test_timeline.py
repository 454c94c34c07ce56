"""The arithmetic of the timeline."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.telemetry.timeline import (
    clock_shift,
    phases,
    queue_parts,
    server_timing,
    time_per_output_token,
    time_to_first_token,
    usage_metrics,
    with_facts,
)
from app.types import ClockReading, EngineFacts, Timeline

HERE = ClockReading(boot_id="a", wall_offset=1000.0)
SAME_MACHINE = ClockReading(boot_id="a", wall_offset=1000.3)
ELSEWHERE = ClockReading(boot_id="b", wall_offset=5000.0)

FINISHED = Timeline(
    received=10.0,
    rendered=10.5,
    dispatched=11.0,
    queued=11.5,
    scheduled=12.0,
    first_token=14.0,
    last_token=18.0,
    first_sent=14.25,
    finished=18.5,
    prompt_tokens=7,
    output_tokens=5,
)


def test_the_phases_of_a_finished_request_add_up_to_the_whole() -> None:
    parts = phases(FINISHED, 18.5)
    assert [(part.name, part.seconds, part.cut) for part in parts] == [
        ("render", 0.5, False),
        ("queue", 1.5, False),
        ("prefill", 2.0, False),
        ("decode", 4.0, False),
        ("relay", 0.5, False),
    ]
    assert sum(part.seconds for part in parts) == 8.5


def test_queue_is_told_apart() -> None:
    assert [(part.name, part.seconds) for part in queue_parts(FINISHED, 18.5)] == [("hold", 0.5), ("engine_wait", 1.0)]


@pytest.mark.parametrize(
    ("unknown", "last"),
    [
        (("rendered", "dispatched", "scheduled", "first_token", "last_token"), "render"),
        (("dispatched", "scheduled", "first_token", "last_token"), "queue"),
        (("scheduled", "first_token", "last_token"), "queue"),
        (("first_token", "last_token"), "prefill"),
        (("last_token",), "decode"),
    ],
)
def test_a_request_that_ends_early_is_cut_in_the_phase_it_was_in(unknown: tuple[str, ...], last: str) -> None:
    timeline = replace(FINISHED, finished=None)
    for name in unknown:
        setattr(timeline, name, None)
    parts = phases(timeline, 20.0)
    assert parts[-1].name == last
    assert parts[-1].cut
    assert parts[-1].end == 20.0
    assert not any(part.cut for part in parts[:-1])


def test_a_request_that_is_held_when_it_ends_has_no_engine_wait() -> None:
    timeline = Timeline(received=1.0, rendered=2.0)
    assert [(part.name, part.seconds, part.cut) for part in queue_parts(timeline, 5.0)] == [("hold", 3.0, True)]


def test_ttft_of_a_stream_counts_to_the_first_token_sent_and_else_to_the_first_generated() -> None:
    assert time_to_first_token(FINISHED) == 4.25
    assert time_to_first_token(replace(FINISHED, first_sent=None)) == 4.0
    assert time_to_first_token(Timeline(received=1.0)) is None


def test_tpot_is_per_sequence_and_needs_two_tokens() -> None:
    assert time_per_output_token(FINISHED) == 1.0
    assert time_per_output_token(replace(FINISHED, output_tokens=10, sequences=2)) == 1.0
    assert time_per_output_token(replace(FINISHED, output_tokens=1)) is None


def test_clocks_of_one_boot_are_one_clock() -> None:
    assert clock_shift(SAME_MACHINE, HERE) == 0.0
    assert clock_shift(ELSEWHERE, HERE) == 4000.0
    unknown = ClockReading(boot_id="", wall_offset=1.0)
    assert clock_shift(unknown, replace(unknown, wall_offset=3.0)) == -2.0


def test_facts_complete_the_timeline() -> None:
    facts = EngineFacts(
        clock=SAME_MACHINE,
        queued=11.5,
        scheduled=12.0,
        first_token=14.0,
        last_token=18.0,
        prompt_tokens=7,
        cached_tokens=4,
        output_tokens=5,
        sequences=1,
        preemptions=2,
    )
    timeline = with_facts(Timeline(received=10.0, rendered=10.5, dispatched=11.0, prompt_tokens=7), facts, HERE)
    assert (timeline.queued, timeline.scheduled, timeline.first_token, timeline.last_token) == (11.5, 12.0, 14.0, 18.0)
    assert (timeline.cached_tokens, timeline.output_tokens, timeline.preemptions) == (4, 5, 2)


@given(
    offset=st.floats(-100, 100),
    stamps=st.tuples(*[st.one_of(st.none(), st.floats(0, 100))] * 4),
)
def test_a_clock_that_disagrees_never_gives_a_negative_phase(
    offset: float, stamps: tuple[float | None, float | None, float | None, float | None]
) -> None:
    queued, scheduled, first_token, last_token = stamps
    facts = EngineFacts(
        clock=ClockReading(boot_id="b", wall_offset=offset),
        queued=queued,
        scheduled=scheduled,
        first_token=first_token,
        last_token=last_token,
    )
    timeline = with_facts(Timeline(received=10.0, rendered=11.0, dispatched=12.0), facts, HERE)
    for part in [*phases(timeline, 1e6), *queue_parts(timeline, 1e6)]:
        assert part.seconds >= 0


def test_server_timing_is_in_milliseconds() -> None:
    assert (
        server_timing(replace(FINISHED, finished=None), 18.0)
        == "render;dur=500.00, queue;dur=1500.00, prefill;dur=2000.00, decode;dur=4000.00, total;dur=8000.00"
    )


def test_usage_metrics_count_the_first_token_from_arrival() -> None:
    assert usage_metrics(FINISHED) == {
        "time_to_first_token_ms": 4000.0,
        "queue_time_ms": 1500.0,
        "prefill_time_ms": 2000.0,
        "generation_time_ms": 4000.0,
        "mean_itl_ms": 1000.0,
        "tokens_per_second": 0.833,
    }
