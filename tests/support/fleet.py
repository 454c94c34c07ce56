"""Replicas' states and requests for tests of routing, on a clock that starts at 0."""

from __future__ import annotations

import copy
from typing import Any

from app.config import SluiceConfig, parse_config
from app.engine.load import due_by_edges
from app.routing.placement import Fleet
from app.routing.replicas import Demand
from app.types import ClockReading, EngineLoad, ReplicaState

CLOCK = ClockReading("boot", 0.0)

_ENGINE = {"max_model_len": 8192, "max_num_seqs": 16, "kv_cache_memory_mib": 64}
_ARGS: dict[str, Any] = {
    "model": {"name": "m", "source": "/m"},
    "classes": {
        "interactive": {"service_tier": "priority", "targets": {"ttft_ms": 1000, "tpot_ms": 50}},
        "standard": {"service_tier": "default", "targets": {"ttft_ms": 4000}},
        "batch": {"service_tier": "flex"},
    },
    "routing": {
        "lengths": [{"name": "any"}],
        "rules": [{"class": "batch", "pool": "batch"}, {"pool": "interactive"}],
    },
    "pools": {name: {"executor": {"kind": "cpu"}, "engine": _ENGINE} for name in ("interactive", "batch")},
}


def fleet_config(**changes: Any) -> SluiceConfig:
    """Two pools and three classes; `changes`: by path, its parts separated by `__`."""
    args = copy.deepcopy(_ARGS)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = args
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    return parse_config(args)


def load(ahead_s: float = 0.0, **fields: Any) -> EngineLoad:
    """A replica that prefills 1,000 tokens a second and has so many seconds of prefill that are due at once."""
    base: dict[str, Any] = {
        "slots": 16, "kv_tokens": 100_000, "kv_free_tokens": 100_000, "step_s": 0.05, "token_s": 0.001,
        "prefill_tokens": round(ahead_s * 1000), "ahead": due_by_edges([(0.0, ahead_s)]),
    }  # fmt: skip
    return EngineLoad(**{**base, **fields})


def tell(
    fleet: Fleet, pool: str, replica_id: str, engine: EngineLoad | None, now: float = 0.0, **sequences: int
) -> None:
    """A replica's state; `sequences`: by class."""
    fleet.learn(pool, ReplicaState(replica_id, now, CLOCK, sequences, engine), now)


def a_fleet(config: SluiceConfig, **replicas: int) -> Fleet:
    """A fleet with idle replicas, by pool; their ids are `POOL-0` and so on. Without any, one in each pool."""
    fleet = Fleet(config)
    for pool, count in (replicas or dict.fromkeys(config.pools, 1)).items():
        ids = [f"{pool}-{index}" for index in range(count)]
        fleet.set_replicas(pool, ids)
        for replica_id in ids:
            tell(fleet, pool, replica_id, load())
    return fleet


def demand(
    service_class: str = "interactive", prompt_tokens: int = 100, received: float = 0.0, **fields: Any
) -> Demand:
    """A request of one of `fleet_config`'s classes."""
    ttft = {"interactive": 1.0, "standard": 4.0, "batch": None}[service_class]
    home = "batch" if service_class == "batch" else "interactive"
    other = "interactive" if home == "batch" else "batch"
    base: dict[str, Any] = {"ttft_s": ttft, "pools": (home, other), "output_tokens": 10}
    return Demand(service_class, prompt_tokens, received, **{**base, **fields})
