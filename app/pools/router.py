"""Chooses a replica within a pool: Serve's choice of the less busy of two, or the one that a call is meant for.

Relies on Ray Serve's RequestRouter API: `choose_replicas(candidate_replicas, pending_request)`, `pending_request.args`,
the mixins, and that a router without FIFOMixin gives each request the replica that was chosen for it.
"""

from __future__ import annotations

from typing import Any

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import LocalityMixin, MultiplexMixin, RequestRouter

from app.types import ToReplica


class PoolRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Routes a call whose first argument is a `ToReplica` to that replica, and all others as Serve does."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """The candidates for one request, in ranks."""
        wanted = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if isinstance(wanted, ToReplica):
            return [[one for one in candidate_replicas if one.replica_id.unique_id == wanted.replica_id]]
        chosen: list[list[Any]] = await PowerOfTwoChoicesRequestRouter.choose_replicas(
            self, candidate_replicas, pending_request
        )
        return chosen
