"""How targets travel in vLLM's own fields."""

import math

import pytest

from app.engine.targets import (
    Targets,
    deadline,
    engine_priority,
    from_extra_args,
    to_extra_args,
    to_priority,
    with_targets,
)

NONE = Targets()


def test_targets_survive_the_way_to_the_engine() -> None:
    targets = Targets(ttft_s=0.5, tpot_s=0.05, service_class="interactive")
    assert from_extra_args(to_extra_args(targets), NONE) == targets


def test_absent_targets_take_no_place_and_come_from_the_defaults() -> None:
    assert to_extra_args(NONE) == {}
    default = Targets(ttft_s=1.0, tpot_s=0.1, service_class="c")
    assert from_extra_args(None, default) == default
    assert from_extra_args({"ttft_target_ms": 300}, default) == Targets(0.3, 0.1, "c")


@pytest.mark.parametrize("value", ["500", -1, 0, math.nan, math.inf, True, None, [500]])
def test_what_is_no_target_is_as_if_it_were_absent(value: object) -> None:
    assert from_extra_args({"ttft_target_ms": value, "tpot_target_ms": value}, NONE) == NONE


def test_a_class_name_is_bounded_and_text() -> None:
    assert from_extra_args({"service_class": "x" * 100}, NONE).service_class == "x" * 32
    assert from_extra_args({"service_class": 7}, NONE).service_class == ""


def test_a_priority_that_is_a_time_is_the_deadline() -> None:
    due = 1_700_000_000.25
    assert deadline(to_priority(due), arrival=due - 10, ttft_s=0.5) == due


@pytest.mark.parametrize(("priority", "expected"), [(0, 100.5), (3, 103.5), (-2, 98.5)])
def test_other_priorities_move_the_deadline_by_seconds(priority: int, expected: float) -> None:
    assert deadline(priority, arrival=100.0, ttft_s=0.5) == expected


def test_earlier_deadlines_are_smaller_priorities() -> None:
    assert to_priority(1_700_000_000.001) < to_priority(1_700_000_000.002)


def test_a_client_sets_no_targets_but_keeps_its_other_arguments() -> None:
    asked = {"ttft_target_ms": 1, "tpot_target_ms": 1, "service_class": "best", "mine": 7}
    assert with_targets(asked, Targets(tpot_s=0.05)) == {"mine": 7, "tpot_target_ms": 50.0}
    assert with_targets(None, NONE) == {}


def test_vllms_own_scheduler_gets_a_deadline_for_everybody() -> None:
    received = 1_700_000_000.0
    assert engine_priority("deadline", received, None) == 0
    assert engine_priority("vllm", received, None) == to_priority(received + 5)
    for scheduler in ("deadline", "vllm"):
        assert engine_priority(scheduler, received, 0.5) == to_priority(received + 0.5)
