"""Which requests are dispatched at once, which are held for a moment, which are refused. Pure.

A request with a TTFT target is dispatched if its first token is predicted to come within a share of the target, which
is smaller for less important classes, so that those are refused first. It is refused at once if not: holding it would
not make it sooner, as engines serve by deadline anyway. A request is held while nothing that may serve it has room;
those that are held are dispatched by deadline, and among one class's by fair queueing between keys. It is refused when
its class's hold window or its deadline is over.

Fairness: each key of a class has a clock, which runs ahead of the class's by the tokens of what is dispatched for it,
divided by its weight (start-time fair queueing: Goyal, Vin, Cheng 1996). While others of the class are active, a key
that has more than its share of what waits for a first token has little of it in engines at a time, so that others find
them nearly free: the rest is held. Engines serve what it sent after the others'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from app.config import SluiceConfig
from app.routing.placement import Fleet, NoRoom, Placement
from app.routing.replicas import Demand

# A key may have prefill work on its way that takes this share of the TTFT target, whatever others have.
_QUANTUM_SHARE = 0.1
# Where others' work takes no more than this share of the target, it is not for them that a first token is late, and
# refusing would leave capacity unused.
_IDLE_SHARE = 0.1
# How much later than those of others the deadlines of a key's requests can be made, in times of its target, and how
# many more requests than others it has on its way where they are made later by half of that.
_MOST_LATER = 3.0
_HALF_LATER = 8
# A key floods its class while it has more than its share in hand, and so many more requests than another.
_FLOOD = 8
# A key counts as one of those that share a class for so long after its last request.
_ACTIVE_S = 60.0
# Ends of requests that tell how fast there is room.
_ENDS = 64
_LEAST_RETRY_S = 1.0
_MOST_RETRY_S = 120.0
# A hold that would end within this time is over.
_SOON_S = 1e-3

Reason = Literal[
    "predicted_late",
    "others_late",
    "no_room",
    "hold_expired",
    "too_many_held",
    "own_backlog",
    "class_full",
    "pool_down",
]


@dataclass(frozen=True, slots=True)
class Admit:
    """Dispatch it there. `later_s`: how much later than its own the deadline is that engines should go by."""

    placement: Placement
    later_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refuse:
    """Do not serve it. `predicted_ttft_s`: None where unknown; `retry_after_s`: when it could be served; `instead`:
    classes that would take it now."""

    reason: Reason
    retry_after_s: float
    predicted_ttft_s: float | None = None
    instead: tuple[str, ...] = ()


Decision = Admit | Refuse


@dataclass(slots=True)
class _Held:
    """A held request. `is_down`: because nothing answers; `is_ahead_of_others`: because its key has its share."""

    number: int
    demand: Demand
    until: float
    is_down: bool = False
    is_ahead_of_others: bool = False


@dataclass(slots=True)
class _Share:
    """What a class knows of a key.

    `clock`: its virtual time. `waiting`: prompt tokens that were dispatched and have no first token yet; `running`:
    requests that were dispatched and have not ended; `held_tokens`: prompt tokens that are held; `seen`: when its last
    request came.
    """

    weight: float = 1.0
    clock: float = 0.0
    waiting: int = 0
    running: int = 0
    held: int = 0
    held_tokens: int = 0
    seen: float = -math.inf

    @property
    def in_hand(self) -> int:
        """Requests, dispatched or held."""
        return self.running + self.held


@dataclass(slots=True)
class _Class:
    """What is kept of a class. `clock`: its virtual time; `running`: requests dispatched; `ends`: when some ended."""

    held: dict[int, _Held] = field(default_factory=dict)
    keys: dict[str, _Share] = field(default_factory=dict)
    clock: float = 0.0
    running: int = 0
    ends: list[float] = field(default_factory=list)


class Admission:
    """Decides about the requests of one ingress."""

    def __init__(self, config: SluiceConfig, fleet: Fleet) -> None:
        self._fleet = fleet
        self._classes: dict[str, _Class] = {}
        self._sent: dict[int, Demand] = {}
        self._waiting: dict[int, Demand] = {}
        self.configure(config)

    def configure(self, config: SluiceConfig) -> None:
        """Go by another configuration, with the same pools, from now on."""
        self._config = config
        self._dials = {name: entry.effective_dials for name, entry in config.classes.items()}
        self._classes = {name: self._classes.get(name, _Class()) for name in config.classes}

    @property
    def held(self) -> int:
        """Requests that are held."""
        return sum(self.held_by_class().values())

    def held_by_class(self) -> dict[str, int]:
        """Requests that are held, by class."""
        return {name: len(entry.held) for name, entry in self._classes.items()}

    def set_weight(self, service_class: str, key: str, weight: float) -> None:
        """A key's part of its class, next to others'."""
        self._share(service_class, key).weight = weight

    def arrive(self, number: int, demand: Demand, now: float) -> Decision | None:
        """A request came. None: it is held; `settle` tells what becomes of it."""
        if not self._config.routing.admission:
            anywhere = Placement(demand.pools[0], "", None, 0, False)
            return self._carry_out(_Held(number, demand, now), Admit(anywhere), now)
        entry = self._classes[demand.service_class]
        most = self._config.classes[demand.service_class].limits.max_concurrent
        if most is not None and entry.running + len(entry.held) >= most:
            return self._refuse("class_full", demand, now)
        share = self._share(demand.service_class, demand.key)
        share.seen = now
        hold_s = min(self._dials[demand.service_class].hold_s, demand.deadline - now)
        held = _Held(number, demand, now + hold_s)
        # Those of the same class that wait for room go first, whoever's they are; fairness is settled among them. Those
        # that wait for their key's turn only go before others of that key.
        ahead = [one for one in entry.held.values() if one.demand.pools == demand.pools and not one.is_down]
        held.is_ahead_of_others = any(one.demand.key == demand.key for one in ahead if one.is_ahead_of_others)
        if all(one.is_ahead_of_others for one in ahead) and not held.is_ahead_of_others:
            decision = self._decide(held, now)
            if decision is not None:
                return self._carry_out(held, decision, now)
        limit = self._config.classes[demand.service_class].limits.max_held
        fair = limit * share.weight / self._active_weight(entry, demand.key, now)
        has_its_share = bool(demand.key) and share.held >= fair
        if has_its_share or len(entry.held) >= limit:
            return self._refuse("own_backlog" if has_its_share else "too_many_held", demand, now)
        if hold_s <= _SOON_S:
            return self._refuse("pool_down" if held.is_down else "no_room", demand, now)
        entry.held[number] = held
        share.held += 1
        share.held_tokens += demand.prompt_tokens
        return None

    def settle(self, now: float) -> list[tuple[int, Decision]]:
        """What has become of requests that were held."""
        settled: list[tuple[int, Decision]] = []
        for entry in self._classes.values():
            for held in [held for held in entry.held.values() if held.until <= now]:
                self._release(entry, held)
                reason: Reason = "hold_expired"
                if held.is_down or held.is_ahead_of_others:
                    reason = "pool_down" if held.is_down else "own_backlog"
                settled.append((held.number, self._refuse(reason, held.demand, now)))
        blocked: set[tuple[str, tuple[str, ...]]] = set()
        had_their_turn: set[tuple[str, tuple[str, ...], str]] = set()
        for held in self._in_turn():
            demand = held.demand
            # Whoever has no target takes what room there is in order; a smaller one does not slip past.
            direction = (demand.service_class, demand.pools)
            if (demand.ttft_s is None and direction in blocked) or (*direction, demand.key) in had_their_turn:
                continue
            decision = self._decide(held, now)
            if decision is None and held.is_ahead_of_others:
                had_their_turn.add((*direction, demand.key))
            elif decision is None:
                blocked.add(direction)
            if decision is None:
                continue
            self._release(self._classes[demand.service_class], held)
            settled.append((held.number, self._carry_out(held, decision, now)))
        return settled

    def next_due(self) -> float:
        """When the next hold ends; infinite where nothing is held."""
        return min((held.until for entry in self._classes.values() for held in entry.held.values()), default=math.inf)

    def withdraw(self, number: int) -> None:
        """A held request's client left."""
        for entry in self._classes.values():
            held = entry.held.get(number)
            if held is not None:
                self._release(entry, held)

    def first_token(self, number: int) -> None:
        """A dispatched request has had its first token."""
        demand = self._waiting.pop(number, None)
        if demand is not None:
            self._share(demand.service_class, demand.key).waiting -= demand.prompt_tokens

    def ended(self, number: int, now: float) -> None:
        """A dispatched request ended."""
        self.first_token(number)
        demand = self._sent.pop(number, None)
        if demand is None:
            return
        entry = self._classes.get(demand.service_class)
        if entry is not None:
            entry.running -= 1
            self._share(demand.service_class, demand.key).running -= 1
            entry.ends = [*entry.ends[-_ENDS + 1 :], now]

    # Decisions.

    def _decide(self, held: _Held, now: float) -> Decision | None:
        later_s = self._later(held.demand, now)
        demand = replace(held.demand, later_s=later_s, gives_way=self._gives_way(held.demand, now))
        choice = self._fleet.choose(demand, now)
        if isinstance(choice, NoRoom):
            held.is_down, held.is_ahead_of_others = choice.is_down, demand.gives_way and not choice.is_down
            return None
        held.is_down = False
        if demand.ttft_s is None or choice.prediction is None:
            return Admit(choice, later_s)
        predicted = choice.prediction.ttft_s
        is_contended = choice.prediction.wait_s > _IDLE_SHARE * demand.ttft_s
        # What engines give in the last moment comes in time.
        share = 1.0 if choice.prediction.takes_room else self._config.admit_share(demand.service_class)
        if is_contended and predicted > share * demand.ttft_s:
            late = predicted - share * demand.ttft_s
            return self._refuse("predicted_late", demand, now, predicted, late)
        if choice.prediction.delays_others:
            return self._refuse("others_late", demand, now, predicted)
        held.is_ahead_of_others = self._must_wait_for_others(demand, choice, now)
        if held.is_ahead_of_others:
            return None
        return Admit(choice, later_s)

    def _carry_out(self, held: _Held, decision: Decision, now: float) -> Decision:
        if isinstance(decision, Admit):
            demand = replace(held.demand, later_s=decision.later_s)
            self._fleet.sent(held.number, demand, decision.placement, now)
            self._sent[held.number] = self._waiting[held.number] = demand
            entry, share = self._classes[demand.service_class], self._share(demand.service_class, demand.key)
            share.waiting += demand.prompt_tokens
            entry.running += 1
            share.running += 1
            # The class's clock is at the start of what was dispatched last.
            entry.clock = self._start(entry, share)
            share.clock = entry.clock + demand.tokens / share.weight
        return decision

    def _refuse(
        self, reason: Reason, demand: Demand, now: float, predicted: float | None = None, late_s: float = 0.0
    ) -> Refuse:
        entry = self._classes[demand.service_class]
        retry = late_s
        if reason in ("no_room", "hold_expired", "too_many_held", "own_backlog", "class_full") and len(entry.ends) > 1:
            # Those that are held go first, at the rate at which there is room.
            span = max(now - entry.ends[0], 1e-3)
            retry = (len(entry.held) + 1) * span / len(entry.ends)
        retry = min(_MOST_RETRY_S, max(_LEAST_RETRY_S, retry))
        return Refuse(reason, retry, predicted, self._instead(demand, now))

    def _instead(self, demand: Demand, now: float) -> tuple[str, ...]:
        """Less important classes that would take the request now."""
        names = list(self._config.classes)
        found = []
        for name in names[names.index(demand.service_class) + 1 :]:
            ttft_s = self._config.classes[name].targets.ttft_s(demand.prompt_tokens)
            other = Demand(name, demand.prompt_tokens, now, ttft_s, pools=demand.pools, sequences=demand.sequences)
            choice = self._fleet.choose(other, now)
            if isinstance(choice, NoRoom):
                if ttft_s is None and len(self._classes[name].held) < self._config.classes[name].limits.max_held:
                    found.append(name)
            elif (
                ttft_s is None
                or choice.prediction is None
                or (
                    choice.prediction.ttft_s <= self._config.admit_share(name) * ttft_s
                    and not choice.prediction.delays_others
                )
            ):
                found.append(name)
        return tuple(found)

    # Fairness.

    def _share(self, service_class: str, key: str) -> _Share:
        entry = self._classes.get(service_class)
        return _Share() if entry is None else entry.keys.setdefault(key, _Share(clock=entry.clock))

    def _start(self, entry: _Class, share: _Share) -> float:
        return max(entry.clock, share.clock)

    def _active(self, entry: _Class, key: str, now: float) -> list[_Share]:
        """What is known of the other keys that share the class now."""
        return [
            share
            for name, share in entry.keys.items()
            if name != key and (share.waiting or share.held or now - share.seen <= _ACTIVE_S)
        ]

    def _active_weight(self, entry: _Class, key: str, now: float) -> float:
        """Weights of the keys that share the class now, the given one among them."""
        return entry.keys[key].weight + sum(other.weight for other in self._active(entry, key, now))

    def _later(self, demand: Demand, now: float) -> float:
        """How much later engines should place a request of a key that has more on its way than others."""
        entry = self._classes[demand.service_class]
        others = self._active(entry, demand.key, now)
        if demand.ttft_s is None or not others:
            return 0.0
        share = self._share(demand.service_class, demand.key)
        beyond = share.waiting / share.weight - min(_wants(other) / other.weight for other in others)
        # In requests like this one.
        requests = max(0.0, beyond) * share.weight / max(1, demand.prompt_tokens)
        # More is always later, if ever less so: two that have too much differ.
        return demand.ttft_s * _MOST_LATER * requests / (requests + _HALF_LATER)

    def _gives_way(self, demand: Demand, now: float) -> bool:
        """Whether a key has so much more than its share in hand that its class's home is left to others."""
        entry = self._classes[demand.service_class]
        others = self._active(entry, demand.key, now)
        if demand.ttft_s is None or not others:
            return False
        share = self._share(demand.service_class, demand.key)
        mine, theirs = share.in_hand / share.weight, [other.in_hand / other.weight for other in others]
        weights = share.weight + sum(other.weight for other in others)
        fair = (share.in_hand + sum(other.in_hand for other in others)) / weights
        return mine > fair and mine - min(theirs) > _FLOOD

    def _must_wait_for_others(self, demand: Demand, choice: Placement, now: float) -> bool:
        """Whether a key that has more than its share of what waits would stand in others' way."""
        if choice.prediction is None or demand.ttft_s is None:
            return False
        if choice.prediction.wait_s <= _QUANTUM_SHARE * demand.ttft_s:
            return False
        entry = self._classes[demand.service_class]
        others = self._active(entry, demand.key, now)
        share = self._share(demand.service_class, demand.key)
        mine, theirs = (_wants(share), sum(map(_wants, others)))
        weights = share.weight + sum(other.weight for other in others)
        return bool(others) and mine > share.weight / weights * (mine + theirs)

    def _in_turn(self) -> list[_Held]:
        """Held requests in the order in which they are looked at: between keys by their clocks, else by deadline."""
        turns: list[tuple[float, float, int, _Held]] = []
        for entry in self._classes.values():
            by_key: dict[str, list[_Held]] = {}
            for held in entry.held.values():
                by_key.setdefault(held.demand.key, []).append(held)
            if len(by_key) < 2:
                turns += [(held.demand.order, 0.0, held.number, held) for held in entry.held.values()]
                continue
            queue: list[tuple[float, float, _Held]] = []
            for key, helds in by_key.items():
                share = entry.keys[key]
                clock = self._start(entry, share)
                for held in sorted(helds, key=lambda held: held.demand.order):
                    queue.append((clock, held.demand.order, held))
                    clock += held.demand.tokens / share.weight
            queue.sort(key=lambda turn: turn[:2])
            # The class's places among others' are those of its deadlines; who takes which, the clocks tell.
            orders = sorted(held.demand.order for held in entry.held.values())
            turns += [(order, clock, held.number, held) for order, (clock, _, held) in zip(orders, queue, strict=True)]
        turns.sort(key=lambda turn: turn[:3])
        return [turn[3] for turn in turns]

    def _release(self, entry: _Class, held: _Held) -> None:
        del entry.held[held.number]
        share = entry.keys[held.demand.key]
        share.held -= 1
        share.held_tokens -= held.demand.prompt_tokens


def _wants(share: _Share) -> int:
    """Prompt tokens of a key that wait for a first token, wherever."""
    return share.waiting + share.held_tokens
