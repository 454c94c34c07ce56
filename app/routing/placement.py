"""Which replica a request goes to: its home pool's, or another's that has room. Pure.

Requests with a TTFT target go home while their first token is predicted to come soon enough there, else to the replica
where it comes soonest. Requests without one go where the least is left to do, with a preference for their home. Both
count the part of the prompt that a replica has in its prefix cache, so conversations stick while that pays.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from app.config import SluiceConfig
from app.routing.replicas import Demand, Overhead, Prediction, Replica
from app.types import ReplicaState

# A prompt's beginning is told by hashes of so many tokens each, and at most so many of them.
PREFIX_TOKENS = 64
_MOST_HASHES = 512
_MOST_PREFIXES = 65536
# Another pool helps out when a first token at home is predicted to take more than this share of its target, and while
# it does, until it takes less than the lower one.
_SPILL_SHARE = 0.5
_BACK_SHARE = 0.3
# How much sooner another pool's first token must be, for those who do not spill yet.
_BETTER = 0.8
# How much more than another pool's replicas the home pool's may have to do before requests without a target leave it.
_HOME_BIAS = 1.2
# Sequences without a target that may wait in an engine, so that it does not run dry between two states.
_ENGINE_QUEUE_SHARE = 0.05
# Where requests with a target would wait for more than this share of it, those without one are kept out for a while,
# but for what is reserved for them.
_PRESSED_SHARE = 0.4
_PRESSED_S = 0.5
# Who gives way may still have a home of whose slots others have no more than this share.
_UNUSED_SHARE = 0.05
# What fills a replica weighs as much as this share of the TTFT target.
_FILL_WEIGHT = 0.25


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. `prediction`: None where nothing is known; `spilled`: outside its home pool."""

    pool: str
    replica_id: str
    prediction: Prediction | None
    cached_tokens: int
    spilled: bool


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Nothing that may serve the request has room. `is_down`: because none of it answers."""

    is_down: bool


@dataclass(slots=True)
class _Option:
    replica: Replica
    rank: int
    cached: int
    prediction: Prediction | None
    score: float


def prefix_hashes(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Hashes of a prompt's beginning: the i-th stands for its first (i + 1) * `PREFIX_TOKENS` tokens."""
    hashes: list[int] = []
    chain = blake2b(digest_size=8)
    for begin in range(0, min(len(token_ids) // PREFIX_TOKENS, _MOST_HASHES) * PREFIX_TOKENS, PREFIX_TOKENS):
        chain.update(array("q", token_ids[begin : begin + PREFIX_TOKENS]).tobytes())
        hashes.append(int.from_bytes(chain.copy().digest(), "big"))
    return tuple(hashes)


class _Prefixes:
    """Which replica computed which beginnings of prompts last; the oldest are forgotten."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[tuple[int, str], None] = OrderedDict()

    def add(self, prefix: Collection[int], replica_id: str) -> None:
        for one in prefix:
            self._replicas[one, replica_id] = None
            self._replicas.move_to_end((one, replica_id))
        while len(self._replicas) > _MOST_PREFIXES:
            self._replicas.popitem(last=False)

    def cached_tokens(self, prefix: Sequence[int], replica_id: str) -> int:
        count = sum(1 for _ in itertools.takewhile(lambda one: (one, replica_id) in self._replicas, prefix))
        return count * PREFIX_TOKENS

    def forget(self, replica_id: str) -> None:
        for key in [key for key in self._replicas if key[1] == replica_id]:
            del self._replicas[key]


class Fleet:
    """All pools' replicas, and the choice among them."""

    def __init__(self, config: SluiceConfig) -> None:
        self._replicas: dict[str, dict[str, Replica]] = {pool: {} for pool in config.pools}
        self._overheads = {pool: Overhead() for pool in config.pools}
        self._places: dict[int, Replica] = {}
        self._prefixes = _Prefixes()
        self._spilling: set[tuple[str, str]] = set()
        self.configure(config)

    def configure(self, config: SluiceConfig) -> None:
        """Go by another configuration, with the same pools, from now on."""
        self._config = config
        self._dials = {name: entry.effective_dials for name, entry in config.classes.items()}
        self._loose = frozenset(name for name, entry in config.classes.items() if entry.targets.ttft_ms is None)
        for replica in self.replicas():
            replica.loose = self._loose

    def replicas(self) -> Iterator[Replica]:
        """All of them."""
        for pool in self._replicas.values():
            yield from pool.values()

    def answering(self, pool: str) -> int:
        """How many of a pool's replicas answer."""
        return sum(1 for replica in self._replicas[pool].values() if not replica.is_lost)

    def answering_by_pool(self) -> dict[str, int]:
        """How many replicas of each pool answer."""
        return {pool: self.answering(pool) for pool in self._replicas}

    def set_replicas(self, pool: str, replica_ids: Collection[str]) -> None:
        """A pool has these replicas now, and no others."""
        known = self._replicas[pool]
        for gone in set(known) - set(replica_ids):
            del known[gone]
            self._prefixes.forget(gone)
        # More than Serve lets a replica have would wait for it where nobody sees them.
        most = self._config.pools[pool].most_ongoing_requests
        slots = max(1, min(self._config.pools[pool].engine.max_num_seqs, int(most / (1 + _ENGINE_QUEUE_SHARE))))
        for replica_id in replica_ids:
            if replica_id not in known:
                known[replica_id] = Replica(replica_id, pool, slots, most, self._overheads[pool], self._loose)

    def learn(self, pool: str, state: ReplicaState, taken: float) -> None:
        """A replica told its state as of `taken`, on this clock."""
        replica = self._replicas[pool].get(state.replica_id)
        if replica is not None and taken >= replica.taken:
            replica.state, replica.taken, replica.is_lost = state, taken, False

    def lose(self, pool: str, replica_id: str) -> None:
        """A replica stopped answering; a state brings it back."""
        replica = self._replicas[pool].get(replica_id)
        if replica is not None:
            replica.is_lost = True
            replica.state = None
            self._prefixes.forget(replica_id)

    def sent(self, number: int, demand: Demand, placement: Placement, now: float) -> None:
        """The request of that number is being dispatched."""
        replica = self._replicas[placement.pool].get(placement.replica_id)
        if replica is None:
            return
        replica.add(number, demand, placement.cached_tokens, placement.prediction, now)
        self._places[number] = replica
        self._prefixes.add(demand.prefix, replica.replica_id)

    def first_token(self, number: int, now: float) -> None:
        """Its first token was sent."""
        replica = self._places.get(number)
        if replica is not None:
            replica.note_first_token(number, now)

    def ended(self, number: int) -> None:
        """It ended, however; harmless when it has before."""
        replica = self._places.pop(number, None)
        if replica is not None:
            replica.remove(number)

    def choose(self, demand: Demand, now: float) -> Placement | NoRoom:
        """Where it should go now."""
        options: list[_Option] = []
        is_down = True
        for rank, pool in enumerate(demand.pools):
            for replica in self._replicas[pool].values():
                if replica.is_lost:
                    continue
                is_down = False
                if self._is_left_to_others(replica, rank, demand) or not self._has_room(replica, demand, now):
                    continue
                options.append(self._option(replica, rank, demand, now))
        if not options:
            return NoRoom(is_down)
        # What says nothing any more is the last resort.
        options = [option for option in options if not option.replica.is_silent(now)] or options
        best = self._by_target(options, demand, now) if demand.ttft_s is not None else min(options, key=_score)
        pool = best.replica.pool
        return Placement(pool, best.replica.replica_id, best.prediction, best.cached, best.rank > 0)

    def _is_left_to_others(self, replica: Replica, rank: int, demand: Demand) -> bool:
        """Whether a home is kept free of what would lengthen others' steps; with nowhere else to go, none is."""
        if not demand.gives_way or rank > 0 or len(demand.pools) == 1:
            return False
        return replica.others_sequences(demand) > _UNUSED_SHARE * replica.slots

    def _option(self, replica: Replica, rank: int, demand: Demand, now: float) -> _Option:
        cached = 0
        if self._config.pools[replica.pool].engine.enable_prefix_caching:
            cached = min(self._prefixes.cached_tokens(demand.prefix, replica.replica_id), demand.prompt_tokens - 1)
        prediction = replica.predict(demand, cached, now)
        if demand.ttft_s is None:
            score = float(replica.outstanding_tokens() + demand.tokens - cached) * (_HOME_BIAS if rank else 1.0)
        elif prediction is None:
            score = math.inf
        else:
            if prediction.wait_s > _PRESSED_SHARE * demand.ttft_s:
                replica.pressed = now
            fill = sum(replica.sequences().values()) / replica.slots
            score = prediction.ttft_s + demand.ttft_s * (_FILL_WEIGHT * fill + prediction.delays_others)
        return _Option(replica, rank, cached, prediction, score)

    def _by_target(self, options: list[_Option], demand: Demand, now: float) -> _Option:
        assert demand.ttft_s is not None
        home = min((option for option in options if option.rank == 0), key=_score, default=None)
        others = min((option for option in options if option.rank > 0), key=_score, default=None)
        if home is None or others is None:
            return home or others or options[0]
        if home.prediction is None:
            # What answers but has not run enough to tell how fast it is will only ever tell if it gets something.
            return home if others.prediction is None or home.replica.is_known(now) else others
        direction = (demand.service_class, demand.pools[0])
        is_spilling = direction in self._spilling
        share = home.prediction.ttft_s / demand.ttft_s
        if share <= (_BACK_SHARE if is_spilling else _SPILL_SHARE) and not home.prediction.delays_others:
            self._spilling.discard(direction)
            return home
        if others.prediction is None:
            return home
        if others.score < home.score * (1.0 if is_spilling else _BETTER):
            self._spilling.add(direction)
            return others
        return home

    def _has_room(self, replica: Replica, demand: Demand, now: float) -> bool:
        """Whether the class may have more of the replica. A replica that has nothing takes anything."""
        counts = replica.sequences()
        total = sum(counts.values())
        if not total:
            return True
        own, dials = demand.service_class, self._dials[demand.service_class]
        queue = max(1, round(_ENGINE_QUEUE_SHARE * replica.slots)) if demand.ttft_s is None else 0
        if counts[own] + demand.sequences > dials.running_share * replica.slots + queue:
            return False
        kept = self._kept_for_others(replica, own, counts)
        load = replica.state.load if replica.state is not None else None
        if demand.ttft_s is None:
            if now - replica.pressed <= _PRESSED_S and counts[own] >= self._reserved(replica, own):
                return False
            if total + demand.sequences + kept > replica.slots + queue:
                return False
            if load is None:
                return True
            unseen = sum(sent.demand.tokens for sent in replica.unseen())
            return load.waiting <= queue and demand.tokens + unseen <= load.kv_free_tokens
        # Engines take slots from those without a target, but for what is kept for these.
        yielding = sum(
            max(0, count - math.ceil(self._reserved(replica, name)))
            for name, count in counts.items()
            if name in self._loose
        )
        return total - yielding + demand.sequences + kept <= replica.slots and total + demand.sequences <= replica.most

    def _kept_for_others(self, replica: Replica, own: str, counts: Tally[str]) -> int:
        reserve = self._config.pools[replica.pool].reserve
        return math.ceil(
            sum(max(0.0, share * replica.slots - counts[name]) for name, share in reserve.items() if name != own)
        )

    def _reserved(self, replica: Replica, service_class: str) -> float:
        return self._config.pools[replica.pool].reserve.get(service_class, 0.0) * replica.slots


def _score(option: _Option) -> float:
    return option.score
