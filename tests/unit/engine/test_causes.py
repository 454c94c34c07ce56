"""What a request waited for, and the gaps between its tokens."""

import math

import pytest

from app.engine.causes import GAP_SAMPLE, Gaps, Waits, causes


def waited(waits: Waits, request_id: str) -> tuple[int, ...]:
    told = waits.first_token(request_id)
    assert told is not None
    return told


class TestWaits:
    """From arrival to first token."""

    def test_one_alone_waits_for_nothing(self) -> None:
        waits = Waits()
        waits.arrived("a")
        waits.stepped([("a", 100)])
        waits.stepped([("a", 50)])
        assert waited(waits, "a") == (0, 0, 0, 0, 2, 2)

    def test_others_that_go_first_are_counted(self) -> None:
        waits = Waits()
        for request_id in "abc":
            waits.arrived(request_id)
        waits.stepped([("a", 512)])
        waits.stepped([("a", 88), ("b", 424)])
        waits.first_token("a")
        waits.stepped([("b", 76), ("c", 10)])
        assert waited(waits, "c") == (2, 1024, 2, 0, 1, 1)

    def test_a_prefill_that_has_begun_is_one_of_those_before(self) -> None:
        waits = Waits()
        waits.arrived("early")
        waits.stepped([("early", 512)])
        waits.arrived("late")
        waits.stepped([("early", 300)])
        waits.stepped([("late", 10)])
        assert waited(waits, "late")[:3] == (1, 300, 1)

    def test_steps_that_pass_over_a_prefill_are_told_from_its_chunks(self) -> None:
        waits = Waits()
        waits.arrived("long")
        waits.stepped([("long", 512)])
        waits.arrived("short")
        waits.stepped([("short", 100)])
        waits.stepped([])
        waits.stepped([("long", 512)])
        assert waited(waits, "long")[4:] == (2, 4)

    def test_steps_without_room_are_counted_once_each(self) -> None:
        waits = Waits()
        waits.arrived("a")
        waits.found_no_room("a")
        waits.found_no_room("a")
        waits.stepped([])
        waits.found_no_room("a")
        waits.stepped([])
        waits.stepped([("a", 1)])
        assert waited(waits, "a")[3] == 2

    def test_it_is_told_once_and_nothing_is_kept(self) -> None:
        waits = Waits()
        for request_id in "ab":
            waits.arrived(request_id)
        waits.stepped([("a", 1)])
        assert waits.first_token("a") is not None
        assert waits.first_token("a") is None
        waits.forget("b")
        waits.forget("b")
        assert len(waits) == 0

    def test_one_that_comes_back_counts_as_others_work(self) -> None:
        waits = Waits()
        waits.arrived("a")
        waits.stepped([("preempted", 400)])
        waits.stepped([("a", 1)])
        assert waited(waits, "a")[:3] == (1, 400, 0)


class TestGaps:
    """Between one sequence's tokens."""

    def test_slow_and_longest(self) -> None:
        gaps = Gaps(tpot_s=0.05, phase=0)
        for now in (1.0, 1.04, 1.12, 1.15):
            gaps.note(now, 1)
        assert gaps.longest == pytest.approx(0.08)
        assert gaps.slow == 1

    def test_tokens_that_come_together_share_a_gap(self) -> None:
        gaps = Gaps(tpot_s=0.05, phase=0)
        gaps.note(1.0, 1)
        gaps.note(1.09, 2)
        assert gaps.slow == 0
        assert gaps.sample == [pytest.approx(0.045)]

    def test_every_so_manieth_is_kept_wherever_it_begins(self) -> None:
        kept = 0
        for phase in range(GAP_SAMPLE):
            gaps = Gaps(math.inf, phase)
            for token in range(11):
                gaps.note(float(token), 1)
            kept += len(gaps.sample)
        # Ten gaps each, of answers shorter than the sample's stride.
        assert kept == 10

    def test_an_output_without_tokens_is_none(self) -> None:
        gaps = Gaps(math.inf, 0)
        gaps.note(1.0, 0)
        gaps.note(2.0, 1)
        assert gaps.longest == 0


def test_of_several_sequences_the_longest_wait_counts() -> None:
    one, two = Gaps(1.0, 0, longest=0.5, slow=1, sample=[0.1]), Gaps(1.0, 0, longest=0.7, slow=2, sample=[0.2])
    one.waited, two.waited = (1, 100, 1, 0, 1, 1), (3, 300, 2, 0, 2, 2)
    told = causes([one, two])
    assert (told.waited_steps, told.ahead_tokens, told.chunks) == (3, 300, 2)
    assert (told.longest_gap_s, told.slow_gaps, told.gaps) == (0.7, 3, (0.1, 0.2))
    assert causes([]).waited_steps == 0
