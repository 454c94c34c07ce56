"""What one ingress knows of the pools' replicas, and what it makes of that: predictions. Pure.

A replica tells its state some twenty times a second while it has work (`ReplicaState`). What this ingress sent since
then is added, so that a burst is not sent on the strength of one old state; what other ingresses sent in that time is
not known here, which bounds how much too much several of them can admit to what they send within a state's age.

Times are seconds on the ingress's monotonic clock, durations in seconds.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from app.types import DUE_EDGES_S, MIN_PREFILL_SHARE, PATIENCE_S, EngineLoad, ReplicaState

# A state older than this tells nothing any more.
STALE_S = 5.0
# From dispatch until a request shows in its replica's state.
_ON_THE_WAY_S = 0.04
_RESIDUALS = 64
# The first ones are slow for reasons of their own.
_LEAST_RESIDUALS = 8
# How finely the time until a deadline is looked at.
_WINDOW_STEPS = 16
# Until outputs of a class have been seen, and where requests don't say how much they want.
_EXPECTED_OUTPUT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request wants. `ttft_s`, `tpot_s`: targets, None for none; `prefix`: hashes of the prompt's beginning, one
    per `PREFIX_TOKENS` tokens; `key`: whose it is, "" for anybody's; `pools`: where it may be served, its home first,
    with those that may only help out after it; `output_tokens`: the most it may generate, all sequences together, None
    where that is left open; `later_s`: how much later than its own its place among others is; `gives_way`: its home is
    left to others while they use it."""

    service_class: str
    prompt_tokens: int
    received: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    output_tokens: int | None = None
    sequences: int = 1
    key: str = ""
    prefix: tuple[int, ...] = ()
    pools: tuple[str, ...] = ()
    later_s: float = 0.0
    gives_way: bool = False

    @property
    def deadline(self) -> float:
        """When its first token is due; infinite without a target."""
        return math.inf if self.ttft_s is None else self.received + self.ttft_s

    @property
    def order(self) -> float:
        """Its place among others: its deadline, or what stands for one, made later by `later_s`."""
        return self.received + (PATIENCE_S if self.ttft_s is None else self.ttft_s) + self.later_s

    @property
    def tokens(self) -> int:
        """Prompt and expected output together."""
        return self.prompt_tokens + (self.output_tokens or _EXPECTED_OUTPUT_TOKENS * self.sequences)


@dataclass(slots=True)
class _Sent:
    """A request that this ingress sent to a replica and that has not ended."""

    demand: Demand
    at: float
    uncached: int
    predicted: float | None  # when its first token should be sent, but for the overhead


@dataclass(frozen=True, slots=True)
class Prediction:
    """When a request's first token would be sent. `ttft_s`: after it was received; `wait_s`: of that, for others' work
    that comes first; `delays_others`: first tokens that were promised and are due later would be late for it;
    `takes_room`: what it lacks of slots and KV cache is taken from others for it when it would else be late."""

    ttft_s: float
    wait_s: float
    delays_others: bool = False
    takes_room: bool = False


class Overhead:
    """What first tokens take beyond what an engine's work explains, in seconds: the median of the last ones."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_RESIDUALS)
        self.seconds = 0.0

    def learn(self, missed: float) -> None:
        """A first token came so much later than an engine's work explains."""
        self._seen.append(missed)
        if len(self._seen) >= _LEAST_RESIDUALS:
            self.seconds = max(0.0, statistics.median(self._seen))


@dataclass(slots=True)
class Replica:
    """One replica. `slots`: sequences that its steps may run; `most`: that it may have; `loose`: classes without a TTFT
    target; `is_lost`: it stopped answering; `pressed`: when a request with a target would last have waited for long
    there."""

    replica_id: str
    pool: str
    slots: int
    most: int
    overhead: Overhead
    loose: frozenset[str] = frozenset()
    state: ReplicaState | None = None
    taken: float = -math.inf
    is_lost: bool = False
    pressed: float = -math.inf
    sent: dict[int, _Sent] = field(default_factory=dict)

    def is_known(self, now: float) -> bool:
        """Whether its state can be relied on."""
        return not self.is_lost and self.state is not None and now - self.taken <= STALE_S

    def add(self, number: int, demand: Demand, cached: int, prediction: Prediction | None, now: float) -> None:
        """A request is being dispatched to it."""
        predicted = None if prediction is None else demand.received + prediction.ttft_s - self.overhead.seconds
        self.sent[number] = _Sent(demand, now, demand.prompt_tokens - cached, predicted)

    def remove(self, number: int) -> None:
        """A request is not there any more."""
        self.sent.pop(number, None)

    def note_first_token(self, number: int, now: float) -> None:
        """A request's first token was sent: what its prediction missed is learned from."""
        sent = self.sent.get(number)
        if sent is not None and sent.predicted is not None:
            self.overhead.learn(now - sent.predicted)
            sent.predicted = None

    def is_silent(self, now: float) -> bool:
        """Whether it has told its state, but not for long: its engine may have stopped."""
        return self.state is not None and now - self.taken > STALE_S

    def unseen(self) -> Iterator[_Sent]:
        """What this ingress sent and the state does not show yet."""
        load = self.state.load if self.state is not None else None
        newest = self.taken - _ON_THE_WAY_S - (load.unseen_s if load is not None else 0.0)
        for sent in reversed(self.sent.values()):
            if sent.at <= newest:
                return
            yield sent

    def sequences(self) -> Tally[str]:
        """Sequences that it has, by class."""
        counts = Tally(self.state.sequences if self.state is not None else {})
        for sent in self.unseen():
            counts[sent.demand.service_class] += sent.demand.sequences
        return counts

    def others_sequences(self, demand: Demand) -> int:
        """Sequences of the same class that it has for other keys, from this ingress."""
        return sum(
            sent.demand.sequences
            for sent in self.sent.values()
            if sent.demand.key != demand.key and sent.demand.service_class == demand.service_class
        )

    def outstanding_tokens(self) -> int:
        """Tokens that it still has to compute or generate."""
        load = self.state.load if self.state is not None else None
        if load is None:
            return sum(sent.demand.tokens for sent in self.sent.values())
        return load.prefill_tokens + load.output_tokens + sum(sent.demand.tokens for sent in self.unseen())

    def predict(self, demand: Demand, cached: int, now: float) -> Prediction | None:
        """When the first token of a request would be sent if it were dispatched now; None where nothing is known.

        `cached`: tokens of its prompt that are in the replica's prefix cache.
        """
        load = self.state.load if self.is_known(now) and self.state is not None else None
        if load is None or load.token_s <= 0:
            return None
        own = _prefill_s(load, demand.prompt_tokens - cached, cached, demand.sequences)
        ahead, share = self._ahead(load, demand.order, now)
        # Half of the step that is being computed.
        rest = 0.5 * max(load.decode_s, min(load.step_s, load.decode_s + load.ahead[-1]))
        work_s = _work_seconds(load, ahead + own, share, demand.order - now)
        room_s, takes_room = self._room_wait(load, demand)
        engine_s = rest + room_s + work_s
        wait_s = engine_s - max(own + load.decode_s, own / share)
        # What is due later is put off by this.
        put_off = own + sum(
            _prefill_s(load, one.uncached, one.demand.prompt_tokens - one.uncached, 1) for one in self.unseen()
        )
        slack = at_edge(load.slack, demand.order - self.taken) - (now - self.taken)
        ttft_s = now - demand.received + engine_s + self.overhead.seconds
        if demand.ttft_s is not None and takes_room:
            ttft_s = min(ttft_s, max(demand.ttft_s, ttft_s - room_s))
        return Prediction(ttft_s, wait_s, put_off / share > slack, takes_room)

    def _ahead(self, load: EngineLoad, order: float, now: float) -> tuple[float, float]:
        """Seconds of prefill that come before a deadline, and the share of time that prefill gets."""
        share = max(MIN_PREFILL_SHARE, 1 - load.decode_s / load.step_s) if load.step_s > 0 else 1.0
        done = share * max(0.0, now - self.taken)
        ahead = max(0.0, until(load.ahead, order - self.taken) - done)
        for sent in self.unseen():
            if sent.demand.order <= order:
                ahead += _prefill_s(load, sent.uncached, sent.demand.prompt_tokens - sent.uncached, 1)
        return ahead, share

    def _room_wait(self, load: EngineLoad, demand: Demand) -> tuple[float, bool]:
        """How long until there are a slot and KV blocks, at the rate at which answers end, and whether a request with a
        target would be given what others have, at the last moment."""
        is_promised = demand.ttft_s is not None
        unseen = [sent.demand for sent in self.unseen() if not is_promised or sent.demand.ttft_s is not None]
        waiting = load.waiting_promised if is_promised else load.waiting
        slots = load.running + waiting + sum(one.sequences for one in unseen) + demand.sequences - load.slots
        tokens = demand.prompt_tokens + sum(one.prompt_tokens for one in unseen) - load.kv_free_tokens
        if (slots <= 0 and tokens <= 0) or not load.running:
            return 0.0, False
        missing = max(slots / load.running, tokens / max(1, load.kv_tokens - load.kv_free_tokens))
        left_tokens = load.output_tokens / max(1, load.running + load.waiting)
        life_s = load.life_s or left_tokens * (load.step_s if load.prefill_tokens else load.decode_s)
        takes_room = is_promised and slots <= load.yielding and tokens <= load.yielding_tokens
        return missing * life_s, takes_room


def until(curve: Sequence[float], seconds: float) -> float:
    """What a curve over `DUE_EDGES_S`, such as `EngineLoad.ahead`, has reached by then.

    Between edges, in proportion.
    """
    index = bisect.bisect_left(DUE_EDGES_S, seconds)
    if index == 0:
        return curve[0]
    low, high = curve[index - 1], curve[index]
    begin, end = DUE_EDGES_S[index - 1], DUE_EDGES_S[index]
    return low + (1.0 if end == math.inf else (seconds - begin) / (end - begin)) * (high - low)


def at_edge(curve: Sequence[float], seconds: float) -> float:
    """A curve over `DUE_EDGES_S` at the first edge that is not before."""
    return curve[bisect.bisect_left(DUE_EDGES_S, seconds)]


def _work_seconds(load: EngineLoad, work: float, share: float, window: float) -> float:
    """How long so many seconds of prefill take, with what comes later and goes first.

    `share`: of time that prefill gets; `window`: until the work is due. Of what will come, that goes first which will
    have less time than is left of the window then.
    """
    least = max(work + load.decode_s, work / share)
    # What is computed in the next step is not overtaken any more.
    begin, left = load.step_s, work - max(0.0, load.step_s - load.decode_s)
    if window <= begin or left <= 0 or not load.arriving[-1]:
        return least
    step = (window - begin) / _WINDOW_STEPS
    for index in range(_WINDOW_STEPS):
        overtaking = until(load.arriving, window - begin - (index + 0.5) * step)
        rate = max(MIN_PREFILL_SHARE * share, share - overtaking)
        if left <= rate * step:
            return max(least, begin + index * step + left / rate)
        left -= rate * step
    return max(least, window + left / share)


def _prefill_s(load: EngineLoad, tokens: int, depth: int, sequences: int) -> float:
    pairs = tokens * (depth + tokens / 2) / max(1, sequences)
    return tokens * load.token_s + pairs * load.pair_s
