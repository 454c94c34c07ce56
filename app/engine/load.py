"""What an engine has to do, on its way from the engine core to the front end. Pure.

It travels as the counters do (app.engine.counters): in a mapping of strings to integers that vLLM's SchedulerStats has,
under names that begin with `sluice-load.`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from app.types import DUE_EDGES_S, EngineLoad

_PREFIX = "sluice-load."
_TIMES = ("decode_s", "step_s", "token_s", "pair_s")
_COUNTS = tuple(entry.name for entry in fields(EngineLoad) if entry.name not in (*_TIMES, "ahead"))
_AHEAD = tuple(f"{_PREFIX}ahead{index}" for index in range(len(DUE_EDGES_S)))
# vLLM's serializer takes no integer above 2**64. A pair of tokens takes some femtoseconds, queues may take days.
_PER_SECOND = {"pair_s": 10**18}
_NANOSECONDS = 10**9
_MOST = 2**63 - 1


def encode_load(load: EngineLoad) -> dict[str, int]:
    """As vLLM's mapping carries it."""
    encoded = {_PREFIX + name: min(_MOST, int(getattr(load, name))) for name in _COUNTS}
    encoded.update({_PREFIX + name: _integer(getattr(load, name), _unit(name)) for name in _TIMES})
    encoded.update({name: _integer(value, _NANOSECONDS) for name, value in zip(_AHEAD, load.ahead, strict=True)})
    return encoded


def decode_load(carried: Mapping[str, int]) -> EngineLoad | None:
    """What a mapping of vLLM's carries; None if no load."""
    if _AHEAD[0] not in carried:
        return None
    values: dict[str, Any] = {name: carried[_PREFIX + name] for name in _COUNTS}
    values.update({name: carried[_PREFIX + name] / _unit(name) for name in _TIMES})
    return EngineLoad(**values, ahead=tuple(carried[name] / _NANOSECONDS for name in _AHEAD))


def _unit(name: str) -> int:
    return _PER_SECOND.get(name, _NANOSECONDS)


def _integer(seconds: float, per_second: int) -> int:
    return min(_MOST, round(seconds * per_second))


def due_by_edges(work: Iterable[tuple[float, float]]) -> tuple[float, ...]:
    """`EngineLoad.ahead` for prefills, each as (seconds until it is due, seconds that it takes)."""
    sums = [0.0] * len(DUE_EDGES_S)
    for due, seconds in work:
        sums[bisect.bisect_left(DUE_EDGES_S, due)] += seconds
    for index in range(1, len(sums)):
        sums[index] += sums[index - 1]
    return tuple(sums)
