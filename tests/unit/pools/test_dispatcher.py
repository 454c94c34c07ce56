"""Waiting for admission, on a clock of the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from app.errors import HoldExpired, PoolUnavailable, QuotaExceeded, RequestError, Saturated
from app.pools.dispatcher import Dispatcher, refusal
from app.routing.admission import Refuse
from app.telemetry.timeline import read_clock
from app.types import EngineLoad, ReplicaState
from tests.support.fakes import FakePool
from tests.support.fleet import demand, fleet_config, load


class Room:
    """A dispatcher over two pools whose states the test tells."""

    def __init__(self) -> None:
        self.now = 100.0
        self.config = fleet_config(classes__batch__dials={"hold_ms": 20_000})
        pools = {name: FakePool(name) for name in ("interactive", "batch")}
        self.dispatcher = Dispatcher(self.config, pools, lambda: self.now)
        self.tell(load())

    def tell(self, engine: EngineLoad, **sequences: int) -> None:
        for pool in ("interactive", "batch"):
            self.dispatcher.learn(pool, ReplicaState(f"{pool}-1", self.now, read_clock(), sequences, engine))

    def fill(self) -> None:
        self.tell(load(running=17), batch=17)


@pytest_asyncio.fixture
async def room() -> AsyncIterator[Room]:
    yield Room()


async def test_a_request_that_fits_does_not_wait(room: Room) -> None:
    ticket = await room.dispatcher.admit(demand(received=room.now))
    assert ticket.placement.replica_id == "interactive-1"
    ticket.first_token()
    ticket.close()
    ticket.close()


async def test_a_held_request_goes_on_when_a_state_shows_room(room: Room) -> None:
    room.fill()
    waiting = asyncio.ensure_future(room.dispatcher.admit(demand("batch", received=room.now)))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    room.now += 1
    room.tell(load())
    ticket = await asyncio.wait_for(waiting, 5)
    assert ticket.placement.pool == "batch"
    assert room.dispatcher.admission.held == 0


async def test_a_held_request_is_given_up_when_its_window_ends(room: Room) -> None:
    room.fill()
    waiting = asyncio.ensure_future(room.dispatcher.admit(demand("batch", received=room.now)))
    await asyncio.sleep(0)
    room.now += 21
    with pytest.raises(HoldExpired) as caught:
        await asyncio.wait_for(waiting, 5)
    assert caught.value.outcome == "evicted"


async def test_a_client_that_leaves_while_held_leaves_nothing(room: Room) -> None:
    room.fill()
    waiting = asyncio.ensure_future(room.dispatcher.admit(demand("batch", received=room.now)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert room.dispatcher.admission.held == 0


async def test_a_client_that_leaves_in_the_moment_of_admission_leaves_nothing(room: Room) -> None:
    room.fill()
    waiting = asyncio.ensure_future(room.dispatcher.admit(demand("batch", received=room.now)))
    await asyncio.sleep(0)
    room.now += 1
    room.tell(load())
    room.dispatcher._look()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not room.dispatcher.admission._sent
    assert not any(replica.sent for replica in room.dispatcher.fleet.replicas())


async def test_a_lost_replica_is_not_chosen_again(room: Room) -> None:
    ticket = await room.dispatcher.admit(demand(received=room.now))
    ticket.lost()
    ticket.close()
    assert (await room.dispatcher.admit(demand(received=room.now))).placement.pool == "batch"


async def test_a_replica_that_says_its_engine_is_dead_is_lost_until_it_says_otherwise(room: Room) -> None:
    room.dispatcher.learn("interactive", ReplicaState("interactive-1", room.now, read_clock(), {}, None, is_dead=True))
    assert room.dispatcher.fleet.answering("interactive") == 0
    room.tell(load())
    assert room.dispatcher.fleet.answering("interactive") == 1


@pytest.mark.parametrize(
    ("refuse", "kind", "words"),
    [
        (Refuse("predicted_late", 3.0, 2.5, ("standard", "batch")), Saturated, "2500 ms.*`standard` or `batch`"),
        (Refuse("too_many_held", 3.0), Saturated, "no room for requests of class `interactive`"),
        (Refuse("hold_expired", 3.0), HoldExpired, "while this one could wait"),
        (Refuse("own_backlog", 3.0), QuotaExceeded, "your own requests"),
        (Refuse("class_full", 3.0), QuotaExceeded, "as many requests as it may have"),
        (Refuse("pool_down", 3.0), PoolUnavailable, "no replica that answers"),
    ],
)
def test_a_refusal_says_why_and_what_else_there_is(refuse: Refuse, kind: type[RequestError], words: str) -> None:
    error = refusal(fleet_config(), demand(), refuse)
    assert type(error) is kind
    assert error.retry_after is not None
    assert error.retry_after >= 3.0
    with pytest.raises(kind, match=words):
        raise error
    details = error.body()["error"]["details"]
    assert details["reason"] == refuse.reason
    assert [one["class"] for one in details["accepted_instead"]] == list(refuse.instead)
    if refuse.predicted_ttft_s is not None:
        assert details["predicted_ttft_ms"] == 2500
        assert details["ttft_target_ms"] == 1000


async def test_a_held_request_knows_whose_end_let_it_go(room: Room) -> None:
    first = await room.dispatcher.admit(demand("batch", received=room.now), "first")
    assert first.waited_for is None
    room.fill()
    waiting = asyncio.ensure_future(room.dispatcher.admit(demand("batch", received=room.now), "second"))
    await asyncio.sleep(0)
    room.now += 1
    first.close()
    room.tell(load())
    ticket = await asyncio.wait_for(waiting, 5)
    assert ticket.waited_for == "first"
    ticket.close()
