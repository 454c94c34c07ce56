"""What an ingress makes of what replicas tell."""

import dataclasses
import math

import pytest

from app.engine.load import (
    ARRIVALS_MEMORY_S,
    Arrivals,
    Lives,
    at_rest,
    decode_load,
    due_by_edges,
    encode_load,
    slack_by_edges,
)
from app.routing.placement import Fleet, Placement
from app.routing.replicas import Overhead, Replica, at_edge, until
from app.types import DUE_EDGES_S, EngineLoad
from tests.support.fleet import a_fleet, demand, fleet_config, load, tell


def replica(engine: EngineLoad | None, **sequences: int) -> tuple[Fleet, Replica]:
    fleet = a_fleet(fleet_config(), interactive=1)
    tell(fleet, "interactive", "interactive-0", engine, **sequences)
    return fleet, next(fleet.replicas())


def test_a_load_survives_its_way_from_the_engine_core() -> None:
    full = load(0.25, running=3, waiting=2, output_tokens=77, decode_s=0.0123, pair_s=1.5e-12)
    assert decode_load({"sluice.steps": 1, **encode_load(full)}) == full
    assert decode_load({"sluice.steps": 1}) is None


def test_however_much_there_is_to_do_it_can_be_told() -> None:
    endless = load(1e12, output_tokens=2**70, pair_s=1e6, token_s=1e6, step_s=1e12)
    assert all(abs(value) < 2**63 for value in encode_load(endless).values())
    told = decode_load(encode_load(load(3600.0, token_s=1.5e-5)))
    assert told is not None
    assert told.ahead[-1] == pytest.approx(3600)
    assert told.token_s == pytest.approx(1.5e-5)


def test_work_of_late_is_told_per_second_and_forgotten() -> None:
    arrivals = Arrivals()
    assert arrivals.per_second(0.0, 1e-3, 0.0)[-1] == 0.0
    for step in range(1, 300):
        arrivals.add(1.0, 50, 0.0, 1.0)
        rates = arrivals.per_second(step / 10, 1e-3, 0.0)
        # Soon: 500 tokens a second, of a millisecond each.
        assert step < 15 or rates[-1] == pytest.approx(0.5, rel=0.1)
    assert rates[-1] == pytest.approx(0.5, rel=0.02)
    assert until(rates, 0.6) == 0.0
    faded = at_rest(load(arriving=rates), ARRIVALS_MEMORY_S)
    assert faded.arriving[-1] == pytest.approx(rates[-1] / math.e, rel=0.01)
    assert arrivals.per_second(30 + 5 * ARRIVALS_MEMORY_S, 1e-3, 0.0)[-1] < 0.01


def test_one_request_foretells_no_other() -> None:
    arrivals = Arrivals()
    arrivals.per_second(0.0, 1e-3, 0.0)
    for step in range(1, 11):
        # In ten chunks.
        arrivals.add(30.0, 4000, 0.0, 0.1)
        assert arrivals.per_second(step / 2, 1e-3, 0.0)[-1] == 0.0
    arrivals.add(30.0, 40_000, 0.0, 1.0)
    assert arrivals.per_second(5.5, 1e-3, 0.0)[-1] > 1.0


def test_how_long_sequences_have_slots_is_told_by_ends_of_late() -> None:
    lives = Lives()
    for step in range(300):
        # Eight have a slot, one ends every half second: four seconds each.
        if step % 5 == 0:
            lives.end()
        seconds = lives.seconds(step / 10, 8)
        # Too few ends tell nothing.
        assert (seconds > 0) is (step >= 20)
    assert seconds == pytest.approx(4.0, rel=0.1)


def test_slack_is_that_of_the_tightest_who_can_still_be_in_time() -> None:
    work = [(0.1, 0.2, True), (1.5, 0.3, True), (4.0, 1.0, True), (6.0, 0.0, False), (30.0, 10.0, True)]
    slack = slack_by_edges(work, 0.5)
    # The first is late already; work takes twice as long as without decodes, and a fifth more for caution.
    assert slack[0] == pytest.approx(1.5 - 2.4 * 0.5) == at_edge(slack, 1.4)
    assert at_edge(slack, 3.9) == pytest.approx(4.0 - 2.4 * 1.5)
    assert at_edge(slack, 5.9) == pytest.approx(30.0 - 2.4 * 11.5)
    assert at_edge(slack, 60.0) == math.inf
    told = decode_load(encode_load(load(slack=slack)))
    assert told is not None
    assert told.slack == pytest.approx(slack)


def test_work_ahead_is_what_is_due_before() -> None:
    engine = EngineLoad(ahead=due_by_edges([(-1.0, 1.0), (0.15, 2.0), (100.0, 4.0)]))
    assert until(engine.ahead, -5) == 1.0
    assert until(engine.ahead, 0.2) == 3.0
    assert 1.0 < until(engine.ahead, 0.15) < 3.0
    assert until(engine.ahead, 20) == 3.0
    assert until(engine.ahead, math.inf) == 7.0


class TestPredictions:
    """When a first token would come."""

    def test_an_idle_replica_takes_the_prompts_time(self) -> None:
        _, idle = replica(load())
        prediction = idle.predict(demand(prompt_tokens=300), 0, 0.0)
        assert prediction is not None
        assert prediction.ttft_s == pytest.approx(0.3)
        assert prediction.wait_s == 0

    def test_a_cached_prefix_is_not_computed(self) -> None:
        _, idle = replica(load())
        prediction = idle.predict(demand(prompt_tokens=300), 200, 0.0)
        assert prediction is not None
        assert prediction.ttft_s == pytest.approx(0.1)

    def test_the_time_that_has_passed_counts(self) -> None:
        _, idle = replica(load())
        prediction = idle.predict(demand(prompt_tokens=300, received=-1.0), 0, 0.0)
        assert prediction is not None
        assert prediction.ttft_s == pytest.approx(1.3)

    def test_decodes_slow_prefill_down(self) -> None:
        _, busy = replica(load(1.0, decode_s=0.025, running=1))
        prediction = busy.predict(demand(prompt_tokens=1000), 0, 0.0)
        assert prediction is not None
        # Half of a step of 50 ms, then two seconds of prefill at half the speed.
        assert prediction.ttft_s == pytest.approx(0.025 + 4.0)
        assert prediction.wait_s == pytest.approx(0.025 + 2.0)

    def test_work_that_is_due_later_does_not_come_first(self) -> None:
        _, busy = replica(load(ahead=due_by_edges([(20.0, 9.0)])))
        prediction = busy.predict(demand(prompt_tokens=300), 0, 0.0)
        assert prediction is not None
        # But for the rest of a step of 50 ms.
        assert prediction.ttft_s == pytest.approx(0.325)

    def test_what_is_computed_in_the_next_step_is_not_overtaken(self) -> None:
        _, busy = replica(load(arriving=due_by_edges([(0.1, 0.9)])))
        prediction = busy.predict(demand(prompt_tokens=40), 0, 0.0)
        assert prediction is not None
        assert prediction.ttft_s == pytest.approx(0.04)

    def test_what_will_come_later_and_go_first_counts(self) -> None:
        # For half of the time there is prefill of requests that have 2 s.
        _, busy = replica(load(1.0, arriving=due_by_edges([(2.0, 0.5)])))
        urgent, patient = (busy.predict(demand(prompt_tokens=1000, ttft_s=ttft_s), 0, 0.0) for ttft_s in (1.0, 100.0))
        assert urgent is not None
        assert patient is not None
        assert urgent.ttft_s == pytest.approx(0.025 + 2.0)
        # But for the step of 50 ms that comes next.
        assert patient.ttft_s == pytest.approx(0.025 + 4.0 - 0.05)
        assert patient.wait_s == pytest.approx(0.025 + 3.0 - 0.05)

    def test_work_that_what_comes_later_leaves_no_time_for_is_done_when_it_is_due(self) -> None:
        # All of the time goes to requests that have 2 s.
        _, busy = replica(load(arriving=due_by_edges([(2.0, 1.0)])))
        for tokens in (5_000, 10_000, 15_000):
            prediction = busy.predict(demand(prompt_tokens=tokens, ttft_s=20.0), 0, 0.0)
            assert prediction is not None
            # Only in the last 2 s there is none that has less.
            assert prediction.ttft_s == pytest.approx(20.0 - 2.0 + (tokens / 1000 - 0.1 * 18.0), rel=0.1)

    def test_what_was_sent_since_the_state_counts_until_a_state_shows_it(self) -> None:
        fleet, idle = replica(load())
        sent = demand(prompt_tokens=500)
        fleet.sent(1, sent, Placement("interactive", "interactive-0", None, 0, False), 0.0)
        prediction = idle.predict(demand(prompt_tokens=100), 0, 0.0)
        assert prediction is not None
        assert prediction.ttft_s == pytest.approx(0.6)
        assert idle.outstanding_tokens() == 510
        # A step that had begun before does not show it when it ends.
        tell(fleet, "interactive", "interactive-0", load(unseen_s=1.0), 1.0)
        assert idle.outstanding_tokens() == 510
        tell(fleet, "interactive", "interactive-0", load(), 1.0, interactive=1)
        assert idle.outstanding_tokens() == 0

    def test_full_slots_are_waited_for(self) -> None:
        engine = load(running=16, output_tokens=1600, decode_s=0.02, step_s=0.04)
        # One of sixteen slots, at 100 tokens of 20 ms per answer, or as long as answers were seen to have theirs.
        for life_s, expected_s in ((0.0, 2.0), (8.0, 8.0)):
            _, full = replica(dataclasses.replace(engine, life_s=life_s), interactive=16)
            prediction = full.predict(demand(), 0, 0.0)
            assert prediction is not None
            assert prediction.wait_s == pytest.approx(expected_s / 16 + 0.01)
            assert prediction.takes_room is False

    def test_who_has_no_target_waits_for_everybody_and_who_has_one_for_those_that_have(self) -> None:
        _, full = replica(load(running=16, waiting=15, waiting_promised=3, life_s=16.0))
        waits = [full.predict(demand(ttft_s=ttft_s), 0, 0.0) for ttft_s in (None, 30.0)]
        assert [one and one.wait_s for one in waits] == pytest.approx([16.0, 4.0])

    def test_what_others_would_give_up_is_had_in_time(self) -> None:
        engine = load(running=16, life_s=1600.0, yielding=1, yielding_tokens=600)
        for slots, kv_free_tokens in ((16, 100_000), (32, 100)):
            _, full = replica(dataclasses.replace(engine, slots=slots, kv_free_tokens=kv_free_tokens))
            prediction = full.predict(demand(prompt_tokens=600, ttft_s=2.0), 0, 0.0)
            assert prediction is not None
            assert prediction.takes_room is True
            # At the last moment, but not sooner than its own prefill takes.
            assert prediction.ttft_s == pytest.approx(2.0)
            late = full.predict(demand(prompt_tokens=600, ttft_s=0.5), 0, 0.0)
            assert late is not None
            assert late.ttft_s == pytest.approx(0.6)
            # Nobody gives up anything for who has no target.
            loose = full.predict(demand(prompt_tokens=600, ttft_s=None), 0, 0.0)
            assert loose is not None
            assert loose.takes_room is False

    def test_more_than_others_would_give_up_is_waited_for(self) -> None:
        engine = load(running=16, slots=16, waiting_promised=1, life_s=160.0, yielding=1, yielding_tokens=600)
        _, full = replica(engine)
        prediction = full.predict(demand(ttft_s=2.0), 0, 0.0)
        assert prediction is not None
        assert prediction.takes_room is False
        assert prediction.ttft_s > 2.0

    @pytest.mark.parametrize(("slack_s", "delays"), [(0.5, False), (0.25, True)])
    def test_who_is_due_later_is_put_off_by_this_and_by_what_the_state_does_not_show(
        self, slack_s: float, delays: bool
    ) -> None:
        slack = tuple(slack_s if edge <= 8.0 else math.inf for edge in DUE_EDGES_S)
        fleet, busy = replica(load(ahead=due_by_edges([(8.0, 7.0)]), slack=slack))
        prediction = busy.predict(demand(prompt_tokens=300), 0, 0.0)
        assert prediction is not None
        assert prediction.delays_others is delays
        fleet.sent(1, demand(prompt_tokens=300), Placement("interactive", "interactive-0", None, 0, False), 0.0)
        prediction = busy.predict(demand(prompt_tokens=300), 0, 0.0)
        assert prediction is not None
        assert prediction.delays_others is True
        later = busy.predict(demand(prompt_tokens=300, ttft_s=100.0), 0, 0.0)
        assert later is not None
        assert later.delays_others is False

    @pytest.mark.parametrize("engine", [None, EngineLoad(slots=16)], ids=["tells nothing", "has learned nothing"])
    def test_nothing_known_is_no_prediction(self, engine: EngineLoad | None) -> None:
        _, unknown = replica(engine)
        assert unknown.predict(demand(), 0, 0.0) is None

    def test_an_old_state_is_no_prediction(self) -> None:
        _, silent = replica(load())
        assert silent.predict(demand(received=4.0), 0, 4.0) is not None
        assert silent.predict(demand(received=6.0), 0, 6.0) is None

    def test_what_first_tokens_take_beyond_is_learned(self) -> None:
        fleet, idle = replica(load())
        for number in range(10):
            one = demand(prompt_tokens=100, received=float(number))
            tell(fleet, "interactive", "interactive-0", load(), float(number))
            placement = fleet.choose(one, float(number))
            assert isinstance(placement, Placement)
            fleet.sent(number, one, placement, float(number))
            fleet.first_token(number, number + 0.15)
            fleet.ended(number)
        prediction = idle.predict(demand(prompt_tokens=100, received=9.5), 0, 9.5)
        assert prediction is not None
        assert prediction.ttft_s == pytest.approx(0.15)


def test_one_late_token_is_no_rule() -> None:
    overhead = Overhead()
    overhead.learn(5.0)
    assert overhead.seconds == 0
    for _ in range(10):
        overhead.learn(0.01)
    assert overhead.seconds == pytest.approx(0.01)
