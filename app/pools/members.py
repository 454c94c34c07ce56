"""Which replicas the pools have, told by their routers to this process. Knows nothing of Ray.

Serve creates a pool's router (app.pools.router) itself, so it and the pool's client meet here.
"""

from __future__ import annotations

from collections.abc import Callable

Told = Callable[[frozenset[str]], None]

_members: dict[str, frozenset[str]] = {}
_told: dict[str, Told] = {}


def tell(pool: str, replica_ids: frozenset[str]) -> None:
    """A pool has these replicas now."""
    _members[pool] = replica_ids
    if pool in _told:
        _told[pool](replica_ids)


def watch(pool: str, told: Told) -> None:
    """Have `told` called with a pool's replicas, now and whenever they change; one per pool, the last."""
    _told[pool] = told
    if pool in _members:
        told(_members[pool])
