"""What an engine has to do, on its way from the engine core to the front end. Pure.

It travels as the counters do (app.engine.counters): in a mapping of strings to integers that vLLM's SchedulerStats has,
under names that begin with `sluice-load.`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from app.types import DUE_EDGES_S, EngineLoad

_PREFIX = "sluice-load."
_TIMES = ("decode_s", "step_s", "token_s", "pair_s", "life_s", "unseen_s")
_CURVES = {
    name: tuple(f"{_PREFIX}{name}{index}" for index in range(len(DUE_EDGES_S)))
    for name in ("ahead", "arriving", "slack")
}
_COUNTS = tuple(entry.name for entry in fields(EngineLoad) if entry.name not in (*_TIMES, *_CURVES))
# vLLM's serializer takes no integer above 2**64. A pair of tokens takes some femtoseconds, queues may take days.
_PER_SECOND = {"pair_s": 10**18}
_NANOSECONDS = 10**9
_MOST = 2**63 - 1
# How much longer than predicted prefills may take.
_CAUTION = 1.2
# Fewer ends tell nothing of how long sequences live.
_LEAST_ENDS = 4.0
# How long what came of late tells what will come.
ARRIVALS_MEMORY_S = 10.0


def encode_load(load: EngineLoad) -> dict[str, int]:
    """As vLLM's mapping carries it."""
    encoded = {_PREFIX + name: min(_MOST, int(getattr(load, name))) for name in _COUNTS}
    encoded.update({_PREFIX + name: _integer(getattr(load, name), _unit(name)) for name in _TIMES})
    for curve, names in _CURVES.items():
        values = zip(names, getattr(load, curve), strict=True)
        encoded.update({name: _integer(value, _NANOSECONDS) for name, value in values})
    return encoded


def decode_load(carried: Mapping[str, int]) -> EngineLoad | None:
    """What a mapping of vLLM's carries; None if no load."""
    if _PREFIX + _COUNTS[0] not in carried:
        return None
    values: dict[str, Any] = {name: carried[_PREFIX + name] for name in _COUNTS}
    values.update({name: carried[_PREFIX + name] / _unit(name) for name in _TIMES})
    values.update({curve: tuple(_seconds(carried[name]) for name in names) for curve, names in _CURVES.items()})
    return EngineLoad(**values)


def _unit(name: str) -> int:
    return _PER_SECOND.get(name, _NANOSECONDS)


def _integer(seconds: float, per_second: int) -> int:
    return _MOST if seconds == math.inf else min(_MOST, round(seconds * per_second))


def _seconds(nanoseconds: int) -> float:
    return math.inf if nanoseconds == _MOST else nanoseconds / _NANOSECONDS


def due_by_edges(work: Iterable[tuple[float, float]]) -> tuple[float, ...]:
    """`EngineLoad.ahead` for prefills, each as (seconds until it is due, seconds that it takes)."""
    sums = [0.0] * len(DUE_EDGES_S)
    for due, seconds in work:
        sums[bisect.bisect_left(DUE_EDGES_S, due)] += seconds
    return tuple(itertools.accumulate(sums))


def at_rest(load: EngineLoad, seconds: float) -> EngineLoad:
    """What becomes of a load when there has been nothing to do for so long."""
    fade = math.exp(-max(0.0, seconds) / ARRIVALS_MEMORY_S)
    return replace(
        load,
        running=0,
        waiting=0,
        waiting_promised=0,
        prefill_tokens=0,
        output_tokens=0,
        unseen_s=0.0,
        kv_free_tokens=load.kv_tokens,
        decode_s=0.0,
        yielding=0,
        yielding_tokens=0,
        ahead=EngineLoad().ahead,
        slack=EngineLoad().slack,
        arriving=tuple(rate * fade for rate in load.arriving),
    )


def slack_by_edges(work: Iterable[tuple[float, float, bool]], share: float) -> tuple[float, ...]:
    """`EngineLoad.slack` for prefills, each as (seconds until it is due, seconds that it takes, whether it counts).

    `share`: of time that prefill gets. Work is taken to be a little more than it is thought to be. Those that will be
    late whatever comes are not counted.
    """
    least = [math.inf] * len(DUE_EDGES_S)
    done = 0.0
    for due, seconds, counts in sorted(work):
        done += _CAUTION * seconds / share
        if counts and due >= done:
            index = bisect.bisect_left(DUE_EDGES_S, due)
            least[index] = min(least[index], due - done)
    return tuple(itertools.accumulate(reversed(least), min))[::-1]


class Arrivals:
    """Prefill work of late by how long its requests had when they came: `EngineLoad.arriving`.

    Of work that is `ARRIVALS_MEMORY_S` old, 1/e counts. One request tells nothing of whether another will come, so of
    what n requests brought, (n - 1) / n count.
    """

    def __init__(self) -> None:
        self._tokens = [0.0] * len(DUE_EDGES_S)
        self._pairs = [0.0] * len(DUE_EDGES_S)
        self._requests = [0.0] * len(DUE_EDGES_S)
        self._told = -math.inf
        self._since = -math.inf

    def add(self, window_s: float, tokens: int, pairs: float, part: float) -> None:
        """So many prompt tokens, and pairs of them, were computed for a request that had so many seconds: such a part
        of its prompt."""
        index = bisect.bisect_left(DUE_EDGES_S, window_s)
        self._tokens[index] += tokens
        self._pairs[index] += pairs
        self._requests[index] += part

    def per_second(self, now: float, token_s: float, pair_s: float) -> tuple[float, ...]:
        """Seconds of work per second."""
        if self._since == -math.inf:
            self._since = self._told = now
        keep = math.exp((self._told - now) / ARRIVALS_MEMORY_S)
        self._told = now
        self._tokens = [tokens * keep for tokens in self._tokens]
        self._pairs = [pairs * keep for pairs in self._pairs]
        self._requests = [requests * keep for requests in self._requests]
        # What a steady load of 1 per second would have added up to by now.
        full = ARRIVALS_MEMORY_S * (1 - math.exp((self._since - now) / ARRIVALS_MEMORY_S))
        if full < ARRIVALS_MEMORY_S / 10:
            return (0.0,) * len(DUE_EDGES_S)
        rates = (
            (tokens * token_s + pairs * pair_s) * max(0.0, 1 - 1 / requests) if requests else 0.0
            for tokens, pairs, requests in zip(self._tokens, self._pairs, self._requests, strict=True)
        )
        return tuple(itertools.accumulate(rate / full for rate in rates))


class Lives:
    """How long sequences have their slots: `EngineLoad.life_s`. What was `ARRIVALS_MEMORY_S` ago counts 1/e."""

    def __init__(self) -> None:
        self._ends = 0.0
        self._lived_s = 0.0
        self._told = -math.inf

    def end(self) -> None:
        """A sequence gave up its slot for good."""
        self._ends += 1

    def seconds(self, now: float, running: int) -> float:
        """The mean of late, 0.0 while too few have ended; so many have run since the last call."""
        if self._told > -math.inf:
            keep = math.exp((self._told - now) / ARRIVALS_MEMORY_S)
            self._lived_s = self._lived_s * keep + running * (now - self._told)
            self._ends *= keep
        self._told = now
        return self._lived_s / self._ends if self._ends >= _LEAST_ENDS else 0.0
