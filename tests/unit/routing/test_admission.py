"""Who is dispatched, held, refused, and in which order."""

import dataclasses
from collections.abc import Iterable

import pytest

from app.config import SluiceConfig
from app.engine.load import due_by_edges, slack_by_edges
from app.routing.admission import Admission, Admit, Decision, Refuse
from app.routing.placement import Fleet
from app.routing.replicas import Demand
from tests.support.fleet import a_fleet, demand, fleet_config, load, tell

HOME_ONLY = ("interactive",)


class Desk:
    """An admission with one interactive and one batch replica, whose state the test sets."""

    def __init__(self, config: SluiceConfig | None = None) -> None:
        self.config = config or fleet_config()
        self.fleet: Fleet = a_fleet(self.config)
        self.admission = Admission(self.config, self.fleet)
        self.numbers = 0

    def arrive(self, one: Demand, now: float = 0.0) -> Decision | None:
        self.numbers += 1
        return self.admission.arrive(self.numbers, one, now)

    def fill(self, *pools: str, now: float = 0.0, **sequences: int) -> None:
        """Give the pools' replicas these sequences by class; none for none."""
        for pool in pools or ("interactive", "batch"):
            engine = load(running=sum(sequences.values()), kv_free_tokens=50_000)
            tell(self.fleet, pool, f"{pool}-0", engine, now, **sequences)

    def delay(self, seconds: float, now: float = 0.0) -> None:
        """Give every replica so much prefill that is due at once."""
        for pool in ("interactive", "batch"):
            tell(self.fleet, pool, f"{pool}-0", load(seconds), now)

    def settled(self, now: float) -> dict[int, Decision]:
        return dict(self.admission.settle(now))


def reasons(decisions: Iterable[Decision | None]) -> list[str | None]:
    return [one.reason if isinstance(one, Refuse) else None for one in decisions]


class TestPrediction:
    """Requests with a TTFT target."""

    def test_one_that_will_be_in_time_is_dispatched(self) -> None:
        decision = Desk().arrive(demand())
        assert isinstance(decision, Admit)
        assert decision.placement.prediction is not None

    def test_one_that_would_be_late_is_refused_at_once_with_the_figures(self) -> None:
        desk = Desk()
        desk.delay(2.0)
        refusal = desk.arrive(demand(prompt_tokens=500))
        assert isinstance(refusal, Refuse)
        assert refusal.reason == "predicted_late"
        assert refusal.predicted_ttft_s == pytest.approx(2.525)
        # It could be in time when the excess has drained.
        assert refusal.retry_after_s == pytest.approx(1.725)
        assert refusal.instead == ("standard", "batch")

    def test_a_long_prompt_on_idle_engines_is_served_however_late(self) -> None:
        assert isinstance(Desk().arrive(demand(prompt_tokens=5000)), Admit)

    def test_less_important_classes_are_refused_first(self) -> None:
        # Waits that are the same share of each class's target.
        shares = {}
        for name, ttft_s in (("interactive", 1.0), ("standard", 4.0)):
            desk = Desk()
            desk.delay(0.7 * ttft_s)
            shares[name] = desk.arrive(demand(name, prompt_tokens=50))
        assert reasons(shares.values()) == [None, "predicted_late"]

    def test_who_was_accepted_is_not_made_late_by_who_comes_later(self) -> None:
        desk = Desk()
        for pool in ("interactive", "batch"):
            engine = load(ahead=due_by_edges([(8.0, 6.5)]), slack=slack_by_edges([(8.0, 6.5, True)], 1.0))
            tell(desk.fleet, pool, f"{pool}-0", engine)
        assert isinstance(desk.arrive(demand(prompt_tokens=50)), Admit)
        refusal = desk.arrive(demand(prompt_tokens=500))
        assert isinstance(refusal, Refuse)
        assert refusal.reason == "others_late"
        assert refusal.instead == ("batch",)
        # Another pool where nobody is in its way.
        tell(desk.fleet, "batch", "batch-0", load())
        spilled = desk.arrive(demand(prompt_tokens=500))
        assert isinstance(spilled, Admit)
        assert spilled.placement.pool == "batch"

    def test_what_others_would_give_up_in_the_last_moment_is_no_reason_to_refuse(self) -> None:
        desk = Desk()
        full = load(running=16, slots=16, life_s=160.0)
        tell(desk.fleet, "interactive", "interactive-0", full)
        assert reasons([desk.arrive(demand(pools=HOME_ONLY))]) == ["predicted_late"]
        tell(desk.fleet, "interactive", "interactive-0", dataclasses.replace(full, yielding=1))
        assert isinstance(desk.arrive(demand(pools=HOME_ONLY)), Admit)

    def test_a_class_is_not_refused_for_want_of_what_it_cannot_use(self) -> None:
        desk = Desk()
        tell(desk.fleet, "interactive", "interactive-0", load(50.0))
        assert isinstance(desk.arrive(demand("batch", pools=("batch",))), Admit)

    def test_what_is_not_known_refuses_nobody(self) -> None:
        desk = Desk()
        for pool in ("interactive", "batch"):
            tell(desk.fleet, pool, f"{pool}-0", None)
        assert all(isinstance(desk.arrive(demand()), Admit) for _ in range(10))

    def test_a_burst_is_admitted_up_to_its_targets_and_no_further(self) -> None:
        desk = Desk()
        decisions = [desk.arrive(demand(prompt_tokens=200, pools=HOME_ONLY)) for _ in range(10)]
        # 200 ms each: the fourth is done after 0.8 s of 1 s.
        assert [isinstance(decision, Admit) for decision in decisions] == [True] * 4 + [False] * 6

    def test_without_admission_everybody_goes_home_at_once(self) -> None:
        desk = Desk(fleet_config(routing__admission=False))
        desk.delay(50.0)
        decision = desk.arrive(demand())
        assert isinstance(decision, Admit)
        assert (decision.placement.pool, decision.placement.replica_id) == ("interactive", "")


class TestHolding:
    """Requests that find no room."""

    def test_they_are_dispatched_when_there_is_room_in_the_order_in_which_they_came(self) -> None:
        desk = Desk()
        desk.fill(batch=17)
        assert [desk.arrive(demand("batch", received=float(at)), float(at)) for at in range(3)] == [None] * 3
        assert desk.settled(3.0) == {}
        desk.fill("batch", now=4.0, batch=15)
        assert list(desk.settled(4.0)) == [1, 2]
        assert desk.admission.held == 1

    def test_earlier_deadlines_go_first(self) -> None:
        desk = Desk(fleet_config(classes__standard__dials={"hold_ms": 10_000}))
        for pool in ("interactive", "batch"):
            desk.fleet.lose(pool, f"{pool}-0")
        desk.arrive(demand("standard"))
        desk.arrive(demand("interactive", received=0.5), 0.5)
        desk.fill(now=0.6)
        assert list(desk.settled(0.6)) == [2, 1]

    def test_a_small_one_does_not_slip_past_a_large_one(self) -> None:
        desk = Desk()
        for pool in ("interactive", "batch"):
            tell(desk.fleet, pool, f"{pool}-0", load(running=1, kv_free_tokens=1000), batch=1)
        assert desk.arrive(demand("batch", prompt_tokens=2000)) is None
        assert desk.arrive(demand("batch", prompt_tokens=10)) is None
        assert desk.settled(0.0) == {}

    def test_the_hold_window_ends(self) -> None:
        desk = Desk(fleet_config(classes__batch__dials={"hold_ms": 2000}))
        desk.fill(batch=17)
        desk.arrive(demand("batch"))
        assert desk.admission.next_due() == 2.0
        assert desk.settled(1.9) == {}
        assert reasons(desk.settled(2.0).values()) == ["hold_expired"]
        assert desk.admission.held == 0

    def test_nobody_is_held_beyond_the_deadline(self) -> None:
        desk = Desk(fleet_config(classes__interactive__dials={"hold_ms": 60_000}))
        desk.fill(interactive=16)
        assert desk.arrive(demand(received=-0.4)) is None
        assert desk.admission.next_due() == pytest.approx(0.6)

    def test_only_so_many_are_held(self) -> None:
        desk = Desk(fleet_config(classes__batch__limits={"max_held": 2}))
        desk.fill(batch=17)
        decisions = [desk.arrive(demand("batch")) for _ in range(3)]
        assert decisions[:2] == [None, None]
        assert reasons(decisions[2:]) == ["too_many_held"]

    def test_one_whose_client_left_is_forgotten(self) -> None:
        desk = Desk()
        desk.fill(batch=17)
        desk.arrive(demand("batch"))
        desk.admission.withdraw(1)
        desk.fill(now=1.0)
        assert desk.settled(1.0) == {}

    def test_when_to_come_back_follows_how_fast_there_is_room(self) -> None:
        desk = Desk(fleet_config(classes__batch__limits={"max_held": 3}))
        for number in range(4):
            assert isinstance(desk.arrive(demand("batch")), Admit), number
        desk.fill(batch=17)
        for _ in range(3):
            desk.arrive(demand("batch"))
        # One every two seconds; four would go first, itself among them.
        for number, at in enumerate((2.0, 4.0, 6.0, 8.0), start=1):
            desk.admission.ended(number, at)
        refusal = desk.arrive(demand("batch", received=8.0), 8.0)
        assert isinstance(refusal, Refuse)
        assert refusal.retry_after_s == pytest.approx(4 * 6 / 4)

    def test_while_everything_is_down_requests_are_held_and_then_told_so(self) -> None:
        desk = Desk()
        for pool in ("interactive", "batch"):
            desk.fleet.lose(pool, f"{pool}-0")
        assert desk.arrive(demand()) is None
        assert reasons(desk.settled(1.0).values()) == ["pool_down"]

    def test_a_class_may_have_only_so_many_at_once(self) -> None:
        desk = Desk(fleet_config(classes__batch__limits={"max_concurrent": 2}))
        decisions = [desk.arrive(demand("batch")) for _ in range(3)]
        assert reasons(decisions) == [None, None, "class_full"]
        desk.admission.ended(1, 1.0)
        assert isinstance(desk.arrive(demand("batch"), 1.0), Admit)


class TestFairness:
    """Between keys of a class."""

    def test_a_key_that_floods_leaves_others_their_share(self) -> None:
        desk = Desk()
        quiet = demand(prompt_tokens=100, key="quiet", pools=HOME_ONLY)
        assert isinstance(desk.arrive(quiet), Admit)
        flood = [desk.arrive(demand(prompt_tokens=100, key="flood", pools=HOME_ONLY)) for _ in range(20)]
        assert 1 <= sum(isinstance(one, Admit) for one in flood) <= 3
        assert isinstance(desk.arrive(quiet), Admit)

    def test_a_flood_that_came_first_leaves_engines_nearly_free(self) -> None:
        desk = Desk()
        desk.arrive(demand(prompt_tokens=10, key="quiet", pools=HOME_ONLY))
        desk.admission.ended(desk.numbers, 0.1)
        flood = [desk.arrive(demand(prompt_tokens=100, key="flood", pools=HOME_ONLY), 0.1) for _ in range(20)]
        assert 1 <= sum(isinstance(one, Admit) for one in flood) <= 3
        several = [desk.arrive(demand(prompt_tokens=100, key="quiet", pools=HOME_ONLY), 0.1) for _ in range(3)]
        assert all(isinstance(one, Admit) and one.later_s == 0 for one in several)

    def test_whose_others_are_long_gone_may_have_everything(self) -> None:
        desk = Desk()
        desk.arrive(demand(prompt_tokens=10, key="quiet", pools=HOME_ONLY))
        desk.admission.ended(desk.numbers, 0.1)
        desk.fill(now=100.0)
        one = demand(prompt_tokens=100, received=100.0, key="flood", pools=HOME_ONLY)
        flood = [desk.arrive(one, 100.0) for _ in range(8)]
        assert all(isinstance(one, Admit) and one.later_s == 0 for one in flood)

    def test_what_is_held_for_others_sake_until_it_is_late_is_told_so(self) -> None:
        desk = Desk()
        desk.arrive(demand(prompt_tokens=10, key="quiet"))
        flood = [desk.arrive(demand(prompt_tokens=100, key="flood")) for _ in range(20)]
        decisions = desk.settled(1.0)
        assert len(decisions) == flood.count(None)
        assert set(reasons(decisions.values())) == {"own_backlog"}

    def test_engines_serve_a_flooding_keys_requests_after_others(self) -> None:
        desk = Desk()
        desk.arrive(demand(prompt_tokens=10, key="quiet"))
        later = []
        for _ in range(4):
            decision = desk.arrive(demand(prompt_tokens=10, key="flood"))
            assert isinstance(decision, Admit)
            later.append(decision.later_s)
        # Its second follows the other's first.
        assert later[:2] == [0, 0]
        assert 0 < later[2] < later[3]
        quiet = desk.arrive(demand(prompt_tokens=20, key="other"))
        assert isinstance(quiet, Admit)
        assert quiet.later_s == 0

    def test_a_flooding_keys_requests_are_expected_after_others(self) -> None:
        desk = Desk()
        desk.arrive(demand(prompt_tokens=10, key="quiet"))
        for _ in range(4):
            desk.arrive(demand(prompt_tokens=10, key="flood"))
        flood = desk.arrive(demand(prompt_tokens=10, key="flood"))
        quiet = desk.arrive(demand(prompt_tokens=10, key="quiet"))
        assert isinstance(flood, Admit)
        assert isinstance(quiet, Admit)
        assert flood.placement.prediction is not None
        assert quiet.placement.prediction is not None
        assert quiet.placement.prediction.ttft_s < flood.placement.prediction.ttft_s

    def crowd(self, desk: Desk, key: str, requests: int) -> list[str]:
        """Have a key send so many; where they go."""
        decisions = [desk.arrive(demand(prompt_tokens=1, key=key)) for _ in range(requests)]
        return [one.placement.pool if isinstance(one, Admit) else "" for one in decisions]

    def test_a_flood_leaves_the_home_that_others_use_to_them(self) -> None:
        desk = Desk()
        assert self.crowd(desk, "quiet", 2) == ["interactive"] * 2
        pools = self.crowd(desk, "flood", 14)
        assert set(pools[:10]) == {"interactive"}
        assert set(pools[12:]) == {"batch"}
        assert self.crowd(desk, "quiet", 1) == ["interactive"]

    def test_a_home_that_others_hardly_use_is_not_left_to_them(self) -> None:
        # A twentieth of its 100 slots.
        desk = Desk(fleet_config(pools__interactive__engine__max_num_seqs=100))
        self.crowd(desk, "quiet", 2)
        assert set(self.crowd(desk, "flood", 14)) == {"interactive"}

    def test_who_has_no_more_than_its_share_does_not_give_way_to_the_smallest(self) -> None:
        desk = Desk(fleet_config(pools__interactive__engine__max_num_seqs=60))
        self.crowd(desk, "small", 1)
        self.crowd(desk, "large", 40)
        assert set(self.crowd(desk, "middle", 12)) == {"interactive"}

    def test_what_waits_for_a_place_elsewhere_keeps_nobody_from_home(self) -> None:
        desk = Desk()
        self.crowd(desk, "quiet", 2)
        desk.fill("batch", standard=16)
        assert self.crowd(desk, "flood", 14)[-1] == ""
        assert self.crowd(desk, "quiet", 1) == ["interactive"]

    def test_a_flood_with_nowhere_else_to_go_stays_at_home(self) -> None:
        desk = Desk()
        for key, requests in (("quiet", 2), ("flood", 12)):
            decisions = [desk.arrive(demand(prompt_tokens=1, key=key, pools=HOME_ONLY)) for _ in range(requests)]
            assert all(isinstance(one, Admit) for one in decisions)

    def test_a_key_alone_may_have_everything(self) -> None:
        desk = Desk()
        flood = [desk.arrive(demand(prompt_tokens=100, key="flood", pools=HOME_ONLY)) for _ in range(8)]
        assert all(isinstance(one, Admit) for one in flood)

    @pytest.mark.parametrize(("weight", "expected"), [(1.0, ["b", "a", "b", "a"]), (3.0, ["b", "b", "b", "a"])])
    def test_room_is_shared_by_weight(self, weight: float, expected: list[str]) -> None:
        desk = Desk()
        keys = dict(enumerate("aaaabbbb", start=2))
        # One of a's has been dispatched before.
        desk.arrive(demand("batch", key="a"))
        desk.admission.set_weight("batch", "b", weight)
        desk.fill(batch=17)
        for key in keys.values():
            assert desk.arrive(demand("batch", key=key)) is None
        desk.fill("batch", now=1.0, batch=13)
        assert [keys[number] for number in desk.settled(1.0)] == expected

    def test_who_holds_most_of_the_places_is_told_that_it_is_its_own_doing(self) -> None:
        desk = Desk(fleet_config(classes__batch__limits={"max_held": 4}))
        desk.fill(batch=17)
        decisions = [desk.arrive(demand("batch", key="flood")) for _ in range(5)]
        assert reasons(decisions[4:]) == ["own_backlog"]
        assert reasons([desk.arrive(demand("batch", key="quiet"))]) == ["too_many_held"]

    def test_a_flood_leaves_others_their_share_of_the_places(self) -> None:
        desk = Desk(fleet_config(classes__batch__limits={"max_held": 4}))
        desk.fill(batch=17)
        assert desk.arrive(demand("batch", key="quiet")) is None
        assert reasons([desk.arrive(demand("batch", key="flood")) for _ in range(3)]) == [None, None, "own_backlog"]
        assert desk.arrive(demand("batch", key="quiet")) is None


def test_two_ingresses_admit_at_most_what_each_sends_within_a_states_age() -> None:
    """Each believes the same state; what the other sent since is not in it."""
    config = fleet_config()
    desks = [Desk(config), Desk(config)]
    admitted = 0
    for _ in range(20):
        for desk in desks:
            admitted += isinstance(desk.arrive(demand(prompt_tokens=200, pools=HOME_ONLY)), Admit)
    # One alone would admit four.
    assert admitted == 8
    # The next state shows it to both, and neither admits more.
    for desk in desks:
        tell(desk.fleet, "interactive", "interactive-0", load(1.55), 0.05, interactive=8)
        assert reasons([desk.arrive(demand(prompt_tokens=200, received=0.1, pools=HOME_ONLY), 0.1)]) == [
            "predicted_late"
        ]


def test_a_new_configuration_holds_from_the_next_decision_on() -> None:
    desk = Desk()
    desk.delay(0.7)
    assert isinstance(desk.arrive(demand(prompt_tokens=50)), Admit)
    stricter = fleet_config(classes__interactive__admit_share=0.5)
    desk.fleet.configure(stricter)
    desk.admission.configure(stricter)
    assert reasons([desk.arrive(demand(prompt_tokens=50))]) == ["predicted_late"]
