"""Which traces are kept."""

from dataclasses import replace
from typing import Any

import pytest

from app.telemetry.record import RequestRecord
from app.telemetry.sampling import TailChoice
from tests.support.records import DONE, NOTHING

FAR = (1 << 64) - 1


def with_ttft(seconds: float) -> RequestRecord:
    return replace(DONE, timeline=replace(DONE.timeline, first_sent=10.0 + seconds))


@pytest.mark.parametrize(
    "record",
    [
        replace(DONE, outcome="failed"),
        replace(DONE, ttft_target_s=1.0),
        replace(DONE, tpot_target_s=0.01),
        replace(DONE, attempts=2),
        replace(DONE, steps=("class=batch",)),
        replace(DONE, timeline=replace(DONE.timeline, preemptions=1)),
        replace(NOTHING, outcome="rejected", status=503),
        replace(NOTHING, outcome="evicted", status=503),
    ],
)
def test_what_tells_something_is_kept(record: RequestRecord) -> None:
    assert TailChoice(0.0).keeps(FAR, record)


@pytest.mark.parametrize(
    "record", [DONE, replace(DONE, outcome="cancelled"), replace(NOTHING, outcome="rejected", status=400)]
)
def test_the_ordinary_is_not(record: RequestRecord) -> None:
    assert not TailChoice(0.0).keeps(0, record)


@pytest.mark.parametrize(("ratio", "kept"), [(0.0, 0), (0.25, 25), (1.0, 100)])
def test_of_the_ordinary_a_share_is_kept_by_trace_id(ratio: float, kept: int) -> None:
    ids = [number * (FAR // 100) for number in range(100)]
    one, other = TailChoice(ratio), TailChoice(ratio)
    # Too few for any of them to be slow.
    chosen = [one.keeps(trace_id, replace(DONE, service_class=f"c{trace_id}")) for trace_id in ids]
    assert sum(chosen) == pytest.approx(kept, abs=1)
    assert chosen == [other.keeps(trace_id, replace(DONE, service_class=f"c{trace_id}")) for trace_id in ids]


class TestSlowest:
    """Of each class, by what its last requests took."""

    def choice(self) -> TailChoice:
        choice = TailChoice(0.0)
        for number in range(100):
            choice.keeps(FAR, with_ttft(0.5 + number / 1000))
        return choice

    @pytest.mark.parametrize(("ttft", "is_kept"), [(0.55, False), (0.599, True), (2.0, True)])
    def test_the_slowest_are_kept(self, ttft: float, is_kept: bool) -> None:
        assert self.choice().keeps(FAR, with_ttft(ttft)) is is_kept

    def test_slow_is_what_is_slow_for_its_class(self) -> None:
        choice = self.choice()
        assert not choice.keeps(FAR, replace(with_ttft(2.0), service_class="batch"))

    def test_slow_is_what_is_slow_of_late(self) -> None:
        choice = self.choice()
        kept = [choice.keeps(FAR, with_ttft(2.0 + number % 7 / 100)) for number in range(600)]
        assert all(kept[:3])
        assert sum(kept[300:]) < 120

    def test_few_say_nothing(self) -> None:
        choice = TailChoice(0.0)
        assert not any(choice.keeps(FAR, with_ttft(number / 10)) for number in range(20))

    @pytest.mark.parametrize("field", [{"first_token": None, "first_sent": None}])
    def test_what_had_no_token_is_not_slow(self, field: dict[str, Any]) -> None:
        record = replace(DONE, outcome="cancelled", end=11.0, timeline=replace(DONE.timeline, **field))
        assert not self.choice().keeps(FAR, record)
