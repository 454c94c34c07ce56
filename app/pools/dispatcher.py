"""Waits for what admission decides, and keeps it told: the live side of app.routing. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from app.config import SluiceConfig
from app.errors import HoldExpired, PoolUnavailable, QuotaExceeded, RequestError, Saturated
from app.routing.admission import Admission, Admit, Decision, Refuse
from app.routing.keys import Caller
from app.routing.placement import Fleet, Placement
from app.routing.replicas import Demand
from app.telemetry.timeline import clock_shift, read_clock
from app.types import JsonObject, ReplicaState

logger = logging.getLogger("ray.serve.sluice.dispatcher")

# Held requests are looked at again when a state says something new, at most so often.
_LOOK_PERIOD_S = 0.01
# And at least so often: predictions change with time, too.
_LOOK_AGAIN_S = 0.1


class Watched(Protocol):
    """A pool's client, as far as it is needed here."""

    def watch(self, watcher: Dispatcher) -> None:
        """Tell of the pool's replicas."""


class Ticket:
    """A request that has been admitted. Must be closed when the request has ended."""

    def __init__(self, dispatcher: Dispatcher, number: int, demand: Demand, admit: Admit) -> None:
        self._dispatcher = dispatcher
        self._number = number
        self.demand = demand
        self.placement: Placement = admit.placement
        self.later_s = admit.later_s
        # Of a request that was held: whose end let it go, as its `admit` was told; None where that is not known.
        self.waited_for: object | None = None

    def first_token(self) -> None:
        """Its first token has been sent."""
        self._dispatcher._first_token(self._number)

    def lost(self) -> None:
        """The replica stopped answering."""
        self._dispatcher.lose(self.placement.pool, self.placement.replica_id)

    def close(self) -> None:
        """The request has ended, however; harmless when it has before."""
        self._dispatcher._ended(self._number)


class Dispatcher:
    """Admits requests of one ingress."""

    def __init__(
        self,
        config: SluiceConfig,
        pools: Mapping[str, Watched],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._reading = read_clock()
        self.fleet = Fleet(config)
        self.admission = Admission(config, self.fleet)
        self._numbers = itertools.count(1)
        self._held: dict[int, asyncio.Future[Decision]] = {}
        # What those in hand are called, and what ended last in each pool, and when.
        self._names: dict[int, tuple[str, object]] = {}
        self._last_ended: dict[str, tuple[object, float]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._looked_at = -math.inf
        for client in pools.values():
            client.watch(self)

    def configure(self, config: SluiceConfig) -> None:
        """Go by another configuration, with the same pools, from now on."""
        self._config = config
        self.fleet.configure(config)
        self.admission.configure(config)
        self._look_soon()

    def set_weight(self, service_class: str, caller: Caller) -> None:
        """A caller's part of a class, next to others'."""
        self.admission.set_weight(service_class, caller.name, caller.weight)

    async def admit(self, demand: Demand, name: object | None = None) -> Ticket:
        """Wait until the request may be dispatched. `name`: what it is called to those who wait for its end.

        Raises:
            RequestError: it may not.
        """
        number, now = next(self._numbers), self._clock()
        decision = self.admission.arrive(number, demand, now)
        was_held = decision is None
        if decision is None:
            decision = await self._until_settled(number)
        if isinstance(decision, Refuse):
            raise refusal(self._config, demand, decision)
        ticket = Ticket(self, number, demand, decision)
        pool = decision.placement.pool
        if was_held:
            last, ended = self._last_ended.get(pool, (None, -math.inf))
            ticket.waited_for = last if ended >= now else None
        if name is not None:
            self._names[number] = (pool, name)
        return ticket

    async def _until_settled(self, number: int) -> Decision:
        future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._held[number] = future
        self._look_again()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                # Admitted in the same moment.
                self._ended(number)
            self.admission.withdraw(number)
            raise
        finally:
            del self._held[number]

    # What pools' clients tell.

    def set_replicas(self, pool: str, replica_ids: frozenset[str]) -> None:
        """A pool has these replicas now."""
        self.fleet.set_replicas(pool, replica_ids)
        self._look_soon()

    def learn(self, pool: str, state: ReplicaState) -> None:
        """A replica told its state."""
        if state.is_dead:
            self.fleet.lose(pool, state.replica_id)
        else:
            self.fleet.learn(pool, state, state.taken + clock_shift(state.clock, self._reading))
        self._look_soon()

    def lose(self, pool: str, replica_id: str) -> None:
        """A replica stopped answering."""
        self.fleet.lose(pool, replica_id)
        self._look_soon()

    # What becomes of tickets.

    def _first_token(self, number: int) -> None:
        self.fleet.first_token(number, self._clock())
        self.admission.first_token(number)

    def _ended(self, number: int) -> None:
        pool, name = self._names.pop(number, ("", None))
        if name is not None:
            self._last_ended[pool] = (name, self._clock())
        self.fleet.ended(number)
        self.admission.ended(number, self._clock())
        self._look_soon()

    # Looks at what is held.

    def _look_soon(self) -> None:
        if self._held:
            self._look_at(self._looked_at + _LOOK_PERIOD_S)

    def _look_again(self) -> None:
        if self._held:
            self._look_at(min(self.admission.next_due(), self._clock() + _LOOK_AGAIN_S))

    def _look_at(self, when: float) -> None:
        if self._timer is not None:
            if when >= self._timer_at:
                return
            self._timer.cancel()
        self._timer_at = when
        self._timer = asyncio.get_running_loop().call_later(max(0.0, when - self._clock()), self._look)

    def _look(self) -> None:
        self._timer = None
        self._looked_at = self._clock()
        for number, decision in self.admission.settle(self._looked_at):
            future = self._held.get(number)
            if future is not None and not future.done():
                future.set_result(decision)
            elif isinstance(decision, Admit):
                self._ended(number)
        self._look_again()


def refusal(config: SluiceConfig, demand: Demand, refuse: Refuse) -> RequestError:
    """What the client is told."""
    name = demand.service_class
    tiers = {other: config.classes[other].service_tier for other in refuse.instead}
    details: JsonObject = {"reason": refuse.reason, "class": name, "accepted_instead": []}
    if demand.ttft_s is not None:
        details["ttft_target_ms"] = round(demand.ttft_s * 1000)
    if refuse.predicted_ttft_s is not None:
        details["predicted_ttft_ms"] = round(refuse.predicted_ttft_s * 1000)
    details["accepted_instead"] = [{"class": other, "service_tier": tier} for other, tier in tiers.items()]
    other_ways = f" As class {' or '.join(f'`{other}`' for other in tiers)} it would be accepted now." if tiers else ""
    if refuse.reason == "predicted_late":
        text = (
            f"The first token would come {details.get('predicted_ttft_ms')} ms after the request, too late for class "
            f"`{name}`, whose target is {details.get('ttft_target_ms')} ms for this prompt."
        )
        return Saturated(text + other_ways, retry_after=refuse.retry_after_s, details=details)
    if refuse.reason == "others_late":
        text = "Requests that were accepted before would miss their targets if this one came between."
        return Saturated(text + other_ways, retry_after=refuse.retry_after_s, details=details)
    if refuse.reason == "class_full":
        most = config.classes[name].limits.max_concurrent
        text = f"Class `{name}` has as many requests as it may have at once, {most}."
        return QuotaExceeded(text + other_ways, retry_after=refuse.retry_after_s, details=details)
    if refuse.reason == "own_backlog":
        text = f"Too many of your own requests of class `{name}` wait for room."
        return QuotaExceeded(text + other_ways, retry_after=refuse.retry_after_s, details=details)
    if refuse.reason == "pool_down":
        pool = demand.pools[0]
        text = f"The pool `{pool}` has no replica that answers, nor has another that may help out."
        return PoolUnavailable(text, retry_after=max(5.0, refuse.retry_after_s), details=details)
    kind = HoldExpired if refuse.reason == "hold_expired" else Saturated
    text = f"There is no room for requests of class `{name}` at present"
    text += ", nor was there while this one could wait." if kind is HoldExpired else "."
    return kind(text + other_ways, retry_after=refuse.retry_after_s, details=details)
