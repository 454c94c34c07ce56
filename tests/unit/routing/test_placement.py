"""Which replica a request goes to."""

import dataclasses
from typing import Any

import pytest

from app.config import SluiceConfig
from app.routing.placement import PREFIX_TOKENS, Fleet, NoRoom, Placement, prefix_hashes
from app.routing.replicas import Demand
from tests.support.fleet import a_fleet, demand, fleet_config, load, tell


def placed(fleet: Fleet, one: Demand, now: float = 0.0) -> Placement:
    choice = fleet.choose(one, now)
    assert isinstance(choice, Placement), choice
    return choice


class TestHomeAndOthers:
    """Home first, other pools when the target would be missed."""

    def test_an_idle_fleet_serves_everybody_at_home(self) -> None:
        fleet = a_fleet(fleet_config())
        assert placed(fleet, demand("interactive")).pool == "interactive"
        assert placed(fleet, demand("batch")).pool == "batch"

    def test_a_busy_home_is_left_for_a_pool_with_room(self) -> None:
        fleet = a_fleet(fleet_config())
        tell(fleet, "interactive", "interactive-0", load(0.9))
        choice = placed(fleet, demand())
        assert (choice.pool, choice.spilled) == ("batch", True)

    def test_a_home_that_is_fast_enough_is_not_left(self) -> None:
        fleet = a_fleet(fleet_config())
        tell(fleet, "interactive", "interactive-0", load(0.2))
        assert placed(fleet, demand()).pool == "interactive"

    def test_spilling_goes_on_until_home_is_clearly_better(self) -> None:
        fleet = a_fleet(fleet_config())
        pools = []
        for ahead_s in (0.3, 0.6, 0.3, 0.1, 0.3):
            tell(fleet, "interactive", "interactive-0", load(ahead_s))
            pools.append(placed(fleet, demand()).pool)
        assert pools == ["interactive", "batch", "batch", "interactive", "interactive"]

    def test_a_pool_that_is_busy_too_does_not_help_out(self) -> None:
        fleet = a_fleet(fleet_config())
        tell(fleet, "interactive", "interactive-0", load(0.6))
        tell(fleet, "batch", "batch-0", load(0.6))
        assert placed(fleet, demand()).pool == "interactive"

    def test_requests_without_a_target_go_where_least_is_left_to_do(self) -> None:
        fleet = a_fleet(fleet_config())
        tell(fleet, "batch", "batch-0", load(output_tokens=5000, running=4), batch=4)
        choice = placed(fleet, demand("batch"))
        assert (choice.pool, choice.spilled) == ("interactive", True)
        tell(fleet, "interactive", "interactive-0", load(output_tokens=4500, running=4), interactive=4)
        assert placed(fleet, demand("batch")).pool == "batch"

    def test_only_given_pools_are_considered(self) -> None:
        fleet = a_fleet(fleet_config())
        tell(fleet, "interactive", "interactive-0", load(5.0))
        assert placed(fleet, demand(pools=("interactive",))).pool == "interactive"

    def test_a_lost_home_is_left_until_it_is_back(self) -> None:
        fleet = a_fleet(fleet_config())
        fleet.lose("interactive", "interactive-0")
        assert placed(fleet, demand()).pool == "batch"
        assert fleet.choose(demand(pools=("interactive",)), 0.0) == NoRoom(is_down=True)
        tell(fleet, "interactive", "interactive-0", load(), 1.0)
        assert placed(fleet, demand(received=1.0), 1.0).pool == "interactive"

    def test_a_replica_that_has_fallen_silent_is_the_last_resort(self) -> None:
        fleet = a_fleet(fleet_config())
        tell(fleet, "interactive", "interactive-0", load(0.1), 10.0)
        for one in (demand("batch", received=10.0), demand(received=10.0)):
            assert placed(fleet, one, 10.0).pool == "interactive"
            assert placed(fleet, dataclasses.replace(one, pools=("batch",)), 10.0).pool == "batch"

    def test_a_home_that_has_not_run_yet_is_not_left_for_one_that_has(self) -> None:
        fleet = a_fleet(fleet_config())
        tell(fleet, "interactive", "interactive-0", load(token_s=0.0, step_s=0.0))
        assert placed(fleet, demand()).pool == "interactive"

    def test_while_nothing_is_known_everybody_goes_home(self) -> None:
        fleet = Fleet(fleet_config())
        assert fleet.choose(demand(), 0.0) == NoRoom(is_down=True)
        for pool in ("interactive", "batch"):
            fleet.set_replicas(pool, [f"{pool}-0"])
        choice = placed(fleet, demand())
        assert (choice.pool, choice.prediction) == ("interactive", None)


class TestWithinAPool:
    """By what is to be done, not by the number of requests."""

    def test_the_replica_with_the_soonest_first_token(self) -> None:
        fleet = a_fleet(fleet_config(), interactive=2, batch=1)
        tell(fleet, "interactive", "interactive-0", load(0.3, running=1), interactive=1)
        tell(fleet, "interactive", "interactive-1", load(0.0, running=3, decode_s=0.01), interactive=3)
        assert placed(fleet, demand()).replica_id == "interactive-1"

    def test_a_burst_is_spread_before_any_state_shows_it(self) -> None:
        fleet = a_fleet(fleet_config(), interactive=3, batch=1)
        used = []
        for number in range(6):
            one = demand(prompt_tokens=50)
            choice = placed(fleet, one)
            fleet.sent(number, one, choice, 0.0)
            used.append(choice.replica_id)
        assert sorted(used) == sorted(2 * [f"interactive-{index}" for index in range(3)])

    def test_a_conversation_sticks_while_that_pays(self) -> None:
        fleet = a_fleet(fleet_config(), interactive=2, batch=1)
        prefix = prefix_hashes([7] * 640)
        first = demand(prompt_tokens=640, prefix=prefix)
        home = placed(fleet, first)
        fleet.sent(1, first, home, 0.0)
        fleet.ended(1)
        other = "interactive-1" if home.replica_id == "interactive-0" else "interactive-0"
        longer = demand(prompt_tokens=700, prefix=prefix_hashes([7] * 640 + [8] * 60), received=1.0)
        tell(fleet, "interactive", home.replica_id, load(0.3), 1.0)
        tell(fleet, "interactive", other, load(), 1.0)
        again = placed(fleet, longer, 1.0)
        assert (again.replica_id, again.cached_tokens) == (home.replica_id, 640)
        tell(fleet, "interactive", home.replica_id, load(0.9), 1.1)
        assert placed(fleet, longer, 1.1).replica_id == other

    def test_a_replica_that_came_back_has_nothing_cached(self) -> None:
        fleet = a_fleet(fleet_config())
        one = demand(prompt_tokens=640, prefix=prefix_hashes([7] * 640))
        fleet.sent(1, one, placed(fleet, one), 0.0)
        fleet.lose("interactive", "interactive-0")
        tell(fleet, "interactive", "interactive-0", load(), 1.0)
        assert placed(fleet, one, 1.0).cached_tokens == 0


class TestRoom:
    """Reservations, floors, ceilings."""

    @staticmethod
    def fleet(config: SluiceConfig, **sequences: int) -> Fleet:
        fleet = a_fleet(config, interactive=1)
        running = sum(sequences.values())
        tell(fleet, "interactive", "interactive-0", load(running=running), **sequences)
        return fleet

    @pytest.mark.parametrize(("batch", "fits"), [(10, True), (13, False)])
    def test_what_is_reserved_for_a_class_is_left_free_by_others(self, batch: int, fits: bool) -> None:
        config = fleet_config(pools__interactive__reserve={"interactive": 0.25})
        choice = self.fleet(config, batch=batch).choose(demand("batch", pools=("interactive",)), 0.0)
        assert isinstance(choice, Placement) is fits

    def test_a_reservation_that_is_used_is_not_kept_twice(self) -> None:
        config = fleet_config(pools__interactive__reserve={"interactive": 0.25})
        fleet = self.fleet(config, batch=10, interactive=4)
        assert isinstance(fleet.choose(demand("batch", pools=("interactive",)), 0.0), Placement)

    def test_those_with_targets_take_slots_of_those_without_but_for_their_floor(self) -> None:
        config = fleet_config(pools__interactive__reserve={"batch": 0.25})
        one = demand(pools=("interactive",))
        assert isinstance(self.fleet(config, interactive=8, batch=8).choose(one, 0.0), Placement)
        assert self.fleet(config, interactive=12, batch=4).choose(one, 0.0) == NoRoom(is_down=False)
        assert self.fleet(config, interactive=12).choose(one, 0.0) == NoRoom(is_down=False)

    def test_a_class_stays_below_its_ceiling(self) -> None:
        config = fleet_config(classes__interactive__dials={"preset": "latency"})
        one = demand(pools=("interactive",))
        assert isinstance(self.fleet(config, interactive=7).choose(one, 0.0), Placement)
        assert self.fleet(config, interactive=8).choose(one, 0.0) == NoRoom(is_down=False)

    @pytest.mark.parametrize(("batch", "fits"), [(7, True), (8, False)])
    def test_no_replica_gets_more_than_serve_lets_it_have(self, batch: int, fits: bool) -> None:
        fleet = self.fleet(fleet_config(pools__interactive__max_ongoing_requests=8), batch=batch)
        assert isinstance(fleet.choose(demand("batch", pools=("interactive",)), 0.0), Placement) is fits
        assert isinstance(fleet.choose(demand(pools=("interactive",)), 0.0), Placement) is fits

    def test_where_those_with_targets_wait_long_only_floors_are_open_to_those_without(self) -> None:
        fleet = a_fleet(fleet_config(pools__batch__reserve={"batch": 0.125}), batch=1)
        tell(fleet, "batch", "batch-0", load(0.6, running=1), batch=1)
        batch = demand("batch", pools=("batch",))
        assert placed(fleet, batch, 0.0).pool == "batch"
        placed(fleet, demand(pools=("batch",)), 0.0)
        assert placed(fleet, batch, 0.1).pool == "batch"
        tell(fleet, "batch", "batch-0", load(0.6, running=2), 0.2, batch=2)
        assert isinstance(fleet.choose(batch, 0.2), NoRoom)
        # Nobody has waited for a while.
        assert placed(fleet, batch, 1.0).pool == "batch"

    def test_an_empty_replica_takes_anything(self) -> None:
        huge = demand("batch", sequences=40, prompt_tokens=200_000, pools=("interactive",))
        assert isinstance(self.fleet(fleet_config()).choose(huge, 0.0), Placement)

    def test_requests_without_a_target_wait_for_kv_room_outside_the_engine(self) -> None:
        fleet = a_fleet(fleet_config(), interactive=1)
        one = demand("batch", prompt_tokens=600, pools=("interactive",))
        tell(fleet, "interactive", "interactive-0", load(running=2, kv_free_tokens=500), batch=2)
        assert fleet.choose(one, 0.0) == NoRoom(is_down=False)
        tell(fleet, "interactive", "interactive-0", load(running=2, kv_free_tokens=700), batch=2)
        assert isinstance(fleet.choose(one, 0.0), Placement)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [([1] * 200, [1] * 200, 3), ([1] * 200, [1] * 100, 1), ([1] * 200, [2] + [1] * 199, 0), ([1] * 63, [1] * 63, 0)],
)
def test_prefixes_are_told_by_their_tokens(one: list[int], other: list[int], alike: int) -> None:
    pairs: Any = zip(prefix_hashes(one), prefix_hashes(other), strict=False)
    assert sum(mine == theirs for mine, theirs in pairs) == alike
    assert len(prefix_hashes(one)) == len(one) // PREFIX_TOKENS
